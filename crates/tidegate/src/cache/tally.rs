//! What a write did, until it is counted: once for a request, however many batches it took.

use std::cell::Cell;

/// The pages of one write so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) cached: Cell<u64>,
    /// Pages that were cached before.
    pub(super) hits: Cell<u64>,
}

impl Tally {
    /// `cached` more pages are in the cache as the write has them; `hits` of them were cached
    /// before.
    pub(super) fn add(&self, cached: u64, hits: u64) {
        self.cached.set(self.cached.get() + cached);
        self.hits.set(self.hits.get() + hits);
    }
}
