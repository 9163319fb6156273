//! The facts that sysfs and the partition table tell of a disk.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::areas::Areas;
use super::facts::{Facts, Looped, Partition, said};
use super::inode::identity_of_file;
use crate::locking::{self, LockMode};
use crate::opening::{self, Expected};

/// Sysfs counts partitions in sectors of this size, whatever the disk's own sector size is.
const SECTOR_BYTES: u64 = 512;

/// Returns the folder in sysfs of the disk with `metadata`.
pub(super) fn folder_of(metadata: &Metadata) -> PathBuf {
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

/// Collects the facts about the disk `file`.
pub(super) fn facts_of(file: &File) -> io::Result<Facts> {
    let size_bytes = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?;
    let folder = folder_of(&file.metadata()?);
    let (is_partition, whole) = (folder.join("partition").exists(), whole_of(&folder));
    Ok(Facts {
        said: said(|name| std::fs::read(whole.join(name)).ok()),
        looped: looped(&whole),
        partition: is_partition.then(|| partition(&folder, &whole)),
        content: Areas::of_file(file, size_bytes)?.content(),
        size_bytes,
    })
}

/// Returns whether the disk in `folder` is write-protected for all programs.
pub(super) fn is_read_only(folder: &Path) -> bool {
    number(&folder.join("ro")) == Some(1)
}

/// Returns the folder in sysfs of the whole disk of the disk or partition in `folder`.
fn whole_of(folder: &Path) -> PathBuf {
    // The link of a partition leads to its folder, which is inside the folder of its disk.
    if folder.join("partition").exists() { folder.join("..") } else { folder.to_owned() }
}

/// Returns the path of the file or disk behind the loop device in `folder`.
fn path_behind(folder: &Path) -> Option<PathBuf> {
    let path = std::fs::read_to_string(folder.join("loop/backing_file")).ok()?;
    Some(PathBuf::from(path.trim_end_matches('\n')))
}

/// Opens the file behind the loop device in `folder`, if it is still at its path.
fn file_behind(folder: &Path) -> Option<File> {
    let file = open(&path_behind(folder)?)?;
    let is_file = !file.metadata().ok()?.file_type().is_block_device();
    is_file.then_some(file)
}

/// Locks the file behind the disk or partition in `folder` of sysfs, if that is one of a loop
/// device. The lock excludes all others if the device is the whole file; parts of a file may be
/// used beside each other. Returns `None` without such a file, or if its file system has no locks.
///
/// # Errors
/// Another program has the file, or a part of it, locked.
pub(super) fn lock_behind(folder: &Path) -> io::Result<Option<File>> {
    let whole = whole_of(folder);
    let Some(file) = file_behind(&whole) else { return Ok(None) };
    let is_set = |name| number(&whole.join("loop").join(name)).is_some_and(|it| it != 0);
    let is_part = folder.join("partition").exists() || is_set("offset") || is_set("sizelimit");
    let mode = if is_part { LockMode::Shared } else { LockMode::Exclusive };
    match locking::lock(&file, mode) {
        Ok(()) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
        Err(_) => Ok(None),
    }
}

/// Returns the name of a loop device in `folder` of sysfs that may write to the file with
/// `metadata`.
pub(super) fn loop_over(metadata: &Metadata, folder: &Path) -> Option<String> {
    let is_it = |path: &Path| {
        let found = std::fs::metadata(path).ok();
        found.is_some_and(|it| (it.dev(), it.ino()) == (metadata.dev(), metadata.ino()))
    };
    let disks = std::fs::read_dir(folder).ok()?.filter_map(Result::ok);
    let writes = |disk: &std::fs::DirEntry| {
        let path = path_behind(&disk.path());
        path.is_some_and(|path| is_it(&path)) && !is_read_only(&disk.path())
    };
    disks.filter(writes).find_map(|disk| disk.file_name().into_string().ok())
}

/// Returns the file behind the loop device in `folder`, if it is still at its path.
fn looped(folder: &Path) -> Option<Looped> {
    let file = file_behind(folder)?;
    let metadata = file.metadata().ok()?;
    let identity = identity_of_file(&file, &metadata).ok()?;
    let offset = number(&folder.join("loop/offset")).unwrap_or_default();
    Some(Looped { identity, offset })
}

/// Opens the file or disk at a path from the kernel. The path may name something else by now.
fn open(path: &Path) -> Option<File> {
    opening::open(path, Expected::Blocks, File::options().read(true)).ok()
}

/// Describes the partition in `folder` of the disk in `whole`.
fn partition(folder: &Path, whole: &Path) -> Partition {
    let number_of = |name| number(&folder.join(name)).unwrap_or_default();
    let partition = u32::try_from(number_of("partition")).unwrap_or_default();
    let uuid = event_value(folder, "PARTUUID").or_else(|| uuid_in_table(whole, partition));
    Partition { number: partition, start: number_of("start") * SECTOR_BYTES, uuid }
}

/// Returns the PARTUUID of the partition `number`, from the table on the disk in `whole`. Kernels
/// before 6.12 do not tell it in sysfs.
fn uuid_in_table(whole: &Path, number: u32) -> Option<String> {
    let sector = self::number(&whole.join("queue/logical_block_size"))?;
    let file = open(&Path::new("/dev").join(event_value(whole, "DEVNAME")?))?;
    let found = file.metadata().ok().filter(|it| it.file_type().is_block_device())?;
    if folder_of(&found).canonicalize().ok()? != whole.canonicalize().ok()? {
        return None;
    }
    let mut header = [0; 92];
    file.read_exact_at(&mut header, sector).ok()?;
    if header.starts_with(b"EFI PART") {
        uuid_in_gpt(&file, &header, sector, number)
    } else {
        number_in_mbr(&file, number)
    }
}

fn uuid_in_gpt(file: &File, header: &[u8; 92], sector: u64, number: u32) -> Option<String> {
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap_or_default());
    let first = u64::from_le_bytes(header[72..80].try_into().ok()?);
    let (entries, entry_bytes) = (word(80), word(84));
    let index = number.checked_sub(1).filter(|index| *index < entries)?;
    let at = first.checked_mul(sector)?;
    let at = at.checked_add(u64::from(index) * u64::from(entry_bytes))?.checked_add(16)?;
    let mut uuid = [0; 16];
    file.read_exact_at(&mut uuid, at).ok()?;
    (uuid != [0; 16]).then(|| Uuid::from_bytes_le(uuid).to_string())
}

fn number_in_mbr(file: &File, number: u32) -> Option<String> {
    let mut sector = [0; 512];
    file.read_exact_at(&mut sector, 0).ok()?;
    let disk = u32::from_le_bytes(sector[440..444].try_into().ok()?);
    (sector.ends_with(b"\x55\xaa") && disk != 0).then(|| format!("{disk:08x}-{number:02x}"))
}

/// Returns the value of `key` in the event that the kernel sent for the disk in `folder`.
fn event_value(folder: &Path, key: &str) -> Option<String> {
    let event = std::fs::read_to_string(folder.join("uevent")).ok()?;
    let of_line = |line: &str| line.strip_prefix(key)?.strip_prefix('=').map(str::to_owned);
    event.lines().find_map(of_line)
}

/// Reads the number in a file of sysfs.
pub(super) fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_uuid_of_a_partition_is_read_from_its_table() {
        for sector in [512, 4096] {
            let file = tempfile::tempfile().unwrap();
            let mut header = [0; 92];
            header[..8].copy_from_slice(b"EFI PART");
            header[72..80].copy_from_slice(&2_u64.to_le_bytes());
            header[80..84].copy_from_slice(&4_u32.to_le_bytes());
            header[84..88].copy_from_slice(&128_u32.to_le_bytes());
            let uuid = Uuid::from_u128(0x0fc6_3daf_8483_4772_8e79_3d69_d847_7de4);
            file.set_len(1 << 20).unwrap();
            file.write_all_at(&uuid.to_bytes_le(), 2 * sector + 128 + 16).unwrap();
            let read = |number| uuid_in_gpt(&file, &header, sector, number);
            assert_eq!(read(2).as_deref(), Some("0fc63daf-8483-4772-8e79-3d69d8477de4"));
            assert_eq!((read(1), read(0), read(5)), (None, None, None));
            header[72..80].fill(0xFF);
            assert_eq!(uuid_in_gpt(&file, &header, sector, 2), None, "a hostile table");
        }
    }

    /// Makes the folder of a loop device in `sysfs` over the file `path`.
    fn loop_device(sysfs: &Path, name: &str, path: &Path, is_read_only: bool) -> PathBuf {
        let folder = sysfs.join(name);
        std::fs::create_dir_all(folder.join("loop")).unwrap();
        let behind = format!("{}\n", path.display());
        std::fs::write(folder.join("loop/backing_file"), behind).unwrap();
        std::fs::write(folder.join("ro"), if is_read_only { "1\n" } else { "0\n" }).unwrap();
        folder
    }

    #[test]
    fn a_loop_device_that_writes_to_a_file_is_found_by_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let [image, other] = ["image", "other"].map(|name| dir.path().join(name));
        std::fs::write(&image, [0; 4096]).unwrap();
        std::fs::write(&other, [0; 4096]).unwrap();
        let sysfs = dir.path().join("block");
        std::fs::create_dir_all(sysfs.join("sda")).unwrap();
        let found = || loop_over(&image.metadata().unwrap(), &sysfs);
        loop_device(&sysfs, "loop0", &other, false);
        loop_device(&sysfs, "loop1", &image, true);
        loop_device(&sysfs, "loop2", Path::new("/nowhere (deleted)"), false);
        assert_eq!(found(), None);
        let link = dir.path().join("link");
        std::fs::hard_link(&image, &link).unwrap();
        loop_device(&sysfs, "loop3", &link, false);
        assert_eq!(found().as_deref(), Some("loop3"));
    }

    #[test]
    fn a_whole_loop_device_excludes_all_users_of_its_file_and_parts_exclude_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, [0; 4096]).unwrap();
        let whole = loop_device(dir.path(), "loop0", &image, false);
        let [one, two] = ["loop1", "loop2"].map(|name| {
            let part = loop_device(dir.path(), name, &image, false);
            std::fs::write(part.join("loop/offset"), "1024\n").unwrap();
            part
        });
        let lock = lock_behind(&whole).unwrap().expect("the file is there");
        assert!(lock_behind(&whole).is_err() && lock_behind(&one).is_err());
        drop(lock);
        let locks = [&one, &two].map(|part| lock_behind(part).unwrap().expect("both parts"));
        assert!(lock_behind(&whole).is_err());
        drop(locks);
        let file = File::open(&image).unwrap();
        locking::lock(&file, LockMode::Exclusive).unwrap();
        assert!(lock_behind(&whole).is_err() && lock_behind(&two).is_err());
        assert!(lock_behind(&dir.path().join("sda")).unwrap().is_none(), "no loop device");
    }

    #[test]
    fn the_number_of_a_partition_is_read_from_an_mbr_that_has_one() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(512).unwrap();
        file.write_all_at(b"\x55\xaa", 510).unwrap();
        assert_eq!(number_in_mbr(&file, 1), None);
        file.write_all_at(&0xdead_beef_u32.to_le_bytes(), 440).unwrap();
        assert_eq!(number_in_mbr(&file, 1).as_deref(), Some("deadbeef-01"));
    }
}
