//! Closing: while a request writes a block below around the cache, no newer version of it is
//! cached.
//!
//! Otherwise the device could apply a write that came later, through the cache, before the one
//! under way. A read that follows both would see the later one in the cache and then the earlier
//! one below.
//!
//! Lbas are closed in ascending order, so that requests which wait for each other's lbas never wait
//! in a circle.

use std::ops::Range;

use super::Core;

/// Lbas that are closed; dropping it opens them.
pub(super) struct Closed<'a> {
    core: &'a Core,
    lbas: Range<u64>,
}

impl<'a> Closed<'a> {
    /// Closes `lbas`, and waits for each lba that another request has closed.
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

    /// The next lba has been closed under the lock of its set.
    pub(super) fn extend(&mut self) {
        self.lbas.end += 1;
    }

    /// The lbas that are closed.
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
