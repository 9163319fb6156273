//! The library that `tidegate run` preloads into a program and all processes that it starts.
//!
//! Its functions stand in front of the C library's. A file is *plain* or *covered*. Calls on a
//! plain file go to the kernel, and its syncs are real. A sync makes a file covered: all its bytes,
//! its size and its existence are then on the disk or in the log on persistent memory. Writes and
//! truncations of a covered file are logged first and then made in the kernel, so that all readers
//! find the current bytes in the page cache. Its syncs cost an append or nothing.
//!
//! # Rules
//! 1. *Whenever the log cannot answer a sync, the real sync on the program's own descriptor is
//!    right.*
//! 2. Before a covered file changes in a way that the hooks do not see, it leaves the log: a real
//!    sync makes it durable, and then its story ends.
//! 3. The kernel makes changes of names, attributes and sizes. They are counted before and after
//!    the call. A sync that would commit them to the journal is answered only while none is
//!    pending.
//! 4. While none is pending, one record of a whole new file answers its first sync. Links, renames
//!    and removals of files that the log has are recorded before they are made. Before any other
//!    change of names or attributes, such a file leaves.
//!
//! # What makes a file leave
//! - A stream for writing is open on it (`fopen`, `fdopen`, `freopen`), or it is standard output or
//!   error: the C library writes it. It stays plain as long as that lasts.
//! - A process has mapped it shared and writable, or written it by `aio_write` or `dprintf`: it may
//!   change at any time. It stays plain as long as that process lives.
//! - It is written with `O_DIRECT`: around the page cache.
//! - `sendfile`, `copy_file_range`, `splice`, `vdprintf`, `backtrace_symbols_fd`, `fallocate` or a
//!   cloning `ioctl` runs: the kernel or the C library writes it.
//! - `F_SETFL` or `fdopen` has changed how a descriptor writes, or a descriptor was sent to another
//!   process: it is written elsewhere.
//! - A thread of the process has descriptors of its own: numbers mean other files there. All files
//!   of the process leave.
//! - libaio is set up in the process: the kernel writes at an unknown time. All files of the
//!   process leave.
//!
//! While a process of the tree cannot be watched (a static program, another C library, a process
//! that has given up rights or has set up `io_uring`), no file of the tree is covered: `rights`,
//! `exec`.
//!
//! # Invariants
//! 1. Hooks allocate nothing, take no lock but the log's, and start nothing. They may run before
//!    this library is set up, in signal handlers, and in children of `fork` and `vfork`.
//! 2. `errno` and results are the kernel's. A call that does not go to the log goes to the C
//!    library's own function, with its cancellation points. A call on a file that can be covered is
//!    a cancellation point when it begins.
//! 3. A signal handler that interrupts a hook and writes to the same file ends the file's story.
//!
//! # Map
//! - `hooks`: the functions that programs call, by kind of call;
//! - `covered`: how files change and are synced, through the log or by the kernel alone;
//! - `state`: facts about files, descriptors, file systems and this process;
//! - `sys`: system calls, the C library's functions, memory and signals.
#![cfg_attr(test, allow(dead_code))]

#[cfg(test)]
mod confinement;
mod covered;
mod hooks;
mod state;
mod sys;
#[cfg(test)]
mod testing;
