//! The floor under every block device on persistent memory: the bare stores, with nothing decided
//! or translated.

use std::sync::Arc;

use tidegate::device::{BlockDevice, DeviceError, Geometry, Operation};
use tidegate::pmem::Region;

type Result<T> = std::result::Result<T, DeviceError>;

/// Bytes of the commit word of a block.
const WORD_BYTES: u64 = 8;

/// Blocks copied to their offset by streaming stores, and nothing that makes them atomic.
///
/// With one fence a write is the copy and the fence that makes it durable. With two, an 8-byte word
/// of the block in a table behind the data is then stored, its line written back and fenced: the
/// least that any engine needs which commits data by a pointer.
pub(crate) struct BareCopy {
    region: Arc<Region>,
    block_bytes: u32,
    blocks: u64,
    commit: bool,
}

/// Returns the geometry of a device that promises nothing but durable writes.
pub(crate) fn geometry(block_bytes: u32, blocks: u64) -> Geometry {
    Geometry {
        block_bytes,
        blocks,
        preferred_bytes: block_bytes,
        read_only: false,
        atomic_block: false,
        volatile_cache: false,
        fast_zero: false,
        keeps_data: true,
    }
}

impl BareCopy {
    /// Makes a device of all of `region`, as blocks of `block_bytes` with a word each; `commit`
    /// adds the word and the second fence.
    pub(crate) fn new(region: Arc<Region>, block_bytes: u32, commit: bool) -> Self {
        let blocks = region.len_bytes() / (u64::from(block_bytes) + WORD_BYTES);
        Self { region, block_bytes, blocks, commit }
    }

    fn write_blocks(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.region.write_streaming(offset, data)?;
        self.region.fence()?;
        if self.commit { self.commit(offset, data.len() as u64) } else { Ok(()) }
    }

    fn commit(&self, offset: u64, len: u64) -> Result<()> {
        let table = self.geometry().size_bytes();
        let block_bytes = u64::from(self.block_bytes);
        for block in offset / block_bytes..(offset + len) / block_bytes {
            self.region.store_u64(table + block * WORD_BYTES, offset)?;
            self.region.write_back(table + block * WORD_BYTES, WORD_BYTES)?;
        }
        Ok(self.region.fence()?)
    }
}

impl BlockDevice for BareCopy {
    fn geometry(&self) -> Geometry {
        geometry(self.block_bytes, self.blocks)
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.geometry().check_operation(operation)?;
        match *operation {
            Operation::Read { offset, ref mut buf } => Ok(self.region.read(offset, buf)?),
            Operation::Write { offset, data, .. } => self.write_blocks(offset, data),
            Operation::WriteZeroes { offset, len, .. } => {
                self.region.zero_streaming(offset, len)?;
                Ok(self.region.fence()?)
            }
            Operation::Status { .. } => {
                operation.report_data();
                Ok(())
            }
            Operation::Flush | Operation::Discard { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate::device::{BlockDeviceExt, WriteFlags};

    #[test]
    fn blocks_come_back_and_words_lie_behind_them() {
        let region = Arc::new(Region::anonymous(1 << 20).unwrap());
        let device = BareCopy::new(Arc::clone(&region), 4096, true);
        let last = device.geometry().size_bytes() - 4096;
        for offset in [0, last] {
            device.write(offset, &[7; 4096], WriteFlags::default()).unwrap();
        }
        let mut found = [0; 4096];
        device.read(last, &mut found).unwrap();
        assert_eq!(found, [7; 4096]);
        let word = device.geometry().size_bytes() + (device.geometry().blocks - 1) * WORD_BYTES;
        assert_eq!(region.load_u64(word).unwrap(), last);
    }

    #[test]
    fn requests_outside_are_refused() {
        let device = BareCopy::new(Arc::new(Region::anonymous(1 << 20).unwrap()), 4096, false);
        let end = device.geometry().size_bytes();
        assert!(device.write(end, &[0; 4096], WriteFlags::default()).is_err());
        assert!(device.read(1, &mut [0; 4096]).is_err());
    }
}
