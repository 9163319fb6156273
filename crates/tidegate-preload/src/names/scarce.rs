//! Operations on names while there are no descriptors left to look at them with.
//!
//! What the log has of such a file is made durable and retired, so that nothing depends on its names.

use tidegate::log::Log;

use super::target::Name;
use super::unlogged;
use crate::raw::{self, Errno};
use crate::{absorb, files, process};

/// Whether a name could not be looked at though it may be there.
pub(crate) fn is_scarcity(error: Errno) -> bool {
    matches!(error, libc::EMFILE | libc::ENFILE | libc::ENOMEM)
}

/// Runs `operation`, which changes the file or the name of each of `names`; `flags` as for `fstatat`.
#[cold]
pub(crate) fn settled(
    log: &Log,
    names: &[Name<'_>],
    flags: i32,
    operation: impl FnOnce() -> isize,
) -> isize {
    for name in names {
        settle(log, *name, flags);
    }
    unlogged(log, operation)
}

fn settle(log: &Log, name: Name<'_>, flags: i32) -> Option<()> {
    let stat = raw::fstatat(name.directory, name.path, flags).ok()?;
    let key = files::key_at(name.directory, name.path, flags, &stat).ok()?;
    let file = log.find(&key).ok()??;
    let guard = loop {
        let guard = log.lock(file).ok()?;
        if guard.absorber() == 0 {
            break guard;
        }
        drop(guard);
        // What the kernel was not told of is made durable by no sync.
        absorb::settle_named(process::log()?, file).ok()?;
    };
    raw::sync();
    let retired = guard.begin().and_then(|mut ticket| ticket.retire()).is_ok();
    guard.mark_unlogged(!retired);
    Some(())
}
