//! The parts of the ring that this process has in its page tables.
//!
//! The first store to a page of a mapping costs more than an append. A load costs half as much, and
//! the kernel maps the neighbours too, 64 KiB by default. So an append that comes to a new part of
//! the ring loads from it first, and the next fifteen appends find their pages mapped. Only for
//! files in tmpfs, where the kernel needs no notice of the first store to a page.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that the kernel maps around a load.
const PART_BYTES: u64 = 64 << 10;

/// A bit for each part of the region.
pub(in crate::log) struct Touched {
    words: Box<[AtomicU64]>,
}

impl Touched {
    /// Creates a set without any part of a region of `region_bytes`. With 0 bytes,
    /// [`note`](Self::note) never calls `touch`.
    pub(in crate::log) fn new(region_bytes: u64) -> Self {
        let words = region_bytes.div_ceil(PART_BYTES * 64);
        Self { words: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Calls `touch` with the first and last word of each new part of `len` bytes at `offset`.
    #[inline]
    pub(in crate::log) fn note(&self, offset: u64, len: u64, touch: impl Fn(u64)) {
        for part in offset / PART_BYTES..=(offset + len.max(1) - 1) / PART_BYTES {
            let word = usize::try_from(part / 64).ok().and_then(|at| self.words.get(at));
            let Some(word) = word else { return };
            let bit = 1 << (part % 64);
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
                // The kernel's parts may be aligned differently: loads at both ends map all.
                touch(part * PART_BYTES);
                touch((part + 1) * PART_BYTES - 8);
            }
        }
    }

    /// Clears the set: the page tables of a forked child are new.
    pub(in crate::log) fn forget(&self) {
        self.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn each_part_is_touched_once_until_it_is_forgotten() {
        let touched = Touched::new(1 << 20);
        let seen = RefCell::new(Vec::new());
        let note = |offset, len| {
            touched.note(offset, len, |at| seen.borrow_mut().push(at));
            seen.take()
        };
        assert_eq!(note(100, 8), [0, 65528]);
        assert!(note(0, 65536).is_empty());
        assert_eq!(note(65535, 2), [65536, 131_064]);
        touched.forget();
        assert_eq!(note(0, 1), [0, 65528]);
        assert!(note(1 << 30, 1).is_empty(), "outside");
    }
}
