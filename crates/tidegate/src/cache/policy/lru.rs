//! LRU: one exact list of all slots by their last use, read or written.

use super::Replacement;
use crate::tier::list::{Links, List};

/// All slots, the least recently used one first; 8 bytes a slot.
pub struct Lru {
    links: Links,
    used: List,
}

impl Lru {
    /// Returns the policy for `slots` slots, at most [`MAX_SLOTS`](super::MAX_SLOTS).
    pub fn new(slots: u32) -> Self {
        Self { links: Links::new(slots), used: List::EMPTY }
    }
}

impl Replacement for Lru {
    fn insert(&mut self, slot: u32, _page: u64) {
        if self.links.is_listed(slot) {
            return self.touch(slot, true);
        }
        self.used.push_last(&mut self.links, slot);
    }

    fn touch(&mut self, slot: u32, _write: bool) {
        if self.links.is_listed(slot) {
            self.used.move_last(&mut self.links, slot);
        }
    }

    fn remove(&mut self, slot: u32, _page: u64) {
        if self.links.is_listed(slot) {
            self.used.remove(&mut self.links, slot);
        }
    }

    fn victims(&mut self, n: usize, out: &mut Vec<u32>) {
        for _ in 0..n.min(self.used.len() as usize) {
            let Some(slot) = self.used.first() else { return };
            out.push(slot);
            self.used.move_last(&mut self.links, slot);
        }
    }

    fn coldest(&self, n: usize, out: &mut Vec<u32>) {
        out.extend(self.used.iter(&self.links).take(n));
    }
}
