//! The library that `tidegate run` preloads into a program and all that it starts.
//!
//! Its functions stand in front of the C library's. A file is *plain* or *covered*. Calls on a
//! plain file go to the kernel, and its syncs are real. A sync makes a file covered: all its bytes,
//! its size and its existence are then on the disk or in the log on persistent memory. Its writes
//! and truncations are logged first and then made in the kernel, so that everything that reads sees
//! the page cache, which is right; and its syncs cost an append or nothing.
//!
//! # Rules
//! 1. *Whenever the log cannot answer a sync, the real sync on the program's own descriptor is
//!    right.*
//! 2. A covered file that is about to change in a way that the hooks do not see leaves the log
//!    before: a real sync, then the end of its story.
//! 3. Changes of names, attributes and sizes are the kernel's. They are counted, before and after
//!    the call: a sync that would commit them to the journal is answered only while none is
//!    pending.
//! 4. While none is pending, one record of all of a new file answers its first sync, and links,
//!    renames and removals of files that the log has are recorded before they are made. Any other
//!    change of names or attributes makes such a file leave before.
//!
//! # What makes a file leave
//! - A stream for writing is open on it (`fopen`, `fdopen`, `freopen`), or it is standard output or
//!   error: the C library writes it. As long as that lasts.
//! - A process has mapped it shared and writable, or written it by `aio_write` or `dprintf`: it may
//!   change at any time. As long as that process lives.
//! - It is written with `O_DIRECT`: around the page cache.
//! - `sendfile`, `copy_file_range`, `splice`, `vdprintf`, `backtrace_symbols_fd`, `fallocate` or a
//!   cloning `ioctl` runs: the kernel or the C library writes it.
//! - `F_SETFL` or `fdopen` has changed how a descriptor writes, or a descriptor was sent to another
//!   process: it is written elsewhere.
//! - A thread of the process has descriptors of its own: numbers mean other files there. All files
//!   of the process.
//! - libaio is set up in the process: the kernel writes when it likes. All files of the process.
//!
//! While a process of the tree cannot be watched (static programs, another C library, one that has
//! given up rights or has set up `io_uring`), no file of the tree is covered: `rights`, `exec`.
//!
//! # Invariants
//! 1. Hooks allocate nothing, take no lock but the log's, and start nothing. They may run before
//!    this library is set up, in signal handlers, and in children of `fork` and `vfork`.
//! 2. `errno` and results are the kernel's. What goes to the C library instead of the log is its
//!    own function, with its cancellation points; what goes to a file is one when it begins.
//! 3. A signal handler that interrupts a hook and writes to the same file ends the file's story.
//!
//! # Map
//! - the program's calls: `write`, `sync`, `size`, `open`, `names`, `attributes`, `close`, `stdio`,
//!   `printf`, `mapping`, `transfer`, `aio`, `message`, `exec`, `syscall`, `fork`, `vfork`,
//!   `rights`, `limits`, `loading`, `memory_limits`, `unmount`; and `library`, for changes that the
//!   C library makes by itself;
//! - what they do: `plain` (a call in its lane), `every_write` (and its sync), `metadata` (a
//!   counted one), `covered` (admission, new files, names, writes, truncations, syncs, leaving),
//!   `unseen` (files pinned to the kernel path), `lifecycle` (the library is loaded, the process
//!   forks and ends);
//! - what they know: `files` (which file), `new_files`, `parents` (names and their directories),
//!   `extended` (attributes), `file_systems`, `extents`, `record_locks`, `descriptors` (what is
//!   noted of each), `objects` (libraries), `proc_fd`, `kept` (files that are pinned), `real` (why
//!   syncs are real), `process` (and what the user wants), `supervisor`, `suspended`, `mounts`;
//! - underneath: `raw` (system calls), `query` (those that the program does not make itself),
//!   `next` (the C library's functions), `synonyms`, `path`, `page`, `own_stack`, `shared` (values
//!   without a lock), `readable` (the program's pointers), `cancel`, `signals`.
#![cfg_attr(test, allow(dead_code))]

mod aio;
mod attributes;
mod cancel;
mod close;
#[cfg(test)]
mod confinement;
mod covered;
mod descriptors;
mod every_write;
mod exec;
mod extended;
mod extents;
mod file_systems;
mod files;
mod fork;
mod kept;
mod library;
mod lifecycle;
mod limits;
mod loading;
mod mapping;
mod memory_limits;
mod message;
mod metadata;
mod mounts;
mod names;
mod new_files;
mod next;
mod objects;
mod open;
mod own_stack;
mod page;
mod parents;
mod path;
mod plain;
mod printf;
mod proc_fd;
mod process;
mod query;
mod raw;
mod readable;
mod real;
mod record_locks;
mod rights;
mod shared;
mod signals;
mod size;
mod stdio;
mod supervisor;
mod suspended;
mod sync;
mod synonyms;
mod syscall;
#[cfg(test)]
mod testing;
mod transfer;
mod unmount;
mod unseen;
mod vfork;
mod write;
