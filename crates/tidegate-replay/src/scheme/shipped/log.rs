//! `log`: the shipped log in front of a slower device.
//!
//! Each write is a record, which one fence makes durable. When the log is half full, the oldest
//! records are destaged in batches, only the newest version of each block.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use rustc_hash::FxHashMap;
use tidegate::device::{BlockDevice, BlockDeviceExt, Result as DeviceResult};
use tidegate::log::device::{Binding, LogDevice, LogDeviceOptions};
use tidegate::log::{self, LogError, LogOptions, LogPool};
use tidegate::pool::PoolError;

use super::log_watch::{LogWork, Watch};
use super::work::{Backing, Teller, Work};
use super::{BLOCK_BYTES, Context, Engine, PAGE, failed, memory, read_page};
use crate::error::Result;
use crate::scheme::Sizes;
use crate::scheme::page::{LINE_BYTES, PAGE_BYTES, lines_of, pages_of, part_of};

/// The failed component, in messages.
const LOG: &str = "the log for";
/// Blocks of a page.
const BLOCKS: usize = PAGE / BLOCK_BYTES as usize;
const LINES_A_BLOCK: u64 = BLOCK_BYTES as u64 / LINE_BYTES;
/// DRAM of the shipped index per block: two words and a control byte, in a hash table that is
/// between half and seven eighths full (`log::device::index`).
const INDEX_BLOCK_BYTES: u64 = 25;

/// Positions of the records with each block of a page; `None` if no record has the block.
type Positions = [Option<u64>; BLOCKS];

/// The shipped log.
pub(in crate::scheme) struct Log {
    device: LogDevice,
    works: Receiver<Work<LogWork>>,
    teller: Teller,
    /// Positions by page, for pages with blocks in the log.
    stored: FxHashMap<u64, Positions>,
    /// Positions of records and their pages, the oldest first.
    order: VecDeque<(u64, u64)>,
    tail: u64,
    blocks: u64,
    blocks_peak: u64,
}

impl Log {
    pub(in crate::scheme) fn new(sizes: &Sizes) -> Result<Option<Self>> {
        let region = memory(sizes.pmem_bytes)?;
        let superblock = match log::create(&region, &LogOptions::default()) {
            Err(LogError::TooSmall { .. } | LogError::Pool(PoolError::TooSmall { .. })) => {
                return Ok(None);
            }
            created => created.map_err(failed(LOG))?,
        };
        let (work, works) = channel();
        let backing = Backing::of(&work);
        let watch = Watch::new(&superblock, work);
        let region = Arc::new(region.observed(Arc::new(watch)));
        let pool = LogPool::open(region).map_err(failed(LOG))?;
        let options = LogDeviceOptions { no_thread: true, ..LogDeviceOptions::default() };
        let device =
            LogDevice::open(pool, backing, Binding::unnamed(1), options).map_err(failed(LOG))?;
        // Creating the pool is not part of the trace.
        while works.try_recv().is_ok() {}
        Ok(Some(Self {
            device,
            works,
            teller: Teller::default(),
            stored: FxHashMap::default(),
            order: VecDeque::new(),
            tail: 0,
            blocks: 0,
            blocks_peak: 0,
        }))
    }

    /// Reports the log's operations to the devices.
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

    /// Handles a record at `position` with `bytes` of the device, for the part in `page`.
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

    /// Drops the records before `position`.
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

    /// Returns the lines of `page` in the log.
    fn lines_of(&self, page: u64) -> u64 {
        let positions = self.stored.get(&page).into_iter().flatten();
        let blocks = (0..).zip(positions).filter(|(_, at)| at.is_some_and(|at| at >= self.tail));
        blocks.fold(0, |lines, (block, _)| lines | 0xff << (block * LINES_A_BLOCK))
    }
}

impl Engine for Log {
    fn read(&mut self, page: u64, context: &mut Context<'_>) -> Result<bool> {
        let stored = Some(self.lines_of(page));
        read_page(&self.device, &self.works, (page, stored), context)
    }

    fn call<T: Send + 'static>(
        &mut self,
        context: &mut Context<'_>,
        request: impl FnOnce(&dyn BlockDevice) -> DeviceResult<T> + Send + 'static,
    ) -> Result<T> {
        let result = request(&self.device).map_err(failed("the engine of"))?;
        self.report(context);
        Ok(result)
    }

    fn discard(&mut self, pages: Range<u64>, context: &mut Context<'_>) -> Result<()> {
        let has: Vec<u64> = pages.filter(|page| self.stored.contains_key(page)).collect();
        has.chunk_by(|one, next| one + 1 == *next).try_for_each(|run| {
            let (offset, len) = (run[0] * PAGE_BYTES, run.len() as u64 * PAGE_BYTES);
            self.call(context, move |device| device.discard(offset, len))
        })
    }

    fn index_bytes_peak(&self) -> u64 {
        self.blocks_peak * INDEX_BLOCK_BYTES
    }
}
