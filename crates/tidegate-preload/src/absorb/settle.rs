//! The end of an absorption: the kernel gets all.
//!
//! Invariants:
//! 1. What no hook here can do with an absorbed file is done after it was settled: [`settle`].
//! 2. Where no supervisor lives, a process settles files itself; it holds the supervisor's lock meanwhile, so that nobody else does.
#![allow(unsafe_code)] // borrows descriptors by number

use std::ffi::c_int;
use std::time::Duration;

use tidegate::log::{
    Absorbed, FileGuard, FileRef, LockError, Log, Scanner, can_write_in_place, set_modified,
};

use super::{any, find, forget, locked, mark};
use crate::descriptors::{self, ABSORBED};
use crate::names::SignalsBlocked;
use crate::process;
use crate::raw::{self, Errno};
use crate::supervisor::{self, Answer};

/// Between two looks at a file that cannot be settled now, and how many there are before the program is told.
const PAUSE: Duration = Duration::from_millis(20);
const TRIES: u32 = 500;
const TRIES_FOR_ROOM: u32 = 50;

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

/// Gives the description its place, where another process has settled the file.
pub(super) fn place_again(guard: &FileGuard<'_>, fd: c_int) {
    if find(guard.file()).is_some()
        && let Some(place) = guard.take_owed_place()
    {
        let _ = raw::lseek(fd, i64::try_from(place).unwrap_or(0), libc::SEEK_SET);
    }
}

/// In the supervisor's place, and with its lock: brings to the kernel what was absorbed, by whatever process; whether this
/// process could.
fn settle_here(log: &Log, file: FileRef, fd: c_int) -> Result<bool, Errno> {
    let guard = match locked(log, file) {
        Ok(guard) => guard,
        Err(LockError::Stale) => return Ok(true),
        Err(_) => return Err(libc::EINTR),
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
pub(super) fn give_lease_back(fd: c_int) {
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
        let guard = locked(log, file);
        // Without the lock another thread may use the overlay: it stays, until the file is absorbed anew.
        if !matches!(guard, Err(LockError::Reentered)) {
            forget(file);
        }
    }
}
