//! This process: whether it is recorded, which one it is, and which thread calls.
//!
//! Invariants:
//! 1. Until the rings are mapped, where they cannot be, and once the process was given up, no hook
//!    tells anything.
//! 2. The number of the process lies in a page that the kernel clears in a forked child, however
//!    that was forked. A child of `vfork` finds its parent's there, whose memory it is.
#![allow(unsafe_code)] // a page that is wiped on fork, and `errno`

use std::cell::Cell;
use std::ffi::c_int;
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use tidegate_record::event::Event;
use tidegate_record::rings::Rings;

/// The variable with the path of the rings.
const RINGS_VARIABLE: &str = "TIDEGATE_RECORD";
const PAGE_BYTES: usize = 4096;

static RINGS: OnceLock<Rings> = OnceLock::new();
/// The number of the process; 0 in a child that was just forked.
static PROCESS: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
static GIVEN_UP: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Number of the process and of the thread.
    static THREAD: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
}

/// The way to the recorder.
#[derive(Clone, Copy)]
pub(crate) struct Recorder {
    rings: &'static Rings,
    /// The process whose memory this is.
    pub(crate) process: u32,
}

impl Recorder {
    /// Appends an event, with paths.
    pub(crate) fn tell(self, event: Event, text: &[&[u8]]) {
        self.rings.append(Event { thread: self.thread(), ..event }, text);
    }

    /// Appends an event of this process, with paths.
    pub(crate) fn tell_of_process(self, event: Event, text: &[&[u8]]) {
        self.tell(Event { process: self.process, ..event }, text);
    }

    /// A number for a file.
    pub(crate) fn file_number(self) -> u32 {
        self.rings.file_number()
    }

    /// False in a child of `vfork`: its descriptors are not those that are noted.
    pub(crate) fn has_own_memory(self) -> bool {
        number(rustix::process::getpid()) == self.process
    }

    fn thread(self) -> u32 {
        let (process, thread) = THREAD.get();
        if process == self.process {
            return thread;
        }
        let thread = number(rustix::thread::gettid());
        THREAD.set((self.process, thread));
        thread
    }
}

fn number(pid: rustix::process::Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

/// Runs `act` if this process is recorded; `errno` stays what it is.
#[inline]
pub(crate) fn recording(act: impl FnOnce(Recorder)) {
    let Some(recorder) = recorder() else { return };
    let errno = errno();
    act(recorder);
    set_errno(errno);
}

#[inline]
fn recorder() -> Option<Recorder> {
    let rings = RINGS.get().filter(|rings| rings.is_open())?;
    if GIVEN_UP.load(Ordering::Relaxed) {
        return None;
    }
    let at = PROCESS.load(Ordering::Acquire);
    // SAFETY: null, or the page that `begin` has mapped, which stays.
    let cell = unsafe { at.as_ref() }?;
    let mut process = cell.load(Ordering::Relaxed);
    if process == 0 {
        process = number(rustix::process::getpid());
        cell.store(process, Ordering::Relaxed);
    }
    Some(Recorder { rings, process })
}

/// Maps the rings that the environment names, if it does: when the library is loaded.
pub(crate) fn begin() {
    let Some(path) = std::env::var_os(RINGS_VARIABLE) else { return };
    let Some(page) = wiped_page() else { return };
    if let Some(rings) = Rings::open(Path::new(&path)) {
        let _ = RINGS.set(rings);
        PROCESS.store(page, Ordering::Release);
    }
}

/// Tells nothing any more.
pub(crate) fn give_up() {
    GIVEN_UP.store(true, Ordering::Relaxed);
}

/// A page of zeroes that the kernel clears in a forked child.
fn wiped_page() -> Option<*mut AtomicU32> {
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let page = unsafe { libc::mmap(ptr::null_mut(), PAGE_BYTES, access, kind, -1, 0) };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the page that was just mapped.
    let advised = unsafe { libc::madvise(page, PAGE_BYTES, libc::MADV_WIPEONFORK) };
    (advised == 0).then_some(page.cast())
}

/// The calling thread's `errno`.
pub(crate) fn errno() -> c_int {
    // SAFETY: takes nothing, gives the thread's own.
    let at = unsafe { libc::__errno_location() };
    // SAFETY: the thread's own, which lives as long as the thread.
    unsafe { *at }
}

/// Sets the calling thread's `errno`.
pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: takes nothing, gives the thread's own.
    let at = unsafe { libc::__errno_location() };
    // SAFETY: the thread's own, which lives as long as the thread.
    unsafe { *at = errno };
}
