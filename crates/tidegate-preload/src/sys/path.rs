//! Paths of open files and directories, without memory from the heap.
//!
//! Invariant: a [`PathBuffer`] always has a NUL after its bytes.
//!
//! Entry points: [`Opened`] to look at the file under a name, [`of_descriptor`] for an open
//! descriptor.

use std::ffi::{CStr, c_int};

use crate::state::process::Holding;
use crate::sys::page::{PAGE_BYTES, Page};
use crate::sys::query;
use crate::sys::raw::{self, Errno};

/// The longest path of the kernel, its NUL included.
pub(crate) const PATH_BYTES: usize = PAGE_BYTES;

/// A descriptor of the library for the length of a call. No signal handler runs meanwhile: a
/// handler that leaves by `longjmp` would leave the descriptor open.
pub(crate) struct Opened {
    number: c_int,
    _holding: Holding,
}

impl Opened {
    /// Opens a name, but not the file there: this needs no permission on the file, breaks no lease,
    /// and closing it takes no record lock of the program away. Follows a symbolic link unless
    /// `flags` have `O_NOFOLLOW`.
    pub(crate) fn path(directory: c_int, path: &CStr, flags: c_int) -> Result<Self, Errno> {
        Self::open(directory, path, libc::O_PATH | flags)
    }

    /// Opens a file or directory itself.
    pub(crate) fn open(directory: c_int, path: &CStr, flags: c_int) -> Result<Self, Errno> {
        let holding = Holding::new().ok_or(libc::ENOSYS)?;
        let number = raw::openat(directory, path, libc::O_CLOEXEC | flags, 0)?;
        Ok(Self { number, _holding: holding })
    }

    pub(crate) fn number(&self) -> c_int {
        self.number
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let _ = raw::close(self.number);
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

    /// Appends bytes. Changes nothing if they do not fit.
    pub(crate) fn push(&mut self, more: &[u8]) -> Result<(), Errno> {
        let end = self.len_bytes + more.len();
        if end >= PATH_BYTES {
            return Err(libc::ENAMETOOLONG);
        }
        let space = self.page.bytes_mut().get_mut(self.len_bytes..end).ok_or(libc::ENOMEM)?;
        space.copy_from_slice(more);
        self.truncate(end);
        Ok(())
    }

    /// Sets the path to the bytes that `fill` writes; `fill` returns their number.
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

/// Puts the path into `out` under which the kernel knows an open descriptor.
pub(crate) fn of_descriptor(descriptor: c_int, out: &mut PathBuffer) -> Result<(), Errno> {
    let mut link = [0; LINK_BYTES];
    out.fill(|bytes| query::readlink(proc_link(descriptor, &mut link), bytes).map(<[u8]>::len))?;
    only_absolute(out)
}

/// Rejects a link that is no path: `pipe:[1]`, or `(unreachable)/x` outside of the root.
fn only_absolute(out: &mut PathBuffer) -> Result<(), Errno> {
    if out.as_bytes().starts_with(b"/") {
        return Ok(());
    }
    out.clear();
    Err(libc::ENOENT)
}

/// Space for `/proc/thread-self/fd/`, the digits of any descriptor and the NUL.
pub(crate) const LINK_BYTES: usize = 32;

/// Returns the name in `/proc` of an open descriptor of the calling thread. The thread may have a
/// table of descriptors of its own.
pub(crate) fn proc_link(descriptor: c_int, buffer: &mut [u8; LINK_BYTES]) -> &CStr {
    proc_entry(b"/proc/thread-self/fd/", descriptor, b"", buffer)
}

/// Returns the name in `/proc` of what the kernel tells about an open descriptor of the process.
pub(crate) fn proc_information(descriptor: c_int, buffer: &mut [u8; LINK_BYTES]) -> &CStr {
    proc_entry(b"/proc/self/fdinfo/", descriptor, b"", buffer)
}

/// Returns the name in `/proc` of what the kernel tells about a process.
pub(crate) fn proc_stat(process: c_int, buffer: &mut [u8; LINK_BYTES]) -> &CStr {
    proc_entry(b"/proc/", process, b"/stat", buffer)
}

/// Returns `before`, the digits of `number` and `after`, which leave space for the digits.
fn proc_entry<'b>(
    before: &[u8],
    number: c_int,
    after: &[u8],
    buffer: &'b mut [u8; LINK_BYTES],
) -> &'b CStr {
    let mut digits = [0; 10];
    let mut end = 0;
    for part in [before, decimal(number.unsigned_abs(), &mut digits), after, b"\0"] {
        buffer[end..end + part.len()].copy_from_slice(part);
        end += part.len();
    }
    CStr::from_bytes_until_nul(buffer).unwrap_or_default()
}

/// Returns the decimal digits of `number`.
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
    fn what_does_not_fit_changes_nothing() {
        let mut path = PathBuffer::new();
        path.push(&[b'x'; PATH_BYTES - 2]).unwrap();
        assert!(path.push(b"yz").is_err());
        assert_eq!(path.as_bytes().len(), PATH_BYTES - 2);
        path.push(b"y").unwrap();
        assert!(path.push(b"z").is_err());
        assert_eq!(path.as_c_str().to_bytes().len(), PATH_BYTES - 1);
    }

    #[test]
    fn digits_are_decimal() {
        for number in [0, 7, 10, 1023, u32::MAX] {
            assert_eq!(decimal(number, &mut [0; 10]), number.to_string().as_bytes());
        }
        assert_eq!(proc_link(1048, &mut [0; LINK_BYTES]).to_bytes(), b"/proc/thread-self/fd/1048");
        assert_eq!(
            proc_link(i32::MAX, &mut [0; LINK_BYTES]).to_bytes(),
            b"/proc/thread-self/fd/2147483647"
        );
    }
}
