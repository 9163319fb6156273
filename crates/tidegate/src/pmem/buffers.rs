//! Buffers of ordinary memory that are filled around the CPU's cache, and locked during use.
//!
//! A [`Region`](super::Region) gives out no references, so that a device below could only get a
//! copy of a cache's bytes. The memory here neither outlives the process nor is shared with
//! another, so that a lock for each buffer is enough to give its bytes out as slices.

use parking_lot::{
    MappedRwLockReadGuard, MappedRwLockWriteGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
};

use super::PmemError;
use super::cpu::{self, Cpu};
use super::mapping::Mapping;

/// The smallest size of a page of memory, in bytes.
const PAGE_BYTES: usize = 4096;

/// Copies `from` to `to`, which is as long, around the CPU's cache. Returns when all other threads
/// can see the bytes.
///
/// It pays if `to` is large, another CPU used it last, and no thread reads it soon: an ordinary
/// store first fetches each line from that CPU.
///
/// # Panics
/// The lengths differ.
pub fn copy_streaming(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "the lengths of both sides of a copy");
    // SAFETY: both slices have the length `from.len()`, as asserted. `to` is exclusive, so that
    // they do not overlap.
    unsafe { Cpu::detect().stream(to.as_mut_ptr(), from.as_ptr(), from.len(), false) };
    // Only this fence orders the streaming stores before the unlocking of the buffer.
    cpu::fence();
}

/// Buffers of equal size in one piece of memory, each behind a reader-writer lock.
pub struct Buffers {
    memory: Mapping,
    locks: Box<[RwLock<()>]>,
    buffer_bytes: u32,
}

impl Buffers {
    /// Bytes of memory that a buffer costs beside its content.
    pub const OVERHEAD_BYTES: usize = size_of::<RwLock<()>>();

    /// Makes `count` buffers of `buffer_bytes` zero bytes. Touches all of their memory, in huge
    /// pages if possible, so that the first use of a buffer is as fast as later ones.
    ///
    /// # Errors
    /// [`PmemError`]: the memory cannot be had, or the size is 0.
    pub fn new(count: u32, buffer_bytes: u32) -> Result<Self, PmemError> {
        let buffers = Self::reserve(count, buffer_bytes)?;
        for number in 0..count {
            buffers.write(number).chunks_mut(PAGE_BYTES).for_each(|page| page[0] = 0);
        }
        Ok(buffers)
    }

    /// Makes buffers that take memory only once they are written.
    ///
    /// # Errors
    /// The same errors as [`new`](Self::new).
    pub fn reserve(count: u32, buffer_bytes: u32) -> Result<Self, PmemError> {
        let memory = Mapping::anonymous(u64::from(count) * u64::from(buffer_bytes), 0)?;
        memory.prefer_huge_pages();
        let locks = (0..count).map(|_| RwLock::new(())).collect();
        Ok(Self { memory, locks, buffer_bytes })
    }

    /// Returns the number of buffers.
    pub fn count(&self) -> u32 {
        u32::try_from(self.locks.len()).unwrap_or(u32::MAX)
    }

    /// Returns the size of a buffer in bytes.
    pub fn buffer_bytes(&self) -> u32 {
        self.buffer_bytes
    }

    /// Locks buffer `number` for reading, once no thread writes to it.
    ///
    /// # Panics
    /// There is no such buffer.
    #[inline]
    pub fn read(&self, number: u32) -> ReadBuffer<'_> {
        let (at, len) = (self.at(number), self.buffer_bytes as usize);
        let lock = self.locks[number as usize].read();
        // SAFETY: the bytes are a part of the mapping that belongs to this buffer alone, and the
        // kernel initialized them. The guard holds the buffer's lock as long as the slice lives, so
        // that no thread changes them.
        RwLockReadGuard::map(lock, |()| unsafe { std::slice::from_raw_parts(at, len) })
    }

    /// Locks buffer `number` for writing, once no other thread uses it.
    ///
    /// # Panics
    /// There is no such buffer.
    #[inline]
    pub fn write(&self, number: u32) -> WriteBuffer<'_> {
        let (at, len) = (self.at(number), self.buffer_bytes as usize);
        let lock = self.locks[number as usize].write();
        // SAFETY: the bytes are a part of the mapping that belongs to this buffer alone, and the
        // kernel initialized them. The guard holds the buffer's lock exclusively as long as the
        // slice lives, and gives the slice out once at a time.
        RwLockWriteGuard::map(lock, |()| unsafe { std::slice::from_raw_parts_mut(at, len) })
    }

    /// Returns the address of buffer `number`, which has a lock.
    fn at(&self, number: u32) -> *mut u8 {
        self.memory.at(u64::from(number) * u64::from(self.buffer_bytes))
    }
}

/// A buffer that does not change.
pub type ReadBuffer<'a> = MappedRwLockReadGuard<'a, [u8]>;

/// A buffer that no other thread uses.
pub type WriteBuffer<'a> = MappedRwLockWriteGuard<'a, [u8]>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_any_size_are_zero_first_and_hold_their_bytes_apart() {
        for buffer_bytes in [1_u32, 520, 4096, 4160] {
            let buffers = Buffers::new(5, buffer_bytes).unwrap();
            assert_eq!((buffers.count(), buffers.buffer_bytes()), (5, buffer_bytes));
            for number in 0..5 {
                let fill = vec![u8::try_from(number).unwrap() + 1; buffer_bytes as usize];
                let mut buffer = buffers.write(number);
                assert!(buffer.iter().all(|&byte| byte == 0));
                copy_streaming(&mut buffer, &fill);
            }
            for number in 0..5 {
                let buffer = buffers.read(number);
                assert_eq!(buffer.len(), buffer_bytes as usize);
                assert!(buffer.iter().all(|&byte| u32::from(byte) == number + 1));
            }
        }
    }

    #[test]
    fn what_is_streamed_is_seen_by_the_next_reader() {
        let buffers = Buffers::new(1, 4096).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..=255 {
                    copy_streaming(&mut buffers.write(0), &[round; 4096]);
                }
            });
            let mut last = 0;
            while last < 255 {
                let buffer = buffers.read(0);
                assert!(buffer.iter().all(|&byte| byte == buffer[0]), "a torn buffer");
                assert!(buffer[0] >= last, "{} after {last}", buffer[0]);
                last = buffer[0];
            }
        });
    }

    #[test]
    #[should_panic(expected = "the lengths of both sides of a copy")]
    fn copies_between_different_lengths_panic() {
        copy_streaming(&mut [0; 4], &[0; 5]);
    }

    #[test]
    fn no_memory_is_an_error() {
        assert!(Buffers::new(0, 4096).is_err());
        assert!(Buffers::new(u32::MAX, u32::MAX).is_err());
    }
}
