//! Hooks: `sendmsg` and `sendmmsg`, which pass descriptors to other processes.
//!
//! Invariant: before another process gets a descriptor to write a file with, the file leaves the
//! log and does not come back: that process may not be watched.
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_int, c_uint};

use libc::{msghdr, ssize_t};

use crate::covered::Open;
use crate::sys::next;
use crate::sys::raw::{self, words};
use crate::sys::readable::is_readable;

/// Pins the files whose descriptors are sent along.
///
/// # Safety
/// As for `sendmsg`.
unsafe fn share(message: *const msghdr) {
    if !is_readable(message.cast(), size_of::<msghdr>()) {
        return;
    }
    // SAFETY: `is_readable` has checked the message, and the caller keeps it during the call.
    let given = unsafe { &*message };
    if given.msg_controllen == 0 || !is_readable(given.msg_control, given.msg_controllen) {
        return;
    }
    // SAFETY: `is_readable` has checked the message and its control data.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: the macros return only headers inside of the control data.
        let control = unsafe { &*header };
        if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: the header's type says that descriptors follow.
            #[allow(clippy::cast_ptr_alignment)] // read as if it were not aligned
            // SAFETY: the header's type says that descriptors follow.
            let data = unsafe { libc::CMSG_DATA(header) }.cast::<c_int>();
            let bytes = control.cmsg_len.saturating_sub(size_of::<libc::cmsghdr>());
            let count =
                if is_readable(data.cast(), bytes) { bytes / size_of::<c_int>() } else { 0 };
            for at in 0..count {
                // SAFETY: the data has `count` descriptors.
                let fd = unsafe { data.add(at) };
                // SAFETY: `is_readable` has checked the data, which need not be aligned.
                let fd = unsafe { fd.read_unaligned() };
                Open::writable(fd).iter().for_each(Open::mark);
            }
        }
        // SAFETY: a header of this message.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sendmsg(
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's message, as for `sendmsg`.
    unsafe { share(message) };
    match next::sendmsg.resolved() {
        // SAFETY: the C library's function of this type, with the caller's arguments.
        Some(sendmsg) => unsafe { sendmsg(fd, message, flags) },
        // SAFETY: the caller's arguments go to the kernel as they are.
        None => raw::returned(unsafe { raw::call(libc::SYS_sendmsg, words![fd, message, flags]) }),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sendmmsg(
    fd: c_int,
    messages: *mut libc::mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    for at in 0..count as usize {
        let message = messages.wrapping_add(at);
        if !is_readable(message.cast(), size_of::<libc::mmsghdr>()) {
            break;
        }
        // SAFETY: `is_readable` has checked this message.
        let header = unsafe { &raw const (*message).msg_hdr };
        // SAFETY: the caller's message, as for `sendmsg`.
        unsafe { share(header) };
    }
    match next::sendmmsg.resolved() {
        // SAFETY: the C library's function of this type, with the caller's arguments.
        Some(sendmmsg) => unsafe { sendmmsg(fd, messages, count, flags) },
        // SAFETY: the caller's arguments go to the kernel as they are.
        None => raw::returned_int(unsafe {
            raw::call(libc::SYS_sendmmsg, words![fd, messages, count, flags])
        }),
    }
}
