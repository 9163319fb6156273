//! Files on which this process may hold record locks, which it loses when it closes any descriptor
//! of the file: the library never opens such a file.
//!
//! Invariant: once the process has asked for a record lock on a file, [`may_have`] says so. Others
//! may share its bit. Nothing is taken back.
//!
//! Entry points: [`note`] before a lock is asked for; [`may_have`].
#![allow(unsafe_code)] // C's functions
#![allow(clippy::missing_safety_doc)] // as in the manual of each

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::off_t;

use crate::covered::Open;
use crate::{next, raw};

const WORDS: usize = 16;
static MAY_HAVE: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

/// The word of a file, and its bit there.
fn bit(device: u64, inode: u64) -> (&'static AtomicU64, u64) {
    let mixed = (inode ^ device.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let at = usize::try_from(mixed >> 60).unwrap_or(0) % WORDS;
    (&MAY_HAVE[at], 1 << (mixed >> 54 & 63))
}

/// The process asks for a record lock on the file of `fd`.
pub(crate) fn note(fd: c_int) {
    // `SQLite` asks for ten a transaction: what is known of the descriptor spares ten calls.
    let known = Open::of(fd).map(|open| (open.known.device, open.known.inode));
    let numbers = || raw::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino));
    match known.or_else(numbers) {
        Some((device, inode)) => {
            let (word, bit) = bit(device, inode);
            word.fetch_or(bit, Ordering::SeqCst);
        }
        None => MAY_HAVE.iter().for_each(|word| word.store(u64::MAX, Ordering::SeqCst)),
    }
}

/// Whether the process may hold a record lock on the file with these numbers.
pub(crate) fn may_have(device: u64, inode: u64) -> bool {
    let (word, bit) = bit(device, inode);
    word.load(Ordering::SeqCst) & bit != 0
}

macro_rules! hooks {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name(fd: c_int, command: c_int, len: off_t) -> c_int {
            note(fd);
            let Some(function) = next::$name.get() else { return raw::failed_int(libc::ENOSYS) };
            // SAFETY: the C library's function of this type, with what the program passed.
            unsafe { function(fd, command, len) }
        }
    )*};
}
hooks!(lockf lockf64);

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_file_that_was_locked_is_known() {
        let file = tempfile::tempfile().unwrap();
        let stat = raw::fstat(file.as_raw_fd()).unwrap();
        note(file.as_raw_fd());
        assert!(may_have(stat.st_dev, stat.st_ino));
        assert!((0..100).any(|inode| !may_have(stat.st_dev, inode)), "not all are");
    }
}
