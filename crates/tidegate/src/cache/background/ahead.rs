//! Cleaning ahead of need: the policy of each shard ([`cleaner`](crate::cache::pages::cleaner))
//! chooses which dirty pages are written to the backing, and when.
//! [`pace`](crate::cache::backing::pace) limits how fast.

use super::clean::{Cleaners, Scratch};
use crate::cache::pages::index::Found;
use crate::cache::store::layout::PAGE_BYTES;
use crate::device::Result;
use crate::sync::Ordering;
use crate::tier::clock::now_ns;

/// Maximum number of pages of a batch while neighbours are added.
const JOINED_PAGES_MAX: usize = 512;

impl Cleaners {
    /// Cleans the pages that the policy of shard `number` names, and those of the next shards that
    /// are due until they fill a batch, until a shard needs free slots. Returns `false` if policies
    /// named pages and none was cleaned.
    pub(in crate::cache) fn clean_by_policy(
        &self,
        number: usize,
        scratch: &mut Scratch,
    ) -> Result<bool> {
        let (began_ns, is_busy) = (now_ns(), self.pages.backing.pace.is_busy());
        let mut pages = Vec::new();
        let asked = self.ask_policies(number, began_ns, &mut pages);
        self.add_clusters(&mut pages, usize::MAX);
        let cleaned = self.clean_ahead(&mut pages, scratch);
        let now = now_ns();
        for (number, rest_ns) in asked {
            self.pages.shards.lock(number).cleaner.ask_at_ns = now.saturating_add(rest_ns);
        }
        let cleaned = cleaned?;
        let bytes = cleaned as u64 * PAGE_BYTES;
        self.pages.backing.pace.batch_ended(
            bytes,
            began_ns,
            now,
            is_busy || self.pages.backing.pace.is_busy(),
        );
        Ok(cleaned > 0 || pages.is_empty())
    }

    /// Adds the pages that the policies of the shards from `first` on name to `pages`, until these
    /// fill a batch: the backing is flushed once for all. Returns which shards it asked, and how
    /// long each policy wants to rest.
    fn ask_policies(&self, first: usize, now_ns: u64, pages: &mut Vec<Found>) -> Vec<(usize, u64)> {
        let last_request_ns = self.pages.backing.pace.last_request_ns.load(Ordering::Relaxed);
        let (most, mut asked, mut joins) = (self.batch_pages(), Vec::new(), false);
        for number in (first..self.pages.shards.count()).chain(0..first) {
            let mut shard = self.pages.shards.lock(number);
            if !shard.wants_cleaning(now_ns) {
                continue;
            }
            asked.push((number, shard.next_to_clean(now_ns, last_request_ns, pages)));
            joins = shard.cleaner.entry.joins;
            if pages.len() >= most {
                break;
            }
        }
        if joins {
            self.add_neighbours(pages);
        }
        asked
    }

    /// Cleans `pages` in batches until a shard needs free slots, and drops the rest. Returns how
    /// many it cleaned.
    fn clean_ahead(&self, pages: &mut Vec<Found>, scratch: &mut Scratch) -> Result<usize> {
        pages.sort_unstable_by_key(|found| found.page);
        let (mut done, mut cleaned) = (0, 0);
        while done < pages.len() && (done == 0 || self.pages.needy_shards().is_empty()) {
            let end = pages.len().min(done + self.batch_pages());
            let batch = &pages[done..end];
            let result = self.clean(batch.to_vec(), scratch);
            if !matches!(result, Ok(count) if count == batch.len()) {
                // The policy names other pages first.
                for found in batch {
                    self.pages.shard(found.page).put_off(found);
                }
            }
            cleaned += result?;
            done = end;
        }
        pages.truncate(done);
        Ok(cleaned)
    }

    /// Adds the dirty pages that directly follow each of `pages`, and which are in other shards:
    /// the backing takes adjacent pages as one request.
    fn add_neighbours(&self, pages: &mut Vec<Found>) {
        pages.sort_unstable_by_key(|found| found.page);
        for found in std::mem::take(pages) {
            if pages.last().is_some_and(|last| last.page >= found.page) {
                continue;
            }
            pages.push(found);
            let dirty = |page| self.pages.find(page).filter(|found| found.dirty);
            let left = JOINED_PAGES_MAX.saturating_sub(pages.len());
            pages.extend((found.page + 1..).map_while(dirty).take(left));
        }
    }

    /// Returns the time to ask a policy next, or `None` if no time is known.
    pub(in crate::cache) fn next_cleaning_ns(&self) -> Option<u64> {
        if self.ahead.is_locked() {
            // The thread that holds the lock asks again.
            return None;
        }
        let asks = (0..self.pages.shards.count()).map(|it| {
            let shard = self.pages.shards.lock(it);
            if shard.wants_cleaning(0) { 0 } else { shard.cleaner.ask_at_ns }
        });
        let first_ns = asks.min()?.max(self.pages.backing.pace.free_at_ns());
        (first_ns < u64::MAX).then_some(first_ns)
    }
}
