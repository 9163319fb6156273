//! Record locks that this process may hold. It loses its locks on a file when it closes any
//! descriptor of the file, so the library never opens such a file.
//!
//! Invariants:
//! 1. Once the process has asked for a record lock on a file, [`may_have`] returns true for the
//!    file, for good. Other files may share its bit. A program that is started by `exec` keeps the
//!    locks, and reads them from the kernel ([`note_inherited`]).
//! 2. No lock is asked for while the library has the file open. The library counts its descriptor,
//!    then loads the bit; a thread that asks for a lock sets the bit, then loads the count. These
//!    two stores and two loads are in one total order (`SeqCst`): one side sees the other.
//!
//! Entry points: [`note`] before a lock is asked for, [`note_inherited`] at load; [`may_have`];
//! [`open`].
#![allow(unsafe_code)] // C's functions
#![allow(clippy::missing_safety_doc)] // as in the manual of each

use std::ffi::c_int;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use libc::off_t;

use crate::state::descriptors::{self, Kind};
use crate::state::inherited;
use crate::state::process::Holding;
use crate::sys::path::Opened;
use crate::sys::raw::Errno;
use crate::sys::{next, query, raw};

const WORDS: usize = 16;
static MAY_HAVE: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

/// Returns the word that has a file's bit, and the bit.
fn bit(device: u64, inode: u64) -> (&'static AtomicU64, u64) {
    let mixed = (inode ^ device.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let at = usize::try_from(mixed >> 60).unwrap_or(0) % WORDS;
    (&MAY_HAVE[at], 1 << (mixed >> 54 & 63))
}

/// Notes that the process asks for a record lock on the file of `fd`, and waits while the library
/// has files open. To be called before the request.
pub(crate) fn note(fd: c_int) {
    // `SQLite` asks for ten locks a transaction: the noted facts save ten system calls.
    let known = descriptors::get(fd);
    let known = (known.kind == Kind::File).then_some((known.device, known.inode));
    let numbers = || query::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino));
    let is_new = if let Some((device, inode)) = known.or_else(numbers) {
        let (word, bit) = bit(device, inode);
        word.fetch_or(bit, Ordering::SeqCst) & bit == 0
    } else {
        for word in &MAY_HAVE {
            word.store(u64::MAX, Ordering::SeqCst);
        }
        true
    };
    if is_new {
        wait_for_opened();
    }
}

/// Notes the record locks that the process has kept over `exec`. To be called before the library
/// opens any file of the program. Returns whether the process may have kept a lease, too.
pub(crate) fn note_inherited() -> bool {
    let mut has_lease = false;
    inherited::each(|fd, held| {
        if held.record_lock {
            note(fd);
        }
        has_lease |= held.lease;
    });
    has_lease
}

/// Returns whether the process may hold a record lock on the file with these numbers.
pub(crate) fn may_have(device: u64, inode: u64) -> bool {
    let (word, bit) = bit(device, inode);
    word.load(Ordering::SeqCst) & bit != 0
}

/// Number of descriptors that the library has open at this moment.
static OPENED: AtomicU32 = AtomicU32::new(0);
/// Number of threads that wait until these are closed.
static WAITING: AtomicU32 = AtomicU32::new(0);
/// Timeout of each wait: a child of `vfork` that was killed does not count its descriptors down.
const OPENED_TIMEOUT: Duration = Duration::from_millis(100);

/// Waits until the library has closed its descriptors.
fn wait_for_opened() {
    WAITING.fetch_add(1, Ordering::SeqCst);
    loop {
        let opened = OPENED.load(Ordering::SeqCst);
        if opened == 0 || !raw::wait(&OPENED, opened, OPENED_TIMEOUT) {
            break;
        }
    }
    WAITING.fetch_sub(1, Ordering::SeqCst);
}

/// A descriptor that [`OPENED`] counts.
struct Counted;

impl Counted {
    fn new() -> Self {
        OPENED.fetch_add(1, Ordering::SeqCst);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        OPENED.fetch_sub(1, Ordering::SeqCst);
        if WAITING.load(Ordering::SeqCst) > 0 {
            raw::wake(&OPENED);
        }
    }
}

/// A descriptor of the library. While it lives, no record lock on its file is held or asked for.
pub(crate) struct Unlocked {
    // Dropped first. `_holding` is last: the handlers of pending signals may ask for a lock.
    opened: Opened,
    _counted: Counted,
    _holding: Holding,
}

impl Deref for Unlocked {
    type Target = Opened;

    fn deref(&self) -> &Opened {
        &self.opened
    }
}

/// Opens the file with these numbers by `open`. Returns `None` if it cannot be opened, or if the
/// process may hold a record lock on it.
pub(crate) fn open(
    device: u64,
    inode: u64,
    open: impl FnOnce() -> Result<Opened, Errno>,
) -> Option<Unlocked> {
    let (holding, counted) = (Holding::new()?, Counted::new());
    let opened = (!may_have(device, inode)).then(open)?.ok()?;
    Some(Unlocked { opened, _counted: counted, _holding: holding })
}

/// Resets the counts in a forked child, which has none of the parent's other threads.
pub(crate) fn become_child() {
    OPENED.store(0, Ordering::SeqCst);
    WAITING.store(0, Ordering::SeqCst);
}

macro_rules! hooks {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name(fd: c_int, command: c_int, len: off_t) -> c_int {
            note(fd);
            let Some(function) = next::$name.get() else { return raw::failed_int(libc::ENOSYS) };
            // SAFETY: the C library's function of this name, with the program's own arguments.
            unsafe { function(fd, command, len) }
        }
    )*};
}
hooks!(lockf lockf64);

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_file_that_was_locked_is_known() {
        let file = tempfile::tempfile().unwrap();
        let stat = query::fstat(file.as_raw_fd()).unwrap();
        note(file.as_raw_fd());
        assert!(may_have(stat.st_dev, stat.st_ino));
        assert!((0..100).any(|inode| !may_have(stat.st_dev, inode)), "not all are");
        let opens = || Opened::open(libc::AT_FDCWD, c"/", libc::O_RDONLY);
        assert!(open(stat.st_dev, stat.st_ino, opens).is_none());
    }

    /// Each thread looks for the other one after it has announced its own action.
    #[test]
    fn no_lock_is_asked_for_while_the_file_is_open() {
        static IS_OPEN: AtomicBool = AtomicBool::new(false);
        const ROUNDS: u64 = 200;
        let opens = || Opened::open(libc::AT_FDCWD, c"/", libc::O_RDONLY);
        let mut found_open = 0;
        for _ in 0..ROUNDS {
            // A file that was never locked.
            let file = tempfile::tempfile().unwrap();
            let stat = query::fstat(file.as_raw_fd()).unwrap();
            let (word, bit) = bit(stat.st_dev, stat.st_ino);
            word.fetch_and(!bit, Ordering::SeqCst);
            let start = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    start.wait();
                    if let Some(opened) = open(stat.st_dev, stat.st_ino, opens) {
                        IS_OPEN.store(true, Ordering::SeqCst);
                        std::thread::yield_now();
                        IS_OPEN.store(false, Ordering::SeqCst);
                        drop(opened);
                        found_open += 1;
                    }
                });
                start.wait();
                note(file.as_raw_fd());
                for _ in 0..10 {
                    assert!(!IS_OPEN.load(Ordering::SeqCst), "a lock was asked for meanwhile");
                }
            });
        }
        assert!(found_open > 0, "this shows nothing unless the file is opened now and then");
    }
}
