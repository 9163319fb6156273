//! A persistent cache of pages of 4 KiB in front of a slower device.
//!
//! Invariants:
//! 1. A write of a page goes to a slot of its own, with a header that certifies itself; one fence
//!    makes both durable. The slot of the version before is used again only after that fence.
//! 2. The newest version of a page counts: in the index, after a crash, and on the way to the
//!    backing.
//! 3. The newest version of a page leaves the medium only after all older ones durably did, so that
//!    none of them comes back.
//! 4. A page is clean only if the backing has flushed its bytes.
//! 5. The only durable copy of a write is never given up before another one is durable.
//! 6. A backing that fails loses nothing: dirty pages stay, and are written again. A flush fails
//!    only where the backing may have lost writes that went around the cache, or the pool itself
//!    failed.
//!
//! Which thread may do what with a page:
//! - its lock (`locks`) is held while its place in the index changes; a reader without the lock
//!   looks whether the lock's version stood still. No lock is held while the backing works;
//! - its bucket in `traffic` says which writes to the backing are under way;
//! - the lock of its shard guards the index, and nothing waits under it.
//!
//! Map: [`CacheDevice`] the requests, `queue` those of one queue; `classes` their IO classes,
//! `admission` which of them are cached; `mode/` what each mode does with them; `span` their pages;
//! `store` pages into slots, `merge` and `record` parts of pages, `content` what of them changes,
//! `read` out of slots or the backing, `fill` keeping what was read, `evict` free slots, `purge`
//! all of them, `clean` dirty pages to the backing, `cleaner` and `pace` which of them and when,
//! `cluster` and `neighbours` pages together; `bypass` writes around the cache, `fallback` when all
//! do, `by_cost` where the backing is quicker; `group` atomic flush; `background`; `recover`
//! opening, `resize` another size; `index`, `table` and `orders` what is where and goes first,
//! `lane`, `traffic`; `tier` and `tally` what is counted; `layout` and `header` the bytes,
//! [`check`] their verification; `policy/` the decisions, and `choices` which of them users made.

mod background;
mod backing;
mod bypass;
pub mod check;
mod choices;
mod engine;
mod error;
#[cfg(any(test, feature = "test-support"))]
#[doc(hidden)]
pub mod fuzzing;
mod pages;
pub mod policy;
mod queue;
mod read;
mod recover;
mod router;
mod span;
mod start;
mod store;
mod tally;
#[cfg(all(test, not(loom)))]
mod tests;
mod tier;

use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;

pub use engine::{CODE, CacheEngine};
pub use error::CacheError;
pub use recover::Recovered;
pub use router::mode;
pub use store::header::{Binding, CacheHeader, CacheOptions, create};
pub use store::layout;

use crate::device::waits;
use crate::device::{
    AsyncRequest, Attempt, BlockDevice, Context, DeviceError, Extent, Geometry, Operation, Result,
    WriteFlags, ZeroFlags, in_whole_blocks,
};
use crate::pmem::{PmemError, Region};
use crate::stats::{RequestKind, Requests};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::tier::background::{Waker, Work, Workers};
use crate::tier::ledger::{Failed, Ledger};
use crate::tier::set_locks::{SetLock, SetLocks};
use crate::tier::version_locks::{VersionGuard, VersionLocks};
use background::Background;
use background::clean::{Cleaners, Scratch};
use background::fill::Fills;
use background::pace::Pace;
use background::resize::Resizing;
use backing::traffic::Traffic;
use choices::Choices;
use pages::cluster::Sharding;
use pages::content::Comparing;
use pages::group::Groups;
use pages::index::{Found, Shard, Usage};
use queue::Queue;
use router::admission::Admission;
use router::by_cost::ByCost;
use router::classes::IoClasses;
use router::fallback::Fallback;
use router::mode::Mode;
use span::{Content, ZERO_PAGE, pages_of, pieces};
use store::lane::Lanes;
use store::layout::{PAGE, whole_slot};
use tally::Tally;
use tier::{Counter, Counters};

/// Number of words of page locks, as a power of two.
const LOCKS_LOG2: u32 = 14;

/// What a request has one of for each page: on the stack where these are few, so that small
/// requests allocate no memory.
type Few<T> = SmallVec<[T; 4]>;

/// Of stores to the memory.
type PmemResult = std::result::Result<(), PmemError>;

/// How a [`CacheDevice`] is to work.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools)]
pub struct CacheDeviceOptions {
    /// No threads: requests that find no free slot make some.
    pub no_thread: bool,
    /// In place of the pool's setting `clean-from-pct`.
    pub clean_from_pct: Option<u32>,
    /// Keep this many slots of a shard free; one in a hundred unless set.
    pub keep_free: Option<u32>,
    /// Write the dirty pages of another backing to this one: it is that backing by another name, or
    /// a copy.
    pub adopt_foreign: bool,
    /// Another program wrote to the backing since this pool was before it: clean pages are given
    /// up.
    pub backing_changed: bool,
    /// The backing serves this share, in percent, of what it may serve with the setting `cost`,
    /// whatever is measured.
    pub backing_share_pct: Option<u32>,
    /// After a crash the pages are as they were at a flush, but for FUA writes: what one flush
    /// covers is there as a whole or not at all. Writes are durable at the next flush, and the mode
    /// is `wb` or `wo`.
    pub atomic_flush: bool,
}

impl CacheDeviceOptions {
    /// Number of threads in the background.
    fn threads(&self) -> u32 {
        if self.no_thread { 0 } else { background::clean::CLEANERS }
    }
}

/// A block device over a cache and a backing device.
///
/// ```
/// use std::sync::Arc;
/// use tidegate::cache::{self, Binding, CacheDevice, CacheDeviceOptions, CacheOptions};
/// use tidegate::device::memory::MemoryDevice;
/// use tidegate::device::{BlockDevice, WriteFlags};
/// use tidegate::pmem::Region;
///
/// let region = Arc::new(Region::anonymous(1 << 20)?);
/// cache::create(&region, &CacheOptions::default())?;
/// let backing = Arc::new(MemoryDevice::new(4096, 1024)?);
/// let binding = Binding { identity: 1, name: "memory".into(), pages: 1024 };
/// let options = CacheDeviceOptions::default();
/// let device = CacheDevice::open(region, backing.clone(), binding, options)?;
/// device.write(0, &[3; 4096], WriteFlags::default())?; // Durable in the cache, with one fence.
/// device.shutdown()?; // The backing has it too.
/// let mut page = [0; 4096];
/// backing.read(0, &mut page)?;
/// assert_eq!(page, [3; 4096]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CacheDevice {
    core: Arc<Core>,
    workers: Workers,
    recovered: Recovered,
}

/// Where a request comes from.
#[derive(Debug, Clone, Copy)]
struct Origin {
    /// The client's queue.
    queue: u16,
    /// The IO class.
    class: u8,
}

/// What a write asks for beside its data.
#[derive(Debug, Clone, Copy)]
struct Ask<'a> {
    /// Force unit access: durable when acknowledged.
    fua: bool,
    /// Zeroes keep their space on the backing.
    keeps_space: bool,
    /// Zeroes that the backing would have to write are refused.
    fast_only: bool,
    from: Origin,
    /// What it did so far.
    tally: &'a Tally,
}

impl<'a> Ask<'a> {
    /// That of a write of data.
    fn of_write(fua: bool, from: Origin, tally: &'a Tally) -> Self {
        Self { fua, keeps_space: false, fast_only: false, from, tally }
    }
}

/// What requests and the background share.
struct Core {
    region: Arc<Region>,
    header: Mutex<CacheHeader>,
    salt: u64,
    /// Where the engine's first byte lies in the region.
    data_offset: u64,
    /// Where slots are; how many there are now the header says.
    places: store::layout::Places,
    backing: Arc<dyn BlockDevice>,
    geometry: Geometry,
    shards: SetLocks<Shard>,
    sharding: Sharding,
    locks: VersionLocks,
    lanes: Lanes,
    /// With atomic flush.
    groups: Option<Groups>,
    traffic: Traffic,
    ledger: Ledger,
    cleaners: Cleaners,
    fills: Fills,
    /// Pages that the backing was given in mode wt, which the next flush of it makes clean.
    written: Mutex<Vec<Found>>,
    /// A [`Mode`] by its code.
    mode: AtomicU32,
    pace: Pace,
    by_cost: ByCost,
    admission: Admission,
    fallback: Fallback,
    choices: Mutex<Choices>,
    /// The granularity is `record`.
    makes_records: AtomicBool,
    classes: IoClasses,
    comparing: Comparing,
    /// Slots of a shard that are kept free for writers.
    reserve: AtomicU32,
    resizing: Resizing,
    /// What is dirty stays in the pool: flushes end there.
    keeps_dirty: AtomicBool,
    /// Pages whose data did not match their checksums.
    damaged: AtomicU64,
    requests: Requests,
    counters: Counters,
    waker: Arc<Waker>,
}

impl CacheDevice {
    /// Opens the cache in `region` as a device over `backing`, which `binding` names, and so
    /// recovers it.
    ///
    /// # Errors
    /// [`CacheError`]: the pool is damaged, or holds dirty pages that are not for this backing.
    pub fn open(
        region: Arc<Region>,
        backing: Arc<dyn BlockDevice>,
        binding: Binding,
        options: CacheDeviceOptions,
    ) -> std::result::Result<Self, CacheError> {
        let (core, recovered) = recover::open(region, backing, binding, options)?;
        let core = Arc::new(core);
        let works = (0..options.threads()).map(|_| Background(Arc::clone(&core)));
        let workers =
            Workers::start("cache", Arc::clone(&core.waker), works).map_err(CacheError::Thread)?;
        Ok(Self { core, workers, recovered })
    }

    /// The background work, for a scheduler that runs it beside requests where the device has no
    /// thread.
    pub fn background(&self) -> impl Work + use<> {
        Background(Arc::clone(&self.core))
    }

    /// What was found in the cache when it was opened.
    pub fn recovered(&self) -> Recovered {
        self.recovered
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        self.core.mode()
    }

    /// Changes the mode, for requests that come from now on, and for the next open. Dirty pages
    /// stay dirty until they are cleaned; every mode takes care of them.
    ///
    /// # Errors
    /// The memory failed, or the mode does not go with atomic flush.
    pub fn set_mode(&self, mode: Mode) -> std::result::Result<(), CacheError> {
        if self.core.groups.is_some() && !mode.writes_back() {
            return Err(CacheError::NotAtomic { mode });
        }
        let mut header = self.core.header.lock();
        header.mode = mode;
        header.write(&self.core.region)?;
        self.core.mode.store(mode.code(), Ordering::SeqCst);
        Ok(())
    }

    /// Writes all dirty pages to the backing and flushes it, while requests go on. With atomic
    /// flush those that no flush covered yet stay.
    ///
    /// # Errors
    /// The backing failed; another call tries again.
    pub fn clean_all(&self) -> Result<()> {
        self.core.clean_all()
    }

    /// Writes all dirty pages to the backing, as after a flush, and stops the thread.
    ///
    /// # Errors
    /// As for [`clean_all`](Self::clean_all).
    pub fn shutdown(&self) -> Result<()> {
        self.stop_thread();
        self.core.commit_groups()?;
        self.core.clean_all()
    }

    fn stop_thread(&self) {
        self.core.resizing.stop();
        self.workers.stop();
        // Writers that wait for the thread make free slots by themselves now.
        self.core.notify_all();
    }
}

impl Drop for CacheDevice {
    fn drop(&mut self) {
        // The data in the cache is durable; with atomic flush, what a flush covered.
        self.stop_thread();
    }
}

impl Core {
    fn mode(&self) -> Mode {
        Mode::of_code(self.mode.load(Ordering::SeqCst)).unwrap_or_default()
    }

    fn shard_of(&self, page: u64) -> usize {
        self.sharding.shard_of(page)
    }

    /// The number of the shard that has `slot`.
    fn shard_of_slot(&self, slot: u32) -> usize {
        whole_slot(slot) as usize % self.shards.count()
    }

    /// Locks the shard of `page`.
    fn shard(&self, page: u64) -> SetLock<'_, Shard> {
        self.shards.lock(self.shard_of(page))
    }

    fn find(&self, page: u64) -> Option<Found> {
        self.shard(page).find(page)
    }

    /// Number of slots.
    fn slots(&self) -> u32 {
        self.header.lock().places.slots()
    }

    fn reserve(&self) -> u32 {
        self.reserve.load(Ordering::Relaxed)
    }

    /// Locks `pages`, in the order in which all threads do.
    fn lock_pages(&self, pages: impl Iterator<Item = u64>) -> Few<VersionGuard<'_>> {
        let mut pages: Few<u64> = pages.collect();
        pages.sort_unstable_by_key(|page| self.locks.rank(*page));
        pages.dedup_by(|one, other| self.locks.same_bucket(*one, *other));
        pages.into_iter().map(|page| self.locks.lock(page, || self.region.relax())).collect()
    }

    /// Shows the shards to `see`, one at a time: requests wait for one of them at most.
    fn each_shard(&self, mut see: impl FnMut(&mut Shard)) {
        (0..self.shards.count()).for_each(|number| see(&mut self.shards.lock(number)));
    }

    fn usage(&self) -> Usage {
        let all = (0..self.shards.count()).map(|number| self.shards.lock(number).usage());
        all.fold(Usage::default(), Usage::plus)
    }

    fn notify_all(&self) {
        (0..self.shards.count()).for_each(|number| self.shards.lock(number).notify());
    }

    /// A flush has to go on to the backing: that has writes that it has not flushed.
    fn passes_flush_on(&self) -> bool {
        if self.keeps_dirty.load(Ordering::SeqCst) {
            return self.traffic.needs_own_flush();
        }
        self.traffic.needs_flush() || !self.written.lock().is_empty()
    }

    /// Flushes the backing. What was written through to it before is clean then.
    fn flush_backing(&self) -> std::result::Result<(), Failed> {
        let written = std::mem::take(&mut *self.written.lock());
        let epoch = self.traffic.flush_begins();
        // Pages whose flush failed stay dirty, and are cleaned like all others.
        let _waiting = waits::begin("a flush of the cache", "the backing");
        let flushed = self.backing.flush().inspect_err(|_| {
            // The backing may have lost what was read of it before: none of that may be kept,
            // though a later flush succeeds.
            self.traffic.keep_nothing_read();
            self.counters.add(Counter::CoreWriteErrors, 1);
        });
        flushed.map_err(Failed::Below)?;
        self.traffic.flush_succeeded(epoch);
        Ok(self.conclude_clean(&written)?)
    }

    /// Flushes the backing, outside of a client's flush.
    fn flush_backing_recorded(&self) -> Result<()> {
        self.apart_from_flushes(|| self.flush_backing())
    }

    /// Does `work` with the backing outside of a client's flush. Where the backing fails, and
    /// acknowledged writes went around the cache that it had not flushed when the work began, the
    /// client's next flush fails too: a backing may tell only once that it lost them. All others
    /// are durable in the pool. Where the pool fails, the next flush does in any case.
    fn apart_from_flushes<T>(
        &self,
        work: impl FnOnce() -> std::result::Result<T, Failed>,
    ) -> Result<T> {
        let flushed = self.traffic.flushed();
        work().map_err(|failed| {
            self.ledger.write_back_failed(failed, self.traffic.has_bypassed_since(flushed))
        })
    }

    fn read(&self, queue: u32, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.geometry.check(offset, buf.len() as u64)?;
        self.pace.note_request();
        let running = self.requests.begin(RequestKind::Read, buf.len() as u64);
        let _under_way = self.by_cost.begin();
        let (from, behaviour) = self.sort(queue, (offset, buf.len() as u64), false);
        self.read_by_cost(behaviour, offset, buf, from, &running)
    }

    fn write(&self, queue: u32, offset: u64, data: &[u8], fua: bool) -> Result<()> {
        self.geometry.check_write(offset, data.len() as u64)?;
        self.pace.note_request();
        let _running = self.requests.begin(RequestKind::Write, data.len() as u64);
        if data.is_empty() {
            return Ok(());
        }
        let _under_way = self.by_cost.begin();
        let (from, behaviour) = self.sort(queue, (offset, data.len() as u64), true);
        let tally = Tally::default();
        let content = Content::of(offset, data);
        self.write_by_cost(behaviour, &content, Ask::of_write(fua, from, &tally))?;
        self.counters.count_write(from.class, &tally, &pages_of(offset, data.len() as u64));
        Ok(())
    }

    /// Zeroes that keep their space are stored as data: a slot without data becomes a hole of the
    /// backing. So they are never fast.
    fn write_zeroes(&self, queue: u32, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.geometry.check_zeroes(offset, len, flags)?;
        let ZeroFlags { fua, may_unmap, fast_only } = flags;
        if fast_only && !may_unmap {
            return Err(DeviceError::not_fast(offset, len));
        }
        self.pace.note_request();
        let _running = self.requests.begin(RequestKind::Zero, len);
        let (from, behaviour) = self.sort(queue, (offset, len), true);
        let tally = Tally::default();
        let ask = Ask { fua, keeps_space: !may_unmap, fast_only, from, tally: &tally };
        pieces(offset..offset + len, u64::MAX).try_for_each(|bytes| {
            let part_len = usize::try_from(bytes.end - bytes.start).unwrap_or(PAGE);
            let data = (!span::is_whole(&bytes)).then(|| &ZERO_PAGE[..part_len]);
            behaviour.write(self, &Content { bytes, data }, ask)
        })?;
        self.counters.count_write(from.class, &tally, &pages_of(offset, len));
        Ok(())
    }

    /// Makes the whole pages of `len` bytes at `offset` zero; with atomic flush only those that are
    /// cached.
    fn discard(&self, queue: u32, offset: u64, len: u64) -> Result<()> {
        self.geometry.check_write(offset, len)?;
        self.pace.note_request();
        let _running = self.requests.begin(RequestKind::Zero, len);
        let (from, behaviour) = self.sort(queue, (offset, len), true);
        // Not counted: a discard is no write, as in Open CAS.
        let tally = Tally::default();
        let ask = Ask::of_write(false, from, &tally);
        let mut whole = pieces(offset..offset + len, u64::MAX).filter(span::is_whole);
        whole.try_for_each(|bytes| match self.groups {
            Some(_) => self.zero_cached(span::pages_in(&bytes), ask),
            None => behaviour.write(self, &Content { bytes, data: None }, ask),
        })
    }

    /// Where the cache has a page of the range dirty, all of it counts as data.
    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        self.geometry.check(offset, len)?;
        let pages = pages_of(offset, len);
        if pages.clone().any(|page| self.find(page).is_some_and(|found| found.dirty)) {
            return Ok(vec![Extent { offset, len, hole: false, zero: false }]);
        }
        let bytes = span::bytes_of(&pages);
        let found = self.backing.status(bytes.start, bytes.end - bytes.start, most)?;
        let within = |it: Extent| {
            let start = it.offset.max(offset);
            let end = (it.offset + it.len).min(offset + len);
            (start < end).then(|| Extent { offset: start, len: end - start, ..it })
        };
        let block_bytes = self.geometry.block_bytes;
        let whole = in_whole_blocks(found.into_iter().filter_map(within), block_bytes);
        if whole.is_empty() {
            // The backing's answer ends inside the first block, which has parts of both kinds.
            let len = u64::from(block_bytes);
            return Ok(vec![Extent { offset, len, hole: false, zero: false }]);
        }
        Ok(whole)
    }
}

impl BlockDevice for CacheDevice {
    /// The size of the backing, in blocks of the pool's block size.
    fn geometry(&self) -> Geometry {
        self.core.geometry
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.core.read(0, offset, buf)
    }

    fn write(&self, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        self.core.write(0, offset, data, flags.fua)
    }

    /// Commits the writes before it, with atomic flush. Passes the flush on where writes reached
    /// the backing that it has not flushed, and fails where the backing told meanwhile that it may
    /// have lost such writes, or a dirty page was found damaged.
    fn flush(&self) -> Result<()> {
        drop(self.core.requests.begin(RequestKind::Flush, 0));
        self.core.commit_groups()?;
        if self.core.passes_flush_on() {
            self.core.flush_backing()?;
        }
        self.core.ledger.report()
    }

    fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.core.discard(0, offset, len)
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.core.write_zeroes(0, offset, len, flags)
    }

    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        self.core.status(offset, len, most)
    }

    /// Writes into free slots, reads of pages that are cached, and flushes that end here.
    fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        let core = &self.core;
        core.pace.note_request();
        let sort = |range, is_write| core.sort(context.queue, range, is_write);
        let range = operation.range();
        match operation {
            Operation::Read { offset, buf: [] } => Attempt::Done(core.geometry.check(*offset, 0)),
            Operation::Read { offset, buf } => match sort(range, false) {
                (from, it) if it.reads_hits() => {
                    let _under_way = core.by_cost.begin();
                    core.attempt_read_by_cost(*offset, buf, from)
                }
                _ => Attempt::WouldBlock,
            },
            Operation::Write { offset, data, flags } => match sort(range, true) {
                (from, it) if it.writes_back() => {
                    let _under_way = core.by_cost.begin();
                    let tally = Tally::default();
                    let ask = Ask::of_write(flags.fua, from, &tally);
                    core.attempt_write_by_cost(*offset, data, ask)
                }
                _ => Attempt::WouldBlock,
            },
            Operation::Flush if core.commits_many() => Attempt::WouldBlock,
            Operation::Flush if !core.passes_flush_on() => Attempt::Done(self.flush()),
            _ => Attempt::WouldBlock,
        }
    }

    fn start(self: Arc<Self>, request: AsyncRequest) {
        self.start_request(request);
    }
}
