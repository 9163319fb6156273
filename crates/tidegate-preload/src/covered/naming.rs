//! Changes of the names of covered files: recorded before the kernel makes them.
//!
//! The rules are B2 and B5 of docs/decisions/run-logs-what-was-synced.md.
//!
//! Invariants:
//! 1. [`tidegate::log::cover`] decides whether a change is recorded, under the lock of the file
//!    system's names and the lock of the file. The kernel makes the change by the open directories
//!    that the record names, before the locks are released.
//! 2. No lock is held over a sync that has to come before the record.
//! 3. A change that fails voids its record. If the process is killed in between, the supervisor
//!    makes the file leave.
//!
//! Entry point: [`change_name`].
#![allow(unsafe_code)] // system calls

use std::ffi::{CStr, c_int, c_uint};

use tidegate::durable;
use tidegate::log::cover::{
    RecordFacts, ReplacedFacts, may_record_name, may_replace, stays_by_sync,
};
use tidegate::log::{
    Counter, FileGuard, FileHandle, FileRef, Log, NameChange, NameRecord, NamesGuard, Ticket,
};

use super::LOCK_TIMEOUT;
use super::leave::{Gone, leave_locked};
use crate::state::extents::commits_all;
use crate::state::file_systems;
use crate::state::files::{Identified, Seen};
use crate::state::parents::Parent;
use crate::state::process::{self, Holding};
use crate::state::record_locks::Unlocked;
use crate::sys::path::PathBuffer;
use crate::sys::raw::{self, words};
use crate::sys::{own_stack, query};

/// A directory, and a path relative to it.
pub(crate) type Path<'p> = (c_int, &'p CStr);

/// A change of names that a program asks for.
#[derive(Clone, Copy)]
pub(crate) enum Changed<'p> {
    Link { from: Path<'p>, to: Path<'p> },
    Unlink { from: Path<'p> },
    Rename { from: Path<'p>, to: Path<'p>, flags: c_uint },
}

impl<'p> Changed<'p> {
    fn from(&self) -> Path<'p> {
        match *self {
            Self::Link { from, .. } | Self::Unlink { from } | Self::Rename { from, .. } => from,
        }
    }

    fn to(&self) -> Option<Path<'p>> {
        match *self {
            Self::Link { to, .. } | Self::Rename { to, .. } => Some(to),
            Self::Unlink { .. } => None,
        }
    }

    /// Returns the number of names after the change of a file that had `links` names.
    fn links_after(&self, links: u32) -> u32 {
        match self {
            Self::Link { .. } => links.saturating_add(1),
            Self::Unlink { .. } => links.saturating_sub(1),
            Self::Rename { .. } => links,
        }
    }
}

/// The file that a rename replaces, which loses its last name; empty if there is none.
#[derive(Default)]
struct Replaced {
    handle: Option<FileHandle>,
    /// The replaced file's entry, if it has one.
    file: Option<FileRef>,
}

/// A change with the facts for its record.
struct Change<'p> {
    log: &'static Log,
    asked: Changed<'p>,
    file: FileRef,
    identified: Identified,
    from: Parent,
    to: Option<Parent>,
}

/// Makes a change of names after recording it. Returns the kernel's result, or `None` if nothing
/// was done and the caller is to make the change without a record.
pub(crate) fn change_name(asked: Changed<'_>) -> Option<isize> {
    let log = process::log().filter(|log| log.has_stories() && !log.processes().is_suspended())?;
    if process::is_apart() {
        return None;
    }
    let (directory, path) = asked.from();
    let stat = query::fstatat(directory, path, libc::AT_SYMLINK_NOFOLLOW).ok()?;
    if !is_file(&stat) || !log.may_have(stat.st_dev, stat.st_ino) {
        return None;
    }
    let _holding = Holding::new()?;
    own_stack::run(|| {
        let change = Change::find(log, asked, &stat)?;
        change.run().or_else(|| change.commit_pending().then(|| change.run())?)
    })
}

fn is_file(stat: &libc::stat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFREG
}

fn is_same(one: &libc::stat, other: &libc::stat) -> bool {
    (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
}

impl<'p> Change<'p> {
    fn find(log: &'static Log, asked: Changed<'p>, stat: &libc::stat) -> Option<Self> {
        let (directory, path) = asked.from();
        let from = Parent::of_path(directory, path)?;
        let to = match asked.to() {
            Some((directory, path)) => Some(Parent::of_path(directory, path)?),
            None => None,
        };
        let mount = from.seen.mount;
        let file_system = file_systems::identity(log, from.directory(), mount, stat.st_dev)?;
        let identified = Identified::new(file_system, from.handle_of_child()?, stat);
        let file = log.find(&identified.key).ok()??;
        Some(Self { log, asked, file, identified, from, to })
    }

    fn run(&self) -> Option<isize> {
        let file_system = self.identified.file_system.reference;
        let names = self.log.file_systems().lock_names_within(file_system, LOCK_TIMEOUT).ok()?;
        let guard = self.log.lock_within(self.file, LOCK_TIMEOUT).ok()?;
        let stat = self.from.child().filter(|stat| self.may_be_recorded(&names, &guard, stat))?;
        let replaced = match &self.to {
            Some(to) => self.replaced(to, &stat)?,
            None => Replaced::default(),
        };
        if guard.has_grown() {
            guard.mark(guard.size(), 0).ok()?;
        }
        let links = self.asked.links_after(u32::try_from(stat.st_nlink).ok()?);
        let record = NameRecord { change: self.in_record(replaced.handle)?, links };
        let changes = self.log.file_systems().changes(file_system);
        let (ticket, position) = self.record(&guard, &record)?;
        let result = self.call();
        if result < 0 {
            self.void(&guard, ticket, position);
            return Some(result);
        }
        guard.note_named(changes);
        if let Some(file) = replaced.file {
            self.log.note_own_change(file);
        }
        self.log.ring().stats().add(Counter::NamesRecorded, 1);
        Some(result)
    }

    /// Makes a real sync of the file if the file would otherwise leave because of pending changes,
    /// and if the sync is known to commit all of these. Returns whether the file was synced.
    fn commit_pending(&self) -> bool {
        let file_system = self.identified.file_system.reference;
        let guard = self.log.lock_within(self.file, LOCK_TIMEOUT).ok();
        let facts = guard.map(|guard| (guard.is_covered(), guard.needs_sync()));
        let (is_covered, needs_sync) = facts.unwrap_or_default();
        let facts = (is_covered, needs_sync, self.log.file_systems().is_pending(file_system));
        let Some((opened, changes)) = stays_by_sync(facts, || self.opened_to_commit()) else {
            return false;
        };
        let is_synced = durable::fsync(raw::borrowed(opened.number())).is_ok();
        if is_synced {
            self.log.file_systems().committed(file_system, changes);
        }
        is_synced
    }

    /// Opens the file once more, if its sync commits all pending changes. Returns the descriptor
    /// and the count of changes.
    fn opened_to_commit(&self) -> Option<(Unlocked, u64)> {
        let (key, (directory, path)) = (&self.identified.key, self.asked.from());
        let (device, inode) = (key.device, key.inode);
        let gone = Gone { device, inode, path: Some((directory, path, libc::AT_SYMLINK_NOFOLLOW)) };
        let opened = gone.open()?;
        let seen = Seen::of(opened.number()).ok();
        let seen = seen.filter(|seen| (seen.stat.st_dev, seen.stat.st_ino) == (device, inode))?;
        let file_system = self.identified.file_system.reference;
        let changes = commits_all(self.log, file_system, (opened.number(), seen.size()))?;
        Some((opened, changes))
    }

    fn may_be_recorded(
        &self,
        names: &NamesGuard<'_>,
        guard: &FileGuard<'_>,
        stat: &libc::stat,
    ) -> bool {
        let file_system = self.identified.file_system.reference;
        let key = &self.identified.key;
        let is_pending = || self.log.file_systems().is_pending(file_system);
        (stat.st_dev, stat.st_ino) == (key.device, key.inode)
            && may_record_name(&RecordFacts::of(names, guard), is_pending)
    }

    /// Returns the file that the change replaces, or an empty [`Replaced`] if nothing has the new
    /// name. Returns `None` if the change cannot be recorded.
    fn replaced(&self, to: &Parent, stat: &libc::stat) -> Option<Replaced> {
        if to.seen.stat.st_dev != stat.st_dev {
            return None;
        }
        let Some(found) = to.child() else { return Some(Replaced::default()) };
        let facts = ReplacedFacts {
            is_replacing: matches!(self.asked, Changed::Rename { flags: 0, .. }),
            is_file: is_file(&found),
            links: u32::try_from(found.st_nlink).ok()?,
            is_beside: found.st_dev == stat.st_dev && !is_same(&found, stat),
        };
        if !may_replace(&facts) {
            return None;
        }
        let handle = to.handle_of_child()?;
        let identified = Identified::new(self.identified.file_system, handle, &found);
        Some(Replaced { handle: Some(handle), file: self.log.find(&identified.key).ok()? })
    }

    fn in_record(&self, replaced: Option<FileHandle>) -> Option<NameChange<'_>> {
        let (from, to) = (self.from.at(), self.to.as_ref().map(Parent::at));
        Some(match self.asked {
            Changed::Link { .. } => NameChange::Link { to: to? },
            Changed::Unlink { .. } => NameChange::Unlink { from },
            Changed::Rename { .. } => NameChange::Rename { from, to: to?, replaced },
        })
    }

    fn record<'g>(
        &self,
        guard: &'g FileGuard<'_>,
        record: &NameRecord<'_>,
    ) -> Option<(Ticket<'g>, u64)> {
        let mut ticket = guard.begin().ok()?;
        if ticket.needs_define() {
            // The path is only a hint.
            let path = PathBuffer::new();
            guard.define_again(&mut ticket, &self.identified.definition(&path)).ok()?;
        }
        let position = ticket.name(record).ok()?;
        Some((ticket, position))
    }

    /// Makes the system call.
    fn call(&self) -> isize {
        let from = (self.from.directory(), self.from.name().as_ptr());
        let to = self.to.as_ref().map(|to| (to.directory(), to.name().as_ptr()));
        let (number, arguments) = match (self.asked, to) {
            (Changed::Link { .. }, Some(to)) => {
                (libc::SYS_linkat, words![from.0, from.1, to.0, to.1, 0])
            }
            (Changed::Rename { flags: 0, .. }, Some(to)) => {
                (libc::SYS_renameat, words![from.0, from.1, to.0, to.1])
            }
            (Changed::Rename { flags, .. }, Some(to)) => {
                (libc::SYS_renameat2, words![from.0, from.1, to.0, to.1, flags])
            }
            _ => (libc::SYS_unlinkat, words![from.0, from.1, 0]),
        };
        // SAFETY: `self` owns the directories and the terminated names.
        unsafe { raw::call(number, arguments) }
    }

    /// Voids the record of a change that the kernel has refused, or else makes the file leave.
    fn void(&self, guard: &FileGuard<'_>, mut ticket: Ticket<'_>, position: u64) {
        let is_voided = ticket.void(position).is_ok();
        drop(ticket);
        if !is_voided {
            leave_locked(self.log, guard);
        }
    }
}
