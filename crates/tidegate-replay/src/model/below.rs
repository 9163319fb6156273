//! The device below the DRAM tier of a modelled machine: a shipped engine on memory whose
//! operations take virtual time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate::btt::{self, Btt, BttOptions};
use tidegate::device::{
    Attempt, BlockDevice, BlockDeviceExt, Context, DeviceError, Geometry, Operation, Result,
};
use tidegate::pmem::{Observer, Region};
use tidegate::raw::{self, RawDevice, RawOptions};

use super::machine::spend;

/// Number of blocks that have memory.
const REAL_BLOCKS: u64 = 1 << 14;
/// Maximum size of an engine's pool beside its blocks: an arena's free blocks, map, log, headers.
const POOL_EXTRA_BYTES: u64 = 4 << 20;
/// Minimum size of a pool, for an arena of the block translation table.
const LEAST_POOL_BYTES: u64 = 20 << 20;

/// The engine of the device below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    Btt,
    Raw,
}

/// An engine's device with an inflated size: blocks at a distance of [`REAL_BLOCKS`] share memory.
/// The cost of a write does not depend on its offset, and the model ignores the data.
pub(crate) struct Below {
    device: Box<dyn BlockDevice>,
    geometry: Geometry,
    request_ns: u64,
    /// Set when the run is over: caches need not write back the rest.
    is_over: AtomicBool,
}

impl Below {
    /// Opens a device of `blocks` blocks. A request of the block translation table takes `btt_ns`
    /// beside its operations on the memory, which `observer` sees.
    ///
    /// # Errors
    /// Fails if the memory cannot be allocated, or the engine does not support this block size.
    pub(crate) fn open(
        engine: Engine,
        block_bytes: u32,
        blocks: u64,
        btt_ns: u64,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<Self>> {
        let bytes = REAL_BLOCKS * u64::from(block_bytes) + POOL_EXTRA_BYTES;
        let region = Region::anonymous(bytes.max(LEAST_POOL_BYTES)).map_err(failed)?;
        let region = region.observed(observer);
        let device: Box<dyn BlockDevice> = match engine {
            Engine::Btt => Box::new(open_btt(region, block_bytes)?),
            Engine::Raw => Box::new(open_raw(region, block_bytes)?),
        };
        let geometry = Geometry { blocks, ..device.geometry() };
        let request_ns = if engine == Engine::Btt { btt_ns } else { 0 };
        Ok(Arc::new(Self { device, geometry, request_ns, is_over: AtomicBool::new(false) }))
    }

    /// Makes later writes free and without effect.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    fn real(&self, offset: u64) -> u64 {
        offset % (REAL_BLOCKS * u64::from(self.geometry.block_bytes))
    }
}

fn failed(source: tidegate::pmem::PmemError) -> DeviceError {
    let context = "the memory of a modelled device cannot be had";
    DeviceError::with_source(tidegate::device::DeviceErrorKind::NoSpace, context, source)
}

fn open_btt(region: Region, lba_bytes: u32) -> Result<Btt> {
    let options = BttOptions { lba_bytes, ..BttOptions::default() };
    btt::create(&region, &options)?;
    Ok(Btt::open(Arc::new(region))?)
}

fn open_raw(region: Region, block_bytes: u32) -> Result<RawDevice> {
    raw::create(&region, &RawOptions { block_bytes, ..RawOptions::default() })?;
    Ok(RawDevice::open(Arc::new(region))?)
}

impl BlockDevice for Below {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.geometry.check_operation(operation)?;
        match *operation {
            Operation::Read { offset, ref mut buf } => {
                spend(self.request_ns);
                self.device.read(self.real(offset), buf)
            }
            Operation::Write { .. } if self.is_over.load(Ordering::Relaxed) => Ok(()),
            Operation::Write { offset, data, flags } => {
                spend(self.request_ns);
                self.device.write(self.real(offset), data, flags)
            }
            Operation::Flush => self.device.flush(),
            Operation::Discard { offset, len } => self.device.discard(self.real(offset), len),
            Operation::WriteZeroes { offset, len, flags } => {
                self.device.write_zeroes(self.real(offset), len, flags)
            }
            Operation::Status { .. } => {
                operation.report_data();
                Ok(())
            }
        }
    }

    /// Runs the operation at once: like the engines, the device never waits.
    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        Attempt::Done(self.run(operation))
    }
}
