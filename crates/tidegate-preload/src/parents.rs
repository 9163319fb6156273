//! Names of files: the directory that has a name, open, and the name in it.
//!
//! Invariant: what a [`Parent`] says of a name is about the directory that it has open, whatever
//! happens to the paths that lead there.
//!
//! Entry points: [`Parent::of_path`], [`Parent::of_descriptor`].

use std::ffi::{CStr, c_int};

use tidegate::log::{FileHandle, NameAt, Timestamp};

use crate::files::{self, Seen};
use crate::path::{self, Opened, PathBuffer};
use crate::raw;

/// `NAME_MAX`.
const NAME_BYTES_MAX: usize = 255;

/// A name in a directory that is open.
pub(crate) struct Parent {
    directory: Opened,
    name: [u8; NAME_BYTES_MAX + 1],
    handle: FileHandle,
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

    /// The name under which the kernel knows an open file.
    pub(crate) fn of_descriptor(fd: c_int) -> Option<Self> {
        let mut path = PathBuffer::new();
        path::of_descriptor(fd, &mut path).ok()?;
        Self::of_path(libc::AT_FDCWD, path.as_c_str())
    }

    fn open(directory: c_int, path: &CStr, last: &[u8]) -> Option<Self> {
        const FOLDS_CASE: u32 = 0x4000_0000;
        const IS_ENCRYPTED: u32 = 0x800;
        if matches!(last, b"" | b"." | b"..") {
            return None;
        }
        let mut name = [0; NAME_BYTES_MAX + 1];
        name[..NAME_BYTES_MAX].get_mut(..last.len())?.copy_from_slice(last);
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NONBLOCK;
        let directory = Opened::open(directory, path, flags).ok()?;
        let flags = raw::inode_flags(directory.number()).ok()?;
        let handle = files::handle_at(directory.number(), c"", libc::AT_EMPTY_PATH)?;
        (flags & (FOLDS_CASE | IS_ENCRYPTED) == 0).then_some(Self { directory, name, handle })
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
        raw::fstatat(self.directory(), self.name(), libc::AT_SYMLINK_NOFOLLOW).ok()
    }

    /// The handle of what has the name.
    pub(crate) fn handle_of_child(&self) -> Option<FileHandle> {
        files::handle_at(self.directory(), self.name(), 0)
    }

    /// What the kernel says of the directory.
    pub(crate) fn seen(&self) -> Option<Seen> {
        Seen::of(self.directory()).ok()
    }
}

/// A time of the kernel as records have it.
pub(crate) fn timestamp(seconds: i64, nanoseconds: i64) -> Timestamp {
    Timestamp { s: seconds, ns: u32::try_from(nanoseconds).unwrap_or(0) }
}
