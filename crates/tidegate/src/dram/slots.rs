//! The data of the slots: one reservation of DRAM, and a reader-writer lock for each slot.
//!
//! Streaming stores copy blocks in, around the CPU's cache: the slot's lines are in the cache of
//! the core that wrote it back last, and moving 64 lines from there costs more than the copy. A
//! write-back writes directly from its slot.
//!
//! A policy decides by its own state which slot holds which block; the lock here only prevents
//! reads of a slot while its bytes change. Lock order: a policy's own locks first, a slot's last.

use crate::device::{DeviceError, DeviceErrorKind, Result};
use crate::pmem::{self, Buffers, PmemError, ReadBuffer};
use crate::sync::machine::copied;
use crate::tier::list::MAX_SLOTS;

/// Bytes of a slot's lock, besides its data.
pub(super) const LOCK_BYTES: usize = Buffers::OVERHEAD_BYTES;

/// The number for "no slot": the highest 32-bit number.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// The data of all slots of a tier.
pub(super) struct Slots {
    buffers: Buffers,
}

impl Slots {
    /// Makes as many slots of `block_bytes` as `bytes` hold, and touches all their memory.
    ///
    /// # Errors
    /// Fails as [`DeviceErrorKind::Unsupported`] if that is no slot, or more than can be numbered,
    /// and as [`DeviceErrorKind::NoSpace`] if the system does not have the memory.
    pub(super) fn new(bytes: u64, block_bytes: u32) -> Result<Self> {
        let buffers = Buffers::new(count(bytes, block_bytes)?, block_bytes);
        Ok(Self { buffers: buffers.map_err(no_memory)? })
    }

    /// Makes as many slots as [`new`](Self::new); memory is allocated only when written.
    ///
    /// # Errors
    /// Fails as [`new`](Self::new) does.
    pub(super) fn reserve(bytes: u64, block_bytes: u32) -> Result<Self> {
        let buffers = Buffers::reserve(count(bytes, block_bytes)?, block_bytes);
        Ok(Self { buffers: buffers.map_err(no_memory)? })
    }

    /// Returns the number of slots.
    pub(super) fn count(&self) -> u32 {
        self.buffers.count()
    }

    /// Copies a block into `slot`; waits until no thread reads the slot.
    pub(super) fn copy_in(&self, slot: u32, block: &[u8]) {
        pmem::copy_streaming(&mut self.buffers.write(slot), block);
        copied(block.len());
    }

    /// Returns the block in `slot`. It does not change until the guard is dropped.
    pub(super) fn lock(&self, slot: u32) -> ReadBuffer<'_> {
        self.buffers.read(slot)
    }
}

fn no_memory(source: PmemError) -> DeviceError {
    let context = "so much memory cannot be had; choose a smaller size";
    DeviceError::with_source(DeviceErrorKind::NoSpace, context, source)
}

/// Returns how many slots of `block_bytes` fit into `bytes`.
fn count(bytes: u64, block_bytes: u32) -> Result<u32> {
    let asked = bytes / u64::from(block_bytes.max(1));
    let count = u32::try_from(asked).ok().filter(|&count| (1..=MAX_SLOTS).contains(&count));
    count.ok_or_else(|| {
        let context = format!(
            "a cache of {bytes} bytes holds {asked} blocks of {block_bytes} bytes; expected 1 to {MAX_SLOTS}"
        );
        DeviceError::new(DeviceErrorKind::Unsupported, context)
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slots_hold_blocks_of_each_size_apart() {
        for block_bytes in [512_u32, 4096] {
            let slots = Slots::new(u64::from(block_bytes) * 3 + 1, block_bytes).unwrap();
            assert_eq!(slots.count(), 3);
            for slot in 0..3_u8 {
                slots.copy_in(slot.into(), &vec![slot + 1; block_bytes as usize]);
            }
            for slot in 0..3_u8 {
                let block = slots.lock(slot.into());
                assert_eq!(block.len(), block_bytes as usize);
                assert!(block.iter().all(|&byte| byte == slot + 1));
            }
        }
    }

    #[test]
    fn sizes_that_make_no_slots_are_refused() {
        let kind = |bytes, block_bytes| Slots::new(bytes, block_bytes).err().unwrap().kind();
        assert_eq!(kind(4095, 4096), DeviceErrorKind::Unsupported);
        assert_eq!(kind(u64::MAX, 512), DeviceErrorKind::Unsupported);
    }
}
