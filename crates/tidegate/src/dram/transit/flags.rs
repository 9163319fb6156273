//! One bit for each set, to find the sets with work without taking their locks.
//!
//! A set's bit changes only under that set's lock and only when the answer changes, so that under
//! load, when every set has work, no thread writes to these words.
//!
//! No work is missed: a worker that turns idle announces that first and then calls [`Flags::any`];
//! a writer that queues work raises the bit first and then checks for an idle worker. Both modify
//! the bit's word (`any` without changing its value), so one modification comes after the other and
//! sees everything that the other thread did before.

use crate::sync::{AtomicU64, Ordering};

/// One bit for each set.
pub(super) struct Flags {
    words: Box<[AtomicU64]>,
}

impl Flags {
    /// Makes `sets` bits, none raised.
    pub(super) fn new(sets: usize) -> Self {
        Self { words: (0..sets.div_ceil(64)).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Raises or lowers the bit of `set`. The caller holds the lock of that set.
    pub(super) fn put(&self, set: usize, raised: bool) {
        let (word, bit) = (&self.words[set / 64], 1 << (set % 64));
        if raised {
            word.fetch_or(bit, Ordering::AcqRel);
        } else {
            word.fetch_and(!bit, Ordering::AcqRel);
        }
    }

    /// Reports whether the bit of `set` is raised.
    pub(super) fn get(&self, set: usize) -> bool {
        self.words[set / 64].load(Ordering::Acquire) & 1 << (set % 64) != 0
    }

    /// Reports whether any bit is raised, for a worker that is about to turn idle.
    pub(super) fn any(&self) -> bool {
        self.words.iter().any(|word| word.fetch_or(0, Ordering::AcqRel) != 0)
    }

    /// Returns the first raised bit at or after `from`, else the first of all.
    pub(super) fn next_from(&self, from: usize) -> Option<usize> {
        let start = from / 64 % self.words.len();
        let words = self.words.len();
        // The first word comes again at the end, for its bits before `from`.
        (0..=words).find_map(|step| {
            let index = (start + step) % words;
            let mask = if step == 0 { u64::MAX << (from % 64) } else { u64::MAX };
            let bits = self.words[index].load(Ordering::Acquire) & mask;
            (bits != 0).then(|| index * 64 + bits.trailing_zeros() as usize)
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_next_raised_bit_is_found_in_a_circle() {
        let flags = Flags::new(256);
        assert_eq!(flags.next_from(0), None);
        flags.put(5, true);
        flags.put(200, true);
        assert_eq!(flags.next_from(0), Some(5));
        assert_eq!(flags.next_from(5), Some(5));
        assert_eq!(flags.next_from(6), Some(200));
        assert_eq!(flags.next_from(201), Some(5));
        flags.put(200, false);
        assert_eq!(flags.next_from(6), Some(5));
        assert!(flags.get(5) && !flags.get(200));
    }

    #[test]
    fn fewer_sets_than_bits_work_too() {
        let flags = Flags::new(1);
        flags.put(0, true);
        assert_eq!(flags.next_from(63), Some(0));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::sync::AtomicU32;

    #[test]
    fn loom_no_evictor_sleeps_over_work() {
        loom::model(|| {
            let shared = Arc::new((Flags::new(1), AtomicU32::new(0)));
            let writer = {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (flags, call) = &*shared;
                    flags.put(0, true);
                    call.load(Ordering::Acquire) == 1
                })
            };
            let (flags, call) = &*shared;
            call.store(1, Ordering::Release);
            let sleeps = !flags.any();
            let rings = writer.join().unwrap();
            assert!(!sleeps || rings, "the evictor sleeps and no writer wakes it");
        });
    }
}
