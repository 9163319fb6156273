//! Memory for the data of requests that outlive their caller's stack.
//!
//! The data starts at a multiple of [`BUFFER_ALIGN_BYTES`], so that devices pass it to direct I/O
//! without a copy. Free space before the data takes the header of a protocol's reply, so that one
//! call sends header and data.

use std::fmt;

use zerocopy::FromZeros as _;

/// Alignment of a buffer's data in memory: at least the block of any device.
pub const BUFFER_ALIGN_BYTES: usize = 4096;
/// The longest header before a buffer's data.
pub const BUFFER_HEADER_BYTES: usize = 64;

/// Memory that a buffer takes beyond its data, in bytes.
pub const BUFFER_EXTRA_BYTES: usize = BUFFER_HEADER_BYTES + BUFFER_ALIGN_BYTES;

/// An owned, aligned buffer for the data of one request.
pub struct IoBuffer {
    storage: Vec<u8>,
    header: usize,
    data: usize,
    len: usize,
}

impl IoBuffer {
    /// Makes a buffer of `len` zero bytes. Its pages become resident as bytes are stored in them.
    ///
    /// # Panics
    /// Panics without enough memory: lengths from outside need [`try_new`](Self::try_new).
    pub fn new(len: usize) -> Self {
        Self::try_new(len).unwrap_or_else(|| panic!("{len} bytes of memory cannot be had"))
    }

    /// Makes a buffer of `len` zero bytes. Returns `None` if the system does not have the memory.
    pub fn try_new(len: usize) -> Option<Self> {
        let storage = u8::new_vec_zeroed(len.checked_add(BUFFER_EXTRA_BYTES)?).ok()?;
        let address = storage.as_ptr().addr();
        let data = (address + BUFFER_HEADER_BYTES).next_multiple_of(BUFFER_ALIGN_BYTES) - address;
        Some(Self { storage, header: data, data, len })
    }

    /// Returns the most data that the buffer can hold, in bytes.
    pub fn capacity_bytes(&self) -> usize {
        self.storage.len() - self.data
    }

    /// Returns the memory that the buffer takes, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.storage.len()
    }

    /// Makes the buffer hold `len` bytes of any content, without a header.
    ///
    /// # Panics
    /// Panics if `len` is more than [`capacity_bytes`](Self::capacity_bytes).
    pub fn reset(&mut self, len: usize) {
        assert!(len <= self.capacity_bytes(), "{len} bytes for a smaller buffer");
        (self.header, self.len) = (self.data, len);
    }

    /// Returns the data.
    pub fn data(&self) -> &[u8] {
        &self.storage[self.data..self.data + self.len]
    }

    /// Returns the data for changes.
    pub fn data_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.data..self.data + self.len]
    }

    /// Puts a header right before the data.
    ///
    /// # Panics
    /// Panics if the header is longer than [`BUFFER_HEADER_BYTES`].
    pub fn set_header(&mut self, header: &[u8]) {
        assert!(header.len() <= BUFFER_HEADER_BYTES, "a header of {} bytes", header.len());
        self.header = self.data - header.len();
        self.storage[self.header..self.data].copy_from_slice(header);
    }

    /// Returns header and data.
    pub fn message(&self) -> &[u8] {
        &self.storage[self.header..self.data + self.len]
    }
}

impl fmt::Debug for IoBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuffer({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_had_is_no_buffer() {
        for len in [usize::MAX, usize::MAX / 2, usize::MAX / 4] {
            assert!(IoBuffer::try_new(len).is_none());
        }
    }

    #[test]
    fn data_is_aligned_and_follows_its_header() {
        let mut buffer = IoBuffer::new(8192);
        buffer.data_mut().fill(7);
        buffer.set_header(&[1, 2, 3]);
        assert_eq!(buffer.data().as_ptr().addr() % BUFFER_ALIGN_BYTES, 0);
        assert_eq!(&buffer.message()[..5], &[1, 2, 3, 7, 7]);
        assert_eq!(buffer.message().len(), 8195);
        buffer.reset(100);
        assert_eq!((buffer.data().len(), buffer.message().len()), (100, 100));
    }
}
