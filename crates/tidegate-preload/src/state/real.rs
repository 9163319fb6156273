//! Causes of real syncs: counted, and reported to the supervisor if the user may want to know.
//!
//! Invariant: only real syncs cost anything here. Syncs that the log answers never get here.
//!
//! Entry points: [`count`]; [`note_uncoverable`], [`note_synchronous`] after a sync;
//! [`note_unseen`], [`tell`].

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use tidegate::log::cover::Cause;
use tidegate::log::{Counter, Log, PATH_END_BYTES, RealSync, SyncNames, current_process};

use crate::covered::Open;
use crate::state::descriptors::{Kind, Known};
use crate::state::process::{Holder, Holding};
use crate::state::{process, supervisor};
use crate::sys::own_stack;
use crate::sys::path::{self, PathBuffer};
use crate::sys::signals::SignalsBlocked;

/// A bit for each cause that this program has reported.
static TOLD: AtomicU32 = AtomicU32::new(0);
/// Why any file of this process may change unseen: the number of a [`Cause`] plus 1; 0 if unknown.
static UNSEEN: AtomicU32 = AtomicU32::new(0);

/// Reports a cause to the supervisor, once in this process.
#[cold]
pub(crate) fn tell(cause: Cause) {
    let bit = 1 << cause as u32;
    if TOLD.load(Ordering::Relaxed) & bit != 0 {
        return;
    }
    // After the log was given up, a system call filter may kill the process for a call of ours.
    let Some(_holding) = Holding::new() else { return };
    // A child of `vfork` would note the report in its parent's memory, but connect by itself.
    if !process::in_vfork_child() && TOLD.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        own_stack::run(|| supervisor::tell_plain(cause));
    }
}

/// Notes why any file of this process may change unseen from now on. The cause is reported when the
/// process syncs a file.
pub(crate) fn note_unseen(cause: Option<Cause>) {
    UNSEEN.store(cause.map_or(0, |cause| cause as u32 + 1), Ordering::Relaxed);
}

/// Returns the [`Cause`] that was noted last, if one was.
pub(crate) fn why_unseen() -> Option<Cause> {
    Cause::from_repr(UNSEEN.load(Ordering::Relaxed).checked_sub(1)?)
}

/// Counts a real sync, through `fd`, of the file with these numbers.
#[cold]
pub(crate) fn count(log: &Log, fd: c_int, (device, inode): (u64, u64), cause: Counter) {
    log.ring().stats().add(cause, 1);
    // No call after the log was given up, as in `tell`. Signals are not blocked: a handler that
    // jumps out here keeps the list locked, and later syncs are counted without a row.
    let Some(_holder) = Holder::new() else { return };
    if !process::in_vfork_child() {
        let sync = RealSync { cause, process: current_process(), device, inode };
        log.real_syncs().add(&sync, || {
            let _signals = SignalsBlocked::deferred();
            own_stack::run(|| names(fd))
        });
    }
}

/// Returns the program's name, and the path of the file of `fd`.
fn names(fd: c_int) -> SyncNames {
    let mut path = PathBuffer::new();
    // A file without a path is listed without one.
    let _ = path::of_descriptor(fd, &mut path);
    let bytes = path.as_bytes();
    let end = &bytes[bytes.len().saturating_sub(PATH_END_BYTES)..];
    let mut names = SyncNames { program: supervisor::program_name(), ..SyncNames::NONE };
    names.path[..end.len()].copy_from_slice(end);
    names
}

/// Counts a sync by the C library of a descriptor that is never covered: a directory, or a file of
/// another file system on a disk.
pub(crate) fn note_uncoverable(fd: c_int, known: &Known) {
    let Some(log) = process::log() else { return };
    let numbers = (known.device, known.inode);
    match known.kind {
        Kind::Directory => count(log, fd, numbers, Counter::SyncsOfDirectories),
        Kind::Elsewhere => {
            count(log, fd, numbers, Counter::SyncsUnsupported);
            tell(Cause::FileSystem);
        }
        _ => {}
    }
}

/// Counts a write with this result as a sync: the kernel has synced it, as its descriptor demands.
#[cold]
pub(crate) fn note_synchronous(open: &Open, result: isize) {
    if result > 0 {
        open.count(Counter::SyncsSynchronous);
        tell(Cause::Synchronous);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_is_noted_is_found_by_its_number() {
        for cause in [Cause::StaticProgram, Cause::Libaio, Cause::Synchronous] {
            note_unseen(Some(cause));
            assert_eq!(why_unseen(), Some(cause));
        }
        note_unseen(None);
        assert_eq!(why_unseen(), None);
    }
}
