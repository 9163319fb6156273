//! A write through the log.
//!
//! Invariants: a write is in the log, durable, before the kernel does it, and the file's lock is held over both.

use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate::log::{Counter, FileGuard, Ticket};

use super::{Open, PATIENCE, Place, Refused, negated};
use crate::names::SignalsBlocked;
use crate::{absorb, descriptors, names, process};

/// How often a write waits for room: others may take it first.
pub(crate) const WAITS: u32 = 60;

/// A write as the program asked for it.
pub(crate) struct Request<'a> {
    pub(crate) parts: &'a [IoSlice<'a>],
    pub(crate) place: Place,
    /// The program wants this write durable even if the descriptor does not.
    pub(crate) durable: bool,
}

impl Request<'_> {
    fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }
}

/// A write that the log and the kernel have.
pub(crate) struct Written<'a> {
    pub(crate) at: u64,
    pub(crate) end: u64,
    pub(crate) parts: &'a [IoSlice<'a>],
    /// Its record.
    pub(crate) position: u64,
}

impl Open {
    /// Writes through the log; `kernel` is the program's own system call.
    #[inline]
    pub(crate) fn write(&self, request: &Request<'_>, kernel: impl Fn() -> isize) -> isize {
        let bytes = request.bytes();
        if bytes == 0 {
            return kernel();
        }
        let stats = self.log.stats();
        if !stats.wants_latencies() {
            return self.write_in_time(request, bytes, kernel);
        }
        let start_ns = now_ns();
        let result = self.write_in_time(request, bytes, kernel);
        stats.record_latency(now_ns().saturating_sub(start_ns));
        result
    }

    #[inline]
    fn write_in_time(
        &self,
        request: &Request<'_>,
        bytes: u64,
        kernel: impl Fn() -> isize,
    ) -> isize {
        if self.known.has(descriptors::ABSORBED)
            && let Some(result) = absorb::write(self, request, bytes)
        {
            return result;
        }
        for _ in 0..WAITS {
            let guard = match self.lock() {
                Ok(Some(guard)) => guard,
                Ok(None) => return self.unlocked(request, kernel),
                Err(errno) => return negated(errno),
            };
            if guard.is_sticky() || guard.is_nameless() {
                return self.unlogged(&guard, request, kernel);
            }
            let room = self.log.room();
            match self.write_logged(&guard, request, bytes, &kernel) {
                Ok(done) => {
                    drop(guard);
                    return self.written(done);
                }
                Err(Refused::Undefined) => {
                    drop(guard);
                    match self.write_defined(request, bytes, &kernel) {
                        Ok(done) => return self.written(done),
                        Err(Refused::Undefinable) => return self.undefinable(request, kernel),
                        // The next try finds the same, or has the locks.
                        Err(_) => {}
                    }
                }
                Err(Refused::Full) if self.may_get_room() => {
                    drop(guard);
                    self.wait_for_room(room);
                }
                Err(Refused::Changed) => {
                    descriptors::clear(self.fd);
                    return kernel();
                }
                Err(Refused::Full | Refused::Never | Refused::Undefinable) => {
                    return self.unlogged(&guard, request, kernel);
                }
            }
        }
        match self.lock() {
            Ok(Some(guard)) => self.unlogged(&guard, request, kernel),
            Ok(None) => self.unlocked(request, kernel),
            Err(errno) => negated(errno),
        }
    }

    /// After a logged write, with no lock held: its result.
    #[inline]
    fn written(&self, (result, written): (isize, Option<Written<'_>>)) -> isize {
        if let Some(written) = written {
            absorb::consider(self, &written);
        }
        result
    }

    /// There is somebody who makes room; or one wait has not shown yet that nobody takes over from a supervisor that died.
    #[cold]
    pub(crate) fn may_get_room(&self) -> bool {
        static DESERTED: AtomicBool = AtomicBool::new(false);
        let is_alive = self.log.supervisor_alive();
        let was_deserted = DESERTED.swap(!is_alive, Ordering::Relaxed);
        is_alive || !was_deserted
    }

    #[cold]
    pub(crate) fn wait_for_room(&self, seen: u32) {
        let start_ns = now_ns();
        self.log.wait_for_room(seen, PATIENCE);
        let stats = self.log.stats();
        stats.add(Counter::FullWaits, 1);
        stats.add(Counter::FullWaitNs, now_ns().saturating_sub(start_ns));
    }

    #[inline]
    fn write_logged<'r>(
        &self,
        guard: &FileGuard<'_>,
        request: &'r Request<'_>,
        bytes: u64,
        kernel: &impl Fn() -> isize,
    ) -> Result<(isize, Option<Written<'r>>), Refused> {
        let mut ticket = guard.begin()?;
        if ticket.needs_define() {
            return Err(Refused::Undefined);
        }
        self.write_by(guard, &mut ticket, request, bytes, kernel)
    }

    /// Defines the file and writes by the same slot, which keeps the tail before the definition. By another one the file would
    /// have to be defined again if a cleaner has looked in between, and one that looks all the time always has.
    #[cold]
    fn write_defined<'r>(
        &self,
        request: &'r Request<'_>,
        bytes: u64,
        kernel: &impl Fn() -> isize,
    ) -> Result<(isize, Option<Written<'r>>), Refused> {
        // First, so that it does not matter which of the locks is given back first.
        let _signals = SignalsBlocked::new();
        let names = names::lock(self.log).ok_or(Refused::Undefined)?;
        let guard = self.lock_as_it_is().ok_or(Refused::Undefined)?;
        if guard.absorber() != 0 || guard.is_sticky() {
            return Err(Refused::Undefined);
        }
        let mut ticket = guard.begin()?;
        if let Err(refused) = self.define_by(&guard, &mut ticket) {
            drop(ticket);
            return Err(self.undefined(&guard, refused));
        }
        if guard.is_nameless() {
            return Err(Refused::Undefined);
        }
        // What the disk may take long for is not done under it.
        drop(names);
        self.write_by(&guard, &mut ticket, request, bytes, kernel)
    }

    #[inline]
    fn write_by<'r>(
        &self,
        guard: &FileGuard<'_>,
        ticket: &mut Ticket<'_>,
        request: &'r Request<'_>,
        bytes: u64,
        kernel: &impl Fn() -> isize,
    ) -> Result<(isize, Option<Written<'r>>), Refused> {
        let place = self.place(request.place).map_err(|_| Refused::Changed)?;
        if place.saturating_add(bytes) > process::file_bytes_max() {
            // It may be killed for it: then nobody may do the write once more.
            return Err(Refused::Never);
        }
        let position = ticket.write(place, request.parts)?;
        let result = kernel();
        let is_as_recorded = self.is_as_recorded(request.place, place, bytes, result);
        let written = Written { at: place, end: place + bytes, parts: request.parts, position };
        if !is_as_recorded {
            self.correct(guard, ticket, &written, request.place, result);
        }
        ticket.count(bytes, false);
        Ok((result, is_as_recorded.then_some(written)))
    }
}

/// Nanoseconds of a clock that only goes forwards.
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, rest) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000_000 + rest.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Seek, SeekFrom, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::sync::atomic::AtomicU64;

    use tidegate::log::RecordKind;

    use super::*;
    use crate::descriptors::Known;
    use crate::testing::{World, look};

    /// Each look of the cleaner asks for newer definitions.
    #[test]
    fn a_cleaner_that_looks_all_the_time_keeps_no_write_out_of_the_log() {
        let world: &'static World = Box::leak(Box::new(World::new()));
        let path = world.file("file");
        let file = File::options().write(true).open(&path).unwrap();
        let (log, fd) = (&world.log, file.as_raw_fd());
        let entry = look(&path).entered(log).unwrap().guard.file();
        let open = Open { log, fd, known: Known::of_file(entry, 0), file: entry };
        let (looks, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let writes = 2000;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    log.retire_to(log.safe_position()).unwrap();
                    looks.fetch_add(1, Ordering::Relaxed);
                }
            });
            for number in 0..writes {
                let seen = looks.load(Ordering::Relaxed);
                while looks.load(Ordering::Relaxed) == seen {
                    std::thread::yield_now();
                }
                let parts = [IoSlice::new(b"data")];
                let request = Request { parts: &parts, place: Place::At(number), durable: false };
                let kernel = || file.write_at(b"data", number).unwrap().cast_signed();
                assert_eq!(open.write(&request, kernel), 4);
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(log.stats().total(Counter::Writes), writes);
        let definitions = log.stats().total(Counter::Definitions);
        assert!(definitions <= writes, "{definitions} definitions");
    }

    /// The records of a write of "data", by `kernel`, to a file that has four bytes, all in the log; and whether the log is still
    /// relied on for the file.
    fn recorded(
        flags: u32,
        place: Place,
        kernel: impl Fn(&Path, &File) -> isize,
    ) -> (String, bool) {
        let world: &'static World = Box::leak(Box::new(World::new()));
        let path = world.live_file("file");
        let appends = flags & descriptors::APPEND != 0;
        let file = File::options().write(true).append(appends).open(&path).unwrap();
        let (log, fd) = (&world.log, file.as_raw_fd());
        let entry = world.subject(&path).guard.file();
        let open = Open { log, fd, known: Known::of_file(entry, flags), file: entry };
        let parts = [IoSlice::new(b"data")];
        open.write(&Request { parts: &parts, place, durable: false }, || kernel(&path, &file));
        let headers = world.headers();
        let words = headers[2..].iter().map(|header| match header.kind {
            RecordKind::Write => header.offset.to_string(),
            kind => format!("{kind:?}"),
        });
        (words.collect::<Vec<_>>().join(" "), world.subject(&path).guard.is_covered())
    }

    fn write(mut file: &File) -> isize {
        file.write(b"data").unwrap().cast_signed()
    }

    fn move_to(mut file: &File, to: u64) {
        file.seek(SeekFrom::Start(to)).unwrap();
    }

    fn others_append(path: &Path) {
        let mut others = File::options().append(true).open(path).unwrap();
        others.write_all(b"others").unwrap();
    }

    /// Other threads move the position at any time, and programs outside append.
    #[test]
    fn a_record_says_where_the_kernel_has_written_or_the_disk_has_it() {
        let (current, appends) = (Place::Current, descriptors::APPEND);
        let write_then_move = |_: &Path, file: &File| {
            let result = write(file);
            move_to(file, 1);
            result
        };
        let move_then_write = |_: &Path, file: &File| {
            move_to(file, 40);
            write(file)
        };
        let append_second = |path: &Path, file: &File| {
            others_append(path);
            write(file)
        };
        let append_first = |path: &Path, file: &File| {
            let result = write(file);
            others_append(path);
            result
        };
        let append_both = |path: &Path, file: &File| {
            others_append(path);
            append_first(path, file)
        };
        let write_less = |_: &Path, mut file: &File| file.write(b"da").unwrap().cast_signed();
        let write_less_and_move = |_: &Path, mut file: &File| {
            let result = file.write(b"da").unwrap().cast_signed();
            move_to(file, 1);
            result
        };
        let by_disk = |records: &str| (format!("{records} Void Retire"), false);
        let by_log = |records: &str| (records.to_owned(), true);
        assert_eq!(recorded(appends, current, write_then_move), by_log("4"));
        assert_eq!(recorded(appends, current, move_then_write), by_log("4"));
        assert_eq!(recorded(appends, current, append_first), by_log("4"));
        assert_eq!(recorded(appends, current, append_second), by_log("4 Void 10"));
        assert_eq!(recorded(appends, current, append_both), by_disk("4"));
        assert_eq!(recorded(appends, current, write_less_and_move), by_log("4 Void 4"));
        assert_eq!(recorded(appends, Place::At(0), append_first), by_disk("4"));
        assert_eq!(recorded(0, current, write_then_move), by_disk("0"));
        assert_eq!(recorded(0, current, move_then_write), by_disk("0"));
        assert_eq!(recorded(0, current, write_less), by_log("0 Void 0"));
        assert_eq!(recorded(0, current, write_less_and_move), by_disk("0"));
    }
}
