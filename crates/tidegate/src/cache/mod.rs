//! A persistent cache of pages of 4 KiB in front of a slower device.
//!
//! Invariants:
//! 1. A write of a page goes to a slot of its own, with a header that certifies itself; one fence
//!    makes both durable. The slot of the version before is used again only after that fence.
//! 2. The newest version of a page counts: in the index, after a crash, and on the way to the
//!    backing.
//! 3. The newest version of a page leaves the medium only after all older versions durably did, so
//!    that no older version comes back.
//! 4. A page is clean only if the backing has flushed its bytes.
//! 5. The only durable copy of a write is never given up before another one is durable.
//! 6. A failure of the backing loses nothing: dirty pages stay, and are written again. A flush
//!    fails only if the backing may have lost writes that went around the cache, or if the pool
//!    itself failed.
//!
//! Rules for threads that work on a page:
//! - A thread holds the page's lock (`locks`) while it changes the page's place in the index. A
//!   reader without the lock checks that the lock's version has not changed. No thread holds a lock
//!   while the backing works.
//! - The page's bucket in `traffic` counts the writes to the backing that are under way.
//! - The lock of the page's shard guards the index; no thread waits while it holds that lock.
//!
//! Owners, and the direction of calls. Each owner has its own fields, and calls only later ones:
//!
//! - `Core`, the requests: each is routed, and then reads (`read`), writes (`write`) or goes around
//!   the cache (`bypass`). `choices` applies settings, `worker` runs the background;
//! - `router` decides: the IO class of a request, its mode, whether it is admitted, whether memory
//!   or backing is cheaper, and whether failures of the memory make it pass through;
//! - `background` works beside requests: `Cleaners` clean pages and make free slots, `Fills` cache
//!   pages that were read, and `Background` resizes and purges;
//! - `pages` has the index by shards, the locks of pages and the groups of atomic flush. Its
//!   `Writer` merges parts of pages and stores batches in free slots;
//! - `store` has the slots in persistent memory: layout, headers, lanes, batches, records;
//! - `backing` has the device below: writes under way, writes not flushed, failures, pace.
//!
//! Beside the owners: `start` takes requests, `recover` opens a pool, [`check`] verifies one,
//! `resize` begins a change of size, `span` splits bytes into pages, `tier` and `counters` report,
//! and `policy/` has the decisions without I/O.

mod background;
mod backing;
mod bypass;
pub mod check;
mod choices;
mod counters;
mod engine;
mod error;
#[cfg(any(test, feature = "test-support"))]
#[doc(hidden)]
pub mod fuzzing;
mod pages;
pub mod policy;
mod read;
mod recover;
mod resize;
mod router;
mod span;
mod start;
mod store;
#[cfg(all(test, not(loom)))]
mod tests;
mod tier;
mod worker;
mod write;

use std::sync::Arc;

use background::Background;
use backing::{Backing, Caller};
use pages::Pages;
use pages::writer::Writer;
use parking_lot::Mutex;
use router::Router;
use smallvec::SmallVec;
use store::Store;

pub use engine::{CODE, CacheEngine};
pub use error::CacheError;
pub use recover::Recovered;
pub use router::mode;
pub use store::header::{Binding, CacheHeader, CacheOptions, create};
pub use store::layout;
pub use tier::{check_atomic_mode, check_mode};

use crate::device::{
    AsyncRequest, Attempt, BlockDevice, BlockDeviceExt, Context, DeviceError, Extent, Geometry,
    Operation, Result, ZeroFlags, in_whole_blocks,
};
use crate::pmem::{PmemError, Region};
use crate::stats::{RequestKind, Requests};
use crate::sync::Ordering;
use crate::tier::background::{Work, Workers};
use choices::Choices;
use counters::{Counter, Tally};
use policy::cost::{Kind, Place};
use router::mode::Mode;
use router::{Misses, Route};
use span::bytes_of;
use span::{Content, ZERO_PAGE, pages_of, pieces};
use store::layout::PAGE;
use worker::Worker;

/// Number of words of page locks, as a power of two.
const LOCKS_LOG2: u32 = 14;

/// A list with an entry for each page of a request. Short ones are on the stack, and so allocate no
/// memory.
type Few<T> = SmallVec<[T; 4]>;

/// Result of stores to the memory.
type PmemResult = std::result::Result<(), PmemError>;

/// Options of a [`CacheDevice`].
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools)]
pub struct CacheDeviceOptions {
    /// Start no threads: a request that finds no free slot makes free slots.
    pub no_thread: bool,
    /// Start no threads: a scheduler runs [`CacheDevice::background`], and waiting writers call
    /// [`Region::relax`](crate::pmem::Region::relax).
    pub is_scheduled: bool,
    /// Value in place of the pool's setting `clean-from-pct`.
    pub clean_from_pct: Option<u32>,
    /// Number of slots to keep free in each shard; one in a hundred unless set.
    pub keep_free: Option<u32>,
    /// Write another backing's dirty pages to this one: it is a copy, or that one by another name.
    pub adopt_foreign: bool,
    /// Another program wrote to the backing since this pool cached it: clean pages are given up.
    pub backing_changed: bool,
    /// The backing serves this percentage of the requests that the setting `cost` may give to it;
    /// `None` leaves that to measurements.
    pub backing_share_pct: Option<u32>,
    /// After a crash the pages are as they were at a flush, except for FUA writes: the writes that
    /// one flush covers are there as a whole or not at all. Writes are durable at the next flush,
    /// and the mode is `wb` or `wo`.
    pub atomic_flush: bool,
}

impl CacheDeviceOptions {
    /// Returns whether the device starts threads.
    fn has_threads(&self) -> bool {
        !self.no_thread && !self.is_scheduled
    }

    /// Returns the number of background threads.
    fn threads(&self) -> u32 {
        if self.has_threads() { background::clean::CLEANERS } else { 0 }
    }
}

/// A block device over a cache and a backing device.
///
/// ```
/// use std::sync::Arc;
/// use tidegate::cache::{self, Binding, CacheDevice, CacheDeviceOptions, CacheOptions};
/// use tidegate::device::memory::MemoryDevice;
/// use tidegate::device::{BlockDeviceExt, WriteFlags};
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

/// Options of a write, and its tally.
#[derive(Debug, Clone, Copy)]
struct Ask<'a> {
    /// Force unit access: durable when acknowledged.
    fua: bool,
    /// Zeroes keep their space on the backing.
    keeps_space: bool,
    /// Zeroes are refused if the backing would have to write them.
    fast_only: bool,
    /// The IO class.
    class: u8,
    /// Counts of the write so far.
    tally: &'a Tally,
}

impl<'a> Ask<'a> {
    /// Returns the options of a write of data.
    fn of_write(fua: bool, class: u8, tally: &'a Tally) -> Self {
        Self { fua, keeps_space: false, fast_only: false, class, tally }
    }
}

/// The owners of a cache, shared by requests and workers. Requests run here: each one is routed,
/// and then reads and writes pages.
struct Core {
    store: Arc<Store>,
    backing: Arc<Backing>,
    pages: Arc<Pages>,
    writer: Arc<Writer>,
    background: Background,
    router: Router,
    choices: Mutex<Choices>,
    requests: Requests,
}

impl CacheDevice {
    /// Opens the cache in `region` over `backing`, which `binding` names, and recovers it.
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
        let works = (0..options.threads()).map(|_| Worker(Arc::clone(&core)));
        let workers = Workers::start("cache", Arc::clone(&core.pages.waker), works)
            .map_err(CacheError::Thread)?;
        Ok(Self { core, workers, recovered })
    }

    /// Returns the background work of a device without threads, for a scheduler that runs it beside
    /// requests.
    pub fn background(&self) -> impl Work + use<> {
        Worker(Arc::clone(&self.core))
    }

    /// Returns the findings of recovery when the cache was opened.
    pub fn recovered(&self) -> Recovered {
        self.recovered
    }

    /// Returns the mode.
    pub fn mode(&self) -> Mode {
        self.core.router.mode()
    }

    /// Changes the mode, for requests from now on, and for the next open. Dirty pages stay dirty
    /// until they are cleaned; every mode handles dirty pages.
    ///
    /// # Errors
    /// The memory failed, or the mode does not support atomic flush.
    pub fn set_mode(&self, mode: Mode) -> std::result::Result<(), CacheError> {
        if self.core.pages.groups.is_some() && !mode.writes_back() {
            return Err(CacheError::NotAtomic { mode });
        }
        let mut header = self.core.store.header.lock();
        header.mode = mode;
        header.write(&self.core.store.region)?;
        self.core.router.mode.store(mode.code(), Ordering::SeqCst);
        Ok(())
    }

    /// Writes all dirty pages to the backing and flushes it, while requests go on. With atomic
    /// flush, pages that no flush covered yet stay dirty.
    ///
    /// # Errors
    /// The backing failed; another call tries again.
    pub fn clean_all(&self) -> Result<()> {
        self.core.background.cleaners.clean_all()
    }

    /// Stops the background threads, and writes all dirty pages to the backing, as after a flush.
    ///
    /// # Errors
    /// The memory or the backing failed; another call tries again.
    pub fn shutdown(&self) -> Result<()> {
        self.stop_thread();
        self.core.pages.commit_groups()?;
        self.core.background.cleaners.clean_all()?;
        self.core.pages.void_dead();
        Ok(())
    }

    fn stop_thread(&self) {
        self.core.background.resizing.stop();
        self.workers.stop();
        // Writers that wait for a background thread make free slots by themselves now.
        self.core.pages.notify_all();
    }
}

impl Drop for CacheDevice {
    fn drop(&mut self) {
        // The data in the cache is durable; with atomic flush, up to the last flush.
        self.stop_thread();
    }
}

/// Returns the kind of `operation` for the router; only reads and writes have one.
fn kind_of(operation: &Operation<'_>) -> Option<Kind> {
    match operation {
        Operation::Read { .. } => Some(Kind::Read),
        Operation::Write { .. } => Some(Kind::Write),
        _ => None,
    }
}

impl Core {
    /// Routes a request that runs to its end on this thread.
    fn take(&self, kind: Option<Kind>, range: (u64, u64)) -> Result<Route> {
        self.router.route(0, kind, range).inspect(|route| self.router.take_turn(route))
    }

    /// Runs `operation`, by the route `routed` if it has been routed already.
    fn run(&self, operation: &mut Operation<'_>, routed: Option<Route>) -> Result<()> {
        let (kind, range) = (kind_of(operation), operation.range());
        let route = || routed.map_or_else(|| self.take(kind, range), Ok);
        match *operation {
            Operation::Read { ref mut buf, .. } => self.read(&route()?, buf),
            Operation::Write { data, flags, .. } => self.write(&route()?, data, flags.fua),
            Operation::Flush => self.flush(),
            Operation::Discard { .. } => self.discard(&route()?),
            Operation::WriteZeroes { flags, .. } => self.write_zeroes(&route()?, flags),
            Operation::Status { offset, len, most, ref mut extents } => {
                **extents = self.status(offset, len, most)?;
                Ok(())
            }
        }
    }

    /// Commits the earlier writes, with atomic flush. Flushes the backing if it has unflushed
    /// writes. Fails if the backing reported meanwhile that it may have lost such writes, or if a
    /// dirty page was found damaged.
    fn flush(&self) -> Result<()> {
        drop(self.requests.begin(RequestKind::Flush, 0));
        self.pages.commit_groups()?;
        if self.backing.passes_flush_on() {
            self.pages.flush_backing(Caller::Client)?;
        }
        self.backing.ledger.report()
    }

    /// Runs a read or a write as [`BlockDevice::attempt`] does.
    fn attempt(&self, operation: &mut Operation<'_>, route: &Route) -> Attempt {
        if !route.needs_cache_alone || route.place == Some(Place::Backing) {
            return Attempt::WouldBlock;
        }
        let _under_way = self.router.by_cost.begin();
        let done = match operation {
            Operation::Read { buf, .. } => self.attempt_read(route, buf),
            Operation::Write { data, flags, .. } => self.attempt_write(route, data, flags.fua),
            _ => Attempt::WouldBlock,
        };
        if matches!(done, Attempt::Done(Ok(()))) {
            self.router.take_turn(route);
            self.router.admission.note_hit(&route.request);
        }
        done
    }

    fn read(&self, route: &Route, buf: &mut [u8]) -> Result<()> {
        self.backing.pace.note_request();
        let running = self.requests.begin(RequestKind::Read, buf.len() as u64);
        let _under_way = self.router.by_cost.begin();
        self.read_routed(route, buf, &running)
    }

    /// Writes in the route's mode, or around the cache if that is quicker.
    fn write(&self, route: &Route, data: &[u8], fua: bool) -> Result<()> {
        self.backing.pace.note_request();
        let _running = self.requests.begin(RequestKind::Write, data.len() as u64);
        if data.is_empty() {
            return Ok(());
        }
        let _under_way = self.router.by_cost.begin();
        let (tally, began_ns) = (Tally::default(), route.began_ns());
        let content = Content::of(route.request.offset_bytes, data);
        let ask = Ask::of_write(fua, route.class, &tally);
        if route.place == Some(Place::Backing) {
            self.pages.counters.add(Counter::WritesByCost, 1);
            self.bypass(&content, Ask { fua: true, ..ask })?;
        } else {
            self.write_admitted(route, &content, ask)?;
        }
        self.router.note_write_cost(route, began_ns);
        self.pages.counters.count_write(route.class, &tally, &route.pages());
        Ok(())
    }

    /// Makes the bytes of a request zero. Zeroes that keep their space are stored as data, because
    /// a slot without data becomes a hole of the backing. So they are never fast.
    fn write_zeroes(&self, route: &Route, flags: ZeroFlags) -> Result<()> {
        let (bytes, ZeroFlags { fua, may_unmap, fast_only }) = (route.bytes(), flags);
        let len = bytes.end - bytes.start;
        self.backing.geometry.check_zeroes(bytes.start, len, flags)?;
        if fast_only && !may_unmap {
            return Err(DeviceError::not_fast(bytes.start, len));
        }
        self.backing.pace.note_request();
        let _running = self.requests.begin(RequestKind::Zero, len);
        let (class, tally) = (route.class, Tally::default());
        let ask = Ask { fua, keeps_space: !may_unmap, fast_only, class, tally: &tally };
        pieces(bytes, u64::MAX).try_for_each(|bytes| {
            let part_len = usize::try_from(bytes.end - bytes.start).unwrap_or(PAGE);
            let data = (!span::is_whole(&bytes)).then(|| &ZERO_PAGE[..part_len]);
            route.mode.write(self, &Content { bytes, data }, ask)
        })?;
        self.pages.counters.count_write(class, &tally, &route.pages());
        Ok(())
    }

    /// Makes the whole pages of the request zero; with atomic flush, only pages that are cached.
    fn discard(&self, route: &Route) -> Result<()> {
        self.backing.pace.note_request();
        let _running = self.requests.begin(RequestKind::Zero, route.request.len_bytes);
        // Not counted: a discard is no write, as in Open CAS.
        let tally = Tally::default();
        let ask = Ask::of_write(false, route.class, &tally);
        let mut whole = pieces(route.bytes(), u64::MAX).filter(span::is_whole);
        whole.try_for_each(|bytes| match self.pages.groups {
            Some(_) => self.zero_cached(span::pages_in(&bytes), ask),
            None => route.mode.write(self, &Content { bytes, data: None }, ask),
        })
    }

    /// Returns the extents of a range. If it has a dirty page, the whole range counts as data.
    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        self.backing.geometry.check(offset, len)?;
        let pages = pages_of(offset, len);
        if pages.clone().any(|page| self.pages.find(page).is_some_and(|found| found.dirty)) {
            return Ok(vec![Extent::data(offset, len)]);
        }
        let bytes = span::bytes_of(&pages);
        let found = self.backing.device.status(bytes.start, bytes.end - bytes.start, most)?;
        let within = |it: Extent| {
            let start = it.offset.max(offset);
            let end = (it.offset + it.len).min(offset + len);
            (start < end).then(|| Extent { offset: start, len: end - start, ..it })
        };
        let block_bytes = self.backing.geometry.block_bytes;
        let whole = in_whole_blocks(found.into_iter().filter_map(within), block_bytes);
        if whole.is_empty() {
            // The backing's answer ends inside the first block: the block has parts of both kinds.
            let len = u64::from(block_bytes);
            return Ok(vec![Extent::data(offset, len)]);
        }
        Ok(whole)
    }

    /// Writes `content` in the route's mode. If the request is not admitted, pages that are not
    /// cached are written around the cache.
    fn write_admitted(&self, route: &Route, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        if route.misses != Misses::IfAdmitted {
            return route.mode.write(self, content, ask);
        }
        let (bytes, pages) = (&content.bytes, content.pages());
        if self.admits(route)? {
            route.mode.write(self, content, ask)?;
            self.router.admission.note_cached(pages);
            return Ok(());
        }
        let mut from = pages.start;
        while from < pages.end {
            let is_cached = self.pages.find(from).is_some();
            let continues = |page: &u64| self.pages.find(*page).is_some() == is_cached;
            let run =
                from..(from + 1..pages.end).find(|page| !continues(page)).unwrap_or(pages.end);
            let of_run = bytes_of(&run);
            let part = bytes.start.max(of_run.start)..bytes.end.min(of_run.end);
            let content = content.part(part);
            if is_cached {
                route.mode.write(self, &content, ask)?;
            } else {
                self.bypass(&content, ask)?;
            }
            from = run.end;
        }
        Ok(())
    }
}

impl BlockDevice for CacheDevice {
    /// Returns the size of the backing, in blocks of the pool's block size.
    fn geometry(&self) -> Geometry {
        self.core.backing.geometry
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.core.run(operation, None)
    }

    /// Writes into free slots, reads cached pages, and flushes if the backing need not take part.
    /// Every other operation would block.
    fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        let core = &self.core;
        core.backing.pace.note_request();
        match operation {
            Operation::Read { offset, buf: [] } => {
                return Attempt::Done(core.backing.geometry.check(*offset, 0));
            }
            Operation::Read { .. } | Operation::Write { .. } => {}
            Operation::Flush if !core.pages.commits_many() && !core.backing.passes_flush_on() => {
                return Attempt::Done(core.flush());
            }
            _ => return Attempt::WouldBlock,
        }
        match core.router.route(context.queue, kind_of(operation), operation.range()) {
            Ok(route) => core.attempt(operation, &route),
            Err(error) => Attempt::Done(Err(error)),
        }
    }

    fn start(self: Arc<Self>, request: AsyncRequest) {
        self.start_request(request);
    }
}
