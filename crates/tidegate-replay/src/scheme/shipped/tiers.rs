//! `btt`, `transit`, `transit-no-eager`, `transit-no-bypass`, `pmbd`, `pmbd70`, `lru` and
//! `coactive`: the shipped block translation table, alone or under a DRAM tier. All data is on
//! persistent memory: there is no flash.
//!
//! The tier runs with its own threads on a machine of four CPUs in virtual time (`model::machine`):
//! the threads write back while the program continues, and a sync waits for the remaining blocks. A
//! tier has an eighth of the DRAM; the pages above it have the rest.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use tidegate::device::{
    Attempt, BlockDevice, BlockDeviceExt, Context as Waiting, Geometry, Operation,
    Result as DeviceResult,
};
use tidegate::dram::{self, DramTier, Policy};
use tidegate::pmem::Observer;

use super::{Context, DEVICE_PAGES, Engine, PAGE, Shipped, failed};
use crate::error::Result;
use crate::model::below::{Below, Engine as EngineBelow};
use crate::model::machine::{Deadlock, ModelledMemory, Session, lock, spend};
use crate::scheme::page::{ALL_LINES, PAGE_BYTES, pages_of};
use crate::scheme::{Scheme, Sizes};

/// The failed component, in messages.
const TIER: &str = "the DRAM tier of";
/// CPUs of the machine, including one for the program.
const CPUS: u32 = 4;
/// Divisor of the DRAM for the size of a tier.
const TIER_SHARE: u64 = 8;
/// Minimum number of pages of a tier.
const TIER_PAGES_MIN: u64 = 8;

/// The configuration that users choose for a tier: `NAME` is the scheme, `SIZE` the tier's size.
pub(in crate::scheme) const OFFER: &str =
    "a block translation table for all data, served with `--dram NAME:SIZE`";

/// Returns the number of pages of a DRAM tier, out of `dram_pages` pages of DRAM.
pub fn tier_pages(dram_pages: u64) -> u64 {
    (dram_pages / TIER_SHARE).max(TIER_PAGES_MIN)
}

/// Returns the scheme of a tier with `policy`.
pub(in crate::scheme) fn tier(sizes: &Sizes, policy: Policy) -> Result<Box<dyn Scheme>> {
    let tier_pages = match policy {
        Policy::None => 0,
        _ => tier_pages(sizes.dram_pages),
    };
    let page_cache_pages = sizes.dram_pages.saturating_sub(tier_pages).max(1);
    let tier = Tier::new(policy, tier_pages * PAGE_BYTES, sizes)?;
    Ok(Box::new(Shipped::scheme(page_cache_pages, tier)))
}

/// An operation of the table below a tier; operations arrive in order.
enum Work {
    /// A page was written.
    Stored {
        page: u64,
    },
    /// Metadata that was stored before.
    Metadata {
        bytes: u64,
    },
    Fence,
    /// A page was read.
    Loaded {
        page: u64,
    },
}

/// A tier over a block translation table.
struct Tier {
    session: Session,
    device: Option<Arc<dyn DramTier>>,
    table: Arc<Below>,
    works: Receiver<Work>,
    /// End of the last request, on the program's clock.
    ended_ns: f64,
    index_bytes: u64,
}

impl Tier {
    fn new(policy: Policy, bytes: u64, sizes: &Sizes) -> Result<Self> {
        let costs = &sizes.costs;
        let (work, works) = channel();
        let watch = Arc::new(Watch::default());
        let observer = Arc::clone(&watch) as Arc<dyn Observer>;
        let page_bytes = u32::try_from(PAGE_BYTES).unwrap_or(u32::MAX);
        let table = Below::open(EngineBelow::Btt, page_bytes, DEVICE_PAGES, costs.btt_ns, observer)
            .map_err(failed("the engine of"))?;
        watch.forget();
        let below = Arc::new(Watched { table: Arc::clone(&table), watch, work });
        let mut session = Session::new(costs, sizes.pmem_media.clone(), CPUS);
        let (tier, _) = session
            .call(move || dram::open(policy, bytes, below as Arc<dyn BlockDevice>))
            .map_err(failed(TIER))?;
        let tier = tier.map_err(failed("the engine of"))?;
        let index_bytes = index_bytes_of(tier.as_ref());
        Ok(Self { session, device: Some(tier), table, works, ended_ns: 0.0, index_bytes })
    }

    /// Reports the table's operations to the devices. The machine accounts for their time.
    fn report(&mut self, context: &mut Context<'_>) {
        let Context { numbers, devices } = context;
        for work in self.works.try_iter() {
            match work {
                Work::Stored { page } => devices.pmem_store(numbers.id(page), ALL_LINES),
                Work::Metadata { bytes } => devices.pmem_metadata(bytes),
                Work::Fence => devices.pmem_fence(),
                Work::Loaded { page } => devices.pmem_read(numbers.id(page), ALL_LINES),
            }
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time ahead")]
fn whole_ns(ns: f64) -> u64 {
    ns.max(0.0).round() as u64
}

/// Returns the bytes of DRAM that a tier needs beside its data.
fn index_bytes_of(tier: &dyn DramTier) -> u64 {
    let summary = tier.summary();
    #[expect(clippy::cast_precision_loss, reason = "a number of slots")]
    let bytes = summary.metadata_bytes_per_slot * summary.slots as f64;
    whole_ns(bytes)
}

impl Drop for Tier {
    fn drop(&mut self) {
        self.table.end();
        let tier = self.device.take();
        if std::thread::panicking() {
            // The machine's threads no longer run: the tier cannot stop its own threads.
            return std::mem::forget(tier);
        }
        // Deadlocked threads are abandoned.
        let _ = self.session.call(move || drop(tier));
    }
}

impl Engine for Tier {
    const BLOCK_BYTES: u64 = PAGE_BYTES;

    fn read(&mut self, page: u64, context: &mut Context<'_>) -> Result<bool> {
        self.call(context, move |tier| {
            let mut buf = [0; PAGE];
            tier.read(page * PAGE_BYTES, &mut buf)
        })?;
        Ok(true)
    }

    /// Executes the request on the machine, after the program's time since the last request.
    fn call<T: Send + 'static>(
        &mut self,
        context: &mut Context<'_>,
        request: impl FnOnce(&dyn BlockDevice) -> DeviceResult<T> + Send + 'static,
    ) -> Result<T> {
        let Some(tier) = self.device.clone() else { return Err(failed(TIER)(Deadlock::default())) };
        let begun_ns = context.devices.now_ns();
        let since_ns = whole_ns(begun_ns - self.ended_ns);
        let call = move || {
            spend(since_ns);
            request(&*tier)
        };
        let (result, took_ns) = self.session.call(call).map_err(failed(TIER))?;
        self.report(context);
        #[expect(clippy::cast_precision_loss, reason = "a duration")]
        let own_ns = took_ns.saturating_sub(since_ns) as f64;
        self.ended_ns = begun_ns + own_ns;
        context.devices.set_now_ns(self.ended_ns);
        result.map_err(failed("the engine of"))
    }

    fn discard(&mut self, pages: Range<u64>, context: &mut Context<'_>) -> Result<()> {
        let len = (pages.end - pages.start) * PAGE_BYTES;
        self.call(context, move |tier| tier.discard(pages.start * PAGE_BYTES, len))
    }

    /// Does nothing: the tier, which is DRAM, may still have the page.
    fn page_leaves(&mut self, _page: u64, _context: &mut Context<'_>) {}

    fn index_bytes_peak(&self) -> u64 {
        self.index_bytes
    }
}

/// Counts the table's stores of metadata and its fences, by thread of the machine. So a write is
/// reported with its own fences, regardless of other threads.
#[derive(Default)]
struct Watch(Mutex<Vec<Counts>>);

#[derive(Default, Clone)]
struct Counts {
    metadata_bytes: u64,
    fences: u64,
}

impl Watch {
    fn forget(&self) {
        lock(&self.0).clear();
    }

    /// Changes the counts of the calling thread.
    fn with_mine<T>(&self, change: impl FnOnce(&mut Counts) -> T) -> T {
        let (mut all, mine) = (lock(&self.0), ModelledMemory.thread_ordinal());
        if all.len() <= mine {
            all.resize(mine + 1, Counts::default());
        }
        change(&mut all[mine])
    }

    /// Reports the counts after a write, which ends with a fence. The stores of a discard need no
    /// fence, and are reported with the next write.
    fn send(&self, work: &Sender<Work>) {
        let Counts { metadata_bytes: bytes, fences } = self.with_mine(std::mem::take);
        if bytes > 0 {
            // The receiver no longer exists while the tier is dropped.
            let _ = work.send(Work::Metadata { bytes });
        }
        for _ in 0..fences {
            let _ = work.send(Work::Fence);
        }
    }
}

impl Observer for Watch {
    fn store(&self, offset: u64, data: &[u8], non_temporal: bool) {
        if data.len() < PAGE {
            self.with_mine(|mine| mine.metadata_bytes += data.len() as u64);
        }
        ModelledMemory.store(offset, data, non_temporal);
    }

    fn write_back(&self, offset: u64, len: u64) {
        ModelledMemory.write_back(offset, len);
    }

    fn fence(&self) {
        self.with_mine(|mine| mine.fences += 1);
        ModelledMemory.fence();
    }

    fn load(&self, offset: u64, len: u64) {
        ModelledMemory.load(offset, len);
    }

    fn relax(&self) {
        ModelledMemory.relax();
    }

    fn thread_ordinal(&self) -> usize {
        ModelledMemory.thread_ordinal()
    }
}

/// The table, with reports of its operations.
struct Watched {
    table: Arc<Below>,
    watch: Arc<Watch>,
    work: Sender<Work>,
}

impl Watched {
    fn send_pages(&self, offset: u64, len: u64, work: impl Fn(u64) -> Work) {
        for page in pages_of(offset, len) {
            let _ = self.work.send(work(page));
        }
    }
}

impl BlockDevice for Watched {
    fn geometry(&self) -> Geometry {
        self.table.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> DeviceResult<()> {
        self.table.run(operation)?;
        let (offset, len) = operation.range();
        match operation {
            Operation::Read { .. } => self.send_pages(offset, len, |page| Work::Loaded { page }),
            Operation::Write { .. } => {
                self.send_pages(offset, len, |page| Work::Stored { page });
                self.watch.send(&self.work);
            }
            _ => {}
        }
        Ok(())
    }

    /// Runs the operation at once: like the table, the device never waits.
    fn attempt(&self, operation: &mut Operation<'_>, _context: Waiting) -> Attempt {
        Attempt::Done(self.run(operation))
    }
}
