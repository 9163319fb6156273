//! Hooks: asynchronous writes.
//!
//! Invariant: a file is out of the log before a write of it is handed to a thread or to the kernel,
//! which makes it later. Which file that is, the kernel's own interfaces do not tell in passing:
//! where libaio is set up, all files that the process has open leave the log. `io_uring` opens,
//! cuts and renames any file as well: a process that sets it up [gives the log up](super::rights).
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_int, c_uint, c_void};

use libc::{aiocb, size_t};
use tidegate::log::cover::Cause;

use crate::covered::{Open, unseen};
use crate::hooks::rights;
use crate::sys::{next, raw};

/// The file of the request is written at some time.
///
/// # Safety
/// `request` is the program's own, or null.
unsafe fn mark(request: *const c_void) {
    // SAFETY: as promised; on both architectures the descriptor comes first.
    let Some(request) = (unsafe { request.cast::<aiocb>().as_ref() }) else { return };
    if let Some(open) = Open::writable(request.aio_fildes) {
        unseen::pin(&open);
    }
}

macro_rules! writes {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(request: *mut c_void) -> c_int {
            let Some(aio_write64) = next::aio_write64.get() else { return raw::failed_int(libc::ENOSYS) };
            // SAFETY: as promised to this function.
            unsafe { mark(request) };
            // SAFETY: the same function.
            unsafe { aio_write64(request) }
        }
    )*};
}
writes!(aio_write aio_write64);

macro_rules! lists {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            mode: c_int,
            list: *const *mut c_void,
            count: c_int,
            event: *mut c_void,
        ) -> c_int {
            let Some(lio_listio64) = next::lio_listio64.get() else { return raw::failed_int(libc::ENOSYS) };
            for number in 0..usize::try_from(count).unwrap_or(0) {
                // SAFETY: the program says that so many are there.
                let request = unsafe { list.add(number) };
                // SAFETY: the program says that so many are there.
                let request = unsafe { *request };
                // SAFETY: the program's own request.
                unsafe { mark(request) };
            }
            // SAFETY: the same function.
            unsafe { lio_listio64(mode, list, count, event) }
        }
    )*};
}
lists!(lio_listio lio_listio64);

/// libaio. Its errors are negative numbers, not `errno`.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn io_setup(depth: c_int, context: *mut c_void) -> c_int {
    unseen::all(Some(Cause::Libaio));
    match next::io_setup.get() {
        // SAFETY: the same function.
        Some(io_setup) => unsafe { io_setup(depth, context) },
        None => -libc::ENOSYS,
    }
}

/// As `io_setup`.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn io_queue_init(depth: c_int, context: *mut c_void) -> c_int {
    unseen::all(Some(Cause::Libaio));
    match next::io_queue_init.get() {
        // SAFETY: the same function.
        Some(init) => unsafe { init(depth, context) },
        None => -libc::ENOSYS,
    }
}

/// liburing, which makes its system calls by itself.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn io_uring_setup(entries: c_uint, parameters: *mut c_void) -> c_int {
    rights::give_up_for(Cause::IoUring);
    match next::io_uring_setup.get() {
        // SAFETY: the same function.
        Some(setup) => unsafe { setup(entries, parameters) },
        None => -libc::ENOSYS,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn io_uring_queue_init(
    entries: c_uint,
    ring: *mut c_void,
    flags: c_uint,
) -> c_int {
    rights::give_up_for(Cause::IoUring);
    match next::io_uring_queue_init.get() {
        // SAFETY: the same function.
        Some(init) => unsafe { init(entries, ring, flags) },
        None => -libc::ENOSYS,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn io_uring_queue_init_params(
    entries: c_uint,
    ring: *mut c_void,
    parameters: *mut c_void,
) -> c_int {
    rights::give_up_for(Cause::IoUring);
    match next::io_uring_queue_init_params.get() {
        // SAFETY: the same function.
        Some(init) => unsafe { init(entries, ring, parameters) },
        None => -libc::ENOSYS,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn io_uring_queue_init_mem(
    entries: c_uint,
    ring: *mut c_void,
    parameters: *mut c_void,
    memory: *mut c_void,
    memory_bytes: size_t,
) -> c_int {
    rights::give_up_for(Cause::IoUring);
    match next::io_uring_queue_init_mem.get() {
        // SAFETY: the same function.
        Some(init) => unsafe { init(entries, ring, parameters, memory, memory_bytes) },
        None => -libc::ENOSYS,
    }
}
