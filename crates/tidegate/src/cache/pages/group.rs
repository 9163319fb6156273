//! Atomic flush: the writes between two flushes are a group, and a crash leaves all writes or none.
//!
//! Invariants:
//! 1. A group is committed by its commit word, which is stored after all members are fenced.
//! 2. The version that a member replaces is *retained*: it stays on the medium until the member's
//!    group is committed.
//! 3. No byte of a member reaches the backing before its group is committed: pages with such a
//!    member are not cleaned, and nothing is written around the cache.
//! 4. A write that begins after another one was acknowledged is in no earlier group. For each page,
//!    versions and groups grow together, as a write joins its group under the locks of its pages.
//! 5. Groups are committed in order, one at a time. So at most two are not yet committed: one
//!    closed and one open.
//!
//! A FUA write belongs to no group: it is durable by itself.

use crossbeam_utils::CachePadded;
use parking_lot::Mutex;

use super::Pages;
use super::merge::Entry;
use crate::cache::counters::Counter;
use crate::cache::store::layout::parity;
use crate::device::Result;
use crate::sync::{AtomicU64, Ordering};

/// Added for each write to its group's word, which counts all writes so far in its upper half, and
/// the writes under way in its lower half.
const JOIN: u64 = 1 << 32 | 1;
const UNDER_WAY: u64 = (1 << 32) - 1;
/// Larger commits are left to a thread that may wait.
const COMMITTED_AT_ONCE_MAX: u64 = 4096;
/// Maximum number of pages released from a group while their shard is locked once.
const RELEASED_AT_ONCE: usize = 256;

/// The groups of one cache.
pub(in crate::cache) struct Groups {
    /// The group that writes join.
    open: AtomicU64,
    committed: AtomicU64,
    /// The counts of writes, by the parity of the group.
    writes: [CachePadded<AtomicU64>; 2],
    /// Held while a group is closed and committed.
    committing: Mutex<()>,
}

/// A write under way in a group. Dropping it ends the write.
pub(in crate::cache) struct Membership<'a> {
    writes: &'a AtomicU64,
    pub(in crate::cache) group: u64,
}

impl Drop for Membership<'_> {
    fn drop(&mut self) {
        self.writes.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Groups {
    /// Returns the state after the commit of all groups up to `committed`.
    pub(in crate::cache) fn new(committed: u64) -> Self {
        Self {
            open: AtomicU64::new(committed + 1),
            committed: AtomicU64::new(committed),
            writes: Default::default(),
            committing: Mutex::default(),
        }
    }

    /// Returns the last committed group.
    pub(in crate::cache) fn committed(&self) -> u64 {
        self.committed.load(Ordering::SeqCst)
    }

    fn writes(&self, group: u64) -> &AtomicU64 {
        &self.writes[parity(group)]
    }

    /// Joins the open group for a write. The caller holds the locks of the write's pages.
    fn join(&self) -> Membership<'_> {
        loop {
            let group = self.open.load(Ordering::SeqCst);
            let writes = self.writes(group);
            writes.fetch_add(JOIN, Ordering::SeqCst);
            let membership = Membership { writes, group };
            // If the group was closed before the count, its commit may have missed this write.
            if self.open.load(Ordering::SeqCst) == group {
                return membership;
            }
        }
    }
}

impl Pages {
    /// Returns whether the write of `entries` needs a commit first. A FUA write of a part would
    /// make other parts of its page durable that wait for the commit of their group.
    pub(in crate::cache) fn needs_commit(&self, entries: &[Entry<'_>], fua: bool) -> bool {
        let waits = |entry: &Entry<'_>| entry.is_part() && self.shard(entry.page).waits(entry.page);
        fua && self.groups.is_some() && entries.iter().any(waits)
    }

    /// Joins the open group for a write. Returns `None` for FUA writes, or without atomic flush.
    pub(in crate::cache) fn join_group(&self, fua: bool) -> Option<Membership<'_>> {
        self.groups.as_ref().filter(|_| !fua).map(Groups::join)
    }

    /// Commits all writes that were acknowledged before the call. They are durable on return.
    ///
    /// # Errors
    /// Fails if the memory failed. Another call tries again.
    pub(in crate::cache) fn commit_groups(&self) -> Result<()> {
        let Some(groups) = &self.groups else { return Ok(()) };
        let last = groups.open.load(Ordering::SeqCst);
        while groups.committed() < last {
            let Some(_committing) = groups.committing.try_lock() else {
                // The other flush may commit the same groups.
                self.store.region.relax();
                continue;
            };
            let next = groups.committed() + 1;
            let is_unused = groups.writes(last).load(Ordering::SeqCst) <= UNDER_WAY;
            if next == last && is_unused {
                return Ok(());
            }
            if next <= last {
                self.commit_group(groups, next)?;
            }
        }
        Ok(())
    }

    /// Returns whether a commit now would take too long for a thread that must not wait.
    pub(in crate::cache) fn commits_many(&self) -> bool {
        // Without groups no page waits, so flushes need not lock the shards.
        self.groups.is_some() && self.usage().waiting > COMMITTED_AT_ONCE_MAX
    }

    /// Closes `group` and commits it.
    fn commit_group(&self, groups: &Groups, group: u64) -> Result<()> {
        // The group is closed already if its commit failed before.
        groups.open.fetch_max(group + 1, Ordering::SeqCst);
        let writes = groups.writes(group);
        while writes.load(Ordering::SeqCst) & UNDER_WAY > 0 {
            self.store.region.relax();
        }
        self.store.store_commit_word(group)?;
        writes.fetch_and(UNDER_WAY, Ordering::SeqCst);
        self.counters.add(Counter::GroupsCommitted, 1);
        self.release_members(group);
        groups.committed.store(group, Ordering::SeqCst);
        Ok(())
    }

    /// Ends the wait of members of the committed `group`. The versions that they replaced become
    /// dead.
    fn release_members(&self, group: u64) {
        for number in 0..self.shards.count() {
            loop {
                let mut shard = self.shards.lock(number);
                let is_more = shard.release(group, RELEASED_AT_ONCE);
                shard.notify();
                if !is_more {
                    break;
                }
            }
            self.wake_for_shard(number);
        }
    }

    /// Commits the open group after a write of `pages` if groups hold too much of a shard.
    /// Otherwise writers would find no free slot.
    pub(in crate::cache) fn bound_group(&self, mut pages: impl Iterator<Item = u64>) -> Result<()> {
        if self.groups.is_none() || !pages.any(|page| self.shard(page).is_pinned()) {
            return Ok(());
        }
        self.counters.add(Counter::GroupsCommittedEarly, 1);
        self.commit_groups()
    }
}
