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
//! A page that the backing refuses holds up no others: of a request that fails, each page is
//! written alone, and all pages that were written become clean.
//!
//! Several threads may clean at once, but never the same page: a batch claims the buckets of its
//! pages in [`Traffic`] before it copies the pages, and until it ends.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::cache::backing::traffic::{Passage, Traffic};
use crate::cache::backing::{Backing, Caller, Failure};
use crate::cache::counters::Counter;
use crate::cache::pages::Pages;
use crate::cache::pages::index::Found;
use crate::cache::pages::read::damaged;
use crate::cache::policy::batch::BatchSize;
use crate::cache::span::pieces;
use crate::cache::store::layout::{ALL_LINES, PAGE, PAGE_BYTES};
use crate::cache::store::record::{self, blocks_of};
use crate::device::waits;
use crate::device::{self, DeviceError, Operation, Request, Result, WriteFlags, ZeroFlags};
use crate::sync::{AtomicU64, Ordering};
use crate::tier::clock::now_ns;
use crate::tier::ledger::Failed;

/// The result of a step of a batch. The error says whether the backing or the pool failed.
type Stepped<T> = std::result::Result<T, Failure>;

/// Number of cleaning threads: one copies the next batch while another one's is at the backing.
pub(in crate::cache) const CLEANERS: u32 = 2;
/// Maximum size of one request to the backing, in bytes.
const REQUEST_BYTES_MAX: usize = 1 << 20;

/// Time that more fruitless batches than expected may take: a backing that is gone may make each
/// request wait, while one that refuses some pages answers at once.
const FRUITLESS_NS_MAX: u64 = 100_000_000;
/// Fruitless batches in a row that `clean_all` takes for a few bad pages.
const FRUITLESS_MAX: u32 = 2;

/// The result of cleaning pages.
#[derive(Default)]
pub(in crate::cache) struct Cleaned {
    /// The number of pages that were cleaned.
    pub(in crate::cache) count: usize,
    /// Pages that the backing refused, or that are damaged.
    failed: Vec<u64>,
    pub(in crate::cache) error: Option<DeviceError>,
}

impl Cleaned {
    /// Returns how many pages were cleaned.
    ///
    /// # Errors
    /// None was, and some could not be cleaned.
    fn some(self) -> Result<usize> {
        match self.error {
            Some(error) if self.count == 0 => Err(error),
            _ => Ok(self.count),
        }
    }

    /// Returns the error of the pages that could not be cleaned.
    fn all(self) -> Result<()> {
        self.error.map_or(Ok(()), Err)
    }

    fn add(&mut self, other: Self) {
        self.count += other.count;
        self.failed.extend(other.failed);
        self.error = self.error.take().or(other.error);
    }
}

/// Pages of a batch that cannot be cleaned, and the last errors.
#[derive(Default)]
struct Left {
    pages: Vec<u64>,
    refused: Option<DeviceError>,
    damaged: Option<DeviceError>,
}

impl Left {
    /// Leaves `page`, a read or write of which the backing refused with `error`.
    fn refuse(&mut self, page: u64, error: DeviceError) {
        self.pages.push(page);
        self.refused = Some(error);
    }

    /// Drops the pages that cannot be cleaned from `pages`.
    fn drop_from(&self, pages: &mut Vec<Found>) {
        if !self.pages.is_empty() {
            pages.retain(|found| !self.pages.contains(&found.page));
        }
    }
}

/// The last batches, if no page became clean by them.
pub(in crate::cache) struct Fruitless {
    spent_ns: u64,
    batches: u32,
    batches_max: u32,
}

impl Fruitless {
    /// Returns no batches; more than `batches_max` may be too many.
    pub(in crate::cache) fn new(batches_max: u32) -> Self {
        Self { spent_ns: 0, batches: 0, batches_max }
    }

    /// Runs `clean`, which cleans a batch, and adds it if the result `is_fruitless`.
    pub(in crate::cache) fn watch<T>(
        &mut self,
        clean: impl FnOnce() -> T,
        is_fruitless: impl FnOnce(&T) -> bool,
    ) -> T {
        let began_ns = now_ns();
        let done = clean();
        if is_fruitless(&done) {
            self.spent_ns += now_ns().saturating_sub(began_ns);
            self.batches += 1;
        } else {
            *self = Self::new(self.batches_max);
        }
        done
    }

    /// Returns whether to give up, because the backing may be gone.
    pub(in crate::cache) fn are_too_many(&self) -> bool {
        self.batches > self.batches_max && self.spent_ns > FRUITLESS_NS_MAX
    }
}

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
    /// How often no slot could be freed because cleaning failed.
    pub(super) stalls: AtomicU64,
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
            stalls: AtomicU64::new(0),
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
            self.clean_until_done(dirty).all()?;
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

    /// Writes all dirty pages to the backing, and flushes it. Pages that are damaged or that the
    /// backing refuses stay dirty, and so do pages that wait for a commit: the backing must never
    /// have a part of a group. The call ends even if writers go on: a page may stay dirty if it is
    /// written again meanwhile. It gives up if the backing takes nothing for a while.
    pub(in crate::cache) fn clean_all(&self) -> Result<()> {
        let (mut done, mut fruitless) = (Ok(()), Fruitless::new(FRUITLESS_MAX));
        for number in 0..self.pages.shards.count() {
            done = done.and(self.clean_shard(number, &mut fruitless));
            if fruitless.are_too_many() {
                return done;
            }
        }
        let Backing { traffic, written, .. } = &*self.pages.backing;
        let needs_flush = traffic.needs_flush() || !written.lock().is_empty();
        if needs_flush { done.and(self.pages.flush_backing_recorded()) } else { done }
    }

    /// Cleans the dirty pages of shard `number`, unless the backing takes nothing for a while.
    fn clean_shard(&self, number: usize, fruitless: &mut Fruitless) -> Result<()> {
        let (mut from, mut done) = (0, Ok(()));
        while !fruitless.are_too_many() {
            let (mut dirty, most) = (Vec::new(), self.batch_pages());
            from = self.pages.shards.lock(number).dirty_from(from, most, &mut dirty);
            if dirty.is_empty() {
                break;
            }
            self.add_clusters(&mut dirty, most);
            let clean = || self.clean_until_done(dirty);
            let is_fruitless = |it: &Cleaned| it.count == 0 && it.error.is_some();
            done = done.and(fruitless.watch(clean, is_fruitless).all());
        }
        done
    }

    /// Cleans `pages`, without those waiting for a commit. Waits for other writes to the backing.
    fn clean_until_done(&self, mut pages: Vec<Found>) -> Cleaned {
        let mut all = Cleaned::default();
        loop {
            all.add(self.clean_each(pages.clone(), &mut self.lock_cleaning()));
            pages.retain(|found| {
                !all.failed.contains(&found.page)
                    && self.pages.shard(found.page).can_be_cleaned(found)
            });
            if pages.is_empty() {
                return all;
            }
            self.pages.store.region.relax();
        }
    }

    /// Writes the pages among `pages` that are still dirty to the backing, and flushes it. Skips
    /// pages that another write to the backing keeps busy. Returns how many pages it cleaned.
    ///
    /// # Errors
    /// Some pages could not be cleaned, and none was.
    pub(in crate::cache) fn clean(
        &self,
        pages: Vec<Found>,
        scratch: &mut Scratch,
    ) -> Result<usize> {
        self.clean_each(pages, scratch).some()
    }

    /// Cleans `pages` like [`clean`](Self::clean), and also returns the pages that could not be
    /// cleaned. Records failures.
    fn clean_each(&self, pages: Vec<Found>, scratch: &mut Scratch) -> Cleaned {
        if pages.is_empty() {
            return Cleaned::default();
        }
        let numbers: Vec<u64> = pages.iter().map(|found| found.page).collect();
        let clean = || self.try_to_clean(pages, scratch);
        self.pages.backing.apart_from_flushes(clean).unwrap_or_else(|error| Cleaned {
            failed: numbers,
            error: Some(error),
            ..Cleaned::default()
        })
    }

    fn try_to_clean(&self, mut pages: Vec<Found>, scratch: &mut Scratch) -> Stepped<Cleaned> {
        pages.sort_unstable_by_key(|found| found.page);
        let _passages = self.begin_passages(&mut pages);
        let mut left = Left::default();
        let runs = self.load(&mut pages, scratch, &mut left)?;
        self.write_batch(&runs, &scratch.data, &mut pages, &mut left)?;
        self.pages.conclude_clean(&pages)?;
        let ledger = &self.pages.backing.ledger;
        let damaged = left.damaged.map(|it| ledger.write_back_failed(Failed::Own(it), false));
        let refused = left.refused.map(|it| ledger.write_back_failed(Failed::Below(it), false));
        Ok(Cleaned { count: pages.len(), failed: left.pages, error: damaged.or(refused) })
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
    /// other. Drops pages that need no cleaning any more, and those that it adds to `left`. Returns
    /// the runs to write.
    fn load(
        &self,
        pages: &mut Vec<Found>,
        scratch: &mut Scratch,
        left: &mut Left,
    ) -> Stepped<Vec<Run>> {
        while !self.read_bases(pages, &mut scratch.bases, left)? {
            left.drop_from(pages);
        }
        device::resize(&mut scratch.data, pages.len() * PAGE)?;
        let mut bases = scratch.bases.chunks(PAGE);
        let (mut runs, mut filled): (Vec<Run>, usize) = (Vec::new(), 0);
        let mut kept = Vec::with_capacity(pages.len());
        for found in pages.drain(..) {
            let to = &mut scratch.data[filled..filled + PAGE];
            let lines = self.load_page(&found, &mut bases, to)?;
            // Checked after the copy: if it holds, the slot had this version until here.
            if !self.pages.shard(found.page).can_be_cleaned(&found) {
                continue;
            }
            let Some(lines) = lines else {
                self.pages.damaged.fetch_add(1, Ordering::Relaxed);
                left.pages.push(found.page);
                left.damaged = Some(damaged(&found));
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
        Ok(runs)
    }

    /// Reads the backing's bytes of the pages among `pages` that have a record over no cached page,
    /// in order, if the backing cannot take the lines of a record by themselves. Returns `false` if
    /// some could not be read, which it adds to `left`.
    fn read_bases(&self, pages: &[Found], bases: &mut Vec<u8>, left: &mut Left) -> Result<bool> {
        let needs_base = |found: &&Found| {
            found.record && found.base.is_none() && !self.pages.backing.takes_blocks()
        };
        let records: Vec<&Found> = pages.iter().filter(needs_base).collect();
        device::resize(bases, records.len() * PAGE)?;
        let read = |(found, buf): (&&Found, _)| {
            Request::new(Operation::Read { offset: found.page * PAGE_BYTES, buf })
        };
        let requests: Vec<_> = records.iter().zip(bases.chunks_mut(PAGE)).map(read).collect();
        let failed = self.pages.backing.submit(requests, Counter::CoreReadErrors);
        let is_whole = failed.is_empty();
        for (index, error) in failed {
            left.refuse(records[index].page, error);
        }
        if is_whole {
            self.pages.count_each(Counter::CoreReads, records.into_iter());
        }
        Ok(is_whole)
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
    /// Moves pages that the backing refuses to `left`.
    fn write_batch(
        &self,
        runs: &[Run],
        data: &[u8],
        pages: &mut Vec<Found>,
        left: &mut Left,
    ) -> Stepped<()> {
        if pages.is_empty() {
            return Ok(());
        }
        let _turn = self.pages.lock_slow(&self.turn);
        // Before the first write: a flush that fails from now on may lose the pages.
        let since = self.pages.backing.flushes.moment();
        let _waiting = waits::begin("a cleaner of the cache", "the backing");
        let began_ns = now_ns();
        self.write_runs(runs, data, left);
        left.drop_from(pages);
        if pages.is_empty() {
            return Ok(());
        }
        self.pages.count_each(Counter::CoreWrites, pages.iter());
        self.pages.flush_backing_since(since, Caller::Other)?;
        if left.refused.is_none() {
            self.batch.lock().see(pages.len(), now_ns().saturating_sub(began_ns));
        }
        Ok(())
    }

    /// Writes `runs`; then, of each run that fails, every page alone, all at once. Adds the pages
    /// that fail alone to `left`.
    fn write_runs(&self, runs: &[Run], data: &[u8], left: &mut Left) {
        let mut alone = Vec::new();
        for (index, error) in self.submit_runs(runs, data) {
            match runs[index].pages() {
                pages if pages.len() == 1 => left.refuse(pages[0].page(), error),
                pages => alone.extend(pages),
            }
        }
        if alone.is_empty() {
            return;
        }
        for (index, error) in self.submit_runs(&alone, data) {
            left.refuse(alone[index].page(), error);
        }
    }

    /// Submits writes of `runs`. Returns the index and the error of each failed one.
    fn submit_runs(&self, runs: &[Run], data: &[u8]) -> Vec<(usize, DeviceError)> {
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

/// Adjacent bytes that one request writes.
struct Run {
    /// Offset on the backing.
    offset: u64,
    /// The range of the bytes in the scratch; `None` for zeroes.
    bytes: Option<Range<usize>>,
    len: u64,
}

impl Run {
    /// Returns the first page.
    fn page(&self) -> u64 {
        self.offset / PAGE_BYTES
    }

    /// Returns a run for each page.
    fn pages(&self) -> Vec<Self> {
        let pieces = pieces(self.offset..self.offset + self.len, 1);
        let run = |piece: Range<u64>| {
            let (from, len) = (piece.start - self.offset, piece.end - piece.start);
            let part = |bytes: &Range<usize>| {
                let start = bytes.start + usize::try_from(from).unwrap_or_default();
                start..start + usize::try_from(len).unwrap_or_default()
            };
            Self { offset: piece.start, bytes: self.bytes.as_ref().map(part), len }
        };
        pieces.map(run).collect()
    }
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
