//! Names that go away.

use std::time::Duration;

use tidegate::log::{Log, NameTicket, Ticket};

use super::scarce::{is_scarcity, settled};
use super::target::{Name, Target};
use super::unlogged;
use crate::path::PathBuffer;
use crate::subject::AppendFailure;

/// How long the supervisor may take to retire the log.
const PATIENCE: Duration = Duration::from_secs(60);

/// Removes the name of anything but a directory.
pub(super) fn unlink(log: &Log, name: Name<'_>, operation: impl FnOnce() -> isize) -> isize {
    let target = match name.look_at_entry(log) {
        Ok(target) => target,
        Err(libc::ENOENT) => return operation(),
        Err(error) if is_scarcity(error) => {
            return settled(log, &[name], libc::AT_SYMLINK_NOFOLLOW, operation);
        }
        Err(_) => return unlogged(log, operation),
    };
    let subject = target.known(log);
    let result = match &subject {
        Some(subject) if subject.is_live() => {
            target.settle_for_further_names(subject);
            let record = |ticket: &mut Ticket<'_>| {
                let mut path = PathBuffer::new();
                target.path(&mut path)?;
                Ok([ticket.unlink(path.as_bytes())?, 0])
            };
            subject.run(&target, record, operation)
        }
        _ => removed(log, &target, operation),
    };
    if let (true, Some(subject)) = (result >= 0, &subject) {
        target.lost_a_name(subject);
    }
    result
}

/// Removes a name of a file that the log has nothing of. It is told who had the name, so that whoever gets it next may take
/// it over in a replay.
fn removed(log: &Log, target: &Target, operation: impl FnOnce() -> isize) -> isize {
    let Ok((mut ticket, position)) = record(log, target) else {
        return unlogged(log, operation);
    };
    let result = operation();
    if result < 0 && ticket.void(position).is_err() {
        drop(ticket);
        log.checkpoint(PATIENCE);
    }
    result
}

fn record<'l>(log: &'l Log, target: &Target) -> Result<(NameTicket<'l>, u64), AppendFailure> {
    if !target.is_recordable() {
        return Err(AppendFailure::Unknown);
    }
    let mut path = PathBuffer::new();
    target.path(&mut path)?;
    let identity = target.key()?.identity;
    let mut ticket = log.begin_on_names()?;
    let position = ticket.unlink(path.as_bytes(), identity)?;
    Ok((ticket, position))
}
