//! Memory errors: a SIGBUS on a mapping becomes [`PmemError::Poisoned`] instead of the death of the
//! process.
//!
//! The process has one handler, installed with the first region. It finds the region of the
//! faulting address in a fixed table, notes the page as poisoned, and maps a private page of zeroes
//! over it, so that the access completes. Each access to a region then sees that the region's
//! generation is not zero, looks whether it touched a poisoned page, and reports that. A fault at
//! any other address goes to the previous handler.
//!
//! Invariants:
//! 1. The handler only touches atomics of static tables and makes system calls: it is
//!    async-signal-safe.
//! 2. The page is noted before its stand-in appears, so that no thread can use a stand-in of a page
//!    that is not noted.
//! 3. A page stays poisoned until the region is opened again. Beyond the pages that the table
//!    holds, all pages between the first and the last poisoned one count as poisoned: the cut end
//!    of a file is one such range.
//! 4. A slot's address range changes only while its version is odd, and the handler skips such
//!    slots: a thread touches open regions only, whose slots are steady.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Once, OnceLock};

use rustix::mm::{MapFlags, ProtFlags};

/// Most open regions of a process.
pub(super) const MOST_REGIONS: usize = 256;
/// Most poisoned pages of a region that are told apart.
const MOST_PAGES: usize = 64;
const NO_PAGE: u64 = u64::MAX;

static SLOTS: [Slot; MOST_REGIONS] = [const { Slot::new() }; MOST_REGIONS];
static INSTALL: Once = Once::new();
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// The handler's view of one region.
struct Slot {
    taken: AtomicBool,
    /// Odd while the range changes.
    version: AtomicU64,
    start: AtomicUsize,
    end: AtomicUsize,
    /// Size of a stand-in in bytes: a page, or the alignment of a devdax device.
    page_bytes: AtomicUsize,
    /// Number of faults so far. Zero means that the region is whole.
    generation: AtomicU64,
    /// Offsets of the poisoned pages, filled from the front.
    pages: [AtomicU64; MOST_PAGES],
    /// Start of the range of poisoned pages that `pages` has no space for; [`NO_PAGE`] if it is
    /// empty.
    rest_start: AtomicU64,
    /// End of that range.
    rest_end: AtomicU64,
}

impl Slot {
    const fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            version: AtomicU64::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            page_bytes: AtomicUsize::new(0),
            generation: AtomicU64::new(0),
            pages: [const { AtomicU64::new(NO_PAGE) }; MOST_PAGES],
            rest_start: AtomicU64::new(NO_PAGE),
            rest_end: AtomicU64::new(0),
        }
    }

    fn set_range(&self, start: usize, end: usize, page_bytes: usize) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.page_bytes.store(page_bytes, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    fn forget_pages(&self) {
        for page in &self.pages {
            page.store(NO_PAGE, Ordering::Relaxed);
        }
        self.rest_start.store(NO_PAGE, Ordering::Relaxed);
        self.rest_end.store(0, Ordering::Relaxed);
        self.generation.store(0, Ordering::Relaxed);
    }

    /// Returns the page of the region that holds `addr`, or `None` if the region does not hold it.
    fn page_of(&self, addr: usize) -> Option<FailedPage> {
        let version = self.version.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let end = self.end.load(Ordering::Relaxed);
        let page_bytes = self.page_bytes.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let steady = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        if !steady || !(start..end).contains(&addr) {
            return None;
        }
        let offset = (addr - start) / page_bytes * page_bytes;
        Some(FailedPage { addr: start + offset, offset: offset as u64, page_bytes })
    }

    fn note(&self, offset: u64) {
        let noted = self.pages.iter().any(|page| {
            let was = page.compare_exchange(NO_PAGE, offset, Ordering::Relaxed, Ordering::Relaxed);
            was.is_ok() || was == Err(offset)
        });
        if !noted {
            let page_bytes = self.page_bytes.load(Ordering::Relaxed) as u64;
            self.rest_end.fetch_max(offset + page_bytes, Ordering::Relaxed);
            self.rest_start.fetch_min(offset, Ordering::Relaxed);
        }
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    fn touches(&self, offset: u64, len: u64) -> bool {
        let page_bytes = self.page_bytes.load(Ordering::Relaxed) as u64;
        let is_touched = |start: u64, end: u64| start < offset + len && offset < end;
        let hit = |page: u64| page != NO_PAGE && is_touched(page, page + page_bytes);
        let rest_start = self.rest_start.load(Ordering::Relaxed);
        is_touched(rest_start, self.rest_end.load(Ordering::Relaxed))
            || self.pages.iter().any(|page| hit(page.load(Ordering::Relaxed)))
    }
}

struct FailedPage {
    addr: usize,
    offset: u64,
    page_bytes: usize,
}

/// Watches a mapping for memory errors as long as it lives.
pub(super) struct PoisonWatch(&'static Slot);

impl PoisonWatch {
    /// Watches `len` bytes at `start`, both multiples of `page_bytes`. Returns `None` if
    /// [`MOST_REGIONS`] regions are watched already.
    pub(super) fn new(start: usize, len: usize, page_bytes: usize) -> Option<Self> {
        INSTALL.call_once(install);
        let take = |slot: &&Slot| !slot.taken.swap(true, Ordering::Acquire);
        let slot = SLOTS.iter().find(take)?;
        slot.forget_pages();
        slot.set_range(start, start + len, page_bytes);
        Some(Self(slot))
    }

    /// Returns whether no page of the mapping has failed since it was made.
    #[inline]
    pub(super) fn is_whole(&self) -> bool {
        self.0.generation.load(Ordering::Relaxed) == 0
    }

    /// Returns whether the `len` bytes at `offset` touch a failed page.
    #[cold]
    pub(super) fn touches(&self, offset: u64, len: u64) -> bool {
        self.0.touches(offset, len)
    }
}

impl Drop for PoisonWatch {
    fn drop(&mut self) {
        self.0.set_range(0, 0, 0);
        self.0.taken.store(false, Ordering::Release);
    }
}

fn install() {
    let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: only asks for the present action; the pointer is to a structure of that type.
    let asked = unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), previous.as_mut_ptr()) };
    assert_eq!(asked, 0, "sigaction cannot fail for a signal that exists");
    // SAFETY: `sigaction` has filled it; all zero would be valid too.
    PREVIOUS.get_or_init(|| unsafe { previous.assume_init() });

    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
    // SAFETY: all zero is a valid `sigaction`: the default action, an empty mask.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler has the signature that `SA_SIGINFO` asks for and is async-signal-safe.
    let set = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
    assert_eq!(set, 0, "sigaction cannot fail for a signal that exists");
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    let fault = unsafe { &*info };
    let code = fault.si_code;
    // SAFETY: a fault, which has a positive code, has an address here; any other signal some
    // number.
    let addr = unsafe { fault.si_addr() }.addr();
    let ours = code > 0 && SLOTS.iter().any(|slot| stand_in(slot, addr));
    if !ours {
        pass_on(signal, code, info, context);
    }
}

/// Notes the page of `addr` and maps zeroes over it. Returns false if `addr` is not in this slot's
/// region, or the kernel refuses.
fn stand_in(slot: &Slot, addr: usize) -> bool {
    let Some(page) = slot.page_of(addr) else { return false };
    slot.note(page.offset);
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let at = std::ptr::with_exposed_provenance_mut(page.addr);
    // SAFETY: the page belongs to a region's mapping, and no references into it exist. A raw system
    // call.
    unsafe { rustix::mm::mmap_anonymous(at, page.page_bytes, prot, flags) }.is_ok()
}

/// Handles a fault outside all regions as the process would have done without this handler.
fn pass_on(signal: c_int, code: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.get().filter(|action| {
        action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN
    });
    match previous {
        None => die_by_default(signal, code),
        Some(action) if action.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with `SA_SIGINFO` the stored address is a function of this signature.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(action.sa_sigaction) };
            handler(signal, info, context);
        }
        Some(action) => {
            // SAFETY: without `SA_SIGINFO` the stored address is a function of this signature.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(action.sa_sigaction) };
            handler(signal);
        }
    }
}

/// Restores the default action; the faulting access then ends the process. Raises a sent signal
/// again.
fn die_by_default(signal: c_int, code: c_int) {
    // SAFETY: the default action is always allowed.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    if code <= 0 {
        // SAFETY: `raise` is async-signal-safe.
        unsafe { libc::raise(signal) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_finds_its_page_only_while_watched() {
        let watch = PoisonWatch::new(0x10_0000, 0x4000, 0x1000).unwrap();
        let slot = watch.0;
        assert_eq!(
            slot.page_of(0x10_2fff).map(|page| (page.addr, page.offset)),
            Some((0x10_2000, 0x2000))
        );
        assert!(slot.page_of(0x10_4000).is_none());
        assert!(slot.page_of(0xf_ffff).is_none());
        slot.version.fetch_add(1, Ordering::Relaxed);
        assert!(slot.page_of(0x10_2fff).is_none(), "a slot in change is skipped");
        slot.version.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn noted_pages_are_told_apart_until_the_table_is_full() {
        let watch = PoisonWatch::new(0x10_0000_0000, 0x100_0000, 0x1000).unwrap();
        assert!(watch.is_whole());
        for page in 0..MOST_PAGES as u64 {
            watch.0.note(page * 0x2000);
            watch.0.note(page * 0x2000);
        }
        assert!(!watch.is_whole());
        assert!(watch.touches(0x1fff, 2));
        assert!(!watch.touches(0x1000, 0x1000));
        assert!(!watch.touches(0x2000, 0));
        watch.0.note(0xe0_0000);
        assert!(watch.touches(0xe0_0fff, 1) && !watch.touches(0xe0_1000, 0x1000));
        watch.0.note(0xff_f000);
        assert!(watch.touches(0xf0_0000, 1), "all of the rest is poisoned");
        assert!(!watch.touches(0x1000, 0x1000) && !watch.touches(0xd0_0000, 0x1000));
    }

    #[test]
    fn a_slot_used_again_is_whole() {
        for _ in 0..2 * MOST_REGIONS {
            let watch = PoisonWatch::new(0x20_0000_0000, 0x1000, 0x1000).unwrap();
            assert!(watch.is_whole());
            watch.0.note(0);
        }
    }
}
