//! Checking a BTT: every fault of the format that can be found, told one by one.
//!
//! The check reads only. Writes that a crash cut off are taken as completed, as recovery would;
//! they are counted, not faults. [`repair`] restores an info block from its other copy: the one
//! redundancy that the format has.

use std::collections::BTreeMap;
use std::fmt;

use zerocopy::IntoBytes;

use super::BttError;
use super::flog::{Flog, FlogFault, Newest};
use super::info::{FoundArena, probe, read_info};
use super::layout::{
    ARENA_BYTES_MIN, FLAG_ERROR, Info, MapEntry, MapState, PAGE_BYTES, Version, arena_sizes,
    strip_flags,
};
use super::map::Map;
use super::recover::{EntryFault, Unfinished, map_of, unfinished};
use crate::pmem::{PmemError, Region};

/// Findings kept in a report; the rest are only counted.
const FINDINGS_MAX: usize = 1000;
/// Map entries between two progress reports.
const PROGRESS_LBAS: u32 = 1 << 16;

/// A fault found.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Finding {
    /// An info block is damaged. `other_copy_whole` says whether repair can restore it.
    InfoDamaged {
        /// Number of the arena, from 0.
        arena: usize,
        /// 1 at the arena's start, 2 at its end.
        copy: u8,
        /// Offset of the info block in the pool.
        offset_bytes: u64,
        /// What is wrong.
        reason: String,
        /// The other copy is whole.
        other_copy_whole: bool,
    },
    /// Both info blocks are valid but differ.
    InfoCopiesDiffer {
        /// Number of the arena, from 0.
        arena: usize,
    },
    /// The arena's error flag is set: it is read-only.
    ArenaFailed {
        /// Number of the arena, from 0.
        arena: usize,
    },
    /// A lane's flog entries contradict the format or the arena.
    FlogDamaged {
        /// Number of the arena, from 0.
        arena: usize,
        /// Number of the lane, from 0.
        lane: u32,
        /// What is wrong.
        reason: String,
    },
    /// A map entry points outside the arena.
    MapOutOfRange {
        /// Number of the arena, from 0.
        arena: usize,
        /// The lba in its arena.
        lba: u32,
        /// The block that its entry names.
        block: u32,
    },
    /// A block belongs to several owners: lbas, or lanes as their free block.
    BlockShared {
        /// Number of the arena, from 0.
        arena: usize,
        /// The block.
        block: u32,
        /// Its owners, such as "lba 5" or "lane 3".
        owners: Vec<String>,
    },
    /// A block belongs to neither a map entry nor a lane.
    BlockLost {
        /// Number of the arena, from 0.
        arena: usize,
        /// The block.
        block: u32,
    },
    /// The memory of a part of the metadata failed.
    Unreadable {
        /// Number of the arena, from 0.
        arena: usize,
        /// Which part, and the error.
        reason: String,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InfoDamaged { arena, copy, offset_bytes, reason, other_copy_whole } => {
                let remedy = if *other_copy_whole {
                    "the other copy is whole"
                } else {
                    "the other copy is no better"
                };
                write!(
                    f,
                    "arena {arena}: info block {copy} at offset {offset_bytes}: {reason}; {remedy}"
                )
            }
            Self::InfoCopiesDiffer { arena } => {
                write!(f, "arena {arena}: the two info blocks differ")
            }
            Self::ArenaFailed { arena } => write!(f, "arena {arena}: marked as failed, read-only"),
            Self::FlogDamaged { arena, lane, reason } => {
                write!(f, "arena {arena}: flog of lane {lane}: {reason}")
            }
            Self::MapOutOfRange { arena, lba, block } => {
                write!(
                    f,
                    "arena {arena}: map entry of lba {lba} points at block {block}, outside the arena"
                )
            }
            Self::BlockShared { arena, block, owners } => {
                write!(f, "arena {arena}: block {block} has several owners: {}", owners.join(", "))
            }
            Self::BlockLost { arena, block } => {
                write!(f, "arena {arena}: block {block} has no owner")
            }
            Self::Unreadable { arena, reason } => write!(f, "arena {arena}: {reason}"),
        }
    }
}

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// The faults, at most 1000 of them.
    pub findings: Vec<Finding>,
    /// Number of faults found, those beyond the kept ones included.
    pub faults: u64,
    /// Arenas seen.
    pub arenas: usize,
    /// Blocks that hold data.
    pub written_blocks: u64,
    /// Blocks that were discarded or never written and read as zeroes.
    pub zero_blocks: u64,
    /// Blocks marked as lost to media errors.
    pub error_blocks: u64,
    /// Writes that a crash cut off and that opening the pool will complete.
    pub unfinished_writes: u64,
    /// Info blocks that repair restored.
    pub repaired_info_blocks: u64,
}

impl Report {
    /// No fault was found.
    pub fn clean(&self) -> bool {
        self.faults == 0
    }

    fn add(&mut self, finding: Finding) {
        self.faults += 1;
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }
}

/// How far a check has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Map entries seen.
    pub done: u64,
    /// Map entries of the arenas found so far.
    pub total: u64,
}

/// Checks the BTT in `region`, telling `progress` now and then.
///
/// # Errors
/// [`BttError::NotFound`] or [`BttError::InfoLost`] where neither copy of the first arena's info
/// block can be used. Damage is not an error but a finding.
pub fn check(region: &Region, progress: &mut dyn FnMut(Progress)) -> Result<Report, BttError> {
    let mut report = Report::default();
    let (_, arenas) = find_arenas(region, &mut report)?;
    let total = arenas.iter().map(|found| u64::from(found.info.external_nlba.get())).sum();
    let mut done = 0;
    for (number, found) in arenas.iter().enumerate() {
        let mut tick = |lba| progress(Progress { done: done + u64::from(lba), total });
        ArenaCheck { region, number, found, map: map_of(found), report: &mut report }
            .run(&mut tick);
        done += u64::from(found.info.external_nlba.get());
    }
    progress(Progress { done, total });
    report.arenas = arenas.len();
    Ok(report)
}

/// Restores each damaged or differing info block from the arena's other copy, then checks again.
///
/// The first copy wins where both are whole but differ, as it is the one that is read.
///
/// # Errors
/// As for [`check`], and [`BttError::Pmem`] where the memory cannot be written.
pub fn repair(region: &Region, progress: &mut dyn FnMut(Progress)) -> Result<Report, BttError> {
    let (_, arenas) = find_arenas(region, &mut Report::default())?;
    let mut repaired = 0;
    for found in &arenas {
        // Second copy first: at every moment at least one copy is whole, since the other is not
        // touched.
        for offset in [found.base + found.info.info2off.get(), found.base] {
            if read_info(region, offset).ok().as_ref() != Some(&found.info) {
                region.write_streaming(offset, found.info.as_bytes())?;
                region.fence()?;
                repaired += 1;
            }
        }
    }
    let mut report = check(region, progress)?;
    report.repaired_info_blocks = repaired;
    Ok(report)
}

/// An info block of the first arena is left, if only the second copy.
pub(super) fn is_traceable(region: &Region) -> bool {
    find_arenas(region, &mut Report::default()).is_ok()
}

/// Walks the arenas by whichever info block of each is whole.
fn find_arenas(
    region: &Region,
    report: &mut Report,
) -> Result<(Version, Vec<FoundArena>), BttError> {
    for version in [Version::V1_1, Version::V2_0] {
        let mut found = Report::default();
        let arenas = walk(region, version, &mut found);
        if !arenas.is_empty() {
            report.findings = found.findings;
            report.faults = found.faults;
            return Ok((version, arenas));
        }
    }
    match probe(region)? {
        Some(version) => {
            let offset = version.base();
            let first = read_info(region, offset)?;
            // It is not whole, or the walk had found it.
            let reason = first.validate(version, region.len_bytes() - offset).err();
            Err(BttError::InfoLost { arena: 0, offset, reason: reason.unwrap_or_default() })
        }
        None => Err(BttError::NotFound),
    }
}

fn walk(region: &Region, version: Version, report: &mut Report) -> Vec<FoundArena> {
    let mut arenas = Vec::new();
    let mut base = version.base();
    let mut size_bytes = None;
    while let Some(info) = read_copies(region, version, arenas.len(), base, size_bytes, report) {
        arenas.push(FoundArena { base, info });
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

/// Reads both copies of an arena's info block, reports what is wrong, and gives the one to go by.
/// `size_bytes` is the size of the arena before it.
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
    let Some(second_offset) = found else {
        let reason = first.err().unwrap_or_default();
        report.add(Finding::InfoDamaged {
            arena,
            copy: 1,
            offset_bytes: base,
            reason,
            other_copy_whole: false,
        });
        return None;
    };
    let second = whole(second_offset);
    for (copy, offset, this, other) in
        [(1, base, &first, &second), (2, second_offset, &second, &first)]
    {
        if let Err(reason) = this {
            let (reason, other_copy_whole) = (reason.clone(), other.is_ok());
            report.add(Finding::InfoDamaged {
                arena,
                copy,
                offset_bytes: offset,
                reason,
                other_copy_whole,
            });
        }
    }
    if let (Ok(first), Ok(second)) = (&first, &second)
        && first != second
    {
        report.add(Finding::InfoCopiesDiffer { arena });
    }
    first.or(second).ok()
}

/// Where the second copy must be when the first cannot say: at the end of an arena as `create` and
/// the kernel size it, or of one as large as the arena before, and it must agree that it is there.
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
    region: &'a Region,
    number: usize,
    found: &'a FoundArena,
    map: Map,
    report: &'a mut Report,
}

impl ArenaCheck<'_> {
    fn run(&mut self, tick: &mut dyn FnMut(u32)) {
        let arena = self.number;
        if self.found.info.flags.get() & FLAG_ERROR != 0 {
            self.report.add(Finding::ArenaFailed { arena });
        }
        let lanes = self.read_lanes();
        let mut owners = Owners::new(self.map.blocks);
        let pending: BTreeMap<u32, u32> = lanes
            .iter()
            .filter_map(|lane| lane.unfinished.map(|write| (write.lba, write.new_block)))
            .collect();
        for lane in &lanes {
            owners.add(lane.free_block);
        }
        self.walk_map(&pending, tick, &mut |_, block| owners.add(block));
        self.report_owners(&owners, &lanes, &pending);
    }

    /// The lanes whose flog makes sense.
    fn read_lanes(&mut self) -> Vec<CheckedLane> {
        let (arena, info) = (self.number, &self.found.info);
        let flog =
            match Flog::open(self.region, self.found.base + info.logoff.get(), info.nfree.get()) {
                Ok(flog) => flog,
                Err(fault) => {
                    self.report_flog(fault);
                    return Vec::new();
                }
            };
        let mut lanes = Vec::new();
        for lane in 0..flog.lanes {
            match flog.newest(self.region, lane) {
                Ok(newest) => match self.check_lane(lane, &newest) {
                    Ok(checked) => lanes.push(checked),
                    Err(reason) => self.report.add(Finding::FlogDamaged { arena, lane, reason }),
                },
                Err(fault) => self.report_flog(fault),
            }
        }
        lanes
    }

    fn check_lane(&mut self, lane: u32, newest: &Newest) -> Result<CheckedLane, String> {
        let lbas = self.found.info.external_nlba.get();
        let unfinished = unfinished(self.region, &self.map, lbas, &newest.entry).or_else(
            |fault| match fault {
                EntryFault::Damaged(reason) => Err(reason),
                // A map entry out of range or unreadable is reported by the walk over the map.
                EntryFault::Btt(_) => Ok(None),
            },
        )?;
        self.report.unfinished_writes += u64::from(unfinished.is_some());
        Ok(CheckedLane { lane, free_block: strip_flags(newest.entry.old_map.get()), unfinished })
    }

    fn report_flog(&mut self, fault: FlogFault) {
        let arena = self.number;
        self.report.add(match fault {
            FlogFault::Damaged { lane, reason } => Finding::FlogDamaged { arena, lane, reason },
            FlogFault::Pmem(error) => {
                Finding::Unreadable { arena, reason: format!("flog: {error}") }
            }
        });
    }

    /// Calls `own` for each map entry in range, as it will be after recovery, and reports the rest.
    fn walk_map(
        &mut self,
        pending: &BTreeMap<u32, u32>,
        tick: &mut dyn FnMut(u32),
        own: &mut dyn FnMut(u32, u32),
    ) {
        let arena = self.number;
        for lba in 0..self.found.info.external_nlba.get() {
            if lba.is_multiple_of(PROGRESS_LBAS) {
                tick(lba);
            }
            match load_completed(self.region, &self.map, pending, lba) {
                Ok(entry) => {
                    self.count(entry.state());
                    match entry.block(lba) {
                        block if block < self.map.blocks => own(lba, block),
                        block => self.report.add(Finding::MapOutOfRange { arena, lba, block }),
                    }
                }
                Err(error) => {
                    self.report.add(Finding::Unreadable {
                        arena,
                        reason: format!("map entry of lba {lba}: {error}"),
                    });
                }
            }
        }
    }

    fn count(&mut self, state: MapState) {
        match state {
            MapState::Normal => self.report.written_blocks += 1,
            MapState::Unwritten | MapState::Zero => self.report.zero_blocks += 1,
            MapState::Error => self.report.error_blocks += 1,
        }
    }

    fn report_owners(
        &mut self,
        owners: &Owners,
        lanes: &[CheckedLane],
        pending: &BTreeMap<u32, u32>,
    ) {
        let arena = self.number;
        for block in (0..self.map.blocks).filter(|&block| !owners.once.get(block)) {
            self.report.add(Finding::BlockLost { arena, block });
        }
        if owners.shared.is_empty() {
            return;
        }
        let mut names: BTreeMap<u32, Vec<String>> =
            owners.shared.iter().map(|&block| (block, Vec::new())).collect();
        for lane in lanes {
            if let Some(names) = names.get_mut(&lane.free_block) {
                names.push(format!("lane {}", lane.lane));
            }
        }
        for lba in 0..self.found.info.external_nlba.get() {
            if let Ok(entry) = load_completed(self.region, &self.map, pending, lba)
                && let Some(names) = names.get_mut(&entry.block(lba))
            {
                names.push(format!("lba {lba}"));
            }
        }
        for (block, owners) in names {
            self.report.add(Finding::BlockShared { arena, block, owners });
        }
    }
}

/// The map entry of `lba` as it will be after recovery.
fn load_completed(
    region: &Region,
    map: &Map,
    pending: &BTreeMap<u32, u32>,
    lba: u32,
) -> Result<MapEntry, PmemError> {
    match pending.get(&lba) {
        Some(&block) => Ok(MapEntry::normal(block)),
        None => map.load(region, lba),
    }
}

/// A lane as the check found it.
struct CheckedLane {
    lane: u32,
    free_block: u32,
    unfinished: Option<Unfinished>,
}

/// Which blocks have an owner, and which more than one.
struct Owners {
    once: Bitmap,
    shared: Vec<u32>,
}

impl Owners {
    fn new(blocks: u32) -> Self {
        Self { once: Bitmap::new(blocks), shared: Vec::new() }
    }

    fn add(&mut self, block: u32) {
        if self.once.set(block) && self.shared.len() < FINDINGS_MAX {
            self.shared.push(block);
        }
    }
}

struct Bitmap(Vec<u64>);

impl Bitmap {
    fn new(bits: u32) -> Self {
        Self(vec![0; bits.div_ceil(64) as usize])
    }

    /// Sets bit `bit` and says whether it was set before.
    fn set(&mut self, bit: u32) -> bool {
        let (word, mask) = (&mut self.0[bit as usize / 64], 1 << (bit % 64));
        let before = *word & mask != 0;
        *word |= mask;
        before
    }

    fn get(&self, bit: u32) -> bool {
        self.0[bit as usize / 64] & 1 << (bit % 64) != 0
    }
}
