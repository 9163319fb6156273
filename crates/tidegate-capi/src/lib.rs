//! Tidegate for programs in C: the functions of `libtidegate.so` and of `libpmemblk.so.1`.
//!
//! `scripts/link-capi` makes both shared libraries of this crate, each with a version script for
//! its functions. [`tidegate`] has the functions of `include/tidegate.h`, which cbindgen makes from
//! that file. [`pmemblk`] has the functions of PMDK's libpmemblk 1.x, for programs that use that
//! library.
//!
//! Invariants:
//! 1. No panic leaves a function (`edge.rs`): it becomes an error.
//! 2. A function that fails sets `errno` and the message of the calling thread.
//! 3. A null pointer is an error, never an access. Other pointers are the caller's word: each
//!    function says what they must point at.

// The edges to C: pointers of callers, and errno.
#![allow(unsafe_code)]

mod edge;
pub mod pmemblk;
pub mod tidegate;
