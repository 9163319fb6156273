//! Hooks: reads and writes.
//!
//! Invariant: events report the byte counts that the calls returned. For a transfer at the position
//! of a descriptor, the hook reads the position after the call. If two threads use one position at
//! the same time, their offsets may be swapped.
#![allow(unsafe_code)] // C's calling convention, and offsets that the program passes by address

use std::ffi::{c_int, c_void};

use libc::{iovec, off_t, size_t, ssize_t};
use tidegate_record::event::{Event, Kind};

use crate::files;
use crate::hook::hooks;
use crate::session::{self, Recorder};
use crate::stream;

/// Start of a transfer.
#[derive(Clone, Copy)]
pub(crate) enum Start {
    /// The descriptor's position before the call.
    Position,
    /// This offset.
    At(off_t),
}

/// Returns the start for a call that takes the offset -1 for the position of the descriptor.
fn start_of(offset: off_t) -> Start {
    if offset == -1 { Start::Position } else { Start::At(offset) }
}

/// Reports that a call has transferred `done` bytes, if any; returns `done`.
#[inline]
fn transferred(kind: Kind, fd: c_int, start: Start, is_synced: bool, done: ssize_t) -> ssize_t {
    if done > 0 {
        session::recording(|recorder| tell(recorder, kind, (fd, start), is_synced, done));
    }
    done
}

fn tell(
    recorder: Recorder,
    kind: Kind,
    (fd, start): (c_int, Start),
    is_synced: bool,
    done: ssize_t,
) {
    let Some(file) = files::of(recorder, fd) else { return };
    let len = u64::try_from(done).unwrap_or(0);
    let end = match start {
        Start::At(_) if kind == Kind::Write && file.appends => {
            files::stat_open(fd).map(|found| found.stx_size)
        }
        Start::At(offset) => u64::try_from(offset).ok().map(|offset| offset.saturating_add(len)),
        Start::Position => files::position(fd),
    };
    if let Some(offset) = end.and_then(|end| end.checked_sub(len)) {
        let event = Event::new(kind).of_file(file.number).with([offset, len]);
        recorder.tell(event.flagged(is_synced), &[]);
    }
    if matches!(start, Start::Position) {
        stream::moved(fd, end);
    }
}

/// Returns whether the flags of `pwritev2` make the write durable.
fn syncs(flags: c_int) -> bool {
    flags & (libc::RWF_DSYNC | libc::RWF_SYNC) != 0
}

/// Returns the start of a transfer. The kernel has advanced the offset that `offset` points to by
/// `done`. NULL stands for the position of the descriptor.
///
/// # Safety
/// A system call with this pointer has just succeeded.
unsafe fn start_before(offset: *const off_t, done: ssize_t) -> Start {
    if offset.is_null() {
        return Start::Position;
    }
    // SAFETY: not null, and the kernel has just written the offset there.
    let after = unsafe { offset.read_unaligned() };
    Start::At(after.saturating_sub(i64::try_from(done).unwrap_or(0)))
}

/// Reports that the kernel has copied `done` bytes between two files; returns `done`.
///
/// # Safety
/// A system call with both pointers has just returned `done`.
unsafe fn copied(
    (from, from_offset): (c_int, *const off_t),
    (to, to_offset): (c_int, *const off_t),
    done: ssize_t,
) -> ssize_t {
    if done > 0 {
        // SAFETY: `done` is positive, so the call with this pointer has succeeded.
        let start = unsafe { start_before(from_offset, done) };
        transferred(Kind::Read, from, start, false, done);
        // SAFETY: `done` is positive, so the call with this pointer has succeeded.
        let start = unsafe { start_before(to_offset, done) };
        transferred(Kind::Write, to, start, false, done);
    }
    done
}

hooks! {
    [read](fd: c_int, buffer: *mut c_void, len: size_t) -> ssize_t => |call|
        transferred(Kind::Read, fd, Start::Position, false, call());
    [__read_chk](fd: c_int, buffer: *mut c_void, len: size_t, space: size_t) -> ssize_t => |call|
        transferred(Kind::Read, fd, Start::Position, false, call());
    [readv](fd: c_int, parts: *const iovec, count: c_int) -> ssize_t => |call|
        transferred(Kind::Read, fd, Start::Position, false, call());
    [pread pread64](fd: c_int, buffer: *mut c_void, len: size_t, offset: off_t) -> ssize_t => |call|
        transferred(Kind::Read, fd, Start::At(offset), false, call());
    [__pread_chk __pread64_chk](
        fd: c_int, buffer: *mut c_void, len: size_t, offset: off_t, space: size_t
    ) -> ssize_t => |call|
        transferred(Kind::Read, fd, Start::At(offset), false, call());
    [preadv preadv64](fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t =>
        |call| transferred(Kind::Read, fd, Start::At(offset), false, call());
    [preadv2 preadv64v2](
        fd: c_int, parts: *const iovec, count: c_int, offset: off_t, flags: c_int
    ) -> ssize_t => |call|
        transferred(Kind::Read, fd, start_of(offset), false, call());
    [write](fd: c_int, buffer: *const c_void, len: size_t) -> ssize_t => |call|
        transferred(Kind::Write, fd, Start::Position, false, call());
    [writev](fd: c_int, parts: *const iovec, count: c_int) -> ssize_t => |call|
        transferred(Kind::Write, fd, Start::Position, false, call());
    [pwrite pwrite64](
        fd: c_int, buffer: *const c_void, len: size_t, offset: off_t
    ) -> ssize_t => |call|
        transferred(Kind::Write, fd, Start::At(offset), false, call());
    [pwritev pwritev64](fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t =>
        |call| transferred(Kind::Write, fd, Start::At(offset), false, call());
    [pwritev2 pwritev64v2](
        fd: c_int, parts: *const iovec, count: c_int, offset: off_t, flags: c_int
    ) -> ssize_t => |call|
        transferred(Kind::Write, fd, start_of(offset), syncs(flags), call());
    [sendfile sendfile64](
        to: c_int, from: c_int, offset: *mut off_t, count: size_t
    ) -> ssize_t => |call| {
        let done = call();
        // SAFETY: the call was made with this offset, and returned `done`.
        unsafe { copied((from, offset), (to, std::ptr::null()), done) }
    };
    [copy_file_range splice](
        from: c_int,
        from_offset: *mut off_t,
        to: c_int,
        to_offset: *mut off_t,
        len: size_t,
        flags: libc::c_uint
    ) -> ssize_t => |call| {
        let done = call();
        // SAFETY: the call was made with these offsets, and returned `done`.
        unsafe { copied((from, from_offset), (to, to_offset), done) }
    };
}
