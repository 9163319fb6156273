//! Files leave the log: before changes that it does not take, and before what no hook sees.
//!
//! Invariants:
//! 1. Before a change that the log does not have, the file is durable and its story has ended:
//!    recovery never puts old data over newer data.
//! 2. Where the disk fails meanwhile, a change that can be refused is refused with `EIO`, and the
//!    story goes on: the log alone has what it promises. For one that cannot be refused, and
//!    without the lock, the story ends, and the program's next sync says so.
//!
//! Entry points: [`Open::leave`] under the lock, [`Open::without_lock`] where it cannot be had;
//! [`Open::pin`], [`Open::pin_until_exit`], [`Open::mark`] for files that may change at any time,
//! [`Open::unseen`] for one change; [`leave_numbers`], [`leave_closed`] and [`leave_gone`] where
//! there is no descriptor.

use std::ffi::{CStr, c_int};
use std::time::Duration;

use tidegate::durable;
use tidegate::log::cover::{LeaveAction, decide_leave};
use tidegate::log::{AppendError, Counter, FileGuard, FileRef, LockError, Log, PlainCall};

use super::{LOCK_TIMEOUT, Locked, Open, SPACE_TIMEOUT, TRIES};
use crate::covered::{metadata, plain, unseen};
use crate::state::descriptors::{self, Entry, Known, PINNED};
use crate::state::mounts;
use crate::state::process::Holding;
use crate::state::record_locks::{self, Unlocked};
use crate::state::supervisor;
use crate::sys::path::Opened;
use crate::sys::{query, raw};

/// File systems that are synced one by one.
const DEVICES_MOST: usize = 16;
/// How long a lock is waited for to pin a file, each of [`TRIES`] times.
const PIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Ends a story by `end`, and waits for free space in the log where there is none; without a
/// supervisor, makes it. With all records retired the story `is_over`, too. False: neither was
/// possible.
fn ended(log: &Log, end: impl Fn() -> Result<(), AppendError>, is_over: impl Fn() -> bool) -> bool {
    log.ring().stats().add(Counter::Leaves, 1);
    for _ in 0..TRIES {
        let space = log.ring().space_changes();
        match end() {
            Ok(()) => return true,
            Err(AppendError::Full | AppendError::NoSlot) if log.ring().supervisor_alive() => {
                log.ring().wait_for_space(space, SPACE_TIMEOUT);
            }
            // Memory that fails in the log need not do so where its tail is.
            Err(_) if log.ring().supervisor_alive() => _ = log.ring().checkpoint(SPACE_TIMEOUT),
            Err(_) if retire_alone(log) => {}
            // Another thread does it, or a supervisor has come.
            Err(_) => log.ring().wait_for_space(space, LOCK_TIMEOUT),
        }
        if is_over() {
            return true;
        }
    }
    false
}

/// Ends the story of a locked file. Where that is not possible the story goes on, and the file is
/// marked: its syncs are real, and it leaves before anything else of it is logged. After a power
/// cut recovery finds times that the log does not know, and leaves the file as it is.
fn end(log: &Log, guard: &FileGuard<'_>) {
    if !ended(log, || guard.end_story(), || guard.end_retired()) {
        guard.mark_unlogged(false);
    }
}

/// As [`end`], of a file whose lock cannot be had.
fn end_without_lock(log: &Log, file: FileRef) {
    let is_over = || log.end_retired_without_lock(file);
    if !ended(log, || log.end_without_lock(file), is_over) {
        log.mark_unlogged(file);
    }
}

/// Retires what the log has, where no supervisor does. Whether it has less than before.
fn retire_alone(log: &Log) -> bool {
    let is_dead = |process, thread| !query::is_alive(process, thread);
    // Of a write-back that fails the descriptors hear that are open.
    log.retire_alone(is_dead, || {
        sync_devices(log.devices());
        Ok(())
    })
}

/// Makes the file systems with these device numbers durable: all of the machine where they are
/// many.
fn sync_devices(mut numbers: impl Iterator<Item = u64>) {
    let mut devices = [0; DEVICES_MOST];
    let mut len = 0;
    let is_full = numbers.any(|number| {
        let is_new = !devices[..len].contains(&number);
        if is_new && len < DEVICES_MOST {
            devices[len] = number;
            len += 1;
            return false;
        }
        is_new
    });
    if is_full { raw::sync() } else { devices[..len].iter().copied().for_each(mounts::sync_device) }
}

/// Has all that the log has by now retired, by the supervisor or without one. Gives up after
/// `timeout`: recovery then tells by their times which files were changed later, and leaves them as
/// they are.
pub(crate) fn retire_all(log: &Log, timeout: Duration) {
    let until = log.ring().head();
    let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
    let end_ns = raw::now_ns().saturating_add(timeout_ns);
    while log.ring().tail() < until && raw::now_ns() < end_ns {
        let space = log.ring().space_changes();
        if log.ring().supervisor_alive() {
            log.ring().checkpoint(SPACE_TIMEOUT);
        } else if !retire_alone(log) {
            log.ring().wait_for_space(space, LOCK_TIMEOUT);
        }
    }
}

impl Open {
    /// Makes the file durable by the kernel, if it is not, and [ends](end) its story if it has one.
    /// False: the disk fails. Then the story goes on, for the log alone has what it promises, and
    /// the file's syncs are real.
    #[must_use]
    pub(crate) fn leave(&self, guard: &FileGuard<'_>) -> bool {
        match decide_leave(guard.is_logged(), || guard.needs_sync()) {
            LeaveAction::Nothing => return true,
            LeaveAction::SyncAndEnd if durable::fsync(raw::borrowed(self.fd)).is_err() => {
                guard.note_failure();
                guard.mark_unlogged(false);
                return false;
            }
            LeaveAction::SyncAndEnd | LeaveAction::End => {}
        }
        end(self.log, guard);
        true
    }

    /// Ends the story of a file that the disk does not take, and which no record can put right: no
    /// more is promised of it.
    pub(super) fn end_unsynced(&self, guard: &FileGuard<'_>) {
        end(self.log, guard);
    }

    /// Makes a change without the entry's lock, whose holder is stopped or is this thread. Where
    /// the log was given up instead, no file is in it, and the change is all that is done.
    ///
    /// Why that is safe: the end of the story comes after the file is durable. A record that the
    /// holder appended before it is dropped by recovery, and one that it appends later belongs to
    /// no story that was covered.
    #[cold]
    pub(super) fn without_lock(&self, entry: Entry, change: impl FnOnce() -> isize) -> isize {
        let Some(_holding) = Holding::new() else { return change() };
        if self.log.must_log(entry.file) {
            if durable::fsync(raw::borrowed(self.fd)).is_err() {
                // A stale entry has no story.
                let _ = self.log.note_failure(entry.file);
            }
            end_without_lock(self.log, entry.file);
        }
        // Before and after: no story that begins in between is covered without this change.
        self.log.mark_unlogged(entry.file);
        let result = change();
        self.log.mark_unlogged(entry.file);
        result
    }

    /// Makes a change of a file that has no entry and can have none: a story of it that another
    /// process has begun ends before.
    #[cold]
    pub(super) fn unidentified(&self, change: impl FnOnce() -> isize) -> isize {
        let (device, inode) = (self.known.device, self.known.inode);
        // In the lane first: a story that begins later waits for the change.
        let in_flight = plain::in_lane(self.log, PlainCall::Write { device, inode });
        leave_numbers(self.log, device, inode, false);
        let result = change();
        drop(in_flight);
        result
    }

    /// From now on the file may be changed in ways that are not seen, until [`unpin`](Self::unpin)
    /// is called for the descriptor.
    pub(crate) fn pin(&self) -> Known {
        if self.known.has(PINNED) {
            return self.known;
        }
        let Some((entry, guard)) = self.left() else { return self.known };
        guard.keep_unlogged();
        let known = self.known.with_entry(entry).with(PINNED);
        descriptors::set(self.fd, known);
        known
    }

    /// The descriptor changes its file no more in ways that are not seen.
    pub(crate) fn unpin(&self) {
        if !self.known.has(PINNED) {
            return;
        }
        if let Some(Ok(guard)) = self.known.entry().map(|entry| self.lock_in_time(entry)) {
            guard.stop_keeping();
        }
    }

    /// As [`pin`](Self::pin), but noted with no descriptor, and until this process has ended. The
    /// entry, if the file is pinned.
    pub(crate) fn pin_until_exit(&self) -> Option<FileRef> {
        let (_, guard) = self.left()?;
        guard.keep_unlogged();
        Some(guard.file())
    }

    /// As [`pin`](Self::pin), but noted with no descriptor, and until the log is not in use any
    /// more.
    pub(crate) fn mark(&self) {
        if let Some((_, guard)) = self.left() {
            guard.mark_unlogged(true);
        }
    }

    /// Locks the file when its story has ended; none: it is not logged now, and its next sync is
    /// real.
    fn left(&self) -> Option<(Entry, Locked)> {
        let Some(entry) = self.entry() else {
            self.unidentified(|| 0);
            return None;
        };
        let Ok(guard) = self.lock_in_time(entry) else {
            self.without_lock(entry, || 0);
            return None;
        };
        if !self.leave(&guard) {
            // What is about to change it cannot be refused.
            end(self.log, &guard);
        }
        Some((entry, guard))
    }

    fn lock_in_time(&self, entry: Entry) -> Result<Locked, LockError> {
        (1..TRIES)
            .find_map(|_| match self.lock_within(entry, PIN_TIMEOUT) {
                Err(LockError::Busy) => None,
                result => Some(result),
            })
            .unwrap_or(Err(LockError::Busy))
    }

    /// Runs a change of the file that no hook sees: its result, as the kernel gives it. Counted as
    /// one of metadata, which it may be.
    pub(crate) fn unseen(&self, change: impl FnOnce() -> isize) -> isize {
        if let Some(in_flight) = plain::enter(self.log, &self.known) {
            let result = metadata::counted(change);
            drop(in_flight);
            return result;
        }
        let pinned = self.left().map(|(_, guard)| guard.keep_unlogged());
        let result = metadata::counted(change);
        let guard = pinned.and_then(|()| self.lock_in_time(self.entry()?).ok());
        if let Some(guard) = guard {
            guard.stop_keeping();
        }
        result
    }
}

/// Has the file leave the log until this process ends. The kernel gives a lease only while no other
/// process, such as the supervisor, has the file open.
pub(crate) fn leave_for_lease(fd: c_int) {
    if let Some(open) = Open::of(fd) {
        unseen::pin(&open);
        supervisor::flush();
    }
}

/// Ends the stories of the file with these numbers, which is not open here, or cannot be
/// identified; with `pins` the file does not come back while the log is in use.
#[cold]
pub(crate) fn leave_numbers(log: &Log, device: u64, inode: u64, pins: bool) {
    // One that was removed may have had the same numbers.
    for _ in 0..TRIES {
        let holding = Holding::new();
        if holding.is_none() || !log.may_have(device, inode) {
            return;
        }
        let found = log.logged_with(device, inode);
        drop(holding);
        let Some(file) = found else { return };
        leave_closed(log, file, |guard| {
            if pins {
                guard.mark_unlogged(true);
            }
        });
    }
}

/// Ends the story of a file of which there is no descriptor, and calls `then` under its lock.
pub(crate) fn leave_closed<'l>(log: &'l Log, file: FileRef, then: impl FnOnce(&FileGuard<'l>)) {
    // All of it, for the file must not be opened: closed again, it would take the program's record
    // locks along. A write-back that fails is told to the descriptors that are open.
    leave_made_durable(log, file, || mounts::sync_device(log.device_of(file)), then);
}

/// Before a sync of more than a file: the files leave that the kernel may have changed without a
/// record, by whatever process. These are the sealed ones, and those that a process was killed in
/// the middle of changing.
pub(crate) fn leave_unrecorded(log: &Log) {
    for file in log.sealed_files() {
        leave_closed(log, file, |_| {});
    }
    leave_interrupted(log);
}

/// Before a sync of a directory: the files leave whose names a process was killed in the middle of
/// changing. Recovery would make the change, whatever the sync has promised of the names.
pub(super) fn leave_half_named(log: &Log) {
    let is_orphaned = |file_system| {
        let names = log.file_systems().lock_names_within(file_system, LOCK_TIMEOUT);
        names.is_ok_and(|names| names.is_orphaned())
    };
    if log.file_systems().all().any(is_orphaned) {
        leave_interrupted(log);
    }
}

/// The files leave that a process was killed in the middle of changing.
fn leave_interrupted(log: &Log) {
    let Some(_holding) = Holding::new() else { return };
    for file in log.operations().all().filter_map(|operation| log.operations().file_of(&operation))
    {
        let guard = log.lock_within(file, PIN_TIMEOUT).ok();
        if let Some(guard) = guard.filter(FileGuard::owner_died) {
            // Where that fails, syncs of the file are real, or say so.
            let _ = log.operations().repair(&guard, || {
                mounts::sync_device(log.device_of(file));
                Ok(())
            });
        }
    }
}

fn leave_made_durable<'l>(
    log: &'l Log,
    file: FileRef,
    make_durable: impl FnOnce(),
    then: impl FnOnce(&FileGuard<'l>),
) {
    let Some(_holding) = Holding::new() else { return };
    let Ok(guard) = log.lock_within(file, PIN_TIMEOUT) else {
        make_durable();
        end_without_lock(log, file);
        return;
    };
    let action = decide_leave(guard.is_logged(), || guard.needs_sync());
    if action == LeaveAction::SyncAndEnd {
        make_durable();
    }
    if action != LeaveAction::Nothing {
        end(log, &guard);
    }
    then(&guard);
}

/// Ends the story of a locked file of which there is no descriptor.
#[cold]
pub(super) fn leave_locked(log: &Log, guard: &FileGuard<'_>) {
    mounts::sync_device(log.device_of(guard.file()));
    end(log, guard);
}

/// A file whose names are about to change, or its attributes, in a way that no record says.
pub(crate) struct Gone<'p> {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// A directory, a path in it that leads to the file, and the flags of `fstatat` for it.
    pub(crate) path: Option<(c_int, &'p CStr, c_int)>,
}

/// Ends the story of such a file.
pub(crate) fn leave_gone(log: &Log, file: FileRef, gone: &Gone<'_>) {
    leave_made_durable(log, file, || gone.make_durable(), |_| ());
}

impl Gone<'_> {
    /// By a descriptor that the program has, or one that no record lock depends on; or all files.
    fn make_durable(&self) {
        let is_it = |fd| {
            let numbers = query::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
            numbers == Ok((self.device, self.inode))
        };
        // Looked at behind it: another thread may have closed the descriptor.
        let by = |fd| durable::fsync(raw::borrowed(fd)).is_ok() && is_it(fd);
        let is_durable = match descriptors::find(self.device, self.inode) {
            Some(fd) => by(fd),
            None => self.open().is_some_and(|opened| by(opened.number())),
        };
        if !is_durable {
            mounts::sync_device(self.device);
        }
    }

    /// The file at the path; none where that would take a record lock of the program away.
    pub(super) fn open(&self) -> Option<Unlocked> {
        let (directory, path, flags) = self.path?;
        let follows = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY;
        let flags = if follows { flags } else { flags | libc::O_NOFOLLOW };
        let open = || Opened::open(directory, path, flags);
        record_locks::open(self.device, self.inode, open)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use tidegate::log::{FileHandle, NameAt, NameChange, NameRecord};

    use super::super::making::log_answers_directory;
    use super::*;
    use crate::testing::World;

    /// A thread records that the file is removed, and is killed before the kernel has done so.
    fn remove_and_die(log: &Log, entry: Entry) {
        let parent = FileHandle::new(1, &[7; 8]).unwrap();
        let from = NameAt { parent, name: b"file" };
        let record = NameRecord { change: NameChange::Unlink { from }, links: 0 };
        let die = || {
            let names = log.file_systems().lock_names(entry.file_system).unwrap();
            let guard = log.lock(entry.file).unwrap();
            let mut ticket = guard.begin().unwrap();
            ticket.name(&record).unwrap();
            std::mem::forget(ticket);
            std::mem::forget((guard, names));
        };
        std::thread::scope(|scope| scope.spawn(die).join().unwrap());
    }

    /// Takes all of the log's space, also that of ends.
    fn fill(guard: &FileGuard<'_>) {
        while guard.begin().unwrap().void(0).is_ok() {}
        assert_eq!(guard.end_story(), Err(AppendError::Full));
    }

    #[test]
    fn a_file_that_leaves_a_full_log_without_a_supervisor_has_it_retired() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        let guard = open.lock(open.entry().unwrap()).unwrap();
        fill(&guard);
        let full = world.log.ring().head();
        assert!(open.leave(&guard) && !guard.is_logged());
        assert!(world.log.ring().tail() >= full, "recovery has nothing of the file");
    }

    #[test]
    fn a_file_whose_end_nobody_makes_space_for_is_logged_no_more() {
        let world = World::new();
        let (file, other) = (world.file("file"), world.file("other"));
        let (open, busy) = (world.covered(&file, 0), world.covered(&other, 0));
        // Else what lies before gives the end its space.
        assert!(retire_alone(world.log));
        let from = world.log.ring().head();
        // A thread that is stopped in the middle of a write holds the tail.
        let stopped = busy.lock(busy.entry().unwrap()).unwrap();
        let ticket = stopped.begin().unwrap();
        let guard = open.lock(open.entry().unwrap()).unwrap();
        fill(&guard);
        assert!(open.leave(&guard) && guard.is_disturbed() && !guard.is_covered());
        assert!(world.log.ring().tail() <= from, "the stopped thread's write would be lost");
        drop(ticket);
        assert!(open.leave(&guard) && !guard.is_logged());
    }

    #[test]
    fn all_is_retired_without_a_supervisor() {
        let world = World::new();
        let file = world.file("file");
        world.covered(&file, 0);
        let until = world.log.ring().head();
        retire_all(world.log, Duration::from_secs(60));
        assert!(world.log.ring().tail() >= until);
    }

    #[test]
    fn a_file_whose_names_a_killed_thread_was_changing_leaves_before_a_sync_of_a_directory() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        leave_half_named(world.log);
        assert!(world.is_covered(&open));
        remove_and_die(world.log, open.entry().unwrap());
        let from = world.log.ring().head();
        leave_half_named(world.log);
        assert_eq!(world.records_since(from), "end");
        assert!(!world.is_covered(&open) && world.log.operations().all().count() == 0);
    }

    #[test]
    fn a_sync_of_a_directory_has_it_leave_first() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        let directory = std::fs::File::open(world.path(".")).unwrap();
        log_answers_directory(world.log, directory.as_raw_fd());
        assert!(world.is_covered(&open));
        remove_and_die(world.log, open.entry().unwrap());
        let is_answered = log_answers_directory(world.log, directory.as_raw_fd());
        assert!(!is_answered && !world.is_covered(&open));
    }
}
