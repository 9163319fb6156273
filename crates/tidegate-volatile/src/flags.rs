//! The flags that hooks removed when a descriptor was opened, so that `F_GETFL` reports them.
//!
//! A table has an entry for each descriptor below [`DESCRIPTORS`]. An entry contains a hash of the
//! file's device and inode. So the entry of a descriptor that was closed unseen does not apply to
//! the next file. `F_GETFL` does not report the removed flags of descriptors above the table, nor
//! flags of inherited descriptors.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::place;

const DESCRIPTORS: usize = 4096;
/// The bits of an entry that name the removed flags.
const FLAGS: u64 = 0b11;
const DATA_ONLY: u64 = 0b01;

/// For each descriptor the hash of its file, with [`FLAGS`]; 0 if no flag was removed.
static ENTRIES: [AtomicU64; DESCRIPTORS] = [const { AtomicU64::new(0) }; DESCRIPTORS];

fn entry(fd: c_int) -> Option<&'static AtomicU64> {
    ENTRIES.get(usize::try_from(fd).ok()?)
}

fn hash(fd: c_int) -> Option<u64> {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let (device, inode) = place::identity(fd)?;
    let mixed = device.wrapping_mul(MULTIPLIER).rotate_left(32) ^ inode;
    Some(mixed.wrapping_mul(MULTIPLIER) & !FLAGS)
}

/// Notes the flags that were removed when `fd` was opened; 0 for none.
pub(crate) fn note(fd: c_int, taken: c_int) {
    let Some(entry) = entry(fd) else { return };
    let bits = match taken & libc::O_SYNC {
        0 => 0,
        libc::O_DSYNC => DATA_ONLY,
        _ => FLAGS,
    };
    let noted = if bits == 0 { 0 } else { hash(fd).map_or(0, |hash| hash | bits) };
    if entry.load(Ordering::Relaxed) != noted {
        entry.store(noted, Ordering::Relaxed);
    }
}

/// Notes that `copy` has become a copy of `original`.
pub(crate) fn copied(original: c_int, copy: c_int) {
    let Some(entry_of_copy) = entry(copy) else { return };
    let noted = entry(original).map_or(0, |entry| entry.load(Ordering::Relaxed));
    if entry_of_copy.load(Ordering::Relaxed) != noted {
        entry_of_copy.store(noted, Ordering::Relaxed);
    }
}

/// Returns the flags that were removed from `fd`.
pub(crate) fn taken(fd: c_int) -> c_int {
    let noted = entry(fd).map_or(0, |entry| entry.load(Ordering::Relaxed));
    if noted == 0 || hash(fd) != Some(noted & !FLAGS) {
        return 0;
    }
    if noted & FLAGS == DATA_ONLY { libc::O_DSYNC } else { libc::O_SYNC }
}
