//! Hooks: calls that start file accesses that no hook sees. They are only counted.
//!
//! Invariant: all hooked functions are from the C library. Another library's functions may be
//! visible only to a part of the program that does not include this library.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_long, c_ulong, c_void};

use libc::{off_t, size_t};
use tidegate_record::event::Unseen;

use crate::hook::hooks;
use crate::{files, session};

fn count(what: Unseen) {
    session::recording(|recorder| files::count(recorder, what));
}

/// Counts a mapping of a file; returns `at`.
fn mapped(fd: c_int, flags: c_int, at: *mut c_void) -> *mut c_void {
    if fd >= 0 && at != libc::MAP_FAILED && flags & libc::MAP_ANONYMOUS == 0 {
        session::recording(|recorder| {
            if files::of(recorder, fd).is_some() {
                files::count(recorder, Unseen::Mapping);
            }
        });
    }
    at
}

/// Stops recording, as a filter of system calls may forbid the calls that hooks make.
fn restricting() {
    count(Unseen::Seccomp);
    session::give_up();
}

/// Counts the system call `number` if it hides operations from hooks.
fn by_number(number: c_long) {
    match number {
        libc::SYS_io_uring_setup => count(Unseen::IoUring),
        libc::SYS_io_setup => count(Unseen::Libaio),
        libc::SYS_seccomp => restricting(),
        libc::SYS_read
        | libc::SYS_write
        | libc::SYS_pread64
        | libc::SYS_pwrite64
        | libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_preadv
        | libc::SYS_pwritev
        | libc::SYS_fsync
        | libc::SYS_fdatasync
        | libc::SYS_ftruncate
        | libc::SYS_renameat2
        | libc::SYS_unlinkat => count(Unseen::ByNumber),
        _ => {}
    }
}

hooks! {
    [mmap mmap64](
        at: *mut c_void, len: size_t, access: c_int, flags: c_int, fd: c_int, offset: off_t
    ) -> *mut c_void => |call| mapped(fd, flags, call());
    [aio_read aio_read64 aio_write aio_write64](control: *mut c_void) -> c_int => |call| {
        count(Unseen::PosixAio);
        call()
    };
    [lio_listio lio_listio64](
        mode: c_int, list: *const *mut c_void, requests: c_int, signal: *mut c_void
    ) -> c_int => |call| {
        count(Unseen::PosixAio);
        call()
    };
    [prctl](option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int => |call| {
        if option == libc::PR_SET_SECCOMP {
            restricting();
        }
        call()
    };
    [syscall](
        number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize
    ) -> c_long => |call| {
        by_number(number);
        call()
    };
}
