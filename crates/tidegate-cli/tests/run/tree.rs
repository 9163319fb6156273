//! What a directory holds, as text to compare.

use std::fs::Metadata;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// A line for each entry below `dir`: path, type, mode, owner, links, size and a hash of the
/// content. No times.
pub(crate) fn listing(dir: &Path) -> String {
    let mut lines = Vec::new();
    collect(dir, dir, &mut lines);
    lines.sort();
    lines.join("\n")
}

fn collect(root: &Path, dir: &Path, lines: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).expect("it is a directory") {
        let path = entry.expect("the directory can be read").path();
        let metadata = path.symlink_metadata().expect("nobody changes it any more");
        let name = path.strip_prefix(root).expect("it is below").display();
        let (mode, uid, gid) = (metadata.mode(), metadata.uid(), metadata.gid());
        lines.push(format!("{name} {mode:o} {uid}:{gid} {}", content(&path, &metadata)));
        if metadata.is_dir() {
            collect(root, &path, lines);
        }
    }
}

fn content(path: &Path, metadata: &Metadata) -> String {
    let kind = metadata.file_type();
    if kind.is_file() {
        format!("links {} size {} hash {:016x}", metadata.nlink(), metadata.len(), hash(path))
    } else if kind.is_symlink() {
        format!("-> {}", std::fs::read_link(path).expect("it is a symbolic link").display())
    } else if kind.is_dir() || kind.is_fifo() || kind.is_socket() {
        String::new()
    } else {
        panic!("{} is a {kind:?}", path.display())
    }
}

fn hash(path: &Path) -> u64 {
    let mut file =
        std::fs::File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut hasher = DefaultHasher::new();
    let mut bytes = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut bytes).expect("the file can be read");
        if count == 0 {
            return hasher.finish();
        }
        // Byte by byte in meaning: where a read ends must not matter.
        bytes[..count].iter().for_each(|byte| byte.hash(&mut hasher));
    }
}
