//! A device in ordinary memory.
//!
//! Invariants:
//! 1. The device consists of chunks of 64 KiB, each under its own lock. Requests to different
//!    chunks never wait for each other. A block never crosses a chunk, so it is read and written
//!    whole.
//! 2. A chunk without memory reads as zeroes. The first write allocates its memory; a discard of
//!    the whole chunk frees it.

use parking_lot::RwLock;

use super::{Attempt, BlockDevice, Context, Extent, Geometry, Operation, Result};

/// Bytes under one lock: a multiple of every block size.
const CHUNK_BYTES: u64 = 64 << 10;

type Chunk = RwLock<Option<Box<[u8]>>>;

/// A device whose blocks live in ordinary memory and end with it.
pub struct MemoryDevice {
    geometry: Geometry,
    chunks: Vec<Chunk>,
}

impl MemoryDevice {
    /// Makes a device of `blocks` zero blocks of `block_bytes` bytes. It allocates memory as blocks
    /// are written.
    ///
    /// # Errors
    /// Fails as [`Unsupported`](super::DeviceErrorKind::Unsupported) if `block_bytes` is no power
    /// of two from 512 to 4096, or the size does not fit 64 bits; as
    /// [`NoSpace`](super::DeviceErrorKind::NoSpace) if not even the table of chunks fits into
    /// memory.
    pub fn new(block_bytes: u32, blocks: u64) -> Result<Self> {
        let geometry = Geometry::in_memory(block_bytes, blocks)?;
        let count = geometry.size_bytes().div_ceil(CHUNK_BYTES);
        let mut chunks = Vec::new();
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        chunks.try_reserve_exact(count).map_err(|error| {
            super::DeviceError::with_source(
                super::DeviceErrorKind::NoSpace,
                format!("no memory for a device of {} bytes", geometry.size_bytes()),
                error,
            )
        })?;
        chunks.resize_with(count, Chunk::default);
        Ok(Self { geometry, chunks })
    }

    /// Calls `each` with every chunk of the range, in order: the chunk, the range within the chunk,
    /// and the range within the request.
    fn for_chunks(&self, offset: u64, len: u64, mut each: impl FnMut(&Chunk, Span, Span)) {
        let mut done = 0;
        while done < len {
            let at = offset + done;
            let start = at % CHUNK_BYTES;
            let step = (CHUNK_BYTES - start).min(len - done);
            let chunk = &self.chunks[to_usize(at / CHUNK_BYTES)];
            each(chunk, span(start, step), span(done, step));
            done += step;
        }
    }

    fn copy_out(&self, offset: u64, buf: &mut [u8]) {
        self.for_chunks(offset, buf.len() as u64, |chunk, inside, outside| {
            match chunk.read().as_ref() {
                Some(bytes) => buf[outside].copy_from_slice(&bytes[inside]),
                None => buf[outside].fill(0),
            }
        });
    }

    fn copy_in(&self, offset: u64, data: &[u8]) {
        self.for_chunks(offset, data.len() as u64, |chunk, inside, outside| {
            let mut chunk = chunk.write();
            let bytes =
                chunk.get_or_insert_with(|| vec![0; to_usize(CHUNK_BYTES)].into_boxed_slice());
            bytes[inside].copy_from_slice(&data[outside]);
        });
    }

    fn zero(&self, offset: u64, len: u64) {
        self.for_chunks(offset, len, |chunk, inside, _| {
            let mut chunk = chunk.write();
            if inside.len() as u64 == CHUNK_BYTES {
                *chunk = None;
            } else if let Some(bytes) = chunk.as_mut() {
                bytes[inside].fill(0);
            }
        });
    }

    /// Returns chunks with and without memory as extents.
    fn extents(&self, offset: u64, len: u64) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        self.for_chunks(offset, len, |chunk, inside, outside| {
            let hole = chunk.read().is_none();
            let next = inside.len() as u64;
            match extents.last_mut() {
                Some(last) if last.hole == hole => last.len += next,
                _ => extents.push(Extent {
                    offset: offset + outside.start as u64,
                    len: next,
                    hole,
                    zero: hole,
                }),
            }
        });
        extents
    }
}

type Span = std::ops::Range<usize>;

fn span(start: u64, len: u64) -> Span {
    to_usize(start)..to_usize(start + len)
}

/// Converts an offset into existing memory, which always fits.
fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("the chunks are in memory, so offsets into them fit")
}

impl BlockDevice for MemoryDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.geometry.check_operation(operation)?;
        match *operation {
            Operation::Read { offset, ref mut buf } => self.copy_out(offset, buf),
            Operation::Write { offset, data, .. } => self.copy_in(offset, data),
            Operation::Flush => {}
            Operation::Discard { offset, len } | Operation::WriteZeroes { offset, len, .. } => {
                self.zero(offset, len);
            }
            Operation::Status { offset, len, most, ref mut extents } => {
                **extents = self.extents(offset, len);
                extents.truncate(most.max(1));
            }
        }
        Ok(())
    }

    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        Attempt::Done(self.run(operation))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::device::conformance::{self, Promises};
    use crate::device::{BlockDeviceExt, DeviceErrorKind, WriteFlags};

    #[test]
    fn it_conforms() {
        for block_bytes in [512, 4096] {
            let device = MemoryDevice::new(block_bytes, 2048).unwrap();
            let promises = Promises { whole_blocks: true, ..Promises::default() };
            conformance::check(&device, promises);
            conformance::check_started(&(Arc::new(device) as _), promises);
        }
    }

    #[test]
    fn a_huge_device_costs_nothing_until_it_is_written() {
        let device = MemoryDevice::new(4096, 1 << 24).unwrap();
        let end = device.geometry().size_bytes();
        device.write(end - 4096, &[9; 4096], WriteFlags::default()).unwrap();
        let status = device.status(0, end, 8).unwrap();
        assert_eq!(status.len(), 2);
        assert_eq!((status[0].len, status[0].hole), (end - CHUNK_BYTES, true));
        assert_eq!((status[1].len, status[1].hole), (CHUNK_BYTES, false));
    }

    #[test]
    fn discarding_a_chunk_gives_its_memory_back() {
        let device = MemoryDevice::new(4096, 64).unwrap();
        device.write(0, &[9; 4096], WriteFlags::default()).unwrap();
        assert!(!device.status(0, CHUNK_BYTES, 1).unwrap()[0].hole);
        device.discard(0, CHUNK_BYTES).unwrap();
        assert!(device.status(0, CHUNK_BYTES, 1).unwrap()[0].hole);
    }

    #[test]
    fn a_size_past_all_memory_is_an_error() {
        let error = MemoryDevice::new(4096, u64::MAX / 4096).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::NoSpace);
    }
}
