//! The survey of an arena's map and flog together, which finds the owner of each block.
//!
//! Neither has a checksum. But each block has exactly one owner, an lba or a lane that has it free,
//! so a wrong number in either leaves a block with two owners and another with none, or points
//! outside the arena. So faults are found. The former content is certain if exactly one answer
//! agrees with all the rest ([`Remedy`]).
//!
//! A survey changes nothing. It takes a bit of memory for each block: 16 MiB for the largest arena.

use super::bitmap::Bitmap;
use super::flog::{Flog, Group, Newest, newest_of};
use super::info::FoundArena;
use super::layout::{FlogSlot, MapEntry, MapState, strip_flags};
use super::map::Map;
use crate::pmem::PmemError;

/// Most items of one kind that a survey names; the rest are counted.
pub(super) const NAMED_MAX: usize = 1000;
/// Bits of a lane's slots.
const GROUP_BITS: usize = 512;

/// The first [`NAMED_MAX`] items of a kind, and the number of all.
pub(super) struct Items<T> {
    pub(super) first: Vec<T>,
    pub(super) count: u64,
}

impl<T> Default for Items<T> {
    fn default() -> Self {
        Self { first: Vec::new(), count: 0 }
    }
}

impl<T> Items<T> {
    fn push(&mut self, item: T) {
        self.count += 1;
        if self.first.len() < NAMED_MAX {
            self.first.push(item);
        }
    }
}

/// The facts that a map gives about its arena.
#[derive(Default)]
pub(super) struct MapSurvey {
    /// Blocks that belong to an lba.
    pub(super) owned: Bitmap,
    /// Blocks that belong to several lbas.
    pub(super) shared: Option<Bitmap>,
    /// Lbas whose entries point outside the arena, with the blocks of the entries.
    pub(super) wild: Items<(u32, u32)>,
    /// Lbas whose entries cannot be read, with the errors.
    pub(super) unreadable: Items<(u32, PmemError)>,
    /// Never-written lbas whose entries name a block.
    pub(super) odd: Items<u32>,
    /// Lbas that are marked as lost to a media error.
    pub(super) lost: Items<u32>,
    /// Lbas that hold data.
    pub(super) written: u64,
    /// Lbas that read as zeroes.
    pub(super) zero: u64,
}

impl MapSurvey {
    fn add(&mut self, map: &Map<'_>, lba: u32, entry: MapEntry) {
        match entry.state() {
            MapState::Normal => self.written += 1,
            MapState::Error => self.lost.push(lba),
            MapState::Zero => self.zero += 1,
            MapState::Unwritten => {
                self.zero += 1;
                if entry != MapEntry(0) {
                    self.odd.push(lba);
                }
            }
        }
        let block = entry.block(lba);
        if block >= map.blocks {
            self.wild.push((lba, block));
        } else if self.owned.set(block) {
            self.shared.get_or_insert_with(|| Bitmap::new(map.blocks)).set(block);
        }
    }

    /// Returns whether each entry can be read, points into the arena, and has its block for itself.
    pub(super) fn is_sound(&self) -> bool {
        self.shared.is_none() && self.wild.count == 0 && self.unreadable.count == 0
    }
}

/// A map change that a lane's newest flog entry describes and that the map does not have yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unfinished {
    pub(super) lba: u32,
    pub(super) new_block: u32,
}

/// The claim of a lane's slots, in agreement with the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) newest: Newest,
    pub(super) unfinished: Option<Unfinished>,
    /// The block that the lane has and no lba: its free one, or the block of its unfinished write.
    block: u32,
}

/// A lane as the survey found it.
pub(super) enum LaneState {
    /// Its slots make sense, and agree with the map.
    Sound(Claim),
    /// Its slots make no sense, or contradict the map or another lane.
    Damaged {
        /// The contradiction.
        reason: String,
        /// The possible repair.
        remedy: Remedy,
    },
}

impl LaneState {
    /// Returns the block that a remedy gives to a damaged lane.
    pub(super) fn repaired_block(&self) -> Option<u32> {
        match self {
            Self::Damaged { remedy: Remedy::Proven(_, claim), .. } => Some(claim.block),
            Self::Damaged { remedy: Remedy::Free(block), .. } => Some(*block),
            Self::Sound(_) | Self::Damaged { remedy: Remedy::None, .. } => None,
        }
    }
}

/// The possible repair of a damaged lane.
pub(super) enum Remedy {
    /// One bit changed: slots and map do not agree with any other state of that bit.
    Proven(Box<Group>, Claim),
    /// Only the lane's block is certain, not its last write.
    Free(u32),
    /// Nothing is certain.
    None,
}

/// The result of a survey of an arena's map and flog.
pub(super) struct Survey<'a> {
    pub(super) flog: Flog<'a>,
    pub(super) map: MapSurvey,
    /// The lanes, by number.
    pub(super) lanes: Vec<LaneState>,
    /// Number of blocks.
    blocks: u32,
    /// Blocks without an owner; at most [`NAMED_MAX`] are named.
    pub(super) ownerless: Items<u32>,
    /// Blocks whose owner, an lba or a lane, is uncertain.
    pub(super) disputed: Vec<u32>,
}

impl<'a> Survey<'a> {
    /// Looks at the whole map and flog of `found`; shows each readable map entry to `visit`.
    ///
    /// # Errors
    /// The region is shorter than the arena.
    pub(super) fn new(
        found: &FoundArena<'a>,
        mut visit: impl FnMut(u32, MapEntry),
    ) -> Result<Self, PmemError> {
        let table = found.map();
        let flog = found.flog()?;
        let (lbas, lanes) = (found.info.external_nlba.get(), found.info.nfree.get());
        let mut map = MapSurvey { owned: Bitmap::new(table.blocks), ..MapSurvey::default() };
        table.for_each(lbas, |lba, entry| match entry {
            Ok(entry) => {
                map.add(&table, lba, entry);
                visit(lba, entry);
            }
            Err(error) => map.unreadable.push((lba, error)),
        });
        Ok(Look { flog, table, lbas, lanes, map }.at_lanes())
    }

    /// Returns the first reason why a write here might destroy another block, and the number of
    /// reasons.
    pub(super) fn obstacle(&self) -> Option<(String, u64)> {
        let lanes = (0..).zip(&self.lanes).filter_map(|(number, lane)| match lane {
            LaneState::Sound(_) => None,
            LaneState::Damaged { reason, .. } => Some(format!("flog of lane {number}: {reason}")),
        });
        let wild = self.map.wild.first.iter().map(|(lba, block)| {
            format!("the map entry of lba {lba} points at block {block}, outside the arena")
        });
        let shared = self.map.shared.iter().map(|_| "lbas share blocks".to_owned());
        let mut reasons = wild.chain(shared).chain(lanes);
        let first = reasons.next()?;
        Some((first, 1 + reasons.count() as u64))
    }

    /// Returns the blocks that may belong to another owner than the lba that reads them.
    pub(super) fn suspects(self) -> Option<Bitmap> {
        if self.disputed.is_empty() {
            return self.map.shared;
        }
        let mut suspects = self.map.shared.unwrap_or_else(|| Bitmap::new(self.blocks));
        self.disputed.iter().for_each(|&block| {
            suspects.set(block);
        });
        Some(suspects)
    }
}

/// A survey in progress.
struct Look<'a> {
    flog: Flog<'a>,
    table: Map<'a>,
    lbas: u32,
    lanes: u32,
    map: MapSurvey,
}

/// A possible former content of a lane's slots.
type Outcome = (Group, Claim);

/// A lane whose slots do not agree with the format, the map or another lane.
struct Suspect {
    lane: usize,
    group: Option<Group>,
    reason: String,
    /// The claim of the slots, if they suit the format.
    claim: Option<Claim>,
}

impl<'a> Look<'a> {
    fn at_lanes(self) -> Survey<'a> {
        let mut held = Bitmap::new(self.table.blocks);
        let (claims, suspects) = self.judge(&mut held);
        let ownerless = self.ownerless(&held);
        let mut lanes: Vec<_> =
            claims.into_iter().map(|claim| claim.map(LaneState::Sound)).collect();
        let mut disputed = Vec::new();
        let remedies = self.remedies(&suspects, ownerless.first.clone(), &mut disputed);
        for (suspect, remedy) in suspects.into_iter().zip(remedies) {
            lanes[suspect.lane] = Some(match remedy {
                // Another lane changed, not this one.
                Remedy::Proven(group, claim) if suspect.group == Some(*group) => {
                    LaneState::Sound(claim)
                }
                remedy => LaneState::Damaged { reason: suspect.reason, remedy },
            });
        }
        let lanes = lanes.into_iter().flatten().collect();
        let blocks = self.table.blocks;
        Survey { flog: self.flog, map: self.map, lanes, blocks, ownerless, disputed }
    }

    /// Judges the claims of all lanes. Returns the claims that neither the map nor another lane
    /// contradicts, and the lanes that are suspect. Adds the blocks of the claims to `held`.
    fn judge(&self, held: &mut Bitmap) -> (Vec<Option<Claim>>, Vec<Suspect>) {
        let mut seen = Bitmap::new(self.table.blocks);
        let mut twice = Bitmap::new(self.table.blocks);
        let read: Vec<_> = (0..self.lanes)
            .map(|lane| {
                let group = self.flog.group(lane).map_err(|error| error.to_string());
                let claim = group.as_ref().map_err(Clone::clone).and_then(|it| self.claim(it));
                if let Some(block) = claim.as_ref().ok().map(|claim| claim.block)
                    && seen.set(block)
                {
                    twice.set(block);
                }
                (group, claim)
            })
            .collect();
        let (mut claims, mut suspects) = (Vec::new(), Vec::new());
        for (lane, (group, claim)) in read.into_iter().enumerate() {
            let (reason, claim) = match claim {
                Err(reason) => (reason, None),
                Ok(claim) if self.map.owned.get(claim.block) => {
                    (format!("its block {} is an lba's by the map", claim.block), Some(claim))
                }
                Ok(claim) if twice.get(claim.block) => {
                    (format!("its block {} is another lane's too", claim.block), Some(claim))
                }
                Ok(claim) => {
                    held.set(claim.block);
                    claims.push(Some(claim));
                    continue;
                }
            };
            claims.push(None);
            suspects.push(Suspect { lane, group: group.ok(), reason, claim });
        }
        (claims, suspects)
    }

    /// Reads the claim of a lane's slots. Fails if they contradict the format, the arena or the
    /// map.
    fn claim(&self, group: &Group) -> Result<Claim, String> {
        let newest = newest_of(group, self.flog.slots)?;
        let unfinished = self.unfinished(&newest.entry)?;
        let block = match unfinished {
            Some(write) => write.new_block,
            None => strip_flags(newest.entry.old_map.get()),
        };
        Ok(Claim { newest, unfinished, block })
    }

    /// Returns the unfinished write of `entry`, a lane's newest, if the map still points at the old
    /// block.
    ///
    /// The numbers are compared without their flag bits, which libpmemblk keeps in its flog and the
    /// kernel does not.
    fn unfinished(&self, entry: &FlogSlot) -> Result<Option<Unfinished>, String> {
        let (lba, old_block) = (entry.lba.get(), strip_flags(entry.old_map.get()));
        let new_block = strip_flags(entry.new_map.get());
        let (lbas, blocks) = (self.lbas, self.table.blocks);
        if old_block == new_block && old_block < blocks {
            // A lane that was never used. The kernel numbers its entry by lane, which need not be
            // an lba.
            return Ok(None);
        }
        if lba >= lbas || old_block >= blocks || new_block >= blocks {
            return Err(format!(
                "its newest entry moves lba {lba} from block {old_block} to {new_block}, \
                 but the arena has {lbas} lbas and {blocks} blocks"
            ));
        }
        let current = self.table.load(lba);
        let current =
            current.map_err(|error| format!("the map entry of its lba {lba}: {error}"))?;
        Ok((current.block(lba) == old_block).then_some(Unfinished { lba, new_block }))
    }

    /// Returns the blocks that belong neither to an lba nor to a lane in `held`.
    fn ownerless(&self, held: &Bitmap) -> Items<u32> {
        let mut blocks = Items::default();
        (0..self.table.blocks)
            .filter(|&block| !self.map.owned.get(block) && !held.get(block))
            .for_each(|block| blocks.push(block));
        blocks
    }

    /// Finds the remedy of each suspect among the blocks that are `left`. Adds to `disputed`.
    ///
    /// The map proves a claim only if the map itself is sound. If the slots of several lanes are
    /// lost, their blocks are interchangeable: each block is free.
    fn remedies(
        &self,
        suspects: &[Suspect],
        mut left: Vec<u32>,
        disputed: &mut Vec<u32>,
    ) -> Vec<Remedy> {
        let outcomes: Vec<_> = suspects.iter().map(|it| self.outcomes(it, &left)).collect();
        let contested: Vec<_> = suspects.iter().map(|it| self.contested(it, &left)).collect();
        let mut found: Vec<Option<Outcome>> = vec![None; suspects.len()];
        if self.map.is_sound() && left.len() == suspects.len() {
            let open = |index: usize| contested[index].is_none();
            prove_all(&mut found, &outcomes, open, &mut left);
        }
        // If one of the blocks that are left may be an lba's, none is certain to be free.
        let open = || (0..suspects.len()).filter(|&index| found[index].is_none());
        let uncertain = open().any(|index| {
            let unfinished = outcomes[index].iter().any(|(_, claim)| claim.unfinished.is_some());
            contested[index].is_some() || unfinished
        });
        if uncertain || !self.map.is_sound() {
            left.clear();
        }
        for index in open() {
            disputed.extend(contested[index]);
            disputed.extend(self.stale_blocks(&suspects[index], &outcomes[index]));
        }
        let remedy = |outcome: Option<Outcome>| match outcome {
            Some((group, claim)) => Remedy::Proven(Box::new(group), claim),
            None => left.pop().map_or(Remedy::None, Remedy::Free),
        };
        found.into_iter().map(remedy).collect()
    }

    /// Returns the block that `suspect` claims and an lba has, if the change of one bit may be in
    /// the lba's map entry as well as in the lane's slots: then the lba's former block would be
    /// among those `left`. An lba that was never written has its block whatever its entry is.
    fn contested(&self, suspect: &Suspect, left: &[u32]) -> Option<u32> {
        let taken = suspect.claim?.block;
        if !self.map.owned.get(taken) {
            return None;
        }
        let near = left.iter().any(|block| (block ^ taken).is_power_of_two());
        let by_number =
            taken < self.lbas && self.table.load(taken).is_ok_and(|entry| entry == MapEntry(0));
        (near && !by_number).then_some(taken)
    }

    /// Returns the possible former contents of the slots of `suspect`: as they are, or with one bit
    /// changed, if that suits the format, the map and the blocks that are `left`.
    fn outcomes(&self, suspect: &Suspect, left: &[u32]) -> Vec<Outcome> {
        let Some(group) = suspect.group else { return Vec::new() };
        let changed = (0..GROUP_BITS).map(|bit| with_bit_flipped(&group, bit));
        std::iter::once(group)
            .chain(changed)
            .filter_map(|group| {
                let claim = self.claim(&group).ok()?;
                left.contains(&claim.block).then_some((group, claim))
            })
            .collect()
    }

    /// Returns the map's blocks of the lbas whose last write may be an unfinished one of `suspect`.
    fn stale_blocks(&self, suspect: &Suspect, outcomes: &[Outcome]) -> Vec<u32> {
        let claims = outcomes.iter().map(|(_, claim)| claim).chain(&suspect.claim);
        let lbas = claims.filter_map(|claim| Some(claim.unfinished?.lba));
        lbas.filter_map(|lba| Some(self.table.load(lba).ok()?.block(lba))).collect()
    }
}

/// Finds the outcomes of the suspects that are `open`, as far as they follow from each other. Takes
/// their blocks out of `left`.
fn prove_all(
    found: &mut [Option<Outcome>],
    outcomes: &[Vec<Outcome>],
    open: impl Fn(usize) -> bool,
    left: &mut Vec<u32>,
) {
    while let Some((index, outcome)) = (0..found.len())
        .filter(|&index| found[index].is_none() && open(index))
        .find_map(|index| Some((index, only_outcome(&outcomes[index], left)?)))
    {
        left.retain(|&block| block != outcome.1.block);
        found[index] = Some(outcome);
    }
}

/// Returns the one outcome with a block that is `left`. If several exist, returns the only one
/// whose newest write went to the block that the write before it had freed.
fn only_outcome(outcomes: &[Outcome], left: &[u32]) -> Option<Outcome> {
    let only = |outcomes: &[&Outcome]| {
        let first = outcomes.first()?;
        outcomes.iter().all(|other| same_outcome(&other.1, &first.1)).then_some(**first)
    };
    let possible: Vec<_> =
        outcomes.iter().filter(|(_, claim)| left.contains(&claim.block)).collect();
    let chained: Vec<_> = possible
        .iter()
        .copied()
        .filter(|(group, claim)| follows_other_slot(group, claim))
        .collect();
    only(&possible).or_else(|| only(&chained))
}

/// Returns whether the newest entry's write went to the block that the lane's other entry had
/// freed.
fn follows_other_slot(group: &Group, claim: &Claim) -> bool {
    let newest = &claim.newest.entry;
    let used = group.iter().filter(|slot| slot.seq.get() != 0);
    let mut others = used.filter(|slot| *slot != newest);
    others.all(|slot| strip_flags(slot.old_map.get()) == strip_flags(newest.new_map.get()))
}

fn same_outcome(one: &Claim, other: &Claim) -> bool {
    one.block == other.block && one.unfinished == other.unfinished
}

fn with_bit_flipped(group: &Group, bit: usize) -> Group {
    let mut group = *group;
    let slot = &mut group[bit / 128];
    let field = match bit / 32 % 4 {
        0 => &mut slot.lba,
        1 => &mut slot.old_map,
        2 => &mut slot.new_map,
        _ => &mut slot.seq,
    };
    field.set(field.get() ^ 1 << (bit % 32));
    group
}
