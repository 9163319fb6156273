//! The library that `tidegate run --volatile` preloads: it answers syncs at once.
//!
//! Its functions stand in front of the C library's. A sync of a file or directory on a disk of this
//! machine does nothing; writes that would sync by themselves (`O_SYNC`, `O_DSYNC`, `RWF_SYNC`,
//! `RWF_DSYNC`) do not. All other syncs are the kernel's: of devices, of pipes and sockets, and
//! on file systems where a sync concerns other machines. So each error is the kernel's own.
//!
//! # Invariants
//! 1. The program sees results, `errno` and cancellation as without the library, but for errors of
//!    the disk that only a sync would report.
//! 2. Hooks allocate nothing, take no lock, and may run in signal handlers and in children of
//!    `fork` and `vfork`.
//! 3. No hook calls a function by a name that a program or a hook may define: hooks make system
//!    calls by instructions, or call the next function (`next`).
//! 4. Calls that are not hooked cost nothing.
//! 5. Once the program has installed a filter of system calls, hooks make its own calls only.
//!
//! # Map
//! - the program's calls: `sync`, `write`, `open`, `descriptors`, `exec`, `confined`, `syscall`;
//! - `place` (whether a file's syncs are answered), `flags` (the flags that were taken off);
//! - `next` (the C library's functions), `load` (looks them up before the program runs).

mod confined;
mod descriptors;
mod exec;
mod flags;
mod load;
mod next;
mod open;
mod place;
mod sync;
mod syscall;
mod write;
