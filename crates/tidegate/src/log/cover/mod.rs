//! The rules of `run`: decides from facts how a file is served, and why.
//!
//! The preload library gathers the facts and carries the actions out on the kernel. The simulator
//! does both on its model of a kernel, and injects its mistakes into the facts. So the simulator
//! tests the rules that ship.
//!
//! Invariants:
//! 1. A decision makes no system call, takes no lock and allocates nothing: hooks decide inside
//!    signal handlers and on small stacks.
//! 2. A fact that costs a system call or a search is a closure. A decision calls the closure at
//!    most once, and only if the answer matters.
//! 3. Nothing here changes the log. A decision returns an action. The caller carries it out under
//!    the lock that it held while it gathered the facts.
//!
//! Map: `sync` has the table of syncs, `write` has writes and truncations, `admission` decides when
//! a file is covered and how it leaves, `names` has new files, names, attributes and seals. `cause`
//! lists the causes that keep files plain.
//! docs/decisions/run-logs-what-was-synced.md has the reasons.

mod admission;
mod cause;
mod names;
mod sync;
mod write;

pub use admission::{
    AdmissionFacts, BeginAction, BeginFacts, LeaveAction, NotAdmitted, cause_of_admission,
    decide_admission, decide_begin, decide_leave, is_overwritten_in_place, leaves_unrecorded,
};
pub use cause::Cause;
pub use names::{
    FileFacts, MADE_BYTES_MAX, MadeFacts, MakeFacts, RecordFacts, ReplacedFacts, cause_of_new,
    fit_record, has_all, may_make, may_record_attributes, may_record_name, may_replace, may_seal,
    may_unseal, stands_for_sync, stays_by_sync,
};
pub use sync::{
    DirectoryFacts, GAIN_BYTES_MAX, Sync, SyncAction, SyncFacts, SyncLookups, SyncedState,
    answers_directory, decide_sync,
};
pub use write::{
    CutAction, Place, WriteAction, WriteExtent, WriteFacts, change_of_cut, confirmed_start,
    decide_cut, decide_record, decide_write, is_watched, splits_sync,
};
