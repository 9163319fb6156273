//! Files leave the log, before changes that the log does not take or that no hook sees.
//!
//! Invariants:
//! 1. Before a change that the log does not have, the file is durable and its story has ended:
//!    recovery never puts old data over newer data.
//! 2. If the disk fails meanwhile and the change can be refused, it fails with `EIO` and the story
//!    goes on: only the log has the promised data. If the change cannot be refused, or the caller
//!    does not have the lock, the story ends, and the program's next sync fails.
//!
//! Entry points: [`Open::leave`] under the lock, [`Open::without_lock`] if the lock cannot be had;
//! [`Open::pin`], [`Open::pin_until_exit`], [`Open::mark`] for files that may change at any time,
//! [`Open::unseen`] for one change; [`leave_numbers`], [`leave_closed`] and [`leave_gone`] without
//! a descriptor.

use std::ffi::{CStr, c_int};
use std::time::Duration;

use rustix::io::Errno;
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

/// The largest number of file systems that are synced one by one.
const DEVICES_MOST: usize = 16;
/// Timeout of each of the [`TRIES`] waits for the lock that pins a file.
const PIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Ends a story by `end`. If the log has no free space, waits for the supervisor to make it, or
/// retires records itself if there is no supervisor. The story also ends when all of its records
/// are retired, which `is_over` reports. Returns whether the story has ended.
fn ended(log: &Log, end: impl Fn() -> Result<(), AppendError>, is_over: impl Fn() -> bool) -> bool {
    log.ring().stats().add(Counter::Leaves, 1);
    for _ in 0..TRIES {
        let space = log.ring().space_changes();
        match end() {
            Ok(()) => return true,
            Err(AppendError::Full | AppendError::NoSlot) if log.ring().supervisor_alive() => {
                log.ring().wait_for_space(space, SPACE_TIMEOUT);
            }
            // Memory that fails at the head may still work at the tail.
            Err(_) if log.ring().supervisor_alive() => _ = log.ring().checkpoint(SPACE_TIMEOUT),
            Err(_) if retire_alone(log) => {}
            // Another thread retires records, or a supervisor has started.
            Err(_) => log.ring().wait_for_space(space, LOCK_TIMEOUT),
        }
        if is_over() {
            return true;
        }
    }
    false
}

/// Ends the story of a locked file. If that fails, marks the file: its syncs are real, and it
/// leaves before the log gets another record of the file. After a power cut recovery finds times
/// that the log does not know, and leaves the file as it is.
fn end(log: &Log, guard: &FileGuard<'_>) {
    if !ended(log, || guard.end_story(), || guard.end_retired()) {
        guard.mark_unlogged(false);
    }
}

/// Ends the story of a file without its lock. If that fails, marks the file, as [`end`] does.
fn end_without_lock(log: &Log, file: FileRef) {
    let is_over = || log.end_retired_without_lock(file);
    if !ended(log, || log.end_without_lock(file), is_over) {
        log.mark_unlogged(file);
    }
}

/// Retires the log's records without a supervisor. Returns whether the tail has moved.
fn retire_alone(log: &Log) -> bool {
    retire_after(log, || sync_devices(log.devices()))
}

/// Retires the log's records after `sync`, which returns whether it succeeded. If it did not, no
/// records are retired any more until the cleaner of a supervisor, or recovery, has written them.
fn retire_after(log: &Log, sync: impl FnOnce() -> bool) -> bool {
    let is_dead = |process, thread| !query::is_alive(process, thread);
    log.retire_alone(is_dead, || {
        if sync() {
            return Ok(());
        }
        log.ring().distrust_kernel();
        log.distrust_all_files();
        Err(Errno::IO)
    })
}

/// Syncs the file systems with these device numbers, or all if these exceed [`DEVICES_MOST`].
/// Returns `false` if a write-back has failed.
fn sync_devices(mut numbers: impl Iterator<Item = u64>) -> bool {
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
    if is_full {
        raw::sync();
        return true;
    }
    devices[..len].iter().all(|device| mounts::sync_device(*device))
}

/// Waits until all present records of the log are retired, by the supervisor or without one. Gives
/// up after `timeout`: recovery then recognizes by their times the files that were changed later,
/// and leaves those files as they are.
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
    /// Syncs the file by the kernel if it is not durable, and [ends](end) its story if it has one.
    /// Returns `false` if the disk fails. The story then goes on, since only the log has the
    /// promised data, and the file's syncs are real.
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

    /// Ends the story of a file whose last record is wrong and whose disk fails.
    pub(super) fn end_unsynced(&self, guard: &FileGuard<'_>) {
        end(self.log, guard);
    }

    /// Ends the file's story and makes a change without the entry's lock, whose holder is stopped
    /// or is this thread. If the process has given the log up, only makes the change: no file is in
    /// the log then.
    ///
    /// Why that is safe: the story ends after the file is durable. Recovery drops a record that the
    /// holder appended before that end. A record that the holder appends later belongs to no
    /// covered story.
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
        // Before and after the change: no story that begins in between is covered without it.
        self.log.mark_unlogged(entry.file);
        let result = change();
        self.log.mark_unlogged(entry.file);
        result
    }

    /// Makes a change of a file that can have no entry here, after ending its stories.
    #[cold]
    pub(super) fn unidentified(&self, change: impl FnOnce() -> isize) -> isize {
        let (device, inode) = (self.known.device, self.known.inode);
        // Announced in the lane first: a story that begins later waits for the change.
        let in_flight = plain::in_lane(self.log, PlainCall::Write { device, inode });
        leave_numbers(self.log, device, inode, false);
        let result = change();
        drop(in_flight);
        result
    }

    /// Pins the file until [`unpin`](Self::unpin) is called for the descriptor. Returns the facts
    /// about the descriptor, which has the pin unless the file could not be locked.
    pub(crate) fn pin(&self) -> Known {
        if self.known.has(PINNED) {
            return self.known;
        }
        let Some((entry, guard)) = self.left() else { return self.known };
        guard.keep_unlogged();
        if !descriptors::has_place(self.fd) {
            // Forked children will not pin the file again: it stays plain while the log is in use.
            guard.mark_unlogged(true);
        }
        let known = self.known.with_entry(entry).with(PINNED);
        descriptors::set(self.fd, known);
        known
    }

    /// Releases the pin of the descriptor, which no longer changes the file unseen.
    pub(crate) fn unpin(&self) {
        if !self.known.has(PINNED) {
            return;
        }
        if let Some(Ok(guard)) = self.known.entry().map(|entry| self.lock_in_time(entry)) {
            guard.stop_keeping();
        }
    }

    /// Pins the file until this process has ended, without a note at the descriptor. Returns the
    /// file's entry, or `None` if the file could not be pinned.
    pub(crate) fn pin_until_exit(&self) -> Option<FileRef> {
        let (_, guard) = self.left()?;
        guard.keep_unlogged();
        Some(guard.file())
    }

    /// Pins the file until the log is no longer in use, without a note at the descriptor.
    pub(crate) fn mark(&self) {
        if let Some((_, guard)) = self.left() {
            guard.mark_unlogged(true);
        }
    }

    /// Makes the file leave the log, and locks it. Returns `None` if it cannot be locked: its story
    /// has ended, and its next sync is real.
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
            // The coming change cannot be refused.
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

    /// Runs a change that the log does not take, as one of a plain file. Returns the kernel's
    /// result. Counts the change as one of metadata, which it may be.
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

/// Makes the file leave the log until this process ends, and the supervisor close its descriptor:
/// the kernel grants a lease only while no other process has the file open.
pub(crate) fn leave_for_lease(fd: c_int) {
    if let Some(open) = Open::of(fd) {
        unseen::pin(&open);
        supervisor::flush();
    }
}

/// Ends the stories of the file with these numbers, which this process does not have open or cannot
/// identify. With `pins` the file stays plain while the log is in use.
#[cold]
pub(crate) fn leave_numbers(log: &Log, device: u64, inode: u64, pins: bool) {
    // The entry found may belong to a removed file that had these numbers.
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

/// Ends the story of a file without a descriptor, and calls `then` under the file's lock.
pub(crate) fn leave_closed<'l>(log: &'l Log, file: FileRef, then: impl FnOnce(&FileGuard<'l>)) {
    // Syncs the whole file system, without opening the file: the close would release the program's
    // record locks. A failed write-back is reported to every open descriptor of the file.
    leave_made_durable(log, file, || mounts::sync_device(log.device_of(file)), then);
}

/// Makes all files leave that the kernel may have changed without a record, before a sync of more
/// than one file: sealed files, and files that a process was changing when it was killed.
pub(crate) fn leave_unrecorded(log: &Log) {
    for file in log.sealed_files() {
        leave_closed(log, file, |_| {});
    }
    leave_interrupted(log);
}

/// Makes all files leave whose names a process was changing when it was killed, before a sync of a
/// directory. Recovery would otherwise make the change, against the sync's promise of the names.
pub(super) fn leave_half_named(log: &Log) {
    let is_orphaned = |file_system| {
        let names = log.file_systems().lock_names_within(file_system, LOCK_TIMEOUT);
        names.is_ok_and(|names| names.is_orphaned())
    };
    if log.file_systems().all().any(is_orphaned) {
        leave_interrupted(log);
    }
}

/// Makes all files leave that a process was changing when it was killed.
fn leave_interrupted(log: &Log) {
    let Some(_holding) = Holding::new() else { return };
    for file in log.operations().all().filter_map(|operation| log.operations().file_of(&operation))
    {
        let guard = log.lock_within(file, PIN_TIMEOUT).ok();
        if let Some(guard) = guard.filter(FileGuard::owner_died) {
            // If the repair fails, later syncs of the file are real or return an error.
            let _ = log.operations().repair(&guard, || {
                let is_durable = mounts::sync_device(log.device_of(file));
                if is_durable { Ok(()) } else { Err(Errno::IO) }
            });
        }
    }
}

/// Makes a file leave without a descriptor: syncs it by `make_durable` if it is not durable, ends
/// its story, and calls `then` under its lock. Without the lock only syncs it and ends its story.
/// If `make_durable` returns `false`, the file's next sync fails.
fn leave_made_durable<'l>(
    log: &'l Log,
    file: FileRef,
    make_durable: impl FnOnce() -> bool,
    then: impl FnOnce(&FileGuard<'l>),
) {
    let Some(_holding) = Holding::new() else { return };
    let make_durable = || {
        if !make_durable() {
            // A stale entry has no story.
            let _ = log.note_failure(file);
        }
    };
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

/// Syncs the file system of a locked file without a descriptor, and ends the file's story.
#[cold]
pub(super) fn leave_locked(log: &Log, guard: &FileGuard<'_>) {
    if !mounts::sync_device(log.device_of(guard.file())) {
        guard.note_failure();
    }
    end(log, guard);
}

/// A file whose names or attributes are about to change without a record.
pub(crate) struct Gone<'p> {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// A directory, a path of the file relative to it, and the flags of `fstatat` for the path.
    pub(crate) path: Option<(c_int, &'p CStr, c_int)>,
}

/// Makes the file leave the log before such a change.
pub(crate) fn leave_gone(log: &Log, file: FileRef, gone: &Gone<'_>) {
    leave_made_durable(log, file, || gone.make_durable(), |_| ());
}

impl Gone<'_> {
    /// Syncs the file by a descriptor of the program, or by a new one if the process holds no
    /// record lock on the file. If neither is possible, syncs the whole file system. Returns
    /// `false` if a write-back of that has failed.
    fn make_durable(&self) -> bool {
        let is_it = |fd| {
            let numbers = query::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
            numbers == Ok((self.device, self.inode))
        };
        // Checked after the sync: another thread may have closed the descriptor before.
        let by = |fd| durable::fsync(raw::borrowed(fd)).is_ok() && is_it(fd);
        let is_durable = match descriptors::find(self.device, self.inode) {
            Some(fd) => by(fd),
            None => self.open().is_some_and(|opened| by(opened.number())),
        };
        is_durable || mounts::sync_device(self.device)
    }

    /// Opens the file at the path. Returns `None` if it cannot be opened, or if the close could
    /// release a record lock of the program.
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

    /// A thread records that the file is removed, and is killed before the kernel removes it.
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

    /// Takes all of the log's space, including the reserve for ends of stories.
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
    fn after_a_failed_write_back_no_records_are_retired() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        fill(&open.lock(open.entry().unwrap()).unwrap());
        let tail = world.log.ring().tail();
        assert!(!retire_after(world.log, || false));
        // The kernel has reported the failure.
        assert!(!retire_after(world.log, || true) && world.log.ring().tail() == tail);
    }

    #[test]
    fn a_file_whose_end_nobody_makes_space_for_is_logged_no_more() {
        let world = World::new();
        let (file, other) = (world.file("file"), world.file("other"));
        let (open, busy) = (world.covered(&file, 0), world.covered(&other, 0));
        // Otherwise the end would get the space of earlier records.
        assert!(retire_alone(world.log));
        let from = world.log.ring().head();
        // A thread that is stopped in the middle of a write keeps the tail where it is.
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
