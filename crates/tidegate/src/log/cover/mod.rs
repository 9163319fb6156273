//! The rules of `run`: what is done with a file, and why, decided from facts.
//!
//! The preload library gathers the facts and carries the actions out on the kernel. The simulator
//! does both on its model of a kernel, and plants its mistakes in the facts. So the rules that it
//! plays are those that ship.
//!
//! Invariants:
//! 1. A decision makes no system call, takes no lock and allocates nothing: hooks decide inside of
//!    signal handlers and on small stacks.
//! 2. A fact that costs a system call or a search is a closure. A decision asks for it at most
//!    once, and only where the answer matters.
//! 3. Nothing here changes the log: a decision is an action, which the caller carries out under the
//!    lock by which it gathered the facts.
//!
//! Map: `sync` has the table of syncs, `write` has writes and truncations, `admission` when a file
//! is covered and how it leaves, `names` new files, names, attributes and seals. `cause` names what
//! keeps files plain.
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
