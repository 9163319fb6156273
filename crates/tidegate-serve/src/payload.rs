//! Memory for the data of requests.

use tidegate::device::IoBuffer;

/// Payloads of finished requests, kept for the next.
pub(crate) struct PayloadPool {
    allocate: fn(usize) -> Option<IoBuffer>,
    free: Vec<IoBuffer>,
    free_bytes: usize,
    most_bytes: usize,
}

impl PayloadPool {
    /// Creates a pool that keeps up to `most_bytes`.
    pub(crate) fn new(most_bytes: usize) -> Self {
        Self { allocate: IoBuffer::try_new, free: Vec::new(), free_bytes: 0, most_bytes }
    }

    /// Creates a pool of a system without memory.
    #[cfg(test)]
    pub(crate) fn without_memory() -> Self {
        Self { allocate: |_| None, ..Self::new(0) }
    }

    /// Returns how many payloads the pool keeps.
    #[cfg(test)]
    pub(crate) fn kept(&self) -> usize {
        self.free.len()
    }

    /// Returns a payload of `len` bytes with any content, or `None` if there is no memory.
    pub(crate) fn take(&mut self, len: usize) -> Option<IoBuffer> {
        match self.free.iter().rposition(|payload| payload.capacity_bytes() >= len) {
            Some(index) => {
                let mut payload = self.free.swap_remove(index);
                self.free_bytes -= payload.memory_bytes();
                payload.reset(len);
                Some(payload)
            }
            None => (self.allocate)(len),
        }
    }

    /// Takes a payload back, and keeps it if the pool has space.
    pub(crate) fn put(&mut self, payload: IoBuffer) {
        if self.free_bytes + payload.memory_bytes() <= self.most_bytes {
            self.free_bytes += payload.memory_bytes();
            self.free.push(payload);
        }
    }
}
