//! Cleaning ahead of need: the policy of each shard ([`cleaner`](crate::cache::pages::cleaner))
//! says which of its dirty pages are written to the backing, and when.
//!
//! It yields to requests in two ways. There is a limit of bytes a second, where users set one. And
//! after a batch beside which requests were at the backing too, it rests for as long as the batch
//! took: so these have at least half of the backing's time. Neither holds where writers need free
//! slots.

use std::sync::Arc;

use crate::cache::pages::index::Found;
use crate::cache::store::layout::PAGE_BYTES;
use crate::cache::{Core, Scratch};
use crate::device::Result;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::tier::clock::now_ns;

/// Most pages of a batch to which neighbours are added.
const JOINED_PAGES_MAX: usize = 512;
const SECOND_NS: u128 = 1_000_000_000;

/// How fast the cache is cleaned ahead of need.
#[derive(Default)]
pub(in crate::cache) struct Pace {
    /// Most bytes a second; 0: no limit.
    rate_bytes: AtomicU64,
    /// Requests of clients at the backing.
    foreground: Arc<AtomicU32>,
    /// Cleaning yields to them.
    yields: bool,
    /// When the next batch may begin; 0: at once.
    free_at_ns: AtomicU64,
    /// The policy wants to know of requests.
    pub(in crate::cache) hears: AtomicBool,
    last_request_ns: AtomicU64,
}

/// A request of a client at the backing; dropping it ends it.
pub(in crate::cache) struct Foreground(Arc<AtomicU32>);

impl Drop for Foreground {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pace {
    /// Without a limit.
    pub(in crate::cache) fn new(yields: bool) -> Self {
        Self { yields, ..Self::default() }
    }

    pub(in crate::cache) fn set_rate(&self, bytes: u64) {
        self.rate_bytes.store(bytes, Ordering::Relaxed);
        self.free_at_ns.store(0, Ordering::Relaxed);
    }

    /// A request of a client goes to the backing.
    pub(in crate::cache) fn foreground(&self) -> Foreground {
        self.foreground.fetch_add(1, Ordering::Relaxed);
        Foreground(Arc::clone(&self.foreground))
    }

    /// Requests of clients at the backing.
    pub(in crate::cache) fn foreground_requests(&self) -> u32 {
        self.foreground.load(Ordering::Relaxed)
    }

    fn is_busy(&self) -> bool {
        self.yields && self.foreground.load(Ordering::Relaxed) > 0
    }

    /// A request of a client came.
    pub(in crate::cache) fn note_request(&self) {
        if self.hears.load(Ordering::Relaxed) {
            self.last_request_ns.store(now_ns(), Ordering::Relaxed);
        }
    }

    /// When the next batch may begin; 0: at once.
    pub(in crate::cache) fn free_at_ns(&self) -> u64 {
        self.free_at_ns.load(Ordering::Relaxed)
    }

    /// A batch may begin at `now_ns`.
    pub(in crate::cache) fn is_free(&self, now_ns: u64) -> bool {
        if self.free_at_ns() > now_ns {
            return false;
        }
        self.free_at_ns.store(0, Ordering::Relaxed);
        true
    }

    /// A batch of `bytes` took the time from `began_ns` to `now_ns`.
    fn batch_ended(&self, bytes: u64, began_ns: u64, now_ns: u64, is_busy: bool) {
        let rate_bytes = self.rate_bytes.load(Ordering::Relaxed);
        let at_rate = (u128::from(bytes) * SECOND_NS).checked_div(rate_bytes.into());
        let at_rate_ns = u64::try_from(at_rate.unwrap_or(0)).unwrap_or(u64::MAX);
        let yielding_ns = if is_busy { 2 * now_ns.saturating_sub(began_ns) } else { 0 };
        let free_at_ns = began_ns.saturating_add(at_rate_ns.max(yielding_ns));
        let free_at_ns = if free_at_ns > now_ns { free_at_ns } else { 0 };
        self.free_at_ns.store(free_at_ns, Ordering::Relaxed);
    }
}

impl Core {
    /// Cleans what the policy of shard `number` says, as long as no shard needs free slots. False:
    /// it named pages, and none was cleaned.
    pub(in crate::cache) fn clean_by_policy(
        &self,
        number: usize,
        scratch: &mut Scratch,
    ) -> Result<bool> {
        let (began_ns, is_busy) = (now_ns(), self.pace.is_busy());
        let last_request_ns = self.pace.last_request_ns.load(Ordering::Relaxed);
        let mut pages = Vec::new();
        let mut shard = self.shards.lock(number);
        let rest_ns = shard.next_to_clean(began_ns, last_request_ns, &mut pages);
        let joins = shard.cleaner.entry.joins;
        drop(shard);
        if joins {
            self.add_neighbours(&mut pages);
        }
        self.add_clusters(&mut pages, usize::MAX);
        let cleaned = self.clean_ahead(&mut pages, scratch);
        let now = now_ns();
        self.shards.lock(number).cleaner.ask_at_ns = now.saturating_add(rest_ns);
        let cleaned = cleaned?;
        let bytes = cleaned as u64 * PAGE_BYTES;
        self.pace.batch_ended(bytes, began_ns, now, is_busy || self.pace.is_busy());
        Ok(cleaned > 0 || pages.is_empty())
    }

    /// Cleans `pages` batch by batch, and drops those that are left when a shard needs free slots.
    /// Returns how many it cleaned.
    fn clean_ahead(&self, pages: &mut Vec<Found>, scratch: &mut Scratch) -> Result<usize> {
        pages.sort_unstable_by_key(|found| found.page);
        let (mut done, mut cleaned) = (0, 0);
        while done < pages.len() && (done == 0 || self.needy_shards().is_empty()) {
            let end = pages.len().min(done + self.cleaners.batch_pages());
            let batch = &pages[done..end];
            let result = self.clean(batch.to_vec(), scratch);
            if !matches!(result, Ok(count) if count == batch.len()) {
                // So that others come first.
                for found in batch {
                    self.shard(found.page).put_off(found);
                }
            }
            cleaned += result?;
            done = end;
        }
        pages.truncate(done);
        Ok(cleaned)
    }

    /// Adds the dirty pages behind each of `pages`, which are in other shards: the backing takes
    /// neighbours as one request.
    fn add_neighbours(&self, pages: &mut Vec<Found>) {
        pages.sort_unstable_by_key(|found| found.page);
        for found in std::mem::take(pages) {
            if pages.last().is_some_and(|last| last.page >= found.page) {
                continue;
            }
            pages.push(found);
            let dirty = |page| self.find(page).filter(|found| found.dirty);
            let left = JOINED_PAGES_MAX.saturating_sub(pages.len());
            pages.extend((found.page + 1..).map_while(dirty).take(left));
        }
    }

    /// When a policy is to be asked next; none where no time will come.
    pub(in crate::cache) fn next_cleaning_ns(&self) -> Option<u64> {
        if self.cleaners.ahead.is_locked() {
            // That thread asks again.
            return None;
        }
        let asks = (0..self.shards.count()).map(|it| {
            let shard = self.shards.lock(it);
            if shard.wants_cleaning(0) { 0 } else { shard.cleaner.ask_at_ns }
        });
        let first_ns = asks.min()?.max(self.pace.free_at_ns());
        (first_ns < u64::MAX).then_some(first_ns)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_batch_beside_requests_at_the_backing_is_followed_by_as_long_a_rest() {
        let pace = Pace::new(true);
        assert!(!pace.is_busy());
        let request = pace.foreground();
        pace.batch_ended(4096, 1000, 1300, pace.is_busy());
        assert_eq!([1599, 1600].map(|now_ns| pace.is_free(now_ns)), [false, true]);
        drop(request);
        pace.batch_ended(4096, 1000, 1300, pace.is_busy());
        assert_eq!(pace.free_at_ns(), 0);
    }

    #[test]
    fn a_rate_counts_from_the_begin_of_a_batch() {
        let pace = Pace::new(true);
        pace.set_rate(4096);
        pace.batch_ended(2048, 1000, 1300, false);
        assert_eq!(pace.free_at_ns(), 500_001_000);
        pace.batch_ended(0, 1000, 1300, false);
        assert_eq!(pace.free_at_ns(), 0);
    }
}
