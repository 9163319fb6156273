//! Truncation of files: `ftruncate`, `truncate`, `O_TRUNC`.
//!
//! Invariant: a truncation of a plain file is counted as pending; the make record of a new file
//! will have its size. [`tidegate::log::cover`] has the rules for covered files.

use tidegate::log::cover::{CutAction, change_of_cut, decide_cut};
use tidegate::log::{FileGuard, Ticket};

use super::{Locked, Open, Refused, is_disk_failure, negated};
use crate::covered::{metadata, plain};
use crate::state::process;
use crate::sys::own_stack;

/// Truncates the file to `size` bytes by `kernel`, the program's own system call. Returns the
/// kernel's result, or `-EIO` if the file cannot leave the log because its disk fails.
pub(crate) fn truncate(open: &Open, size: u64, kernel: impl FnOnce() -> isize) -> isize {
    if let Some(in_flight) = plain::enter(open.log, &open.known) {
        let result = truncate_plain(open, kernel);
        drop(in_flight);
        return result;
    }
    let Some(entry) = open.entry() else {
        return open.unidentified(|| metadata::counted(kernel));
    };
    let Ok(guard) = open.lock(entry) else {
        return open.without_lock(entry, || metadata::counted(kernel));
    };
    let is_pending = || open.log.file_systems().is_pending(guard.file_system);
    let facts = (guard.is_logged(), guard.is_covered());
    match decide_cut(facts, size, process::file_bytes_max(), is_pending) {
        CutAction::Plain => return truncate_plain(open, kernel),
        CutAction::Record => {
            if let Ok((ticket, position)) = own_stack::run(|| record_size(open, &guard, size)) {
                return cut(open, &guard, ticket, position, size, kernel);
            }
        }
        CutAction::Leave => {}
    }
    if open.leave(&guard) { metadata::counted(kernel) } else { negated(libc::EIO) }
}

fn truncate_plain(open: &Open, kernel: impl FnOnce() -> isize) -> isize {
    metadata::counted_new(open.fd, (open.known.device, open.known.inode), kernel)
}

fn record_size<'g>(
    open: &Open,
    guard: &'g FileGuard<'_>,
    size: u64,
) -> Result<(Ticket<'g>, u64), Refused> {
    let mut ticket = guard.begin()?;
    if ticket.needs_define() || guard.take_renamed() {
        open.define_again(guard, &mut ticket)?;
    }
    let position = ticket.set_size(size, size > guard.size())?;
    Ok((ticket, position))
}

fn cut(
    open: &Open,
    guard: &Locked,
    mut ticket: Ticket<'_>,
    position: u64,
    size: u64,
    kernel: impl FnOnce() -> isize,
) -> isize {
    let grew = size > guard.size();
    let changes = open.log.file_systems().changes(guard.file_system);
    let result = kernel();
    if result >= 0 {
        guard.note_size(size, grew);
        guard.note_change(change_of_cut(size, changes));
        return result;
    }
    if is_disk_failure(result) {
        guard.note_dropped();
    }
    if ticket.void(position).is_err() {
        drop(ticket);
        // If the disk fails, recovery may make the change that the kernel has refused.
        let _ = open.leave(guard);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::World;

    /// The records of a truncation of a covered file from four to `size` bytes, and whether the
    /// file is still covered.
    fn truncated(size: u64, result: isize, prepare: impl FnOnce(&World, &Open)) -> (String, bool) {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        prepare(&world, &open);
        let from = world.log.ring().head();
        assert_eq!(truncate(&open, size, || result), result);
        (world.records_since(from), world.is_covered(&open))
    }

    fn pending(world: &World, open: &Open) {
        world.log.file_systems().note_change(open.entry().unwrap().file_system);
    }

    #[test]
    fn a_truncation_is_recorded_only_while_nothing_is_pending() {
        let recorded = |records: &str| (records.to_owned(), true);
        assert_eq!(truncated(2, 0, |_, _| ()), recorded("size:2"));
        assert_eq!(truncated(4, 0, |_, _| ()), recorded("size:4"));
        assert_eq!(truncated(9, 0, |_, _| ()), recorded("size:9+"));
        assert_eq!(truncated(2, -1, |_, _| ()), recorded("size:2 void"));
        assert_eq!(truncated(2, 0, pending), ("end".to_owned(), false));
        assert_eq!(truncated(u64::MAX, -1, |_, _| ()), ("end".to_owned(), false));
    }

    #[test]
    fn a_file_system_that_has_failed_is_not_trusted_with_what_it_was_given_before() {
        let replays_all = |result| {
            let world = World::new();
            let file = world.file("file");
            let open = world.covered(&file, 0);
            assert_eq!(truncate(&open, 2, || result), result);
            world.log.ring().pool().session().unwrap() == Some(tidegate::log::NO_BOOT)
        };
        assert!(replays_all(negated(libc::EROFS)) && replays_all(negated(libc::EIO)));
        assert!(!replays_all(negated(libc::ENOSPC)) && !replays_all(0));
    }

    #[test]
    fn that_of_a_covered_file_is_not_pending_but_needs_a_mark() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        let entry = open.entry().unwrap();
        truncate(&open, 2, || 0);
        assert!(
            !world.log.file_systems().is_pending(entry.file_system)
                && world.log.has_grown(entry.file)
        );
        let guard = open.lock(entry).unwrap();
        assert_eq!((guard.size(), guard.durable_size()), (2, 2));
        assert!(guard.grows(3) && !guard.grows(2));
    }

    #[test]
    fn that_of_a_plain_file_leaves_no_record() {
        let world = World::new();
        let file = world.file("file");
        assert_eq!(truncate(&world.open(&file, 0), 2, || 0), 0);
        assert_eq!(world.records_since(0), "");
    }
}
