//! LRU: one exact list of all blocks by last use. A write to a full cache first writes the least
//! recently used block back, then takes its slot (the Caiti paper's 2-step write). A block that a
//! flush has cleaned stays, and is given up without a write.

use super::replacement::{Replacement, View};
use crate::tier::list::{Links, List};

/// All blocks in order of last use.
pub(super) struct Lru {
    links: Links,
    used: List,
}

impl Replacement for Lru {
    const KEEPS_CLEAN: bool = true;
    const SETS: u32 = 1;

    fn new(slots: u32) -> Self {
        Self { links: Links::new(slots), used: List::EMPTY }
    }

    fn dirtied(&mut self, slot: u32, _view: View<'_>) {
        self.used.push_last(&mut self.links, slot);
    }

    fn leaves(&mut self, slot: u32) {
        self.used.remove(&mut self.links, slot);
    }

    fn touched(&mut self, slot: u32) {
        self.leaves(slot);
        self.used.push_last(&mut self.links, slot);
    }

    fn victim(&self, view: View<'_>) -> Option<u32> {
        self.used.iter(&self.links).find(|&slot| view.is_at_rest(slot))
    }

    fn bytes(&self) -> usize {
        self.links.bytes()
    }
}
