//! The library that `tidegate run` preloads into a program and all that it starts.
//!
//! Its functions stand in front of the C library's. A write to a file is first in the log on persistent memory, durable, and then
//! made in the kernel as always; so `fsync`, `fdatasync` and `O_SYNC` cost nothing, and everything that reads (the
//! program, other processes, `stat`, `lseek`, mappings) sees the page cache, which is right. Nothing that reads is touched.
//!
//! # Rule
//! *Never wrong, at worst not faster.* A file that is changed in a way that the hooks do not see leaves the log first: what the log
//! has of it is made durable in the file and retired, and its syncs are real. It comes back with the first real sync after that has
//! ended.
//!
//! # What is in the log
//! Regular files on file systems of this machine that a power cut spares, written by: `write`, `pwrite`, `writev`, `pwritev`,
//! `pwritev2` and their aliases, also through `syscall`; emptied by `open` with `O_TRUNC`; made by `open`, `creat`,
//! `mkstemp`, `fopen` and their kin. With `O_APPEND`, copies of descriptors, forks, many processes and threads.
//!
//! # What leaves the log
//! | while | the file |
//! |---|---|
//! | a stream for writing is open on it (`fopen`, `fdopen`, `freopen`), or it is standard output or error | is written by the C library unseen |
//! | the process lives that mapped it shared and writable, or wrote it by `aio_write` or `dprintf` | may be changed at any time |
//! | it is open with `O_DIRECT`, or `F_SETFL` or `fdopen` has changed how its descriptors write | is written past the page cache, or elsewhere |
//! | `sendfile`, `copy_file_range`, `splice`, `vdprintf`, `backtrace_symbols_fd`, a cloning `ioctl` runs | is written by the kernel or the C library |
//! | a thread of the process may only read and write (strict `seccomp`; all of its files) | is written without leave to log it |
//! | a thread of the process has descriptors of its own (all of its files) | is written by numbers that mean another file |
//! | libaio or `io_uring` is set up in the process (all of its files) | is written by the kernel, when it likes |
//!
//! # What is not caught
//! Static programs and inline system calls; `dlsym` on a handle of the C library; a descriptor sent to a process that has not
//! loaded this library, or inherited by one. To the log these are programs outside: what they write is as durable as without
//! Tidegate, and the program must not rely on their order with what the log has. A descriptor opened with `O_SYNC` has lost
//! that flag in the kernel: a program outside that inherits it writes without it. A stream, `aio_write`, libaio or `io_uring` of this
//! process gets it back, unless other descriptors may share the description or the process holds record locks.
//!
//! # Invariants
//! 1. Hooks allocate nothing, take no lock but the log's, and start nothing. They may run before this library is set up, in signal
//!    handlers, and in children of `fork` and `vfork`.
//! 2. `errno` and results are the kernel's. What goes to the C library instead of the log is its own function, with its
//!    cancellation points; what goes to the log is one when it begins.
//! 3. A signal handler that interrupts a hook and writes to the same file writes past the log.
//!
//! # Map
//! - the program's calls: `write`, `sync`, `open`, `close`, `stdio`, `mapping`, `transfer`, `aio`, `printf`,
//!   `attributes`, `names`, `size`, `limits`, `exec`, `syscall`, `fork`, `vfork`, `seccomp`;
//! - what they do: `logged` (a file in the log), `birth` (one that is made), `mend` (after a writer that was killed), `unseen` (files out of the log);
//! - what they know: `files` (which file), `file_systems`, `known_folder`, `found_before`, `descriptors` (what is noted of each), `glob` (what the user wants), `process`, `quota`;
//! - underneath: `raw` (system calls), `next` (the C library's functions), `alike`, `path`, `readable` (its pointers), `cancel`.
#![cfg_attr(test, allow(dead_code))]

mod absorb;
mod aio;
mod alike;
mod attributes;
mod birth;
mod cancel;
mod close;
mod descriptors;
mod exec;
mod file_systems;
mod files;
mod fork;
mod found_before;
mod glob;
mod known_folder;
mod limits;
mod logged;
mod mapping;
mod mend;
mod message;
mod names;
mod next;
mod open;
mod page;
mod path;
mod printf;
mod process;
mod quota;
mod raw;
mod read;
mod readable;
mod seccomp;
mod size;
mod stat;
mod stdio;
mod subject;
mod supervisor;
mod sync;
mod syscall;
#[cfg(test)]
mod testing;
mod transfer;
mod unseen;
mod vfork;
mod write;
