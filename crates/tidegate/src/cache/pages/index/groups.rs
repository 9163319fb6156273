//! The members of uncommitted groups: pages that wait for a commit, and slots that are retained.

use super::slot::{MEMBER, Slot, WAITS, WAITS_ANY};
use super::slots::Slots;
use crate::cache::store::layout::parity;

/// An uncommitted group of writes.
#[derive(Default)]
struct OpenGroup {
    /// The group's pages.
    pages: Vec<u64>,
    /// The slots that the group's members replaced, by their numbers in the shard.
    retained: Vec<u32>,
}

/// The uncommitted groups of a shard.
#[derive(Default)]
pub(super) struct OpenGroups {
    /// The groups, by parity.
    of: [OpenGroup; 2],
    /// Number of pages that wait for a commit.
    waiting: u64,
    /// Number of retained slots.
    retained: u64,
}

impl OpenGroups {
    /// Returns the number of pages that wait for a commit.
    pub(super) fn waiting(&self) -> u64 {
        self.waiting
    }

    /// Returns the number of retained slots.
    pub(super) fn retained(&self) -> u64 {
        self.retained
    }

    /// Retains `slot`, whose version counts until `group` is committed.
    pub(super) fn retain(&mut self, slot: u32, group: u64) {
        self.of[parity(group)].retained.push(slot);
        self.retained += 1;
    }

    /// Makes `slot` wait for `group`, unless that is 0, and for the groups that the previous
    /// version in `old` waited for. Returns whether `old` is retained until the commit.
    pub(super) fn join(&mut self, slot: &mut Slot, old: Option<(u32, Slot)>, group: u64) -> bool {
        self.wait_for(slot, old.map_or(0, |(_, old)| old.word), group);
        let is_member = |old: &Slot| old.is(MEMBER) && old.is(WAITS[parity(group)]);
        let replaced = old.filter(|(_, old)| group > 0 && !is_member(old));
        if let Some((old, _)) = replaced {
            self.retain(old, group);
        }
        replaced.is_some()
    }

    /// Makes `slot` wait for `group`, unless that is 0, and for the groups that the previous
    /// version, with the word `before`, waited for.
    pub(super) fn wait_for(&mut self, slot: &mut Slot, before: u64, group: u64) {
        slot.word |= before & WAITS_ANY;
        if group == 0 {
            return;
        }
        let parity = parity(group);
        if before & WAITS_ANY == 0 {
            self.waiting += 1;
        }
        if before & WAITS[parity] == 0 {
            self.of[parity].pages.push(slot.page());
        }
        slot.word |= WAITS[parity] | MEMBER;
    }

    /// Takes up to `n` slots that members of the committed `group` replaced. They are dead now.
    pub(super) fn take_retained(&mut self, group: u64, n: usize) -> Vec<u32> {
        let retained = &mut self.of[parity(group)].retained;
        let dead = retained.split_off(retained.len().saturating_sub(n));
        self.retained -= dead.len() as u64;
        dead
    }

    /// Ends the wait of up to `n` pages for the committed `group`, once no slot is retained for the
    /// group. Returns whether there is more to do.
    pub(super) fn release(&mut self, slots: &mut Slots, group: u64, n: usize) -> bool {
        let parity = parity(group);
        let OpenGroup { pages, retained } = &mut self.of[parity];
        if !retained.is_empty() {
            return true;
        }
        // Not earlier: a page that does not wait may leave the cache, which finds only dead slots.
        let released = pages.split_off(pages.len().saturating_sub(n));
        for page in released {
            let Some(own) = slots.own_of(page) else { continue };
            let slot = &mut slots[own];
            slot.word &= !WAITS[parity];
            if slot.word & WAITS_ANY == 0 {
                slot.word &= !MEMBER;
                self.waiting -= 1;
            }
        }
        !self.of[parity].pages.is_empty()
    }
}
