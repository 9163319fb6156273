//! Names of files: an open directory, and a name in it.
//!
//! Invariant: a [`Parent`]'s facts are about its open directory, whatever becomes of the path.
//!
//! Entry point: [`Parent::of_path`].

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate::log::{FileHandle, NameAt, Timestamp};

use crate::state::files::{self, Seen};
use crate::sys::path::{Opened, PathBuffer};
use crate::sys::query;
use crate::sys::shared::Shared;

/// `NAME_MAX`.
const NAME_BYTES_MAX: usize = 255;

/// A name in an open directory.
pub(crate) struct Parent {
    directory: Opened,
    name: [u8; NAME_BYTES_MAX + 1],
    /// The directory's attributes when it was opened.
    pub(crate) seen: Seen,
    handle: FileHandle,
}

/// The handle of a directory that keeps names as they are given.
#[derive(Clone, Copy)]
struct Noted {
    device: u64,
    inode: u64,
    created_ns: u64,
    handle: FileHandle,
}

impl Noted {
    fn is(&self, seen: &Seen) -> bool {
        (self.device, self.inode) == (seen.stat.st_dev, seen.stat.st_ino)
            && self.created_ns == seen.created_ns
    }

    /// Asks the kernel. Returns `None` if the directory does not keep names as they are given.
    fn of(directory: c_int, seen: &Seen) -> Option<Self> {
        const FOLDS_CASE: u32 = 0x4000_0000;
        const IS_ENCRYPTED: u32 = 0x800;
        let flags = query::inode_flags(directory).ok()?;
        let handle = files::handle_at(directory, c"", libc::AT_EMPTY_PATH)?;
        let (device, inode) = (seen.stat.st_dev, seen.stat.st_ino);
        let noted = Self { device, inode, created_ns: seen.created_ns, handle };
        (flags & (FOLDS_CASE | IS_ENCRYPTED) == 0).then_some(noted)
    }
}

/// Number of directories that are noted at once.
const NOTES: usize = 8;
/// The directories asked for last. A directory can begin to fold case or to encrypt only while it
/// is empty.
static NOTED: [Shared<Noted>; NOTES] = [const { Shared::new() }; NOTES];
static NEXT: AtomicUsize = AtomicUsize::new(0);

fn noted(directory: c_int, seen: &Seen) -> Option<Noted> {
    let found =
        NOTED.iter().find_map(|place| place.with(|note| *note)?.filter(|noted| noted.is(seen)));
    if found.is_some() && seen.created_ns != 0 {
        return found;
    }
    let asked = Noted::of(directory, seen)?;
    let place = &NOTED[NEXT.fetch_add(1, Ordering::Relaxed) % NOTES];
    place.with(|note| *note = Some(asked));
    Some(asked)
}

impl Parent {
    /// Opens the directory of a path in `directory`, for the path's last name. Returns `None` if
    /// that is no name of a file, or if the directory does not keep names as they are given.
    pub(crate) fn of_path(directory: c_int, path: &CStr) -> Option<Self> {
        let bytes = path.to_bytes();
        let end = bytes.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
        let (to_directory, name) = bytes.split_at(end);
        if to_directory.is_empty() {
            return Self::open(directory, c".", name);
        }
        let mut path = PathBuffer::new();
        path.push(to_directory).ok()?;
        Self::open(directory, path.as_c_str(), name)
    }

    fn open(directory: c_int, path: &CStr, last: &[u8]) -> Option<Self> {
        if matches!(last, b"" | b"." | b"..") {
            return None;
        }
        let mut name = [0; NAME_BYTES_MAX + 1];
        name[..NAME_BYTES_MAX].get_mut(..last.len())?.copy_from_slice(last);
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NONBLOCK;
        let directory = Opened::open(directory, path, flags).ok()?;
        let seen = Seen::of(directory.number()).ok()?;
        let handle = noted(directory.number(), &seen)?.handle;
        Some(Self { directory, name, seen, handle })
    }

    pub(crate) fn name(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.name).unwrap_or_default()
    }

    /// Returns the descriptor of the directory.
    pub(crate) fn directory(&self) -> c_int {
        self.directory.number()
    }

    /// Returns the directory's handle and the name, in the form of records.
    pub(crate) fn at(&self) -> NameAt<'_> {
        NameAt { parent: self.handle, name: self.name().to_bytes() }
    }

    /// Returns the attributes of the file or symbolic link with the name, if there is one.
    pub(crate) fn child(&self) -> Option<libc::stat> {
        query::fstatat(self.directory(), self.name(), libc::AT_SYMLINK_NOFOLLOW).ok()
    }

    /// Returns the handle of the file with the name.
    pub(crate) fn handle_of_child(&self) -> Option<FileHandle> {
        files::handle_at(self.directory(), self.name(), 0)
    }
}

/// Returns a time of the kernel in the form of records.
pub(crate) fn timestamp(seconds: i64, nanoseconds: i64) -> Timestamp {
    Timestamp { s: seconds, ns: u32::try_from(nanoseconds).unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    #[test]
    fn the_last_name_of_a_path_is_found_in_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("directory")).unwrap();
        std::fs::write(dir.path().join("directory/file"), b"content").unwrap();
        let opened = std::fs::File::open(dir.path()).unwrap();
        let parent = |path: &CStr| Parent::of_path(std::os::fd::AsRawFd::as_raw_fd(&opened), path);
        // Tests may run on a file system that does not report the flags of its files.
        let Some(found) = parent(c"directory//file") else { return };
        assert_eq!((found.name(), found.child().unwrap().st_size), (c"file", 7));
        assert!(found.handle_of_child().is_some() && found.seen.is_directory());
        for path in [c"", c".", c"directory/", c"directory/..", c"missing/file"] {
            assert!(parent(path).is_none(), "{path:?}");
        }
        let long = CString::new(vec![b'x'; NAME_BYTES_MAX + 1]).unwrap();
        assert!(parent(&long).is_none(), "longer than any name");
    }
}
