//! What is done with a file in the log: writes, syncs, and the way out of the log where changes are not seen.
//!
//! Invariants:
//! 1. A write is in the log, durable, before the kernel does it, and the file's lock is held over both.
//! 2. Where the kernel does less, or does it elsewhere, the record is voided and what was done is recorded, before the program
//!    hears of it.
//! 3. Before a change that the log does not have, the file's changes in the log are made durable in the file and retired: recovery
//!    never puts old data over newer data. A real sync of a file retires what the log has of it, for the same reason.
//! 4. Without the lock (a signal handler that interrupted its holder, a holder that was stopped) nothing is logged, and the
//!    next sync is real.
//! 5. A change past the log through a descriptor whose `O_SYNC` was taken away is synced before the program hears of it.
//!
//! Entry points: [`Open::of`]; [`Open::write`], [`Open::sync`], [`Open::hide`], [`Open::show`], [`Open::unseen`],
//! [`Open::define`], [`Open::born`], [`Open::empty`].

use std::ffi::c_int;
use std::io::IoSlice;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::log::{AppendError, Counter, Definition, FileGuard, FileRef, LockError, Log, Ticket};

use crate::descriptors::{self, Known};
use crate::files::{self, Seen};
use crate::names::SignalsBlocked;
use crate::path::PathBuffer;
use crate::raw::{self, Errno};
use crate::{absorb, mend, names, process};

/// How often a lock, or room for what must be said, is waited for, a second each.
const TRIES: u32 = 10;
/// How often a write waits for room: others may take it first.
pub(crate) const WAITS: u32 = 60;
const PATIENCE: Duration = Duration::from_secs(1);

/// A descriptor of a file that has an entry in the log's table.
#[derive(Clone, Copy)]
pub(crate) struct Open {
    pub(crate) log: &'static Log,
    pub(crate) fd: c_int,
    pub(crate) known: Known,
    pub(crate) file: FileRef,
}

/// A locked file, and no signal handler in between.
struct Locked {
    // Given back first: signals come after it.
    guard: FileGuard<'static>,
    _signals: SignalsBlocked,
}

impl Deref for Locked {
    type Target = FileGuard<'static>;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.guard
    }
}

/// Where a write goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// To the descriptor's position, which moves.
    Current,
    /// To a byte of the file.
    At(u64),
    /// To the file's end, without moving the position.
    End,
}

/// How much of a file is to be made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sync {
    /// As `fsync`.
    All,
    /// As `fdatasync`.
    Data,
}

impl Sync {
    /// Makes the system call: its result as the kernel gives it.
    pub(crate) fn run(self, fd: c_int) -> isize {
        let result = match self {
            Self::All => raw::fsync(fd),
            Self::Data => raw::fdatasync(fd),
        };
        result.map_or_else(negated, |_| 0)
    }
}

pub(crate) fn negated(errno: Errno) -> isize {
    isize::try_from(-errno).unwrap_or(-5)
}

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

/// Why a write did not go through the log.
enum Refused {
    /// The file's definition comes first.
    Undefined,
    /// There is none: the name that the descriptor was opened by is gone.
    Undefinable,
    /// The log has no room.
    Full,
    /// The log does not take it.
    Never,
    /// The descriptor is not what it was.
    Changed,
}

impl From<AppendError> for Refused {
    fn from(error: AppendError) -> Self {
        if error == AppendError::Full { Self::Full } else { Self::Never }
    }
}

impl Open {
    /// The file of `fd`, if it is one that has to do with the log.
    #[inline]
    pub(crate) fn of(fd: c_int) -> Option<Self> {
        let log = process::log()?;
        let known = files::of(fd);
        let file = known.file()?;
        Some(Self { log, fd, known, file })
    }

    /// The same for descriptors that can be written to.
    #[inline]
    pub(crate) fn writable(fd: c_int) -> Option<Self> {
        Self::of(fd).filter(|open| !open.known.has(descriptors::READ_ONLY))
    }

    /// Locks the file, once the kernel has all of it. None: go on without the log.
    ///
    /// # Errors
    /// The kernel cannot take all of it: what is to be done would come before older writes.
    #[inline]
    fn lock(&self) -> Result<Option<Locked>, Errno> {
        let locked = self.lock_as_it_is();
        if locked.as_ref().is_none_or(|locked| locked.guard.absorber() == 0) {
            return Ok(locked);
        }
        drop(locked);
        absorb::settle_patiently(self.log, self.file, self.fd)?;
        self.lock()
    }

    /// The same for what does not depend on what the kernel has.
    #[inline]
    fn lock_as_it_is(&self) -> Option<Locked> {
        let signals = SignalsBlocked::new();
        let guard = match self.log.lock(self.file) {
            Ok(guard) if !guard.owner_died() => guard,
            Ok(guard) => {
                mend::file(self.log, self.fd, &guard);
                guard
            }
            Err(error) => self.lock_again(error)?,
        };
        Some(Locked { guard, _signals: signals })
    }

    #[cold]
    fn lock_again(&self, error: LockError) -> Option<FileGuard<'static>> {
        match error {
            // The entry was given away, since nothing depended on it: the file gets another one.
            LockError::Stale => {
                let open = self.found_again()?;
                open.log.lock(open.file).ok()
            }
            LockError::Busy => (1..TRIES).find_map(|_| self.log.lock(self.file).ok()),
            LockError::Reentered => None,
        }
    }

    fn found_again(&self) -> Option<Self> {
        let flags = self.known.flags & descriptors::STRIPPED;
        let known = files::find_out(self.fd, flags);
        Some(Self { known, file: known.file()?, ..*self })
    }

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
        if !is_as_recorded {
            self.correct(guard, ticket, position, request, result);
        }
        ticket.count(bytes, false);
        let written = Written { at: place, end: place + bytes, parts: request.parts, position };
        Ok((result, is_as_recorded.then_some(written)))
    }

    /// The byte of the file that a write will start at.
    #[inline]
    fn place(&self, place: Place) -> Result<u64, Errno> {
        let appends = self.known.has(descriptors::APPEND);
        match place {
            // The kernel appends, then, whatever the place.
            _ if appends => self.end(),
            Place::End => self.end(),
            Place::At(at) => Ok(at),
            Place::Current => self.position(),
        }
    }

    fn end(&self) -> Result<u64, Errno> {
        raw::fstat(self.fd).map(|stat| u64::try_from(stat.st_size).unwrap_or(0))
    }

    #[inline]
    fn position(&self) -> Result<u64, Errno> {
        raw::lseek(self.fd, 0, libc::SEEK_CUR).map(|at| at as u64)
    }

    /// Whether the kernel did what the record says.
    #[inline]
    fn is_as_recorded(&self, place: Place, recorded: u64, bytes: u64, result: isize) -> bool {
        u64::try_from(result) == Ok(bytes) && self.start_of_last(place, bytes) == Ok(recorded)
    }

    /// Where the write of `bytes` bytes that the kernel has just done began.
    #[inline]
    fn start_of_last(&self, place: Place, bytes: u64) -> Result<u64, Errno> {
        let appends = self.known.has(descriptors::APPEND);
        match place {
            Place::Current => self.position().map(|end| end.saturating_sub(bytes)),
            Place::At(at) if !appends => Ok(at),
            Place::At(_) | Place::End => self.end().map(|end| end.saturating_sub(bytes)),
        }
    }

    /// Makes the log say what the kernel did instead of what it was asked for.
    #[cold]
    fn correct(
        &self,
        guard: &FileGuard<'_>,
        ticket: &mut Ticket<'_>,
        position: u64,
        request: &Request<'_>,
        result: isize,
    ) {
        let corrected = ticket.void(position).map_err(|_| ()).and_then(|_| {
            let Ok(done) = u64::try_from(result) else { return Ok(()) };
            let start = self.start_of_last(request.place, done).map_err(|_| ())?;
            record(ticket, start, done, request.parts).map_err(|_| ())
        });
        if corrected.is_err() {
            let retired = self.make_durable(guard) && ticket.retire().is_ok();
            guard.mark_unlogged(!retired);
        }
    }

    /// Writes past the log, under the file's lock.
    #[cold]
    fn unlogged(
        &self,
        guard: &FileGuard<'_>,
        request: &Request<'_>,
        kernel: impl Fn() -> isize,
    ) -> isize {
        self.retire(guard);
        guard.mark_unlogged(false);
        self.done_unlogged(request, kernel(), guard.is_nameless())
    }

    /// Writes past the log to a file of which no name is known: the one that it was opened by is gone, and it has others. The disk
    /// has to keep what the log would.
    #[cold]
    fn undefinable(&self, request: &Request<'_>, kernel: impl Fn() -> isize) -> isize {
        let Request { parts, place, .. } = *request;
        let request = &Request { parts, place, durable: true };
        match self.lock() {
            Ok(Some(guard)) => self.unlogged(&guard, request, kernel),
            Ok(None) => self.unlocked(request, kernel),
            Err(errno) => negated(errno),
        }
    }

    /// Writes past the log and without the lock.
    #[cold]
    fn unlocked(&self, request: &Request<'_>, kernel: impl Fn() -> isize) -> isize {
        // Before and after: a sync in between must not take this write for one that it has covered.
        self.log.mark_unlogged(self.file);
        let result = kernel();
        self.log.mark_unlogged(self.file);
        self.done_unlogged(request, result, false)
    }

    fn done_unlogged(&self, request: &Request<'_>, result: isize, nameless: bool) -> isize {
        self.log.stats().add(Counter::UnloggedWrites, 1);
        if result == 0 || nameless { result } else { self.made_durable(request.durable, result) }
    }

    /// What the program gets for a change past the log that had this result: the change is durable then, if it is `wanted` or if
    /// the descriptor was opened so.
    fn made_durable(&self, wanted: bool, result: isize) -> isize {
        if result < 0 || !(wanted || self.known.has(descriptors::STRIPPED)) {
            return result;
        }
        self.log.stats().add(Counter::SyncsReal, 1);
        let all = self.known.has(descriptors::SYNC);
        let synced = if all { Sync::All } else { Sync::Data }.run(self.fd);
        if synced < 0 { synced } else { result }
    }

    /// Makes the file's changes in the log durable in the file, and says so in the log.
    fn retire(&self, guard: &FileGuard<'_>) {
        if !guard.has_live_changes() || guard.is_nameless() {
            return;
        }
        if !self.make_durable(guard) {
            return;
        }
        for _ in 0..TRIES {
            let room = self.log.room();
            match guard.begin().and_then(|mut ticket| ticket.retire()) {
                Err(AppendError::Full) if self.log.supervisor_alive() => {
                    self.log.wait_for_room(room, PATIENCE);
                }
                _ => return,
            }
        }
    }

    /// Makes the file durable by the kernel, with its names: recovery leaves those of retired files alone. Where that fails the log
    /// must keep what it has, and the program is told by its next sync.
    fn make_durable(&self, guard: &FileGuard<'_>) -> bool {
        let synced = raw::fsync(self.fd).is_ok();
        if !synced {
            // The kernel may take for clean what the disk did not take: this notes that, too.
            guard.note_failure();
        }
        synced
    }

    /// From now on the file may be changed in ways that are not seen, until [`show`](Self::show) is called for the descriptor.
    pub(crate) fn hide(&self) -> Known {
        if self.known.has(descriptors::STICKY) {
            return self.known;
        }
        let Some(guard) = self.left() else { return self.known };
        guard.keep_unlogged();
        let known = Known::of_file(guard.file(), self.known.flags).with(descriptors::STICKY);
        descriptors::set(self.fd, known);
        known
    }

    /// As [`hide`](Self::hide), but noted with no descriptor, and until the log is not in use any more.
    pub(crate) fn mark(&self) {
        if let Some(guard) = self.left() {
            guard.mark_unlogged(true);
        }
    }

    /// The same, until this process has ended.
    pub(crate) fn keep(&self) {
        if let Some(guard) = self.left() {
            guard.keep_unlogged();
        }
    }

    /// Locks the file when the log has nothing more of it; none: the next sync is real.
    fn left(&self) -> Option<Locked> {
        let Ok(Some(guard)) = self.lock() else {
            self.log.mark_unlogged(self.file);
            return None;
        };
        self.retire(&guard);
        Some(guard)
    }

    /// The descriptor changes its file no more in ways that are not seen.
    pub(crate) fn show(&self) {
        if !self.known.has(descriptors::STICKY) {
            return;
        }
        if let Some(guard) = self.lock_as_it_is() {
            guard.stop_keeping();
        }
    }

    /// Runs a change of the file that the log does not have: its result, as the kernel gives it.
    pub(crate) fn unseen(&self, change: impl FnOnce() -> isize) -> isize {
        self.unseen_as(false, change)
    }

    /// The same; with `durable` the change is to be durable even if the descriptor was not opened so.
    pub(crate) fn unseen_as(&self, durable: bool, change: impl FnOnce() -> isize) -> isize {
        let result = self.changed_unseen(change);
        self.made_durable(durable, result)
    }

    fn changed_unseen(&self, change: impl FnOnce() -> isize) -> isize {
        let guard = match self.lock() {
            Ok(Some(guard)) => guard,
            Ok(None) => {
                self.log.mark_unlogged(self.file);
                let result = change();
                self.log.mark_unlogged(self.file);
                return result;
            }
            Err(errno) => return negated(errno),
        };
        self.retire(&guard);
        guard.keep_unlogged();
        drop(guard);
        let result = change();
        if let Some(guard) = self.lock_as_it_is() {
            guard.stop_keeping();
        }
        result
    }

    /// Makes the file durable, by the kernel where the log does not do that already.
    #[inline]
    pub(crate) fn sync(&self, wanted: Sync) -> isize {
        if self.log.is_covered(self.file) {
            self.log.stats().add(Counter::SyncsSkipped, 1);
            return 0;
        }
        self.sync_for_real(wanted)
    }

    #[cold]
    fn sync_for_real(&self, wanted: Sync) -> isize {
        self.log.stats().add(Counter::SyncsReal, 1);
        let Some(guard) = self.lock_as_it_is() else { return wanted.run(self.fd) };
        let failed = guard.take_failure();
        if guard.absorber() != 0 {
            let seen = guard.unlogged();
            drop(guard);
            // The log has its bytes; what else has changed is the kernel's.
            let result = after(failed, Sync::All.run(self.fd));
            return self.synced(result, seen);
        }
        if guard.is_sticky() && !guard.has_live_changes() {
            drop(guard);
            return after(failed, wanted.run(self.fd));
        }
        let seen = guard.unlogged();
        if !guard.has_live_changes() {
            drop(guard);
            // All of it, so that the log may answer the next one.
            let result = after(failed, Sync::All.run(self.fd));
            return self.synced(result, seen);
        }
        // Unlogged changes may lie over older ones in the log, which must then not be put back.
        let synced = Sync::All.run(self.fd);
        if synced < 0 {
            // The program is told now; the kernel may take for clean what the disk did not take.
            guard.note_dropped();
        }
        let result = after(failed, synced);
        if result == 0 && guard.begin().and_then(|mut ticket| ticket.retire()).is_ok() {
            guard.synced(seen);
        }
        result
    }

    fn synced(&self, result: isize, seen: u64) -> isize {
        if result == 0
            && let Some(guard) = self.lock_as_it_is()
        {
            guard.synced(seen);
        }
        result
    }
    /// Tells the log which file the descriptor is, so that records can name it. Under the lock of names: no name changes
    /// between its being read and its being recorded. False: the name that the descriptor was opened by is gone. True may mean that
    /// the locks are busy: whoever needs the definition looks, and asks again.
    #[cold]
    pub(crate) fn define(&self) -> bool {
        let Some(_names) = names::lock(self.log) else { return true };
        let Some(guard) = self.lock_as_it_is() else { return true };
        let defined = match guard.begin() {
            Ok(mut ticket) => self.define_by(&guard, &mut ticket),
            Err(error) => Err(error.into()),
        };
        let refused = defined.err().map(|refused| self.undefined(&guard, refused));
        !matches!(refused, Some(Refused::Undefinable))
    }

    /// What becomes of a file that could not be defined.
    fn undefined(&self, guard: &FileGuard<'_>, refused: Refused) -> Refused {
        if files::has_lost_its_name(self.fd) {
            return Refused::Undefinable;
        }
        guard.mark_unlogged(true);
        refused
    }

    fn define_by(&self, guard: &FileGuard<'_>, ticket: &mut Ticket<'_>) -> Result<(), Refused> {
        if !ticket.needs_define() {
            return Ok(());
        }
        let seen = Seen::of(self.fd).map_err(|_| Refused::Changed)?;
        if seen.stat.st_nlink == 0 {
            guard.mark_nameless();
            return Ok(());
        }
        let mut path = PathBuffer::new();
        files::path_of(self.fd, &seen.stat, &mut path).map_err(|_| Refused::Never)?;
        guard.note_mount(seen.mount);
        let key = self.log.key_of(guard.file());
        self.define_as(ticket, &seen.definition(key, guard.is_born(), &path))
    }

    fn define_as(
        &self,
        ticket: &mut Ticket<'_>,
        definition: &Definition<'_>,
    ) -> Result<(), Refused> {
        for _ in 0..TRIES {
            let room = self.log.room();
            match ticket.define(definition) {
                Err(AppendError::Full) if self.log.supervisor_alive() => {
                    self.log.wait_for_room(room, PATIENCE);
                }
                result => return Ok(result?),
            }
        }
        Err(Refused::Full)
    }

    /// The file was made by this process just now: all of it is in the log from the start.
    pub(crate) fn born(&self) {
        if let Ok(guard) = self.log.lock(self.file) {
            guard.mark_born();
        }
        self.define();
        let Some(guard) = self.lock_as_it_is() else { return };
        if guard.begin().map_or(true, |ticket| ticket.needs_define()) {
            // Its name is not in the log: a sync has to bring it to the disk.
            guard.mark_unlogged(false);
        }
    }

    /// Empties the file, as `O_TRUNC` does. A file of which the log has nothing is emptied past the log: most such
    /// files are rewritten without any sync.
    pub(crate) fn empty(&self, kernel: impl Fn() -> isize) -> isize {
        let Ok(Some(guard)) = self.lock() else { return self.unseen(kernel) };
        if !guard.has_live_changes() {
            guard.mark_unlogged(false);
            return kernel();
        }
        let recorded = guard.begin().map_err(Refused::from).and_then(|mut ticket| {
            if ticket.needs_define() {
                return Err(Refused::Undefined);
            }
            let position = ticket.set_size(0)?;
            let result = kernel();
            if result < 0 && ticket.void(position).is_err() {
                guard.mark_unlogged(false);
            }
            Ok(result)
        });
        recorded.unwrap_or_else(|_| {
            self.retire(&guard);
            guard.mark_unlogged(false);
            kernel()
        })
    }
}

/// Nanoseconds of a clock that only goes forwards.
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, rest) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000_000 + rest.unwrap_or(0)
}

/// The result of a sync; a write-back that failed before is reported where the kernel has nothing to report now.
fn after(failed: bool, result: isize) -> isize {
    if failed && result == 0 { -(libc::EIO as isize) } else { result }
}

/// Records that the first `done` bytes of `parts` were written from `start` on.
fn record(
    ticket: &mut Ticket<'_>,
    mut start: u64,
    mut done: u64,
    parts: &[IoSlice<'_>],
) -> Result<(), AppendError> {
    for part in parts {
        let len = usize::try_from(done).map_or(part.len(), |done| done.min(part.len()));
        if len == 0 {
            continue;
        }
        ticket.write(start, &[IoSlice::new(&part[..len])])?;
        start += len as u64;
        done -= len as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::AtomicU64;

    use super::*;
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
}
