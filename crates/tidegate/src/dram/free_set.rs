//! The free set: slot numbers in a lock-free stack, taken and returned by compare-and-swap.
//!
//! A stack reuses the slot freed last, whose data is still in the CPU's cache. The head is one
//! word: the number of the top slot and a tag that every change increments, so that a head which
//! was popped and pushed back meanwhile (ABA) counts as changed. A wrong match needs 2^32 changes
//! during one attempt.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

use super::slots::NO_SLOT;

/// Bytes of the free set by slot.
pub(super) const LINK_BYTES: usize = size_of::<u32>();

/// A set of free slots.
pub(super) struct FreeSet {
    head: AtomicU64,
    /// By slot: the next free slot below it in the stack. Stale while the slot is taken.
    below: Box<[AtomicU32]>,
    /// Number of slots in the set: at least the slots on the stack.
    count: AtomicU32,
}

impl FreeSet {
    /// Makes a set of the slots `0..count`, all free.
    pub(super) fn full(count: u32) -> Self {
        let below = (0..count).map(|slot| AtomicU32::new(slot.checked_sub(1).unwrap_or(NO_SLOT)));
        Self {
            head: AtomicU64::new(pack(0, count.checked_sub(1).unwrap_or(NO_SLOT))),
            below: below.collect(),
            count: AtomicU32::new(count),
        }
    }

    /// Takes a slot. Returns `None` if no slot is free.
    pub(super) fn take(&self) -> Option<u32> {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let slot = top(head);
            if slot == NO_SLOT {
                return None;
            }
            // Stale if another thread took the slot meanwhile; the tag differs then, and the
            // exchange fails.
            let below = self.below[slot as usize].load(Ordering::Relaxed);
            let next = pack(tag(head).wrapping_add(1), below);
            match self.head.compare_exchange_weak(head, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    self.count.fetch_sub(1, Ordering::Relaxed);
                    return Some(slot);
                }
                Err(found) => head = found,
            }
        }
    }

    /// Returns `slot`, taken before, to the set.
    pub(super) fn give(&self, slot: u32) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            self.below[slot as usize].store(top(head), Ordering::Relaxed);
            let next = pack(tag(head).wrapping_add(1), slot);
            match self.head.compare_exchange_weak(head, next, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(found) => head = found,
            }
        }
    }

    /// Returns about how many slots are free: exact while no thread takes or gives.
    pub(super) fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }
}

fn pack(tag: u32, slot: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(slot)
}

#[expect(clippy::cast_possible_truncation, reason = "the low half of the word")]
fn top(head: u64) -> u32 {
    head as u32
}

fn tag(head: u64) -> u32 {
    (head >> 32) as u32
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slots_come_last_freed_first_and_each_once() {
        let free = FreeSet::full(3);
        assert_eq!((free.take(), free.take(), free.take()), (Some(2), Some(1), Some(0)));
        assert_eq!((free.take(), free.count()), (None, 0));
        free.give(1);
        free.give(2);
        assert_eq!(free.count(), 2);
        assert_eq!((free.take(), free.take(), free.take()), (Some(2), Some(1), None));
    }

    #[test]
    fn the_set_of_no_slots_is_empty() {
        assert_eq!(FreeSet::full(0).take(), None);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Two threads take and give in the pattern that breaks a stack without tags: one stops between
    /// loading the head and exchanging it, while the other takes two slots and gives the first
    /// back.
    #[test]
    fn loom_no_slot_is_taken_twice_or_lost() {
        loom::model(|| {
            let free = Arc::new(FreeSet::full(2));
            let other = {
                let free = free.clone();
                thread::spawn(move || {
                    let first = free.take();
                    let second = free.take();
                    if let Some(first) = first {
                        free.give(first);
                    }
                    second
                })
            };
            let mine = free.take();
            let theirs = other.join().unwrap();
            let mut all: Vec<u32> = [mine, theirs].into_iter().flatten().collect();
            all.extend(std::iter::from_fn(|| free.take()));
            all.sort_unstable();
            assert_eq!(all, [0, 1]);
        });
    }

    /// The taker sees the data that the giver wrote to the slot.
    #[test]
    fn loom_a_slot_carries_what_its_giver_wrote() {
        loom::model(|| {
            let free = Arc::new(FreeSet::full(1));
            let data = Arc::new(AtomicU32::new(0));
            let slot = free.take().unwrap();
            let taker = {
                let (free, data) = (free.clone(), data.clone());
                thread::spawn(move || {
                    if free.take().is_some() {
                        assert_eq!(data.load(Ordering::Relaxed), 7);
                    }
                })
            };
            data.store(7, Ordering::Relaxed);
            free.give(slot);
            taker.join().unwrap();
        });
    }
}
