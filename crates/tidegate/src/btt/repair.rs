//! Repair: restores an info block from its other copy, and flog and map entries from each other.

use zerocopy::IntoBytes;

use super::BttError;
use super::check::{Report, check, find_arenas};
use super::flog::unused_group;
use super::info::{FoundArena, read_info};
use super::layout::MapEntry;
use super::survey::{LaneState, Remedy, Survey};
use crate::pmem::Region;
use crate::tier::OnProgress;

/// Restores all that can be proved, then checks again. The report counts the restored parts and
/// lists the unproven ones.
///
/// - Each damaged or differing info block, from the arena's other copy. The first copy wins if both
///   are whole but differ, since it is the one that is read.
/// - A lane's flog entries, if the map leaves only one answer.
/// - A map entry that points outside the arena, if exactly one block is left without an owner.
///
/// # Errors
/// The same errors as [`check`], and [`BttError::Pmem`] if the memory cannot be written.
pub fn repair(region: &Region, progress: OnProgress<'_>) -> Result<Report, BttError> {
    let (_, arenas, _) = find_arenas(region)?;
    let mut done = Report::default();
    for (number, found) in arenas.iter().enumerate() {
        repair_info(found, &mut done)?;
        repair_lanes(number, found, &mut done)?;
        repair_map(found, &mut done)?;
    }
    let Report { repaired_info_blocks, repaired_lanes, repaired_map_entries, unproven, .. } = done;
    let report = check(region, progress)?;
    Ok(Report { repaired_info_blocks, repaired_lanes, repaired_map_entries, unproven, ..report })
}

/// Restores the second copy first: one copy is left untouched at a time, so that one is always
/// whole.
fn repair_info(found: &FoundArena<'_>, done: &mut Report) -> Result<(), BttError> {
    let region = found.region;
    for offset in [found.base + found.info.info2off.get(), found.base] {
        if read_info(region, offset).ok().as_ref() != Some(&found.info) {
            region.write_streaming(offset, found.info.as_bytes())?;
            region.fence()?;
            done.repaired_info_blocks += 1;
        }
    }
    Ok(())
}

fn repair_lanes(arena: usize, found: &FoundArena<'_>, done: &mut Report) -> Result<(), BttError> {
    let survey = Survey::new(found, |_, _| ())?;
    for (lane, state) in (0..).zip(&survey.lanes) {
        let LaneState::Damaged { remedy, .. } = state else { continue };
        let group = match remedy {
            Remedy::Proven(group, _) => **group,
            Remedy::Free(block) => {
                done.unproven.push(format!(
                    "arena {arena}: whether the last write of lane {lane} before a power cut was complete: \
                     one block may be one write old"
                ));
                let block = found.version.unused_map(*block);
                unused_group(survey.flog.slots, lane % found.info.external_nlba.get(), block)
            }
            Remedy::None => {
                done.unproven.push(format!("arena {arena}: what lane {lane} held"));
                continue;
            }
        };
        survey.flog.replace(lane, &group)?;
        done.repaired_lanes += 1;
    }
    Ok(())
}

/// Restores map entries if all else in the arena is right. An entry that points outside the arena
/// gets the one block without an owner. An entry of a never-written lba that names a block loses
/// the block.
fn repair_map(found: &FoundArena<'_>, done: &mut Report) -> Result<(), BttError> {
    let Survey { map, lanes, ownerless, .. } = Survey::new(found, |_, _| ())?;
    let lanes_are_sound = lanes.iter().all(|lane| matches!(lane, LaneState::Sound(_)));
    if map.shared.is_some() || map.unreadable.count > 0 || !lanes_are_sound {
        return Ok(());
    }
    let table = found.map();
    let mut restored = Vec::new();
    if let ([(lba, _)], [block]) = (&map.wild.first[..], &ownerless.first[..]) {
        restored.push((*lba, table.load(*lba)?.with_block(*block)));
    }
    restored.extend(map.odd.first.iter().map(|&lba| (lba, MapEntry(0))));
    for (lba, entry) in restored {
        table.store(lba, entry)?;
        table.write_back(lba)?;
        done.repaired_map_entries += 1;
    }
    Ok(found.region.fence()?)
}
