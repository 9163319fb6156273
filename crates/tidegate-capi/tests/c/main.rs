//! The shared libraries as programs in C meet them: linked by `scripts/link-capi`, loaded by a
//! compiled program, and beside the original libpmemblk.

// The functions are called as C calls them.
#![allow(unsafe_code)]

#[path = "../../../tidegate-cli/tests/support/built.rs"]
mod built;
#[path = "../../../tidegate-cli/tests/support/once.rs"]
mod once;
#[path = "../../../tidegate-cli/tests/support/pmemblk.rs"]
mod pmemblk;

mod crash;
mod exchange;
mod fio;
mod hostile;
mod libtidegate;
mod linked;
