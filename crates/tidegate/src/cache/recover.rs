//! Opens a pool, after a crash too: builds the index from the headers, and loses no data.
//!
//! 1. All headers are read. A header with a wrong check belongs to an unfinished write: its slot is
//!    free.
//! 2. The data of each lane's newest batch is compared with its checksum: only there can a crash
//!    have left a header without its data.
//! 3. The slots of the newest batches that count are written back and fenced: a process that was
//!    killed may have left them in the CPU's caches, and older versions are voided next. For the
//!    same reason the words that voided headers are written back.
//! 4. Older versions of a page, unfinished headers and data, and members of groups that no flush
//!    committed are voided, and fenced.
//!
//! A crash in between is harmless: steps 3 and 4 change nothing that counts.

use std::collections::{BTreeSet, HashMap};
use std::panic::resume_unwind;
use std::sync::Arc;

use parking_lot::Mutex;

use super::background::Background;
use super::background::clean::Cleaners;
use super::background::fill::Fills;
use super::background::resize::Resizing;
use super::backing::Backing;
use super::backing::flushes::Flushes;
use super::backing::pace::Pace;
use super::backing::traffic::Traffic;
use super::choices::Choices;
use super::counters::Counters;
use super::error::CacheError;
use super::pages::cluster::Sharding;
use super::pages::comparing::Comparing;
use super::pages::group::Groups;
use super::pages::index::{Found, Shard};
use super::pages::writer::Writer;
use super::pages::{Failures, Pages};
use super::policy::ReplacementEntry;
use super::router::Router;
use super::router::by_cost::ByCost;
use super::router::classes::{IoClasses, mode_against_groups};
use super::router::fallback::Fallback;
use super::store::Store;
use super::store::header::{Binding, CacheHeader, features_of};
use super::store::lane::{LANES, Lanes};
use super::store::layout::{
    ALL_PART_HEADERS, Decoded, HEADER, HEADER_BYTES, PAGE, PAGE_BYTES, PAGES_MAX, SlotHeader,
    VERDICT_OFFSET, VERSION, commit_offset, data_check, is_changed_split, is_one_bit_off, is_part,
    part_of, split_header, stored_bytes, units_of, whole_slot,
};
use super::{CacheDeviceOptions, Core, LOCKS_LOG2};
use crate::device::{BlockDevice, BlockDeviceExt, Geometry};
use crate::pmem::{ReadOnce, Region};
use crate::pool;
use crate::stats::Requests;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64};
use crate::tier::background::Waker;
use crate::tier::ledger::Ledger;
use crate::tier::set_locks::{Relax, SetLocks};
use crate::tier::version_locks::VersionLocks;

type Result<T> = std::result::Result<T, CacheError>;

/// Approximate number of clean pages that are compared with the backing.
const SAMPLES: u32 = 16;
/// Most headers that are read at once, as one run.
const HEADERS_AT_ONCE: usize = 64;
/// Most threads that read headers.
const THREADS_MAX: usize = 4;

/// Findings of recovery, when a cache was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Pages that the cache holds.
    pub pages: u64,
    /// Cached pages that the backing may lack.
    pub dirty_pages: u64,
    /// Headers and data of unfinished writes.
    pub unfinished: u64,
    /// Older versions of pages that were still there.
    pub older: u64,
    /// Pages that were written with atomic flush after the last flush: they do not count.
    pub uncommitted: u64,
    /// Clean pages that were given up, because the backing is another one or was changed.
    pub forgotten: u64,
    /// Lanes whose last batch has data that does not match its checksum. The pool cannot tell
    /// whether that write was acknowledged.
    pub doubtful_lanes: u64,
    /// Slots of such batches whose data differs from its checksum by one bit: most likely damage.
    pub changed: u64,
    /// Offset of the page of the first such slot.
    pub first_changed_offset: Option<u64>,
}

/// How the data of a slot compares with its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Data {
    /// The data matches its checksum.
    Whole,
    /// The data differs by one bit.
    OneBitOff,
    /// The data differs in any other way.
    Other,
}

/// The slots of a pool, for a pass over their headers.
#[derive(Clone, Copy)]
pub(super) struct Scan<'a> {
    pub(super) region: &'a Region,
    pub(super) header: &'a CacheHeader,
}

/// A slot and the content of its header.
pub(super) struct Scanned {
    pub(super) slot: u32,
    pub(super) decoded: Decoded,
    /// The slot's header says with one changed bit that the slot is split. That is true in any
    /// case: all parts are void before a split header is stored.
    pub(super) is_changed_split: bool,
}

impl Scan<'_> {
    /// Passes every slot to `see`, and keeps none in memory.
    pub(super) fn each(&self, mut see: impl FnMut(Scanned) -> Result<()>) -> Result<()> {
        let mut read_once = ReadOnce::new(self.region);
        self.each_chunk(|first, headers| {
            for (slot, header) in (first..).zip(headers) {
                self.show(slot, header, &mut see)?;
            }
            read_once
                .has_read(self.header.places.header(first), headers.as_flattened().len() as u64);
            Ok(())
        })
    }

    /// Passes the slots of shard `part`, and of every `step`th one behind it, to `see`, some at a
    /// time.
    fn each_of(
        &self,
        part: usize,
        step: usize,
        mut see: impl FnMut(&[Scanned]) -> Result<()>,
    ) -> Result<()> {
        let shards = self.header.shards;
        let is_own = |slot: u32| (slot % shards) as usize % step == part;
        let mut seen = Vec::with_capacity(HEADERS_AT_ONCE);
        self.each_chunk(|first, headers| {
            seen.clear();
            for (slot, header) in (first..).zip(headers).filter(|(slot, _)| is_own(*slot)) {
                self.show(slot, header, &mut |scanned| {
                    seen.push(scanned);
                    Ok(())
                })?;
            }
            see(&seen)
        })
    }

    /// Passes `slot`, which has the header `bytes`, to `see`, and then its parts if it is split.
    fn show(
        &self,
        slot: u32,
        bytes: &[u8; HEADER],
        see: &mut impl FnMut(Scanned) -> Result<()>,
    ) -> Result<()> {
        let salt = self.header.salt;
        let found = SlotHeader::decode(bytes, salt, slot);
        let is_changed_split = found == Decoded::Bad && is_changed_split(bytes, salt, slot);
        let decoded = if is_changed_split { Decoded::Split } else { found };
        see(Scanned { slot, decoded, is_changed_split })?;
        if decoded == Decoded::Split { self.show_parts(slot, see) } else { Ok(()) }
    }

    /// Passes the parts that `slot` can have to `see`. A header within the units of an earlier part
    /// does not count: these headers are all void before the earlier part's header is stored.
    fn show_parts(&self, slot: u32, see: &mut impl FnMut(Scanned) -> Result<()>) -> Result<()> {
        let mut headers = [0; ALL_PART_HEADERS];
        self.region.read(self.header.places.header(part_of(slot, 0)), &mut headers)?;
        let mut end = 0;
        for (unit, bytes) in (0..).zip(headers.as_chunks().0) {
            let part = part_of(slot, unit);
            let mut decoded = SlotHeader::decode(bytes, self.header.salt, part);
            if let Decoded::Header(header) = decoded {
                if unit < end {
                    decoded = Decoded::Bad;
                } else {
                    end = unit + units_of(header.lines.count_ones());
                }
            }
            see(Scanned { slot: part, decoded, is_changed_split: false })?;
        }
        Ok(())
    }

    /// Passes the bytes of headers to `see`, some at a time, with the slot of the first one.
    fn each_chunk(&self, mut see: impl FnMut(u32, &[[u8; HEADER]]) -> Result<()>) -> Result<()> {
        let places = self.header.places;
        let mut bytes = [0; HEADERS_AT_ONCE * HEADER];
        for (first, count) in places.header_runs(0, places.slots()) {
            let bytes = &mut bytes[..count as usize * HEADER];
            self.region.read(places.header(first), bytes)?;
            see(first, bytes.as_chunks().0)?;
        }
        Ok(())
    }

    /// Returns the bit that makes the bad header of `slot` valid if changed, and that header.
    pub(super) fn changed(&self, slot: u32) -> Result<Option<(usize, Decoded)>> {
        let mut bytes = [0; HEADER];
        self.region.read(self.header.places.header(slot), &mut bytes)?;
        Ok(SlotHeader::decode_changed(&bytes, self.header.salt, slot))
    }

    /// Returns the data of the page `found`; `None` if it does not match its header.
    fn page(&self, found: &Found) -> Result<Option<[u8; PAGE]>> {
        let mut data = [0; PAGE];
        if found.zero {
            return Ok(Some(data));
        }
        let mut bytes = [0; HEADER];
        self.region.read(self.header.places.header(found.slot), &mut bytes)?;
        let decoded = SlotHeader::decode(&bytes, self.header.salt, found.slot);
        self.region.read(self.header.places.data(found.slot), &mut data)?;
        let Decoded::Header(header) = decoded else { return Ok(None) };
        Ok((header.data_check == data_check(&data)).then_some(data))
    }

    /// Compares the data of `slot` with the checksum in its header.
    pub(super) fn compare(&self, slot: u32, found: &SlotHeader) -> Result<Data> {
        if found.zero {
            return Ok(Data::Whole);
        }
        let mut page = [0; PAGE];
        let data = &mut page[..stored_bytes(found.lines)];
        self.region.read(self.header.places.data(slot), data)?;
        if data_check(data) == found.data_check {
            return Ok(Data::Whole);
        }
        Ok(if is_one_bit_off(data, found.data_check) { Data::OneBitOff } else { Data::Other })
    }

    /// Voids the headers of `slots`, durably.
    fn void_all(&self, slots: &[u32]) -> Result<()> {
        for slot in slots {
            self.clear_word(self.header.places.header(*slot))?;
        }
        if slots.is_empty() { Ok(()) } else { Ok(self.region.fence()?) }
    }

    /// Clears the verdicts of `slots`, durably. The headers of `slots` are durably void.
    ///
    /// Versions of void headers are unknown here, so such a version may be given out again. Its old
    /// verdict would then hold for a header that was stored only in part: a page whose bytes the
    /// backing lacks would count as clean. So a slot gets a new header only after this fence.
    fn clear_verdicts<'b>(&self, slots: impl Iterator<Item = &'b u32>) -> Result<()> {
        let mut has_cleared = false;
        for slot in slots {
            let at = self.header.places.header(*slot) + VERDICT_OFFSET;
            if self.region.load_u64(at)? != 0 {
                self.clear_word(at)?;
                has_cleared = true;
            }
        }
        if has_cleared { Ok(self.region.fence()?) } else { Ok(()) }
    }

    /// Makes the word at `offset` zero, durably with the next fence.
    fn clear_word(&self, offset: u64) -> Result<()> {
        self.region.store_u64(offset, 0)?;
        Ok(self.region.write_back(offset, 8)?)
    }
}

/// The number and the slots of each lane's newest batch.
#[derive(Default)]
pub(super) struct Newest {
    batches: Vec<(u64, Vec<(u32, SlotHeader)>)>,
}

impl Newest {
    pub(super) fn see(&mut self, slot: u32, header: &SlotHeader) {
        let lane = usize::from(header.lane);
        if self.batches.len() <= lane {
            self.batches.resize(lane + 1, (0, Vec::new()));
        }
        let (batch, members) = &mut self.batches[lane];
        if header.batch > *batch {
            *batch = header.batch;
            members.clear();
        }
        if header.batch == *batch {
            members.push((slot, *header));
        }
    }

    fn add_all(&mut self, other: Self) {
        for (_, members) in other.batches {
            for (slot, header) in &members {
                self.see(*slot, header);
            }
        }
    }

    pub(super) fn members(&self) -> impl Iterator<Item = &(u32, SlotHeader)> {
        self.batches.iter().flat_map(|(_, members)| members)
    }

    /// Returns whether a later batch followed that of `header` in its lane.
    pub(super) fn is_newer_than(&self, header: &SlotHeader) -> bool {
        self.batches.get(usize::from(header.lane)).is_some_and(|(batch, _)| *batch > header.batch)
    }

    /// Returns the numbers of the batches, of at least [`LANES`] lanes.
    fn numbers(&self) -> Vec<u64> {
        let known = self.batches.iter().map(|(batch, _)| *batch);
        known.chain(std::iter::repeat(0)).take(self.batches.len().max(LANES.into())).collect()
    }
}

/// The state of a recovery, of the whole pool or of one thread's part.
#[derive(Default)]
struct Recovery {
    shards: Shards,
    newest: Newest,
    newest_version: u64,
    /// The last page that has a header.
    last_page: u64,
    /// The last committed group: its members count.
    committed_group: u64,
    /// The findings, as far as they are counted.
    found: Recovered,
    /// Slots that hold an older version of a page.
    older: Vec<Found>,
    /// By the slot of a record: the version of the page under the record.
    over: HashMap<u32, u64>,
    /// Slots whose headers have to be voided.
    void: Vec<u32>,
    /// Slots whose voided headers may not be durable yet.
    voided: Vec<u32>,
    /// Split slots whose headers may not be durable yet, and whether one bit of the header changed.
    split: Vec<(u32, bool)>,
    /// Lanes whose newest batch has data that does not match its checksum.
    doubtful_lanes: BTreeSet<u16>,
    /// A slot with a page of another shard.
    misplaced: Option<u32>,
}

/// Every `step`th of the `count` shards of a pool.
#[derive(Default)]
struct Shards {
    of: Vec<Shard>,
    sharding: Sharding,
    step: usize,
}

impl Shards {
    fn of_page(&mut self, page: u64) -> &mut Shard {
        &mut self.of[self.sharding.shard_of(page) / self.step]
    }

    fn of_slot(&mut self, slot: u32) -> &mut Shard {
        &mut self.of[(whole_slot(slot) % self.sharding.count) as usize / self.step]
    }
}

/// Opens the cache in `region` over `backing`.
pub(super) fn open(
    region: Arc<Region>,
    backing: Arc<dyn BlockDevice>,
    binding: Binding,
    options: CacheDeviceOptions,
) -> Result<(Core, Recovered)> {
    let mut header = CacheHeader::read(&region)?;
    if options.atomic_flush && !header.mode.writes_back() {
        return Err(CacheError::NotAtomic { mode: header.mode });
    }
    let geometry = geometry_over(&*backing, &header, options.atomic_flush)?;
    let mut choices = Choices::of(&header)?;
    let against = options.atomic_flush.then(|| mode_against_groups(&choices.classes)).flatten();
    if let Some(mode) = against {
        return Err(CacheError::NotAtomic { mode });
    }
    choices.override_by(&options);
    let replacement = choices.replacement();
    let threads = if options.has_threads() { threads() } else { 1 };
    let scan = Scan { region: &region, header: &header };
    let mut recovery = Recovery::read(&scan, replacement, threads)?;
    recovery.check_batches(&scan)?;
    // First, because such pages fit nowhere, whatever the user allows.
    recovery.check_fit(geometry.size_bytes() / PAGE_BYTES)?;
    let adopts = options.adopt_foreign;
    if let Some(other) = header.binding.as_ref().filter(|it| it.identity != binding.identity) {
        let refusal = |dirty| CacheError::OtherBacking { name: other.name.clone(), dirty };
        recovery.forget_clean(adopts, refusal)?;
    }
    if options.backing_changed || recovery.differs(&scan, &*backing)? {
        recovery.forget_clean(adopts, |dirty| CacheError::ChangedBacking { dirty })?;
    }
    let found = recovery.finish(&scan, threads)?;
    if header.version < VERSION {
        header.is_whole = false;
    }
    let features = header.superblock.incompatible & !pool::CLUSTERS | features_of(header.cluster);
    if header.superblock.incompatible != features {
        header.superblock.incompatible = features;
        header.superblock_is_whole = false;
    }
    if header.binding.as_ref() != Some(&binding) {
        header.binding = Some(binding);
        header.is_whole = false;
    }
    header.restore(&region)?;
    let core = core_of(region, backing, geometry, header, recovery, choices, options);
    core.begin();
    // An earlier process may have written around the cache without a flush. If this flush fails,
    // the ledger has that, and the next client's flush fails. Pages that are read before the next
    // successful flush are not cached.
    let _ = core.pages.flush_backing_recorded();
    Ok((core, found))
}

/// Returns the number of threads that read headers: more threads would wait for the memory.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cpus| cpus.get().min(THREADS_MAX))
}

fn core_of(
    region: Arc<Region>,
    backing: Arc<dyn BlockDevice>,
    geometry: Geometry,
    header: CacheHeader,
    recovery: Recovery,
    choices: Choices,
    options: CacheDeviceOptions,
) -> Core {
    let resizing = Resizing::new(options.keep_free);
    let reserve = AtomicU32::new(resizing.reserve(&header));
    let counters = Arc::new(Counters::default());
    let router_mode = AtomicU32::new(header.mode.code());
    let admission = choices.admission(header.places.slots());
    let backing = Arc::new(Backing {
        device: backing,
        geometry,
        traffic: Traffic::new(),
        ledger: Ledger::new("the cache"),
        flushes: Flushes::default(),
        written: Mutex::default(),
        keeps_dirty: AtomicBool::new(false),
        pace: Pace::new(options.has_threads()),
        counters: Arc::clone(&counters),
    });
    let sharding = header.sharding();
    let relax = options.is_scheduled.then(|| {
        let region = Arc::clone(&region);
        Arc::new(move || region.relax()) as Relax
    });
    let store = Arc::new(Store {
        region,
        salt: header.salt,
        data_offset: header.superblock.data_offset,
        places: header.places,
        header: Mutex::new(header),
        lanes: Lanes::new(&recovery.newest.numbers()),
        has_lost_slots: AtomicBool::new(false),
    });
    let pages = Arc::new(Pages {
        store: Arc::clone(&store),
        backing: Arc::clone(&backing),
        shards: SetLocks::new(recovery.shards.of.into_iter(), relax),
        sharding,
        locks: VersionLocks::new(LOCKS_LOG2),
        groups: options.atomic_flush.then(|| Groups::new(recovery.committed_group)),
        reserve,
        damaged: AtomicU64::new(0),
        failures: Failures::default(),
        waker: Arc::new(Waker::new(options.threads().max(options.is_scheduled.into()))),
        counters,
    });
    let writer = Arc::new(Writer {
        pages: Arc::clone(&pages),
        comparing: Comparing::default(),
        makes_records: AtomicBool::default(),
    });
    let background = Background {
        cleaners: Cleaners::new(Arc::clone(&pages)),
        fills: Fills::new(Arc::clone(&pages), Arc::clone(&writer)),
        pages: Arc::clone(&pages),
        resizing,
    };
    let router = Router {
        pages: Arc::clone(&pages),
        classes: IoClasses::default(),
        admission,
        by_cost: ByCost::new(options.backing_share_pct),
        fallback: Fallback::default(),
        mode: router_mode,
    };
    let (choices, requests) = (Mutex::new(choices), Requests::default());
    Core { store, backing, pages, writer, background, router, choices, requests }
}

/// Returns the geometry of the cache of `header` over `backing`.
///
/// # Errors
/// Fails if the size of the backing is no whole number of pages, or has too many pages.
fn geometry_over(
    backing: &dyn BlockDevice,
    header: &CacheHeader,
    atomic_flush: bool,
) -> Result<Geometry> {
    let block_bytes = header.superblock.block_bytes;
    let below = backing.geometry();
    let bytes = below.size_bytes();
    if !bytes.is_multiple_of(PAGE_BYTES) {
        return Err(CacheError::PartialPage { bytes });
    }
    // Headers and the index would cut off the upper bits of a larger page number.
    if bytes / PAGE_BYTES > PAGES_MAX {
        return Err(CacheError::TooLarge { bytes });
    }
    Ok(Geometry {
        block_bytes,
        blocks: bytes / u64::from(block_bytes),
        preferred_bytes: below.preferred_bytes.max(4096),
        read_only: below.read_only,
        atomic_block: true,
        // With atomic flush a crash undoes writes; modes that write around the cache leave writes
        // in the backing's own cache.
        volatile_cache: atomic_flush || below.volatile_cache,
        fast_zero: below.fast_zero,
        keeps_data: true,
    })
}

impl Recovery {
    /// Reads all headers with `threads` threads. Each thread has shards, and so slots, of its own.
    fn read(
        scan: &Scan<'_>,
        replacement: &'static ReplacementEntry,
        threads: usize,
    ) -> Result<Self> {
        let (slots, sharding) = (scan.header.places.slots(), scan.header.sharding());
        let count = sharding.count;
        let committed_group = scan.header.committed_group(scan.region)?;
        let step = threads.clamp(1, count as usize);
        let read = |part: usize| {
            let numbers = (0..count).skip(part).step_by(step);
            let of =
                numbers.map(|number| Shard::new(number, sharding, slots, replacement)).collect();
            let shards = Shards { of, sharding, step };
            let mut recovery = Self { shards, committed_group, ..Self::default() };
            scan.each_of(part, step, |scanned| {
                recovery.look_up_ahead(scanned);
                for one in scanned {
                    recovery.see(one);
                }
                Ok(())
            })?;
            match recovery.misplaced {
                Some(slot) => Err(CacheError::Misplaced { slot }),
                None => Ok(recovery),
            }
        };
        let parts: Result<Vec<Self>> = std::thread::scope(|scope| {
            let read = &read;
            let others: Vec<_> = (1..step).map(|part| scope.spawn(move || read(part))).collect();
            let first = read(0);
            let others =
                others.into_iter().map(|it| it.join().unwrap_or_else(|it| resume_unwind(it)));
            std::iter::once(first).chain(others).collect()
        });
        Ok(Self::of_parts(parts?, sharding))
    }

    fn of_parts(parts: Vec<Self>, sharding: Sharding) -> Self {
        let mut whole = Self::default();
        let mut shards = Vec::new();
        for part in parts {
            whole.newest.add_all(part.newest);
            whole.newest_version = whole.newest_version.max(part.newest_version);
            whole.last_page = whole.last_page.max(part.last_page);
            whole.committed_group = part.committed_group;
            whole.found.uncommitted += part.found.uncommitted;
            whole.older.extend(part.older);
            whole.over.extend(part.over);
            whole.void.extend(part.void);
            whole.voided.extend(part.voided);
            whole.split.extend(part.split);
            whole.found.unfinished += part.found.unfinished;
            shards.push(part.shards.of.into_iter());
        }
        let step = shards.len();
        let all = 0..sharding.count as usize;
        let of = all.filter_map(|number| shards[number % step].next()).collect();
        whole.shards = Shards { of, sharding, step: 1 };
        whole
    }

    /// Reads the index cells that `scanned` will need. The index is larger than the CPU's caches:
    /// so the reads wait for the memory together, not one after the other.
    fn look_up_ahead(&self, scanned: &[Scanned]) {
        let Shards { of, sharding, step } = &self.shards;
        let pages = scanned.iter().filter_map(|it| match it.decoded {
            Decoded::Header(header) => Some(header.page),
            _ => None,
        });
        let shard_of = |page| of.get(sharding.shard_of(page) / step);
        let cells = pages.filter_map(|page| Some(shard_of(page)?.look_up_ahead(page)));
        std::hint::black_box(cells.fold(0, |all, cell| all ^ cell));
    }

    fn see(&mut self, scanned: &Scanned) {
        let slot = scanned.slot;
        match scanned.decoded {
            Decoded::Free { used: false } => {}
            Decoded::Free { used: true } => self.voided.push(slot),
            Decoded::Bad => self.give_up(slot),
            Decoded::Split => {
                self.split.push((slot, scanned.is_changed_split));
                self.shards.of_slot(slot).recover_split(slot);
            }
            Decoded::Header(header) => {
                self.newest.see(slot, &header);
                self.newest_version = self.newest_version.max(header.version);
                self.last_page = self.last_page.max(header.page);
                if header.group > self.committed_group {
                    self.found.uncommitted += 1;
                    self.void.push(slot);
                    return;
                }
                if header.over > 0 {
                    self.over.insert(slot, header.over);
                }
                if is_part(slot) {
                    self.shards.of_slot(slot).recover_part(slot, header.lines.count_ones());
                }
                self.add(Found::of_header(slot, &header));
            }
        }
    }

    /// Notes that the header or the data of `slot` is unfinished.
    fn give_up(&mut self, slot: u32) {
        self.found.unfinished += 1;
        self.void.push(slot);
    }

    fn add(&mut self, found: Found) {
        if !self.shards.sharding.is_home(found.slot, found.page) {
            self.misplaced = Some(found.slot);
            return;
        }
        if let Some(older) = self.shards.of_page(found.page).recover(found) {
            self.older.push(older);
        }
    }

    /// Checks the data of the newest batches, and writes back the slots that count.
    fn check_batches(&mut self, scan: &Scan<'_>) -> Result<()> {
        let Scan { region, header } = *scan;
        // A group's members were fenced before the commit, and count only after it.
        let members = self.newest.members().filter(|(_, found)| found.group == 0);
        let members: Vec<_> = members.copied().collect();
        for (slot, found) in members {
            let data = scan.compare(slot, &found)?;
            if data == Data::Whole {
                if !found.zero {
                    let len = stored_bytes(found.lines) as u64;
                    region.write_back(header.places.data(slot), len)?;
                }
                region.write_back(header.places.header(slot), HEADER_BYTES)?;
            } else {
                self.note_doubt(&found, data);
                self.remove_unfinished(&Found::of_header(slot, &found));
            }
        }
        Ok(())
    }

    /// Notes a member of a newest batch whose data is not whole. One of its bits may have changed.
    /// But a slot that held almost the same data before looks so too if a crash kept the new
    /// data off the medium. So the version before it counts in either case.
    fn note_doubt(&mut self, found: &SlotHeader, data: Data) {
        self.doubtful_lanes.insert(found.lane);
        if data == Data::OneBitOff {
            self.found.changed += 1;
            self.found.first_changed_offset.get_or_insert(found.page * PAGE_BYTES);
        }
    }

    /// Removes `found`, which is unfinished. The version before it counts. That version was not
    /// overwritten, because its slot is free only after the fence that `found` lacks.
    fn remove_unfinished(&mut self, found: &Found) {
        self.give_up(found.slot);
        self.older.retain(|older| older.slot != found.slot);
        if self.shards.of_page(found.page).stands(found) {
            self.shards.of_page(found.page).remove(found);
            let of_page = self.older.extract_if(.., |older| older.page == found.page);
            let of_page: Vec<_> = of_page.collect();
            for older in of_page {
                self.add(older);
            }
        }
    }

    /// Returns whether a sample of clean pages differs from the backing, which another program
    /// changed then. A backing that cannot be read or keeps no data proves nothing.
    fn differs(&self, scan: &Scan<'_>, backing: &dyn BlockDevice) -> Result<bool> {
        let geometry = backing.geometry();
        let pages = if geometry.keeps_data { geometry.size_bytes() / PAGE_BYTES } else { 0 };
        for found in self.samples().into_iter().filter(|found| found.page < pages) {
            let Some(held) = scan.page(&found)? else { continue };
            let mut below = [0; PAGE];
            let read = backing.read(found.page * PAGE_BYTES, &mut below);
            if read.is_ok() && held != below {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns some clean pages of each shard.
    fn samples(&self) -> Vec<Found> {
        let share = SAMPLES.div_ceil(self.shards.sharding.count.max(1));
        self.shards.of.iter().flat_map(|shard| shard.clean_samples(share)).collect()
    }

    /// Gives up all clean pages, because the backing is another one or another program wrote to it.
    /// Fails with `refusal` of the number of dirty pages if there are any, unless the backing
    /// `adopts` them.
    fn forget_clean(
        &mut self,
        adopts: bool,
        refusal: impl FnOnce(u64) -> CacheError,
    ) -> Result<()> {
        let dirty = self.shards.of.iter().map(|shard| shard.usage().dirty).sum();
        if dirty > 0 && !adopts {
            return Err(refusal(dirty));
        }
        for shard in &mut self.shards.of {
            for found in all_of(shard).iter().filter(|found| !found.dirty) {
                shard.remove(found);
                self.void.push(found.slot);
                self.found.forgotten += 1;
            }
        }
        Ok(())
    }

    /// Gives up pages behind the end of a smaller backing. Fails if such a page is dirty.
    fn check_fit(&mut self, pages: u64) -> Result<()> {
        if self.last_page < pages {
            return Ok(());
        }
        for shard in &mut self.shards.of {
            for found in all_of(shard).iter().filter(|found| found.page >= pages) {
                if found.dirty {
                    let (offset, bytes) = (found.page * PAGE_BYTES, pages * PAGE_BYTES);
                    return Err(CacheError::Misfit { offset, bytes });
                }
                shard.remove(found);
                self.void.push(found.slot);
                self.found.forgotten += 1;
            }
        }
        Ok(())
    }

    /// Finds the pages under records among the older versions. A record without its page is
    /// useless: a dirty one is kept as a damaged page, a clean one is given up, for the backing has
    /// its data.
    fn find_bases(&mut self) {
        let mut bases = HashMap::new();
        let over = std::mem::take(&mut self.over);
        if over.is_empty() {
            return;
        }
        let is_record_with_base = |found: &Found| found.record && over.contains_key(&found.slot);
        for shard in &self.shards.of {
            shard.each_live(|found| {
                if is_record_with_base(&found) {
                    bases.insert((found.page, over[&found.slot]), (found, None));
                }
            });
        }
        self.older.retain(|older| {
            let base = bases.get_mut(&(older.page, older.version)).filter(|_| !older.record);
            base.map(|(_, under)| *under = Some(*older)).is_none()
        });
        for (found, under) in bases.into_values() {
            if under.is_none() && !found.dirty {
                self.shards.of_page(found.page).remove(&found);
                self.void.push(found.slot);
            } else {
                self.shards.of_page(found.page).recover_base(&found, under.as_ref());
            }
        }
    }

    /// Makes all that counts durable, and then voids the rest.
    fn finish(&mut self, scan: &Scan<'_>, threads: usize) -> Result<Recovered> {
        let Scan { region, header } = *scan;
        for (slot, _) in self.split.iter().filter(|(_, is_changed)| *is_changed) {
            let bytes = split_header(header.salt, *slot);
            region.write(header.places.header(*slot), &bytes)?;
        }
        let split = self.split.iter().map(|(slot, _)| slot);
        self.voided
            .iter()
            .chain(split)
            .try_for_each(|slot| region.write_back(header.places.header(*slot), HEADER_BYTES))?;
        // A commit counts by now, so it is durable before the versions that it replaced are voided.
        let commit_words = header.superblock.data_offset + commit_offset(0);
        region.write_back(commit_words, PAGE_BYTES)?;
        // Newer versions are durable before older ones are voided: invariant 3 of the cache.
        region.fence()?;
        self.find_bases();
        let older: Vec<u32> = self.older.iter().map(|it| it.slot).collect();
        // Older versions are voided before pages that leave the cache.
        scan.void_all(&older)?;
        scan.void_all(&self.void)?;
        let split = self.split.iter().map(|(slot, _)| slot);
        let voided = self.voided.iter().chain(&older).chain(&self.void).chain(split);
        scan.clear_verdicts(voided)?;
        self.found.older = older.len() as u64;
        let newest_version = self.newest_version;
        let shards = &mut self.shards.of;
        let at_once = shards.len().div_ceil(threads);
        std::thread::scope(|scope| {
            let recovered = |part: &mut [Shard]| {
                for shard in part {
                    shard.recovered(newest_version);
                }
            };
            let (first, others) = shards.split_at_mut(at_once);
            for part in others.chunks_mut(at_once) {
                scope.spawn(move || recovered(part));
            }
            recovered(first);
        });
        for usage in self.shards.of.iter().map(Shard::usage) {
            self.found.pages += usage.live;
            self.found.dirty_pages += usage.dirty;
        }
        self.found.doubtful_lanes = self.doubtful_lanes.len() as u64;
        Ok(self.found)
    }
}

/// Returns all pages in `shard`.
fn all_of(shard: &Shard) -> Vec<Found> {
    let mut all = Vec::new();
    shard.each_live(|found| all.push(found));
    all
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::policy::REPLACEMENTS;
    use super::super::store::layout::clean_verdict;
    use super::super::tests::{PAGES, SHARDED, memory, open, pool, write};
    use super::*;

    /// A version that is unknown here may be given out once more, in the same slot.
    #[test]
    fn a_void_header_has_no_verdict_when_its_slot_is_written_again() {
        let (region, backing) = (pool(64), memory());
        let header = CacheHeader::read(&region).unwrap();
        let (slot, version) = (5, 7);
        let at = header.places.header(slot);
        region.store_u64(at + 16, version).unwrap();
        let verdict = clean_verdict(header.salt, slot, version);
        region.store_u64(at + VERDICT_OFFSET, verdict).unwrap();
        drop(open(&region, &backing));
        assert_eq!(region.load_u64(at + VERDICT_OFFSET).unwrap(), 0);
        assert_eq!(region.load_u64(at + 16).unwrap(), version, "it was used before");
    }

    #[test]
    fn any_number_of_threads_finds_the_same() {
        let (region, backing) = (pool(SHARDED), memory());
        let device = open(&region, &backing);
        for (step, byte) in [(1, 10), (2, 11), (3, 12)] {
            (0..PAGES).step_by(step).for_each(|page| write(&device, page, byte));
        }
        drop(device);
        let header = CacheHeader::read(&region).unwrap();
        let found_by = |threads| {
            let mut found = Recovery::read(
                &Scan { region: &region, header: &header },
                &REPLACEMENTS[0],
                threads,
            )
            .unwrap();
            let pages: Vec<_> =
                (0..PAGES).map(|page| found.shards.of_page(page).find(page)).collect();
            let mut older: Vec<_> = found.older.iter().map(|it| it.slot).collect();
            older.sort_unstable();
            let (newest, version) = (found.newest.numbers(), found.newest_version);
            (pages, older, newest, version, found.last_page)
        };
        let by_one = found_by(1);
        assert!(by_one.0.iter().all(Option::is_some) && !by_one.1.is_empty());
        for threads in 2..=header.shards as usize + 1 {
            assert!(found_by(threads) == by_one, "{threads} threads");
        }
    }
}
