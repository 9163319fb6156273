//! Cancellation of threads: keeps the cancellation points of the calls that hooks answer.
//!
//! A call that goes to the C library is a cancellation point by itself. A hook that answers without
//! the C library calls [`point`] before it begins, while it holds nothing. A thread cannot be
//! cancelled in the middle of a hook.
#![allow(unsafe_code)] // a function of the C library

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

/// Ends the calling thread here if another thread has cancelled it.
#[inline]
pub fn point() {
    // SAFETY: takes no arguments. Only frames of hooks are above, and at this point a hook has no
    // value that must be dropped.
    unsafe { pthread_testcancel() };
}
