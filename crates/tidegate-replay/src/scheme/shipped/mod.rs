//! Schemes that run a shipped engine below pages in DRAM: `tidegate` ([`cache`]), `log`
//! ([`log`]) and the DRAM tiers ([`tiers`]).
//!
//! The engine runs unmodified, on memory that is discarded afterwards. An observer of that memory
//! and a device below the engine count its operations. So layout, records, order of eviction and
//! batches need no model: they are those of the core.
//!
//! DRAM is that of the other schemes, as a page cache above a block device:
//! - a sync writes the blocks of each dirty page from the first dirty line to the last one;
//!   neighbouring blocks form one write;
//! - a dirty page that leaves DRAM is written to the engine, a clean page is dropped: the engine
//!   serves its next read, so that a synced page needs no write to flash;
//! - truncated and removed pages in the engine are discarded, as by a file system that is mounted
//!   with `discard`.
//!
//! Background cleaning takes time, which a replay does not have. `tidegate` and `log` clean when
//! space is needed, on a machine whose clock stands still (`still`). The threads of the DRAM tiers
//! run in virtual time.

pub mod cache;
mod cache_watch;
pub mod log;
mod log_watch;
mod numbers;
mod still;
#[cfg(test)]
mod tests;
pub mod tiers;
mod work;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::ops::Range;
use std::rc::Rc;
use std::sync::mpsc::Receiver;

use rustc_hash::FxHashMap;
use tidegate::device::{BlockDevice, BlockDeviceExt, Result as DeviceResult, WriteFlags};
use tidegate::machine::{Machine, enter};
use tidegate::pmem::{Region, RegionOptions};

use super::devices::Devices;
use super::hybrid::{Durable, Hybrid};
use super::page::{LINE_BYTES, PAGE_BYTES, PageId};
use super::page_cache::PageCache;
use super::{Scheme, Sizes, dram};
use crate::error::{Error, Result, with_causes};
use crate::trace::FileId;
use numbers::Numbers;
use still::{OnMachine, Still};
use work::Work;

/// Bytes of a backing's block.
const BLOCK_BYTES: u32 = 512;
/// Pages of the device, more than a trace touches.
const DEVICE_PAGES: u64 = 1 << 40;
/// [`PAGE_BYTES`] as the length of a buffer.
const PAGE: usize = 4096;
/// Maximum length of a write.
const WRITE_BYTES_MAX: usize = 1 << 20;
/// The data of all writes. The content does not matter, except that zeroes might be a special case.
static DATA: [u8; WRITE_BYTES_MAX] = [0xa5; WRITE_BYTES_MAX];

/// Returns a function that makes an error of a failed component, which `what` names.
fn failed<E: Display>(what: &'static str) -> impl Fn(E) -> Error {
    move |error| Error::Scheme(format!("{what} a replay: {error}"))
}

/// Returns `bytes` of memory that stands for persistent memory. Pages that a scheme never writes
/// cost nothing, so there may be more than this machine has.
fn memory(bytes: u64) -> Result<Region> {
    let options = RegionOptions { sparse: true, ..RegionOptions::default() };
    Region::anonymous_with(bytes.max(PAGE_BYTES), &options)
        .map_err(|error| failed("memory for")(with_causes(&error)))
}

/// Returns the data of a write of `bytes` of a device.
fn data_of(bytes: &Range<u64>) -> &'static [u8] {
    &DATA[..usize::try_from(bytes.end - bytes.start).unwrap_or_default()]
}

/// Reads `page` of an engine in front of a backing, whose operations arrive at `works`. `stored` is
/// the mask of the lines in memory. Returns whether memory had all of the page.
fn read_page<E: PartialEq>(
    device: &dyn BlockDevice,
    works: &Receiver<Work<E>>,
    (page, stored): (u64, Option<u64>),
    context: &mut Context<'_>,
) -> Result<bool> {
    device.read(page * PAGE_BYTES, &mut [0; PAGE]).map_err(failed("the engine of"))?;
    let works: Vec<_> = works.try_iter().collect();
    let id = context.numbers.id(page);
    let is_hit = !works.contains(&Work::BackingRead { page });
    if !is_hit {
        context.devices.ssd_read(id);
    }
    if let Some(lines) = stored.filter(|_| works.contains(&Work::Loaded)) {
        context.devices.pmem_read(id, lines);
    }
    Ok(is_hit)
}

/// Returns the scheme over the engine that `create` returns, or a scheme without persistent memory
/// if `create` returns `None` because the memory is too small.
pub(super) fn scheme_over<E: Engine + 'static>(
    sizes: &Sizes,
    create: impl FnOnce(&Sizes) -> Result<Option<E>>,
) -> Result<Box<dyn Scheme>> {
    scheme_on(Rc::new(Still), sizes, create)
}

/// Returns the scheme over the engine that `create` returns; both run on `machine`.
fn scheme_on<E: Engine + 'static>(
    machine: Rc<dyn Machine>,
    sizes: &Sizes,
    create: impl FnOnce(&Sizes) -> Result<Option<E>>,
) -> Result<Box<dyn Scheme>> {
    let entered = enter(Rc::clone(&machine));
    let engine = create(sizes);
    drop(entered);
    match engine? {
        None => Ok(dram::dram(sizes)),
        Some(engine) => {
            let scheme = Shipped::scheme(sizes.dram_pages, engine);
            Ok(Box::new(OnMachine { scheme, machine }))
        }
    }
}

/// The devices that an engine's operations are reported to, and the mapping of the engine's pages.
pub(super) struct Context<'a> {
    numbers: &'a Numbers,
    devices: &'a mut dyn Devices,
}

/// A shipped engine and its memory. Page numbers count pages of the engine's device.
pub(super) trait Engine {
    /// Granularity of a write: [`BLOCK_BYTES`], or a page.
    const BLOCK_BYTES: u64 = BLOCK_BYTES as u64;

    /// Reads `page`. Returns whether memory had the whole page.
    fn read(&mut self, page: u64, context: &mut Context<'_>) -> Result<bool>;

    /// Executes `request` on the engine's device, and reports the engine's operations.
    fn call<T: Send + 'static>(
        &mut self,
        context: &mut Context<'_>,
        request: impl FnOnce(&dyn BlockDevice) -> DeviceResult<T> + Send + 'static,
    ) -> Result<T>;

    /// Writes `bytes` of the device, at most [`WRITE_BYTES_MAX`].
    fn write(&mut self, bytes: Range<u64>, context: &mut Context<'_>) -> Result<()> {
        let data = data_of(&bytes);
        self.call(context, move |device| device.write(bytes.start, data, WriteFlags::default()))
    }

    /// Makes earlier writes durable.
    fn flush(&mut self, context: &mut Context<'_>) -> Result<()> {
        self.call(context, |device| device.flush())
    }

    /// Discards the blocks of `pages` that are in the engine.
    fn discard(&mut self, pages: Range<u64>, context: &mut Context<'_>) -> Result<()>;

    /// Handles a `page` that leaves the DRAM above the engine.
    fn page_leaves(&mut self, page: u64, context: &mut Context<'_>) {
        context.devices.dram_forget(context.numbers.id(page));
    }

    /// Returns the peak bytes of DRAM for indexes.
    fn index_bytes_peak(&self) -> u64;
}

/// An engine below pages in DRAM.
struct Shipped<E> {
    engine: E,
    numbers: Numbers,
    /// Pages that were written to the engine and not discarded, by file.
    given: FxHashMap<FileId, BTreeSet<u64>>,
    /// Ranges of the device that a sync writes.
    dirty: Vec<Range<u64>>,
}

impl<E: Engine> Shipped<E> {
    /// Returns the scheme over `engine`.
    fn scheme(dram_pages: u64, engine: E) -> Hybrid<Self> {
        let (numbers, given) = (Numbers::default(), FxHashMap::default());
        let shipped = Self { engine, numbers, given, dirty: Vec::new() };
        Hybrid::new(PageCache::new(dram_pages), shipped)
    }

    /// Returns the blocks of the device from the first to the last dirty line of `slot`.
    fn dirty_bytes(&mut self, slot: u32, dram: &PageCache) -> Range<u64> {
        let (id, lines) = (dram.id(slot), dram.dirty_lines(slot));
        self.given.entry(id.file).or_default().insert(id.page);
        let page = self.numbers.number(id) * PAGE_BYTES;
        let first = u64::from(lines.trailing_zeros()) * LINE_BYTES;
        let end = u64::from(u64::BITS - lines.leading_zeros()) * LINE_BYTES;
        let block_bytes = E::BLOCK_BYTES;
        page + first - first % block_bytes..page + end.next_multiple_of(block_bytes)
    }
}

impl<E: Engine> Durable for Shipped<E> {
    fn load(&mut self, id: PageId, devices: &mut dyn Devices) -> Result<bool> {
        let page = self.numbers.number(id);
        self.engine.read(page, &mut Context { numbers: &self.numbers, devices })
    }

    fn make_way(&mut self, slot: u32, dram: &PageCache, devices: &mut dyn Devices) -> Result<()> {
        if dram.dirty_lines(slot) == 0 {
            return Ok(());
        }
        let bytes = self.dirty_bytes(slot, dram);
        self.engine.write(bytes, &mut Context { numbers: &self.numbers, devices })
    }

    fn leave(&mut self, slot: u32, dram: &PageCache, devices: &mut dyn Devices) {
        let page = self.numbers.number(dram.id(slot));
        self.engine.page_leaves(page, &mut Context { numbers: &self.numbers, devices });
    }

    fn sync_page(&mut self, slot: u32, dram: &mut PageCache, _devices: &mut dyn Devices) {
        let bytes = self.dirty_bytes(slot, dram);
        self.dirty.push(bytes);
    }

    fn end_file(&mut self, devices: &mut dyn Devices) -> Result<()> {
        let mut context = Context { numbers: &self.numbers, devices };
        let dirty = joined(std::mem::take(&mut self.dirty));
        dirty.into_iter().try_for_each(|bytes| self.engine.write(bytes, &mut context))
    }

    fn end_sync(&mut self, devices: &mut dyn Devices) -> Result<()> {
        self.engine.flush(&mut Context { numbers: &self.numbers, devices })
    }

    fn cut(&mut self, file: FileId, end: u64, devices: &mut dyn Devices) -> Result<()> {
        let Some(given) = self.given.get_mut(&file) else { return Ok(()) };
        let numbers = &mut self.numbers;
        let lost = given.split_off(&end).into_iter().map(|page| {
            let number = numbers.number(PageId { file, page });
            number..number + 1
        });
        let lost = joined(lost.collect());
        let mut context = Context { numbers: &self.numbers, devices };
        lost.into_iter().try_for_each(|pages| self.engine.discard(pages, &mut context))
    }

    fn index_bytes_peak(&self) -> u64 {
        self.engine.index_bytes_peak()
    }
}

/// Sorts `ranges`, and joins neighbours up to the maximum length of a write.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last)
                if last.end == range.start && range.end - last.start <= WRITE_BYTES_MAX as u64 =>
            {
                last.end = range.end;
            }
            _ => joined.push(range),
        }
    }
    joined
}
