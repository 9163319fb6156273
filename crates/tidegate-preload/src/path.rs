//! Absolute paths of names, without memory from the heap and without following the last component.
//!
//! Invariants: a [`PathBuffer`] always ends in a NUL behind its bytes; what [`absolute`] returns names the entry that the
//! kernel would act on for (descriptor, path) at that moment, as seen from the root of this process.
//!
//! Entry points: [`Opened`] to look at what a name stands for, [`absolute`] for a name that may not exist yet, [`of_descriptor`] for something open, [`forget_root`] once
//! the process has another root than the rest of the machine: from then on no path is known.

#![allow(unsafe_code)] // system calls with paths

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::page::{PAGE_BYTES, Page};
use crate::raw::{self, Errno, words};

/// The longest path of the kernel, its NUL included.
pub(crate) const PATH_BYTES: usize = PAGE_BYTES;

/// Set by `chroot`: what `/proc` says no longer means anything to others.
static ROOT_CHANGED: AtomicBool = AtomicBool::new(false);

/// From now on [`absolute`] and [`of_descriptor`] fail in this process and in what it forks.
pub(crate) fn forget_root() {
    ROOT_CHANGED.store(true, Ordering::Relaxed);
}

/// Paths of this process mean the same to the rest of the machine.
pub(crate) fn are_known() -> bool {
    !ROOT_CHANGED.load(Ordering::Relaxed)
}

/// A descriptor of our own for the length of a call.
pub(crate) struct Opened(c_int);

impl Opened {
    /// Opens a place in the tree of names, not the file there: no permission on it is needed, no lease is broken, and closing
    /// it takes no record lock of the program away. A symbolic link is followed unless `flags` say `O_NOFOLLOW`.
    pub(crate) fn path(directory: c_int, path: &CStr, flags: c_int) -> Result<Self, Errno> {
        Self::open(directory, path, libc::O_PATH | flags)
    }

    /// As [`path`](Self::path), of a path that has no symbolic link in it.
    pub(crate) fn without_links(path: &CStr) -> Result<Self, Errno> {
        let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        raw::open_without_links(path, flags, 0).map(Self)
    }

    /// Opens a file or directory itself.
    pub(crate) fn open(directory: c_int, path: &CStr, flags: c_int) -> Result<Self, Errno> {
        raw::openat(directory, path, libc::O_CLOEXEC | flags, 0).map(Self)
    }

    pub(crate) fn number(&self) -> c_int {
        self.0
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let _ = raw::close(self.0);
    }
}

/// A path, in memory that is neither the heap nor the stack.
pub(crate) struct PathBuffer {
    page: Page,
    len_bytes: usize,
}

impl PathBuffer {
    pub(crate) fn new() -> Self {
        let mut path = Self { page: Page::take(), len_bytes: 0 };
        path.clear();
        path
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.page.bytes().get(..self.len_bytes).unwrap_or_default()
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(self.page.bytes()).unwrap_or_default()
    }

    pub(crate) fn clear(&mut self) {
        self.truncate(0);
    }

    fn truncate(&mut self, len_bytes: usize) {
        self.len_bytes = len_bytes.min(PATH_BYTES - 1);
        if let Some(end) = self.page.bytes_mut().get_mut(self.len_bytes) {
            *end = 0;
        }
    }

    /// Appends, or changes nothing where that does not fit.
    pub(crate) fn push(&mut self, more: &[u8]) -> Result<(), Errno> {
        let end = self.len_bytes + more.len();
        if end >= PATH_BYTES {
            return Err(libc::ENAMETOOLONG);
        }
        let room = self.page.bytes_mut().get_mut(self.len_bytes..end).ok_or(libc::ENOMEM)?;
        room.copy_from_slice(more);
        self.truncate(end);
        Ok(())
    }

    /// Appends the name of an entry of the directory that this is the path of.
    fn push_name(&mut self, name: &[u8]) -> Result<(), Errno> {
        let before = self.len_bytes;
        if self.as_bytes() != b"/" {
            self.push(b"/")?;
        }
        self.push(name).inspect_err(|_| self.truncate(before))
    }

    /// What `fill` writes is the path; it returns how many bytes that are.
    fn fill(&mut self, fill: impl FnOnce(&mut [u8]) -> Result<usize, Errno>) -> Result<(), Errno> {
        let len_bytes = fill(self.page.bytes_mut())?;
        if len_bytes >= PATH_BYTES {
            self.clear();
            return Err(libc::ENAMETOOLONG);
        }
        self.truncate(len_bytes);
        Ok(())
    }
}

/// A path as (directory, name in it). `None` for what names no entry of a directory: "", "/", "x/..", "x/.".
pub(crate) fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let path = without_slashes_at_end(path);
    let (directory, name) = match path.iter().rposition(|&byte| byte == b'/') {
        Some(0) => (&path[..1], &path[1..]),
        Some(slash) => (without_slashes_at_end(&path[..slash]), &path[slash + 1..]),
        None => (&path[..0], path),
    };
    let directory =
        if directory.is_empty() && path.starts_with(b"/") { &path[..1] } else { directory };
    (!matches!(name, b"" | b"." | b"..")).then_some((directory, name))
}

fn without_slashes_at_end(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
    &path[..end]
}

/// The absolute path of the entry that (`directory`, `path`) names, whether it exists or not.
pub(crate) fn absolute(directory: c_int, path: &CStr, out: &mut PathBuffer) -> Result<(), Errno> {
    let (parent, name) = split(path.to_bytes()).ok_or(libc::EINVAL)?;
    if parent.is_empty() {
        of_directory(directory, out)?;
    } else {
        out.clear();
        out.push(parent)?;
        let opened = Opened::path(directory, out.as_c_str(), libc::O_DIRECTORY)?;
        of_descriptor(opened.number(), out)?;
    }
    out.push_name(name)
}

fn of_directory(directory: c_int, out: &mut PathBuffer) -> Result<(), Errno> {
    if directory != libc::AT_FDCWD {
        return of_descriptor(directory, out);
    }
    if !are_known() {
        return Err(libc::ENOENT);
    }
    out.fill(|bytes| {
        // SAFETY: room for the answer, whose NUL is counted.
        let result =
            unsafe { raw::call(libc::SYS_getcwd, words![bytes.as_mut_ptr(), bytes.len()]) };
        raw::checked(result).map(|with_nul| with_nul.saturating_sub(1))
    })?;
    only_absolute(out)
}

/// The path under which the kernel knows what is open as `descriptor`.
pub(crate) fn of_descriptor(descriptor: c_int, out: &mut PathBuffer) -> Result<(), Errno> {
    if !are_known() {
        return Err(libc::ENOENT);
    }
    let mut link = [0; LINK_BYTES];
    out.fill(|bytes| raw::readlink(proc_link(descriptor, &mut link), bytes).map(<[u8]>::len))?;
    only_absolute(out)
}

/// `(unreachable)/x` of a working directory outside the root, `pipe:[1]`, and the like are no paths.
fn only_absolute(out: &mut PathBuffer) -> Result<(), Errno> {
    if out.as_bytes().starts_with(b"/") {
        return Ok(());
    }
    out.clear();
    Err(libc::ENOENT)
}

/// Room for `/proc/self/fd/` and the digits of any descriptor.
pub(crate) const LINK_BYTES: usize = 32;

/// The name in `/proc` of an open descriptor.
pub(crate) fn proc_link(descriptor: c_int, buffer: &mut [u8; LINK_BYTES]) -> &CStr {
    const PREFIX: &[u8] = b"/proc/self/fd/";
    let mut digits = [0; 10];
    let digits = decimal(descriptor.unsigned_abs(), &mut digits);
    buffer[..PREFIX.len()].copy_from_slice(PREFIX);
    let end = PREFIX.len() + digits.len();
    buffer[PREFIX.len()..end].copy_from_slice(digits);
    buffer[end] = 0;
    CStr::from_bytes_until_nul(buffer).unwrap_or_default()
}

/// The decimal digits of `number`.
pub(crate) fn decimal(mut number: u32, buffer: &mut [u8; 10]) -> &[u8] {
    let mut start = buffer.len();
    loop {
        start -= 1;
        buffer[start] = b'0' + u8::try_from(number % 10).unwrap_or(0);
        number /= 10;
        if number == 0 {
            return &buffer[start..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_split_where_the_kernel_splits_it() {
        let cases: [(&str, Option<(&str, &str)>); 14] = [
            ("", None),
            ("/", None),
            ("//", None),
            ("a", Some(("", "a"))),
            ("a/", Some(("", "a"))),
            ("/a", Some(("/", "a"))),
            ("//a//", Some(("/", "a"))),
            ("a/b", Some(("a", "b"))),
            ("a//b", Some(("a", "b"))),
            ("/a/b/", Some(("/a", "b"))),
            ("./b", Some((".", "b"))),
            ("a/..", None),
            ("a/.", None),
            ("a/...", Some(("a", "..."))),
        ];
        for (path, expected) in cases {
            let expected = expected.map(|(parent, name)| (parent.as_bytes(), name.as_bytes()));
            assert_eq!(split(path.as_bytes()), expected, "{path:?}");
        }
    }

    #[test]
    fn names_are_joined_with_one_slash() {
        let mut path = PathBuffer::new();
        path.push(b"/").unwrap();
        path.push_name(b"a").unwrap();
        path.push_name(b"b").unwrap();
        assert_eq!(path.as_bytes(), b"/a/b");
        assert_eq!(path.as_c_str().to_bytes(), b"/a/b");
    }

    #[test]
    fn what_does_not_fit_changes_nothing() {
        let mut path = PathBuffer::new();
        path.push(&[b'x'; PATH_BYTES - 3]).unwrap();
        assert!(path.push_name(b"yz").is_err());
        assert_eq!(path.as_bytes().len(), PATH_BYTES - 3);
        path.push_name(b"y").unwrap();
        assert!(path.push(b"z").is_err());
        assert_eq!(path.as_c_str().to_bytes().len(), PATH_BYTES - 1);
    }

    #[test]
    fn digits_are_decimal() {
        for number in [0, 7, 10, 1023, u32::MAX] {
            assert_eq!(decimal(number, &mut [0; 10]), number.to_string().as_bytes());
        }
        assert_eq!(proc_link(1048, &mut [0; LINK_BYTES]).to_bytes(), b"/proc/self/fd/1048");
        assert_eq!(
            proc_link(i32::MAX, &mut [0; LINK_BYTES]).to_bytes(),
            b"/proc/self/fd/2147483647"
        );
    }
}
