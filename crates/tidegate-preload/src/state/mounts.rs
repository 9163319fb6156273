//! Syncs of one file system of which no descriptor is at hand: another one of the machine may hang.
//!
//! Entry point: [`sync_device`].

use std::ffi::CStr;

use tidegate::durable;

use crate::state::descriptors;
use crate::sys::page::Mapped;
use crate::sys::path::{Opened, PathBuffer};
use crate::sys::{query, raw};

/// The longest list of mounts that is looked at.
const LIST_BYTES: usize = 1 << 20;

/// Makes the file system with this device number durable, or all where it is not found.
#[cold]
pub(crate) fn sync_device(device: u64) {
    if !by_descriptor(device) && !by_mount(device).unwrap_or(false) {
        raw::sync();
    }
}

fn is_on(fd: i32, device: u64) -> bool {
    query::fstat(fd).is_ok_and(|stat| stat.st_dev == device)
}

/// By a descriptor that the program has of a file there.
fn by_descriptor(device: u64) -> bool {
    let Some(fd) = descriptors::find_on(device) else { return false };
    // Looked at behind it: another thread may have closed the descriptor.
    durable::syncfs(raw::borrowed(fd)).is_ok() && is_on(fd, device)
}

/// By a mount point of it.
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
    let lines = memory.bytes().get(..len)?.split(|&byte| byte == b'\n');
    let mut path = PathBuffer::new();
    Some(
        lines.filter(|line| is_of(device, line)).any(|line| {
            mount_point(line, &mut path).is_some() && is_synced(device, path.as_c_str())
        }),
    )
}

fn is_synced(device: u64, path: &CStr) -> bool {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NONBLOCK;
    // Another one may be mounted over it.
    Opened::open(libc::AT_FDCWD, path, flags).is_ok_and(|opened| {
        is_on(opened.number(), device) && durable::syncfs(raw::borrowed(opened.number())).is_ok()
    })
}

/// A line of the list is about the file system with this device number.
fn is_of(device: u64, line: &[u8]) -> bool {
    let field = line.split(|&byte| byte == b' ').nth(2).unwrap_or_default();
    let mut numbers = field.split(|&byte| byte == b':').map(number);
    let expected = [libc::major(device), libc::minor(device)].map(Some);
    [numbers.next().flatten(), numbers.next().flatten()] == expected
}

fn number(digits: &[u8]) -> Option<u32> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The mount point of a line, in which blanks and backslashes are three octal digits behind a
/// backslash.
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
        assert_eq!(by_mount(libc::makedev(4095, 4095)), Some(false));
    }
}
