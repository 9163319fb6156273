//! Names of files: the directory that has a name, open, and the name in it.
//!
//! Invariant: what a [`Parent`] says of a name is about the directory that it has open, whatever
//! happens to the paths that lead there.
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

/// A name in a directory that is open.
pub(crate) struct Parent {
    directory: Opened,
    name: [u8; NAME_BYTES_MAX + 1],
    /// What the kernel said of the directory when it was opened.
    pub(crate) seen: Seen,
    handle: FileHandle,
}

/// The handle of a directory whose names are kept as they are given.
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

    /// Asks the kernel; none where names are not kept as they are given.
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

/// Directories that are noted at once.
const NOTES: usize = 8;
/// The last ones that were asked for. A directory that folds case or is encrypted was made so while
/// it was empty.
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
    /// The last name of a path in `directory`; none where it is no name of a file, or one in a
    /// directory whose names are not kept as they are given.
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

    /// A descriptor of the directory.
    pub(crate) fn directory(&self) -> c_int {
        self.directory.number()
    }

    /// As records have it.
    pub(crate) fn at(&self) -> NameAt<'_> {
        NameAt { parent: self.handle, name: self.name().to_bytes() }
    }

    /// What has the name, if anything has. A symbolic link is one.
    pub(crate) fn child(&self) -> Option<libc::stat> {
        query::fstatat(self.directory(), self.name(), libc::AT_SYMLINK_NOFOLLOW).ok()
    }

    /// The handle of what has the name.
    pub(crate) fn handle_of_child(&self) -> Option<FileHandle> {
        files::handle_at(self.directory(), self.name(), 0)
    }
}

/// A time of the kernel as records have it.
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
        // Not each file system of those that tests run on says what flags its files have.
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
