//! This process: whether it uses the log, and what it knows of itself.
//!
//! Invariants:
//! 1. Until the log is attached, where it cannot be, and once it was given up, every hook does what
//!    the C library does.
//! 2. What is kept here is written when the library is loaded, and read only from then on; but for
//!    the largest file that the process may make, and for two notes that are never taken back: that
//!    files are written in ways that no hook sees, and that the log was given up.
//!
//! Entry points: [`log()`], [`filter`], [`trusts`], [`includes_tmpfs`], [`writes_unseen`],
//! [`in_vfork_child`], [`give_up`]; [`attach`] and [`use_log`] when the library is loaded.
//!
//! The environment: `TIDEGATE_POOL` and `TIDEGATE_CONTROL` are the paths of the log's memory;
//! `TIDEGATE_SOCKET` is the supervisor's; `TIDEGATE_INCLUDE`, `TIDEGATE_EXCLUDE` and
//! `TIDEGATE_TRUST` are globs, one a line; `TIDEGATE_INCLUDE_TMPFS=1` takes tmpfs for a disk;
//! `TIDEGATE_COVER_AFTER` is the number of a descriptor's sync that covers its file, however young
//! that is; if it is not given 2, of a file that is a second old; `TIDEGATE_EVERY_WRITE=1` syncs
//! each write.
#![allow(unsafe_code)] // what is leaked at load time

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
use crate::sys::signals::SignalsBlocked;

/// The sync of a descriptor that covers its file: with the first one it is not known that there
/// will be others, and most files are synced once.
const COVER_AFTER: u32 = 2;
/// How old a file is at least that is covered after few syncs, in nanoseconds.
const COVER_AGE_NS: u64 = 1_000_000_000;

/// What this process knows of itself once it is attached.
pub(crate) struct Attached {
    log: Log,
    /// Where it was found.
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

    /// The user says that the program at this path changes no file that is synced.
    pub(crate) fn trusts(&self, path: &[u8]) -> bool {
        glob::matches_any(self.trust, path)
    }
}

#[cfg(test)]
impl Attached {
    /// Of a process that covers each file by its first sync.
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

/// A file's path, and which file is there.
struct Place {
    path: CString,
    file: Option<(u64, u64)>,
}

impl Place {
    fn new(path: &OsStr) -> Self {
        let path = CString::new(path.as_bytes()).unwrap_or_default();
        Self { file: file_at(&path), path }
    }

    /// The same file is there.
    fn is_unchanged(&self) -> bool {
        self.file.is_some() && self.file == file_at(&self.path)
    }
}

/// Device and inode of the file at a path.
fn file_at(path: &CStr) -> Option<(u64, u64)> {
    rustix::fs::stat(path).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

static ATTACHED: AtomicPtr<Attached> = AtomicPtr::new(ptr::null_mut());
/// What the kernel counts a file's bytes with.
const FILE_BYTES_MAX: u64 = i64::MAX.cast_unsigned();
/// The largest file that this process may make.
static FILE_LIMIT_BYTES: AtomicU64 = AtomicU64::new(FILE_BYTES_MAX);

static WRITES_UNSEEN: AtomicBool = AtomicBool::new(false);

/// What a thread may not do as the others of its process do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Apart {
    No,
    /// It runs as a child of `vfork`: its memory is the parent's, its descriptors are its own.
    VforkChild,
    /// It has left the table of descriptors that the threads of its process share.
    OwnDescriptors,
}

thread_local! {
    static APART: Cell<Apart> = const { Cell::new(Apart::No) };
}

/// The log, if this process uses one.
#[inline]
pub(crate) fn log() -> Option<&'static Log> {
    attached().map(|attached| &attached.log)
}

/// A program that this process starts will find the log where this process has found it.
pub(crate) fn can_find_log() -> bool {
    attached().is_some_and(|attached| attached.found_at.iter().all(Place::is_unchanged))
}

/// Which paths are for the log.
pub(crate) fn filter() -> Filter {
    attached().map_or_else(Filter::default, |attached| attached.filter)
}

/// Some programs are trusted.
pub(crate) fn trusts_any() -> bool {
    attached().is_some_and(|attached| !attached.trust.is_empty())
}

/// The program at this path changes no file that is synced, the user says: where it cannot be
/// watched, files stay in the log while it runs.
pub(crate) fn trusts(path: &[u8]) -> bool {
    attached().is_some_and(|attached| attached.trusts(path))
}

/// Files in tmpfs are taken for files on a disk: for tests.
pub(crate) fn includes_tmpfs() -> bool {
    attached().is_some_and(|attached| attached.includes_tmpfs)
}

/// The largest file that this process may make: the kernel refuses a larger one, or kills for it.
#[inline]
pub(crate) fn file_bytes_max() -> u64 {
    FILE_LIMIT_BYTES.load(Ordering::Relaxed)
}

/// Asks the kernel what [`file_bytes_max`] is.
pub(crate) fn find_file_limit() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    let bytes = limit.unwrap_or(u64::MAX).min(FILE_BYTES_MAX);
    FILE_LIMIT_BYTES.store(bytes, Ordering::Relaxed);
}

/// The sync of a descriptor that covers its file.
pub(crate) fn cover_after() -> u32 {
    attached().map_or(u32::MAX, |attached| attached.cover_after)
}

/// How old a file is at least that is covered after few syncs, in nanoseconds.
pub(crate) fn cover_age_ns() -> u64 {
    attached().map_or(0, |attached| attached.cover_age_ns)
}

/// Each write is to be synced when it returns: also by a process that does not use the log.
#[inline]
pub(crate) fn every_write() -> bool {
    EVERY_WRITE.load(Ordering::Relaxed) && !is_filtered()
}

static EVERY_WRITE: AtomicBool = AtomicBool::new(false);

/// Where the supervisor listens: known also to a process that does not use the log.
pub(crate) fn socket() -> Option<&'static Path> {
    SOCKET.get().copied().flatten()
}

static SOCKET: OnceLock<Option<&'static Path>> = OnceLock::new();

/// This process, as the kernel numbers it.
#[inline]
pub(crate) fn number() -> u32 {
    log::current_process()
}

/// Any file of this process may be written to in ways that no hook sees.
pub(crate) fn writes_unseen() -> bool {
    WRITES_UNSEEN.load(Ordering::Relaxed)
}

/// Notes that from now on [`writes_unseen`].
pub(crate) fn set_writes_unseen() {
    WRITES_UNSEEN.store(true, Ordering::SeqCst);
}

/// The log and what the user wants, if this process uses the log.
#[inline]
pub(crate) fn attached() -> Option<&'static Attached> {
    let at = ATTACHED.load(Ordering::Acquire);
    // SAFETY: null, or what `use_log` has leaked.
    unsafe { at.as_ref() }
}

/// Whether the caller is a child of `vfork` that has not called `exec` yet.
#[inline]
pub(crate) fn in_vfork_child() -> bool {
    APART.get() == Apart::VforkChild
}

/// Whether the calling thread is one of these.
#[inline]
pub(crate) fn is_apart() -> bool {
    APART.get() != Apart::No
}

/// Notes that the calling thread has descriptors of its own from now on.
pub(crate) fn set_own_descriptors() {
    APART.set(Apart::OwnDescriptors);
}

/// To be called around `vfork`: what the child does is done by the parent's thread, as far as
/// memory goes.
pub(crate) fn set_vfork_child(is: bool) {
    APART.set(if is { Apart::VforkChild } else { Apart::No });
    log::after_fork();
}

/// Finds what the environment names. None: this process cannot use the log.
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

/// From now on this process uses the log.
pub(crate) fn use_log(attached: Attached) {
    ATTACHED.store(Box::into_raw(Box::new(attached)), Ordering::Release);
}

/// This process cannot use the log, and writes what others have in it: as one that has given it up,
/// for this cause.
pub(crate) fn refuse_log(cause: Cause) {
    let _ = CAUSE.set(cause);
    GIVEN_UP.store(true, Ordering::SeqCst);
}

/// A variable of the environment, kept for the life of the process: the program may change its
/// environment.
fn variable(name: &str) -> Option<&'static OsStr> {
    let value = std::env::var_os(name)?.into_vec();
    Some(OsStr::from_bytes(Vec::leak(value)))
}

/// Threads of this process that are in the middle of something that giving up the log waits for.
static HOLDERS: AtomicU32 = AtomicU32::new(0);
/// How long [`give_up`] waits for each of those.
const HOLDER_TIMEOUT: Duration = Duration::from_secs(1);

thread_local! {
    /// The [`Holder`]s of the thread that live.
    static HOLDERS_HERE: Cell<u32> = const { Cell::new(0) };
}

/// While this lives, the log's memory stays mapped, and no rights are given up.
///
/// A signal handler that jumps out meanwhile leaves a holder: giving up waits all of its timeout.
pub(crate) struct Holder(());

impl Holder {
    /// None: the log was given up.
    #[inline]
    pub(crate) fn new() -> Option<Self> {
        HOLDERS.fetch_add(1, Ordering::SeqCst);
        HOLDERS_HERE.set(HOLDERS_HERE.get().wrapping_add(1));
        let holder = Self(());
        (!has_given_up()).then_some(holder)
    }

    /// The calling thread has one.
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
        // Only then a thread waits for it; later a filter may kill for the call.
        if GIVING_UP.load(Ordering::SeqCst) == UNDER_WAY {
            raw::wake(&HOLDERS);
        }
        #[cfg(test)]
        RELEASED.get()();
    }
}

/// A [`Holder`] whose thread runs no signal handler: to be taken before a lock in the log, and,
/// behind a call that may take long, before several system calls that the program does not make
/// itself.
pub(crate) struct Holding {
    // Given back first: signals come once the thread is no holder any more.
    _holder: Holder,
    _signals: SignalsBlocked,
}

impl Holding {
    /// None: the log was given up.
    #[inline]
    pub(crate) fn new() -> Option<Self> {
        // Signals only once the log cannot be given up: a filter may kill for the system call.
        let holder = Holder::new()?;
        Some(Self { _holder: holder, _signals: SignalsBlocked::new() })
    }
}

/// The log was given up.
pub(crate) fn has_given_up() -> bool {
    GIVEN_UP.load(Ordering::SeqCst)
}

#[cfg(test)]
thread_local! {
    /// Called by the thread when one of its holders has gone.
    pub(crate) static RELEASED: Cell<fn()> = const { Cell::new(|| ()) };
}

/// As if another thread had given the log up, or had not.
#[cfg(test)]
pub(crate) fn pretend_given_up(is_given_up: bool) {
    GIVEN_UP.store(is_given_up, Ordering::SeqCst);
}

/// Returns why the log was given up.
pub(crate) fn cause() -> Cause {
    CAUSE.get().copied().unwrap_or(Cause::Rights)
}

static GIVEN_UP: AtomicBool = AtomicBool::new(false);
/// Why the log was given up, for the supervisor.
static CAUSE: OnceLock<Cause> = OnceLock::new();

/// Notes that this is a forked child: it has another number, and none of the other threads. Whether
/// its thread had descriptors of its own.
pub(crate) fn become_child() -> bool {
    log::after_fork();
    HOLDERS.store(0, Ordering::SeqCst);
    HOLDERS_HERE.set(0);
    // The thread that was about it is the parent's.
    GIVING_UP.store(if has_given_up() { ENDED } else { NOT_BEGUN }, Ordering::SeqCst);
    APART.replace(Apart::No) == Apart::OwnDescriptors
}

/// Whether the program asked for a filter of its system calls: the library makes none of its own
/// from then on, for it may kill.
static IS_FILTERED: AtomicBool = AtomicBool::new(false);

/// Notes that the program asks for a filter of its system calls.
pub(crate) fn set_filtered() {
    IS_FILTERED.store(true, Ordering::SeqCst);
}

/// The program has asked for a filter of its system calls.
pub(crate) fn is_filtered() -> bool {
    IS_FILTERED.load(Ordering::SeqCst)
}

/// How far this process is with giving the log up.
static GIVING_UP: AtomicU32 = AtomicU32::new(NOT_BEGUN);
const NOT_BEGUN: u32 = 0;
const UNDER_WAY: u32 = 1;
const ENDED: u32 = 2;
/// How long a thread waits at a time for the one that gives the log up.
const ENDED_TIMEOUT: Duration = Duration::from_secs(1);

/// Gives the log up, for good: nothing of it is mapped any more, and every hook does what the C
/// library does. `suspend` has the supervisor suspend logging: no operation of this process begins
/// any more.
///
/// One thread does it. Another one that comes meanwhile waits, for a filter of system calls may be
/// what it comes for.
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

/// Gives the log up, unless another thread has begun to. Signals are blocked meanwhile: a handler
/// could not wait for its own thread. The thread that comes second takes them again while it is a
/// holder, for which the first one waits.
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

/// A [`Holder`] is waited for: its lock is in a list of the C library that leads through the log's
/// memory, or the kernel is to answer it still. Others find zeroes there: that no file has an
/// entry.
fn leave_log(cause: Cause) {
    let _ = CAUSE.set(cause);
    GIVEN_UP.store(true, Ordering::SeqCst);
    let at = ATTACHED.swap(ptr::null_mut(), Ordering::SeqCst);
    // SAFETY: null, or what `use_log` has leaked.
    let Some(attached) = (unsafe { at.as_ref() }) else { return };
    let is_free = loop {
        let holders = HOLDERS.load(Ordering::SeqCst);
        if holders == 0 || !raw::wait(&HOLDERS, holders, HOLDER_TIMEOUT) {
            break holders == 0;
        }
    };
    // Where the kernel does not do it, the memory stays mapped, but no hook uses it.
    let _ = attached.log.ring().abandon();
    if is_free {
        // SAFETY: only holders use the pool, and there are none any more; it is never dropped.
        unsafe { attached.log.ring().pool().region().unmap() };
    }
}
