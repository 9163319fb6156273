//! Pages: which slot holds the newest version of each page, and which threads may change that.
//!
//! [`Pages`] has the index by shards, the locks of pages and the groups of atomic flush. It reads
//! pages from their slots and removes clean ones. [`Writer`](writer::Writer), one layer above,
//! stores batches of pages in free slots.

pub(super) mod cleaner;
pub(super) mod cluster;
pub(super) mod comparing;
pub(super) mod content;
mod flush;
pub(super) mod group;
pub(super) mod index;
pub(super) mod merge;
pub(super) mod orders;
pub(super) mod read;
pub(super) mod remove;
pub(super) mod table;
pub(super) mod write;
pub(super) mod writer;

use std::ops::Range;
use std::sync::Arc;

use super::Few;
use super::backing::Backing;
use super::backing::traffic::Seen;
use super::counters::{Counter, Counters};
use super::policy::classes::Admission;
use super::span::{is_whole, pages_in};
use super::store::Store;
use super::store::layout::whole_slot;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::tier::background::Waker;
use crate::tier::set_locks::{SetLock, SetLocks};
use crate::tier::version_locks::{Version, VersionGuard, VersionLocks};
use cluster::Sharding;
use group::Groups;
use index::{Found, Shard, Usage};

/// Maximum number of pages that are read from the backing at once.
const RUN_PAGES_MAX: usize = 256;

/// The pages of a cache.
pub(super) struct Pages {
    pub(super) store: Arc<Store>,
    pub(super) backing: Arc<Backing>,
    pub(super) shards: SetLocks<Shard>,
    pub(super) sharding: Sharding,
    pub(super) locks: VersionLocks,
    /// The groups of atomic flush; `None` without atomic flush.
    pub(super) groups: Option<Groups>,
    /// Number of slots of each shard that are kept free for writers.
    pub(super) reserve: AtomicU32,
    /// Number of pages whose data did not match their checksums.
    pub(super) damaged: AtomicU64,
    /// Number of memory failures and damaged pages.
    pub(super) failures: Failures,
    pub(super) waker: Arc<Waker>,
    pub(super) counters: Arc<Counters>,
}

/// A count of failures, which only grows.
#[derive(Default)]
pub(super) struct Failures(AtomicU64);

impl Failures {
    pub(super) fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why a shard needs work, in order of urgency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Need {
    FreeSlots,
    Cleaning,
}

/// A page that the cache lacked, at least in part, when it was looked up.
#[derive(Clone, Copy)]
pub(super) struct Missing {
    pub(super) page: u64,
    /// The cache's record of the page.
    pub(super) record: Option<Found>,
    /// The page's version before the lookup.
    pub(super) version: Version,
    /// The state of the writes to the backing before the lookup.
    pub(super) seen: Seen,
}

/// A page as it was read from the backing.
pub(super) struct Fill {
    pub(super) missing: Missing,
    pub(super) data: Box<[u8]>,
    /// The IO class of the request that read it.
    pub(super) class: u8,
}

impl Pages {
    /// Returns the pages from `first` on up to the first completely cached one, at most `most`.
    pub(in crate::cache) fn missing_run(&self, first: u64, most: usize) -> Vec<Missing> {
        let pages = first..first + most.min(RUN_PAGES_MAX) as u64;
        pages.map_while(|page| self.missing(page)).collect()
    }

    /// Returns the pages of `bytes` if the range is whole pages, and few, and the cache lacks all
    /// or a part of each page. Otherwise returns `None`.
    pub(in crate::cache) fn missing_all(&self, bytes: &Range<u64>) -> Option<Vec<Missing>> {
        if !is_whole(bytes) {
            return None;
        }
        let pages = pages_in(bytes);
        let count = usize::try_from(pages.end - pages.start).ok().filter(|count| *count > 0)?;
        let run = self.missing_run(pages.start, count);
        (run.len() == count).then_some(run)
    }

    /// Returns `page` as missing unless the cache has all bytes of the page.
    pub(in crate::cache) fn missing(&self, page: u64) -> Option<Missing> {
        // Read before the lookup, so that the version reveals any later change.
        let (version, seen) = (self.locks.version(page), self.backing.traffic.see(page));
        let record = self.find(page);
        let is_missing = record.is_none_or(|found| found.record && found.base.is_none());
        is_missing.then_some(Missing { page, record, version, seen })
    }

    pub(in crate::cache) fn shard_of(&self, page: u64) -> usize {
        self.sharding.shard_of(page)
    }

    /// Returns the number of the shard that has `slot`.
    fn shard_of_slot(&self, slot: u32) -> usize {
        whole_slot(slot) as usize % self.shards.count()
    }

    /// Splits `all` into runs whose pages are in one shard. `page` returns the page of an element.
    pub(in crate::cache) fn runs_by_shard<'a, T>(
        &self,
        all: &'a [T],
        page: impl Fn(&T) -> u64,
    ) -> impl Iterator<Item = &'a [T]> {
        all.chunk_by(move |one, next| self.shard_of(page(one)) == self.shard_of(page(next)))
    }

    /// Locks the shard of `page`.
    pub(in crate::cache) fn shard(&self, page: u64) -> SetLock<'_, Shard> {
        self.shards.lock(self.shard_of(page))
    }

    pub(in crate::cache) fn find(&self, page: u64) -> Option<Found> {
        self.shard(page).find(page)
    }

    pub(in crate::cache) fn reserve(&self) -> u32 {
        self.reserve.load(Ordering::Relaxed)
    }

    /// Locks `pages` in the order that all threads use.
    pub(in crate::cache) fn lock_pages(
        &self,
        pages: impl Iterator<Item = u64>,
    ) -> Few<VersionGuard<'_>> {
        let mut pages: Few<u64> = pages.collect();
        pages.sort_unstable_by_key(|page| self.locks.rank(*page));
        pages.dedup_by(|one, other| self.locks.same_bucket(*one, *other));
        pages.into_iter().map(|page| self.locks.lock(page, || self.store.region.relax())).collect()
    }

    /// Calls `see` with each shard in turn, so that requests wait for one locked shard at most.
    pub(in crate::cache) fn each_shard(&self, mut see: impl FnMut(&mut Shard)) {
        (0..self.shards.count()).for_each(|number| see(&mut self.shards.lock(number)));
    }

    pub(in crate::cache) fn usage(&self) -> Usage {
        let all = (0..self.shards.count()).map(|number| self.shards.lock(number).usage());
        all.fold(Usage::default(), Usage::plus)
    }

    pub(in crate::cache) fn notify_all(&self) {
        (0..self.shards.count()).for_each(|number| self.shards.lock(number).notify());
    }

    /// Returns the runs of pages in `pages` that the cache does not have.
    pub(in crate::cache) fn missing_runs(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for page in pages.clone().filter(|page| self.find(*page).is_none()) {
            match runs.last_mut() {
                Some(run) if run.end == page => run.end += 1,
                _ => runs.push(page..page + 1),
            }
        }
        runs
    }

    /// Returns whether all pages of `pages` are cached, at least in part.
    pub(in crate::cache) fn has_all(&self, pages: &Range<u64>) -> bool {
        pages.clone().all(|page| self.find(page).is_some())
    }

    /// Returns whether a request of `class` may insert `pages` missing pages in shard `number`.
    pub(in crate::cache) fn class_admission(
        &self,
        number: usize,
        pages: u32,
        class: u8,
    ) -> Admission {
        self.shards.lock(number).admission(class, pages, self.reserve())
    }

    /// Returns the numbers of the shards that need free slots.
    pub(in crate::cache) fn needy_shards(&self) -> Vec<usize> {
        let needs_slots = |it: &usize| self.shards.lock(*it).allocator.needs_slots(self.reserve());
        (0..self.shards.count()).filter(needs_slots).collect()
    }

    /// Returns the most urgent need of `shard`. Considers cleaning only if `now_ns` is given.
    pub(in crate::cache) fn need_of(&self, shard: &Shard, now_ns: Option<u64>) -> Option<Need> {
        if shard.allocator.needs_slots(self.reserve()) {
            return Some(Need::FreeSlots);
        }
        now_ns.filter(|now_ns| shard.wants_cleaning(*now_ns)).map(|_| Need::Cleaning)
    }

    /// Wakes a worker if shard `number`, which was changed, needs one.
    pub(in crate::cache) fn wake_for_shard(&self, number: usize) {
        if self.needs_worker(&self.shards.lock(number)) {
            self.waker.wake();
        }
    }

    /// Returns whether `shard`, which the caller has locked and may have changed, needs a worker
    /// while all workers sleep. A worker that sleeps until a set time wakes by itself.
    ///
    /// No wake-up is lost, because a worker checks the shard under the same lock after it announced
    /// that it sleeps. Either the worker sees the change, or this call sees the announcement.
    pub(in crate::cache) fn needs_worker(&self, shard: &Shard) -> bool {
        let may_clean = self.backing.pace.free_at_ns() == 0;
        self.waker.needs_call() && self.need_of(shard, may_clean.then_some(0)).is_some()
    }

    /// Adds one to `counter` for each of `pages`, in the page's IO class.
    pub(in crate::cache) fn count_each<'a>(
        &self,
        counter: Counter,
        pages: impl ExactSizeIterator<Item = &'a Found>,
    ) {
        let class_of = |found: &Found| self.shard(found.page).class_of(found);
        self.counters.add_each(counter, pages.map(class_of));
    }
}
