//! This process: whether it logs, and what it does when it is loaded, forks and ends.
//!
//! Invariants:
//! 1. Until the log is attached, and where it cannot be, every hook does what the C library does.
//! 2. Nothing lasting is made in the program: no thread, no signal handler, no descriptor.
//! 3. What is kept here is written when the library is loaded, and read only from then on; but for the largest file that the
//!    process may make, and for the note that files are written in ways that nobody sees, which is never taken back.
//!
//! Entry points: [`log()`], [`filter`], [`includes_tmpfs`], [`writes_unseen`], [`in_vfork_child`], [`is_strict`].
//!
//! The environment: `TIDEGATE_POOL` and `TIDEGATE_CONTROL` are the paths of the log's memory; `TIDEGATE_SOCKET` is the supervisor's;
//! `TIDEGATE_INCLUDE` and `TIDEGATE_EXCLUDE` are globs, one a line; `TIDEGATE_INCLUDE_TMPFS=1` takes tmpfs for a disk;
//! `TIDEGATE_ABSORB_AFTER` is the number of writes after which a file is absorbed, 0 for never;
//! `TIDEGATE_SYNC_FDS` tells of inherited descriptors that were opened with `O_SYNC`, as `3,7d`: `d` for `O_DSYNC`; `all`, where
//! they may be any.
#![allow(unsafe_code)] // the load-time constructor, and fork handlers

use std::cell::Cell;
use std::ffi::{OsStr, c_int};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use tidegate::log::{self, Log};

use crate::descriptors::{self, DATA_SYNC, SYNC};
use crate::glob::Filter;
use crate::logged::Open;
use crate::{absorb, exec, files, names, next, stdio, supervisor, unseen};

/// What this process knows of itself once it is attached.
struct Attached {
    log: Log,
    writes_before: u32,
    filter: Filter,
    includes_tmpfs: bool,
    socket: Option<&'static Path>,
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
    /// The kernel kills it for any call but `read`, `write`, `exit` and `sigreturn`.
    Strict,
}

thread_local! {
    static APART: Cell<Apart> = const { Cell::new(Apart::No) };
}

/// The log, if this process uses one.
#[inline]
pub(crate) fn log() -> Option<&'static Log> {
    attached().map(|attached| &attached.log)
}

/// Which paths are for the log.
pub(crate) fn filter() -> Filter {
    attached().map_or_else(Filter::default, |attached| attached.filter)
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

/// Logged writes through a descriptor before its file is worth a lease; 0: none ever is.
#[inline]
pub(crate) fn writes_before() -> u32 {
    attached().map_or(0, |attached| attached.writes_before)
}

/// Where the supervisor listens.
pub(crate) fn socket() -> Option<&'static Path> {
    attached()?.socket
}

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

#[inline]
fn attached() -> Option<&'static Attached> {
    let at = ATTACHED.load(Ordering::Acquire);
    // SAFETY: null, or what `attach` has leaked.
    unsafe { at.as_ref() }
}

/// Whether the caller is a child of `vfork` that has not called `exec` yet.
#[inline]
pub(crate) fn in_vfork_child() -> bool {
    APART.get() == Apart::VforkChild
}

/// Whether the calling thread may do nothing but read and write.
pub(crate) fn is_strict() -> bool {
    APART.get() == Apart::Strict
}

/// Whether the calling thread is one of these.
#[inline]
pub(crate) fn is_apart() -> bool {
    APART.get() != Apart::No
}

/// Notes that the calling thread [`is_strict`] from now on, or is not after all.
pub(crate) fn set_strict(is: bool) {
    APART.set(if is { Apart::Strict } else { Apart::No });
}

/// Notes that the calling thread has descriptors of its own from now on.
pub(crate) fn set_own_descriptors() {
    APART.set(Apart::OwnDescriptors);
}

/// To be called around `vfork`: what the child does is done by the parent's thread, as far as memory goes.
pub(crate) fn set_vfork_child(is: bool) {
    APART.set(if is { Apart::VforkChild } else { Apart::No });
    log::after_fork();
}

#[used]
#[cfg_attr(not(test), unsafe(link_section = ".init_array"))]
static LOADED: extern "C" fn() = loaded;

extern "C" fn loaded() {
    if std::env::var_os("TIDEGATE_POOL").is_none() {
        return;
    }
    next::resolve();
    let Some(attached) = attach() else { return };
    if descriptors::make().is_err() {
        return;
    }
    exec::remember();
    find_file_limit();
    names::find_handlers();
    ATTACHED.store(Box::into_raw(Box::new(attached)), Ordering::Release);
    // SAFETY: a function that lives as long as the process.
    unsafe { libc::pthread_atfork(Some(forking), Some(forking_done), Some(forked)) };
    supervisor::announce();
    inherit(std::env::var_os("TIDEGATE_SYNC_FDS").as_deref());
    stdio::note_standard();
}

fn attach() -> Option<Attached> {
    let pool = std::env::var_os("TIDEGATE_POOL")?;
    let control = std::env::var_os("TIDEGATE_CONTROL")?;
    let log = Log::attach(Path::new(&pool), Path::new(&control)).ok()?;
    let lines = |name| kept(name).map_or(&b""[..], OsStrExt::as_bytes);
    Some(Attached {
        log,
        writes_before: std::env::var("TIDEGATE_ABSORB_AFTER")
            .ok()
            .and_then(|number| number.parse().ok())
            .unwrap_or(0),
        filter: Filter { include: lines("TIDEGATE_INCLUDE"), exclude: lines("TIDEGATE_EXCLUDE") },
        includes_tmpfs: std::env::var_os("TIDEGATE_INCLUDE_TMPFS").is_some_and(|it| it == "1"),
        socket: kept("TIDEGATE_SOCKET").map(Path::new),
    })
}

/// A variable of the environment, kept for the life of the process: the program may change its environment.
fn kept(name: &str) -> Option<&'static OsStr> {
    let value = std::env::var_os(name)?.into_vec();
    Some(OsStr::from_bytes(Vec::leak(value)))
}

/// Notes the inherited descriptors that were opened with `O_SYNC` or `O_DSYNC`.
fn inherit(list: Option<&OsStr>) {
    let list = list.map_or(&b""[..], OsStrExt::as_bytes);
    if list == exec::SYNC_ALL {
        exec::each_open(|fd| {
            if let Some(open) = Open::writable(fd) {
                descriptors::set(fd, open.known.with(SYNC));
            }
        });
    }
    for (fd, flags) in inherited(list) {
        let known = files::of(fd);
        if known.file().is_some() {
            descriptors::set(fd, known.with(flags));
        }
    }
}

fn inherited(list: &[u8]) -> impl Iterator<Item = (c_int, u32)> {
    list.split(|byte| *byte == b',').filter_map(|item| {
        let (digits, flag) = match item {
            [digits @ .., b'd'] => (digits, DATA_SYNC),
            digits => (digits, SYNC),
        };
        Some((std::str::from_utf8(digits).ok()?.parse().ok()?, flag))
    })
}

/// Before a fork: what only this process knew of its files, the kernel gets to know.
pub(crate) extern "C" fn forking() {
    absorb::sharing();
}

/// In the parent after a fork.
pub(crate) extern "C" fn forking_done() {
    absorb::shared();
}

/// In the child: it has another number, and is another process to the supervisor.
pub(crate) extern "C" fn forked() {
    log::after_fork();
    if let Some(log) = log() {
        log.forget_pages();
    }
    if APART.replace(Apart::No) == Apart::OwnDescriptors {
        // What is noted is about those of the parent's other threads.
        descriptors::each(0, u32::MAX, |fd, _| {
            descriptors::clear(fd);
        });
    }
    absorb::inherited();
    // Both processes can write now, and each will give its own marks back.
    unseen::take_again();
    supervisor::announce();
}

#[used]
#[cfg_attr(not(test), unsafe(link_section = ".fini_array"))]
static UNLOADED: extern "C" fn() = unloaded;

/// The process ends. What the C library still has to write for standard output goes first.
extern "C" fn unloaded() {
    stdio::flush_standard();
    absorb::settle_all();
    unseen::release();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_descriptors_skips_what_is_no_number() {
        let found: Vec<_> = inherited(b"3,7d,,x,-1d,12").collect();
        assert_eq!(found, [(3, SYNC), (7, DATA_SYNC), (-1, DATA_SYNC), (12, SYNC)]);
        assert_eq!(inherited(b"").count(), 0);
    }
}
