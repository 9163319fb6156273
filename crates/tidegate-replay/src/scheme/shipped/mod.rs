//! Schemes that run a shipped engine itself, under pages in DRAM: `tidegate` ([`cache`]), `log`
//! ([`log`]) and the DRAM tiers ([`tiers`]).
//!
//! The engine runs here as it is served, on memory that is thrown away; an observer of that memory
//! and a device below see what it asks of both. So layout, records, order of eviction and batches
//! are not described anew: they are those of the core.
//!
//! DRAM is that of the other schemes, as a page cache is above a block device:
//! - a sync writes, of each dirty page, the blocks from the first dirty line to the last one; what
//!   is next to each other in one write;
//! - a page that DRAM gives up is written to the engine if lines of it are dirty, and else dropped:
//!   the engine answers when it is read again, so a synced page needs no write to flash;
//! - what a file loses is discarded where the engine has it, as a file system does that is mounted
//!   with `discard`.
//!
//! Cleaning ahead of need takes time that a replay does not have: `tidegate` and `log` clean where
//! space is needed, on a machine whose clock stands still (`still`). The DRAM tiers' own threads
//! run, in virtual time.

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
use std::ops::Range;
use std::rc::Rc;
use std::sync::mpsc::Receiver;

use rustc_hash::FxHashMap;
use tidegate::device::{BlockDevice, DeviceError};
use tidegate::machine::{Machine, enter};
use tidegate::pmem::PmemError;

use super::devices::Devices;
use super::page::{LINE_BYTES, PAGE_BYTES, PageId, lines_of, pages_of, part_of};
use super::page_cache::PageCache;
use super::{Requests, Scheme, Sizes, dram};
use crate::error::Error;
use crate::trace::{FileId, Op};
use numbers::Numbers;
use still::{OnMachine, Still};
use work::Work;

/// Blocks of a backing.
const BLOCK_BYTES: u32 = 512;
/// Pages of the device: more than a trace touches.
const DEVICE_PAGES: u64 = 1 << 40;
/// [`PAGE_BYTES`] as the length of a buffer.
const PAGE: usize = 4096;
/// Most bytes of one write.
const WRITE_BYTES_MAX: usize = 1 << 20;
/// What is written: the content does not matter, but zeroes might.
static DATA: [u8; WRITE_BYTES_MAX] = [0xa5; WRITE_BYTES_MAX];

/// Why an engine cannot be made.
enum Failure {
    /// There is less memory than the engine needs.
    TooSmall,
    Other(Error),
}

impl From<PmemError> for Failure {
    fn from(error: PmemError) -> Self {
        Self::Other(Error::Usage(format!("memory for a replay: {error}")))
    }
}

fn failed(error: &DeviceError) -> Error {
    Error::Usage(format!("the engine of a replay: {error}"))
}

/// What a write of `bytes` of a device writes.
fn data_of(bytes: &Range<u64>) -> &'static [u8] {
    &DATA[..usize::try_from(bytes.end - bytes.start).unwrap_or_default()]
}

/// Where the data of a page that was read came from.
struct PageRead {
    /// Memory had all of it.
    is_hit: bool,
    /// Memory had some of it.
    is_loaded: bool,
}

/// Reads `page` of an engine before a backing, which tells `works` what it does.
fn read_page<E: PartialEq>(
    device: &dyn BlockDevice,
    works: &Receiver<Work<E>>,
    page: u64,
    context: &mut Context<'_>,
) -> Result<PageRead, Error> {
    let mut buf = [0; PAGE];
    device.read(page * PAGE_BYTES, &mut buf).map_err(|error| failed(&error))?;
    let works: Vec<_> = works.try_iter().collect();
    let is_hit = !works.contains(&Work::BackingRead { page });
    if !is_hit {
        context.devices.ssd_read(context.numbers.id(page));
    }
    Ok(PageRead { is_hit, is_loaded: works.contains(&Work::Loaded) })
}

/// The scheme over the engine that `create` made. With less memory than that needs there is none.
fn scheme_over<E: Engine + 'static>(
    sizes: &Sizes,
    create: impl FnOnce(&Sizes) -> Result<E, Failure>,
) -> Result<Box<dyn Scheme>, Error> {
    scheme_on(Rc::new(Still), sizes, create)
}

/// The scheme over the engine that `create` makes on `machine`, where that runs too.
fn scheme_on<E: Engine + 'static>(
    machine: Rc<dyn Machine>,
    sizes: &Sizes,
    create: impl FnOnce(&Sizes) -> Result<E, Failure>,
) -> Result<Box<dyn Scheme>, Error> {
    let entered = enter(Rc::clone(&machine));
    let engine = create(sizes);
    drop(entered);
    match engine {
        Ok(engine) => {
            let scheme = Buffered::new(sizes.dram_pages, engine);
            Ok(Box::new(OnMachine { scheme, machine }))
        }
        Err(Failure::TooSmall) => (dram::ENTRY.create)(sizes),
        Err(Failure::Other(error)) => Err(error),
    }
}

/// The devices that an engine's work is told to, and whose pages the engine's are.
struct Context<'a> {
    numbers: &'a Numbers,
    devices: &'a mut dyn Devices,
}

/// A shipped engine with what it stands on. Pages are those of its device.
trait Engine {
    /// What a write covers is a multiple of this: [`BLOCK_BYTES`], or a page.
    const BLOCK_BYTES: u64 = BLOCK_BYTES as u64;

    /// Reads `page`. True where memory had all of it.
    fn read(&mut self, page: u64, context: &mut Context<'_>) -> Result<bool, Error>;

    /// Writes `bytes` of the device, at most [`WRITE_BYTES_MAX`].
    fn write(&mut self, bytes: Range<u64>, context: &mut Context<'_>) -> Result<(), Error>;

    /// Makes durable what was written.
    fn flush(&mut self, context: &mut Context<'_>) -> Result<(), Error>;

    /// Discards what the engine has of `pages`.
    fn discard(&mut self, pages: Range<u64>, context: &mut Context<'_>) -> Result<(), Error>;

    /// The pages in DRAM above the engine give `page` up.
    fn page_leaves(&mut self, page: u64, context: &mut Context<'_>) {
        context.devices.dram_forget(context.numbers.id(page));
    }

    /// Most bytes of DRAM so far that said what lies where.
    fn index_bytes_peak(&self) -> u64;
}

/// Pages in DRAM over an engine.
struct Buffered<E> {
    dram: PageCache,
    engine: E,
    numbers: Numbers,
    /// Pages that the engine was given and that were not discarded, by file.
    given: FxHashMap<FileId, BTreeSet<u64>>,
    requests: Requests,
    cut: Vec<u32>,
}

impl<E: Engine> Buffered<E> {
    fn new(dram_pages: u64, engine: E) -> Self {
        Self {
            dram: PageCache::new(dram_pages),
            engine,
            numbers: Numbers::default(),
            given: FxHashMap::default(),
            requests: Requests::default(),
            cut: Vec::new(),
        }
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
                let mut context = Context { numbers: &self.numbers, devices };
                self.engine.write(bytes, &mut context)?;
            }
            self.drop_page(victim, devices);
        }
        Ok(self.dram.insert(id))
    }

    fn drop_page(&mut self, slot: u32, devices: &mut dyn Devices) {
        let page = self.numbers.number(self.dram.id(slot));
        self.engine.page_leaves(page, &mut Context { numbers: &self.numbers, devices });
        self.dram.remove(slot);
    }

    /// Reads `id` from the engine. True: memory had all of it.
    fn load(&mut self, id: PageId, devices: &mut dyn Devices) -> Result<bool, Error> {
        let page = self.numbers.number(id);
        self.engine.read(page, &mut Context { numbers: &self.numbers, devices })
    }

    fn sync(&mut self, file: FileId, devices: &mut dyn Devices) -> Result<(), Error> {
        let mut dirty = Vec::new();
        while let Some(slot) = self.dram.first_dirty(file) {
            self.requests.synced_pages += 1;
            dirty.push(self.bytes_on_device(self.dram.id(slot), self.dram.dirty_lines(slot)));
            self.dram.clean(slot);
        }
        dirty.sort_unstable_by_key(|bytes| bytes.start);
        let mut context = Context { numbers: &self.numbers, devices };
        joined(&dirty).into_iter().try_for_each(|bytes| self.engine.write(bytes, &mut context))
    }

    /// The blocks of the device from the first to the last of `lines`.
    fn bytes_on_device(&mut self, id: PageId, lines: u64) -> Range<u64> {
        self.given.entry(id.file).or_default().insert(id.page);
        let page = self.numbers.number(id) * PAGE_BYTES;
        let first = u64::from(lines.trailing_zeros()) * LINE_BYTES;
        let end = u64::from(u64::BITS - lines.leading_zeros()) * LINE_BYTES;
        let block_bytes = E::BLOCK_BYTES;
        page + first - first % block_bytes..page + end.next_multiple_of(block_bytes)
    }

    fn end_sync(&mut self, devices: &mut dyn Devices) -> Result<(), Error> {
        self.engine.flush(&mut Context { numbers: &self.numbers, devices })
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
        let numbers = &mut self.numbers;
        let lost = given.split_off(&end).into_iter().map(|page| {
            let number = numbers.number(PageId { file, page });
            number..number + 1
        });
        let mut lost: Vec<Range<u64>> = lost.collect();
        lost.sort_unstable_by_key(|pages| pages.start);
        let mut context = Context { numbers: &self.numbers, devices };
        joined(&lost).into_iter().try_for_each(|pages| self.engine.discard(pages, &mut context))
    }
}

/// `ranges`, which are in order, with neighbours joined as long as one request takes them.
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

impl<E: Engine> Scheme for Buffered<E> {
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
        self.engine.index_bytes_peak()
    }
}
