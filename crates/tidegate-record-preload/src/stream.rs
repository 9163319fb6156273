//! Hooks: streams of the C library.
//!
//! No hook sees the system calls that the C library makes for a stream. But they move the position
//! of the stream's descriptor: the bytes between two positions were read or written, and buffered
//! bytes are written at the latest when the stream is closed. So one event stands for all reads or
//! writes of a stream up to a flush, a seek, a sync of its descriptor, or its end.
//!
//! Invariant: hooks never flush a stream that the program does not flush.
#![allow(unsafe_code)] // C's calling convention and streams

use std::ffi::{c_char, c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use libc::{FILE, off_t};
use tidegate_record::event::{Event, Kind, Unseen};

use crate::files;
use crate::hook::hooks;
use crate::open::appeared;
use crate::session::{self, Recorder};

/// Streams on descriptors from this number on are not tracked.
const STREAMS: usize = 1024;
/// The maximum length in an event.
const EVENT_BYTES_MAX: u64 = 1 << 30;

/// A tracked stream on a descriptor.
struct Stream {
    file: AtomicPtr<FILE>,
    /// End of the bytes that were reported.
    told_bytes: AtomicU64,
}

static OPEN: [Stream; STREAMS] =
    [const { Stream { file: AtomicPtr::new(ptr::null_mut()), told_bytes: AtomicU64::new(0) } };
        STREAMS];
/// The process that owns the streams.
static PROCESS: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" {
    static stdout: *mut FILE;
    static stderr: *mut FILE;
    fn __fbufsize(stream: *mut FILE) -> usize;
    fn __fwriting(stream: *mut FILE) -> c_int;
    fn __fpending(stream: *mut FILE) -> usize;
}

/// Returns the tracked stream on `fd`. After a fork both processes share the position: this process
/// accounts for the bytes from the current position on.
fn on(recorder: Recorder, fd: c_int) -> Option<&'static Stream> {
    if PROCESS.swap(recorder.process, Ordering::Relaxed) != recorder.process {
        for (fd, stream) in (0..).zip(&OPEN) {
            if !stream.file.load(Ordering::Relaxed).is_null() {
                moved(fd, files::position(fd));
            }
        }
    }
    let stream = OPEN.get(usize::try_from(fd).ok()?)?;
    (!stream.file.load(Ordering::Acquire).is_null()).then_some(stream)
}

/// Sets the end of the reported bytes of `fd`: earlier bytes were reported or do not count.
pub(crate) fn moved(fd: c_int, position: Option<u64>) {
    let stream = usize::try_from(fd).ok().and_then(|fd| OPEN.get(fd));
    if let (Some(stream), Some(position)) = (stream, position) {
        stream.told_bytes.store(position, Ordering::Relaxed);
    }
}

/// Reports the bytes that the stream on `fd`, if any, has read or written since its last report.
pub(crate) fn account_descriptor(recorder: Recorder, fd: c_int) {
    let Some(stream) = on(recorder, fd) else { return };
    let file = stream.file.load(Ordering::Acquire);
    // SAFETY: the stream is open. If another thread closes it concurrently, its memory is still
    // part of the heap and can be read.
    let writes = unsafe { __fwriting(file) } != 0;
    // SAFETY: `file` points to a stream whose memory can be read, as for `__fwriting`.
    let pending = if writes { unsafe { __fpending(file) } } else { 0 };
    let Some(position) = files::position(fd) else { return };
    let end = position.saturating_add(u64::try_from(pending).unwrap_or(0));
    let mut start = stream.told_bytes.swap(end, Ordering::Relaxed);
    let Some(known) = files::of(recorder, fd).filter(|_| start < end) else { return };
    let kind = if writes { Kind::Write } else { Kind::Read };
    while start < end {
        let len = (end - start).min(EVENT_BYTES_MAX);
        recorder.tell(Event::new(kind).of_file(known.number).with([start, len]), &[]);
        start += len;
    }
}

/// Reports the bytes of all tracked streams: at a flush of all, and at the end of the process.
pub(crate) fn account_all() {
    session::recording(|recorder| {
        (0..).zip(&OPEN).for_each(|(fd, _)| account_descriptor(recorder, fd));
    });
}

/// Reports the last bytes of all streams at the end of the process, which flushes them.
pub(crate) fn end() {
    account_all();
    session::recording(count_standard);
}

/// Stops tracking the stream on `fd`.
pub(crate) fn forget(fd: c_int) {
    if let Some(stream) = usize::try_from(fd).ok().and_then(|fd| OPEN.get(fd)) {
        stream.file.store(ptr::null_mut(), Ordering::Release);
    }
}

/// Reports the bytes that `file` has read or written since its last report; returns its descriptor.
///
/// # Safety
/// `file` is a stream of the program, or NULL.
pub(crate) unsafe fn account(file: *mut FILE) -> c_int {
    let mut fd = -1;
    session::recording(|recorder| {
        // SAFETY: the caller passes a stream of the program, or NULL.
        fd = unsafe { descriptor(file) };
        account_descriptor(recorder, fd);
    });
    fd
}

/// # Safety
/// `file` is a stream of the program, or NULL.
unsafe fn descriptor(file: *mut FILE) -> c_int {
    // SAFETY: not null, so the caller passes a stream of the program.
    if file.is_null() { -1 } else { unsafe { libc::fileno(file) } }
}

/// Tracks a stream that was just opened. `is_new` tells whether the call opened the descriptor too.
///
/// # Safety
/// The C library has just returned `file` for the mode string `mode`.
unsafe fn opened(file: *mut FILE, mode: *const c_char, is_new: bool) -> *mut FILE {
    session::recording(|recorder| {
        // SAFETY: the C library has just returned `file`, a stream or NULL.
        let fd = unsafe { descriptor(file) };
        if fd < 0 {
            return;
        }
        // SAFETY: the call that returned a stream has read this string.
        let mode = unsafe { files::text(mode) };
        if is_new {
            appeared(recorder, fd, mode.first() == Some(&b'w'));
        }
        follow(recorder, file, fd, mode.first() == Some(&b'a'));
    });
    file
}

fn follow(recorder: Recorder, file: *mut FILE, fd: c_int, appends: bool) {
    if files::of(recorder, fd).is_none() || on(recorder, fd).is_some() {
        return;
    }
    let Some(stream) = usize::try_from(fd).ok().and_then(|fd| OPEN.get(fd)) else {
        files::count(recorder, Unseen::Stream);
        return;
    };
    // Appended bytes go to the end of the file, not to the current position.
    let size = || files::stat_open(fd).map(|found| found.stx_size);
    moved(fd, if appends { size() } else { files::position(fd) });
    stream.file.store(file, Ordering::Release);
}

/// Counts the standard streams that were used and lead to a file. Other processes share such a
/// file, so that its position does not show the bytes that this process has written.
fn count_standard(recorder: Recorder) {
    for (fd, stream) in standard() {
        // SAFETY: the C library keeps its standard streams until the process ends.
        let is_used = !stream.is_null() && unsafe { __fbufsize(stream) } > 0;
        let is_file = || files::stat_open(fd).is_some_and(|found| files::is_regular(&found));
        if is_used && is_file() {
            files::count(recorder, Unseen::Stream);
        }
    }
}

fn standard() -> [(c_int, *mut FILE); 2] {
    // SAFETY: the C library initializes it before the program begins.
    let out = unsafe { stdout };
    // SAFETY: the C library initializes it before the program begins.
    let err = unsafe { stderr };
    [(libc::STDOUT_FILENO, out), (libc::STDERR_FILENO, err)]
}

/// Reports a stream's bytes before a call that moves its position, and notes the new position.
///
/// # Safety
/// The condition of [`account`].
unsafe fn seeking<R>(file: *mut FILE, call: impl FnOnce() -> R) -> R {
    // SAFETY: the caller passes a stream of the program, or NULL.
    let fd = unsafe { account(file) };
    let result = call();
    session::recording(|recorder| {
        if on(recorder, fd).is_some() {
            moved(fd, files::position(fd));
        }
    });
    result
}

hooks! {
    [fopen fopen64](path: *const c_char, mode: *const c_char) -> *mut FILE => |call| {
        let file = call();
        // SAFETY: `file` was just opened with this mode.
        unsafe { opened(file, mode, true) }
    };
    [fdopen](fd: c_int, mode: *const c_char) -> *mut FILE => |call| {
        let file = call();
        // SAFETY: `file` was just opened with this mode.
        unsafe { opened(file, mode, false) }
    };
    [freopen freopen64](
        path: *const c_char, mode: *const c_char, stream: *mut FILE
    ) -> *mut FILE => |call| {
        // SAFETY: the program passed this stream to `freopen`.
        forget(unsafe { account(stream) });
        let file = call();
        // SAFETY: `file` was just opened with this mode.
        unsafe { opened(file, mode, !path.is_null()) }
    };
    [fflush fflush_unlocked](file: *mut FILE) -> c_int => |call| {
        let result = call();
        if file.is_null() {
            account_all();
        } else {
            // SAFETY: the program passed this stream to `fflush`.
            unsafe { account(file) };
        }
        result
    };
    [fseek](file: *mut FILE, offset: c_long, whence: c_int) -> c_int => |call| {
        // SAFETY: the program passed this stream to `fseek`.
        unsafe { seeking(file, call) }
    };
    [fseeko fseeko64](file: *mut FILE, offset: off_t, whence: c_int) -> c_int => |call| {
        // SAFETY: the program passed this stream to `fseeko`.
        unsafe { seeking(file, call) }
    };
    [rewind](file: *mut FILE) -> () => |call| {
        // SAFETY: the program passed this stream to `rewind`.
        unsafe { seeking(file, call) }
    };
    [fsetpos fsetpos64](file: *mut FILE, position: *const c_void) -> c_int => |call| {
        // SAFETY: the program passed this stream to `fsetpos`.
        unsafe { seeking(file, call) }
    };
}
