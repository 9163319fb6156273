//! The opening of an arena, which completes the writes in the lanes' newest flog entries.
//!
//! Recovery is idempotent: completing a map entry twice stores the same value, and the flog is only
//! read. A crash during recovery leaves some entries completed and the rest for the next recovery.
//!
//! Before anything changes, the whole map and flog are looked at ([`Survey`]): if a block of the
//! arena has two owners, a write to one destroys the other. Such an arena opens only for reading,
//! which needs no flog, or if the caller insists.

use std::sync::Arc;

use super::BttError;
use super::arena::Arena;
use super::info::FoundArena;
use super::lane::{Lane, Lanes};
use super::layout::MapEntry;
use super::map::Map;
use super::survey::{Claim, LaneState, Remedy, Survey, Unfinished};
use crate::pmem::Region;
use crate::tier::version_locks::VersionLocks;

/// Number of an arena's locks, as a power of two: enough that two lbas in flight seldom share one
/// (32 KiB).
const LOCKS_LOG2: u32 = 12;

/// The result of the recovery of one arena.
pub(super) struct Recovered {
    pub(super) arena: Arena,
    pub(super) completed_lanes: u32,
    /// The damage of the arena, in words; empty for a whole one.
    pub(super) damage: Vec<String>,
}

/// Opens the arena and completes the writes that a crash cut off. `force` opens an arena for
/// writing even if writes may destroy blocks, and lets blocks with several owners be read.
pub(super) fn open_arena(
    region: &Arc<Region>,
    number: usize,
    found: &FoundArena<'_>,
    force: bool,
) -> Result<Recovered, BttError> {
    let survey = Survey::new(found, |_, _| ())?;
    let writable = !region.read_only();
    if let Some((first, faults)) = survey.obstacle().filter(|_| writable && !force) {
        return Err(BttError::Unwritable { arena: number, faults, first });
    }
    let info = &found.info;
    let map = found.map();
    let mut overlay: Vec<_> = survey
        .lanes
        .iter()
        .filter_map(|lane| known(lane, writable)?.unfinished)
        .map(|Unfinished { lba, new_block }| (lba, new_block))
        .collect();
    overlay.sort_unstable();
    let completed_lanes = u32::try_from(overlay.len()).expect("at most one entry a lane");
    if writable {
        write_back_seen(&survey, &map, info.external_nlba.get())?;
        complete(&map, &std::mem::take(&mut overlay))?;
    }
    let damage = damage_of(number, &survey);
    let lanes = (0..).zip(&survey.lanes).map(|(lane, state)| open_lane(lane, state)).collect();
    let arena = Arena {
        region: Arc::clone(region),
        number,
        version: found.version,
        lbas: info.external_nlba.get(),
        blocks: map.blocks,
        data_base: found.base + info.dataoff.get(),
        block_bytes: info.internal_lbasize.get().into(),
        metadata_bytes: metadata_bytes(found),
        map_base: map.base,
        flog_base: survey.flog.base,
        flog_slots: survey.flog.slots,
        lanes: Lanes::new(lanes),
        lba_locks: VersionLocks::new(LOCKS_LOG2),
        overlay,
        suspects: if force { None } else { survey.suspects() },
    };
    Ok(Recovered { arena, completed_lanes, damage })
}

/// Returns the claim on a lane's last write, if it is known. A lane that needs a repair has none
/// for writing.
fn known(lane: &LaneState, writable: bool) -> Option<&Claim> {
    match lane {
        LaneState::Sound(claim) => Some(claim),
        LaneState::Damaged { remedy: Remedy::Proven(_, claim), .. } if !writable => Some(claim),
        LaneState::Damaged { .. } => None,
    }
}

fn open_lane(number: u32, state: &LaneState) -> Lane {
    match state {
        LaneState::Sound(claim) => Lane::after(number, &claim.newest),
        LaneState::Damaged { .. } => Lane::unusable(number),
    }
}

/// Describes the damage of an arena that is served nevertheless, for its readers.
fn damage_of(arena: usize, survey: &Survey<'_>) -> Vec<String> {
    let Some((first, faults)) = survey.obstacle() else { return Vec::new() };
    let mut damage = vec![format!(
        "arena {arena}: {first}; {faults} faults in all, `tidegate check` names them"
    )];
    let unknown = |lane: &&LaneState| {
        matches!(lane, LaneState::Damaged { remedy: Remedy::Free(_) | Remedy::None, .. })
    };
    let unknown = survey.lanes.iter().filter(unknown).count();
    if unknown > 0 {
        damage.push(format!(
            "arena {arena}: the last writes of {unknown} lanes before a power cut may be missing"
        ));
    }
    damage
}

/// Returns the bytes of metadata behind the data of an lba.
fn metadata_bytes(found: &FoundArena<'_>) -> usize {
    let lba_bytes = found.info.external_lbasize.get();
    (lba_bytes - found.version.data_bytes(lba_bytes)) as usize
}

/// Writes back the entries that recovery builds on, and fences. After a power cut they are durable
/// already. After a mere kill of the process, the newest flog entry and the map entry of its write
/// may be in the cache only, and neither a completed map entry nor the lane's next write may become
/// durable before them.
fn write_back_seen(survey: &Survey<'_>, map: &Map<'_>, lbas: u32) -> Result<(), BttError> {
    for (lane, state) in (0..).zip(&survey.lanes) {
        let LaneState::Sound(claim) = state else { continue };
        survey.flog.write_back(lane)?;
        let lba = claim.newest.entry.lba.get();
        if lba < lbas {
            map.write_back(lba)?;
        }
    }
    Ok(map.region.fence()?)
}

/// Stores the missing map entries and makes them durable, before any lane can reuse a block that
/// they free.
fn complete(map: &Map<'_>, missing: &[(u32, u32)]) -> Result<(), BttError> {
    for &(lba, new_block) in missing {
        map.store(lba, MapEntry::normal(new_block))?;
        map.write_back(lba)?;
    }
    Ok(map.region.fence()?)
}
