//! Writes of covered files.
//!
//! Invariants:
//! 1. A write is durable in the log before the kernel makes it, and the file's lock is held over
//!    both: records are in the order of the changes of the page cache.
//! 2. A write that the log does not take is made under the file's lock, after the file has left the
//!    log.

use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate::log::cover::{
    WriteAction, WriteExtent, WriteFacts, decide_record, decide_write, is_watched,
};
use tidegate::log::{Counter, FileGuard, Ticket};

use super::{Locked, Open, Place, Refused, SPACE_TIMEOUT, Sync, negated};
use crate::covered::{metadata, plain};
use crate::state::descriptors::{self, APPEND, DIRECT};
use crate::state::{files, process};
use crate::sys::path::{self, PathBuffer};
use crate::sys::{own_stack, query, raw};

/// Number of waits of one write for free space, which other writers may take first.
const WAITS: u32 = 60;

/// A write that the program asks for.
pub(crate) struct Request<'a> {
    pub(crate) parts: &'a [IoSlice<'a>],
    pub(crate) place: Place,
}

impl Request<'_> {
    fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }
}

/// The record of a write, appended before the kernel makes the write.
pub(super) struct Recorded {
    pub(super) start: u64,
    /// Position of the record.
    pub(super) position: u64,
    /// The count of changes in the file system before the write.
    pub(super) changes: u64,
}

impl Open {
    /// Writes by `kernel`, the program's own system call, if the file is plain. Returns its result,
    /// or `None` if the write has to go by the file's entry.
    #[inline]
    pub(crate) fn write_plain(&self, kernel: impl Fn() -> isize) -> Option<isize> {
        let in_flight = plain::enter(self.log, &self.known)?;
        // A direct write changes extents at once; a later sync of another file would commit them.
        let is_direct = self.known.has(DIRECT);
        let result = if is_direct { metadata::counted(kernel) } else { kernel() };
        drop(in_flight);
        Some(self.synced_if_wanted(result))
    }

    /// Writes by the file's entry. `kernel` is the program's own system call. Returns its result,
    /// or `-EIO` if the file cannot leave the log because its disk fails.
    pub(crate) fn write(&self, request: &Request<'_>, kernel: impl Fn() -> isize) -> isize {
        let bytes = request.bytes();
        if bytes == 0 {
            return kernel();
        }
        if self.known.has(DIRECT) {
            self.pin();
            return self.synced_if_wanted(metadata::counted(kernel));
        }
        let stats = self.log.ring().stats();
        if !stats.wants_latencies() {
            return self.synced_if_wanted(self.write_by_entry(request, bytes, kernel));
        }
        let start_ns = raw::now_ns();
        let result = self.write_by_entry(request, bytes, kernel);
        stats.record_latency(raw::now_ns().saturating_sub(start_ns));
        self.synced_if_wanted(result)
    }

    /// Makes a write that the log does not take. Returns the kernel's result, or a sync's error.
    pub(crate) fn unseen_write(&self, kernel: impl FnOnce() -> isize) -> isize {
        self.synced_if_wanted(self.unseen(kernel))
    }

    /// Returns the result of a write, after a sync if each write is to be synced.
    #[inline]
    fn synced_if_wanted(&self, result: isize) -> isize {
        if process::every_write() && files::is_wanted(self.fd) {
            return self.synced(result, Sync::Data);
        }
        result
    }

    /// Syncs the file after a write. Returns the write's `result`, or the error of the sync.
    pub(super) fn synced(&self, result: isize, wanted: Sync) -> isize {
        if result <= 0 {
            return result;
        }
        let synced = self.sync(wanted);
        if synced < 0 { synced } else { result }
    }

    fn write_by_entry(
        &self,
        request: &Request<'_>,
        bytes: u64,
        kernel: impl Fn() -> isize,
    ) -> isize {
        let Some(entry) = self.entry() else { return self.unidentified(kernel) };
        for wait in 0..=WAITS {
            let Ok(guard) = self.lock(entry) else { return self.without_lock(entry, kernel) };
            let space = self.log.ring().space_changes();
            let logged = match decide_write(&WriteFacts::of(&guard)) {
                WriteAction::Plain => return kernel(),
                WriteAction::Leave => Err(Refused::Never),
                WriteAction::Record => {
                    let write = LoggedWrite { open: self, guard: &guard, request, bytes };
                    own_stack::run(|| write.run(&kernel))
                }
            };
            match logged {
                Ok(result) => return result,
                Err(Refused::Full) if wait < WAITS && self.may_get_space() => {
                    drop(guard);
                    self.wait_for_space(space);
                }
                Err(Refused::Changed) => {
                    descriptors::clear(self.fd);
                    return kernel();
                }
                Err(Refused::Full | Refused::Never) => {
                    if !self.leave(&guard) {
                        return negated(libc::EIO);
                    }
                    self.log.ring().stats().add(Counter::UnloggedWrites, 1);
                    return kernel();
                }
            }
        }
        kernel()
    }

    /// Returns whether a wait for free space may succeed: the supervisor lives, or was found dead
    /// for the first time, so that another one may take over during one wait.
    #[cold]
    fn may_get_space(&self) -> bool {
        static DESERTED: AtomicBool = AtomicBool::new(false);
        let is_alive = self.log.ring().supervisor_alive();
        let was_deserted = DESERTED.swap(!is_alive, Ordering::Relaxed);
        is_alive || !was_deserted
    }

    #[cold]
    fn wait_for_space(&self, seen: u32) {
        let start_ns = raw::now_ns();
        self.log.ring().wait_for_space(seen, SPACE_TIMEOUT);
        let stats = self.log.ring().stats();
        stats.add(Counter::FullWaits, 1);
        stats.add(Counter::FullWaitNs, raw::now_ns().saturating_sub(start_ns));
    }

    /// Defines the file again, since the tail is about to pass the last definition or the file may
    /// have another name. Uses the slot of `ticket`, which keeps the tail where it is. With another
    /// slot, the file would need yet another definition if the cleaner looked in between.
    #[cold]
    pub(super) fn define_again(
        &self,
        guard: &FileGuard<'_>,
        ticket: &mut Ticket<'_>,
    ) -> Result<(), Refused> {
        let identified = files::identify(self.log, self.fd).ok_or(Refused::Never)?;
        let mut path = PathBuffer::new();
        if path::of_descriptor(self.fd, &mut path).is_err() {
            path.clear();
        }
        Ok(guard.define_again(ticket, &identified.definition(&path))?)
    }
}

/// A write of a locked file, through the log.
pub(super) struct LoggedWrite<'a> {
    pub(super) open: &'a Open,
    pub(super) guard: &'a Locked,
    pub(super) request: &'a Request<'a>,
    pub(super) bytes: u64,
}

impl LoggedWrite<'_> {
    /// Appends a record of the write, and makes it by `kernel`. Returns the kernel's result, or an
    /// error if nothing was written.
    #[inline]
    fn run(&self, kernel: &impl Fn() -> isize) -> Result<isize, Refused> {
        let Self { open, guard, request, bytes } = *self;
        let log = open.log;
        let mut ticket = guard.begin()?;
        if ticket.needs_define() || guard.take_renamed() {
            open.define_again(guard, &mut ticket)?;
        }
        let start = self.start().map_err(|_| Refused::Changed)?;
        let write = WriteExtent::of(guard, start, bytes);
        let file_system = guard.file_system;
        let is_pending = || log.file_systems().is_pending(file_system);
        let kernel_size = || self.end().ok();
        let appends = request.place == Place::End || open.known.has(APPEND);
        let bytes_max = process::file_bytes_max();
        if !decide_record(&write, appends, bytes_max, kernel_size, is_pending) {
            return Err(Refused::Never);
        }
        let changes = if write.grows { log.file_systems().changes(file_system) } else { 0 };
        let position = ticket.write(start, request.parts, write.grows)?;
        let is_resized = write.is_resized();
        let watches = || {
            let (journaled, changes) =
                (guard.journaled_changes(), log.file_systems().changes(file_system));
            is_watched(is_pending(), journaled, changes)
        };
        let (result, journaled) = if is_resized || !watches() {
            (kernel(), is_resized.then_some(changes))
        } else {
            self.watched(kernel)
        };
        if self.is_as_recorded(start, result) {
            if write.makes_hole() {
                guard.note_hole();
            }
            guard.note_change(write.change(journaled));
        } else {
            self.correct(ticket, &Recorded { start, position, changes }, result);
            return Ok(result);
        }
        ticket.count(bytes);
        Ok(result)
    }

    /// Makes an overwrite by `kernel` while a change is pending, and finds out whether it has put
    /// the inode into the journal: otherwise all later syncs of the file would be real. Returns the
    /// kernel's result, and [`Change::journaled`](tidegate::log::Change::journaled).
    #[cold]
    fn watched(&self, kernel: impl Fn() -> isize) -> (isize, Option<u64>) {
        let changed_at =
            || query::fstat(self.open.fd).ok().map(|stat| (stat.st_ctime, stat.st_ctime_nsec));
        // Counted before the first look at the ctime: a write that sets the ctime after this look
        // is later than all counted changes.
        let changes = self.open.log.file_systems().changes(self.guard.file_system);
        let before = changed_at();
        let result = kernel();
        let is_journaled = before.is_some() && before != changed_at();
        (result, is_journaled.then_some(changes))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Seek, SeekFrom, Write};
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::testing::World;

    #[test]
    fn the_first_write_after_a_rename_says_the_new_name() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        let write = || {
            let parts = [IoSlice::new(b"data")];
            let kernel = || file.write_at(b"data", 0).unwrap().cast_signed();
            open.write(&Request { parts: &parts, place: Place::At(0) }, kernel);
        };
        let from = world.log.ring().head();
        world.log.note_own_change(open.entry().unwrap().file);
        write();
        write();
        assert_eq!(world.records_since(from), "define 0 0");
    }

    /// Each round of the cleaner needs newer definitions.
    #[test]
    fn a_cleaner_that_looks_all_the_time_keeps_no_write_out_of_the_log() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        let (log, writes) = (world.log, 2000);
        let (rounds, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    log.ring().retire_to(log.ring().safe_position()).unwrap();
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
            for number in 0..writes {
                let seen = rounds.load(Ordering::Relaxed);
                while rounds.load(Ordering::Relaxed) == seen {
                    std::thread::yield_now();
                }
                let parts = [IoSlice::new(b"data")];
                let request = Request { parts: &parts, place: Place::At(number) };
                let kernel = || file.write_at(b"data", number).unwrap().cast_signed();
                assert_eq!(open.write(&request, kernel), 4);
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(log.ring().stats().total(Counter::Writes), writes);
        assert!(world.is_covered(&open));
        let definitions = log.ring().stats().total(Counter::Definitions);
        assert!(definitions <= writes + 2, "{definitions} definitions");
    }

    /// The records of a write of "data", by `kernel`, to a covered file that has four bytes; and
    /// whether the file is still covered.
    fn recorded(
        flags: u32,
        place: Place,
        kernel: impl Fn(&World, &File) -> isize,
    ) -> (String, bool) {
        let world = World::new();
        drop(world.file("file"));
        let appends = flags & descriptors::APPEND != 0;
        let file = File::options().write(true).append(appends).open(world.path("file")).unwrap();
        let open = world.covered(&file, flags);
        let from = world.log.ring().head();
        assert_eq!(open.write_plain(|| unreachable!("it is covered")), None);
        let parts = [IoSlice::new(b"data")];
        open.write(&Request { parts: &parts, place }, || kernel(&world, &file));
        (world.records_since(from), world.is_covered(&open))
    }

    fn write(mut file: &File) -> isize {
        file.write(b"data").unwrap().cast_signed()
    }

    fn move_to(mut file: &File, to: u64) {
        file.seek(SeekFrom::Start(to)).unwrap();
    }

    fn others_append(world: &World) {
        let mut others = File::options().append(true).open(world.path("file")).unwrap();
        others.write_all(b"others").unwrap();
    }

    /// Other threads move the position at any time, and programs outside append.
    #[test]
    fn a_record_says_where_the_kernel_has_written_or_the_disk_has_it() {
        let (current, appends) = (Place::Current, descriptors::APPEND);
        let write_then_move = |_: &World, file: &File| {
            let result = write(file);
            move_to(file, 1);
            result
        };
        let move_then_write = |_: &World, file: &File| {
            move_to(file, 40);
            write(file)
        };
        let append_second = |world: &World, file: &File| {
            others_append(world);
            write(file)
        };
        let append_first = |world: &World, file: &File| {
            let result = write(file);
            others_append(world);
            result
        };
        let append_both = |world: &World, file: &File| {
            others_append(world);
            append_first(world, file)
        };
        let write_less = |_: &World, mut file: &File| file.write(b"da").unwrap().cast_signed();
        let write_less_and_move = |_: &World, mut file: &File| {
            let result = file.write(b"da").unwrap().cast_signed();
            move_to(file, 1);
            result
        };
        let by_disk = |records: &str| (format!("{records} void end"), false);
        let by_log = |records: &str| (records.to_owned(), true);
        assert_eq!(recorded(appends, current, write_then_move), by_log("4+"));
        assert_eq!(recorded(appends, current, move_then_write), by_log("4+"));
        assert_eq!(recorded(appends, current, append_first), by_log("4+"));
        assert_eq!(recorded(appends, current, append_second), by_disk("4+"));
        assert_eq!(recorded(appends, current, append_both), by_disk("4+"));
        assert_eq!(recorded(appends, current, write_less_and_move), by_log("4+ void 4+"));
        assert_eq!(recorded(appends, Place::At(0), append_first), by_disk("4+"));
        assert_eq!(recorded(0, current, write_then_move), by_disk("0"));
        assert_eq!(recorded(0, current, move_then_write), by_disk("0"));
        assert_eq!(recorded(0, current, write_less), by_log("0 void 0"));
        assert_eq!(recorded(0, current, write_less_and_move), by_disk("0"));
        assert_eq!(recorded(0, current, |_, _| -(libc::EFAULT as isize)), by_log("0 void"));
        assert_eq!(
            recorded(0, current, |_, _| -(libc::EIO as isize)),
            ("0 void".to_owned(), false)
        );
    }

    #[test]
    fn only_what_overwrites_the_durable_part_does_not_grow_the_file() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        let from = world.log.ring().head();
        for at in [0, 1, 100, 0, 100] {
            let parts = [IoSlice::new(b"dat")];
            let kernel = || file.write_at(b"dat", at).unwrap().cast_signed();
            open.write(&Request { parts: &parts, place: Place::At(at) }, kernel);
        }
        assert_eq!(world.records_since(from), "0 1 100+ 0+ 100+", "a hole makes all of it growth");
    }

    #[test]
    fn a_handler_inside_an_operation_on_the_file_ends_its_story() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        let entry = open.entry().unwrap();
        let guard = open.lock(entry).unwrap();
        let from = world.log.ring().head();
        let parts = [IoSlice::new(b"data")];
        let request = Request { parts: &parts, place: Place::At(0) };
        assert_eq!(open.write(&request, || 4), 4);
        drop(guard);
        assert_eq!(world.records_since(from), "end");
        assert!(!world.is_covered(&open) && open.write_plain(|| 4) == Some(4));
    }

    #[test]
    fn writes_of_plain_files_leave_no_record() {
        let world = World::new();
        let file = world.file("file");
        let open = world.open(&file, 0);
        assert_eq!(open.write_plain(|| 4), Some(4));
        assert!(!world.log.may_have(open.known.device, open.known.inode));
        open.entry().unwrap();
        assert_eq!(open.write_plain(|| 4), None, "it may be logged");
        let parts = [IoSlice::new(b"data")];
        assert_eq!(open.write(&Request { parts: &parts, place: Place::At(0) }, || 4), 4);
        assert_eq!(world.records_since(0), "");
    }

    #[test]
    fn while_logging_is_suspended_a_write_makes_its_file_leave() {
        let world = World::new();
        let file = world.file("file");
        let open = world.covered(&file, 0);
        let from = world.log.ring().head();
        world.log.processes().suspend();
        let parts = [IoSlice::new(b"data")];
        assert_eq!(open.write(&Request { parts: &parts, place: Place::At(0) }, || 4), 4);
        assert_eq!(world.records_since(from), "end");
    }
}
