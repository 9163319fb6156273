//! A device in memory, for trying the server: as fast as copying, in 64 KiB shards behind locks.

use parking_lot::RwLock;
use tidegate::device::{
    BlockDevice, DeviceError, DeviceErrorKind, Geometry, Result, WriteFlags, ZeroFlags,
};

const SHARD_BYTES: usize = 64 << 10;

/// The device.
pub(crate) struct Memory {
    shards: Vec<RwLock<Box<[u8]>>>,
    pub(crate) geometry: Geometry,
}

impl Memory {
    /// A zeroed device of `size_bytes`, rounded down to whole shards.
    pub(crate) fn new(size_bytes: usize) -> Self {
        let shard = || RwLock::new(vec![0; SHARD_BYTES].into_boxed_slice());
        let shards: Vec<_> = (0..size_bytes / SHARD_BYTES).map(|_| shard()).collect();
        let geometry = Geometry {
            block_bytes: 512,
            blocks: (shards.len() * SHARD_BYTES / 512) as u64,
            preferred_bytes: 4096,
            read_only: false,
            atomic_block: false,
            volatile_cache: false,
            fast_zero: true,
            inline: true,
        };
        Self { shards, geometry }
    }

    /// Calls `each` for every piece of the range: shard, place in it, place in the request, length.
    fn pieces(offset: u64, len: usize, mut each: impl FnMut(usize, usize, usize, usize)) {
        let mut at = usize::try_from(offset).expect("checked");
        let mut done = 0;
        while done < len {
            let within = at % SHARD_BYTES;
            let piece = (SHARD_BYTES - within).min(len - done);
            each(at / SHARD_BYTES, within, done, piece);
            at += piece;
            done += piece;
        }
    }
}

impl BlockDevice for Memory {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.geometry.check(offset, buf.len() as u64)?;
        Self::pieces(offset, buf.len(), |shard, within, done, len| {
            buf[done..done + len].copy_from_slice(&self.shards[shard].read()[within..within + len]);
        });
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8], _flags: WriteFlags) -> Result<()> {
        self.geometry.check(offset, data.len() as u64)?;
        if self.geometry.read_only {
            return Err(DeviceError::new(DeviceErrorKind::ReadOnly, "memory is read-only"));
        }
        Self::pieces(offset, data.len(), |shard, within, done, len| {
            self.shards[shard].write()[within..within + len]
                .copy_from_slice(&data[done..done + len]);
        });
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.write_zeroes(offset, len, ZeroFlags::default())
    }

    fn write_zeroes(&self, offset: u64, len: u64, _flags: ZeroFlags) -> Result<()> {
        self.geometry.check(offset, len)?;
        let len = usize::try_from(len).expect("checked");
        Self::pieces(offset, len, |shard, within, _, len| {
            self.shards[shard].write()[within..within + len].fill(0);
        });
        Ok(())
    }
}
