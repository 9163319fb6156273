//! Cancellation of threads: calls that glibc lets a thread be cancelled at stay such calls.
//!
//! A call that goes to the C library is one by itself. A hook that answers without it asks before
//! it begins, when it holds nothing: in its middle a thread cannot be cancelled.
#![allow(unsafe_code)] // a function of the C library

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

/// Ends the calling thread here if another thread has cancelled it.
#[inline]
pub fn point() {
    // SAFETY: takes nothing. The frames above are those of hooks, which hold nothing that must be
    // dropped.
    unsafe { pthread_testcancel() };
}
