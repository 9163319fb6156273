//! `file:PATH`: a file or a block device.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use super::areas::Areas;
use super::disk;
use super::facts::identity_of;
use super::loops::{self, DISKS, Part};
use super::observe::Observer;
use super::sysfs::{folder_of, is_read_only};
use super::{BackingError, Guard, OpenBacking, Opening, Place, Scheme};
use crate::device::BLOCK_BYTES_MIN;
use crate::device::file::{FileDevice, FileOptions};
use crate::locking::{self, LockMode};
use crate::opening::{self, Expected};
use crate::pool::{Glance, glance};

/// `file:PATH`, `file:///PATH` or a plain path.
pub(super) static FILE: Scheme = Scheme {
    name: "file",
    syntax: "file:PATH",
    about: "a file or a block device; file:///PATH and a plain path name it too",
    example: "file:/srv/disk.img",
    identified_by: "a file by its file system and inode, a disk by what it says of itself or else \
                    by the UUID of what lies on it; not by its path",
    parse,
    place: |rest| Some(Place::File(rest.into())),
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

fn open(rest: &str, opening: &Opening<'_>) -> Result<OpenBacking, BackingError> {
    let url = || format!("file:{rest}");
    let failed = |action| move |source| BackingError::Io { action, url: url(), source };
    let path = Path::new(rest);
    let mut options = File::options();
    let options = options.read(true).write(true);
    let lock = opening::open(path, Expected::Blocks, options).map_err(failed("open"))?;
    // A log in its own file would overwrite its records.
    if is_at(&lock, opening.pool).map_err(failed("inspect"))? {
        return Err(BackingError::IsPool { url: url() });
    }
    match locking::lock(&lock, LockMode::Exclusive) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(BackingError::InUse { url: url() });
        }
        locked => locked.map_err(failed("lock"))?,
    }
    let behind = match guard_loops(&lock).map_err(failed("inspect"))? {
        Behind::Locked(behind) => behind,
        Behind::InUse => return Err(BackingError::InUse { url: url() }),
        Behind::Looped(reason) => return Err(BackingError::Unfit { url: url(), reason }),
    };
    expect_writable(&lock, rest)?;
    let found = glance(&lock).map_err(failed("read"))?;
    expect_whole_blocks(&lock, found)
        .map_err(|reason| BackingError::Unfit { url: url(), reason })?;
    let (block_bytes, table_sector_bytes) =
        inspect(&lock, opening.block_bytes).map_err(failed("read"))?;
    let observer = Observer::of_file(&lock).map_err(failed("identify"))?;
    let seen = observer.observe().map_err(failed("read"))?;
    let device = FileDevice::open(
        path,
        &FileOptions {
            block_bytes,
            as_backing: true,
            // Logs and caches keep their writes until a flush succeeds.
            reopens: true,
            identify: Some(|disk| identity_of(&disk::facts_of(disk).ok()?)),
            ..FileOptions::default()
        },
    )?;
    let name = std::path::absolute(path).map_err(failed("name"))?;
    let holds = Some(found).filter(|found| !matches!(found, Glance::Unknown(_)));
    Ok(OpenBacking {
        device: Arc::new(device),
        // The name as the user gave it: a link that follows the disk finds it under its next name.
        name: name.as_os_str().as_bytes().to_vec(),
        holds,
        guard: Some(Guard { lock, behind }),
        observer,
        seen,
        table_sector_bytes,
    })
}

/// The other way to the bytes of a backing, beside its own node.
enum Behind {
    /// The file behind a loop device, which is locked; `None` for other backings.
    Locked(Option<File>),
    /// Another program has the file behind a loop device locked.
    InUse,
    /// A loop device may write to the backing's bytes; the reason says which.
    Looped(String),
}

/// Looks for loop devices that may write to the bytes of `file`, and locks the file behind it if it
/// is a loop device itself.
fn guard_loops(file: &File) -> io::Result<Behind> {
    let metadata = file.metadata()?;
    let folder = folder_of(&metadata);
    let is_disk = metadata.file_type().is_block_device();
    let behind = if is_disk { Part::behind(file, &folder) } else { None };
    let parts = [Some(Part::whole(&metadata)), behind];
    let over = |part: &Part| part.loop_over(Path::new(DISKS), &folder, false);
    if let Some(name) = parts.iter().flatten().find_map(over) {
        let other = if is_disk { "" } else { ", or name the loop device as the backing" };
        return Ok(Behind::Looped(in_loop(&name, other)));
    }
    let locked = if is_disk { loops::lock_behind(file, &folder) } else { Ok(None) };
    Ok(locked.map_or(Behind::InUse, Behind::Locked))
}

/// Returns the reason why a backing is refused whose bytes the loop device `name` has, too. The
/// user may do something else (`other`) than detach it.
fn in_loop(name: &str, other: &str) -> String {
    format!(
        "the loop device /dev/{name} has its bytes too, by which other programs or a mounted file \
         system may write to them; unmount and detach that (`losetup -d /dev/{name}`){other}"
    )
}

/// Refuses a write-protected disk: the kernel opens it for writing nevertheless.
fn expect_writable(file: &File, rest: &str) -> Result<(), BackingError> {
    let is_block = |it: &Metadata| it.file_type().is_block_device();
    let metadata = file.metadata().ok().filter(is_block);
    if !metadata.is_some_and(|it| is_read_only(&folder_of(&it))) {
        return Ok(());
    }
    let reason = "it is write-protected, but a backing is written; `blockdev --setrw` makes it \
                  writable where the disk itself is";
    Err(BackingError::Unfit { url: format!("file:{rest}"), reason: reason.into() })
}

/// Refuses a file with bytes after its last block. Advises to change its size only if the content
/// `found` in it is an image of a disk: any other file may be named by mistake.
///
/// # Errors
/// Returns the reason.
fn expect_whole_blocks(file: &File, found: Glance) -> Result<(), String> {
    let size = file.metadata().map_or(0, |it| it.len());
    let least = u64::from(BLOCK_BYTES_MIN);
    if size < least || size.is_multiple_of(least) {
        return Ok(());
    }
    let cure = match found {
        Glance::Unknown(content) if content.is_disk_image() => {
            let grown = size.next_multiple_of(least);
            format!("its last bytes are in no block, `truncate -s {grown}` makes it one")
        }
        _ => "it is no image of a disk in whole blocks".into(),
    };
    Err(format!("it has {size} bytes, expected a multiple of {least}: {cure}"))
}

/// Returns the block size to use, unless it is the device's own, and the sector size of the GPT on
/// the backing.
fn inspect(file: &File, block_bytes: Option<u32>) -> io::Result<(Option<u32>, Option<u32>)> {
    let size_bytes = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?;
    let sector = Areas::of_file(file, size_bytes)?.table_sector_bytes();
    // An image of a disk has the sector size of that disk.
    let of_image = sector.filter(|_| file.metadata().is_ok_and(|it| it.is_file()));
    Ok((block_bytes.or(of_image), sector))
}

/// Returns whether `path` names the open `file`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let number = |found: &Metadata| (found.dev(), found.ino());
    Ok(number(&file.metadata()?) == number(&std::fs::metadata(path)?))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn open_at(path: &Path) -> Result<OpenBacking, BackingError> {
        open(path.to_str().unwrap(), &Opening { pool: Path::new("/proc/self"), block_bytes: None })
    }

    #[test]
    fn a_backing_is_called_by_the_link_that_was_given() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, link) = (dir.path().join("sda"), dir.path().join("by-id"));
        std::fs::write(&disk, [0; 8192]).unwrap();
        std::os::unix::fs::symlink(&disk, &link).unwrap();
        let backing = open_at(&link).unwrap();
        assert_eq!(backing.name, link.as_os_str().as_bytes());
    }

    #[test]
    fn opening_a_backing_leaves_no_trace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, [0; 8192]).unwrap();
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        drop(open_at(&path).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().modified().unwrap(), time);
    }

    #[test]
    fn every_byte_of_an_image_is_in_a_block_or_the_image_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        for (size, block_bytes) in
            [(1 << 20, 4096), ((1 << 20) + 512, 512), ((1 << 20) + 2048, 2048), (1536, 512)]
        {
            File::create(&path).unwrap().set_len(size).unwrap();
            let geometry = open_at(&path).unwrap().device.geometry();
            assert_eq!((geometry.block_bytes, geometry.size_bytes()), (block_bytes, size));
        }
        for size in [(1 << 20) + 1, (1 << 20) + 511, 513] {
            File::create(&path).unwrap().set_len(size).unwrap();
            let error = open_at(&path).err().expect("refused").to_string();
            let grown = size.next_multiple_of(512).to_string();
            assert!(error.contains(&grown), "{size}: {error}");
        }
    }

    /// A file that was named by mistake must not be changed.
    #[test]
    fn only_an_image_of_a_disk_gets_the_advice_to_change_its_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let refusal = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            open_at(&path).err().expect("refused").to_string()
        };
        for content in [&b"root:x:0:0:root:/root:/bin/bash\n".repeat(41)[..], &[0xB7; 1535]] {
            let error = refusal(content);
            assert!(error.contains("no image of a disk") && !error.contains("truncate"), "{error}");
        }
        let mut image = vec![0xB7; 1535];
        image[510..512].copy_from_slice(b"\x55\xaa");
        assert!(refusal(&image).contains("`truncate -s 1536`"));
    }

    #[test]
    fn a_pool_keeps_its_block_size_and_an_image_that_of_its_partition_table() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let mut image = vec![0; 1 << 20];
        let block_bytes = |image: &[u8], asked| {
            std::fs::write(&path, image).unwrap();
            let opening = Opening { pool: Path::new("/proc/self"), block_bytes: asked };
            let backing = open(path.to_str().unwrap(), &opening).unwrap();
            backing.device.geometry().block_bytes
        };
        assert_eq!(block_bytes(&image, None), 4096);
        assert_eq!(block_bytes(&image, Some(512)), 512);
        image[512..520].copy_from_slice(b"EFI PART");
        assert_eq!(block_bytes(&image, None), 512);
        assert_eq!(block_bytes(&image, Some(4096)), 4096);
    }
}
