//! Names of files: renamed, removed, added.
//!
//! Invariants:
//! 1. One operation on names at a time in the whole tree of processes, under the log's lock of names, which is taken before the
//!    locks of files. Signals are blocked meanwhile: a handler that renames, or that leaves by `longjmp`, finds the locks free.
//! 2. An operation on a regular file is recorded before the kernel does it, whether or not the log knew the file: a later file
//!    of that name is only put there if the log took the name from the former one. Any other is counted as an unlogged change of
//!    names in its directory, or in all, before and after the kernel does it: a sync that looks in between is made for real.
//! 3. A live file never changes its names without a record. Where none can be had, the file is made durable
//!    and its records are retired first.
//!
//! Entry points: `hooks` are what programs call; [`changing`] brackets an operation.

mod folders;
mod hooks;
mod link;
mod mend;
mod rename;
mod scarce;
mod signals;
mod target;
mod unlink;

#[cfg(test)]
mod tests;

use tidegate::log::{Log, NamesGuard};

pub(crate) use folders::{Folder, appeared};
pub(crate) use scarce::{is_scarcity, settled};
pub(crate) use signals::{SignalsBlocked, find_handlers};
pub(crate) use target::{Name, Target};

/// The lock of names, with signals blocked for as long as it is held.
pub(crate) struct Names<'l> {
    // Given back first: signals come after it.
    pub(crate) guard: NamesGuard<'l>,
    _signals: SignalsBlocked,
}

/// Locks all names, and mends what the former holder was killed in; none where some process holds them for more than a
/// second.
pub(crate) fn lock(log: &Log) -> Option<Names<'_>> {
    let signals = SignalsBlocked::new();
    let guard = log.lock_names().ok()?;
    if guard.owner_died() {
        mend::half_done(log);
    }
    Some(Names { guard, _signals: signals })
}

/// Runs `operation` under the lock of names. Without the lock, names change unlogged.
pub(crate) fn changing(log: &Log, operation: impl FnOnce() -> isize) -> isize {
    let names = lock(log);
    let _signals = names.is_none().then(SignalsBlocked::new);
    let note = || {
        if names.is_none() {
            log.note_unlocked_names();
        }
    };
    note();
    let result = operation();
    note();
    result
}

/// Runs an operation of the kernel that the log does not have.
fn unlogged(log: &Log, operation: impl FnOnce() -> isize) -> isize {
    log.mark_names_unlogged();
    let result = operation();
    if result >= 0 {
        log.mark_names_unlogged();
    }
    result
}
