//! Hooks: `sendmsg` and `sendmmsg`, by which descriptors get to other processes.
//!
//! Invariant: a file leaves the log, and does not come back, before another process gets a
//! descriptor to write it with: that process may not be watched.
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
    // SAFETY: readable, and the program's own for the length of the call.
    let given = unsafe { &*message };
    if given.msg_controllen == 0 || !is_readable(given.msg_control, given.msg_controllen) {
        return;
    }
    // SAFETY: a message whose control data is readable.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: inside the message, as the macros see to.
        let control = unsafe { &*header };
        if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: the header says that there are descriptors.
            #[allow(clippy::cast_ptr_alignment)] // read as if it were not aligned
            // SAFETY: the header's own descriptors, as its type says.
            let data = unsafe { libc::CMSG_DATA(header) }.cast::<c_int>();
            let bytes = control.cmsg_len.saturating_sub(size_of::<libc::cmsghdr>());
            let count =
                if is_readable(data.cast(), bytes) { bytes / size_of::<c_int>() } else { 0 };
            for at in 0..count {
                // SAFETY: so many descriptors are there.
                let fd = unsafe { data.add(at) };
                // SAFETY: inside the data, aligned or not.
                let fd = unsafe { fd.read_unaligned() };
                Open::writable(fd).iter().for_each(Open::mark);
            }
        }
        // SAFETY: the program's own message.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sendmsg(
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: as promised to this function.
    unsafe { share(message) };
    match next::sendmsg.resolved() {
        // SAFETY: the same function.
        Some(sendmsg) => unsafe { sendmsg(fd, message, flags) },
        // SAFETY: the program's own arguments.
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
        // SAFETY: readable.
        let header = unsafe { &raw const (*message).msg_hdr };
        // SAFETY: as promised to this function.
        unsafe { share(header) };
    }
    match next::sendmmsg.resolved() {
        // SAFETY: the same function.
        Some(sendmmsg) => unsafe { sendmmsg(fd, messages, count, flags) },
        // SAFETY: the program's own arguments.
        None => raw::returned_int(unsafe {
            raw::call(libc::SYS_sendmmsg, words![fd, messages, count, flags])
        }),
    }
}
