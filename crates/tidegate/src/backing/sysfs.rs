//! The folders of disks in sysfs, and the paths that the kernel tells.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::opening::{self, Expected};

/// Sysfs counts partitions in sectors of this size, whatever the disk's own sector size is.
pub(super) const SECTOR_BYTES: u64 = 512;

/// Returns the folder in sysfs of the disk with `metadata`.
pub(super) fn folder_of(metadata: &Metadata) -> PathBuf {
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

/// Returns whether the disk in `folder` is write-protected for all programs.
pub(super) fn is_read_only(folder: &Path) -> bool {
    number(&folder.join("ro")) == Some(1)
}

/// Returns the folder in sysfs of the whole disk of the disk or partition in `folder`.
pub(super) fn whole_of(folder: &Path) -> PathBuf {
    // The link of a partition leads to its folder, which is inside the folder of its disk.
    if folder.join("partition").exists() { folder.join("..") } else { folder.to_owned() }
}

/// Opens the file or disk at a path from the kernel. The path may name something else by now.
pub(super) fn open(path: &Path) -> Option<File> {
    opening::open(path, Expected::Blocks, File::options().read(true)).ok()
}

/// Reads the number in a file of sysfs.
pub(super) fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}
