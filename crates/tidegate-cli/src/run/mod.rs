//! `tidegate run` and its supervisor.
//!
//! A launcher (`session`, `launcher`) finds or starts the supervisor of a pool and runs one program (`program`, `preload`). The
//! supervisor (`opening`, `supervisor`, `tree`) owns the pool and knows who uses it; its thread, the cleaner (`cleaner`,
//! `allocator`), keeps the log short: when (`policy`), what is due (`backlog`), making it durable (`writeback`), what the dead and the
//! disk left undone (`redo`), what the kernel was not told (`absorbed`, `leases`). All of them meet where `place` says, and talk over a `socket`.

mod absorbed;
mod allocator;
mod backlog;
mod cleaner;
mod kernel;
pub(crate) mod launcher;
mod leases;
mod mounts;
pub(crate) mod opening;
mod pace;
pub(crate) mod place;
mod policy;
pub(crate) mod preload;
pub(crate) mod program;
mod redo;
pub(crate) mod session;
pub(crate) mod socket;
pub(crate) mod stats;
pub(crate) mod supervise;
mod supervisor;
pub(crate) mod tree;
#[cfg(test)]
mod trial;
mod writeback;
