//! Cleaning: writes dirty pages to the backing.
//!
//! A batch is sorted by page, copied out, written, and flushed once. Then each page that is still
//! the newest version gets its verdict. The verdict is a hint that spares the next open work: after
//! a crash before it is durable, the page is only written once more.
//!
//! For a page with a record, only the blocks with the record's lines are written if the backing
//! takes such blocks and has the rest of the page. If the page under the record is dirty, or the
//! blocks of the backing are larger, the whole page is written: the record over the page under it
//! or, if there is none in the cache, over the backing's bytes, which the batch reads before. That
//! undoes no other write to the page: no write around the cache begins while the record is dirty,
//! and an overlapping write through the cache leaves its page dirty.
//!
//! Several threads may clean at once, but never the same page: a batch claims the buckets of its
//! pages in [`Traffic`] before it copies the pages, and until it ends.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::cache::backing::traffic::{Passage, Traffic};
use crate::cache::backing::{Caller, Failure};
use crate::cache::counters::Counter;
use crate::cache::pages::Pages;
use crate::cache::pages::index::Found;
use crate::cache::pages::read::damaged;
use crate::cache::policy::batch::BatchSize;
use crate::cache::store::layout::{ALL_LINES, PAGE, PAGE_BYTES};
use crate::cache::store::record::{self, blocks_of};
use crate::device::waits;
use crate::device::{
    self, DeviceError, DeviceErrorKind, Operation, Request, Result, WriteFlags, ZeroFlags,
};
use crate::sync::Ordering;
use crate::tier::clock::now_ns;
use crate::tier::ledger::Failed;

/// The result of a batch. The error says whether the backing or the pool failed.
type Cleaned<T> = std::result::Result<T, Failure>;

/// Number of cleaning threads: one copies the next batch while another one's is at the backing.
pub(in crate::cache) const CLEANERS: u32 = 2;
/// Maximum size of one request to the backing, in bytes.
const REQUEST_BYTES_MAX: usize = 1 << 20;

/// Buffers for cleaning, kept from batch to batch.
#[derive(Default)]
pub(in crate::cache) struct Scratch {
    data: Vec<u8>,
    /// Pages of the backing, for records to be put over.
    bases: Vec<u8>,
}

/// Cleans pages and makes free slots, on the threads of the cache and on threads of requests.
pub(in crate::cache) struct Cleaners {
    pub(in crate::cache) pages: Arc<Pages>,
    scratches: [Mutex<Scratch>; CLEANERS as usize],
    /// Held while a batch is written to the backing and flushed. Two batches at once would take
    /// twice as long, and a writer would wait for both.
    turn: Mutex<()>,
    /// Held while pages are cleaned ahead of need, which only one thread does at a time.
    pub(in crate::cache) ahead: Mutex<()>,
    batch: Mutex<BatchSize>,
}

impl Cleaners {
    /// Returns idle cleaners of `pages`.
    pub(in crate::cache) fn new(pages: Arc<Pages>) -> Self {
        Self {
            pages,
            scratches: Default::default(),
            turn: Mutex::default(),
            ahead: Mutex::default(),
            batch: Mutex::default(),
        }
    }

    /// Returns the buffers for a batch, or `None` if other threads use all buffers.
    pub(in crate::cache) fn try_lock(&self) -> Option<MutexGuard<'_, Scratch>> {
        self.scratches.iter().find_map(Mutex::try_lock)
    }

    /// Returns the maximum number of pages of the next batch.
    pub(in crate::cache) fn batch_pages(&self) -> usize {
        self.batch.lock().pages()
    }

    /// Cleans the dirty pages among `pages`. Must not be called with atomic flush, which keeps some
    /// pages dirty. At one moment during the call each page is clean or not cached: from then on
    /// the backing has all bytes that were written to the page before the call.
    ///
    /// A version that is replaced while it waits is not written. The version that replaces it is
    /// still dirty then, and contains the parts of the page that were written before.
    pub(in crate::cache) fn clean_pages(&self, pages: &Range<u64>) -> Result<()> {
        let mut pages: Vec<u64> = pages.clone().collect();
        loop {
            let dirty = |page: &u64| self.pages.find(*page).filter(|found| found.dirty);
            let dirty: Vec<Found> = pages.iter().filter_map(dirty).collect();
            if dirty.is_empty() {
                return Ok(());
            }
            pages = dirty.iter().map(|found| found.page).collect();
            self.clean_until_done(dirty)?;
        }
    }

    /// Adds up to `most` other dirty pages from the clusters of `pages` to `pages`. The backing
    /// takes adjacent pages as one request.
    pub(in crate::cache) fn add_clusters(&self, pages: &mut Vec<Found>, most: usize) {
        let cluster = self.pages.sharding.cluster;
        if cluster.is_page() {
            return;
        }
        pages.sort_unstable_by_key(|found| found.page);
        let mut numbers: Vec<u64> = pages.iter().map(|found| cluster.number(found.page)).collect();
        numbers.dedup();
        let is_named = |page: &u64| pages.binary_search_by_key(page, |found| found.page).is_ok();
        let others = numbers.into_iter().flat_map(|number| cluster.pages_of(number));
        let others = others.filter(|page| !is_named(page));
        let dirty = others.filter_map(|page| {
            let shard = self.pages.shard(page);
            shard.find(page).filter(|found| shard.can_be_cleaned(found))
        });
        let dirty: Vec<Found> = dirty.take(most).collect();
        pages.extend(dirty);
    }

    pub(in crate::cache) fn lock_cleaning(&self) -> MutexGuard<'_, Scratch> {
        loop {
            match self.try_lock() {
                Some(scratch) => return scratch,
                None => self.pages.store.region.relax(),
            }
        }
    }

    /// Writes all dirty pages to the backing, and flushes it. Damaged pages stay dirty, and so do
    /// pages that wait for a commit: the backing must never have a part of a group. The call ends
    /// even if writers go on: a page may stay dirty if it is written again meanwhile.
    pub(in crate::cache) fn clean_all(&self) -> Result<()> {
        let mut done = Ok(());
        for number in 0..self.pages.shards.count() {
            let mut from = 0;
            loop {
                let (mut dirty, most) = (Vec::new(), self.batch_pages());
                from = self.pages.shards.lock(number).dirty_from(from, most, &mut dirty);
                if dirty.is_empty() {
                    break;
                }
                self.add_clusters(&mut dirty, most);
                match self.clean_until_done(dirty) {
                    Err(error) if error.kind() == DeviceErrorKind::Corrupt => done = Err(error),
                    other => other?,
                }
            }
        }
        if self.pages.backing.traffic.needs_flush() || !self.pages.backing.written.lock().is_empty()
        {
            self.pages.flush_backing_recorded()?;
        }
        done
    }

    /// Cleans `pages`, without those waiting for a commit. Waits for other writes to the backing.
    pub(in crate::cache) fn clean_until_done(&self, mut pages: Vec<Found>) -> Result<()> {
        loop {
            self.clean(pages.clone(), &mut self.lock_cleaning())?;
            pages.retain(|found| self.pages.shard(found.page).can_be_cleaned(found));
            if pages.is_empty() {
                return Ok(());
            }
            self.pages.store.region.relax();
        }
    }

    /// Writes the pages among `pages` that are still dirty to the backing, and flushes it. Skips
    /// pages that another write to the backing keeps busy. Returns how many pages it cleaned.
    pub(in crate::cache) fn clean(
        &self,
        pages: Vec<Found>,
        scratch: &mut Scratch,
    ) -> Result<usize> {
        if pages.is_empty() {
            return Ok(0);
        }
        self.pages.backing.apart_from_flushes(|| self.try_to_clean(pages, scratch))
    }

    fn try_to_clean(&self, mut pages: Vec<Found>, scratch: &mut Scratch) -> Cleaned<usize> {
        pages.sort_unstable_by_key(|found| found.page);
        let _passages = self.begin_passages(&mut pages);
        let (runs, damage) = self.load(&mut pages, scratch)?;
        if !pages.is_empty() {
            self.write_batch(&runs, &scratch.data, &pages)?;
            self.pages.conclude_clean(&pages)?;
        }
        damage.map_or(Ok(pages.len()), |damage| Err(damage.into()))
    }

    /// Begins writes to the buckets of the sorted `pages`, and drops pages whose buckets are busy.
    fn begin_passages(&self, pages: &mut Vec<Found>) -> Passages<'_> {
        let announced: Arc<[u64]> = pages.iter().map(|found| found.page).collect();
        self.pages.backing.traffic.announce(&announced);
        let mut passages =
            Passages { traffic: &self.pages.backing.traffic, announced, begun: Vec::new() };
        let mut busy = Vec::new();
        for bucket in Traffic::buckets(pages.iter().map(|found| found.page)) {
            let passage = self.pages.backing.traffic.begin_cleaning(bucket);
            if Traffic::began_alone(&passage) {
                passages.begun.push(passage);
            } else {
                self.pages.backing.traffic.end(&passage);
                busy.push(bucket);
            }
        }
        pages.retain(|found| busy.binary_search(&Traffic::bucket(found.page)).is_err());
        passages
    }

    /// Copies the sorted `pages` out of their slots into `scratch`, adjacent pages next to each
    /// other. Drops pages that need no cleaning any more, and damaged ones. Returns the runs to
    /// write, and the error of the last damaged page.
    fn load(
        &self,
        pages: &mut Vec<Found>,
        scratch: &mut Scratch,
    ) -> Cleaned<(Vec<Run>, Option<DeviceError>)> {
        self.read_bases(pages, &mut scratch.bases).map_err(below)?;
        device::resize(&mut scratch.data, pages.len() * PAGE)?;
        let mut bases = scratch.bases.chunks(PAGE);
        let (mut runs, mut filled): (Vec<Run>, usize) = (Vec::new(), 0);
        let (mut kept, mut damage) = (Vec::with_capacity(pages.len()), None);
        for found in pages.drain(..) {
            let to = &mut scratch.data[filled..filled + PAGE];
            let lines = self.load_page(&found, &mut bases, to)?;
            // Checked after the copy: if it holds, the slot had this version until here.
            if !self.pages.shard(found.page).can_be_cleaned(&found) {
                continue;
            }
            let Some(lines) = lines else {
                self.pages.damaged.fetch_add(1, Ordering::Relaxed);
                damage = Some(damaged(&found));
                continue;
            };
            for run in record::runs(lines) {
                let offset = found.page * PAGE_BYTES + run.start as u64;
                let bytes = filled + run.start..filled + run.end;
                add_to_runs(&mut runs, offset, run.len() as u64, (!found.zero).then_some(bytes));
            }
            filled += if found.zero { 0 } else { PAGE };
            kept.push(found);
        }
        *pages = kept;
        Ok((runs, damage))
    }

    /// Reads the backing's bytes of the pages among `pages` that have a record over no cached page,
    /// in order, if the backing cannot take the lines of a record by themselves.
    fn read_bases(&self, pages: &[Found], bases: &mut Vec<u8>) -> Result<()> {
        let needs_base = |found: &&Found| {
            found.record && found.base.is_none() && !self.pages.backing.takes_blocks()
        };
        let records: Vec<&Found> = pages.iter().filter(needs_base).collect();
        device::resize(bases, records.len() * PAGE)?;
        let read = |(found, buf): (&&Found, _)| {
            Request::new(Operation::Read { offset: found.page * PAGE_BYTES, buf })
        };
        let requests: Vec<_> = records.iter().zip(bases.chunks_mut(PAGE)).map(read).collect();
        self.pages.backing.submit(requests, Counter::CoreReadErrors)?;
        self.pages.count_each(Counter::CoreReads, records.into_iter());
        Ok(())
    }

    /// Copies the page of `found` to `page`. Returns the lines that must be written to the backing,
    /// or `None` if the checksum does not match or the slot holds another version by now.
    fn load_page<'a>(
        &self,
        found: &Found,
        bases: &mut impl Iterator<Item = &'a [u8]>,
        page: &mut [u8],
    ) -> Result<Option<u64>> {
        if !found.record {
            return Ok(self.pages.copy_out(found, page)?.then_some(ALL_LINES));
        }
        let takes_blocks = self.pages.backing.takes_blocks();
        let mut is_whole = !takes_blocks;
        match found.under() {
            Some(under) => {
                if !self.pages.copy_out(&under, page)? {
                    return Ok(None);
                }
                is_whole |= under.dirty;
            }
            None if takes_blocks => {}
            None => page.copy_from_slice(bases.next().unwrap_or_default()),
        }
        let Some(record) = self.pages.store.copy_record(found)? else { return Ok(None) };
        record.put_into(page);
        let block_bytes = self.pages.backing.device.geometry().block_bytes;
        Ok(Some(if is_whole { ALL_LINES } else { blocks_of(record.lines, block_bytes) }))
    }

    /// Writes `runs`, which belong to `pages`, and flushes the backing, in turn with other batches.
    fn write_batch(&self, runs: &[Run], data: &[u8], pages: &[Found]) -> Cleaned<()> {
        let _turn = self.pages.lock_slow(&self.turn);
        // Before the first write: a flush that fails from now on may lose the pages.
        let since = self.pages.backing.flushes.moment();
        let _waiting = waits::begin("a cleaner of the cache", "the backing");
        let began_ns = now_ns();
        self.write_runs(runs, data).map_err(below)?;
        self.pages.count_each(Counter::CoreWrites, pages.iter());
        self.pages.flush_backing_since(since, Caller::Other)?;
        self.batch.lock().see(pages.len(), now_ns().saturating_sub(began_ns));
        Ok(())
    }

    fn write_runs(&self, runs: &[Run], data: &[u8]) -> Result<()> {
        let request = |run: &Run| {
            let (offset, len) = (run.offset, run.len);
            let zeroes = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
            Request::new(match &run.bytes {
                Some(bytes) => {
                    let (data, flags) = (&data[bytes.clone()], WriteFlags::default());
                    Operation::Write { offset, data, flags }
                }
                None => Operation::WriteZeroes { offset, len, flags: zeroes },
            })
        };
        let requests: Vec<_> = runs.iter().map(request).collect();
        self.pages.backing.submit(requests, Counter::CoreWriteErrors)
    }
}

/// Returns the failure of a read or write of the backing.
fn below(error: DeviceError) -> Failure {
    Failure::Work(Failed::Below(error))
}

/// Adjacent bytes that one request writes.
struct Run {
    /// Offset on the backing.
    offset: u64,
    /// The range of the bytes in the scratch; `None` for zeroes.
    bytes: Option<Range<usize>>,
    len: u64,
}

/// Writes to the backing that are under way. Dropping it ends them.
struct Passages<'a> {
    traffic: &'a Traffic,
    announced: Arc<[u64]>,
    begun: Vec<Passage>,
}

impl Drop for Passages<'_> {
    fn drop(&mut self) {
        self.begun.iter().for_each(|passage| {
            self.traffic.end(passage);
        });
        self.traffic.withdraw(&self.announced);
    }
}

fn add_to_runs(runs: &mut Vec<Run>, offset: u64, len: u64, bytes: Option<Range<usize>>) {
    if let Some(run) = runs.last_mut()
        && run.offset + run.len == offset
        && run.bytes.is_some() == bytes.is_some()
        && run.bytes.as_ref().is_none_or(|bytes| bytes.len() < REQUEST_BYTES_MAX)
    {
        run.len += len;
        if let (Some(all), Some(bytes)) = (&mut run.bytes, bytes) {
            all.end = bytes.end;
        }
        return;
    }
    runs.push(Run { offset, bytes, len });
}
