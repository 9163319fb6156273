//! New files: a make record of the whole file answers their first sync. Recovery can create the
//! file again from this record.
//!
//! The rules are B1 and B4 of docs/decisions/run-logs-what-was-synced.md.
//!
//! Invariants:
//! 1. The facts for the decisions of [`cover`] are gathered after the file is locked and read.
//! 2. The story begins before the file is read, as at any admission: later writes are logged, and
//!    wait for the record.
//! 3. While a stream, which no hook sees, is open on the file, the record is alone in the file's
//!    story ([`sealed`](super::sealed)).
//! 4. If the record cannot answer the sync, a real sync does. It commits the changes before the
//!    file's creation, and mostly all. If it is known to have committed all, the record is tried
//!    again: once the log has the file, changes of its names cost no sync.
//!
//! Entry points: [`sync_if_new`]; [`answers_directory`].

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::log::cover::{self, DirectoryFacts, MakeFacts, cause_of_new};
use tidegate::log::{Counter, FileSystemRef, Log, NamesGuard};

use super::leave::leave_half_named;
use super::sealed::{pin_again, seal, unpin_to_make};
use super::story::Story;
use super::whole::Whole;
use super::{LOCK_TIMEOUT, Open, Sync};
use crate::state::descriptors::{DIRECT, Entry, PINNED};
use crate::state::extents::commits_all;
use crate::state::files::{self, Identified, Seen};
use crate::state::new_files::{self, NewFile};
use crate::state::parents::Parent;
use crate::state::process::Holding;
use crate::state::{file_systems, process};
use crate::sys::path::{self, PathBuffer};
use crate::sys::signals::SignalsBlocked;
use crate::sys::{own_stack, raw};

/// Pause before the next request to the supervisor after a timeout.
const PAUSE_NS: u64 = 1_000_000_000;

/// The purpose of a make record.
#[derive(Clone, Copy)]
enum Purpose {
    /// Answers a sync.
    Answer(Sync),
    /// Lets the log record name changes of a file that a real sync has made durable.
    Names,
}

/// Returns whether the log answers a sync of the directory of `fd`: nothing is pending in its file
/// system, and each created file is on the disk or in the log. First makes files leave whose names
/// a process was changing when it was killed.
pub(crate) fn answers_directory(fd: c_int) -> bool {
    process::log().is_some_and(|log| log_answers_directory(log, fd))
}

pub(super) fn log_answers_directory(log: &Log, fd: c_int) -> bool {
    if !log.has_stories() || log.processes().is_suspended() {
        return false;
    }
    let Some(_holding) = Holding::new() else { return false };
    let Some(seen) = Seen::of(fd).ok().filter(Seen::is_directory) else { return false };
    leave_half_named(log);
    let Some(file_system) = file_systems::known(seen.mount) else { return false };
    let is_answered = cover::answers_directory(&DirectoryFacts {
        is_held: log.file_systems().is_held(file_system),
        commits_in_order: log.file_systems().commits_in_order(file_system),
        is_pending: log.file_systems().is_pending_for_directories(file_system),
    });
    if is_answered {
        log.ring().stats().add(Counter::SyncsSkipped, 1);
    }
    is_answered
}

/// Syncs a plain file that this process has created and not synced yet. Returns the sync's result,
/// or `None` for any other file.
#[cold]
pub(super) fn sync_if_new(open: &Open, wanted: Sync) -> Option<isize> {
    // A handler that jumps out would leave a story that is neither covered nor given up.
    let _signals = SignalsBlocked::deferred();
    own_stack::run(|| FirstSync::of(open).map(|first| first.run(wanted)))
}

/// The first sync of a file that this process has created.
struct FirstSync {
    open: Open,
    new: NewFile,
    seen: Seen,
}

impl FirstSync {
    /// Returns `None` if another process has created the file, or if it was synced before.
    fn of(open: &Open) -> Option<Self> {
        let seen = Seen::of(open.fd).ok()?;
        new_files::find(open.fd, &seen).map(|new| Self { open: *open, new, seen })
    }

    fn run(&self, wanted: Sync) -> isize {
        let Open { log, fd, known } = self.open;
        new_files::forget(known.device, known.inode);
        let Some(identified) = self.makeable() else { return self.open.sync_old(wanted) };
        let file_system = identified.file_system.reference;
        // The supervisor syncs a file system that it begins to hold: nothing earlier stays pending.
        let may_be_quiet = self.is_quiet(file_system) || !log.file_systems().is_held(file_system);
        if may_be_quiet && self.make(&identified, Purpose::Answer(wanted)).is_some() {
            log.ring().stats().add(Counter::SyncsMade, 1);
            log.ring().stats().add(Counter::SyncsSkipped, 1);
            return 0;
        }
        let commits = commits_all(log, file_system, (fd, self.seen.size()));
        // Otherwise only the file's creation is known to be in the transaction.
        let committed = commits.or_else(|| self.new.journaled(file_system));
        let result = self.sync_unmade(self.is_quiet(file_system));
        if result == 0 {
            self.note_committed(file_system, committed);
            if self.is_quiet(file_system) {
                // The file is on the disk: if the record fails, it may stay plain.
                let _ = self.make(&identified, Purpose::Names);
            }
        }
        result
    }

    /// Makes the real sync that no record answers: always `fsync`, which commits pending changes.
    fn sync_unmade(&self, is_quiet: bool) -> isize {
        if self.open.admission().is_ok() {
            return self.open.admit(Sync::All);
        }
        self.open.sync_for(cause_of_new(is_quiet), Sync::All)
    }

    /// Returns the file's identity, if a make record of the file is allowed.
    fn makeable(&self) -> Option<Identified> {
        let Open { log, fd, known } = self.open;
        let facts = MakeFacts {
            size: self.seen.size(),
            is_direct: known.has(DIRECT),
            writes_unseen: process::writes_unseen(),
            in_vfork_child: process::in_vfork_child(),
            is_suspended: log.processes().is_suspended(),
        };
        let is_clock_steady = || log.file_systems().note_clock(raw::clock_ahead_ns());
        let may_be = cover::may_make(&facts, is_clock_steady, || files::is_wanted(fd));
        let identified = may_be.then(|| files::identify_seen(log, fd, &self.seen))??;
        let file_system = identified.file_system.reference;
        let may_be = log.file_systems().commits_in_order(file_system)
            && !log.file_systems().is_refused(file_system);
        may_be.then_some(identified)
    }

    /// Returns whether a sync of the file would commit no pending change of another file.
    fn is_quiet(&self, file_system: FileSystemRef) -> bool {
        let is_own = |number| self.new.numbers(file_system).any(|own| own == number);
        !self.open.log.file_systems().is_pending_beside(file_system, is_own)
    }

    /// Notes that a real sync has committed the file's creation, and the changes that were counted
    /// by then as `committed`.
    fn note_committed(&self, file_system: FileSystemRef, committed: Option<u64>) {
        let log = self.open.log;
        if let Some(committed) = committed {
            log.file_systems().committed(file_system, committed);
        }
        self.new
            .numbers(file_system)
            .for_each(|number| log.file_systems().take_off(file_system, number));
    }

    /// Covers the file by a record of the whole file. Returns `None` if the file stays plain.
    fn make(&self, identified: &Identified, purpose: Purpose) -> Option<()> {
        let mut path = PathBuffer::new();
        path::of_descriptor(self.open.fd, &mut path).ok()?;
        let parent = Parent::of_path(libc::AT_FDCWD, path.as_c_str())?;
        let story = self.begin(identified, &path)?;
        let made = self.make_story(&story, &parent, purpose);
        if made.is_none() {
            story.give_up();
            pin_again(&self.open);
        }
        made
    }

    fn begin<'d>(&self, identified: &Identified, path: &'d PathBuffer) -> Option<Story<'d>> {
        let Open { log, fd, known } = self.open;
        let new_entry = || files::entry_of(log, fd, known, identified);
        let entry = known.entry().or_else(new_entry)?;
        let guard = self.open.lock(entry).ok()?;
        if guard.is_logged() || !cover::may_seal(guard.pins(), known.has(PINNED)) {
            return None;
        }
        let definition = identified.definition(path);
        // The make record has the size.
        guard.begin_story(&definition, 0).ok()?;
        unpin_to_make(&self.open, &guard);
        Some(Story::begun(&self.open, entry, &guard, definition, guard.unlogged()))
    }

    fn make_story(&self, story: &Story<'_>, parent: &Parent, purpose: Purpose) -> Option<()> {
        let Open { log, known, .. } = self.open;
        let Entry { file_system, .. } = story.entry;
        let is_ready = log.lanes().wait_for_plain(known.device, known.inode, LOCK_TIMEOUT)
            && hold(log, story.entry);
        let _holding = Holding::new().filter(|_| is_ready)?;
        let names = log.file_systems().lock_names_within(file_system, LOCK_TIMEOUT);
        let names = names.ok().filter(NamesGuard::may_record)?;
        let guard = story.lock()?;
        let whole = Whole::read(&self.open)?;
        let make = whole.make(parent)?;
        let is_pending = || !self.is_quiet(file_system);
        if !cover::stands_for_sync(guard.has_own_changes(), is_pending) {
            return None;
        }
        let data_only = matches!(purpose, Purpose::Answer(Sync::Data));
        let made = (&make, whole.bytes(), whole.changed_ns());
        // A stream may write after the record without another one.
        let is_last = !known.has(PINNED);
        let is_made = guard.make(made, &story.definition, story.unlogged, data_only, is_last);
        is_made.ok().filter(|is_made| *is_made)?;
        whole.note_sparse(&guard);
        if let Some(journaled) = self.new.journaled(file_system) {
            guard.note_journaled(journaled);
        }
        self.new
            .numbers(file_system)
            .for_each(|number| log.file_systems().take_off(file_system, number));
        if matches!(purpose, Purpose::Names) {
            guard.note_retired();
        }
        seal(&self.open, &guard, whole.bytes());
        drop(names);
        Some(())
    }
}

/// Asks the supervisor to hold the file system, unless it does already. Returns whether it does.
/// After a timeout does not ask again for [`PAUSE_NS`].
fn hold(log: &Log, entry: Entry) -> bool {
    static NOT_BEFORE_NS: AtomicU64 = AtomicU64::new(0);
    let file_system = entry.file_system;
    if log.file_systems().is_held(file_system) {
        return true;
    }
    if raw::now_ns() < NOT_BEFORE_NS.load(Ordering::Relaxed) {
        return false;
    }
    log.file_systems().want_held(file_system, entry.file);
    let is_held = log.file_systems().wait_for_held(file_system, LOCK_TIMEOUT);
    if !is_held {
        NOT_BEFORE_NS.store(raw::now_ns() + PAUSE_NS, Ordering::Relaxed);
    }
    is_held
}
