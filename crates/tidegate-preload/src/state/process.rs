//! The state of this process: whether it uses the log, and the user's settings.
//!
//! Invariants:
//! 1. Until the log is attached, if it cannot be attached, and after it was given up, every hook
//!    does the same as the C library.
//! 2. The facts are written when the library is loaded, and only read afterwards. Exceptions are
//!    the size limit of files, and three notes that are never withdrawn: that files are written
//!    unseen, that system calls are filtered, and that the log was given up.
//!
//! Entry points: [`log()`], [`filter`], [`trusts`], [`includes_tmpfs`], [`writes_unseen`],
//! [`in_vfork_child`], [`give_up`]; [`attach`] and [`use_log`] when the library is loaded.
//!
//! The environment: `TIDEGATE_POOL` and `TIDEGATE_CONTROL` are the paths of the log's memory;
//! `TIDEGATE_SOCKET` is the supervisor's; `TIDEGATE_INCLUDE`, `TIDEGATE_EXCLUDE` and
//! `TIDEGATE_TRUST` are globs, one a line; `TIDEGATE_INCLUDE_TMPFS=1` takes tmpfs for a disk;
//! `TIDEGATE_COVER_AFTER` is the number of a descriptor's sync that covers its file at any age (by
//! default the second sync, of a file that is at least a second old, or the eighth);
//! `TIDEGATE_EVERY_WRITE=1` syncs each write.
#![allow(unsafe_code)] // memory that is leaked at load time

use std::cell::Cell;
use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tidegate::glob::{self, Filter};
use tidegate::log::cover::Cause;
use tidegate::log::{self, Log, Ring};

use crate::sys::raw;
use crate::sys::signals::{self, SignalsBlocked};

/// Default number of a descriptor's sync that covers its file. Not the first one, since most files
/// are synced only once.
const COVER_AFTER: u32 = 2;
/// Default of the least age of a file that few syncs cover, in nanoseconds.
const COVER_AGE_NS: u64 = 1_000_000_000;

/// The log and the user's settings, in a process that uses the log.
pub(crate) struct Attached {
    log: Log,
    /// The files of the log's memory.
    found_at: [Place; 2],
    filter: Filter,
    trust: &'static [u8],
    cover_after: u32,
    cover_age_ns: u64,
    includes_tmpfs: bool,
}

impl Attached {
    pub(crate) fn log(&self) -> &Log {
        &self.log
    }

    /// Returns whether the user trusts the program at this path to change no file that is synced.
    pub(crate) fn trusts(&self, path: &[u8]) -> bool {
        glob::matches_any(self.trust, path)
    }
}

#[cfg(test)]
impl Attached {
    /// Returns the settings of a process that covers each file by its first sync.
    pub(crate) fn of_test(log: Log) -> Self {
        Self {
            log,
            found_at: [(); 2].map(|()| Place::new(OsStr::new("/"))),
            filter: Filter::default(),
            trust: b"",
            cover_after: 1,
            cover_age_ns: 0,
            includes_tmpfs: true,
        }
    }
}

/// A path, and the numbers of the file that it named at first.
struct Place {
    path: CString,
    file: Option<(u64, u64)>,
}

impl Place {
    fn new(path: &OsStr) -> Self {
        let path = CString::new(path.as_bytes()).unwrap_or_default();
        Self { file: file_at(&path), path }
    }

    /// Returns whether the path still names the same file.
    fn is_unchanged(&self) -> bool {
        self.file.is_some() && self.file == file_at(&self.path)
    }
}

/// Returns device and inode number of the file at a path.
fn file_at(path: &CStr) -> Option<(u64, u64)> {
    rustix::fs::stat(path).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

static ATTACHED: AtomicPtr<Attached> = AtomicPtr::new(ptr::null_mut());
/// The largest size that the kernel's type for sizes can hold.
const FILE_BYTES_MAX: u64 = i64::MAX.cast_unsigned();
/// The size limit of files that this process writes.
static FILE_LIMIT_BYTES: AtomicU64 = AtomicU64::new(FILE_BYTES_MAX);

static WRITES_UNSEEN: AtomicBool = AtomicBool::new(false);

/// Whether a thread has a table of descriptors apart from the threads that share its memory.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Apart {
    No,
    /// A child of `vfork`, with the parent's memory and descriptors of its own.
    VforkChild,
    /// A thread that has left its process's table of descriptors.
    OwnDescriptors,
}

thread_local! {
    static APART: Cell<Apart> = const { Cell::new(Apart::No) };
}

/// Returns the log, if this process uses one.
#[inline]
pub(crate) fn log() -> Option<&'static Log> {
    attached().map(|attached| &attached.log)
}

/// Returns whether a program that this process starts will find the log at the same paths.
pub(crate) fn can_find_log() -> bool {
    attached().is_some_and(|attached| attached.found_at.iter().all(Place::is_unchanged))
}

/// Returns the filter of paths that the user wants in the log.
pub(crate) fn filter() -> Filter {
    attached().map_or_else(Filter::default, |attached| attached.filter)
}

/// Returns whether the user trusts any programs.
pub(crate) fn trusts_any() -> bool {
    attached().is_some_and(|attached| !attached.trust.is_empty())
}

/// Returns whether the user trusts the program at this path: files stay in the log while it runs.
pub(crate) fn trusts(path: &[u8]) -> bool {
    attached().is_some_and(|attached| attached.trusts(path))
}

/// Returns whether files in tmpfs are taken for files on a disk, for tests.
pub(crate) fn includes_tmpfs() -> bool {
    attached().is_some_and(|attached| attached.includes_tmpfs)
}

/// Returns the size limit of files in bytes. The kernel refuses larger files, or kills the process.
#[inline]
pub(crate) fn file_bytes_max() -> u64 {
    FILE_LIMIT_BYTES.load(Ordering::Relaxed)
}

/// Updates [`file_bytes_max`] from the kernel.
pub(crate) fn find_file_limit() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    let bytes = limit.unwrap_or(u64::MAX).min(FILE_BYTES_MAX);
    FILE_LIMIT_BYTES.store(bytes, Ordering::Relaxed);
}

/// Returns the number of a descriptor's sync that covers its file.
pub(crate) fn cover_after() -> u32 {
    attached().map_or(u32::MAX, |attached| attached.cover_after)
}

/// Returns the least age of a file that few syncs cover, in nanoseconds; 0 for any age.
pub(crate) fn cover_age_ns() -> u64 {
    attached().map_or(0, |attached| attached.cover_age_ns)
}

/// Returns whether each write is to be synced before it returns, with or without the log.
#[inline]
pub(crate) fn every_write() -> bool {
    EVERY_WRITE.load(Ordering::Relaxed) && !is_filtered()
}

static EVERY_WRITE: AtomicBool = AtomicBool::new(false);

/// Returns the path of the supervisor's socket, even if this process does not use the log.
pub(crate) fn socket() -> Option<&'static Path> {
    SOCKET.get().copied().flatten()
}

static SOCKET: OnceLock<Option<&'static Path>> = OnceLock::new();

/// Returns the process ID.
#[inline]
pub(crate) fn number() -> u32 {
    log::current_process()
}

/// Returns whether any file of this process may be written in ways that no hook sees.
pub(crate) fn writes_unseen() -> bool {
    WRITES_UNSEEN.load(Ordering::Relaxed)
}

/// Sets [`writes_unseen`], for good.
pub(crate) fn set_writes_unseen() {
    WRITES_UNSEEN.store(true, Ordering::SeqCst);
}

/// Returns the log and the user's settings, if this process uses the log.
#[inline]
pub(crate) fn attached() -> Option<&'static Attached> {
    let at = ATTACHED.load(Ordering::Acquire);
    // SAFETY: null, or from `use_log`, which has leaked it: it lives as long as the process.
    unsafe { at.as_ref() }
}

/// Returns whether the caller is a child of `vfork` that has not called `exec` yet.
#[inline]
pub(crate) fn in_vfork_child() -> bool {
    APART.get() == Apart::VforkChild
}

/// Returns whether the calling thread is a child of `vfork` or has descriptors of its own.
#[inline]
pub(crate) fn is_apart() -> bool {
    APART.get() != Apart::No
}

/// Notes that the calling thread has descriptors of its own from now on.
pub(crate) fn set_own_descriptors() {
    APART.set(Apart::OwnDescriptors);
}

/// The notes of a thread before `vfork`. The child runs on the memory of the thread, and may be
/// killed at any moment. They fit into a register, which is not in that memory.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct BeforeVfork {
    holders: u32,
    /// The number of signal handlers that run: any number from 1 on means the same.
    handlers: u16,
    apart: Apart,
}

const _: () = assert!(size_of::<BeforeVfork>() == size_of::<u64>());

/// Notes that the calling thread is a child of `vfork`. To be called in the parent.
pub(crate) fn become_vfork_child() -> BeforeVfork {
    let apart = APART.replace(Apart::VforkChild);
    let handlers = u16::try_from(signals::handlers()).unwrap_or(u16::MAX);
    log::after_fork();
    BeforeVfork { holders: HOLDERS_HERE.get(), handlers, apart }
}

/// Notes that the child of `vfork` has called `exec` or ended, or that none was made. To be called
/// in the parent. If the child was killed, its operations have not ended.
pub(crate) fn end_vfork_child(before: BeforeVfork) {
    APART.set(before.apart);
    let left = HOLDERS_HERE.replace(before.holders).wrapping_sub(before.holders);
    HOLDERS.fetch_sub(left, Ordering::SeqCst);
    signals::forget_child(before.handlers.into());
    log::after_fork();
}

/// Attaches the log that the environment names, and reads the settings. Returns `None` if this
/// process cannot use the log.
pub(crate) fn attach() -> Option<Attached> {
    let _ = SOCKET.set(variable("TIDEGATE_SOCKET").map(Path::new));
    let is_set = |name| std::env::var_os(name).is_some_and(|value| value == "1");
    let every_write = is_set("TIDEGATE_EVERY_WRITE");
    EVERY_WRITE.store(every_write, Ordering::Relaxed);
    let pool = std::env::var_os("TIDEGATE_POOL")?;
    let control = std::env::var_os("TIDEGATE_CONTROL")?;
    let log = Ring::attach(Path::new(&pool), Path::new(&control)).map(Log::over).ok()?;
    let lines = |name| variable(name).map_or(&b""[..], OsStrExt::as_bytes);
    let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
    let cover_after = number("TIDEGATE_COVER_AFTER");
    let covers_all = cover_after.is_some() || every_write;
    Some(Attached {
        log,
        found_at: [Place::new(&pool), Place::new(&control)],
        cover_after: cover_after.unwrap_or(COVER_AFTER),
        cover_age_ns: if covers_all { 0 } else { COVER_AGE_NS },
        filter: Filter { include: lines("TIDEGATE_INCLUDE"), exclude: lines("TIDEGATE_EXCLUDE") },
        trust: lines("TIDEGATE_TRUST"),
        includes_tmpfs: is_set("TIDEGATE_INCLUDE_TMPFS"),
    })
}

/// Starts to use the log in this process.
pub(crate) fn use_log(attached: Attached) {
    ATTACHED.store(Box::into_raw(Box::new(attached)), Ordering::Release);
}

/// Notes that this process cannot use the log, although it may write files that other processes
/// have in the log. It counts as having given the log up, for this cause.
pub(crate) fn refuse_log(cause: Cause) {
    let _ = CAUSE.set(cause);
    GIVEN_UP.store(true, Ordering::SeqCst);
}

/// Returns a lasting copy of an environment variable, which the program may change.
fn variable(name: &str) -> Option<&'static OsStr> {
    let value = std::env::var_os(name)?.into_vec();
    Some(OsStr::from_bytes(Vec::leak(value)))
}

/// Number of the process's [`Holder`]s. [`give_up`] waits until it is 0.
static HOLDERS: AtomicU32 = AtomicU32::new(0);
/// Timeout of [`give_up`] for the next change of [`HOLDERS`].
const HOLDER_TIMEOUT: Duration = Duration::from_secs(1);

thread_local! {
    /// Number of the thread's [`Holder`]s.
    static HOLDERS_HERE: Cell<u32> = const { Cell::new(0) };
}

/// While this lives, the log's memory stays mapped, and no rights are given up.
///
/// A signal handler that jumps out meanwhile leaves a holder: [`give_up`] then waits for a timeout.
pub(crate) struct Holder(());

impl Holder {
    /// Returns `None` if the log was given up.
    #[inline]
    pub(crate) fn new() -> Option<Self> {
        HOLDERS.fetch_add(1, Ordering::SeqCst);
        HOLDERS_HERE.set(HOLDERS_HERE.get().wrapping_add(1));
        let holder = Self(());
        (!has_given_up()).then_some(holder)
    }

    /// Returns whether the calling thread has a holder.
    #[inline]
    pub(crate) fn is_here() -> bool {
        HOLDERS_HERE.get() != 0
    }
}

impl Drop for Holder {
    #[inline]
    fn drop(&mut self) {
        HOLDERS_HERE.set(HOLDERS_HERE.get().wrapping_sub(1));
        HOLDERS.fetch_sub(1, Ordering::SeqCst);
        // Only then a thread waits. Later a system call filter may kill the process for the call.
        if GIVING_UP.load(Ordering::SeqCst) == UNDER_WAY {
            raw::wake(&HOLDERS);
        }
        #[cfg(test)]
        RELEASED.get()();
    }
}

/// A [`Holder`] whose thread runs no signal handler. To be taken before a lock in the log, and also
/// after a call that may take long, before several system calls of the library's own.
pub(crate) struct Holding {
    // Dropped first: signals are unblocked when the thread is no longer a holder.
    _holder: Holder,
    _signals: SignalsBlocked,
}

impl Holding {
    /// Returns `None` if the log was given up.
    #[inline]
    pub(crate) fn new() -> Option<Self> {
        // The holder first: a system call filter may kill the process once the log was given up.
        let holder = Holder::new()?;
        Some(Self { _holder: holder, _signals: SignalsBlocked::deferred() })
    }
}

/// Returns whether the log was given up.
pub(crate) fn has_given_up() -> bool {
    GIVEN_UP.load(Ordering::SeqCst)
}

#[cfg(test)]
thread_local! {
    /// Called by the thread after it has dropped a holder.
    pub(crate) static RELEASED: Cell<fn()> = const { Cell::new(|| ()) };
}

/// Sets whether the log counts as given up, as if another thread had done so.
#[cfg(test)]
pub(crate) fn pretend_given_up(is_given_up: bool) {
    GIVEN_UP.store(is_given_up, Ordering::SeqCst);
}

/// Returns why the log was given up.
pub(crate) fn cause() -> Cause {
    CAUSE.get().copied().unwrap_or(Cause::Rights)
}

static GIVEN_UP: AtomicBool = AtomicBool::new(false);
/// Why the log was given up, to be reported to the supervisor.
static CAUSE: OnceLock<Cause> = OnceLock::new();

/// Adapts the state to a forked child, which has another process ID and none of the other threads.
/// Returns whether its thread had descriptors of its own.
pub(crate) fn become_child() -> bool {
    log::after_fork();
    HOLDERS.store(0, Ordering::SeqCst);
    HOLDERS_HERE.set(0);
    // A thread that is giving the log up is the parent's, not the child's.
    GIVING_UP.store(if has_given_up() { ENDED } else { NOT_BEGUN }, Ordering::SeqCst);
    APART.replace(Apart::No) == Apart::OwnDescriptors
}

/// Whether the program asked for a system call filter. From then on the library makes no system
/// calls of its own, since the filter may kill the process.
static IS_FILTERED: AtomicBool = AtomicBool::new(false);

/// Notes that the program asks for a system call filter.
pub(crate) fn set_filtered() {
    IS_FILTERED.store(true, Ordering::SeqCst);
}

/// Returns whether the program has asked for a system call filter.
pub(crate) fn is_filtered() -> bool {
    IS_FILTERED.load(Ordering::SeqCst)
}

/// The progress of giving the log up.
static GIVING_UP: AtomicU32 = AtomicU32::new(NOT_BEGUN);
const NOT_BEGUN: u32 = 0;
const UNDER_WAY: u32 = 1;
const ENDED: u32 = 2;
/// Timeout of one wait for the thread that gives the log up.
const ENDED_TIMEOUT: Duration = Duration::from_secs(1);

/// Gives the log up, for good: unmaps its memory, and makes every hook do the same as the C
/// library. `suspend` asks the supervisor to suspend logging: afterwards this process begins no
/// operation on the log.
///
/// One thread gives the log up. Another caller waits until that is done, since it may be about to
/// install a system call filter.
pub(crate) fn give_up(cause: Cause, suspend: impl FnOnce()) {
    match GIVING_UP.load(Ordering::SeqCst) {
        NOT_BEGUN if log().is_some() => give_up_first(cause, suspend),
        UNDER_WAY => {}
        _ => return,
    }
    while GIVING_UP.load(Ordering::SeqCst) == UNDER_WAY {
        raw::wait(&GIVING_UP, UNDER_WAY, ENDED_TIMEOUT);
    }
}

/// Gives the log up, unless another thread has begun to. Blocks signals meanwhile, since a handler
/// could not wait for its own thread. A second thread unblocks its signals while it is still a
/// holder, so that the first thread waits for that system call.
fn give_up_first(cause: Cause, suspend: impl FnOnce()) {
    let Some(holder) = Holder::new() else { return };
    let _signals = SignalsBlocked::new();
    let order = Ordering::SeqCst;
    if GIVING_UP.compare_exchange(NOT_BEGUN, UNDER_WAY, order, order).is_err() {
        return;
    }
    drop(holder);
    suspend();
    leave_log(cause);
    GIVING_UP.store(ENDED, Ordering::SeqCst);
    raw::wake(&GIVING_UP);
}

/// Detaches and unmaps the log, after waiting for all [`Holder`]s: a holder may be in a system call
/// of the library's own, or have a lock, which the C library's list of locks reaches through the
/// log's memory. Other threads read zeroes there: no file has an entry.
fn leave_log(cause: Cause) {
    let _ = CAUSE.set(cause);
    GIVEN_UP.store(true, Ordering::SeqCst);
    let at = ATTACHED.swap(ptr::null_mut(), Ordering::SeqCst);
    // SAFETY: null, or from `use_log`, which has leaked it: it lives as long as the process.
    let Some(attached) = (unsafe { at.as_ref() }) else { return };
    let is_free = loop {
        let holders = HOLDERS.load(Ordering::SeqCst);
        if holders == 0 || !raw::wait(&HOLDERS, holders, HOLDER_TIMEOUT) {
            break holders == 0;
        }
    };
    // If the kernel refuses, the memory stays mapped, but no hook uses it.
    let _ = attached.log.ring().abandon();
    if is_free {
        // SAFETY: only holders use the pool, and none is left; `attached` is never dropped.
        unsafe { attached.log.ring().pool().region().unmap() };
    }
}
