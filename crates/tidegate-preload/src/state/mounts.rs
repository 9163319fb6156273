//! Syncs of one file system without a descriptor at hand. Others are left alone: they may hang.
//!
//! Entry point: [`sync_device`].

use std::ffi::CStr;

use tidegate::durable;

use crate::state::descriptors;
use crate::sys::page::Mapped;
use crate::sys::path::{Opened, PathBuffer};
use crate::sys::{query, raw};

/// The most bytes of the list of mounts that are read.
const LIST_BYTES: usize = 1 << 20;

/// Syncs the file system with this device number, or all file systems if it is not found. Returns
/// `false` if a write-back of the file system has failed. The kernel reports that once, so another
/// sync would succeed.
#[cold]
#[must_use = "the disk may lack data that only the log has"]
pub(crate) fn sync_device(device: u64) -> bool {
    by_descriptor(device).or_else(|| by_mount(device)).unwrap_or_else(|| {
        // It is mounted nowhere that this process sees.
        raw::sync();
        true
    })
}

fn is_on(fd: i32, device: u64) -> bool {
    query::fstat(fd).is_ok_and(|stat| stat.st_dev == device)
}

/// Syncs the file system by a descriptor of the program. Returns whether that succeeded, or `None`
/// if there is no such descriptor.
fn by_descriptor(device: u64) -> Option<bool> {
    let fd = descriptors::find_on(device)?;
    let is_synced = durable::syncfs(raw::borrowed(fd)).is_ok();
    // Checked after the sync: another thread may have closed the descriptor before.
    is_on(fd, device).then_some(is_synced)
}

/// Syncs the file system by one of its mount points. Returns whether that succeeded, or `None` if
/// no mount point of it is found.
fn by_mount(device: u64) -> Option<bool> {
    let list = Opened::open(libc::AT_FDCWD, c"/proc/self/mountinfo", libc::O_RDONLY).ok()?;
    let mut memory = Mapped::new(LIST_BYTES)?;
    let mut len = 0;
    while let Some(space) = memory.bytes_mut().get_mut(len..).filter(|space| !space.is_empty()) {
        match query::read(list.number(), space).ok()? {
            0 => break,
            read => len += read,
        }
    }
    let mut lines = memory.bytes().get(..len)?.split(|&byte| byte == b'\n');
    let mut path = PathBuffer::new();
    lines.find_map(|line| {
        is_of(device, line).then(|| mount_point(line, &mut path))??;
        synced_at(device, path.as_c_str())
    })
}

/// Syncs the file system that is mounted at this path, if it has this device number. Returns
/// whether that succeeded.
fn synced_at(device: u64, path: &CStr) -> Option<bool> {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NONBLOCK;
    let opened = Opened::open(libc::AT_FDCWD, path, flags).ok()?;
    // Another file system may be mounted over this mount point.
    let fd = is_on(opened.number(), device).then_some(opened.number())?;
    Some(durable::syncfs(raw::borrowed(fd)).is_ok())
}

/// Returns whether a line of the list is about the file system with this device number.
fn is_of(device: u64, line: &[u8]) -> bool {
    let field = line.split(|&byte| byte == b' ').nth(2).unwrap_or_default();
    let mut numbers = field.split(|&byte| byte == b':').map(number);
    let expected = [libc::major(device), libc::minor(device)].map(Some);
    [numbers.next().flatten(), numbers.next().flatten()] == expected
}

fn number(digits: &[u8]) -> Option<u32> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Stores the mount point of a line in `path`: a backslash and three octal digits stand for a blank
/// or a backslash. Returns `None` if the line is damaged.
fn mount_point(line: &[u8], path: &mut PathBuffer) -> Option<()> {
    let field = line.split(|&byte| byte == b' ').nth(4)?;
    path.clear();
    let mut parts = field.split(|&byte| byte == b'\\');
    path.push(parts.next()?).ok()?;
    for part in parts {
        let (digits, rest) = part.split_at_checked(3)?;
        let byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()?;
        path.push(&[byte]).and_then(|()| path.push(rest)).ok()?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_number() {
        let device = libc::makedev(259, 3);
        let line = br"36 35 259:3 / /a\040b\134c rw,noatime master:1 - ext4 /dev/root rw";
        assert!(is_of(device, line) && !is_of(libc::makedev(259, 30), line));
        let mut path = PathBuffer::new();
        assert_eq!(mount_point(line, &mut path), Some(()));
        assert_eq!(path.as_bytes(), br"/a b\c");
        assert!(!is_of(device, b"") && mount_point(b"36 35", &mut path).is_none());
    }

    #[test]
    fn a_file_system_is_synced_alone() {
        let directory = tempfile::tempdir().unwrap();
        let stat = std::os::unix::fs::MetadataExt::dev(&directory.path().metadata().unwrap());
        assert_eq!(by_mount(stat), Some(true));
        assert_eq!(by_mount(libc::makedev(4095, 4095)), None);
    }
}
