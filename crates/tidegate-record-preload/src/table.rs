//! The table of this process's descriptors that hooks have examined.
//!
//! Invariant: a hook forgets a descriptor before a close frees its number. If the C library closes
//! and opens a descriptor internally, unseen by hooks, the table may keep the former file.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

/// Descriptors from this number on are not in the table.
pub(crate) const DESCRIPTORS: usize = 1 << 16;

const UNKNOWN: u32 = 0;
const OTHER: u32 = u32::MAX;

/// The file number shifted left by one; bit 0 is set if writes append.
static TABLE: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(UNKNOWN) }; DESCRIPTORS];

/// The target of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    /// No hook has examined the descriptor.
    Nothing,
    /// Not storage: a pipe, a socket, a terminal and the like.
    Other,
    /// A file, a directory or a block device.
    File(File),
}

/// The file of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct File {
    /// The file's number in events.
    pub(crate) number: u32,
    /// Each write goes to the end of the file.
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

/// Returns the entry of `fd`, or `None` if the table has no entry for this number.
#[inline]
pub(crate) fn get(fd: c_int) -> Option<Known> {
    entry(fd).map(|entry| Known::of(entry.load(Ordering::Acquire)))
}

/// Stores the entry of `fd`.
pub(crate) fn set(fd: c_int, known: Known) {
    if let Some(entry) = entry(fd) {
        entry.store(known.word(), Ordering::Release);
    }
}

/// Removes the entry of `fd`, and returns it.
pub(crate) fn take(fd: c_int) -> Known {
    entry(fd).map_or(Known::Nothing, |entry| Known::of(entry.swap(UNKNOWN, Ordering::AcqRel)))
}
