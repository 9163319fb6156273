//! The library that `tidegate record` preloads into a program and its descendants.
//!
//! Its functions interpose on the C library. Each makes the original call, and then reports the
//! call's effect to the recorder through [`tidegate_record::rings`]. A sync is reported before the
//! call, because the sync does not cover what other threads write during it.
//!
//! # Invariants
//! 1. The program sees the results, `errno` and cancellation points of the C library's functions.
//!    The library counts operations that it cannot record.
//! 2. Hooks allocate no memory, take no blocking lock, and start no thread or process. They may run
//!    before this library is initialized, in signal handlers, and in children of `fork` and
//!    `vfork`. A hook waits only while all rings are full.
//! 3. Extra system calls: one for the position of a descriptor after a read or write there, two to
//!    four when a file is first seen, one before a change of a name. They change no state.
//!
//! # Map
//! - the program's calls: `open`, `close`, `transfer` (reads and writes), `sync`, `names` (and
//!   sizes), `stream` (`FILE`), `program` (`exec`), `unseen` (calls that are only counted);
//! - `session` (this process and its rings), `table` (the file of each descriptor), `files` (files
//!   at first sight, identities, paths);
//! - `hook` (declaration of hooks, and the C library's functions behind them).

mod close;
mod files;
mod hook;
mod lifecycle;
mod names;
mod open;
mod program;
mod session;
mod stream;
mod sync;
mod table;
mod transfer;
mod unseen;
