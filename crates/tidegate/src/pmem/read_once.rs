//! Reading large parts of a region once, in order, in little memory.

use super::Region;

/// Pages that are let go at once: a huge page.
const WINDOW_BYTES: u64 = 2 << 20;

/// Lets go of the pages of a region behind a reader that needs them once: those of a mapped file
/// count as memory of the process that has looked at them.
#[derive(Debug)]
pub struct ReadOnce<'a> {
    region: &'a Region,
    start: u64,
    end: u64,
}

impl<'a> ReadOnce<'a> {
    /// For a reader that begins anywhere.
    pub fn new(region: &'a Region) -> Self {
        Self { region, start: 0, end: 0 }
    }

    /// The reader is done with `len` bytes at `offset`. It may go on elsewhere, but the more often
    /// it does the slower.
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
        // To let go is to use less memory; nothing depends on it.
        let _ = self.region.release(self.start, self.end - self.start);
    }
}

impl Drop for ReadOnce<'_> {
    fn drop(&mut self) {
        self.let_go();
    }
}
