//! Names that become others.

use std::cell::Cell;
use std::ffi::c_uint;
use std::time::Duration;

use tidegate::log::{Log, Ticket};

use super::scarce::{is_scarcity, settled};
use super::target::{Name, Target};
use super::unlogged;
use crate::path::PathBuffer;
use crate::subject::{AppendFailure, Place, Positions, Subject};

/// How long the supervisor may take to retire the log.
const PATIENCE: Duration = Duration::from_secs(60);

/// Both names of the operation, and what stands under them.
struct Rename<'a, 'l> {
    log: &'l Log,
    to: Name<'a>,
    moved: &'a Target,
    replaced: Option<&'a Target>,
}

/// Renames `from` to `to`, with the flags of `renameat2`.
pub(super) fn rename(
    log: &Log,
    from: Name<'_>,
    to: Name<'_>,
    flags: c_uint,
    operation: impl FnOnce() -> isize,
) -> isize {
    let moved = match from.look(libc::O_NOFOLLOW) {
        Ok(moved) => moved,
        Err(libc::ENOENT) => return operation(),
        Err(error) if is_scarcity(error) => {
            return settled(log, &[from, to], libc::AT_SYMLINK_NOFOLLOW, operation);
        }
        Err(_) => return unlogged(log, operation),
    };
    let replaced = match to.look(libc::O_NOFOLLOW) {
        Err(error) if is_scarcity(error) => {
            return settled(log, &[from, to], libc::AT_SYMLINK_NOFOLLOW, operation);
        }
        replaced => replaced.ok(),
    };
    let rename = Rename { log, to, moved: &moved, replaced: replaced.as_ref() };
    if rename.changes_nothing(flags) {
        operation()
    } else if rename.is_of_directory() {
        rename.directory(operation)
    } else if flags & !libc::RENAME_NOREPLACE != 0 || !moved.is_file() {
        rename.unrecorded(operation)
    } else {
        rename.file(operation)
    }
}

impl Rename<'_, '_> {
    /// The kernel will refuse it, or find that both are names of one file.
    fn changes_nothing(&self, flags: c_uint) -> bool {
        self.replaced.is_some_and(|replaced| {
            flags & libc::RENAME_NOREPLACE != 0 || replaced.is_same(self.moved)
        })
    }

    fn is_of_directory(&self) -> bool {
        self.moved.is_directory() || self.replaced.is_some_and(Target::is_directory)
    }

    /// The paths of all files below change, and no record says so: all records are retired, before for what was acknowledged
    /// by then, and after it for what others wrote meanwhile to files that the log knew by their old paths.
    fn directory(&self, operation: impl FnOnce() -> isize) -> isize {
        self.log.checkpoint(PATIENCE);
        let result = unlogged(self.log, operation);
        if result >= 0 && self.log.tail() < self.log.head() {
            self.moved.make_durable();
            self.log.checkpoint(PATIENCE);
        }
        result
    }

    /// What no record describes: files that exchange their names, and things that are no files.
    fn unrecorded(&self, operation: impl FnOnce() -> isize) -> isize {
        if let Some(moved) = self.moved.live(self.log) {
            moved.settle(self.moved);
        }
        let replaced = self.replaced_subject();
        self.settle_replaced(replaced.as_ref());
        let result = unlogged(self.log, operation);
        self.note_replaced(result, replaced.as_ref());
        result
    }

    fn file(&self, operation: impl FnOnce() -> isize) -> isize {
        let replaced = self.replaced_subject();
        let result = if let Some(moved) = self.moved.recorded(self.log) {
            self.prepare(&moved, replaced.as_ref());
            let recorded = Cell::new(false);
            let record = |ticket: &mut Ticket<'_>| {
                let positions = self.record(ticket);
                recorded.set(positions.is_ok());
                positions
            };
            moved.run(self.moved, record, || {
                if !recorded.get() {
                    // Nothing tells that it loses its name: a replay must not give it back.
                    self.settle_replaced(replaced.as_ref());
                }
                operation()
            })
        } else {
            self.settle_replaced(replaced.as_ref());
            unlogged(self.log, operation)
        };
        self.note_replaced(result, replaced.as_ref());
        result
    }

    /// Makes durable what a replay of the record alone would lose: what of the moved file is neither in the log nor on the disk,
    /// while what it replaces is; and what the replaced file has under other names.
    fn prepare(&self, moved: &Subject<'_>, replaced: Option<&Subject<'_>>) {
        let is_lost = moved.guard.unlogged() > 0 && !moved.guard.is_covered();
        if self.replaced.is_some() && is_lost && !moved.is_live() {
            self.moved.make_durable();
        }
        if let (Some(target), Some(subject)) = (self.replaced, replaced) {
            target.settle_for_further_names(subject);
        }
    }

    fn record(&self, ticket: &mut Ticket<'_>) -> Result<Positions, AppendFailure> {
        let (mut from, mut to) = (PathBuffer::new(), PathBuffer::new());
        self.moved.path(&mut from)?;
        self.to.absolute(&mut to)?;
        let replaced =
            self.replaced.map_or(Ok(0), |replaced| replaced.key().map(|key| key.identity))?;
        Ok([ticket.rename(from.as_bytes(), to.as_bytes(), replaced)?, 0])
    }

    fn replaced_subject(&self) -> Option<Subject<'_>> {
        self.replaced?.known(self.log)
    }

    fn settle_replaced(&self, subject: Option<&Subject<'_>>) {
        if let (Some(replaced), Some(subject)) =
            (self.replaced, subject.filter(|subject| subject.is_live()))
        {
            subject.settle(replaced);
        }
    }

    fn note_replaced(&self, result: isize, subject: Option<&Subject<'_>>) {
        if let (true, Some(subject), Some(replaced)) = (result >= 0, subject, self.replaced) {
            replaced.lost_a_name(subject);
        }
    }
}
