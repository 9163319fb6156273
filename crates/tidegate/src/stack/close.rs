//! The end of an open stack: the tiers are drained into the lowest one, and that one into the
//! backing, or the data stays in the pool.

use std::sync::Arc;

use super::{Result, Stack, StackError};
use crate::device::{BlockDeviceExt, DeviceError};
use crate::tier::{Level, Purged, State, Tier};

impl Stack {
    /// Drains all tiers down to the lowest one, and that one into its backing. Stops their threads.
    ///
    /// # Errors
    /// [`StackError::Lost`], [`StackError::Kept`]; the caller may try again.
    pub fn drain(&self) -> Result<()> {
        let (lowest, upper) = self.lowest_and_upper();
        self.drain_upper(upper)?;
        lowest.drain().map_err(|source| self.not_drained(&lowest.state(), source))?;
        if let Some(behind) = &self.behind {
            behind.claim.iter().for_each(|claim| claim.flushed());
            behind.witness.note_rest();
        }
        Ok(())
    }

    /// Ends the work of all tiers, once no request is under way. Drains them, unless
    /// [`keep_dirty`](super::StackOptions::keep_dirty) keeps the pool's dirty data in the pool:
    /// then only the tiers above the pool are drained, and the call does not wait for threads that
    /// write to the backing.
    ///
    /// # Errors
    /// The same errors as [`drain`](Self::drain).
    pub fn close(&self) -> Result<()> {
        if self.keep_dirty { self.keep() } else { self.drain() }
    }

    /// Ends a stack that no client has used: marks that the backing has all writes of the pool, if
    /// that is so. Otherwise the mark stays, and other pools are kept from the backing.
    ///
    /// # Errors
    /// The same errors as [`drain`](Self::drain).
    pub fn release_unused(&self) -> Result<()> {
        if self.pending_bytes() == (0, 0) { self.drain() } else { Ok(()) }
    }

    fn keep(&self) -> Result<()> {
        let (lowest, upper) = self.lowest_and_upper();
        // A thread may still write to the backing. Another server must not take the backing before
        // this process ends, so the lock is never released.
        if let Some(behind) = &self.behind {
            std::mem::forget(behind.claim.clone());
            behind.thread.abandon();
            behind.witness.note_late_writes();
        }
        lowest.stop_destaging();
        self.drain_upper(upper)?;
        // Commits the tier's uncommitted writes. Flushes the backing only if it got writes of
        // clients.
        let flushed = lowest.flush();
        if let Some(behind) = &self.behind {
            behind.witness.note_late_writes();
        }
        flushed.map_err(|source| self.not_drained(&lowest.state(), source))
    }

    /// Returns the bytes that the pool holds and the backing lacks, if the pool keeps them when the
    /// stack is [closed](Self::close).
    pub fn kept_bytes(&self) -> Option<u64> {
        let (lowest, _) = self.lowest_and_upper();
        self.keep_dirty.then(|| lowest.state().pending_bytes)
    }

    /// Writes all data that the tiers held at the call to the backing, and flushes the backing.
    /// Requests go on meanwhile. Returns the bytes that no flush has committed, which stay in the
    /// pool.
    ///
    /// # Errors
    /// [`StackError::NotDestaged`].
    pub fn destage(&self) -> Result<u64> {
        let destage = |tier: &Arc<dyn Tier>| {
            tier.destage().map_err(|source| self.not_destaged(&**tier, source))
        };
        self.tiers.iter().try_fold(0, |left, tier| Ok(left + destage(tier)?))
    }

    /// Returns the bytes that only DRAM tiers hold, and the bytes that the pool holds and the
    /// backing lacks.
    pub fn pending_bytes(&self) -> (u64, u64) {
        let (lowest, upper) = self.lowest_and_upper();
        let upper = upper.iter().map(|tier| tier.state().pending_bytes).sum();
        (upper, lowest.state().pending_bytes)
    }

    /// Writes all data of the tiers to the backing, and has the pool give up the pages that the
    /// backing has. Requests go on meanwhile: data that they write or read anew may stay.
    ///
    /// # Errors
    /// [`StackError::NotDestaged`]: a tier above the pool failed; [`StackError::NotPurged`].
    pub fn purge(&self) -> Result<Purged> {
        let (lowest, upper) = self.lowest_and_upper();
        for tier in upper {
            tier.destage().map_err(|source| self.not_destaged(&**tier, source))?;
        }
        let pool = || self.description.pool.clone();
        lowest.purge().map_err(|source| StackError::NotPurged { pool: pool(), source })
    }

    pub(super) fn lowest_and_upper(&self) -> (&Arc<dyn Tier>, &[Arc<dyn Tier>]) {
        self.tiers.split_last().expect("a stack has the pool's tier")
    }

    fn drain_upper(&self, upper: &[Arc<dyn Tier>]) -> Result<()> {
        for tier in upper {
            let Err(source) = tier.drain() else { continue };
            let state = tier.state();
            // The tiers below know whether the data that this one passed on is durable. Their flush
            // may have failed only to report a write-back that has succeeded since (P5).
            if state.pending_bytes > 0 {
                return Err(self.not_drained(&state, source));
            }
        }
        Ok(())
    }

    fn not_drained(&self, state: &State, source: DeviceError) -> StackError {
        let (tier, pool) = (state.name.clone(), self.description.pool.clone());
        match state.level {
            Level::Dram => {
                StackError::Lost { pending_bytes: state.pending_bytes, tier, pool, source }
            }
            Level::Pmem => StackError::Kept { tier, pool, source },
        }
    }

    pub(super) fn not_destaged(&self, tier: &dyn Tier, source: DeviceError) -> StackError {
        let (tier, pool) = (tier.state().name, self.description.pool.clone());
        StackError::NotDestaged { tier, pool, source }
    }
}
