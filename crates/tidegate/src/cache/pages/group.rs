//! Atomic flush: the writes between two flushes are a group, of which a crash leaves all or
//! nothing.
//!
//! Invariants:
//! 1. A group is committed by its commit word, which is stored after all members are fenced.
//! 2. The version that a member replaces stays on the medium until the member's group is committed:
//!    it is *retained*.
//! 3. No byte of a member reaches the backing before its group is committed: pages with a member of
//!    such a group are not cleaned, and nothing is written around the cache.
//! 4. A write that begins after another one was acknowledged is in no earlier group. Of one page,
//!    versions and groups grow together, as a write joins its group with the locks of its pages.
//! 5. Groups are committed in order, one at a time. So at most two are not yet committed: one that
//!    is closed and one that is open.
//!
//! A FUA write is in no group: it is durable by itself.

use crossbeam_utils::CachePadded;
use parking_lot::Mutex;

use super::Pages;
use super::merge::Entry;
use crate::cache::counters::Counter;
use crate::cache::store::layout::parity;
use crate::device::Result;
use crate::sync::{AtomicU64, Ordering};

/// One write more: a word counts those so far in its upper half, those under way in its lower.
const JOIN: u64 = 1 << 32 | 1;
const UNDER_WAY: u64 = (1 << 32) - 1;
/// A commit of more pages than this is left to a thread that may wait.
const COMMITTED_AT_ONCE_MAX: u64 = 4096;
/// Pages that leave a group under one lock of their shard.
const RELEASED_AT_ONCE: usize = 256;

/// The groups of one cache.
pub(in crate::cache) struct Groups {
    /// The group that writes join.
    open: AtomicU64,
    committed: AtomicU64,
    /// The writes of a group, by its parity.
    writes: [CachePadded<AtomicU64>; 2],
    /// Held while a group is closed and committed.
    committing: Mutex<()>,
}

/// A write in a group; dropping it ends the write.
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
    /// All groups to `committed` are committed.
    pub(in crate::cache) fn new(committed: u64) -> Self {
        Self {
            open: AtomicU64::new(committed + 1),
            committed: AtomicU64::new(committed),
            writes: Default::default(),
            committing: Mutex::default(),
        }
    }

    /// The last group that is committed.
    pub(in crate::cache) fn committed(&self) -> u64 {
        self.committed.load(Ordering::SeqCst)
    }

    fn writes(&self, group: u64) -> &AtomicU64 {
        &self.writes[parity(group)]
    }

    /// A write joins the open group, with the locks of its pages.
    fn join(&self) -> Membership<'_> {
        loop {
            let group = self.open.load(Ordering::SeqCst);
            let writes = self.writes(group);
            writes.fetch_add(JOIN, Ordering::SeqCst);
            let membership = Membership { writes, group };
            // A group that was closed before may have been found without writes.
            if self.open.load(Ordering::SeqCst) == group {
                return membership;
            }
        }
    }
}

impl Pages {
    /// A part that is to be durable by itself would make other parts of its page durable that wait
    /// for the commit of their group.
    pub(in crate::cache) fn needs_commit(&self, entries: &[Entry<'_>], fua: bool) -> bool {
        let waits = |entry: &Entry<'_>| entry.is_part() && self.shard(entry.page).waits(entry.page);
        fua && self.groups.is_some() && entries.iter().any(waits)
    }

    /// The group of a write; none where it is durable by itself.
    pub(in crate::cache) fn join_group(&self, fua: bool) -> Option<Membership<'_>> {
        self.groups.as_ref().filter(|_| !fua).map(Groups::join)
    }

    /// Commits all writes that were acknowledged before the call. Durable on return.
    ///
    /// # Errors
    /// The memory failed; another call tries again.
    pub(in crate::cache) fn commit_groups(&self) -> Result<()> {
        let Some(groups) = &self.groups else { return Ok(()) };
        let last = groups.open.load(Ordering::SeqCst);
        while groups.committed() < last {
            let Some(_committing) = groups.committing.try_lock() else {
                // What the other flush commits need not be committed here.
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

    /// A commit now would take longer than a thread may that must not wait.
    pub(in crate::cache) fn commits_many(&self) -> bool {
        // Without groups nothing waits: no shard needs to be looked at for each flush.
        self.groups.is_some() && self.usage().waiting > COMMITTED_AT_ONCE_MAX
    }

    /// Closes `group` and commits it.
    fn commit_group(&self, groups: &Groups, group: u64) -> Result<()> {
        // It is closed already where its commit failed before.
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

    /// The members of `group` are pages as all others, and the versions that they replaced are
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

    /// After a write of `pages`: commits the open group where it holds too much of a shard, for a
    /// writer finds no free slot otherwise.
    pub(in crate::cache) fn bound_group(&self, mut pages: impl Iterator<Item = u64>) -> Result<()> {
        if self.groups.is_none() || !pages.any(|page| self.shard(page).is_pinned()) {
            return Ok(());
        }
        self.counters.add(Counter::GroupsCommittedEarly, 1);
        self.commit_groups()
    }
}
