//! The check of a BTT: finds every fault of the format that can be found, one by one.
//!
//! The check only reads. Writes that a crash cut off count as completed, as recovery would leave
//! them; they are counted, and are no faults. [`repair`](super::repair()) restores all that can be
//! proved.

use std::collections::BTreeMap;

use super::info::{FoundArena, probe, read_info, read_uncut};
use super::layout::{
    ARENA_BYTES_MIN, FLAG_ERROR, FLOG_GROUP_BYTES, Info, MAP_ENTRY_BYTES, MapState, PAGE_BYTES,
    Version, arena_sizes,
};
use super::survey::{Items, LaneState, MapSurvey, NAMED_MAX, Remedy, Survey, Unfinished};
use super::{BttError, pmemblk, unwritten};
use crate::pmem::{PmemError, Region};
use crate::tier::{OnProgress, Progress};

/// Most findings in a report; the rest are only counted.
const FINDINGS_MAX: usize = NAMED_MAX;
/// Map entries between two progress reports.
const PROGRESS_LBAS: u32 = 1 << 16;
/// Most owners of a block that a finding names.
const OWNERS_MAX: usize = 16;

/// A fault found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, serde::Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Finding {
    /// An info block is damaged. `other_copy_whole` says whether repair can restore it.
    #[error(
        "arena {arena}: info block {copy} at offset {offset_bytes}: {reason}; the other copy is {}",
        if *other_copy_whole { "whole" } else { "no better" }
    )]
    InfoDamaged {
        /// Number of the arena, from 0.
        arena: usize,
        /// 1 at the arena's start, 2 at its end.
        copy: u8,
        /// Offset of the info block in the pool.
        offset_bytes: u64,
        /// The fault.
        reason: String,
        /// Whether the other copy is whole.
        other_copy_whole: bool,
    },
    /// The header of the pool of libpmemblk before the BTT is damaged.
    #[error("{reason}")]
    PoolDamaged {
        /// The fault.
        reason: String,
    },
    /// Both info blocks are valid but differ.
    #[error("arena {arena}: the two info blocks differ")]
    InfoCopiesDiffer {
        /// Number of the arena, from 0.
        arena: usize,
    },
    /// The arena's error flag is set: it is read-only.
    #[error("arena {arena}: marked as failed, read-only")]
    ArenaFailed {
        /// Number of the arena, from 0.
        arena: usize,
    },
    /// A lane's flog entries contradict the format or the arena.
    #[error("arena {arena}: flog of lane {lane}: {reason}; {remedy}")]
    FlogDamaged {
        /// Number of the arena, from 0.
        arena: usize,
        /// Number of the lane, from 0.
        lane: u32,
        /// The fault.
        reason: String,
        /// The possible repair, and the unproven part.
        remedy: String,
    },
    /// A map entry is marked as never written, and yet names a block.
    #[error("arena {arena}: map entry of lba {lba} names a block, but says never written")]
    MapOdd {
        /// Number of the arena, from 0.
        arena: usize,
        /// The lba in its arena.
        lba: u32,
    },
    /// An lba is marked as lost to a media error.
    #[error(
        "arena {arena}: lba {lba} is marked as lost to a media error: reads fail until it is written"
    )]
    LbaLost {
        /// Number of the arena, from 0.
        arena: usize,
        /// The lba in its arena.
        lba: u32,
    },
    /// Unused bytes are not zero.
    #[error(
        "arena {arena}: bytes behind the {part} at offset {offset_bytes} are not zero; nothing uses them"
    )]
    PaddingUsed {
        /// Number of the arena, from 0.
        arena: usize,
        /// The part before the bytes: map or flog.
        part: &'static str,
        /// Offset of the bytes in the pool.
        offset_bytes: u64,
    },
    /// A map entry points outside the arena.
    #[error("arena {arena}: map entry of lba {lba} points at block {block}, outside the arena")]
    MapOutOfRange {
        /// Number of the arena, from 0.
        arena: usize,
        /// The lba in its arena.
        lba: u32,
        /// The block that its entry names.
        block: u32,
    },
    /// A block belongs to several lbas.
    #[error("arena {arena}: block {block} has several owners: {}", owners.join(", "))]
    BlockShared {
        /// Number of the arena, from 0.
        arena: usize,
        /// The block.
        block: u32,
        /// Its owners, such as "lba 5"; at most 16.
        owners: Vec<String>,
    },
    /// A block belongs to neither a map entry nor a lane.
    #[error("arena {arena}: block {block} has no owner")]
    BlockLost {
        /// Number of the arena, from 0.
        arena: usize,
        /// The block.
        block: u32,
    },
    /// The memory of a part of the metadata failed.
    #[error("arena {arena}: {reason}")]
    Unreadable {
        /// Number of the arena, from 0.
        arena: usize,
        /// The part, and the error.
        reason: String,
    },
}

/// The result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// The first 1000 faults.
    pub findings: Vec<Finding>,
    /// Number of all faults.
    pub faults: u64,
    /// Number of arenas.
    pub arenas: usize,
    /// Blocks that hold data.
    pub written_blocks: u64,
    /// Blocks that were discarded or never written and read as zeroes.
    pub zero_blocks: u64,
    /// Blocks that read as zeroes although their former bytes are there: they were discarded, or
    /// the mark in their map entry changed; nothing tells which.
    pub dropped_blocks: u64,
    /// Blocks marked as lost to media errors.
    pub error_blocks: u64,
    /// Writes that a crash cut off; the next opening of the pool completes them.
    pub unfinished_writes: u64,
    /// Info blocks that repair restored.
    pub repaired_info_blocks: u64,
    /// Lanes whose flog entries repair restored.
    pub repaired_lanes: u64,
    /// Map entries that repair restored.
    pub repaired_map_entries: u64,
    /// The unproven parts of a repair, in words.
    pub unproven: Vec<String>,
}

impl Report {
    /// Returns whether the check found no fault.
    pub fn clean(&self) -> bool {
        self.faults == 0
    }

    /// Adds the fault of the header before the BTT, if the pool is one of libpmemblk.
    fn add_pool_fault(&mut self, first: &FoundArena<'_>) {
        if first.version == Version::Libpmemblk
            && let Err(error) = pmemblk::expect_own(first.region, &first.info)
        {
            self.add(Finding::PoolDamaged { reason: error.to_string() });
        }
    }

    fn add(&mut self, finding: Finding) {
        self.faults += 1;
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }
}

/// Checks the BTT in `region`. Tells `progress` now and then the number of map entries seen, and
/// the number in all arenas.
///
/// # Errors
/// [`BttError::NotFound`] or [`BttError::InfoLost`] if neither copy of the first arena's info block
/// can be used. Damage is not an error but a finding.
pub fn check(region: &Region, progress: OnProgress<'_>) -> Result<Report, BttError> {
    let is_libpmemblk = probe(region)? == Some(Version::Libpmemblk);
    if is_libpmemblk && unwritten::is_unwritten(region).unwrap_or(false) {
        return Ok(Report::default());
    }
    let (_, arenas, mut report) = find_arenas(region)?;
    let total = arenas.iter().map(|found| u64::from(found.info.external_nlba.get())).sum();
    let mut done = 0;
    for (number, found) in arenas.iter().enumerate() {
        let mut tick = |lba| progress(Progress { done: done + u64::from(lba), total });
        ArenaCheck { number, found, report: &mut report }.run(&mut tick)?;
        done += u64::from(found.info.external_nlba.get());
    }
    progress(Progress { done, total });
    report.arenas = arenas.len();
    Ok(report)
}

/// Returns whether an info block of the first arena is left; the second copy is enough.
pub(super) fn is_traceable(region: &Region) -> bool {
    find_arenas(region).is_ok()
}

/// Walks the arenas by a whole info block of each. Reports the faults of the other info blocks.
pub(super) fn find_arenas(
    region: &Region,
) -> Result<(Version, Vec<FoundArena<'_>>, Report), BttError> {
    let probed = probe(region)?;
    let possible = match probed {
        Some(Version::Libpmemblk) => &[Version::Libpmemblk][..],
        _ => &[Version::V1_1, Version::V2_0],
    };
    for &version in possible {
        let mut report = Report::default();
        let arenas = walk(region, version, &mut report);
        if let Some(first) = arenas.first() {
            report.add_pool_fault(first);
            return Ok((version, arenas, report));
        }
    }
    match probed {
        Some(version) => {
            let offset = version.base();
            let first = read_uncut(region, version, 0, offset)?;
            // The block is not whole, or the walk had found the arena.
            let reason = first.validate(version, region.len_bytes() - offset).err();
            Err(BttError::InfoLost { arena: 0, offset, reason: reason.unwrap_or_default() })
        }
        None => Err(BttError::NotFound),
    }
}

fn walk<'a>(region: &'a Region, version: Version, report: &mut Report) -> Vec<FoundArena<'a>> {
    let mut arenas = Vec::new();
    let mut base = version.base();
    let mut size_bytes = None;
    while let Some(info) = read_copies(region, version, arenas.len(), base, size_bytes, report) {
        arenas.push(FoundArena { region, version, base, info });
        match info.nextoff.get() {
            0 => break,
            next => {
                base += next;
                size_bytes = Some(next);
            }
        }
    }
    arenas
}

/// Reads both copies of an arena's info block and reports their faults. Returns the copy to trust.
/// `size_bytes` is the size of the arena before.
fn read_copies(
    region: &Region,
    version: Version,
    arena: usize,
    base: u64,
    size_bytes: Option<u64>,
    report: &mut Report,
) -> Option<Info> {
    let space_bytes = region.len_bytes().checked_sub(base)?;
    let whole = |offset: u64| -> Result<Info, String> {
        let info = read_info(region, offset).map_err(|error| error.to_string())?;
        info.validate(version, space_bytes).map(|()| info)
    };
    let first = whole(base);
    let found = match &first {
        Ok(info) => Some(base + info.info2off.get()),
        Err(_) => find_second(space_bytes, base, size_bytes, &whole),
    };
    let mut look = |copy, offset_bytes, this: &Result<Info, String>, other_copy_whole| {
        if let Err(reason) = this.clone() {
            let damaged =
                Finding::InfoDamaged { arena, copy, offset_bytes, reason, other_copy_whole };
            report.add(damaged);
        }
    };
    let Some(second_offset) = found else {
        look(1, base, &first, false);
        return None;
    };
    let second = whole(second_offset);
    look(1, base, &first, second.is_ok());
    look(2, second_offset, &second, first.is_ok());
    if let (Ok(first), Ok(second)) = (&first, &second)
        && first != second
    {
        report.add(Finding::InfoCopiesDiffer { arena });
    }
    first.or(second).ok()
}

/// Finds the second copy when the first is damaged: at the end of an arena as `create` and the
/// kernel size it, or of an arena as large as the one before. The copy itself must agree with its
/// offset.
fn find_second(
    space_bytes: u64,
    base: u64,
    size_bytes: Option<u64>,
    whole: &dyn Fn(u64) -> Result<Info, String>,
) -> Option<u64> {
    let standard = arena_sizes(space_bytes, ARENA_BYTES_MIN).first().copied();
    [standard, Some(space_bytes), size_bytes].into_iter().flatten().find_map(|size_bytes| {
        let info2off = (size_bytes - size_bytes % PAGE_BYTES).checked_sub(PAGE_BYTES)?;
        whole(base + info2off)
            .ok()
            .filter(|info| info.info2off.get() == info2off)
            .map(|_| base + info2off)
    })
}

struct ArenaCheck<'a> {
    number: usize,
    found: &'a FoundArena<'a>,
    report: &'a mut Report,
}

impl ArenaCheck<'_> {
    fn run(&mut self, tick: &mut dyn FnMut(u32)) -> Result<(), BttError> {
        let arena = self.number;
        if self.found.info.flags.get() & FLAG_ERROR != 0 {
            self.report.add(Finding::ArenaFailed { arena });
        }
        let (found, report) = (self.found, &mut *self.report);
        let survey = Survey::new(found, |lba, entry| {
            if lba.is_multiple_of(PROGRESS_LBAS) {
                tick(lba);
            }
            let dropped = entry.state() == MapState::Zero && !is_zero(found, entry.block(lba));
            report.dropped_blocks += u64::from(dropped);
        })?;
        self.report_map(&survey.map);
        self.report_lanes(&survey);
        self.report_owners(&survey);
        self.report_padding()
    }

    fn report_map(&mut self, map: &MapSurvey) {
        let arena = self.number;
        self.report.written_blocks += map.written;
        self.report.zero_blocks += map.zero;
        self.report.error_blocks += map.lost.count;
        self.add_all(&map.wild, |&(lba, block)| Finding::MapOutOfRange { arena, lba, block });
        self.add_all(&map.unreadable, |(lba, error)| Finding::Unreadable {
            arena,
            reason: format!("map entry of lba {lba}: {error}"),
        });
        self.add_all(&map.odd, |&lba| Finding::MapOdd { arena, lba });
        self.add_all(&map.lost, |&lba| Finding::LbaLost { arena, lba });
    }

    fn report_lanes(&mut self, survey: &Survey<'_>) {
        let arena = self.number;
        for (lane, state) in (0..).zip(&survey.lanes) {
            match state {
                LaneState::Sound(claim) => {
                    self.report.unfinished_writes += u64::from(claim.unfinished.is_some());
                }
                LaneState::Damaged { reason, remedy } => self.report.add(Finding::FlogDamaged {
                    arena,
                    lane,
                    reason: reason.clone(),
                    remedy: remedy_words(remedy),
                }),
            }
        }
    }

    fn report_owners(&mut self, survey: &Survey<'_>) {
        let arena = self.number;
        let repaired: Vec<u32> =
            survey.lanes.iter().filter_map(LaneState::repaired_block).collect();
        for &block in survey.ownerless.first.iter().filter(|block| !repaired.contains(block)) {
            self.report.add(Finding::BlockLost { arena, block });
        }
        self.report.faults += survey.ownerless.count - survey.ownerless.first.len() as u64;
        let Some(blocks) = &survey.map.shared else { return };
        let mut names: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        let lbas = self.found.info.external_nlba.get();
        self.found.map().for_each(lbas, |lba, entry| {
            let block = entry.ok().map(|entry| entry.block(lba));
            if let Some(block) = block.filter(|&block| blocks.get(block)) {
                name(&mut names, block, format!("lba {lba}"));
            }
        });
        for (block, owners) in names {
            self.report.add(Finding::BlockShared { arena, block, owners });
        }
    }

    /// Reports bytes behind the last entries of map and flog that are not zero; nothing uses them.
    fn report_padding(&mut self) -> Result<(), BttError> {
        let info = &self.found.info;
        let map_end = info.mapoff.get() + u64::from(info.external_nlba.get()) * MAP_ENTRY_BYTES;
        let flog_end = info.logoff.get() + u64::from(info.nfree.get()) * FLOG_GROUP_BYTES;
        for (part, start, end) in
            [("map", map_end, info.logoff.get()), ("flog", flog_end, info.info2off.get())]
        {
            // Other programs may leave more space there than rounding needs, and use it.
            let mut rest = vec![0; usize::try_from(end - start).unwrap_or(usize::MAX).min(4096)];
            let offset_bytes = self.found.base + start;
            match self.found.region.read(offset_bytes, &mut rest) {
                Ok(()) if rest.iter().all(|&byte| byte == 0) => {}
                Ok(()) => {
                    let arena = self.number;
                    self.report.add(Finding::PaddingUsed { arena, part, offset_bytes });
                }
                Err(error @ PmemError::Poisoned { .. }) => self.report.add(Finding::Unreadable {
                    arena: self.number,
                    reason: format!("behind the {part}: {error}"),
                }),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn add_all<T>(&mut self, items: &Items<T>, finding: impl Fn(&T) -> Finding) {
        items.first.iter().for_each(|item| self.report.add(finding(item)));
        self.report.faults += items.count - items.first.len() as u64;
    }
}

fn name(names: &mut BTreeMap<u32, Vec<String>>, block: u32, owner: String) {
    // A block with very many owners is reported with the first ones.
    let count = names.len();
    if count < FINDINGS_MAX || names.contains_key(&block) {
        let owners = names.entry(block).or_default();
        if owners.len() < OWNERS_MAX {
            owners.push(owner);
        }
    }
}

fn remedy_words(remedy: &Remedy) -> String {
    match remedy {
        Remedy::Proven(_, claim) => match claim.unfinished {
            None => "one bit changed, as the map proves; its last write is complete".into(),
            Some(Unfinished { lba, .. }) => {
                format!(
                    "one bit changed, as the map proves; its write of lba {lba} is to be completed"
                )
            }
        },
        Remedy::Free(block) => format!(
            "block {block} is the one that it has, as the map proves; whether its last write before a power cut is \
             complete cannot be proved"
        ),
        Remedy::None => "what it was cannot be proved".into(),
    }
}

/// Returns whether data block `block` has only zeroes. Bytes that cannot be read count as zeroes.
fn is_zero(found: &FoundArena<'_>, block: u32) -> bool {
    let FoundArena { region, version, base, info } = found;
    let block_bytes = u64::from(info.internal_lbasize.get());
    let offset = base + info.dataoff.get() + u64::from(block) * block_bytes;
    let mut bytes = [0; 64];
    let data_bytes = u64::from(version.data_bytes(info.external_lbasize.get()));
    let is_zero = (0..data_bytes).step_by(bytes.len()).all(|at| {
        region.read(offset + at, &mut bytes).is_err() || bytes.iter().all(|&byte| byte == 0)
    });
    // A failure costs memory only; nothing depends on the release.
    let _ = region.release(offset, block_bytes);
    is_zero
}
