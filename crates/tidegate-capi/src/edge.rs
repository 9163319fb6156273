//! The edge between C and Rust: panics, errors and pointers.

use std::any::Any;
use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use ::tidegate::device::{DeviceError, DeviceErrorKind};
use ::tidegate::pmem::PmemError;

thread_local! {
    /// The message of the thread's last error.
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Why a function failed, for a program and for a person.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) errno: c_int,
    pub(crate) message: String,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub(crate) fn new(errno: c_int, message: impl Into<String>) -> Self {
        Self { errno, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, message)
    }
}

impl<E: Error + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut errno = None;
        let mut messages = Vec::new();
        let mut cause: Option<&(dyn Error + 'static)> = Some(&error);
        while let Some(error) = cause {
            errno = errno_of(error).or(errno);
            messages.push(error.to_string());
            cause = error.source();
        }
        Self { errno: errno.unwrap_or(libc::EINVAL), message: messages.join(": ") }
    }
}

/// Returns the number that stands for `error` alone, without its causes.
fn errno_of(error: &(dyn Error + 'static)) -> Option<c_int> {
    if let Some(error) = error.downcast_ref::<io::Error>() {
        return error.raw_os_error();
    }
    if let Some(error) = error.downcast_ref::<PmemError>() {
        return match error {
            PmemError::Busy { .. } => Some(libc::EAGAIN),
            PmemError::ReadOnly => Some(libc::EROFS),
            PmemError::DanglingLink { .. } => Some(libc::ENOENT),
            PmemError::Poisoned { .. } | PmemError::WritebackFailed { .. } => Some(libc::EIO),
            _ => None,
        };
    }
    let kind = error.downcast_ref::<DeviceError>()?.kind();
    Some(match kind {
        DeviceErrorKind::Misaligned | DeviceErrorKind::OutOfRange => libc::EINVAL,
        DeviceErrorKind::ReadOnly => libc::EROFS,
        DeviceErrorKind::Unsupported => libc::ENOTSUP,
        DeviceErrorKind::NoSpace => libc::ENOSPC,
        _ => libc::EIO,
    })
}

/// Runs `work`, and returns its result to C. If it fails or panics, sets `errno` and the thread's
/// message and returns `failed`.
#[inline]
pub(crate) fn answer<T>(failed: T, work: impl FnOnce() -> Result<T>) -> T {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => fail(failed, &failure),
        Err(panic) => fail(failed, &defect(&*panic)),
    }
}

#[cold]
fn fail<T>(failed: T, failure: &Failure) -> T {
    set_message(&failure.message);
    // SAFETY: the C library gives each thread a valid address for its errno.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: the address is valid as long as the thread lives, and no other thread uses it.
    unsafe { *errno = failure.errno };
    failed
}

fn defect(panic: &(dyn Any + Send)) -> Failure {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = text.unwrap_or("no reason given");
    Failure::new(libc::EIO, format!("a defect of Tidegate, please report it: {text}"))
}

/// Sets the thread's message, which may not contain a NUL.
fn set_message(message: &str) {
    let text = CString::new(message.replace('\0', "?")).unwrap_or_default();
    // Fails only while the thread ends, when nothing reads the message.
    let _ = MESSAGE.try_with(|message| *message.borrow_mut() = text);
}

/// Returns the message of the thread's last error, or an empty text. It stays valid until the
/// thread's next error.
pub(crate) fn last_message() -> *const c_char {
    MESSAGE.try_with(|message| message.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns a text that C passed.
///
/// # Safety
/// `text` is null or a C string that stays unchanged during the call.
pub(crate) unsafe fn text<'a>(name: &str, text: *const c_char) -> Result<&'a CStr> {
    if text.is_null() {
        return Err(Failure::invalid(format!("{name} is a null pointer, a text is expected")));
    }
    // SAFETY: the pointer is not null, so it is a C string.
    Ok(unsafe { CStr::from_ptr(text) })
}

/// Returns a text in UTF-8 that C passed, or `None` for a null pointer.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn optional_word<'a>(
    name: &str,
    pointer: *const c_char,
) -> Result<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: passed on from the caller.
    let text = unsafe { text(name, pointer) }?;
    let word = text.to_str().map_err(|_| Failure::invalid(format!("{name} is not UTF-8")))?;
    Ok(Some(word))
}

/// Returns a path that C passed.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn path<'a>(path: *const c_char) -> Result<&'a Path> {
    // SAFETY: passed on from the caller.
    let text = unsafe { text("path", path) }?;
    Ok(Path::new(OsStr::from_bytes(text.to_bytes())))
}

/// Returns the pool behind a handle.
///
/// # Safety
/// `pool` is null or a handle that was opened and is not closed before the call returns.
#[inline]
pub(crate) unsafe fn pool<'a, T>(pool: *const T) -> Result<&'a T> {
    // SAFETY: the pointer is null or a live handle.
    unsafe { pool.as_ref() }.ok_or_else(|| Failure::invalid("the pool is a null pointer"))
}

/// Returns the bytes of a buffer to read from.
///
/// # Safety
/// `buffer` is null or has `len` bytes, which nothing changes during the call.
#[inline]
pub(crate) unsafe fn input<'a>(buffer: *const c_void, len: usize) -> Result<&'a [u8]> {
    check_buffer(buffer, len)?;
    // SAFETY: the buffer is not null and has `len` bytes.
    Ok(unsafe { std::slice::from_raw_parts(buffer.cast(), len) })
}

/// Returns the bytes of a buffer to write to.
///
/// # Safety
/// `buffer` is null or has `len` bytes, which nothing else uses during the call.
#[inline]
pub(crate) unsafe fn output<'a>(buffer: *mut c_void, len: usize) -> Result<&'a mut [u8]> {
    check_buffer(buffer, len)?;
    // SAFETY: the buffer is not null and has `len` bytes.
    Ok(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), len) })
}

#[inline]
fn check_buffer(buffer: *const c_void, len: usize) -> Result<()> {
    if buffer.is_null() {
        return Err(Failure::invalid("the buffer is a null pointer"));
    }
    if isize::try_from(len).is_err() {
        return Err(Failure::invalid(format!("a buffer cannot have {len} bytes")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> String {
        // SAFETY: the message is a C string until the thread's next error.
        unsafe { CStr::from_ptr(last_message()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_an_error() {
        assert_eq!(answer(-1, || Ok(3)), 3);
        assert_eq!(answer(-1, || panic!("of a test")), -1);
        assert!(message().ends_with("please report it: of a test"), "{}", message());
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EIO));
    }

    #[test]
    fn an_error_has_the_number_of_its_innermost_cause() {
        let source = io::Error::from_raw_os_error(libc::ENOENT);
        let error = DeviceError::with_source(DeviceErrorKind::Io, "a file", source);
        let failure = Failure::from(error);
        assert_eq!(failure.errno, libc::ENOENT);
        assert!(failure.message.starts_with("a file: No such file"), "{}", failure.message);
        assert_eq!(Failure::from(PmemError::ReadOnly).errno, libc::EROFS);
        assert_eq!(Failure::from(std::fmt::Error).errno, libc::EINVAL);
    }

    #[test]
    fn a_message_with_a_nul_is_a_whole_text() {
        assert_eq!(answer(0, || Err(Failure::new(5, "a\0b"))), 0);
        assert_eq!(message(), "a?b");
    }

    #[test]
    fn null_pointers_are_errors() {
        // SAFETY: null pointers are allowed.
        let text = unsafe { path(std::ptr::null()) };
        // SAFETY: null pointers are allowed.
        let buffer = unsafe { input(std::ptr::null(), 1) };
        assert!(text.is_err() && buffer.is_err());
        // SAFETY: null pointers are allowed.
        assert!(unsafe { pool(std::ptr::null::<u8>()) }.is_err());
    }
}
