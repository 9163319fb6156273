//! This process: whether it is recorded, its number, and the number of the calling thread.
//!
//! Invariants:
//! 1. Hooks report nothing before the rings are mapped, if they cannot be mapped, or after
//!    [`give_up`].
//! 2. The process's number is in a page that the kernel clears in a forked child, however the child
//!    was created. A child of `vfork` finds its parent's number there, as it shares the memory.
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
/// The process's number; 0 in a child that was just forked.
static PROCESS: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
static GIVEN_UP: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Numbers of the process and of the thread.
    static THREAD: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
}

/// A handle to the recorder.
#[derive(Clone, Copy)]
pub(crate) struct Recorder {
    rings: &'static Rings,
    /// The process whose memory this is.
    pub(crate) process: u32,
}

impl Recorder {
    /// Appends an event and its paths.
    pub(crate) fn tell(self, event: Event, text: &[&[u8]]) {
        self.rings.append(Event { thread: self.thread(), ..event }, text);
    }

    /// Appends an event of this process and its paths.
    pub(crate) fn tell_of_process(self, event: Event, text: &[&[u8]]) {
        self.tell(Event { process: self.process, ..event }, text);
    }

    /// Returns a new file number.
    pub(crate) fn file_number(self) -> u32 {
        self.rings.file_number()
    }

    /// Returns whether the process owns its memory. A child of `vfork` does not: the table holds
    /// the parent's descriptors.
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

/// Runs `act` if this process is recorded; preserves `errno`.
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
    // SAFETY: null, or the page that `begin` mapped, which is never unmapped.
    let cell = unsafe { at.as_ref() }?;
    let mut process = cell.load(Ordering::Relaxed);
    if process == 0 {
        process = number(rustix::process::getpid());
        cell.store(process, Ordering::Relaxed);
    }
    Some(Recorder { rings, process })
}

/// Maps the rings that the environment variable names, if set. Runs when the library is loaded.
pub(crate) fn begin() {
    let Some(path) = std::env::var_os(RINGS_VARIABLE) else { return };
    let Some(page) = wiped_page() else { return };
    if let Some(rings) = Rings::open(Path::new(&path)) {
        let _ = RINGS.set(rings);
        PROCESS.store(page, Ordering::Release);
    }
}

/// Stops all reports of this process.
pub(crate) fn give_up() {
    GIVEN_UP.store(true, Ordering::Relaxed);
}

/// Maps a page of zeroes that the kernel clears in a forked child.
fn wiped_page() -> Option<*mut AtomicU32> {
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address that the kernel chooses.
    let page = unsafe { libc::mmap(ptr::null_mut(), PAGE_BYTES, access, kind, -1, 0) };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: `page` is the mapping that `mmap` just returned.
    let advised = unsafe { libc::madvise(page, PAGE_BYTES, libc::MADV_WIPEONFORK) };
    (advised == 0).then_some(page.cast())
}

/// Returns the calling thread's `errno`.
pub(crate) fn errno() -> c_int {
    // SAFETY: takes no argument, returns the address of the thread's `errno`.
    let at = unsafe { libc::__errno_location() };
    // SAFETY: the address is valid for as long as the thread lives.
    unsafe { *at }
}

/// Sets the calling thread's `errno`.
pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: takes no argument, returns the address of the thread's `errno`.
    let at = unsafe { libc::__errno_location() };
    // SAFETY: the address is valid for as long as the thread lives.
    unsafe { *at = errno };
}
