//! LRW: one exact list of all slots by their last write (AFCM, section 4). Reads do not count.

use super::Replacement;
use super::lru::Lru;

/// All slots, the least recently written one first; 8 bytes a slot.
pub struct Lrw(Lru);

impl Lrw {
    /// Returns the policy for `slots` slots, at most [`MAX_SLOTS`](super::MAX_SLOTS).
    pub fn new(slots: u32) -> Self {
        Self(Lru::new(slots))
    }
}

impl Replacement for Lrw {
    fn insert(&mut self, slot: u32, page: u64) {
        self.0.insert(slot, page);
    }

    fn touch(&mut self, slot: u32, write: bool) {
        if write {
            self.0.touch(slot, write);
        }
    }

    fn remove(&mut self, slot: u32, page: u64) {
        self.0.remove(slot, page);
    }

    fn victims(&mut self, n: usize, out: &mut Vec<u32>) {
        self.0.victims(n, out);
    }

    fn coldest(&self, n: usize, out: &mut Vec<u32>) {
        self.0.coldest(n, out);
    }
}
