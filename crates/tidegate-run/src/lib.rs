//! Launcher and supervisor of `tidegate run`.
//!
//! A launcher (`session`, `launcher`) finds or starts the supervisor of a pool and runs one program
//! (`program`, `preload`). The supervisor (`opening`, `supervisor`, `tree`) owns the pool and knows
//! which processes use it. Its thread, the cleaner (`cleaner`, `allocator`), keeps the log short.
//! `policy` decides when it acts, `backlog` knows the due data, and `writeback` makes them durable
//! by the descriptors in `kept`. `repair` completes interrupted operations of dead processes;
//! `rewrite` writes again after errors of the disk. Launcher, supervisor and programs talk over a
//! `socket`, whose path is one of the pool's paths (`paths`).
//!
//! A volatile run has no pool and no supervisor: a library and a filter of system calls (`filter`)
//! answer syncs, and the launcher may make them at the end (`mounted`).
//!
//! The crate prints nothing: a [`Reporter`] does.

mod allocator;
mod backlog;
mod cleaner;
mod copies;
mod coverage;
mod filter;
mod held;
mod inherited;
mod journal;
mod kept;
mod kernel;
mod launcher;
mod locate;
mod mount;
mod mounted;
mod opening;
mod paths;
mod policy;
mod preload;
mod program;
mod ranges;
mod registry;
mod repair;
mod report;
mod rewrite;
mod session;
mod socket;
mod stats;
mod supervise;
mod supervisor;
mod suspension;
mod tree;
#[cfg(test)]
mod trial;
mod writeback;

pub use coverage::{Coverage, coverage};
pub use filter::{Filter, Scope};
pub use launcher::{Launch, Plan, SIGNAL_STATUS, caught_of};
pub use mounted::Mounted;
pub use opening::{RecoverOptions, discard, log_in_use};
pub use paths::{
    Lock, PoolPaths, dax_mounts, default_pool, existing_log, has_open, inspect_pool, is_empty,
    is_locked, open_pool_file, pool_identity, prepare_pool, socket_directories, socket_directory,
};
pub use preload::{Choice, Library, environment, preloaded};
pub use program::{Program, ProgramError};
pub use report::Reporter;
pub use session::{Asked, Finished, Session, SessionOptions, ask, ask_at, tell};
pub use socket::{Reply, Request, Welcome};
pub use stats::Statistics;
pub use supervise::supervise;
pub use tree::processes_that_map;
