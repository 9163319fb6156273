//! The functions that stand in front of the C library's, by kind of call.
//!
//! - bytes: `write`, `printf`, `stdio`, `transfer`, `aio`, `mapping`; `size` and `sync`;
//! - names: `open`, `names`, `attributes`, `mount`; `library`, for changes that the C library makes
//!   by itself;
//! - descriptors: `close`, `message`;
//! - the process: `exec`, `fork`, `vfork`, `loading`, `lifecycle` (load, fork and exit), `rights`,
//!   `limits`, `memory_limits`;
//! - `syscall`, for calls by number.

mod aio;
pub(crate) mod attributes;
pub(crate) mod close;
pub(crate) mod exec;
mod fork;
mod library;
pub(crate) mod lifecycle;
mod limits;
pub(crate) mod loading;
mod mapping;
mod memory_limits;
mod message;
mod mount;
pub(crate) mod names;
pub(crate) mod open;
mod printf;
pub(crate) mod rights;
pub(crate) mod size;
pub(crate) mod stdio;
pub(crate) mod sync;
mod syscall;
pub(crate) mod transfer;
mod vfork;
pub(crate) mod write;
