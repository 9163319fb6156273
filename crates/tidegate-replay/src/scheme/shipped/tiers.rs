//! `btt`, `transit`, `transit-no-eager`, `transit-no-bypass`, `pmbd`, `pmbd70`, `lru` and
//! `coactive`: the shipped block translation table, alone or under a DRAM tier. All data is on
//! persistent memory: there is no flash.
//!
//! The tier runs with its own threads on a machine of four CPUs in virtual time
//! (`model::machine`): they write back while the program goes on, and a sync
//! waits for what is left. A tier has an eighth of the DRAM; pages above it have the rest.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use tidegate::device::{
    Attempt, BlockDevice, Context as Waiting, Geometry, Operation, Result as DeviceResult,
    WriteFlags, ZeroFlags,
};
use tidegate::dram::{self, DramTier, Policy};
use tidegate::pmem::Observer;

use super::{Context, DEVICE_PAGES, Engine, PAGE, Shipped, failed};
use crate::error::Result;
use crate::model::below::{Below, Engine as EngineBelow};
use crate::model::costs::Costs;
use crate::model::machine::{Deadlock, ModelledMemory, Session, lock, spend};
use crate::scheme::page::{ALL_LINES, PAGE_BYTES, pages_of};
use crate::scheme::{Scheme, Sizes};

/// What failed, in messages.
const TIER: &str = "the DRAM tier of";
/// CPUs of the machine: the program has one.
const CPUS: u32 = 4;
/// Of the DRAM, a tier has one part in so many.
const TIER_SHARE: u64 = 8;
/// No tier has fewer pages.
const TIER_PAGES_MIN: u64 = 8;

/// What users choose to have one: `NAME` is the scheme, `SIZE` what the tier has.
pub(in crate::scheme) const OFFER: &str =
    "a block translation table for all data, served with `--dram NAME:SIZE`";

/// Pages of a DRAM tier, where there are `dram_pages` pages of DRAM.
pub fn tier_pages(dram_pages: u64) -> u64 {
    (dram_pages / TIER_SHARE).max(TIER_PAGES_MIN)
}

/// The scheme of a tier with `policy`.
pub(in crate::scheme) fn tier(sizes: &Sizes, policy: Policy) -> Result<Box<dyn Scheme>> {
    let tier_pages = match policy {
        Policy::None => 0,
        _ => tier_pages(sizes.dram_pages),
    };
    let page_cache_pages = sizes.dram_pages.saturating_sub(tier_pages).max(1);
    let tier = Tier::new(policy, tier_pages * PAGE_BYTES, sizes)?;
    Ok(Box::new(Shipped::scheme(page_cache_pages, tier)))
}

/// What the table below a tier did, in its order.
enum Work {
    /// A page was written.
    Stored {
        page: u64,
    },
    /// Bytes that say what is where were stored before.
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
    /// When the last request ended, on the program's clock.
    ended_ns: f64,
    index_bytes: u64,
}

impl Tier {
    fn new(policy: Policy, bytes: u64, sizes: &Sizes) -> Result<Self> {
        let dram_copy_bytes_per_s = sizes.dram_bytes_per_s;
        let costs = Costs { dram_copy_bytes_per_s, ..Costs::optane() };
        let (work, works) = channel();
        let watch = Arc::new(Watch::default());
        let observer = Arc::clone(&watch) as Arc<dyn Observer>;
        let page_bytes = u32::try_from(PAGE_BYTES).unwrap_or(u32::MAX);
        let table = Below::open(EngineBelow::Btt, page_bytes, DEVICE_PAGES, costs.btt_ns, observer)
            .map_err(failed("the engine of"))?;
        watch.forget();
        let below = Arc::new(Watched { table: Arc::clone(&table), watch, work });
        let mut session = Session::new(&costs, sizes.pmem_media.clone(), CPUS);
        let (tier, _) = session
            .call(move || dram::open(policy, bytes, below as Arc<dyn BlockDevice>))
            .map_err(failed(TIER))?;
        let tier = tier.map_err(failed("the engine of"))?;
        let index_bytes = index_bytes_of(tier.as_ref());
        Ok(Self { session, device: Some(tier), table, works, ended_ns: 0.0, index_bytes })
    }

    /// Tells the devices what the table did. What that took, the machine knows.
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

/// DRAM that a tier needs beside its data.
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
            // No thread of the machine goes on: the tier cannot stop its own.
            return std::mem::forget(tier);
        }
        // Where its threads wait for each other, they are left as they are.
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

    /// On the machine, where the program's time since the last request passes first.
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

    /// The tier, which is DRAM, may have it still.
    fn page_leaves(&mut self, _page: u64, _context: &mut Context<'_>) {}

    fn index_bytes_peak(&self) -> u64 {
        self.index_bytes
    }
}

/// Counts what the table stores beside its blocks, and its fences, by the thread of the machine: a
/// write is told of with its own fences, whatever other threads do meanwhile.
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

    /// Tells of what was counted. After a write, which ends with a fence: what a discard stores
    /// needs none, and goes with the next write.
    fn send(&self, work: &Sender<Work>) {
        let Counts { metadata_bytes: bytes, fences } = self.with_mine(std::mem::take);
        if bytes > 0 {
            // The receiver is gone while the tier is dropped.
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

/// The table, telling of what it does.
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

    fn read(&self, offset: u64, buf: &mut [u8]) -> DeviceResult<()> {
        self.table.read(offset, buf)?;
        self.send_pages(offset, buf.len() as u64, |page| Work::Loaded { page });
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8], flags: WriteFlags) -> DeviceResult<()> {
        self.table.write(offset, data, flags)?;
        self.send_pages(offset, data.len() as u64, |page| Work::Stored { page });
        self.watch.send(&self.work);
        Ok(())
    }

    fn flush(&self) -> DeviceResult<()> {
        self.table.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> DeviceResult<()> {
        self.table.discard(offset, len)
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> DeviceResult<()> {
        self.table.write_zeroes(offset, len, flags)
    }

    /// At the speed of memory, as the table is.
    fn attempt(&self, operation: &mut Operation<'_>, _context: Waiting) -> Attempt {
        Attempt::Done(operation.run_on(self))
    }
}
