//! Hooks: asynchronous writes.
//!
//! Invariant: a file leaves the log before a write to it is handed to a thread or to the kernel,
//! which writes later. The kernel's own interfaces do not show cheaply which file that is. So when
//! a process sets up libaio, all files that it has open leave the log. `io_uring` also opens,
//! truncates and renames files: a process that sets it up [gives the log up](super::rights).
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_int, c_uint, c_void};

use libc::{aiocb, size_t};
use tidegate::log::cover::Cause;

use crate::covered::{Open, unseen};
use crate::hooks::rights;
use crate::sys::{next, raw};

/// Pins the file of the request, which is written at an unknown time.
///
/// # Safety
/// `request` is null or points to a request of the caller.
unsafe fn mark(request: *const c_void) {
    // SAFETY: null or a valid request. Only the descriptor is read, which comes first.
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
            // SAFETY: null or the request of the caller.
            unsafe { mark(request) };
            // SAFETY: `aio_write` and `aio_write64` are one function on 64-bit machines.
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
                // SAFETY: the caller says that the list has `count` requests.
                let request = unsafe { list.add(number) };
                // SAFETY: the caller says that the list has `count` requests.
                let request = unsafe { *request };
                // SAFETY: null or a request of the caller.
                unsafe { mark(request) };
            }
            // SAFETY: `lio_listio` and `lio_listio64` are one function on 64-bit machines.
            unsafe { lio_listio64(mode, list, count, event) }
        }
    )*};
}
lists!(lio_listio lio_listio64);

/// Pins all files of the process before libaio is set up. Errors are negative results, not `errno`.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn io_setup(depth: c_int, context: *mut c_void) -> c_int {
    unseen::all(Some(Cause::Libaio));
    match next::io_setup.get() {
        // SAFETY: the C library's function of this type, with the caller's arguments.
        Some(io_setup) => unsafe { io_setup(depth, context) },
        None => -libc::ENOSYS,
    }
}

/// Pins all files of the process before libaio is set up, as the hook of `io_setup` does.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn io_queue_init(depth: c_int, context: *mut c_void) -> c_int {
    unseen::all(Some(Cause::Libaio));
    match next::io_queue_init.get() {
        // SAFETY: the C library's function of this type, with the caller's arguments.
        Some(init) => unsafe { init(depth, context) },
        None => -libc::ENOSYS,
    }
}

/// Gives the log up before `io_uring` is set up: liburing makes its own system calls.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn io_uring_setup(entries: c_uint, parameters: *mut c_void) -> c_int {
    rights::give_up_for(Cause::IoUring);
    match next::io_uring_setup.get() {
        // SAFETY: the C library's function of this type, with the caller's arguments.
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
        // SAFETY: the C library's function of this type, with the caller's arguments.
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
        // SAFETY: the C library's function of this type, with the caller's arguments.
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
        // SAFETY: the C library's function of this type, with the caller's arguments.
        Some(init) => unsafe { init(entries, ring, parameters, memory, memory_bytes) },
        None => -libc::ENOSYS,
    }
}
