//! Files whose writes the kernel is not told of at once: what this process knows of them.
//!
//! A file that is written often, through one open description that only this process has, is *absorbed*: the supervisor takes
//! a write lease on it, so that whoever else opens it waits; from then on a write ends in the log, which
//! takes a tenth of the time of a system call that writes. What the kernel lacks is found through the overlay of pages
//! ([`Overlay`]); the supervisor brings it to the kernel later, or at once where somebody else wants the file.
//!
//! Invariants:
//! 1. All use of an overlay is under the file's lock, and after a look whether the file is still absorbed by this
//!    process: the supervisor may have *settled* it, so that the kernel has all again.
//! 2. Every descriptor of this process that shares the description is noted as absorbed, or is asked about at its next use.
//! 3. What no hook here can do with an absorbed file is done after it was settled: [`settle`].
//! 4. No other process ever shares the description of an absorbed file: before `fork`, `exec` and the sending of a descriptor all
//!    is settled, and what was shared once is never absorbed again.
//!
//! 5. Where no supervisor lives, a process settles files itself; it holds the supervisor's lock meanwhile, so that nobody else does.
//!
//! Entry points: [`consider`] after a logged write; [`write`], [`read`], [`seek`]; [`settle`], [`settle_all`].
#![allow(unsafe_code)] // owns overlays by pointer

use std::ffi::c_int;
use std::io::IoSliceMut;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use tidegate::log::{
    Absorbed, AppendError, Base, FileGuard, FileRef, LockError, Log, Overlay, OverlayError,
    Scanner, can_write_in_place, set_modified,
};

use crate::descriptors::{
    self, ABSORBED, APPEND, DIRECT, Known, NEVER, STICKY, STRIPPED, WRITE_ONLY,
};
use crate::logged::{Open, Place, Request, Sync, WAITS, Written, negated};
use crate::names::SignalsBlocked;
use crate::raw::{self, Errno};
use crate::supervisor::Answer;
use crate::{files, process, quota, supervisor};

/// Files that this process absorbs at once, at most.
const FILES: usize = 64;

/// A file that this process absorbs.
struct Absorbing {
    /// Its entry in the log's table as a word, 0: none.
    file: AtomicU64,
    overlay: AtomicPtr<Overlay>,
    /// The log's head up to which the last look at the file system's space counts.
    space_until: AtomicU64,
}

impl Absorbing {
    const fn none() -> Self {
        Self {
            file: AtomicU64::new(0),
            overlay: AtomicPtr::new(ptr::null_mut()),
            space_until: AtomicU64::new(0),
        }
    }
}

static FILES_ABSORBED: [Absorbing; FILES] = [const { Absorbing::none() }; FILES];

/// How many there are.
static COUNT: AtomicU32 = AtomicU32::new(0);
/// Threads that are about to absorb a file.
static STARTING: AtomicU32 = AtomicU32::new(0);
/// Threads that are about to share all descriptors with another process: nothing is absorbed meanwhile.
static SHARING: AtomicU32 = AtomicU32::new(0);

/// Between two looks at a file that cannot be settled now, and how many there are before the program is told.
const PAUSE: Duration = Duration::from_millis(20);
const TRIES: u32 = 500;
const TRIES_FOR_ROOM: u32 = 50;

/// This process absorbs some file.
#[inline]
pub(crate) fn any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

/// Why an absorbed file was not read, written or moved in here.
enum Left {
    /// It is not absorbed (any more): go the usual way.
    Usual,
    /// The program gets this error.
    Error(Errno),
}

/// The kernel's bytes of a file.
struct Kernel(c_int);

impl Base for Kernel {
    fn read(&mut self, mut offset: u64, mut buf: &mut [u8]) -> Result<(), i32> {
        while !buf.is_empty() {
            let at = i64::try_from(offset).map_err(|_| libc::EINVAL)?;
            match raw::pread(self.0, buf, at) {
                Ok(0) => {
                    buf.fill(0);
                    return Ok(());
                }
                Ok(read) => {
                    buf = &mut buf[read..];
                    offset += read as u64;
                }
                Err(libc::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

fn find(file: FileRef) -> Option<&'static Absorbing> {
    let word = file.to_word();
    FILES_ABSORBED.iter().find(|it| it.file.load(Ordering::Acquire) == word)
}

/// The file's lock, for as long as the file is absorbed by this process.
struct Held<'a> {
    guard: FileGuard<'a>,
    overlay: &'a Overlay,
    space_until: &'a AtomicU64,
    _signals: SignalsBlocked,
}

/// Locks an absorbed file, however long that takes: without the lock nothing can be done with it.
fn lock(open: &Open) -> Result<Held<'static>, Left> {
    let signals = SignalsBlocked::new();
    let guard = loop {
        match open.log.lock(open.file) {
            Ok(guard) => break guard,
            Err(LockError::Busy) => {}
            // A signal handler has interrupted this thread inside: it may try again later.
            Err(LockError::Reentered) => return Err(Left::Error(libc::EINTR)),
            Err(LockError::Stale) => return Err(left(open)),
        }
    };
    let absorbing = find(open.file);
    let absorber = guard.absorber();
    // A new supervisor has no descriptor of it; or it could not be settled before it was shared.
    if absorber != 0 && (absorber != process::number() || guard.is_wanted()) {
        drop(guard);
        drop(signals);
        settle(open.log, open.file, open.fd).map_err(Left::Error)?;
        return Err(Left::Usual);
    }
    if absorber == 0 {
        // Under the lock: once it is given back, the file may be absorbed anew.
        place_again(&guard, open.fd);
        return Err(left(open));
    }
    if let Some(Absorbing { overlay, space_until, .. }) = absorbing
        // SAFETY: null, or an overlay that goes only under the lock, when the file is absorbed no more.
        && let Some(overlay) = unsafe { overlay.load(Ordering::Acquire).as_ref() }
    {
        return Ok(Held { guard, overlay, space_until, _signals: signals });
    }
    // What it was absorbed by was closed, or was there before `exec`.
    drop(guard);
    drop(signals);
    settle(open.log, open.file, open.fd).map_err(Left::Error)?;
    Err(Left::Usual)
}

/// Gives the description its place, where another process has settled the file.
fn place_again(guard: &FileGuard<'_>, fd: c_int) {
    if find(guard.file()).is_some()
        && let Some(place) = guard.take_owed_place()
    {
        let _ = raw::lseek(fd, i64::try_from(place).unwrap_or(0), libc::SEEK_SET);
    }
}

/// The file is not absorbed any more: forgets what was known of it.
#[cold]
fn left(open: &Open) -> Left {
    forget(open.file);
    mark(open.file, |known| known.without(ABSORBED));
    Left::Usual
}

/// Frees the overlay of a file that is absorbed no more.
fn forget(file: FileRef) {
    let Some(it) = find(file) else { return };
    let word = file.to_word();
    // Who takes the word out frees the overlay: once.
    if it.file.compare_exchange(word, u64::MAX, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        let overlay = it.overlay.swap(ptr::null_mut(), Ordering::AcqRel);
        COUNT.fetch_sub(1, Ordering::Relaxed);
        if !overlay.is_null() {
            // SAFETY: `Box::into_raw` made it, and nobody else has it any more.
            drop(unsafe { Box::from_raw(overlay) });
        }
        it.file.store(0, Ordering::Release);
    }
}

/// Changes what is noted of all descriptors of a file.
fn mark(file: FileRef, change: impl Fn(Known) -> Known) {
    // Who notes a descriptor meanwhile looks at the file's absorber after that: see `noted`.
    fence(Ordering::SeqCst);
    descriptors::each(0, u32::MAX, |fd, known| {
        if known.file() == Some(file) {
            descriptors::change(fd, known, change(known));
        }
    });
}

/// Notes what `fd` is: as it was noted, absorbed if its file is.
pub(crate) fn noted(fd: c_int, known: Known) -> Known {
    descriptors::set(fd, known);
    let Some((log, file)) = process::log().zip(known.file()) else { return known };
    fence(Ordering::SeqCst);
    if known.has(ABSORBED) || log.absorber_of(file) != process::number() {
        return known;
    }
    let absorbed = known.with(ABSORBED);
    descriptors::change(fd, known, absorbed);
    absorbed
}

/// After a write that was logged: absorbs the file, if it is written often and nobody else has it open.
#[inline]
pub(crate) fn consider(open: &Open, written: &Written<'_>) {
    const NOT: u32 = ABSORBED | NEVER | STICKY | DIRECT;
    if open.known.has(NOT) {
        return;
    }
    let (writes, before) = (descriptors::count_write(open.fd), process::writes_before());
    let is_due = if begins_last_page(open, written) {
        before != 0 && writes >= before
    } else {
        is_due(writes, before) && (!open.known.has(WRITE_ONLY) || ends_with_page(written))
    };
    if is_due {
        absorb(open, written);
    }
}

fn ends_with_page(written: &Written<'_>) -> bool {
    written.end.is_multiple_of(Overlay::PAGE_BYTES)
}

/// What the descriptor cannot read of the file's last page does not have to be read after this write, if it is the file's last.
#[inline]
fn begins_last_page(open: &Open, written: &Written<'_>) -> bool {
    let page = written.end - written.end % Overlay::PAGE_BYTES;
    open.known.has(WRITE_ONLY) && written.at <= page && page < written.end
}

/// Whether the file of a descriptor with so many writes is worth a lease: after `before` of them, and, since somebody else may
/// have wanted it meanwhile, after twice as many, and so on.
fn is_due(writes: u32, before: u32) -> bool {
    writes.checked_rem(before) == Some(0) && (writes / before).is_power_of_two()
}

#[cold]
fn absorb(open: &Open, written: &Written<'_>) {
    if process::in_vfork_child() || process::writes_unseen() || descriptors::is_shared(open.fd) {
        return;
    }
    cover(open);
    let _signals = SignalsBlocked::new();
    STARTING.fetch_add(1, Ordering::SeqCst);
    if SHARING.load(Ordering::SeqCst) == 0 {
        absorb_alone(open, written);
    }
    STARTING.fetch_sub(1, Ordering::SeqCst);
}

/// A program that opened a file with `O_SYNC` never syncs it: what it had before it was logged is brought to the disk now, once.
fn cover(open: &Open) {
    if open.known.has(STRIPPED) && open.sync(Sync::All) < 0 {
        // For the program to hear.
        if let Ok(guard) = open.log.lock(open.file) {
            guard.note_failure();
        }
    }
}

fn absorb_alone(open: &Open, written: &Written<'_>) {
    let Ok(guard) = open.log.lock(open.file) else { return };
    let fit = guard.is_covered() && !guard.is_sticky() && !guard.is_nameless();
    // Once more, under the lock: see `never`.
    let fit = fit && !descriptors::get(open.fd).has(NEVER);
    if !fit || guard.absorber() != 0 || !has_space(open) {
        return;
    }
    // Of an absorption that somebody else has ended.
    forget(open.file);
    let Some(free) = FILES_ABSORBED.iter().find(|it| reserve(it)) else { return };
    let start = |overlay| start(open, &guard, written, free, overlay);
    let started = Overlay::new().ok().is_some_and(start);
    if !started {
        free.file.store(0, Ordering::Release);
    }
}

fn reserve(it: &Absorbing) -> bool {
    it.file.compare_exchange(0, u64::MAX, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Whether there is still room for what the log holds back. It is looked at again after each eighth of the log: what is not
/// brought yet is never more than all of the log, so that it and another eighth fit into twice the log.
#[inline]
fn still_has_space(open: &Open, space_until: &AtomicU64) -> bool {
    if open.log.head() < space_until.load(Ordering::Relaxed) {
        return true;
    }
    space_until.store(next_look(open.log), Ordering::Relaxed);
    has_space(open)
}

fn next_look(log: &Log) -> u64 {
    log.head() + log.pool().ring_bytes() / 8
}

/// The file system has room for what the log may hold back, and quotas leave it: else a write that the kernel would refuse were
/// accepted.
fn has_space(open: &Open) -> bool {
    let (Ok(system), Ok(file)) = (raw::fstatfs(open.fd), raw::fstat(open.fd)) else { return false };
    // Its quotas are not told to those who may only write.
    if system.f_type == libc::BTRFS_SUPER_MAGIC {
        return false;
    }
    let free_bytes = system.f_bavail.saturating_mul(u64::try_from(system.f_bsize).unwrap_or(0));
    let left_bytes = free_bytes
        .min(quota::left_bytes(open.fd, quota::USER, file.st_uid))
        .min(quota::left_bytes(open.fd, quota::GROUP, file.st_gid));
    left_bytes / 2 > open.log.pool().ring_bytes()
}

fn start(
    open: &Open,
    guard: &FileGuard<'_>,
    written: &Written<'_>,
    free: &Absorbing,
    overlay: Overlay,
) -> bool {
    match supervisor::lease(open.file, open.fd) {
        Answer::Done => {}
        Answer::Refused(_) => {
            mark(open.file, |known| known.with(NEVER));
            return false;
        }
        Answer::None => {
            // It may have died after it took the lease.
            give_lease_back(open.fd);
            return false;
        }
    }
    // Behind the lease: nobody changes size or place any more but this process, and its lock is held.
    let (Ok(stat), Ok(place)) = (raw::fstat(open.fd), raw::lseek(open.fd, 0, libc::SEEK_CUR))
    else {
        supervisor::closed(open.file);
        return false;
    };
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if begins_last_page(open, written) {
        let (at, parts, position) = (written.at, written.parts, written.position);
        let begun = overlay.begin_with(open.log, at, parts, position);
        if size != written.end || begun.is_err() {
            supervisor::closed(open.file);
            return false;
        }
    }
    guard.start_absorbing(process::number(), size, place as u64);
    free.space_until.store(next_look(open.log), Ordering::Relaxed);
    free.overlay.store(Box::into_raw(Box::new(overlay)), Ordering::Release);
    free.file.store(open.file.to_word(), Ordering::Release);
    COUNT.fetch_add(1, Ordering::Relaxed);
    mark(open.file, |known| known.with(ABSORBED));
    true
}

/// A write to an absorbed file; none: the file is not absorbed any more.
#[inline]
pub(crate) fn write(open: &Open, request: &Request<'_>, bytes: u64) -> Option<isize> {
    for _ in 0..WAITS {
        match try_write(open, request, bytes) {
            Ok(Some(written)) => return Some(isize::try_from(written).unwrap_or(isize::MAX)),
            Ok(None) => {}
            Err(Left::Usual) => return None,
            Err(Left::Error(errno)) => return Some(negated(errno)),
        }
    }
    // The disk does not take what the log has.
    settle(open.log, open.file, open.fd).err().map(negated)
}

/// One try; `Ok(None)`: again.
#[inline]
fn try_write(open: &Open, request: &Request<'_>, bytes: u64) -> Result<Option<u64>, Left> {
    let room = open.log.room();
    let held = lock(open)?;
    let Held { guard, overlay, space_until, .. } = &held;
    // Nobody else defines the file again, or holds the lease.
    let fit = !guard.is_nameless() && !guard.is_sticky() && open.log.supervisor_alive();
    if !fit || !still_has_space(open, space_until) {
        return leave(open, held);
    }
    let size = guard.size();
    let at = match request.place {
        _ if open.known.has(APPEND) => size,
        Place::End => size,
        Place::At(at) => at,
        Place::Current => guard.place(),
    };
    let end = at.checked_add(bytes).filter(|end| *end <= process::file_bytes_max());
    let prepared = end.map(|_| overlay.prepare(open.log, at, bytes, size, &mut Kernel(open.fd)));
    if let Some(Err(OverlayError::Base(_))) = prepared {
        // One that the descriptor may not read: the next such write would find it absorbed again.
        mark(open.file, |known| known.with(NEVER));
    }
    let (Some(end), Some(Ok(()))) = (end, prepared) else {
        // The kernel says what is wrong, or there is no room for more pages.
        return leave(open, held);
    };
    let appended = guard.begin().and_then(|mut ticket| {
        if ticket.needs_define() {
            return Ok(None);
        }
        let position = ticket.absorb(at, request.parts)?;
        ticket.count(bytes, true);
        Ok(Some(position))
    });
    match appended {
        Ok(Some(position)) => {
            if overlay.wrote(open.log, at, request.parts, position).is_err() {
                return Err(Left::Error(libc::EIO));
            }
            guard.grow(end, now_ns());
            if request.place == Place::Current {
                guard.set_place(end);
            }
            Ok(Some(bytes))
        }
        Ok(None) => {
            drop(held);
            if open.define() {
                return Ok(None);
            }
            settle(open.log, open.file, open.fd).map_err(Left::Error)?;
            Err(Left::Usual)
        }
        Err(AppendError::Full) if open.log.supervisor_alive() => {
            drop(held);
            open.wait_for_room(room);
            Ok(None)
        }
        Err(_) => leave(open, held),
    }
}

/// The time that the kernel would note for a write, which is as coarse.
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    let (seconds, rest) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000_000 + rest.unwrap_or(0)
}

/// Settles the file, for an operation that goes the usual way then.
#[cold]
fn leave<T>(open: &Open, held: Held<'_>) -> Result<T, Left> {
    drop(held);
    settle(open.log, open.file, open.fd).map_err(Left::Error)?;
    Err(Left::Usual)
}

/// A read of an absorbed file; none: the file is not absorbed any more.
pub(crate) fn read(open: &Open, place: Place, parts: &mut [IoSliceMut<'_>]) -> Option<isize> {
    match try_read(open, place, parts) {
        Ok(read) => Some(isize::try_from(read).unwrap_or(isize::MAX)),
        Err(Left::Usual) => None,
        Err(Left::Error(errno)) => Some(negated(errno)),
    }
}

fn try_read(open: &Open, place: Place, parts: &mut [IoSliceMut<'_>]) -> Result<u64, Left> {
    if open.known.has(WRITE_ONLY) {
        return Err(Left::Error(libc::EBADF));
    }
    let held = lock(open)?;
    let Held { guard, overlay, .. } = &held;
    let start = match place {
        Place::At(at) => at,
        Place::Current | Place::End => guard.place(),
    };
    let mut at = start;
    for part in parts {
        let left = guard.size().saturating_sub(at);
        let len = usize::try_from(left).map_or(part.len(), |left| left.min(part.len()));
        let read = overlay.read(open.log, at, &mut part[..len], &mut Kernel(open.fd));
        match read {
            Ok(()) => at += len as u64,
            Err(_) if at > start => break,
            Err(OverlayError::Base(errno)) => return Err(Left::Error(errno)),
            Err(_) => return Err(Left::Error(libc::EIO)),
        }
    }
    if place == Place::Current {
        guard.set_place(at);
    }
    Ok(at - start)
}

/// Moves the place of an absorbed file's description; none: go the usual way.
pub(crate) fn seek(open: &Open, offset: i64, whence: c_int) -> Option<isize> {
    let held = match lock(open) {
        Ok(held) => held,
        Err(Left::Usual) => return None,
        Err(Left::Error(errno)) => return Some(negated(errno)),
    };
    let base = match whence {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => held.guard.place(),
        libc::SEEK_END => held.guard.size(),
        _ => {
            return match leave::<()>(open, held) {
                Err(Left::Error(errno)) => Some(negated(errno)),
                _ => None,
            };
        }
    };
    let to = i64::try_from(base).ok().and_then(|base| base.checked_add(offset));
    Some(match to {
        Some(to) if to >= 0 => {
            held.guard.set_place(to.unsigned_abs());
            isize::try_from(to).unwrap_or(isize::MAX)
        }
        Some(_) => -(libc::EINVAL as isize),
        None => -(libc::EOVERFLOW as isize),
    })
}

/// Before attributes of a file are changed: what is written later would change them again.
pub(crate) fn settle_attributes(log: &'static Log, file: FileRef) {
    if log.absorber_of(file) != 0 {
        // Where the disk does not take the file, it does not take its attributes.
        let _ = settle_named(log, file);
    }
}

/// As [`settle_patiently`], for who has found the file by a name: through the descriptor that it is absorbed by, if that is one of
/// this process.
///
/// # Errors
/// As for [`settle`].
#[cold]
pub(crate) fn settle_named(log: &'static Log, file: FileRef) -> Result<(), Errno> {
    let mut own = -1;
    descriptors::each(0, u32::MAX, |fd, known| {
        if known.file() == Some(file) && known.has(ABSORBED) {
            own = fd;
        }
    });
    settle_patiently(log, file, own)
}

/// Gives the kernel all of an absorbed file, and its place back to the description: the file is as any other then. `fd` is one
/// of its descriptors that can write, or -1 if this process has none.
///
/// # Errors
/// The file cannot take what was written to it: it stays absorbed.
#[cold]
pub(crate) fn settle(log: &'static Log, file: FileRef, fd: c_int) -> Result<(), Errno> {
    for _ in 0..TRIES {
        let absorber = log.absorber_of(file);
        if absorber == 0 {
            forget_unless_absorbed(log, file, fd);
            return Ok(());
        }
        let own = absorber == process::number() && fd >= 0;
        match supervisor::settle(file, own.then_some(fd)) {
            Answer::Done => {}
            Answer::Refused(errno) => return Err(errno),
            Answer::None => settle_unanswered(log, file, fd)?,
        }
    }
    Err(libc::EIO)
}

/// Nobody has answered: settles the file here if there is no supervisor, and waits a moment else.
fn settle_unanswered(log: &Log, file: FileRef, fd: c_int) -> Result<(), Errno> {
    let signals = SignalsBlocked::new();
    if fd >= 0
        && let Ok(_supervision) = log.supervise(Duration::ZERO)
        && settle_here(log, file, fd)?
    {
        return Ok(());
    }
    drop(signals);
    // It is about to end or has just begun; or no descriptor is left to ask it with; or the next one has to do it.
    log.want_settled(file);
    log.wait_for_room(log.room(), PAUSE);
    Ok(())
}

/// The same, for what the kernel does not refuse for want of space: somebody may make room, or let go of the file, in time.
///
/// # Errors
/// As for [`settle`]: what was to be done cannot be done.
#[cold]
pub(crate) fn settle_patiently(log: &'static Log, file: FileRef, fd: c_int) -> Result<(), Errno> {
    for _ in 0..TRIES_FOR_ROOM {
        match settle(log, file, fd) {
            Err(libc::ENOSPC | libc::EDQUOT | libc::EINTR) => log.wait_for_room(log.room(), PAUSE),
            outcome => return outcome,
        }
    }
    settle(log, file, fd)
}

fn forget_unless_absorbed(log: &Log, file: FileRef, fd: c_int) {
    if find(file).is_none() {
        return;
    }
    let _signals = SignalsBlocked::new();
    // Under the lock: another thread may be in the middle of a read, or absorb the file anew.
    if let Ok(guard) = log.lock(file) {
        if guard.absorber() == process::number() {
            return;
        }
        place_again(&guard, fd);
        forget(file);
        mark(file, |known| known.without(ABSORBED));
    }
}

/// In the supervisor's place, and with its lock: brings to the kernel what was absorbed, by whatever process; whether this
/// process could.
fn settle_here(log: &Log, file: FileRef, fd: c_int) -> Result<bool, Errno> {
    let guard = loop {
        match log.lock(file) {
            Ok(guard) => break guard,
            Err(LockError::Busy) => {}
            Err(LockError::Reentered) => return Err(libc::EINTR),
            Err(LockError::Stale) => return Ok(true),
        }
    };
    let absorber = guard.absorber();
    if absorber == 0 {
        return Ok(true);
    }
    let own = absorber == process::number();
    // SAFETY: a descriptor that is open for the time of this call.
    let target = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    if !own && !can_write_in_place(target) {
        return Ok(false);
    }
    let mut absorbed = Absorbed::default();
    for record in Scanner::new(log.pool(), log.tail(), log.head()) {
        if record.file == guard.id() {
            absorbed.add(&record);
        }
    }
    // Not by a second one, which would break the lease that nobody answers for any more.
    if let Err(error) = absorbed.write(guard.id(), log.pool(), target) {
        guard.note_failure();
        return Err(error.raw_os_error().unwrap_or(libc::EIO));
    }
    set_modified(target, log.modified_ns(file));
    if own {
        let place = i64::try_from(guard.place()).unwrap_or(0);
        let _ = raw::lseek(fd, place, libc::SEEK_SET);
    } else {
        guard.owe_place();
    }
    let settled = guard.begin().and_then(|mut ticket| ticket.settle());
    if settled.is_err() {
        // The log cannot say that the kernel has the bytes: the file's disk has to, and the log gets no more of the file.
        let _ = raw::fdatasync(fd);
        guard.mark_unlogged(true);
    }
    guard.stop_absorbing();
    if own {
        give_lease_back(fd);
    }
    Ok(true)
}

/// Gives back the lease on the description of `fd`, which is this process's as much as that of the supervisor that took it.
fn give_lease_back(fd: c_int) {
    let unlocked = usize::try_from(libc::F_UNLCK).unwrap_or(2);
    let _ = raw::fcntl(fd, libc::F_SETLEASE, unlocked);
}

/// Before a file is opened: without a supervisor nobody else ends the leases on this process's files.
#[inline]
pub(crate) fn opening() {
    if any() && process::log().is_some_and(|log| !log.supervisor_alive()) {
        settle_all();
    }
}

/// Nothing is absorbed from now on, until [`shared`]: descriptors are about to get to another process.
#[cold]
pub(crate) fn sharing() {
    if process::in_vfork_child() {
        return;
    }
    SHARING.fetch_add(1, Ordering::SeqCst);
    while STARTING.load(Ordering::SeqCst) != 0 {
        raw::yield_now();
    }
    settle_all();
}

/// Ends what [`sharing`] began: no file that is open by now is absorbed again.
pub(crate) fn shared() {
    if !process::in_vfork_child() {
        descriptors::share_all();
        SHARING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The same in a forked child, where no other thread is.
pub(crate) fn inherited() {
    descriptors::share_all();
    SHARING.store(0, Ordering::SeqCst);
    STARTING.store(0, Ordering::SeqCst);
}

/// Settles all files of this process.
#[cold]
pub(crate) fn settle_all() {
    let Some(log) = process::log() else { return };
    if process::in_vfork_child() {
        return;
    }
    if any() {
        descriptors::each(0, u32::MAX, |fd, known| {
            if let Some(file) = known.file().filter(|_| known.has(ABSORBED)) {
                // One that its disk does not take is refused to whoever gets it, until it does.
                let _ = settle_patiently(log, file, fd);
            }
        });
    }
}

/// The kernel is about to use the file of `fd` in ways that are not seen, now or later.
///
/// # Errors
/// The kernel does not have all of it, and cannot take it.
pub(crate) fn never(fd: c_int) -> Result<(), Errno> {
    let Some((log, file)) = process::log().zip(files::of(fd).file()) else { return Ok(()) };
    // First: nobody absorbs it between the two.
    mark(file, |known| known.with(NEVER));
    drop(log.lock(file));
    if log.absorber_of(file) == process::number() {
        settle_patiently(log, file, fd)?;
    }
    Ok(())
}

/// The descriptor goes: with the last one, the file does not have to be kept for this process.
#[cold]
pub(crate) fn closing(fd: c_int, file: FileRef) {
    let mut others = false;
    descriptors::each(0, u32::MAX, |other, known| {
        others |= other != fd && known.file() == Some(file) && known.has(ABSORBED);
    });
    let Some(log) = process::log().filter(|_| !others) else { return };
    // At once: the copy of the descriptor that keeps others from the file goes with the supervisor.
    if settle(log, file, fd).is_err() {
        supervisor::closed(file);
        let _signals = SignalsBlocked::new();
        let _guard = log.lock(file);
        forget(file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_considered_again_after_twice_as_many_writes() {
        let due: Vec<_> = (1..500).filter(|writes| is_due(*writes, 32)).collect();
        assert_eq!(due, [32, 64, 128, 256]);
        assert!(!(1..100).any(|writes| is_due(writes, 0)), "never");
    }
}
