//! `tidegate`: the shipped cache.
//!
//! The mode is `wo`: pages that are read from flash stay only in DRAM. A page that is truncated or
//! removed costs a header, and a slot until the slot is cleaned.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};

use rustc_hash::FxHashMap;
use tidegate::cache::mode::Mode;
use tidegate::cache::{
    self, Binding, CacheDevice, CacheDeviceOptions, CacheError, CacheHeader, CacheOptions,
};
use tidegate::device::{BlockDevice, BlockDeviceExt, Result as DeviceResult};
use tidegate::pool::PoolError;
use tidegate::tier::Tier;

use super::cache_watch::{CacheWork, Watch};
use super::work::{Backing, Teller, Work};
use super::{BLOCK_BYTES, Context, DEVICE_PAGES, Engine, failed, memory, read_page};
use crate::error::Result;
use crate::scheme::Sizes;
use crate::scheme::page::{ALL_LINES, LINE_BYTES, PAGE_BYTES};

/// The configuration that users choose for this scheme.
pub(in crate::scheme) const OFFER: &str =
    "a cache (`tidegate create --engine cache --block-size 512`, `tidegate serve --mode wo`)";
/// The failed component, in messages.
const CACHE: &str = "the cache for";
/// The mode that is played and offered.
const MODE: Mode = Mode::WriteOnly;
/// DRAM of the shipped index per slot (`cache::index`).
const INDEX_SLOT_BYTES: u64 = 32;
/// Index entries of a slot that has been split. The index has entries for a power of two of such
/// slots, at least for eight.
const ENTRIES_OF_SPLIT: u64 = 8;
const SPLITS_LEAST: u64 = 8;

/// The shipped cache.
pub(in crate::scheme) struct Cache {
    device: CacheDevice,
    works: Receiver<Work<CacheWork>>,
    teller: Teller,
    /// The page whose newest version a slot or part holds, by slot or part.
    slots: FxHashMap<u32, u64>,
    /// The slot of a page's newest version, and the lines in the cache, by page.
    stored: FxHashMap<u64, (u32, u64)>,
    index_bytes: u64,
    /// Maximum number of slots that were split at a time.
    most_split: Arc<AtomicUsize>,
}

impl Cache {
    pub(in crate::scheme) fn new(sizes: &Sizes) -> Result<Option<Self>> {
        // Space for more than two copies of each page is useless; headers take one page in 64.
        let useful = sizes.footprint_pages.saturating_mul(3 * PAGE_BYTES).saturating_add(1 << 20);
        let region = memory(sizes.pmem_bytes.min(useful))?;
        let options = CacheOptions { block_bytes: BLOCK_BYTES, ..CacheOptions::default() };
        let CacheHeader { places, salt, .. } = match cache::create(&region, &options) {
            Err(CacheError::Pool(PoolError::TooSmall { .. })) => return Ok(None),
            created => created.map_err(failed(CACHE))?,
        };
        let (work, works) = channel();
        let backing = Backing::of(&work);
        let watch = Watch::new(places, salt, work);
        let most_split = watch.most_split();
        let region = Arc::new(region.observed(Arc::new(watch)));
        let binding = Binding { identity: 1, name: "replay".into(), pages: DEVICE_PAGES };
        let atomic_flush = sizes.atomic;
        let options =
            CacheDeviceOptions { no_thread: true, atomic_flush, ..CacheDeviceOptions::default() };
        let device = CacheDevice::open(region, backing, binding, options).map_err(failed(CACHE))?;
        device.set_mode(MODE).map_err(failed(CACHE))?;
        // A trace has no content: all writes here store the same bytes.
        device.set("by-content", "off").map_err(failed(CACHE))?;
        // Creating the pool is not part of the trace.
        while works.try_recv().is_ok() {}
        Ok(Some(Self {
            device,
            works,
            teller: Teller::default(),
            slots: FxHashMap::default(),
            stored: FxHashMap::default(),
            index_bytes: u64::from(places.slots()) * INDEX_SLOT_BYTES,
            most_split,
        }))
    }

    /// Reports the cache's operations to the devices.
    fn report(&mut self, context: &mut Context<'_>) {
        while let Ok(work) = self.works.try_recv() {
            match self.teller.tell(work, context) {
                Some(CacheWork::Stored { slot, page, lines, zero }) => {
                    let (_, had) = self.stored.get(&page).copied().unwrap_or((slot, 0));
                    let lines_now = if zero { ALL_LINES } else { had | lines };
                    self.stored.insert(page, (slot, lines_now));
                    self.slots.insert(slot, page);
                    if !zero {
                        context.devices.pmem_store(context.numbers.id(page), lines);
                    }
                    context.devices.pmem_metadata(LINE_BYTES);
                }
                Some(CacheWork::Voided { slot }) => self.void(slot, context),
                None => {}
            }
        }
    }

    /// Handles a header of `slot` that became void.
    fn void(&mut self, slot: u32, context: &mut Context<'_>) {
        let page = self.slots.remove(&slot);
        let is_newest = |page: &u64| self.stored.get(page).is_some_and(|it| it.0 == slot);
        if let Some(page) = page.filter(is_newest) {
            self.stored.remove(&page);
            context.devices.pmem_forget(context.numbers.id(page));
        }
    }
}

impl Engine for Cache {
    fn read(&mut self, page: u64, context: &mut Context<'_>) -> Result<bool> {
        let stored = self.stored.get(&page).map(|(_, lines)| *lines);
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
        has.into_iter().try_for_each(|page| {
            self.call(context, move |device| device.discard(page * PAGE_BYTES, PAGE_BYTES))
        })
    }

    fn index_bytes_peak(&self) -> u64 {
        let splits = match self.most_split.load(Ordering::Relaxed) as u64 {
            0 => 0,
            most => most.next_power_of_two().max(SPLITS_LEAST),
        };
        self.index_bytes + splits * ENTRIES_OF_SPLIT * INDEX_SLOT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_that_is_offered_is_the_one_that_is_played() {
        let options = [
            "--engine cache ".to_owned(),
            format!("--block-size {BLOCK_BYTES}`"),
            format!("--mode {}`", MODE.name()),
        ];
        assert!(options.iter().all(|option| OFFER.contains(option)), "{OFFER}");
    }
}
