//! SIEVE (Zhang and others, NSDI 2024): slots in the order of their insertion, and a hand that goes
//! from the oldest to the newest one and around. The hand passes over a slot that was used since
//! its last visit, and evicts one that was not. A use stores one bit and moves nothing.

use std::iter::successors;

use super::Replacement;
use crate::tier::list::{Links, List};

/// The mark of a slot that the hand passes over once.
const VISITED: u32 = 1;

/// All slots, the first inserted one first; 8 bytes a slot.
pub struct Sieve {
    links: Links,
    inserted: List,
    /// The slot that the hand looks at next; `None` for the oldest one.
    hand: Option<u32>,
}

impl Sieve {
    /// Returns the policy for `slots` slots, at most [`MAX_SLOTS`](super::MAX_SLOTS).
    pub fn new(slots: u32) -> Self {
        Self { links: Links::new(slots), inserted: List::EMPTY, hand: None }
    }

    /// Moves the hand on to the next slot that was not visited, and clears the marks on its way.
    /// Ends after at most two laps.
    fn next_unvisited(&mut self) -> Option<u32> {
        loop {
            let slot = self.hand.or(self.inserted.first())?;
            self.hand = self.links.next(slot);
            if self.links.mark(slot) != VISITED {
                return Some(slot);
            }
            self.links.set_mark(slot, 0);
        }
    }
}

impl Replacement for Sieve {
    fn insert(&mut self, slot: u32, _page: u64) {
        if self.links.is_listed(slot) {
            return self.touch(slot, true);
        }
        self.links.set_mark(slot, 0);
        self.inserted.push_last(&mut self.links, slot);
    }

    fn touch(&mut self, slot: u32, _write: bool) {
        if self.links.is_listed(slot) {
            self.links.set_mark(slot, VISITED);
        }
    }

    fn remove(&mut self, slot: u32, _page: u64) {
        if !self.links.is_listed(slot) {
            return;
        }
        if self.hand == Some(slot) {
            self.hand = self.links.next(slot);
        }
        self.inserted.remove(&mut self.links, slot);
    }

    fn moved(&mut self, from: u32, to: u32, page: u64) {
        self.remove(to, page);
        if !self.links.is_listed(from) {
            return self.insert(to, page);
        }
        if self.hand == Some(from) {
            self.hand = Some(to);
        }
        self.inserted.replace(&mut self.links, from, to);
        self.touch(to, true);
    }

    /// Marks the victims as visited. If the caller keeps a victim, the hand passes over it once, so
    /// a call never returns it twice.
    fn victims(&mut self, n: usize, out: &mut Vec<u32>) {
        for _ in 0..n.min(self.inserted.len() as usize) {
            let Some(slot) = self.next_unvisited() else { return };
            self.links.set_mark(slot, VISITED);
            out.push(slot);
        }
    }

    /// Follows the hand for one lap, without the slots that it would pass over.
    fn coldest(&self, n: usize, out: &mut Vec<u32>) {
        let first = self.hand.or(self.inserted.first());
        let next = |slot: &u32| self.links.next(*slot).or(self.inserted.first());
        let lap = successors(first, next).take(self.inserted.len() as usize);
        out.extend(lap.filter(|slot| self.links.mark(*slot) != VISITED).take(n));
    }
}
