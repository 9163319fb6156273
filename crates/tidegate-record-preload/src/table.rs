//! What each descriptor of this process is, as far as it was looked at.
//!
//! Invariant: a descriptor that is closed is forgotten before the kernel can give its number to
//! another one. What the C library closes unseen, and then opens unseen, may be taken for what it
//! was before.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

/// Descriptors from this number on are not noted.
pub(crate) const DESCRIPTORS: usize = 1 << 16;

const UNKNOWN: u32 = 0;
const OTHER: u32 = u32::MAX;

/// The number of the file, twice, and 1 more if writes go to its end.
static TABLE: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(UNKNOWN) }; DESCRIPTORS];

/// What a descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    /// It was not looked at.
    Nothing,
    /// A pipe, a socket, a terminal and the like.
    Other,
    /// A file, a folder or a block device.
    File(File),
}

/// A file behind a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct File {
    /// Its number.
    pub(crate) number: u32,
    /// Each write goes to its end.
    pub(crate) appends: bool,
}

impl Known {
    fn of(word: u32) -> Self {
        match word {
            UNKNOWN => Self::Nothing,
            OTHER => Self::Other,
            word => Self::File(File { number: word / 2, appends: word % 2 == 1 }),
        }
    }

    fn word(self) -> u32 {
        match self {
            Self::Nothing => UNKNOWN,
            Self::Other => OTHER,
            Self::File(file) => (file.number << 1) | u32::from(file.appends),
        }
    }
}

fn entry(fd: c_int) -> Option<&'static AtomicU32> {
    TABLE.get(usize::try_from(fd).ok()?)
}

/// What `fd` is; none if its number is too large, or no number of a descriptor.
#[inline]
pub(crate) fn get(fd: c_int) -> Option<Known> {
    entry(fd).map(|entry| Known::of(entry.load(Ordering::Acquire)))
}

/// Notes what `fd` is.
pub(crate) fn set(fd: c_int, known: Known) {
    if let Some(entry) = entry(fd) {
        entry.store(known.word(), Ordering::Release);
    }
}

/// Forgets what `fd` is, and returns it.
pub(crate) fn take(fd: c_int) -> Known {
    entry(fd).map_or(Known::Nothing, |entry| Known::of(entry.swap(UNKNOWN, Ordering::AcqRel)))
}
