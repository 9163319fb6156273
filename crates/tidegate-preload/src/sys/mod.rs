//! The layer below: system calls, the C library's functions, memory and signals.
//!
//! - `raw` (system calls that no hook stands in front of), `query` (calls that the program does not
//!   make itself), `next` (the C library's functions);
//! - memory: `page`, `own_stack`, `path`, `shared` (values without a lock), `readable` (the
//!   program's pointers);
//! - `signals` (what keeps handlers out of operations), `handlers` (what stands before them).

pub(crate) mod handlers;
pub(crate) mod next;
pub(crate) mod own_stack;
pub(crate) mod page;
pub(crate) mod path;
pub(crate) mod query;
pub(crate) mod raw;
pub(crate) mod readable;
pub(crate) mod shared;
pub(crate) mod signals;
