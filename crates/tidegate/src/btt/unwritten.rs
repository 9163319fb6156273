//! Pools of libpmemblk that were never written.
//!
//! libpmemblk makes the BTT at the first write to the pool. Until then all blocks read as zeroes,
//! and so do they here: [`lay_out`] makes the missing BTT before the pool is opened for writing.

use super::create::{info_block, write_arenas};
use super::flog::Flog;
use super::info::{FoundArena, read_info};
use super::layout::{ArenaPlan, FlogSlot, LANES, MAP_ENTRY_BYTES, PAGE_BYTES, SIGNATURE, Version};
use super::pmemblk::Pool;
use super::{BttError, BttOptions};
use crate::pmem::{PmemError, Region};

/// What is left of an info block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trace {
    None,
    Damaged,
    Whole,
}

/// A pool that may have no BTT.
struct Candidate<'a> {
    region: &'a Region,
    pool: Pool,
}

impl<'a> Candidate<'a> {
    fn read(region: &'a Region) -> Result<Self, BttError> {
        Ok(Self { region, pool: Pool::read(region)? })
    }

    fn options(&self) -> BttOptions {
        BttOptions {
            parent_uuid: self.pool.poolset_uuid,
            ..BttOptions::libpmemblk(self.pool.block_bytes)
        }
    }

    /// Returns the arenas that libpmemblk makes of the pool.
    ///
    /// # Errors
    /// [`BttError::Truncated`] if the file is too small for any.
    fn plans(&self) -> Result<Vec<ArenaPlan>, BttError> {
        let found_bytes = self.region.len_bytes();
        self.options().plans(found_bytes).ok_or_else(|| {
            let needed_bytes = super::smallest_bytes(&self.options());
            BttError::Truncated { arena: 0, needed_bytes, found_bytes }
        })
    }

    /// Returns whether no block was ever written, so that the pool has no BTT. A crash during the
    /// first write may have left parts of one.
    fn is_unwritten(&self) -> Result<bool, BttError> {
        let base = Version::Libpmemblk.base();
        let first = self.trace(base)?;
        if first == Trace::Whole {
            return Ok(false);
        }
        let plan = self.plans()?[0];
        match (first, self.trace(base + plan.info2_offset)?) {
            (Trace::None, Trace::None) if !self.pool.is_zeroed => Ok(true),
            _ => Ok(self.has_empty_map(base + plan.map_offset, plan.lbas)?
                && self.has_unused_flog(base + plan.flog_offset)?),
        }
    }

    /// Returns what is left of an info block of this pool at `offset`. A pool made over an older
    /// one may have that one's BTT, which is not its own.
    fn trace(&self, offset: u64) -> Result<Trace, BttError> {
        let info = read_info(self.region, offset)?;
        let is_own = info.signature == SIGNATURE && info.parent_uuid == self.pool.poolset_uuid;
        Ok(match info.end_bytes(Version::Libpmemblk) {
            Some(_) if is_own => Trace::Whole,
            None if is_own => Trace::Damaged,
            _ => Trace::None,
        })
    }

    /// Returns whether no lane has a write. The map entry of a lane's last write may be missing.
    fn has_unused_flog(&self, offset: u64) -> Result<bool, PmemError> {
        let flog = Flog::open(self.region, offset, LANES, true)?;
        let is_write = |slot: &FlogSlot| slot.seq.get() != 0 && slot.old_map != slot.new_map;
        for lane in 0..LANES {
            if flog.group(lane)?.iter().any(is_write) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn has_empty_map(&self, offset: u64, lbas: u32) -> Result<bool, PmemError> {
        let mut chunk = [0; 4096];
        let len = u64::from(lbas) * MAP_ENTRY_BYTES;
        for at in (0..len.next_multiple_of(PAGE_BYTES)).step_by(chunk.len()) {
            self.region.read(offset + at, &mut chunk)?;
            if chunk.iter().any(|&byte| byte != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns whether the pool of libpmemblk in `region` was never written, and so has no BTT.
///
/// # Errors
/// Fails if the pool's header is damaged or unsupported, or the memory failed.
pub(super) fn is_unwritten(region: &Region) -> Result<bool, BttError> {
    Candidate::read(region)?.is_unwritten()
}

/// Returns the arenas that the first write to the never-written pool in `region` will make.
///
/// # Errors
/// Fails as [`is_unwritten`] does.
pub(super) fn planned(region: &Region) -> Result<Vec<FoundArena<'_>>, BttError> {
    let pool = Candidate::read(region)?;
    let (options, version) = (pool.options(), Version::Libpmemblk);
    let plans = pool.plans()?;
    let ends = plans.iter().scan(version.base(), |end, plan| {
        *end += plan.size_bytes;
        Some(*end)
    });
    let arena = |(plan, end): (&ArenaPlan, u64)| {
        let info = info_block(&options, plan, 0);
        FoundArena { region, version, base: end - plan.size_bytes, info }
    };
    Ok(plans.iter().zip(ends).map(arena).collect())
}

/// Makes the BTT of a never-written pool in `region`. A crash during the call leaves a pool that
/// was never written.
///
/// # Errors
/// Fails as [`is_unwritten`] does.
pub(super) fn lay_out(region: &Region) -> Result<(), BttError> {
    let pool = Candidate::read(region)?;
    if pool.is_unwritten()? {
        write_arenas(region, &pool.options(), &pool.plans()?)?;
    }
    Ok(())
}
