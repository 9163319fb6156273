//! The cache before a backing that a crash tears too.
//!
//! One region holds both: the backing's blocks lie between the pool's first superblock and the
//! bytes of its engine, so that the pool can end at or before the end of the region. A write of the
//! backing is stored at once, and durable with the next flush of any thread: a crash before that
//! leaves any part of the write.
//!
//! Where the pool changes its size, the region stands for a file that is as long as the largest
//! pool. Behind a smaller pool the file holds other bytes: headers of pages that were cached once,
//! which count as soon as the pool takes them for its own.
//!
//! With atomic flush, a life is judged by the promise only if no group can fill the cache, and no
//! group was committed early in that life: a pool that shrinks commits early.
//!
//! There is no thread: a write that finds no free slot frees some, beside writes of other threads
//! and, if enabled, background work that the scheduler runs. Or such a write waits for that work.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tidegate::cache::check::check;
use tidegate::cache::layout::{ALL_LINES, SlotHeader};
use tidegate::cache::mode::Mode;
use tidegate::cache::{
    Binding, CacheDevice, CacheDeviceOptions, CacheHeader, CacheOptions, create,
};
use tidegate::device::{BlockDevice, Geometry, Operation, Result as DeviceResult};
use tidegate::pmem::Region;
use tidegate::pool::Superblock;
use tidegate::stats::{Collector, Value};
use tidegate::tier::background::{Step, Work};
use tidegate::tier::{Purged, Tier};
use uuid::Uuid;

use crate::context;
use crate::counted::{Counted, Requests};
use crate::log::text;
use crate::similar::Similar;
use crate::subject::{Alive, Subject};

const PAGE_BYTES: u64 = 4096;
/// Three pages of superblocks, two of cache headers, one of commit words, four of a chunk's head.
const FIXED_BYTES: u64 = 10 * 4096;
/// Headers of slots in a page.
const HEADERS_A_PAGE: u64 = 64;
/// Pages between the slots that a pool is created with and the slots that it grows by.
const GAP_PAGES: u64 = 4;
/// Offset of the backing: where a pool without a backing has its engine's first byte.
pub(crate) const BACKING_OFFSET: u64 = 8192;
/// The salt of the pool's headers.
const SALT: u64 = 2;
/// The version of headers behind the pool: newer than all of its own.
const FOREIGN_VERSION: u64 = 1 << 40;
/// Background steps after which the mode and the IO classes change.
const STEPS_OF_A_MODE: usize = 3;
/// The setting that holds a table of IO classes.
const CLASSES: &str = "io-classes";

/// A planted fault of the backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheFault {
    /// Nothing.
    None,
    /// Pages count as clean though the backing was not flushed.
    NoBackingFlush,
    /// The background does nothing.
    NoBackground,
}

/// A change that the background makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The mode.
    Mode,
    /// The IO classes.
    Classes,
    /// The size of the pool.
    Size,
    /// The pages in the cache: a purge gave some up.
    Purge,
    /// The pages in the cache, while no request was under way: the purge emptied the cache.
    QuietPurge,
}

/// How often the background changed something, by [`Change`].
#[derive(Debug, Default)]
struct Changes([AtomicU64; 5]);

impl Changes {
    fn count(&self, change: Change) {
        self.0[change as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// The cache over a backing in the same region.
#[allow(clippy::struct_excessive_bools, reason = "independent settings")]
pub struct CacheSubject {
    blocks: u64,
    block_bytes: u32,
    /// Block size of the backing.
    backing_block_bytes: u32,
    line_bytes: u32,
    slots: u64,
    fault: CacheFault,
    /// The first is the pool's; the background sets each in turn.
    modes: &'static [Mode],
    background: usize,
    /// Writes that find no free slot wait for the background.
    is_scheduled: bool,
    clean_from_pct: u32,
    keep_free: Option<u32>,
    /// Percent that the backing serves of the requests that it may serve by cost.
    backing_share_pct: Option<u32>,
    atomic_flush: bool,
    /// The setting `granularity`, where it is not the default.
    granularity: Option<&'static str>,
    /// Writes are compared with the cached content, and differ from it in few lines.
    by_content: bool,
    /// Tables of IO classes: the first is the pool's; the background goes through them in turn.
    tables: &'static [&'static str],
    /// Numbers of slots that the background gives the pool in turn.
    sizes: &'static [u64],
    /// The background purges the cache in turn.
    purges: bool,
    changes: Arc<Changes>,
    /// Devices of the running life.
    living: Mutex<Vec<Weak<CacheDevice>>>,
    /// Number of lives whose flushes were judged as atomic.
    atomic_lives: AtomicU64,
}

impl CacheSubject {
    /// Makes a device of `blocks` blocks of 4096 bytes behind a cache of `slots` slots.
    pub fn new(blocks: u64, slots: u64, modes: &'static [Mode], fault: CacheFault) -> Self {
        Self {
            blocks,
            block_bytes: 4096,
            backing_block_bytes: 4096,
            line_bytes: 4096,
            slots,
            fault,
            modes,
            background: 0,
            is_scheduled: false,
            clean_from_pct: 40,
            keep_free: None,
            backing_share_pct: None,
            atomic_flush: false,
            granularity: None,
            by_content: false,
            tables: &[],
            sizes: &[],
            purges: false,
            changes: Arc::default(),
            living: Mutex::default(),
            atomic_lives: AtomicU64::new(0),
        }
    }

    /// Returns how often the background made this change, in all lives so far.
    pub fn changes(&self, change: Change) -> u64 {
        self.changes.0[change as usize].load(Ordering::Relaxed)
    }

    /// Returns the number of lives so far whose flushes were judged as atomic.
    pub fn atomic_lives(&self) -> u64 {
        self.atomic_lives.load(Ordering::Relaxed)
    }

    /// Returns the number of groups that the devices of this life committed before a flush.
    fn early_commits(&self) -> u64 {
        let living = self.living.lock().unwrap_or_else(PoisonError::into_inner);
        living.iter().filter_map(Weak::upgrade).map(|device| early_commits_of(&device)).sum()
    }

    /// Sets the block size to `own` bytes, and the backing's to `backing` bytes. The number of
    /// blocks stays; together they are whole pages.
    #[must_use]
    pub fn with_block_bytes(self, own: u32, backing: u32) -> Self {
        Self { block_bytes: own, backing_block_bytes: backing, ..self }
    }

    /// Sets the size of clusters.
    #[must_use]
    pub fn with_line_bytes(self, line_bytes: u32) -> Self {
        Self { line_bytes, ..self }
    }

    /// Lets the scheduler run the device's background work beside requests.
    #[must_use]
    pub fn with_background(self) -> Self {
        Self { background: 1, ..self }
    }

    /// Makes writes that find no free slot wait for background work that the scheduler runs. It
    /// cleans the cache from `clean_from_pct` percent of dirty pages on.
    #[must_use]
    pub fn with_writers_that_wait(self, clean_from_pct: u32) -> Self {
        Self { background: 1, is_scheduled: true, clean_from_pct, ..self }
    }

    /// Makes the device evict pages while fewer than `slots` slots are free.
    #[must_use]
    pub fn keeping_free(self, slots: u32) -> Self {
        Self { keep_free: Some(slots), ..self }
    }

    /// Lets the backing serve `share_pct` percent of the requests that it may serve by cost.
    #[must_use]
    pub fn with_backing_share(self, share_pct: u32) -> Self {
        Self { backing_share_pct: Some(share_pct), ..self }
    }

    /// Turns atomic flush on.
    #[must_use]
    pub fn with_atomic_flush(self) -> Self {
        Self { atomic_flush: true, ..self }
    }

    /// Sets the setting `granularity`.
    #[must_use]
    pub fn with_granularity(self, granularity: &'static str) -> Self {
        Self { granularity: Some(granularity), ..self }
    }

    /// Makes the device store only the changed lines of blocks, which are few.
    #[must_use]
    pub fn by_content(self) -> Self {
        Self { by_content: true, ..self }
    }

    /// Wraps `device` as histories use it.
    fn seen(&self, device: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
        if self.by_content { Arc::new(Similar(device)) } else { device }
    }

    /// Sets tables of IO classes, values of the setting `io-classes`: the pool starts with the
    /// first, and the background sets each in turn.
    #[must_use]
    pub fn with_classes(self, tables: &'static [&'static str]) -> Self {
        Self { tables, ..self }
    }

    /// Makes the background resize the pool to these numbers of slots in turn.
    #[must_use]
    pub fn with_sizes(self, sizes: &'static [u64]) -> Self {
        Self { sizes, ..self }
    }

    /// Makes the background purge the cache in turn. A purge while no request is under way has to
    /// leave the cache empty, except with atomic flush, or the background panics.
    #[must_use]
    pub fn with_purges(self) -> Self {
        Self { purges: true, ..self }
    }

    fn backing_bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_bytes)
    }

    /// Returns the size of the pool with `slots` slots, including the backing.
    fn pool_bytes(&self, slots: u64) -> u64 {
        let of_chunk = self.slots.div_ceil(HEADERS_A_PAGE) + slots.min(self.slots);
        let grown = slots.saturating_sub(self.slots);
        let of_stripes =
            if grown > 0 { GAP_PAGES + grown.div_ceil(HEADERS_A_PAGE) + grown } else { 0 };
        self.backing_bytes() + FIXED_BYTES + PAGE_BYTES * (of_chunk + of_stripes)
    }

    /// Makes the pool in `region`, with the backing in it.
    fn make(&self, region: &Region) -> Result<(), String> {
        let (backing_bytes, pool_bytes) = (self.backing_bytes(), self.pool_bytes(self.slots));
        let pool = Region::anonymous(pool_bytes - backing_bytes).map_err(text)?;
        let Self { block_bytes, line_bytes, .. } = *self;
        let options =
            CacheOptions { uuid: Uuid::from_u128(7), salt: SALT, block_bytes, line_bytes };
        let header = create(&pool, &options).map_err(text)?;
        if u64::from(header.places.slots()) != self.slots {
            return Err(format!("{} slots, expected {}", header.places.slots(), self.slots));
        }
        let superblock = header.superblock;
        let mut bytes = vec![0; usize::try_from(superblock.data_bytes).unwrap_or_default()];
        pool.read(superblock.data_offset, &mut bytes).map_err(text)?;
        let data_offset = superblock.data_offset + backing_bytes;
        region.write(data_offset, &bytes).map_err(text)?;
        Superblock { data_offset, pool_bytes, ..superblock }.write(region).map_err(text)
    }

    /// Adds headers of zeroes with a later version where the pool has no headers yet.
    fn add_foreign_headers(&self, region: &Region) -> Result<(), String> {
        let largest = Region::anonymous(self.region_bytes()).map_err(text)?;
        self.make(&largest)?;
        let superblock = Superblock::read(&largest).map_err(text)?.superblock;
        superblock.resized(self.region_bytes()).map_err(text)?.write(&largest).map_err(text)?;
        let places = CacheHeader::read(&largest).map_err(text)?.places;
        let first = u32::try_from(self.slots).unwrap_or(u32::MAX);
        for slot in first..places.slots() {
            let page = u64::from(slot - first) % (self.backing_bytes() / PAGE_BYTES);
            let header = SlotHeader {
                page,
                version: FOREIGN_VERSION + u64::from(slot),
                lane: 0,
                batch: 0,
                group: 0,
                lines: ALL_LINES,
                over: 0,
                zero: true,
                dirty: true,
                data_check: 0,
            };
            region.write(places.header(slot), &header.encode(SALT, slot)).map_err(text)?;
        }
        Ok(())
    }

    /// Returns whether acknowledged writes are durable in every mode. A write whose IO class is
    /// full may bypass the cache.
    fn is_durable(&self) -> bool {
        let durable = [Mode::WriteBack, Mode::WriteOnly, Mode::WriteThrough];
        self.tables.is_empty() && self.modes.iter().all(|mode| durable.contains(mode))
    }

    /// Opens the device. One that `is_alive` may wait for background work.
    fn open_device(&self, region: &Arc<Region>, is_alive: bool) -> Result<CacheDevice, String> {
        let is_scheduled = self.is_scheduled && is_alive;
        let backing = Arc::new(Backing {
            region: Arc::clone(region),
            offset: BACKING_OFFSET,
            bytes: self.backing_bytes(),
            block_bytes: self.backing_block_bytes,
            volatile_cache: !self.is_durable(),
            flushes: self.fault != CacheFault::NoBackingFlush,
        });
        let options = CacheDeviceOptions {
            no_thread: !is_scheduled,
            is_scheduled,
            clean_from_pct: Some(self.clean_from_pct),
            keep_free: self.keep_free,
            backing_share_pct: self.backing_share_pct,
            atomic_flush: self.atomic_flush,
            ..CacheDeviceOptions::default()
        };
        CacheDevice::open(Arc::clone(region), backing, self.binding(), options).map_err(text)
    }

    fn binding(&self) -> Binding {
        let pages = self.backing_bytes() / PAGE_BYTES;
        Binding { identity: 2, name: "simulated".into(), pages }
    }
}

impl Subject for CacheSubject {
    fn create(&self, region: &Region) -> Result<(), String> {
        let scratch = Arc::new(Region::anonymous(self.region_bytes()).map_err(text)?);
        self.make(&scratch)?;
        let device = self.open_device(&scratch, false)?;
        device.set_mode(self.modes[0]).map_err(text)?;
        if let Some(granularity) = self.granularity {
            device.set("granularity", granularity).map_err(text)?;
        }
        // Never chosen by the clock: a seed gives one history.
        device.set("by-content", if self.by_content { "on" } else { "off" }).map_err(text)?;
        if let Some(table) = self.tables.first() {
            device.set(CLASSES, table).map_err(text)?;
        }
        drop(device);
        self.add_foreign_headers(&scratch)?;
        crate::log::copy(&scratch, region)
    }

    fn open(&self, region: &Arc<Region>) -> Result<Arc<dyn BlockDevice>, String> {
        Ok(self.seen(Arc::new(self.open_device(region, false)?)))
    }

    fn open_alive(&self, region: &Arc<Region>) -> Result<Alive, String> {
        let device = Arc::new(self.open_device(region, true)?);
        let mut living = self.living.lock().unwrap_or_else(PoisonError::into_inner);
        living.retain(|device| device.strong_count() > 0);
        living.push(Arc::downgrade(&device));
        drop(living);
        let requests = Arc::<Requests>::default();
        let background = |_| -> Box<dyn Work> {
            let (device, modes, tables) = (Arc::clone(&device), self.modes, self.tables);
            let changes = Arc::clone(&self.changes);
            let sizes = self.sizes.iter().map(|slots| self.pool_bytes(*slots)).collect();
            let work = device.background();
            let purges = self.purges.then(|| Arc::clone(&requests));
            let rests = self.fault == CacheFault::NoBackground;
            Box::new(Background {
                work,
                device,
                modes,
                tables,
                sizes,
                purges,
                rests,
                steps: 0,
                changes,
            })
        };
        let background = (0..self.background).map(background).collect();
        Ok(Alive { device: Arc::new(Counted { inner: self.seen(device), requests }), background })
    }

    fn background_threads(&self) -> usize {
        self.background
    }

    fn atomic_flush(&self) -> bool {
        // Three versions of each block fit into the part of the slots that groups may hold.
        let pages = self.backing_bytes() / PAGE_BYTES;
        let slots = self.sizes.iter().fold(self.slots, |one, other| one.min(*other));
        let has_ample_slots = 3 * pages * 8 < 7 * slots;
        let is_atomic = self.atomic_flush && has_ample_slots && self.early_commits() == 0;
        self.atomic_lives.fetch_add(is_atomic.into(), Ordering::Relaxed);
        is_atomic
    }

    fn fua_commits(&self) -> bool {
        u64::from(self.block_bytes) < PAGE_BYTES
    }

    fn tears(&self) -> bool {
        // These modes write to the backing, which tears.
        let around = [Mode::WriteAround, Mode::WriteInvalidate, Mode::PassThrough];
        let goes_around = !self.tables.is_empty() || self.backing_share_pct.is_some();
        goes_around || self.modes.iter().any(|mode| around.contains(mode))
    }

    fn check(&self, region: &Region) -> Result<(), String> {
        let findings = check(region).map_err(text)?.findings;
        if !findings.is_empty() {
            return Err(findings.join("; "));
        }
        let slots = u64::from(CacheHeader::read(region).map_err(text)?.places.slots());
        if slots == self.slots || self.sizes.contains(&slots) {
            return Ok(());
        }
        Err(format!("{slots} slots, expected {} or one of {:?}", self.slots, self.sizes))
    }

    fn check_as_crashed(&self, region: &Region) -> Result<(), String> {
        let mut findings = check(region).map_err(text)?.findings;
        // One result of a crash looks like damage: one wrong bit in a word of a slot's header or
        // data, or of a copy of a header.
        findings.retain(|finding| !finding.contains("one bit"));
        if findings.is_empty() { Ok(()) } else { Err(findings.join("; ")) }
    }

    fn region_bytes(&self) -> u64 {
        let largest = self.sizes.iter().fold(self.slots, |one, other| one.max(*other));
        self.pool_bytes(largest)
    }

    fn rounds_after_recovery(&self) -> u32 {
        3
    }
}

fn early_commits_of(device: &CacheDevice) -> u64 {
    let mut collector = Collector::default();
    device.metrics(&mut collector);
    let readings = collector.finish();
    let found = readings.iter().find(|it| it.metric.name == "cache_groups_committed_early");
    match found.map(|it| &it.value) {
        Some(Value::Whole(count)) => *count,
        // Without the counter nothing is judged, and the tests that ask for judged lives fail.
        _ => u64::MAX,
    }
}

/// Background work that also changes the mode, the IO classes and the size, and purges the cache.
struct Background<W> {
    device: Arc<CacheDevice>,
    work: W,
    modes: &'static [Mode],
    tables: &'static [&'static str],
    /// Sizes of the pool in bytes.
    sizes: Vec<u64>,
    /// Counts of the requests, if the background purges the cache.
    purges: Option<Arc<Requests>>,
    /// Whether the background does nothing.
    rests: bool,
    steps: usize,
    changes: Arc<Changes>,
}

impl<W> Background<W> {
    /// Counts `change` if it was made. Returns false if the change was refused.
    fn note<T, E>(&self, change: Change, made: &Result<T, E>) -> bool {
        if made.is_ok() {
            self.changes.count(change);
        }
        made.is_ok()
    }

    /// Sets `mode`. Returns false if the mode was refused.
    fn set_mode(&self, mode: Mode) -> bool {
        self.device.mode() == mode || self.note(Change::Mode, &self.device.set_mode(mode))
    }

    /// Sets the IO classes of this turn. Returns false if they were refused.
    fn set_classes(&self, turn: usize) -> bool {
        let changes = self.steps.is_multiple_of(STEPS_OF_A_MODE) && !self.tables.is_empty();
        let set = || self.device.set(CLASSES, self.tables[turn % self.tables.len()]);
        !changes || self.note(Change::Classes, &set())
    }

    /// Gives the pool its next size, before the step cleans. Returns false if the size was refused.
    fn resize(&self) -> bool {
        let turn = self.steps / STEPS_OF_A_MODE;
        let size = self.sizes.get(turn % self.sizes.len().max(1));
        let Some(size) = size.filter(|_| self.steps % STEPS_OF_A_MODE == 1) else { return true };
        context::set_resizing(true);
        let resized = self.device.resize(*size);
        context::set_resizing(false);
        self.note(Change::Size, &resized)
    }

    /// Purges the cache, before the step cleans. Returns false if the purge was refused.
    fn purge(&self) -> bool {
        let Some(requests) = &self.purges else { return true };
        if self.steps % STEPS_OF_A_MODE != 1 {
            return true;
        }
        let before = requests.quiet_after();
        context::set_purging(true);
        let purged = Tier::purge(&*self.device);
        context::set_purging(false);
        let Ok(Purged { freed_bytes, left_bytes }) = purged else { return false };
        let is_quiet = before.is_some() && requests.quiet_after() == before;
        if is_quiet && !self.has_atomic_flush() {
            assert_eq!(left_bytes, 0, "a purge beside no request leaves no page");
            self.changes.count(Change::QuietPurge);
        }
        if freed_bytes > 0 {
            self.changes.count(Change::Purge);
        }
        true
    }

    fn has_atomic_flush(&self) -> bool {
        self.device.state().details["atomic_flush"] == true
    }
}

impl<W: Work> Work for Background<W> {
    fn step(&mut self) -> Step {
        if self.rests {
            return Step::Sleep { wake_at_ns: None };
        }
        self.steps += 1;
        let turn = self.steps / STEPS_OF_A_MODE;
        let mode = self.modes[turn % self.modes.len()];
        // The region takes all stores here.
        if self.set_mode(mode) && self.set_classes(turn) && self.resize() && self.purge() {
            self.work.step()
        } else {
            Step::Stop
        }
    }

    fn has_work(&self) -> bool {
        self.work.has_work()
    }
}

/// Blocks behind the pool: a write is durable with the next flush of any thread.
struct Backing {
    region: Arc<Region>,
    offset: u64,
    bytes: u64,
    block_bytes: u32,
    volatile_cache: bool,
    flushes: bool,
}

impl BlockDevice for Backing {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: self.block_bytes,
            blocks: self.bytes / u64::from(self.block_bytes),
            preferred_bytes: 4096,
            read_only: false,
            atomic_block: false,
            volatile_cache: self.volatile_cache,
            fast_zero: false,
            keeps_data: true,
        }
    }

    fn run(&self, operation: &mut Operation<'_>) -> DeviceResult<()> {
        let mut forced = false;
        match *operation {
            Operation::Read { offset, ref mut buf } => {
                self.region.read(self.offset + offset, buf)?;
            }
            Operation::Write { offset, data, flags } => {
                self.region.write(self.offset + offset, data)?;
                forced = flags.fua;
            }
            Operation::Flush => forced = true,
            Operation::Discard { .. } => {}
            Operation::WriteZeroes { offset, len, flags } => {
                let zeroes = vec![0; usize::try_from(len).unwrap_or(0)];
                self.region.write(self.offset + offset, &zeroes)?;
                forced = flags.fua;
            }
            Operation::Status { .. } => operation.report_data(),
        }
        if !(forced && self.flushes) {
            return Ok(());
        }
        self.region.write_back(self.offset, self.bytes)?;
        Ok(self.region.fence()?)
    }
}
