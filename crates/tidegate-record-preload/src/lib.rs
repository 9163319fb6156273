//! The library that `tidegate record` preloads into a program and all that it starts.
//!
//! Its functions stand in front of the C library's. Each makes the call as the C library would,
//! and then tells the recorder, through [`tidegate_record::rings`], what the call did. A sync is
//! told before it is made: what other threads write while it lasts is not covered by it.
//!
//! # Invariants
//! 1. The program sees what the C library's function does: results, `errno`, cancellation. What
//!    cannot be recorded is counted.
//! 2. Hooks allocate nothing, take no lock that waits, and start nothing. They may run before this
//!    library is set up, in signal handlers, and in children of `fork` and `vfork`. A hook waits
//!    only while all rings are full.
//! 3. System calls beside the program's own: one for the position of a descriptor that has just
//!    been read or written there, two to four when a file is seen for the first time, one before a
//!    name changes. None changes anything.
//!
//! # Map
//! - the program's calls: `open`, `close`, `transfer` (reads and writes), `sync`, `names` (and
//!   sizes), `stream` (`FILE`), `program` (`exec`), `unseen` (what is only counted);
//! - `session` (this process, its rings), `table` (what each descriptor is), `files` (a file seen
//!   for the first time, identities, paths);
//! - `hook` (how a hook is declared, and the C library's function behind it).

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
