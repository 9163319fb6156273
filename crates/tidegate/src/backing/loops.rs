//! Loop devices: the file or disk behind one, and the bytes of it that the device has.
//!
//! Invariants:
//! 1. The path in sysfs leads to the file only in the mount namespace that attached it. So a file
//!    at that path counts as the one behind a device only if it has the numbers that the kernel
//!    tells of that file.
//! 2. Loop devices may have common bytes of one file. So a backing is refused while another loop
//!    device may write to its bytes.

#![allow(unsafe_code)] // The edge to the kernel: a request that no safe crate has.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::ioctl::{Getter, Opcode, ioctl};

use super::facts::Looped;
use super::inode::identity_of_file;
use super::sysfs::{SECTOR_BYTES, is_read_only, number, open, whole_of};
use crate::locking::{self, LockMode};

/// The folder of sysfs with all disks.
pub(super) const DISKS: &str = "/sys/block";

const LOOP_GET_STATUS64: Opcode = 0x4C05;

/// `struct loop_info64`.
#[repr(C)]
struct Status {
    device: u64,
    inode: u64,
    disk: u64,
    offset: u64,
    limit: u64,
    numbers: [u32; 4],
    names: [[u8; 64]; 2],
    key: [u8; 32],
    init: [u64; 2],
}

const _: () = assert!(size_of::<Status>() == 232);

/// A file or a disk, as the kernel numbers it until the next boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    /// The device and the inode of a file.
    File(u64, u64),
    /// The number of a disk.
    Disk(u64),
}

impl Number {
    fn of(metadata: &Metadata) -> Self {
        if metadata.file_type().is_block_device() {
            Self::Disk(metadata.rdev())
        } else {
            Self::File(metadata.dev(), metadata.ino())
        }
    }

    /// Returns the number of the file or disk behind the open loop device `device`, or behind the
    /// loop device of which it is a partition.
    fn behind(device: &File) -> io::Result<Self> {
        // SAFETY: `LOOP_GET_STATUS64` writes a `struct loop_info64`, which `Status` mirrors, and
        // whose fields may have any bits.
        let request = unsafe { Getter::<LOOP_GET_STATUS64, Status>::new() };
        // SAFETY: `request` has the opcode and the structure of `LOOP_GET_STATUS64`.
        let told = unsafe { ioctl(device, request) }?;
        Ok(if told.disk == 0 { Self::File(told.device, told.inode) } else { Self::Disk(told.disk) })
    }
}

/// Bytes of a file or a disk.
pub(super) struct Part {
    of: Number,
    bytes: Range<u64>,
}

impl Part {
    /// Returns all bytes of the file or disk with `metadata`.
    pub(super) fn whole(metadata: &Metadata) -> Self {
        Self { of: Number::of(metadata), bytes: 0..u64::MAX }
    }

    /// Returns the bytes behind the disk or partition `file` in `folder` of sysfs. Returns `None`
    /// if that is none of a loop device.
    pub(super) fn behind(file: &File, folder: &Path) -> Option<Self> {
        let whole = whole_of(folder);
        path_behind(&whole)?;
        Some(Self { of: Number::behind(file).ok()?, bytes: bytes_behind(folder, &whole) })
    }

    /// Returns the name of a loop device in `disks`, a folder of sysfs, that has bytes of this
    /// part, other than the one with the disk or partition in `own`. Names read-only devices only
    /// with `also_read_only`.
    pub(super) fn loop_over(
        &self,
        disks: &Path,
        own: &Path,
        also_read_only: bool,
    ) -> Option<String> {
        let own = whole_of(own).canonicalize().ok();
        let is_over = |disk: &PathBuf| {
            let Some(path) = path_behind(disk) else { return false };
            let bytes = bytes_behind(disk, disk);
            bytes.start < self.bytes.end
                && self.bytes.start < bytes.end
                && (also_read_only || !is_read_only(disk))
                && disk.canonicalize().ok() != own
                && number_behind(disk, &path) == Some(self.of)
        };
        let disks = std::fs::read_dir(disks).ok()?.filter_map(Result::ok);
        let found = disks.map(|disk| disk.path()).find(is_over)?;
        Some(found.file_name()?.to_string_lossy().into_owned())
    }
}

/// Returns the path of a loop device over the open `file`, read-only or not.
///
/// # Errors
/// The file cannot be inspected.
pub fn loop_over(file: &File) -> io::Result<Option<PathBuf>> {
    let whole = Part::whole(&file.metadata()?);
    let name = whole.loop_over(Path::new(DISKS), Path::new(""), true);
    Ok(name.map(|name| Path::new("/dev").join(name)))
}

/// Returns the number of the file or disk behind the loop device in `folder`, whose path is `path`.
/// Without the node of the device, the path has to tell the file.
fn number_behind(folder: &Path, path: &Path) -> Option<Number> {
    let told = || Number::behind(&node_of(folder)?).ok();
    told().or_else(|| Some(Number::of(&std::fs::metadata(path).ok()?)))
}

/// Opens the node of the disk in `folder`, if it is in `/dev` under its name.
fn node_of(folder: &Path) -> Option<File> {
    let node = open(&Path::new("/dev").join(folder.file_name()?))?;
    let device = node.metadata().ok()?.rdev();
    let numbers = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let is_it = std::fs::read_to_string(folder.join("dev")).ok()?.trim() == numbers;
    is_it.then_some(node)
}

/// Returns the path of the file or disk behind the loop device in `folder`.
fn path_behind(folder: &Path) -> Option<PathBuf> {
    let path = std::fs::read_to_string(folder.join("loop/backing_file")).ok()?;
    Some(PathBuf::from(path.trim_end_matches('\n')))
}

/// Returns the bytes of the file or disk behind a loop device that the disk or partition in
/// `folder` has; `whole` is the folder of the whole device.
fn bytes_behind(folder: &Path, whole: &Path) -> Range<u64> {
    let bytes_of = |name| number(&folder.join(name)).map(|it| it.saturating_mul(SECTOR_BYTES));
    let start = offset(whole).saturating_add(bytes_of("start").unwrap_or_default());
    start..bytes_of("size").map_or(u64::MAX, |size| start.saturating_add(size))
}

/// Returns where in its file the loop device in `folder` begins.
fn offset(folder: &Path) -> u64 {
    number(&folder.join("loop/offset")).unwrap_or_default()
}

/// Opens the file behind the loop device in `whole`, if it is still at its path; `device` is the
/// open device or a partition.
fn file_behind(device: &File, whole: &Path) -> Option<File> {
    let file = open(&path_behind(whole)?)?;
    let found = Number::of(&file.metadata().ok()?);
    let is_it = matches!(found, Number::File(..)) && Number::behind(device).ok()? == found;
    is_it.then_some(file)
}

/// Opens the file behind the disk `device` in `folder`, as [`file_behind`], if the disk is the
/// whole file.
pub(super) fn whole_file_behind(device: &File, folder: &Path) -> Option<File> {
    if is_part(folder) { None } else { file_behind(device, folder) }
}

/// Returns whether the disk in `folder` is a partition, or a loop device over a part of its file.
fn is_part(folder: &Path) -> bool {
    let is_set = |name| number(&whole_of(folder).join("loop").join(name)).is_some_and(|it| it != 0);
    folder.join("partition").exists() || is_set("offset") || is_set("sizelimit")
}

/// Locks the file behind the disk or partition `device` in `folder` of sysfs, if that is one of a
/// loop device. The lock excludes all others if the device is the whole file; parts of a file may
/// be used beside each other. Returns `None` without such a file, or if its file system has no
/// locks.
///
/// # Errors
/// Another program has the file, or a part of it, locked.
pub(super) fn lock_behind(device: &File, folder: &Path) -> io::Result<Option<File>> {
    let file = file_behind(device, &whole_of(folder));
    file.map_or(Ok(None), |file| lock(file, is_part(folder)))
}

fn lock(file: File, is_part: bool) -> io::Result<Option<File>> {
    let mode = if is_part { LockMode::Shared } else { LockMode::Exclusive };
    match locking::lock(&file, mode) {
        Ok(()) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
        Err(_) => Ok(None),
    }
}

/// Returns the file behind the loop device in `whole`, if it is known. `device` is the open device
/// or a partition.
pub(super) fn looped(device: &File, whole: &Path) -> Option<Looped> {
    let file = file_behind(device, whole)?;
    let identity = identity_of_file(&file, &file.metadata().ok()?).ok()?;
    Some(Looped { identity, offset: offset(whole) })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::file::tests::LoopDisk;

    /// Makes the folder of a loop device in `sysfs` over the file `path`.
    fn folder(sysfs: &Path, name: &str, path: &Path, is_read_only: bool) -> PathBuf {
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
        let part = Part::whole(&image.metadata().unwrap());
        let found = |also_read_only| part.loop_over(&sysfs, Path::new(""), also_read_only);
        folder(&sysfs, "loop0", &other, false);
        folder(&sysfs, "loop1", &image, true);
        folder(&sysfs, "loop2", Path::new("/nowhere (deleted)"), false);
        assert_eq!((found(false), found(true).as_deref()), (None, Some("loop1")));
        let link = dir.path().join("link");
        std::fs::hard_link(&image, &link).unwrap();
        folder(&sysfs, "loop3", &link, false);
        assert_eq!(found(false).as_deref(), Some("loop3"));
    }

    #[test]
    fn a_loop_device_is_over_the_bytes_from_its_offset_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, [0; 4096]).unwrap();
        let sysfs = dir.path().join("block");
        let whole = folder(&sysfs, "loop0", &image, false);
        std::fs::write(whole.join("loop/offset"), "1024\n").unwrap();
        std::fs::write(whole.join("size"), "4\n").unwrap();
        let of = Number::of(&image.metadata().unwrap());
        for (bytes, is_over) in [
            (0..1024, false),
            (0..1025, true),
            (2000..2001, true),
            (3071..9000, true),
            (3072..9000, false),
        ] {
            let part = Part { of, bytes: bytes.clone() };
            assert_eq!(
                part.loop_over(&sysfs, Path::new(""), false).is_some(),
                is_over,
                "{bytes:?}"
            );
            assert_eq!(part.loop_over(&sysfs, &whole, false), None, "its own");
        }
        let partition = whole.join("loop0p1");
        std::fs::create_dir(&partition).unwrap();
        for (name, content) in [("partition", "1\n"), ("start", "1\n"), ("size", "2\n")] {
            std::fs::write(partition.join(name), content).unwrap();
        }
        assert_eq!(bytes_behind(&partition, &whole_of(&partition)), 1536..2560);
        assert!(is_part(&partition) && is_part(&whole));
    }

    #[test]
    fn a_lock_of_a_whole_file_excludes_all_others_and_locks_of_parts_only_that() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, [0; 4096]).unwrap();
        let take = |is_part| lock(File::open(&image).unwrap(), is_part);
        let whole = take(false).unwrap().expect("the file system has locks");
        assert!(take(false).is_err() && take(true).is_err());
        drop(whole);
        let parts = [(); 2].map(|()| take(true).unwrap().expect("parts beside each other"));
        assert!(take(false).is_err());
        drop(parts);
        let file = File::open(&image).unwrap();
        locking::lock(&file, LockMode::Exclusive).unwrap();
        assert!(take(false).is_err() && take(true).is_err());
    }

    /// In another mount namespace the path of the file leads to another file.
    #[test]
    fn only_the_file_that_the_kernel_has_behind_a_device_identifies_it() {
        let dir = tempfile::tempdir().unwrap();
        let [image, other] = ["image", "other"].map(|name| dir.path().join(name));
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        std::fs::write(&other, vec![0; 1 << 20]).unwrap();
        let attached = LoopDisk::attach(&image);
        let device = File::open(&attached.0).unwrap();
        for (path, is_it) in [(&image, true), (&other, false)] {
            let folder = folder(dir.path(), "loop0", path, false);
            assert_eq!(looped(&device, &folder).is_some(), is_it);
            assert_eq!(lock_behind(&device, &folder).unwrap().is_some(), is_it);
            assert_eq!(whole_file_behind(&device, &folder).is_some(), is_it);
        }
    }

    #[test]
    fn a_device_is_found_by_its_file_also_when_the_file_has_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        let file = File::open(&image).unwrap();
        assert_eq!(loop_over(&file).unwrap(), None);
        let attached = LoopDisk::attach(&image);
        for _ in 0..2 {
            assert_eq!(loop_over(&file).unwrap(), Some(PathBuf::from(&attached.0)));
            let _ = std::fs::remove_file(&image);
        }
        let device = File::open(&attached.0).unwrap();
        let folder = crate::backing::sysfs::folder_of(&device.metadata().unwrap());
        let part = Part::behind(&device, &folder).expect("a loop device");
        assert_eq!(part.loop_over(Path::new(DISKS), &folder, false), None, "no other one");
        let name = part.loop_over(Path::new(DISKS), Path::new(""), false);
        assert_eq!(name.map(|name| format!("/dev/{name}")), Some(attached.0.clone()));
    }
}
