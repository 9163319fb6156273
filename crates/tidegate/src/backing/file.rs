//! `file:PATH`: a file or a block device.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::{BackingError, OpenBacking, Scheme};
use crate::device::file::{FileDevice, FileOptions};
use crate::log::recover::identity_of;
use crate::log::{FileSystemId, identity};
use crate::pool::{Glance, glance};

/// Keeps identities without a handle apart from those with one.
const NO_HANDLE: i32 = -1;
/// Keeps identities of disks apart from those of files.
const DISK: i32 = -2;
/// Neither of them has the UUID of a file system.
const NO_FILE_SYSTEM: FileSystemId = [0; 16];

/// `file:PATH`, `file:///PATH` or a plain path.
pub(super) static FILE: Scheme = Scheme {
    name: "file",
    syntax: "file:PATH",
    about: "a file or a block device; file:///PATH and a plain path name it too",
    example: "file:/srv/disk.img",
    identified_by: "a file by its file system and inode, a disk by what it says of itself; not \
                    by its path",
    parse,
    open,
};

fn parse(rest: &str) -> Result<String, String> {
    match rest.strip_prefix("//") {
        None if rest.is_empty() => Err("the path is missing".into()),
        None => Ok(rest.to_owned()),
        Some(path) if path.starts_with('/') => Ok(path.to_owned()),
        Some(_) => Err(format!("`file:{rest}` names another machine")),
    }
}

fn open(rest: &str, pool: &Path) -> Result<OpenBacking, BackingError> {
    let url = || format!("file:{rest}");
    let failed = |action| move |source| BackingError::Io { action, url: url(), source };
    let path = Path::new(rest);
    let lock = File::options().read(true).write(true).open(path).map_err(failed("open"))?;
    // A log would write its records over itself.
    if is_at(&lock, pool).map_err(failed("inspect"))? {
        return Err(BackingError::IsPool { url: url() });
    }
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Err(BackingError::InUse { url: url() }),
        locked => locked.map_err(|errno| failed("lock")(errno.into()))?,
    }
    // Logs and caches keep what they wrote until a flush has succeeded.
    let options = FileOptions { reopens: true, ..FileOptions::default() };
    let device = FileDevice::open(path, &options)?;
    let (identity, name) = identify(path).map_err(failed("identify"))?;
    let holds = glance(&lock).map_err(failed("read"))?;
    let holds = Some(holds).filter(|found| !matches!(found, Glance::Unknown(_)));
    Ok(OpenBacking { device: Arc::new(device), identity, name, holds, guard: Some(lock) })
}

/// Whether `file` is open at `path`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let number = |found: &Metadata| (found.dev(), found.ino());
    Ok(number(&file.metadata()?) == number(&std::fs::metadata(path)?))
}

/// What tells the file or disk at `path` from all others, and its absolute path.
fn identify(path: &Path) -> io::Result<(u64, Vec<u8>)> {
    let path = path.canonicalize()?;
    let file = File::open(&path)?;
    let metadata = file.metadata()?;
    let identity = if metadata.file_type().is_block_device() {
        identity_of_disk(&path, &metadata)
    } else {
        identity_of(&file).or_else(|_| identity_without_handle(&metadata))?
    };
    Ok((identity, path.as_os_str().as_bytes().to_vec()))
}

/// For file systems without handles: the file's number and the moment of its creation.
fn identity_without_handle(metadata: &Metadata) -> io::Result<u64> {
    let created = metadata.created()?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let numbers = [u128::from(metadata.ino()), created.as_nanos()];
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    Ok(identity(&NO_FILE_SYSTEM, NO_HANDLE, &bytes))
}

/// What a disk says of itself, after the next boot too; its path where it says nothing.
fn identity_of_disk(path: &Path, metadata: &Metadata) -> u64 {
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    let folder = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let names =
        ["dm/uuid", "md/uuid", "uuid", "wwid", "device/wwid", "serial", "loop/backing_file"];
    let said = names.iter().find_map(|name| {
        let text = std::fs::read(folder.join(name)).ok()?;
        (!text.trim_ascii().is_empty()).then_some(text)
    });
    let partition = std::fs::read(folder.join("partition")).unwrap_or_default();
    let name = said.unwrap_or_else(|| path.as_os_str().as_bytes().to_vec());
    identity(&NO_FILE_SYSTEM, DISK, &[name, partition].concat())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_backing_keeps_its_identity_when_it_is_renamed_and_shares_it_with_none() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two, three] = ["one", "two", "three"].map(|name| dir.path().join(name));
        std::fs::write(&one, [0; 4096]).unwrap();
        std::fs::write(&two, [0; 4096]).unwrap();
        let (first, _) = identify(&one).unwrap();
        assert_ne!(first, identify(&two).unwrap().0);
        std::fs::rename(&one, &three).unwrap();
        let (renamed, path) = identify(&three).unwrap();
        assert_eq!(renamed, first);
        assert!(path.ends_with(b"/three"));
        let metadata = std::fs::metadata(&three).unwrap();
        let weak = identity_without_handle(&metadata).unwrap();
        assert_ne!(weak, identity_without_handle(&std::fs::metadata(&two).unwrap()).unwrap());
    }
}
