//! Closes blocks: while a request writes a block below, around the cache, no newer version of the
//! block is cached.
//!
//! Otherwise the device could apply a later write, through the cache, before the bypassing one. A
//! read after both would see the later data in the cache and then the earlier data below.
//!
//! Lbas are closed in ascending order, so that requests never wait for each other in a circle.

use std::ops::Range;

use super::Core;

/// Closed lbas; dropping this opens them.
pub(super) struct Closed<'a> {
    core: &'a Core,
    lbas: Range<u64>,
}

impl<'a> Closed<'a> {
    /// Closes `lbas`; waits for each lba that another request has closed.
    pub(super) fn close(core: &'a Core, lbas: Range<u64>) -> Self {
        let mut closed = Self::none_from(core, lbas.start);
        for lba in lbas {
            let mut set = core.sets.lock(core.table.set_of(lba));
            while !set.set().close(lba) {
                set.wait();
            }
            closed.extend();
        }
        closed
    }

    /// Returns an empty range; the caller closes the lbas from `first` on one by one.
    pub(super) fn none_from(core: &'a Core, first: u64) -> Self {
        Self { core, lbas: first..first }
    }

    /// Adds the next lba, which the caller has closed under the lock of its set.
    pub(super) fn extend(&mut self) {
        self.lbas.end += 1;
    }

    /// Returns the closed lbas.
    pub(super) fn lbas(&self) -> &Range<u64> {
        &self.lbas
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        for lba in self.lbas.clone() {
            let mut set = self.core.sets.lock(self.core.table.set_of(lba));
            set.set().open(lba);
            set.notify();
        }
    }
}
