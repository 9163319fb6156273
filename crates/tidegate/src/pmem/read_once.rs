//! Reads of large parts of a region, once and in order, in little memory.

use super::Region;

/// Bytes of pages that are released together: a huge page.
const WINDOW_BYTES: u64 = 2 << 20;

/// Releases the pages of a region behind a reader that needs them once. The pages of a mapped file
/// count as memory of each process that has read them.
#[derive(Debug)]
pub struct ReadOnce<'a> {
    region: &'a Region,
    start: u64,
    end: u64,
}

impl<'a> ReadOnce<'a> {
    /// Starts a reader, which may begin anywhere.
    pub fn new(region: &'a Region) -> Self {
        Self { region, start: 0, end: 0 }
    }

    /// Tells that the reader is done with `len` bytes at `offset`. The reader may go on elsewhere,
    /// but each jump makes it slower.
    pub fn has_read(&mut self, offset: u64, len: u64) {
        if offset < self.start || offset > self.end + WINDOW_BYTES {
            self.let_go();
            (self.start, self.end) = (offset, offset);
        }
        self.end = self.end.max(offset + len);
        if self.end - self.start >= WINDOW_BYTES {
            self.let_go();
            self.start = self.end;
        }
    }

    fn let_go(&self) {
        // A failure costs memory only; nothing depends on the release.
        let _ = self.region.release(self.start, self.end - self.start);
    }
}

impl Drop for ReadOnce<'_> {
    fn drop(&mut self) {
        self.let_go();
    }
}
