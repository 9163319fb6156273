//! Opens files by a user's path, and never waits.
//!
//! An open of a FIFO waits for its other end, and an open of some devices changes them. So the
//! first descriptor is opened with `O_PATH` and only tells the kind. The second open goes through
//! that descriptor, so that it reaches the checked file, whatever the path names by then.

use std::ffi::OsString;
use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// The kind of file that a path is expected to name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
pub enum Expected {
    /// A pool.
    #[strum(serialize = "a regular file or a devdax character device")]
    Pool,
    /// A backing, or another device of blocks.
    #[strum(serialize = "a regular file or a block device")]
    Blocks,
    /// A file that can be read more than once.
    #[strum(serialize = "a regular file")]
    File,
}

impl Expected {
    /// Refuses a file whose `metadata` shows another kind.
    ///
    /// # Errors
    /// An error that contains a [`WrongKind`].
    pub fn check(self, metadata: &Metadata) -> io::Result<()> {
        let kind = metadata.file_type();
        let fits = match self {
            _ if kind.is_file() => true,
            Self::Pool => kind.is_char_device() && devdax_bytes(metadata.rdev()).is_some(),
            Self::Blocks => kind.is_block_device(),
            Self::File => false,
        };
        let found = match self {
            Self::Pool if kind.is_char_device() => "a character device that is no devdax device",
            _ => words(kind),
        };
        let wrong =
            || io::Error::new(io::ErrorKind::InvalidInput, WrongKind { found, expected: self });
        if fits { Ok(()) } else { Err(wrong()) }
    }
}

/// The path names a file of another kind than expected.
#[derive(Debug, thiserror::Error)]
#[error("it is {found}: {expected} is expected, name one")]
pub struct WrongKind {
    /// The kind that was found.
    pub found: &'static str,
    /// The kind that was expected.
    pub expected: Expected,
}

impl WrongKind {
    /// Returns the cause of `error` if it is a `WrongKind`.
    pub fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

/// Opens the file at `path` with `options`, which create nothing.
///
/// # Errors
/// The kernel's error, or an error that contains a [`WrongKind`]; then nothing was opened.
pub fn open(path: &Path, expected: Expected, options: &OpenOptions) -> io::Result<File> {
    let named = File::from(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
    expected.check(&named.metadata()?)?;
    let opened = options.open(format!("/proc/self/fd/{}", named.as_raw_fd()));
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(io::ErrorKind::Unsupported, NO_PROC),
        _ => error,
    })
}

/// The reason why a file that is there has no path by its descriptor.
const NO_PROC: &str = "it is there, but opened by way of /proc, which is not mounted: mount it";

/// Reads the whole file at `path`.
///
/// # Errors
/// The kernel's error, an error that contains a [`WrongKind`], or [`io::ErrorKind::FileTooLarge`]
/// if the file has more than `bytes_max` bytes.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = open(path, Expected::File, File::options().read(true))?;
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let what =
            format!("it has more than {bytes_max} bytes: a smaller file is expected, name one");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
    }
    Ok(bytes)
}

/// Reads the whole text file at `path`.
///
/// # Errors
/// As [`read`], or [`io::ErrorKind::InvalidData`] if the file is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let no_text = |_| io::Error::new(io::ErrorKind::InvalidData, "it is no text in UTF-8");
    String::from_utf8(read(path, bytes_max)?).map_err(no_text)
}

/// Returns whether both paths lead to one file or device. Files that are not there yet are compared
/// by their directories and names.
pub fn is_one_file(one: &Path, other: &Path) -> bool {
    match (place_of(one), place_of(other)) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}

/// Returns the numbers of the file or device at `path`, or of its directory, with the name of a
/// file that is not there yet.
fn place_of(path: &Path) -> Option<(Identity, Option<OsString>)> {
    if let Ok(found) = path.metadata() {
        return Some((identity_of(&found), None));
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new(".")).metadata().ok()?;
    Some((identity_of(&directory), Some(path.file_name()?.to_owned())))
}

/// The numbers of a file, or of a device with its kind: kinds number their devices apart.
#[derive(PartialEq)]
enum Identity {
    File(u64, u64),
    Device(FileType, u64),
}

fn identity_of(found: &Metadata) -> Identity {
    match found.rdev() {
        0 => Identity::File(found.dev(), found.ino()),
        device => Identity::Device(found.file_type(), device),
    }
}

/// Returns the size of the character device `device` if that is a devdax device.
pub(crate) fn devdax_bytes(device: u64) -> Option<u64> {
    devdax_number(device, "size")
}

/// Returns a number that the kernel tells of the character device `device`.
pub(crate) fn devdax_number(device: u64, name: &str) -> Option<u64> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let text = std::fs::read_to_string(format!("/sys/dev/char/{major}:{minor}/{name}"));
    text.ok()?.trim().parse().ok()
}

fn words(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_file() => "a regular file",
        kind if kind.is_dir() => "a directory",
        kind if kind.is_block_device() => "a block device",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() => "a character device",
        _ => "no regular file",
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;

    #[test]
    fn only_what_is_expected_is_opened_and_nothing_waits() {
        let dir = tempfile::tempdir().unwrap();
        let [fifo, socket, file, none] =
            ["fifo", "socket", "file", "none"].map(|name| dir.path().join(name));
        mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
        let _listens = UnixListener::bind(&socket).unwrap();
        std::fs::write(&file, "precious").unwrap();
        for expected in [Expected::Pool, Expected::Blocks, Expected::File] {
            for writes in [false, true] {
                let mut options = File::options();
                let options = options.read(!writes).write(writes);
                let opened = |path: &Path| open(path, expected, options);
                for (path, found) in [
                    (dir.path(), "a directory"),
                    (&fifo, "a FIFO"),
                    (&socket, "a socket"),
                    (Path::new("/dev/null"), "a character device"),
                ] {
                    let error = opened(path).unwrap_err();
                    assert!(WrongKind::of(&error).unwrap().found.starts_with(found), "{error}");
                }
                assert_eq!(opened(&none).unwrap_err().kind(), io::ErrorKind::NotFound);
                assert_eq!(opened(&file).unwrap().metadata().unwrap().len(), 8);
            }
        }
    }

    #[test]
    fn a_file_is_read_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let [fifo, file] = ["fifo", "file"].map(|name| dir.path().join(name));
        mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
        std::fs::write(&file, "precious").unwrap();
        assert_eq!(read(&file, 8).unwrap(), b"precious");
        let error = read(&file, 7).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(error.to_string().contains("more than 7 bytes"), "{error}");
        for path in [&fifo, Path::new("/dev/zero")] {
            assert!(WrongKind::of(&read(path, 8).unwrap_err()).is_some(), "{}", path.display());
        }
        std::fs::write(&file, [0xff]).unwrap();
        assert_eq!(read_text(&file, 8).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn paths_to_one_file_are_known_before_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::create_dir(path("real")).unwrap();
        std::os::unix::fs::symlink("real", path("link")).unwrap();
        let names = ["real/file", "link/file", "real/../real/./file"];
        for _ in 0..2 {
            for name in names {
                assert!(is_one_file(&path("real/file"), &path(name)), "{name}");
            }
            assert!(!is_one_file(&path("real/file"), &path("real/other")));
            assert!(!is_one_file(&path("none/file"), &path("real/file")));
            std::fs::write(path("real/file"), "").unwrap();
        }
        assert!(is_one_file(&path("none/file"), &path("none/file")));
    }
}
