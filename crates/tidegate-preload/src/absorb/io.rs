//! Writes, reads and seeks of an absorbed file.
//!
//! Invariants: all use of an overlay is under the file's lock, and after a look whether the file is still absorbed by this
//! process: the supervisor may have *settled* it, so that the kernel has all again.
#![allow(unsafe_code)] // borrows overlays by pointer

use std::ffi::c_int;
use std::io::IoSliceMut;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::log::{AppendError, Base, FileGuard, LockError, Overlay, OverlayError};

use super::settle::{place_again, settle};
use super::start::still_has_space;
use super::{Absorbing, find, forget, locked, mark};
use crate::descriptors::{ABSORBED, APPEND, NEVER, WRITE_ONLY};
use crate::logged::{Open, Place, Request, WAITS, negated};
use crate::names::SignalsBlocked;
use crate::process;
use crate::raw::{self, Errno};

/// The longest hole that a write makes in an absorbed file.
const HOLE_BYTES_MAX: u64 = 1 << 30;

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
    let guard = match locked(open.log, open.file) {
        Ok(guard) => guard,
        Err(LockError::Stale) => return Err(left(open)),
        // A signal handler has interrupted this thread inside: it may try again later.
        Err(_) => return Err(Left::Error(libc::EINTR)),
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

/// The file is not absorbed any more: forgets what was known of it.
#[cold]
fn left(open: &Open) -> Left {
    forget(open.file);
    mark(open.file, |known| known.without(ABSORBED));
    Left::Usual
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
    // No file system in use has so small files that this would pass their limit without a look.
    let end = end.filter(|end| *end <= size.saturating_add(bytes).saturating_add(HOLE_BYTES_MAX));
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
                // The program is told that it was not written, so nobody may write it later.
                let voided = guard.begin().and_then(|mut ticket| ticket.void(position));
                guard.mark_unlogged(voided.is_err());
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
        libc::SEEK_SET => Some(0),
        libc::SEEK_CUR => Some(held.guard.place()),
        libc::SEEK_END => Some(held.guard.size()),
        _ => None,
    };
    let to = base.and_then(|base| base.checked_add_signed(offset));
    // The file system has files of this size: what is behind it is for the kernel to allow.
    let Some(to) = to.filter(|to| *to <= held.guard.size()) else {
        return match leave::<()>(open, held) {
            Err(Left::Error(errno)) => Some(negated(errno)),
            _ => None,
        };
    };
    held.guard.set_place(to);
    Some(isize::try_from(to).unwrap_or(isize::MAX))
}
