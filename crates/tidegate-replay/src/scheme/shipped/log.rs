//! `log`: the shipped log before a slower device.
//!
//! Each write is a record, durable with its one fence. From half a log on, the oldest records are
//! destaged in batches, the newest version of each block alone.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use rustc_hash::FxHashMap;
use tidegate::device::{BlockDevice, WriteFlags};
use tidegate::log::device::{Binding, LogDevice, LogDeviceError, LogDeviceOptions};
use tidegate::log::{self, LogError, LogOptions, LogPool};
use tidegate::pmem::Region;
use tidegate::pool::PoolError;

use super::log_watch::{LogWork, Watch};
use super::work::{Backing, Teller, Work};
use super::{
    BLOCK_BYTES, Context, DEVICE_PAGES, Engine, Failure, PAGE, data_of, failed, read_page,
    scheme_over,
};
use crate::error::Error;
use crate::scheme::page::{LINE_BYTES, PAGE_BYTES, lines_of, pages_of, part_of};
use crate::scheme::{Pmem, SchemeEntry, Sizes};

/// The entry of the scheme.
pub const ENTRY: SchemeEntry = SchemeEntry {
    name: "log",
    about: "the shipped log: a record of the dirty blocks for each write, destaged in batches",
    pmem: Pmem::Chosen,
    offer: Some("a log (`tidegate create --engine log`)"),
    holds_data: true,
    create: |sizes: &Sizes| scheme_over(sizes, Log::new),
};

/// Blocks of a page.
const BLOCKS: usize = PAGE / BLOCK_BYTES as usize;
const LINES_A_BLOCK: u64 = BLOCK_BYTES as u64 / LINE_BYTES;
/// DRAM of the shipped index, by block: two words and a control byte, in a hash table that is
/// between half and seven eighths full (`log::device::index`).
const INDEX_BLOCK_BYTES: u64 = 25;

impl From<LogError> for Failure {
    fn from(error: LogError) -> Self {
        match error {
            LogError::TooSmall { .. } | LogError::Pool(PoolError::TooSmall { .. }) => {
                Self::TooSmall
            }
            error => Self::Other(Error::Usage(format!("the log for a replay: {error}"))),
        }
    }
}

impl From<LogDeviceError> for Failure {
    fn from(error: LogDeviceError) -> Self {
        Self::Other(Error::Usage(format!("the log for a replay: {error}")))
    }
}

/// By block of a page: the position of the record that has it; none where no record does.
type Positions = [Option<u64>; BLOCKS];

/// The shipped log.
struct Log {
    device: LogDevice,
    works: Receiver<Work<LogWork>>,
    teller: Teller,
    /// By page that the log has blocks of.
    stored: FxHashMap<u64, Positions>,
    /// Records and their pages, the oldest first.
    order: VecDeque<(u64, u64)>,
    tail: u64,
    blocks: u64,
    blocks_peak: u64,
}

impl Log {
    fn new(sizes: &Sizes) -> Result<Self, Failure> {
        let region = Region::anonymous(sizes.pmem_bytes.max(PAGE_BYTES))?;
        let superblock = log::create(&region, &LogOptions::default())?;
        let (work, works) = channel();
        let backing = Backing::of(DEVICE_PAGES * PAGE_BYTES, &work);
        let watch = Watch::new(&superblock, work);
        let pool = LogPool::open(Arc::new(region.observed(Arc::new(watch))))?;
        let options = LogDeviceOptions { no_thread: true, ..LogDeviceOptions::default() };
        let device = LogDevice::open(pool, backing, Binding::unnamed(1), options)?;
        // To make the pool is not part of the trace.
        while works.try_recv().is_ok() {}
        Ok(Self {
            device,
            works,
            teller: Teller::default(),
            stored: FxHashMap::default(),
            order: VecDeque::new(),
            tail: 0,
            blocks: 0,
            blocks_peak: 0,
        })
    }

    /// Tells the devices what the log did.
    fn report(&mut self, context: &mut Context<'_>) {
        while let Ok(work) = self.works.try_recv() {
            match self.teller.tell(work, context) {
                Some(LogWork::Written { position, bytes }) => {
                    for page in pages_of(bytes.start, bytes.end - bytes.start) {
                        self.store(page, position, &bytes, context);
                    }
                }
                Some(LogWork::Zeroed { bytes }) => {
                    for page in pages_of(bytes.start, bytes.end - bytes.start) {
                        self.forget(page, context);
                    }
                }
                Some(LogWork::Retired { position }) => self.retire(position, context),
                None => {}
            }
        }
    }

    /// The record at `position` has `bytes` of the device, some of them of `page`.
    fn store(&mut self, page: u64, position: u64, bytes: &Range<u64>, context: &mut Context<'_>) {
        let lines = lines_of(&part_of(page, bytes.start, bytes.end - bytes.start));
        let positions = self.stored.entry(page).or_default();
        for (block, at) in (0..).zip(positions) {
            if lines >> (block * LINES_A_BLOCK) & 1 != 0 {
                self.blocks += u64::from(at.is_none());
                *at = Some(position);
            }
        }
        self.blocks_peak = self.blocks_peak.max(self.blocks);
        self.order.push_back((position, page));
        context.devices.pmem_store(context.numbers.id(page), lines);
    }

    /// Records before `position` do not count any more.
    fn retire(&mut self, position: u64, context: &mut Context<'_>) {
        self.tail = position;
        while let Some((_, page)) = self.order.front().copied().filter(|it| it.0 < position) {
            self.order.pop_front();
            if self.lines_of(page) == 0 {
                self.forget(page, context);
            }
        }
    }

    fn forget(&mut self, page: u64, context: &mut Context<'_>) {
        if let Some(positions) = self.stored.remove(&page) {
            self.blocks -= positions.iter().flatten().count() as u64;
            context.devices.pmem_forget(context.numbers.id(page));
        }
    }

    /// The lines of `page` that the log has.
    fn lines_of(&self, page: u64) -> u64 {
        let positions = self.stored.get(&page).into_iter().flatten();
        let blocks = (0..).zip(positions).filter(|(_, at)| at.is_some_and(|at| at >= self.tail));
        blocks.fold(0, |lines, (block, _)| lines | 0xff << (block * LINES_A_BLOCK))
    }
}

impl Engine for Log {
    fn read(&mut self, page: u64, context: &mut Context<'_>) -> Result<bool, Error> {
        let read = read_page(&self.device, &self.works, page, context)?;
        if read.is_loaded {
            context.devices.pmem_read(context.numbers.id(page), self.lines_of(page));
        }
        Ok(read.is_hit)
    }

    fn write(&mut self, bytes: Range<u64>, context: &mut Context<'_>) -> Result<(), Error> {
        let done = self.device.write(bytes.start, data_of(&bytes), WriteFlags::default());
        done.map_err(|error| failed(&error))?;
        self.report(context);
        Ok(())
    }

    fn flush(&mut self, context: &mut Context<'_>) -> Result<(), Error> {
        self.device.flush().map_err(|error| failed(&error))?;
        self.report(context);
        Ok(())
    }

    fn discard(&mut self, pages: Range<u64>, context: &mut Context<'_>) -> Result<(), Error> {
        let has: Vec<u64> = pages.filter(|page| self.stored.contains_key(page)).collect();
        for run in has.chunk_by(|one, next| one + 1 == *next) {
            let len = run.len() as u64 * PAGE_BYTES;
            self.device.discard(run[0] * PAGE_BYTES, len).map_err(|error| failed(&error))?;
        }
        self.report(context);
        Ok(())
    }

    fn index_bytes_peak(&self) -> u64 {
        self.blocks_peak * INDEX_BLOCK_BYTES
    }
}
