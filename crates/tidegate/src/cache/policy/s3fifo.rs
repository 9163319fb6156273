//! S3-FIFO (Yang and others, SOSP 2023): a small queue of new slots, a main queue, and a memory of
//! pages that left the small queue without a second use.
//!
//! - A new page enters the small queue, or the main one if it left the small one lately.
//! - A use counts up to 3 and moves nothing.
//! - The small queue gives up slots while it holds a tenth of all or more. A slot that was used
//!   twice or more moves to the main queue, with its count cleared; another is a victim.
//! - Otherwise the main queue gives up slots. A slot that was used goes around once more, with its
//!   count lower by one; another is a victim.
//! - If the caller keeps all victims of a queue, the other queue follows: slots that cannot leave
//!   must not hide those that can.

use super::Replacement;
use super::recent::{RecentPages, Seen};
use crate::tier::list::{Links, List};

/// The bits of a mark that count uses.
const USES: u32 = 3;
/// The mark of a slot of the main queue.
const MAIN: u32 = 4;
/// The mark of a slot that the last call of `victims` appended.
const VICTIM: u32 = 8;

/// The queues; 10 bytes a slot, and 2 of these remember pages that left.
pub struct S3Fifo {
    links: Links,
    small: List,
    main: List,
    /// Slots that the last call of `victims` appended, and that were not removed since.
    victims: List,
    small_target: u32,
    /// Victims in a row that the caller kept, since a slot was removed.
    kept: u32,
    left: RecentPages<Seen>,
}

impl S3Fifo {
    /// Returns the policy for at most [`MAX_SLOTS`](super::MAX_SLOTS) `entries` in `slots` slots.
    pub fn new(entries: u32, slots: u32) -> Self {
        let small_target = (slots / 10).max(1);
        Self {
            links: Links::new(entries),
            small: List::EMPTY,
            main: List::EMPTY,
            victims: List::EMPTY,
            small_target,
            kept: 0,
            left: RecentPages::new(u64::from(slots - slots / 10)),
        }
    }

    /// Returns the list of the slots with `mark`, and the links.
    fn list(&mut self, mark: u32) -> (&mut List, &mut Links) {
        let list = if mark & VICTIM != 0 {
            &mut self.victims
        } else if mark & MAIN != 0 {
            &mut self.main
        } else {
            &mut self.small
        };
        (list, &mut self.links)
    }

    fn push(&mut self, slot: u32, mark: u32) {
        self.links.set_mark(slot, mark);
        let (list, links) = self.list(mark);
        list.push_last(links, slot);
    }

    /// Takes `slot` out of its list, and returns its mark.
    fn take(&mut self, slot: u32) -> u32 {
        let mark = self.links.mark(slot);
        let (list, links) = self.list(mark);
        list.remove(links, slot);
        mark
    }

    /// Returns whether the next victim is in the small queue.
    fn is_small_next(&self) -> bool {
        let is_first = self.small.len() >= self.small_target;
        let first = if is_first { &self.small } else { &self.main };
        let is_passed = self.kept >= first.len();
        self.main.is_empty() || is_first != is_passed && !self.small.is_empty()
    }

    /// Returns the next victim, which it moves to the list of victims.
    fn victim(&mut self) -> Option<u32> {
        loop {
            let from_small = self.is_small_next();
            let queue = if from_small { &self.small } else { &self.main };
            let slot = queue.first()?;
            let mark = self.take(slot);
            match (from_small, mark & USES) {
                (true, 2..) => self.push(slot, MAIN),
                (false, 1..) => self.push(slot, mark - 1),
                _ => {
                    self.push(slot, mark | VICTIM);
                    return Some(slot);
                }
            }
        }
    }

    /// Queues the victims that the caller kept as the newest slots of their queues.
    fn queue_kept(&mut self) {
        while let Some(slot) = self.victims.first() {
            let mark = self.take(slot);
            self.push(slot, mark & MAIN);
            self.kept += 1;
        }
        if self.kept >= self.small.len() + self.main.len() {
            self.kept = 0;
        }
    }
}

impl Replacement for S3Fifo {
    fn insert(&mut self, slot: u32, page: u64) {
        if self.links.is_listed(slot) {
            return self.touch(slot, true);
        }
        let is_back = self.left.forget(page);
        self.push(slot, if is_back { MAIN } else { 0 });
    }

    fn touch(&mut self, slot: u32, _write: bool) {
        if self.links.is_listed(slot) {
            let mark = self.links.mark(slot);
            let uses = (mark & USES) + 1;
            self.links.set_mark(slot, mark & !USES | uses.min(USES));
        }
    }

    fn remove(&mut self, slot: u32, page: u64) {
        if !self.links.is_listed(slot) {
            return;
        }
        self.kept = 0;
        if self.take(slot) & (VICTIM | MAIN) == VICTIM {
            self.left.remember(page);
        }
    }

    fn moved(&mut self, from: u32, to: u32, page: u64) {
        self.remove(to, page);
        if !self.links.is_listed(from) {
            return self.insert(to, page);
        }
        let (list, links) = self.list(self.links.mark(from));
        list.replace(links, from, to);
        self.touch(to, true);
    }

    fn victims(&mut self, n: usize, out: &mut Vec<u32>) {
        self.queue_kept();
        out.extend(std::iter::from_fn(|| self.victim()).take(n));
    }

    /// Takes the slots of the small queue that would not move to the main one, as if new slots came
    /// for those that leave; then those of the main queue with the fewest uses.
    fn coldest(&self, n: usize, out: &mut Vec<u32>) {
        let links = &self.links;
        let uses = move |slot: &u32| links.mark(*slot) & USES;
        let small = self.small.iter(links).filter(move |slot| uses(slot) < 2);
        let main_with = |count| self.main.iter(links).filter(move |slot| uses(slot) == count);
        out.extend(small.chain((0..=USES).flat_map(main_with)).take(n));
    }
}
