//! `tidegate`: the shipped cache itself, under pages in DRAM.
//!
//! [`CacheDevice`] runs here as it is served, without a thread, on memory that is thrown away and a
//! backing that keeps nothing; `watch` sees what it asks of both. So layout, records, order of
//! eviction and batches are not described anew: they are those of the core.
//!
//! DRAM is that of the other schemes, as a page cache is above a block device:
//! - a sync writes, of each dirty page, the blocks of 512 bytes from the first dirty line to the
//!   last one; what is next to each other in one write;
//! - a page that DRAM gives up is written to the cache if lines of it are dirty, and else dropped:
//!   the cache answers when it is read again, so a synced page needs no write to flash;
//! - the mode is `wo`: what is read from flash stays in DRAM alone;
//! - what a file loses is discarded where the cache has it, as a file system does that is mounted
//!   with `discard`; each such page costs a header, and a slot until that is cleaned.
//!
//! Cleaning ahead of need takes time that a replay does not have: pages are cleaned where their
//! slot is needed.

mod numbers;
mod watch;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use rustc_hash::FxHashMap;
use tidegate::cache::mode::Mode;
use tidegate::cache::{
    self, Binding, CacheDevice, CacheDeviceOptions, CacheError, CacheHeader, CacheOptions,
};
use tidegate::device::{BlockDevice, DeviceError, WriteFlags};
use tidegate::pmem::{PmemError, Region};

use super::devices::{Devices, Source};
use super::page::{ALL_LINES, LINE_BYTES, PAGE_BYTES, PageId, lines_of, pages_of, part_of};
use super::page_cache::PageCache;
use super::{Requests, Scheme, SchemeEntry, Sizes, dram};
use crate::error::Error;
use crate::trace::{FileId, Op};
use numbers::Numbers;
use watch::{Watch, Work};

/// The entry of the scheme.
pub const ENTRY: SchemeEntry = SchemeEntry {
    name: "tidegate",
    about: "the shipped cache: whole pages, or records of their dirty blocks",
    uses_pmem: true,
    offer: Some("a cache (`tidegate create --engine cache`) with its defaults"),
    create: |sizes: &Sizes| match Shipped::new(sizes) {
        Ok(scheme) => Ok(Box::new(scheme)),
        // A pool has a least size: with less, there is none.
        Err(Failure::TooSmall) => (dram::ENTRY.create)(sizes),
        Err(Failure::Other(error)) => Err(error),
    },
};

const BLOCK_BYTES: u32 = 512;
const LINES_A_BLOCK: u32 = 8;
const _: () = assert!(LINES_A_BLOCK as u64 * LINE_BYTES == BLOCK_BYTES as u64);
/// Pages of the device: more than a trace touches.
const DEVICE_PAGES: u64 = 1 << 40;
/// [`PAGE_BYTES`] as the length of a buffer.
const PAGE: usize = 4096;
/// Most bytes of one write.
const WRITE_BYTES_MAX: usize = 1 << 20;
/// DRAM of the shipped index, by slot (`cache::index`).
const INDEX_SLOT_BYTES: u64 = 32;

enum Failure {
    TooSmall,
    Other(Error),
}

impl From<CacheError> for Failure {
    fn from(error: CacheError) -> Self {
        match error {
            CacheError::Pool(tidegate::pool::PoolError::TooSmall { .. }) => Self::TooSmall,
            error => Self::Other(Error::Usage(format!("the cache for a replay: {error}"))),
        }
    }
}

impl From<PmemError> for Failure {
    fn from(error: PmemError) -> Self {
        Self::Other(Error::Usage(format!("memory for a replay: {error}")))
    }
}

fn failed(error: &DeviceError) -> Error {
    Error::Usage(format!("the cache of a replay: {error}"))
}

/// The shipped cache with pages in DRAM over it.
struct Shipped {
    dram: PageCache,
    device: CacheDevice,
    numbers: Numbers,
    works: Receiver<Work>,
    /// By slot: the page whose newest version it has.
    slots: Vec<Option<u64>>,
    /// By page: the slot of its newest version, and the lines that the cache has.
    stored: FxHashMap<u64, (u32, u64)>,
    /// Pages that the cache was given and that were not discarded, by file.
    given: FxHashMap<FileId, BTreeSet<u64>>,
    index_bytes: u64,
    requests: Requests,
    /// What is written: the content does not matter, but zeroes might.
    bytes: Vec<u8>,
    cut: Vec<u32>,
}

impl Shipped {
    fn new(sizes: &Sizes) -> Result<Self, Failure> {
        // More than every page twice is of no use; headers take a page in 64.
        let useful = sizes.footprint_pages.saturating_mul(3 * PAGE_BYTES).saturating_add(1 << 20);
        let region = Region::anonymous(sizes.pmem_bytes.min(useful).max(PAGE_BYTES))?;
        let options = CacheOptions { block_bytes: BLOCK_BYTES, ..CacheOptions::default() };
        let CacheHeader { places, salt, .. } = cache::create(&region, &options)?;
        let (watch, works) = Watch::new(places, salt);
        let backing = watch.backing(DEVICE_PAGES * PAGE_BYTES / u64::from(BLOCK_BYTES));
        let region = Arc::new(region.observed(Arc::new(watch)));
        let binding = Binding { identity: 1, name: "replay".into(), pages: DEVICE_PAGES };
        let atomic_flush = sizes.atomic;
        let options =
            CacheDeviceOptions { no_thread: true, atomic_flush, ..CacheDeviceOptions::default() };
        let device = CacheDevice::open(region, backing, binding, options)?;
        device.set_mode(Mode::WriteOnly)?;
        // To make the pool is not part of the trace.
        while works.try_recv().is_ok() {}
        Ok(Self {
            dram: PageCache::new(sizes.dram_pages),
            device,
            numbers: Numbers::default(),
            works,
            slots: vec![None; places.slots() as usize],
            stored: FxHashMap::default(),
            given: FxHashMap::default(),
            index_bytes: u64::from(places.slots()) * INDEX_SLOT_BYTES,
            requests: Requests::default(),
            bytes: vec![0xa5; WRITE_BYTES_MAX],
            cut: Vec::new(),
        })
    }

    fn read(&mut self, id: PageId, lines: u64, devices: &mut dyn Devices) -> Result<(), Error> {
        self.requests.reads += 1;
        if self.dram.touch(id).is_some() {
            self.requests.read_hits += 1;
        } else {
            self.bring_in(id, devices)?;
            self.requests.read_hits += u64::from(self.load(id, devices)?);
        }
        devices.dram_copy(id, lines);
        Ok(())
    }

    fn write(
        &mut self,
        id: PageId,
        lines: u64,
        needs_rest: bool,
        devices: &mut dyn Devices,
    ) -> Result<(), Error> {
        self.requests.writes += 1;
        let slot = if let Some(slot) = self.dram.touch(id) {
            slot
        } else {
            let slot = self.bring_in(id, devices)?;
            if needs_rest {
                self.load(id, devices)?;
            }
            slot
        };
        devices.dram_copy(id, lines);
        self.dram.dirty(slot, lines);
        Ok(())
    }

    /// Gives `id` a slot in DRAM.
    fn bring_in(&mut self, id: PageId, devices: &mut dyn Devices) -> Result<u32, Error> {
        if let Some(victim) = self.dram.victim() {
            let dirty = self.dram.dirty_lines(victim);
            if dirty != 0 {
                let bytes = self.bytes_on_device(self.dram.id(victim), dirty);
                self.write_device(bytes, devices)?;
            }
            self.drop_page(victim, devices);
        }
        Ok(self.dram.insert(id))
    }

    fn drop_page(&mut self, slot: u32, devices: &mut dyn Devices) {
        devices.dram_forget(self.dram.id(slot));
        self.dram.remove(slot);
    }

    /// Reads `id` from the cache, or from flash. True: the cache had all of it.
    fn load(&mut self, id: PageId, devices: &mut dyn Devices) -> Result<bool, Error> {
        let number = self.numbers.number(id);
        let mut page = [0; PAGE];
        self.device.read(number * PAGE_BYTES, &mut page).map_err(|error| failed(&error))?;
        let works: Vec<_> = self.works.try_iter().collect();
        let is_hit = !works.contains(&Work::BackingRead { page: number });
        if !is_hit {
            devices.ssd_read(id);
        }
        let is_loaded = works.iter().any(|work| matches!(work, Work::Loaded { .. }));
        if let Some((_, lines)) = self.stored.get(&number).filter(|_| is_loaded) {
            devices.pmem_read(id, *lines);
        }
        Ok(is_hit)
    }

    fn sync(&mut self, file: FileId, devices: &mut dyn Devices) -> Result<(), Error> {
        let mut dirty = Vec::new();
        while let Some(slot) = self.dram.first_dirty(file) {
            self.requests.synced_pages += 1;
            dirty.push(self.bytes_on_device(self.dram.id(slot), self.dram.dirty_lines(slot)));
            self.dram.clean(slot);
        }
        dirty.sort_unstable_by_key(|bytes| bytes.start);
        for bytes in joined(&dirty) {
            self.write_device(bytes, devices)?;
        }
        Ok(())
    }

    /// The blocks of the device from the first to the last of `lines`.
    fn bytes_on_device(&mut self, id: PageId, lines: u64) -> Range<u64> {
        self.given.entry(id.file).or_default().insert(id.page);
        let page = self.numbers.number(id) * PAGE_BYTES;
        let first = lines.trailing_zeros() / LINES_A_BLOCK;
        let end = (u64::BITS - lines.leading_zeros()).div_ceil(LINES_A_BLOCK);
        let block_bytes = u64::from(BLOCK_BYTES);
        page + u64::from(first) * block_bytes..page + u64::from(end) * block_bytes
    }

    fn write_device(&mut self, bytes: Range<u64>, devices: &mut dyn Devices) -> Result<(), Error> {
        let len = usize::try_from(bytes.end - bytes.start).unwrap_or_default();
        let done = self.device.write(bytes.start, &self.bytes[..len], WriteFlags::default());
        done.map_err(|error| failed(&error))?;
        self.report(devices);
        Ok(())
    }

    fn end_sync(&mut self, devices: &mut dyn Devices) -> Result<(), Error> {
        self.device.flush().map_err(|error| failed(&error))?;
        self.report(devices);
        Ok(())
    }

    /// Drops the pages of `file` behind `len_bytes`.
    fn cut(
        &mut self,
        file: FileId,
        len_bytes: u64,
        devices: &mut dyn Devices,
    ) -> Result<(), Error> {
        let mut cut = std::mem::take(&mut self.cut);
        self.dram.cut(file, len_bytes, &mut cut);
        for slot in cut.drain(..) {
            self.drop_page(slot, devices);
        }
        self.cut = cut;
        let end = len_bytes.div_ceil(PAGE_BYTES);
        let Some(given) = self.given.get_mut(&file) else { return Ok(()) };
        for page in given.split_off(&end) {
            let number = self.numbers.number(PageId { file, page });
            if self.stored.contains_key(&number) {
                let done = self.device.discard(number * PAGE_BYTES, PAGE_BYTES);
                done.map_err(|error| failed(&error))?;
            }
        }
        self.report(devices);
        Ok(())
    }

    /// Tells `devices` what the cache did.
    fn report(&mut self, devices: &mut dyn Devices) {
        let mut written = None;
        while let Ok(work) = self.works.try_recv() {
            match work {
                Work::Stored { slot, page, lines, zero } => {
                    let id = self.numbers.id(page);
                    let (_, had) = self.stored.insert(page, (slot, lines)).unwrap_or((slot, 0));
                    let lines_now = if zero { ALL_LINES } else { had | lines };
                    self.stored.insert(page, (slot, lines_now));
                    self.slots[slot as usize] = Some(page);
                    if !zero {
                        devices.pmem_store(id, lines);
                    }
                    devices.pmem_metadata(LINE_BYTES);
                }
                Work::Voided { slot } => {
                    let page = self.slots[slot as usize].take();
                    let is_newest =
                        |page: &u64| self.stored.get(page).is_some_and(|it| it.0 == slot);
                    if let Some(page) = page.filter(is_newest) {
                        self.stored.remove(&page);
                        devices.pmem_forget(self.numbers.id(page));
                    }
                }
                Work::Metadata { bytes } => devices.pmem_metadata(bytes),
                Work::Fence => devices.pmem_fence(),
                Work::Loaded { .. } => {}
                Work::BackingRead { page } => devices.ssd_read(self.numbers.id(page)),
                // Runs of one page follow each other.
                Work::BackingWritten { page } if written == Some(page) => {}
                Work::BackingWritten { page } => {
                    written = Some(page);
                    devices.ssd_write(self.numbers.id(page), Source::Pmem);
                }
                Work::BackingFlushed => {
                    written = None;
                    devices.ssd_flush();
                }
            }
        }
    }
}

/// `ranges`, which are in order, with neighbours joined as long as one write takes them.
fn joined(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last)
                if last.end == range.start && range.end - last.start <= WRITE_BYTES_MAX as u64 =>
            {
                last.end = range.end;
            }
            _ => joined.push(range.clone()),
        }
    }
    joined
}

impl Scheme for Shipped {
    fn play(&mut self, op: &Op, devices: &mut dyn Devices) -> Result<(), Error> {
        match *op {
            Op::Read { file, offset_bytes, len_bytes } => {
                for page in pages_of(offset_bytes, len_bytes) {
                    let id = PageId { file, page };
                    let bytes = part_of(page, offset_bytes, len_bytes);
                    self.dram.note_extent(id, &bytes);
                    self.read(id, lines_of(&bytes), devices)?;
                }
            }
            Op::Write { file, offset_bytes, len_bytes } => {
                for page in pages_of(offset_bytes, len_bytes) {
                    let id = PageId { file, page };
                    let bytes = part_of(page, offset_bytes, len_bytes);
                    let has_rest = self.dram.note_extent(id, &bytes);
                    let needs_rest = has_rest && bytes.end - bytes.start < PAGE_BYTES;
                    self.write(id, lines_of(&bytes), needs_rest, devices)?;
                }
            }
            Op::Sync { file } => {
                self.requests.syncs += 1;
                self.sync(file, devices)?;
                self.end_sync(devices)?;
            }
            Op::SyncAll => {
                self.requests.syncs += 1;
                while let Some(file) = self.dram.first_dirty_file() {
                    self.sync(file, devices)?;
                }
                self.end_sync(devices)?;
            }
            Op::Resize { file, len_bytes } => self.cut(file, len_bytes, devices)?,
            Op::Remove { file } => self.cut(file, 0, devices)?,
        }
        Ok(())
    }

    fn requests(&self) -> Requests {
        self.requests
    }

    fn index_bytes_peak(&self) -> u64 {
        self.index_bytes
    }
}
