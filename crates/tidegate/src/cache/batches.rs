//! Batches of dirty pages on their way to the backing: several at once, so that one is copied out
//! of its slots while the backing writes and flushes another.
//!
//! Two batches never have a page in common, as each begins a write to the buckets of its pages
//! (`traffic`) and drops those that are busy. A batch blocks its thread: a worker for each batch is
//! the same code as one batch of a simulator's scheduler.

use parking_lot::{Mutex, MutexGuard};

use super::Core;
use super::clean::Scratch;

/// Most batches at once: one is copied and written while another is flushed.
pub(super) const BATCHES_MAX: u32 = 2;

/// The batches of one cache.
#[derive(Default)]
pub(super) struct Batches {
    scratches: [Mutex<Scratch>; BATCHES_MAX as usize],
}

impl Batches {
    /// Number of batches that are under way, about.
    pub(super) fn under_way(&self) -> u32 {
        self.scratches.iter().map(|it| u32::from(it.is_locked())).sum()
    }

    /// Begins a batch, with memory for it. None: as many as can be are under way.
    pub(super) fn begin(&self) -> Option<MutexGuard<'_, Scratch>> {
        self.scratches.iter().find_map(Mutex::try_lock)
    }
}

impl Core {
    /// Begins a batch of a request.
    pub(super) fn begin_batch(&self) -> MutexGuard<'_, Scratch> {
        loop {
            match self.batches.begin() {
                Some(scratch) => return scratch,
                None => self.region.relax(),
            }
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use parking_lot::Condvar;

    use super::super::tests::{pool, write};
    use super::super::{Binding, CacheDevice, CacheDeviceOptions};
    use super::*;
    use crate::device::memory::MemoryDevice;
    use crate::device::{BlockDevice, Geometry, Result, WriteFlags, ZeroFlags};
    use crate::tier::Tier;

    const PAGES: u64 = 4000;

    /// Each flush waits for a write that comes beside it, until one came.
    struct Overlap {
        memory: MemoryDevice,
        /// Writes so far, and whether one came beside a flush.
        seen: Mutex<(u64, bool)>,
        wrote: Condvar,
    }

    impl BlockDevice for Overlap {
        fn geometry(&self) -> Geometry {
            self.memory.geometry()
        }

        fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
            self.memory.read(offset, buf)
        }

        fn write(&self, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
            self.seen.lock().0 += 1;
            self.wrote.notify_all();
            self.memory.write(offset, data, flags)
        }

        fn flush(&self) -> Result<()> {
            let mut seen = self.seen.lock();
            let writes = seen.0;
            let waits = |seen: &mut (u64, bool)| !seen.1 && seen.0 == writes;
            self.wrote.wait_while_for(&mut seen, waits, Duration::from_secs(20));
            seen.1 |= seen.0 > writes;
            Ok(())
        }

        fn discard(&self, offset: u64, len: u64) -> Result<()> {
            self.memory.discard(offset, len)
        }

        fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
            self.memory.write_zeroes(offset, len, flags)
        }
    }

    #[test]
    fn a_batch_is_written_while_another_is_flushed() {
        let (memory, wrote) = (MemoryDevice::new(4096, PAGES).unwrap(), Condvar::new());
        let backing = Arc::new(Overlap { memory, seen: Mutex::default(), wrote });
        let binding = Binding { identity: 1, name: "overlap".into(), pages: PAGES };
        let options = CacheDeviceOptions { keep_free: Some(100), ..Default::default() };
        let device = CacheDevice::open(pool(1400), backing.clone(), binding, options).unwrap();
        device.set("cleaning", "nop").unwrap();
        (0..PAGES).for_each(|page| write(&device, page, 1));
        assert!(backing.seen.lock().1, "one batch at a time");
        device.shutdown().unwrap();
    }
}
