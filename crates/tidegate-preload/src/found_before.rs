//! Paths at which this process has found a file when it asked for one to be made where it is missing.
//!
//! Programs open the same few files so again and again, `SQLite` its journal with each transaction; and the kernel takes longer to
//! refuse to make a file that is there than to open it.
//!
//! Invariant: a hint, which may be wrong at any time: the file may be gone, or be another one.
//!
//! Entry points: [`at`], [`Place::is_noted`], [`Place::note`], [`Place::forget`]; [`in_disguise`].
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::known_folder::digest;
use crate::{next, raw};

/// The program has told the kernel to take a thread for another user than its effective one, as servers of files do.
static DISGUISED: AtomicBool = AtomicBool::new(false);

/// The effective user of a thread may not be the one that the kernel takes it for.
pub(crate) fn in_disguise() -> bool {
    DISGUISED.load(Ordering::Relaxed)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn setfsuid(user: libc::uid_t) -> c_int {
    DISGUISED.store(true, Ordering::Relaxed);
    match next::setfsuid.get() {
        // SAFETY: the same function; no pointers.
        Some(setfsuid) => unsafe { setfsuid(user) },
        None => raw::failed_int(libc::ENOSYS),
    }
}

const PLACES: usize = 64;
/// Digests of paths, 0: none.
static NOTED: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];

/// A path in a directory.
#[derive(Clone, Copy)]
pub(crate) struct Place(u64);

/// The place of `path` in `directory`.
pub(crate) fn at(directory: c_int, path: &CStr) -> Place {
    let directory = u64::from(directory.cast_unsigned()).rotate_left(32);
    Place((digest(path.to_bytes()) ^ directory).max(1))
}

impl Place {
    fn word(self) -> &'static AtomicU64 {
        let number = usize::try_from(self.0 % PLACES as u64).unwrap_or(0);
        &NOTED[number]
    }

    /// A file was found there last time.
    pub(crate) fn is_noted(self) -> bool {
        self.word().load(Ordering::Relaxed) == self.0
    }

    pub(crate) fn note(self) {
        self.word().store(self.0, Ordering::Relaxed);
    }

    pub(crate) fn forget(self) {
        let _ = self.word().compare_exchange(self.0, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_noted_until_it_is_forgotten() {
        let (one, other) = (at(900, c"one"), at(901, c"one"));
        assert!(!one.is_noted());
        one.note();
        assert!(one.is_noted() && !other.is_noted() && !at(900, c"two").is_noted());
        other.forget();
        assert!(one.is_noted());
        one.forget();
        assert!(!one.is_noted());
    }
}
