//! Opening an arena: what the lanes' newest flog entries say is completed.
//!
//! Idempotent: completing a map entry twice stores the same value, and the flog is only read. A
//! crash inside leaves some entries completed and the rest for the next recovery.

use super::BttError;
use super::arena::Arena;
use super::flog::{Flog, FlogFault};
use super::info::FoundArena;
use super::lane::{Lane, Lanes};
use super::layout::{FlogSlot, MapEntry, strip_flags};
use super::map::Map;
use crate::pmem::Region;
use crate::tier::version_locks::VersionLocks;

/// Locks of an arena, as a power of two: enough that two lbas in flight seldom share one (32 KiB).
const LOCKS_LOG2: u32 = 12;

/// A map change that a lane's newest flog entry describes and that the map does not have yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unfinished {
    pub(super) lba: u32,
    pub(super) new_block: u32,
}

/// What recovery found in one arena.
pub(super) struct Recovered {
    pub(super) arena: Arena,
    pub(super) completed_lanes: u32,
}

/// The geometry of `found`, with its map.
pub(super) fn map_of(found: &FoundArena) -> Map {
    Map { base: found.base + found.info.mapoff.get(), blocks: found.info.internal_nlba.get() }
}

/// Opens the arena and completes what was cut off.
pub(super) fn open_arena(
    region: &Region,
    number: usize,
    found: &FoundArena,
) -> Result<Recovered, BttError> {
    let fault = |fault| flog_error(number, fault);
    let info = &found.info;
    let map = map_of(found);
    let flog =
        Flog::open(region, found.base + info.logoff.get(), info.nfree.get()).map_err(fault)?;
    let mut lanes = Vec::with_capacity(flog.lanes as usize);
    let mut overlay = Vec::new();
    for lane in 0..flog.lanes {
        let newest = flog.newest(region, lane).map_err(fault)?;
        if let Some(unfinished) = unfinished(region, &map, info.external_nlba.get(), &newest.entry)
            .map_err(|reason| reason.into_error(number, lane))?
        {
            overlay.push((unfinished.lba, unfinished.new_block));
        }
        if !region.read_only() {
            write_back_seen(region, &flog, lane, &map, info.external_nlba.get(), &newest.entry)?;
        }
        lanes.push(Lane::after(lane, &newest));
    }
    overlay.sort_unstable();
    let completed_lanes = u32::try_from(overlay.len()).expect("at most one entry a lane");
    if !region.read_only() {
        region.fence()?;
        complete(region, &map, &std::mem::take(&mut overlay))?;
    }
    let arena = Arena {
        number,
        lbas: info.external_nlba.get(),
        data_base: found.base + info.dataoff.get(),
        block_bytes: info.internal_lbasize.get().into(),
        metadata_bytes: metadata_bytes(info.external_lbasize.get()),
        map,
        flog,
        lanes: Lanes::new(lanes),
        lba_locks: VersionLocks::new(LOCKS_LOG2),
        overlay,
    };
    Ok(Recovered { arena, completed_lanes })
}

/// Bytes of metadata behind the data of an lba of `lba_bytes`.
fn metadata_bytes(lba_bytes: u32) -> usize {
    (lba_bytes - super::layout::data_bytes(lba_bytes)) as usize
}

/// Writes back what recovery builds on. After a power cut it is durable already; after a mere kill
/// of the process the newest flog entry and the map entry of its write may be in the cache only,
/// and neither a completed map entry nor the lane's next write may become durable before them.
fn write_back_seen(
    region: &Region,
    flog: &Flog,
    lane: u32,
    map: &Map,
    lbas: u32,
    newest: &FlogSlot,
) -> Result<(), BttError> {
    flog.write_back(region, lane)?;
    if newest.lba.get() < lbas {
        map.write_back(region, newest.lba.get())?;
    }
    Ok(())
}

/// Stores the missing map entries and makes them durable, before any lane can reuse a block they
/// free.
fn complete(region: &Region, map: &Map, missing: &[(u32, u32)]) -> Result<(), BttError> {
    for &(lba, new_block) in missing {
        map.store(region, lba, MapEntry::normal(new_block))?;
        map.write_back(region, lba)?;
    }
    region.fence()?;
    Ok(())
}

/// Why a flog entry cannot be followed.
pub(super) enum EntryFault {
    /// It contradicts the arena's bounds.
    Damaged(String),
    /// The map it points at cannot be read.
    Btt(BttError),
}

impl EntryFault {
    fn into_error(self, arena: usize, lane: u32) -> BttError {
        match self {
            Self::Damaged(reason) => BttError::FlogDamaged { arena, lane, reason },
            Self::Btt(error) => error,
        }
    }
}

/// What `entry`, a lane's newest, leaves to do: the map still points at the old block.
///
/// The numbers are compared without their flag bits, which libpmemblk keeps in its flog and the
/// kernel does not.
pub(super) fn unfinished(
    region: &Region,
    map: &Map,
    lbas: u32,
    entry: &FlogSlot,
) -> Result<Option<Unfinished>, EntryFault> {
    let (lba, old_block) = (entry.lba.get(), strip_flags(entry.old_map.get()));
    let new_block = strip_flags(entry.new_map.get());
    if old_block == new_block && old_block < map.blocks {
        // A lane that was never used; the kernel numbers its entry by lane, whether or not that is
        // an lba.
        return Ok(None);
    }
    if lba >= lbas || old_block >= map.blocks || new_block >= map.blocks {
        let blocks = map.blocks;
        return Err(EntryFault::Damaged(format!(
            "its newest entry moves lba {lba} from block {old_block} to {new_block}, \
             but the arena has {lbas} lbas and {blocks} blocks"
        )));
    }
    let (_, block) = map.load_block(region, lba).map_err(EntryFault::Btt)?;
    Ok((block == old_block).then_some(Unfinished { lba, new_block }))
}

/// A flog fault as an error of arena `arena`.
pub(super) fn flog_error(arena: usize, fault: FlogFault) -> BttError {
    match fault {
        FlogFault::Pmem(error) => error.into(),
        FlogFault::Damaged { lane, reason } => BttError::FlogDamaged { arena, lane, reason },
    }
}
