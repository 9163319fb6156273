//! Calls on plain files: the kernel makes them, announced in the calling thread's lane.
//!
//! Why no lock is needed: the writer stores in its lane which file it is about to write, and then
//! loads whether the file has an entry whose changes are logged. The thread that begins a story
//! stores that the changes are to be logged, and then loads all lanes. These two stores and two
//! loads are in one total order (`SeqCst`): either the writer finds the story and logs, or the
//! other thread finds the write in flight, and waits until the write ends before the covering sync.
//!
//! Entry points: [`enter`] around a write, [`in_lane`] for any other call.

use tidegate::log::{InFlight, Log, PlainCall};

use crate::state::descriptors::Known;
use crate::state::process;
use crate::sys::query;

/// Enters the lane for a change of a file by a descriptor: while the result lives, the kernel alone
/// makes the change. Returns `None` if the change has to go by the file's entry.
#[inline]
pub(crate) fn enter(log: &'static Log, known: &Known) -> Option<InFlight<'static>> {
    let (device, inode) = (known.device, known.inode);
    let in_flight = in_lane(log, PlainCall::Write { device, inode })?;
    let goes_by_entry = match known.entry() {
        Some(entry) => log.must_log(entry.file),
        None => log.may_have(device, inode),
    };
    (!goes_by_entry).then_some(in_flight)
}

/// Announces a call in the calling thread's lane. Returns `None` if the thread has no lane.
#[inline]
pub(crate) fn in_lane(log: &'static Log, call: PlainCall) -> Option<InFlight<'static>> {
    if process::in_vfork_child() {
        // A claimed lane would be noted in the memory of the parent's thread.
        return None;
    }
    log.lanes().enter(call).or_else(|| in_new_lane(log, call))
}

#[cold]
fn in_new_lane(log: &'static Log, call: PlainCall) -> Option<InFlight<'static>> {
    log.lanes().claim(query::is_alive);
    log.lanes().enter(call)
}
