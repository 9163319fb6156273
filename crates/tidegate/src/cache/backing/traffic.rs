//! Writes to the backing that are under way, by bucket of pages.
//!
//! Two writes of one page to the backing may arrive in either order. A writer that must know the
//! last one asks whether its write was *alone* from begin to end: no other write to a page of its
//! bucket overlapped it.
//!
//! A writer that goes around the cache waits only for cleaners of its own pages. So cleaners
//! announce the pages of their batches too, because a batch shares a bucket with most large writes.
//!
//! Each bucket also has the epoch of its last write around the cache. Until a flush of the backing
//! covers that epoch, the write may be lost, so no page of the bucket is filled from the backing.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::cache::pages::table::hash;
use crate::sync::{AtomicU64, Ordering};

const BUCKETS: usize = 4096;
/// Upper half of a word: all writes so far.
const BEGUN: u64 = 1 << 32;
/// Lower half of a word: writes under way, with the cleaners' writes in its upper part.
const UNDER_WAY: u64 = BEGUN - 1;
/// The epoch of writes before the pool was opened.
const BEFORE: u64 = 1;
const ONE: u64 = 1;
const ONE_CLEANING: u64 = 1 << 16;

/// Writes to the backing.
pub(in crate::cache) struct Traffic {
    words: Box<[AtomicU64]>,
    /// The pages of each cleaner's batch, in order, from before its first write until its last
    /// ended.
    batches: Mutex<Vec<Arc<[u64]>>>,
    /// By bucket: the epoch of the last write that went around the cache.
    bypassed: Box<[AtomicU64]>,
    /// Grows with each flush of the backing that begins.
    epoch: AtomicU64,
    /// The last epoch that is flushed, with all of its writes.
    flushed: AtomicU64,
    /// The last epoch with a write around the cache.
    last_bypassed: AtomicU64,
}

/// The state of a bucket, to be compared with a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cache) struct Seen(u64);

impl Seen {
    fn is_quiet(self) -> bool {
        self.0 & UNDER_WAY == 0
    }
}

/// A write under way.
#[derive(Debug, Clone, Copy)]
pub(in crate::cache) struct Passage {
    bucket: usize,
    seen: Seen,
    /// Its count in the lower half of the word.
    one: u64,
}

impl Traffic {
    /// Returns the state when a pool is opened: no write is under way, and nothing is flushed yet.
    pub(in crate::cache) fn new() -> Self {
        let words = |value| (0..BUCKETS).map(|_| AtomicU64::new(value)).collect();
        Self {
            words: words(0),
            batches: Mutex::default(),
            bypassed: words(BEFORE),
            epoch: AtomicU64::new(BEFORE + 1),
            flushed: AtomicU64::new(0),
            last_bypassed: AtomicU64::new(BEFORE),
        }
    }

    /// Returns the bucket of `page`.
    pub(in crate::cache) fn bucket(page: u64) -> usize {
        usize::try_from(hash(page) >> 40).unwrap_or_default() % BUCKETS
    }

    /// Returns the buckets of `pages`, each once.
    pub(in crate::cache) fn buckets(pages: impl Iterator<Item = u64>) -> Vec<usize> {
        let mut buckets: Vec<usize> = pages.map(Self::bucket).collect();
        buckets.sort_unstable();
        buckets.dedup();
        buckets
    }

    /// Begins a write to pages of `bucket`.
    pub(in crate::cache) fn begin(&self, bucket: usize) -> Passage {
        self.begin_as(bucket, ONE)
    }

    /// Begins a cleaner's write to pages of `bucket`, of versions that were found dirty.
    pub(in crate::cache) fn begin_cleaning(&self, bucket: usize) -> Passage {
        self.begin_as(bucket, ONE_CLEANING)
    }

    fn begin_as(&self, bucket: usize, one: u64) -> Passage {
        let before = self.words[bucket].fetch_add(BEGUN | one, Ordering::SeqCst);
        Passage { bucket, seen: Seen(before), one }
    }

    /// Announces the `pages` of a cleaner's batch, in order, before their writes begin.
    pub(in crate::cache) fn announce(&self, pages: &Arc<[u64]>) {
        self.batches.lock().push(Arc::clone(pages));
    }

    /// Withdraws announced `pages`, whose writes have ended.
    pub(in crate::cache) fn withdraw(&self, pages: &Arc<[u64]>) {
        self.batches.lock().retain(|batch| !Arc::ptr_eq(batch, pages));
    }

    /// Returns whether a cleaner writes one of `pages`, which are in `buckets`, or is about to.
    pub(in crate::cache) fn is_cleaning(&self, pages: &Range<u64>, buckets: &[usize]) -> bool {
        let is_in = |batch: &Arc<[u64]>| {
            let first = batch.partition_point(|page| *page < pages.start);
            batch.get(first).is_some_and(|page| *page < pages.end)
        };
        let may_be = buckets.iter().any(|bucket| self.is_cleaning_bucket(*bucket));
        may_be && self.batches.lock().iter().any(is_in)
    }

    /// Returns whether a cleaner's write to pages of `bucket` is under way.
    fn is_cleaning_bucket(&self, bucket: usize) -> bool {
        self.words[bucket].load(Ordering::SeqCst) & UNDER_WAY >= ONE_CLEANING
    }

    /// Returns whether no other write was under way in the bucket when this one began.
    pub(in crate::cache) fn began_alone(passage: &Passage) -> bool {
        passage.seen.is_quiet()
    }

    /// Ends a write. Returns whether no other write overlapped it.
    pub(in crate::cache) fn end(&self, passage: &Passage) -> bool {
        let before = self.words[passage.bucket].fetch_sub(passage.one, Ordering::SeqCst);
        let alone = passage.seen.0.wrapping_add(BEGUN | passage.one);
        passage.seen.is_quiet() && before == alone
    }

    /// Returns the present state of `page`'s bucket.
    pub(in crate::cache) fn see(&self, page: u64) -> Seen {
        Seen(self.words[Self::bucket(page)].load(Ordering::SeqCst))
    }

    /// Returns whether data that was read from the backing since `seen` may be cached: no write of
    /// the page was under way, and the backing has flushed all earlier ones.
    pub(in crate::cache) fn may_fill(&self, page: u64, seen: Seen) -> bool {
        let bypassed = self.bypassed[Self::bucket(page)].load(Ordering::SeqCst);
        self.is_unchanged(page, seen) && bypassed <= self.flushed()
    }

    /// Returns whether no write of `page` to the backing was under way since `seen`.
    pub(in crate::cache) fn is_unchanged(&self, page: u64, seen: Seen) -> bool {
        seen.is_quiet() && self.see(page) == seen
    }

    /// Notes a write around the cache to a page of `bucket`; has to precede its [`end`](Self::end).
    pub(in crate::cache) fn bypassed(&self, bucket: usize) {
        let epoch = self.epoch.load(Ordering::SeqCst);
        self.bypassed[bucket].fetch_max(epoch, Ordering::SeqCst);
        self.last_bypassed.fetch_max(epoch, Ordering::SeqCst);
    }

    /// Returns whether writes around the cache wait for a flush.
    pub(in crate::cache) fn needs_flush(&self) -> bool {
        self.has_bypassed_since(self.flushed())
    }

    /// Returns whether writes around the cache since the pool was opened wait for a flush. Earlier
    /// ones need none here: the next open takes all earlier writes for unflushed, as this one did.
    pub(in crate::cache) fn needs_own_flush(&self) -> bool {
        self.has_bypassed_since(self.flushed().max(BEFORE))
    }

    /// Returns the last flushed epoch.
    fn flushed(&self) -> u64 {
        self.flushed.load(Ordering::SeqCst)
    }

    /// Returns whether a write around the cache came after the epoch `flushed`.
    fn has_bypassed_since(&self, flushed: u64) -> bool {
        self.last_bypassed.load(Ordering::SeqCst) > flushed
    }

    /// Begins a flush of the backing, and returns its epoch.
    pub(in crate::cache) fn flush_begins(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::SeqCst)
    }

    /// Invalidates all that was read from the backing before: it may not be cached.
    pub(in crate::cache) fn keep_nothing_read(&self) {
        for word in &self.words {
            word.fetch_add(BEGUN, Ordering::SeqCst);
        }
    }

    /// Notes that the flush of `epoch` succeeded.
    pub(in crate::cache) fn flush_succeeded(&self, epoch: u64) {
        self.flushed.fetch_max(epoch, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_write_knows_whether_it_was_alone() {
        let traffic = Traffic::new();
        let first = traffic.begin(7);
        assert!(Traffic::began_alone(&first) && traffic.end(&first));
        let (one, other) = (traffic.begin(7), traffic.begin(7));
        assert!(Traffic::began_alone(&one) && !Traffic::began_alone(&other));
        assert!(!traffic.end(&one) && !traffic.end(&other));
        let outer = traffic.begin(7);
        let inner = traffic.begin(7);
        traffic.end(&inner);
        assert!(!traffic.end(&outer), "the other one began and ended in between");
    }

    #[test]
    fn a_cleaners_write_is_told_from_others() {
        let traffic = Traffic::new();
        let other = traffic.begin(7);
        let is_cleaning = |bucket| traffic.is_cleaning_bucket(bucket);
        assert!(!is_cleaning(7));
        let cleaning = traffic.begin_cleaning(7);
        assert!(is_cleaning(7) && !is_cleaning(8));
        assert!(!traffic.end(&other) && is_cleaning(7));
        assert!(!traffic.end(&cleaning) && !is_cleaning(7));
        let alone = traffic.begin_cleaning(7);
        assert!(Traffic::began_alone(&alone) && traffic.end(&alone));
    }

    #[test]
    fn a_cleaners_batch_keeps_its_own_pages_busy_and_no_others_of_their_buckets() {
        let traffic = Traffic::new();
        let is_cleaning =
            |pages: Range<u64>| traffic.is_cleaning(&pages, &Traffic::buckets(pages.clone()));
        let batch: Arc<[u64]> = Arc::new([3, 70]);
        let is_beside = |page: &u64| Traffic::bucket(*page) == Traffic::bucket(70);
        let beside = (71..1 << 20).find(is_beside).unwrap();
        traffic.announce(&batch);
        let passages = Traffic::buckets(batch.iter().copied()).into_iter();
        let passages: Vec<_> = passages.map(|bucket| traffic.begin_cleaning(bucket)).collect();
        assert!(is_cleaning(0..4) && is_cleaning(70..71));
        assert!(!is_cleaning(4..70), "between them");
        assert!(!is_cleaning(beside..beside + 1), "in the bucket of one of them");
        let other: Arc<[u64]> = Arc::new([3, 70]);
        traffic.withdraw(&other);
        assert!(is_cleaning(70..71), "another batch ended");
        for passage in &passages {
            assert!(traffic.end(passage));
        }
        traffic.withdraw(&batch);
        assert!(!is_cleaning(0..100));
    }

    #[test]
    fn a_page_is_filled_only_where_nothing_was_written_since_and_all_is_flushed() {
        let traffic = Traffic::new();
        let seen = traffic.see(3);
        assert!(!traffic.may_fill(3, seen), "what was written before the open may be lost");
        let epoch = traffic.flush_begins();
        traffic.flush_succeeded(epoch);
        assert!(traffic.may_fill(3, seen) && !traffic.needs_flush());
        let write = traffic.begin(Traffic::bucket(3));
        assert!(!traffic.may_fill(3, traffic.see(3)));
        let early = traffic.flush_begins();
        traffic.bypassed(Traffic::bucket(3));
        traffic.end(&write);
        traffic.flush_succeeded(early);
        assert!(!traffic.may_fill(3, seen), "it was written since");
        assert!(traffic.needs_flush() && !traffic.may_fill(3, traffic.see(3)));
        let epoch = traffic.flush_begins();
        traffic.flush_succeeded(epoch);
        let seen = traffic.see(3);
        assert!(traffic.may_fill(3, seen) && !traffic.needs_flush());
        traffic.keep_nothing_read();
        assert!(!traffic.may_fill(3, seen) && traffic.may_fill(3, traffic.see(3)));
    }

    #[test]
    fn what_was_written_before_the_open_needs_a_flush_of_a_client_only() {
        let traffic = Traffic::new();
        assert!(traffic.needs_flush() && !traffic.needs_own_flush());
        traffic.bypassed(Traffic::bucket(3));
        assert!(traffic.needs_own_flush());
        let epoch = traffic.flush_begins();
        traffic.flush_succeeded(epoch);
        assert!(!traffic.needs_own_flush() && !traffic.needs_flush());
    }
}
