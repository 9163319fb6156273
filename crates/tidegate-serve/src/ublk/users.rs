//! Whether programs or the kernel have a device open.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Returns whether a file system, a volume manager or a program has the block device at `path`, or
/// one of its partitions, open. A program of another user may be missed without the right to look.
pub fn has_users(path: &Path) -> bool {
    is_claimed(path) || is_open_in(Path::new("/proc"), path)
}

/// Returns whether the kernel has given the device to one user alone, as mounting does.
fn is_claimed(path: &Path) -> bool {
    let exclusive = (OFlags::EXCL | OFlags::NONBLOCK).bits().cast_signed();
    let opened = File::options().read(true).custom_flags(exclusive).open(path);
    opened.is_err_and(|error| error.kind() == std::io::ErrorKind::ResourceBusy)
}

/// Returns whether a process of `processes`, a directory like `/proc`, has the device open.
fn is_open_in(processes: &Path, device: &Path) -> bool {
    let Ok(processes) = processes.read_dir() else { return false };
    let opened =
        processes.flatten().filter_map(|process| process.path().join("fd").read_dir().ok());
    // Only the link is read: the file itself may be on a file system that does not answer.
    opened
        .flatten()
        .flatten()
        .filter_map(|link| link.path().read_link().ok())
        .any(|file| is_part_of(file.as_os_str().as_bytes(), device.as_os_str().as_bytes()))
}

/// Returns whether `file` is `device` or one of its partitions, such as `/dev/ublkb0p1`.
fn is_part_of(file: &[u8], device: &[u8]) -> bool {
    match file.strip_prefix(device) {
        Some([]) => true,
        Some([b'p', number @ ..]) => !number.is_empty() && number.iter().all(u8::is_ascii_digit),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_parts_and_other_devices_are_none() {
        let is_part = |file: &str| is_part_of(file.as_bytes(), b"/dev/ublkb1");
        assert!(is_part("/dev/ublkb1") && is_part("/dev/ublkb1p12"));
        for other in ["/dev/ublkb10", "/dev/ublkb1p", "/dev/ublkb1px", "/dev/ublkb", "/x"] {
            assert!(!is_part(other), "{other}");
        }
    }

    #[test]
    fn a_file_that_this_process_has_open_has_a_user() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert!(is_open_in(Path::new("/proc"), file.path()));
        let path = file.path().to_owned();
        drop(file);
        assert!(!is_open_in(Path::new("/proc"), &path));
    }
}
