//! Co-Active (Sun, Dai, Huang, Qin, TPDS 2021) as the Caiti paper ports it. A Bloom filter
//! separates hot and cold dirty blocks. While the device below is idle, cold blocks are written
//! back in advance and stay as clean copies; a full cache gives up clean copies first, which costs
//! no write.
//!
//! Without a clean copy the least recently used cold block is written back as by
//! [`Lru`](super::lru::Lru), and a hot one only if no cold one is left. A block becomes hot if it
//! is written again shortly after a write. When a generation of the filter ends, blocks that were
//! not written since the previous end become cold again.

use super::bloom::Bloom;
use super::replacement::{Replacement, View};
use crate::tier::list::{Links, List};

/// Which list a slot is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listing {
    None,
    Cold,
    Hot,
    Clean,
}

/// The lists of cold, hot and clean blocks, each in order of last use.
pub(super) struct Coactive {
    links: Links,
    cold: List,
    hot: List,
    clean: List,
    listings: Box<[Listing]>,
    written: Bloom,
}

impl Coactive {
    fn list(&mut self, listing: Listing) -> Option<(&mut List, &mut Links)> {
        let list = match listing {
            Listing::None => return None,
            Listing::Cold => &mut self.cold,
            Listing::Hot => &mut self.hot,
            Listing::Clean => &mut self.clean,
        };
        Some((list, &mut self.links))
    }

    fn move_to(&mut self, slot: u32, listing: Listing) {
        let old = std::mem::replace(&mut self.listings[slot as usize], listing);
        if let Some((list, links)) = self.list(old) {
            list.remove(links, slot);
        }
        if let Some((list, links)) = self.list(listing) {
            list.push_last(links, slot);
        }
    }

    /// Moves blocks whose last write is forgotten to the cold list. The hot list is in order of
    /// last use, so the first remembered block ends the search.
    fn cool_down(&mut self, view: View<'_>) {
        while let Some(slot) = self.hot.first() {
            if self.written.remembers(view.table.get(slot).lba) {
                break;
            }
            self.move_to(slot, Listing::Cold);
        }
    }
}

impl Replacement for Coactive {
    const KEEPS_CLEAN: bool = true;
    const SETS: u32 = 1;
    const WORKERS: u32 = 1;
    const WHEN_IDLE: bool = true;

    fn new(slots: u32) -> Self {
        Self {
            links: Links::new(slots),
            cold: List::EMPTY,
            hot: List::EMPTY,
            clean: List::EMPTY,
            listings: vec![Listing::None; slots as usize].into(),
            written: Bloom::new(slots),
        }
    }

    fn dirtied(&mut self, slot: u32, view: View<'_>) {
        let lba = view.table.get(slot).lba;
        let listing = if self.written.remembers(lba) { Listing::Hot } else { Listing::Cold };
        self.move_to(slot, listing);
        if self.written.remember(lba) {
            self.cool_down(view);
        }
    }

    fn leaves(&mut self, slot: u32) {
        self.move_to(slot, Listing::None);
    }

    fn touched(&mut self, slot: u32) {
        self.move_to(slot, self.listings[slot as usize]);
    }

    fn writing(&mut self, slot: u32) {
        self.move_to(slot, Listing::None);
    }

    fn cleaned(&mut self, slot: u32) {
        self.move_to(slot, Listing::Clean);
    }

    fn victim(&self, _view: View<'_>) -> Option<u32> {
        self.clean.first().or_else(|| self.cold.first()).or_else(|| self.hot.first())
    }

    fn wants_background(&self, _view: View<'_>) -> bool {
        !self.cold.is_empty()
    }

    fn background(&mut self, _view: View<'_>) -> Option<u32> {
        self.cold.first()
    }

    fn bytes(&self) -> usize {
        self.links.bytes() + size_of_val(&*self.listings) + self.written.bytes()
    }
}
