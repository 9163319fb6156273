//! The DRAM tier: a volatile write cache over any [`BlockDevice`].
//!
//! Invariants, whatever the policy:
//! 1. A read returns the last acknowledged write, from the cache or from below.
//! 2. A block reaches the device below whole, by one write, so blocks stay as atomic as the device
//!    makes them.
//! 3. Two versions of a block are never written below at the same time, and the newer one goes
//!    last.
//! 4. After an acknowledged flush, every write acknowledged before it began is durable. A flush
//!    waits for no write that began after it.
//! 5. A failed write-back loses nothing: the block stays dirty and readable, the next flush or FUA
//!    reports the error, and every later flush tries again and reports until it succeeds.
//!
//! Entry points: [`TierSpec`] parses `POLICY:SIZE`, [`open`] makes a tier, [`describe`] returns its
//! summary without making it, [`driven`] makes one for a simulator, and [`DramTier`] adds to the
//! methods of a device. The policies: `transit` (the Caiti paper), `staging` (the policies that the
//! paper compares with), and none. Shared parts: `slots` (the buffers), `free_set` (free slots),
//! `read` (hits and runs of misses), [`phases`] (time by phase).

pub mod driven;
mod free_set;
mod passthrough;
pub mod phases;
mod read;
mod slots;
mod spec;
mod staging;
#[cfg(all(test, not(loom)))]
mod suite;
mod tier;
mod transit;

use std::sync::Arc;

use crate::device::null::NullDevice;
use crate::device::{BlockDevice, DeviceError, DeviceErrorKind, Geometry, Result};
use crate::tier::Tier;
use crate::tier::ledger::Ledger;

use passthrough::Passthrough;
use transit::Transit;

pub use phases::Phases;
pub use spec::{Policy, SpecError, TierSpec};
pub use tier::lines_of;

/// The name of a DRAM tier in messages.
const NAME: &str = "the DRAM tier";

/// Makes the error of a worker whose thread the system refuses.
fn no_thread(error: std::io::Error) -> DeviceError {
    let context = "cannot start a background thread of the DRAM tier";
    DeviceError::with_source(DeviceErrorKind::Io, context, error)
}

/// Makes the error of a flush that found `lba` still dirty.
fn still_dirty(ledger: &Ledger, lba: u64) -> DeviceError {
    ledger.blocked(&format!("block {lba} still cannot be written back from {NAME}"))
}

/// A DRAM tier: a device that caches writes to the device below. [`drain`](Tier::drain) writes back
/// all its data.
pub trait DramTier: Tier {
    /// Returns the tier's settings and current state.
    fn summary(&self) -> TierSummary;

    /// Returns the time of each phase since the tier was opened.
    fn phases(&self) -> Phases;
}

/// Settings and state of a DRAM tier.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TierSummary {
    /// The policy.
    pub policy: Policy,
    /// Capacity for cached data in bytes.
    pub capacity_bytes: u64,
    /// Size of a slot's data in bytes: a block of the device below.
    pub block_bytes: u32,
    /// Number of slots.
    pub slots: u64,
    /// Number of sets of slots (1 if the policy has a single index).
    pub sets: u32,
    /// Bytes of metadata by slot, index and locks included.
    pub metadata_bytes_per_slot: f64,
    /// Slots that hold data not yet written back.
    pub dirty_slots: u64,
    /// Slots whose last write-back failed: they stay dirty, and flushes try again.
    pub failed_slots: u64,
    /// Background threads that may run at once.
    pub threads: u32,
}

/// Opens a tier of at most `bytes` bytes of data over `below`.
///
/// ```
/// use std::sync::Arc;
/// use tidegate::device::memory::MemoryDevice;
/// use tidegate::device::{BlockDeviceExt, WriteFlags};
/// use tidegate::dram::{self, Policy};
///
/// let below = Arc::new(MemoryDevice::new(4096, 1024)?);
/// let tier = dram::open(Policy::Transit, 1 << 20, below.clone())?;
/// tier.write(0, &[5; 4096], WriteFlags::default())?; // Acknowledged from DRAM.
/// tier.flush()?; // In the device below, and durable there.
/// let mut block = [0; 4096];
/// below.read(0, &mut block)?;
/// assert_eq!(block, [5; 4096]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails as [`DeviceErrorKind::Unsupported`] if no cache slot has the size of the device's blocks,
/// or if `bytes` hold fewer slots than the policy needs or more than it can number.
pub fn open(policy: Policy, bytes: u64, below: Arc<dyn BlockDevice>) -> Result<Arc<dyn DramTier>> {
    (maker(policy)?.open)(policy, bytes, below)
}

/// Returns the summary of the tier that [`open`] would make over a device of this geometry, without
/// allocating its memory or starting a thread.
///
/// # Errors
/// Fails as [`open`] does.
pub fn describe(policy: Policy, bytes: u64, geometry: Geometry) -> Result<TierSummary> {
    let below = Arc::new(NullDevice::like(geometry));
    (maker(policy)?.describe)(policy, bytes, below)
}

type Below = Arc<dyn BlockDevice>;

/// Opens and describes tiers of one type, for all its policies.
trait Make: DramTier + Sized {
    /// Opens a tier of `policy` over `below`; see [`open`].
    fn open(policy: Policy, bytes: u64, below: Below) -> Result<Self>;

    /// Returns the summary of the tier that [`open`](Self::open) would make.
    fn describe(policy: Policy, bytes: u64, below: Below) -> Result<TierSummary>;
}

/// The functions of [`Make`] for one type.
struct Maker {
    open: fn(Policy, u64, Below) -> Result<Arc<dyn DramTier>>,
    describe: fn(Policy, u64, Below) -> Result<TierSummary>,
}

impl Maker {
    fn of<T: Make + 'static>() -> Self {
        let open = |policy, bytes, below| Ok(Arc::new(T::open(policy, bytes, below)?) as Arc<_>);
        Self { open, describe: T::describe }
    }
}

fn maker(policy: Policy) -> Result<Maker> {
    match policy {
        Policy::None => Ok(Maker::of::<Passthrough>()),
        Policy::Transit | Policy::TransitNoEager | Policy::TransitNoBypass => {
            Ok(Maker::of::<Transit>())
        }
        Policy::Pmbd | Policy::Pmbd70 | Policy::Lru | Policy::Coactive => staging::maker(policy),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_described_is_what_opens() {
        let below = Arc::new(NullDevice::new(512, 1000).unwrap());
        for &policy in Policy::ALL {
            let bytes = if policy == Policy::None { 0 } else { 40_000 };
            let described = describe(policy, bytes, below.geometry()).unwrap();
            assert_eq!(described, open(policy, bytes, below.clone()).unwrap().summary());
        }
        let nothing = describe(Policy::Transit, 511, below.geometry());
        assert_eq!(nothing.unwrap_err().kind(), crate::device::DeviceErrorKind::Unsupported);
    }
}
