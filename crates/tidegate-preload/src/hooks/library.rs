//! Hooks: functions of the C library that change files by calls of its own, which no hook sees.
//!
//! Invariant: such a function is counted as a change of metadata, before and after it runs. A file
//! that it writes to is out of the log until it returns.
#![allow(unsafe_code)] // C's calling convention and strings
#![allow(clippy::missing_safety_doc)] // the manual page of each function says it

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::ptr;

use libc::FILE;

use crate::covered::{self, metadata, unseen};
use crate::hooks::close::forget;
use crate::hooks::stdio;
use crate::state::process;
use crate::sys::readable::text;
use crate::sys::{next, raw};

/// The files where the C library notes who is logged in (`utmpname` may name another), and who was.
const LOGGED_IN: &CStr = c"/var/run/utmp";
const LOGINS: &CStr = c"/var/log/wtmp";

/// Notes that standard input, output and error are other files now.
fn standard_replaced() {
    (0..3).for_each(forget);
    covered::note_standard();
}

/// Runs a change of the file at a path of the program, which is out of the log meanwhile.
fn of_path<R>(path: *const c_char, change: impl FnOnce() -> R) -> R {
    match text(path) {
        Some(path) => unseen::while_plain_at(path, change),
        None => metadata::counted(change),
    }
}

fn of_logins<R>(change: impl FnOnce() -> R) -> R {
    unseen::while_plain_at(LOGGED_IN, || unseen::while_plain_at(LOGINS, change))
}

/// Declares hooks that run `$around`, with a call of the C library's own function.
macro_rules! hooks {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty, $missing:expr, |$call:ident| $around:expr;)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(clippy::unused_unit, reason = "some functions return nothing")]
        unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> $result {
            let Some(function) = next::$name.get() else { return $missing };
            // SAFETY: the C library's function of this type, with the caller's arguments.
            let $call = || unsafe { function($($argument),*) };
            $around
        }
    )*};
}

hooks! {
    updwtmp(file: *const c_char, entry: *const c_void) -> (), (), |call| of_path(file, call);
    updwtmpx(file: *const c_char, entry: *const c_void) -> (), (), |call| of_path(file, call);
    pututline(entry: *const c_void) -> *mut c_void, ptr::null_mut(), |call| of_logins(call);
    pututxline(entry: *const c_void) -> *mut c_void, ptr::null_mut(), |call| of_logins(call);
    login(entry: *const c_void) -> (), (), |call| of_logins(call);
    logout(line: *const c_char) -> c_int, 0, |call| of_logins(call);
    logwtmp(line: *const c_char, name: *const c_char, host: *const c_char) -> (), (), |call| of_logins(call);
    sethostid(id: c_long) -> c_int, raw::failed_int(libc::ENOSYS), |call| unseen::while_plain_at(c"/etc/hostid", call);
    lckpwdf() -> c_int, raw::failed_int(libc::ENOSYS), |call| metadata::counted(call);
    utmpname(file: *const c_char) -> c_int, -1, |call| named(file, call);
    utmpxname(file: *const c_char) -> c_int, -1, |call| named(file, call);
    acct(file: *const c_char) -> c_int, raw::failed_int(libc::ENOSYS), |call| named(file, call);
    login_tty(fd: c_int) -> c_int, raw::failed_int(libc::ENOSYS), |call| {
        let result = call();
        if result == 0 {
            standard_replaced();
        }
        result
    };
    forkpty(terminal: *mut c_int, name: *mut c_char, attributes: *const c_void, size: *const c_void) -> libc::pid_t,
        raw::failed_int(libc::ENOSYS), |call| {
        let result = call();
        if result == 0 {
            standard_replaced();
        }
        result
    };
    setmntent(file: *const c_char, mode: *const c_char) -> *mut FILE, ptr::null_mut(), |call| {
        // SAFETY: the caller's arguments, as for `fopen`.
        unsafe { stdio::by_library(file, mode, call) }
    };
    endmntent(stream: *mut FILE) -> c_int, 1, |call| {
        if process::log().is_some() && !stream.is_null() {
            // SAFETY: the caller's open stream.
            unsafe { stdio::about_to_close(stream) };
        }
        call()
    };
}

/// Unlogs a file for good: from now on, the C library or the kernel may write to it at any time.
fn named(file: *const c_char, call: impl FnOnce() -> c_int) -> c_int {
    if let Some(file) = text(file) {
        unseen::about_to_change(libc::AT_FDCWD, file, true);
    }
    metadata::counted(call)
}
