//! Cleaning: dirty pages to the backing.
//!
//! A batch is sorted by page, copied out, written, and flushed once. Then each page that is still
//! the newest version gets its verdict. The verdict is a hint that spares the next open work: a
//! crash before it is durable has the page written once more.

use std::ops::Range;

use super::Core;
use super::index::Found;
use super::layout::{PAGE, PAGE_BYTES, VERDICT_OFFSET, clean_verdict};
use super::read::damaged;
use super::tier::Counter;
use super::traffic::{Passage, Traffic};
use crate::device::{
    DeviceError, DeviceErrorKind, Operation, Request, Result, WriteFlags, ZeroFlags,
};
use crate::sync::Ordering;

/// Most pages of a batch.
const BATCH_PAGES: usize = 512;
/// Most bytes of one request to the backing.
const REQUEST_BYTES_MAX: usize = 1 << 20;

/// Memory of cleaning, kept from batch to batch.
#[derive(Default)]
pub(super) struct Scratch {
    data: Vec<u8>,
}

/// Neighbours that one request writes.
struct Run {
    first: u64,
    /// Their bytes in the scratch; none for zeroes.
    bytes: Option<Range<usize>>,
    pages: u64,
}

/// Writes to the backing under way; dropping them ends them.
struct Passages<'a> {
    traffic: &'a Traffic,
    begun: Vec<Passage>,
}

impl Drop for Passages<'_> {
    fn drop(&mut self) {
        self.begun.iter().for_each(|passage| {
            self.traffic.end(passage);
        });
    }
}

impl Core {
    /// Writes all dirty pages to the backing, and flushes it. Damaged ones stay, and those that
    /// wait for a commit: the backing never has a part of a group.
    pub(super) fn clean_all(&self) -> Result<()> {
        let mut done = Ok(());
        for number in 0..self.shards.count() {
            let mut from = 0;
            loop {
                let mut dirty = Vec::new();
                from = self.shards.lock(number).dirty_from(from, BATCH_PAGES, &mut dirty);
                if dirty.is_empty() {
                    break;
                }
                match self.clean_until_done(dirty) {
                    Err(error) if error.kind() == DeviceErrorKind::Corrupt => done = Err(error),
                    other => other?,
                }
            }
        }
        if self.traffic.needs_flush() || !self.written.lock().is_empty() {
            self.flush_backing()?;
        }
        done
    }

    /// Cleans `pages`, those that other writes to the backing keep busy too, but not those that
    /// wait for a commit.
    pub(super) fn clean_until_done(&self, mut pages: Vec<Found>) -> Result<()> {
        loop {
            let cleaned = self.clean(pages.clone(), &mut self.begin_batch());
            // A worker that waits for the end of a batch.
            self.waker.wake_another();
            cleaned?;
            pages.retain(|found| self.shard(found.page).can_be_cleaned(found));
            if pages.is_empty() {
                return Ok(());
            }
            self.region.relax();
        }
    }

    /// Writes those of `pages` that are still dirty to the backing, and flushes it. Passes over
    /// pages that another write to the backing keeps busy. Returns how many it cleaned.
    pub(super) fn clean(&self, pages: Vec<Found>, scratch: &mut Scratch) -> Result<usize> {
        if pages.is_empty() {
            return Ok(0);
        }
        let result = self.try_to_clean(pages, scratch);
        if let Err(error) = &result {
            self.ledger.record(None, error);
        }
        result
    }

    fn try_to_clean(&self, mut pages: Vec<Found>, scratch: &mut Scratch) -> Result<usize> {
        pages.sort_unstable_by_key(|found| found.page);
        let _passages = self.begin_passages(&mut pages);
        let (runs, damage) = self.load(&mut pages, scratch)?;
        if !pages.is_empty() {
            self.write_runs(&runs, &scratch.data)?;
            self.flush_backing()?;
            self.counters.add(Counter::CoreWrites, pages.len() as u64);
            self.conclude_clean(&pages)?;
        }
        damage.map_or(Ok(pages.len()), Err)
    }

    /// Begins writes to the buckets of `pages`, and drops pages whose buckets are busy.
    fn begin_passages(&self, pages: &mut Vec<Found>) -> Passages<'_> {
        let mut passages = Passages { traffic: &self.traffic, begun: Vec::new() };
        let mut busy = Vec::new();
        for bucket in Traffic::buckets(pages.iter().map(|found| found.page)) {
            let passage = self.traffic.begin(bucket);
            if Traffic::began_alone(&passage) {
                passages.begun.push(passage);
            } else {
                self.traffic.end(&passage);
                busy.push(bucket);
            }
        }
        pages.retain(|found| busy.binary_search(&Traffic::bucket(found.page)).is_err());
        passages
    }

    /// Copies `pages`, which are in order, out of their slots, neighbours next to each other, and
    /// drops those that are not to be cleaned any more, or damaged: the error of the last of these.
    fn load(
        &self,
        pages: &mut Vec<Found>,
        scratch: &mut Scratch,
    ) -> Result<(Vec<Run>, Option<DeviceError>)> {
        scratch.data.resize(pages.len() * PAGE, 0);
        let (mut runs, mut filled): (Vec<Run>, usize) = (Vec::new(), 0);
        let (mut kept, mut damage) = (Vec::with_capacity(pages.len()), None);
        for found in pages.drain(..) {
            let bytes = filled..filled + PAGE;
            let is_whole = self.copy_out(&found, &mut scratch.data[bytes.clone()])?;
            // After the copy: until then the slot was this version's.
            if !self.shard(found.page).can_be_cleaned(&found) {
                continue;
            }
            if !is_whole {
                self.damaged.fetch_add(1, Ordering::Relaxed);
                damage = Some(damaged(&found));
                continue;
            }
            let bytes = (!found.zero).then_some(bytes);
            filled += if found.zero { 0 } else { PAGE };
            add_to_runs(&mut runs, found.page, bytes);
            kept.push(found);
        }
        *pages = kept;
        Ok((runs, damage))
    }

    fn write_runs(&self, runs: &[Run], data: &[u8]) -> Result<()> {
        let request = |run: &Run| {
            let (offset, len) = (run.first * PAGE_BYTES, run.pages * PAGE_BYTES);
            let zeroes = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
            Request::new(match &run.bytes {
                Some(bytes) => {
                    let (data, flags) = (&data[bytes.clone()], WriteFlags::default());
                    Operation::Write { offset, data, flags }
                }
                None => Operation::WriteZeroes { offset, len, flags: zeroes },
            })
        };
        let mut requests: Vec<_> = runs.iter().map(request).collect();
        self.backing.submit(&mut requests);
        requests.iter_mut().try_for_each(|request| request.take_result().unwrap_or(Ok(())))
    }

    /// The backing has flushed the bytes of `pages`: stores the verdicts of those that still stand.
    ///
    /// A slot may have been taken for another version meanwhile: for that one the verdict means
    /// nothing.
    pub(super) fn conclude_clean(&self, pages: &[Found]) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        let stands = |found: &&Found| self.shard(found.page).cleaned(found);
        let standing: Vec<&Found> = pages.iter().filter(stands).collect();
        for found in &standing {
            let at = self.places.header(found.slot) + VERDICT_OFFSET;
            let verdict = clean_verdict(self.salt, found.slot, found.version);
            self.region.store_u64(at, verdict)?;
            self.region.write_back(at, 8)?;
        }
        if !standing.is_empty() {
            self.region.fence()?;
        }
        Ok(())
    }
}

fn add_to_runs(runs: &mut Vec<Run>, page: u64, bytes: Option<Range<usize>>) {
    if let Some(run) = runs.last_mut()
        && run.first + run.pages == page
        && run.bytes.is_some() == bytes.is_some()
        && run.bytes.as_ref().is_none_or(|bytes| bytes.len() < REQUEST_BYTES_MAX)
    {
        run.pages += 1;
        if let (Some(all), Some(bytes)) = (&mut run.bytes, bytes) {
            all.end = bytes.end;
        }
        return;
    }
    runs.push(Run { first: page, bytes, pages: 1 });
}
