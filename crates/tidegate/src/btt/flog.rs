//! The flog: a cache line a lane, with two entries of which the newer one is the lane's last write.

use zerocopy::{FromZeros, IntoBytes};

use super::layout::{FLOG_GROUP_BYTES, FlogSlot, FlogSlots, next_seq};
use crate::pmem::{PmemError, Region};

/// The flog of one arena.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flog {
    /// Where it starts in the region, in bytes.
    pub(super) base: u64,
    /// Number of lanes.
    pub(super) lanes: u32,
    /// Which slots of a group hold entries.
    pub(super) slots: FlogSlots,
}

/// The four slots of a lane.
type Group = [FlogSlot; 4];

/// A lane's newest entry, and which of its two slots holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Newest {
    pub(super) which: usize,
    pub(super) entry: FlogSlot,
}

/// Why a flog cannot be used.
#[derive(Debug)]
pub(super) enum FlogFault {
    /// The memory failed.
    Pmem(PmemError),
    /// The entries of `lane` contradict the format.
    Damaged { lane: u32, reason: String },
}

impl From<PmemError> for FlogFault {
    fn from(error: PmemError) -> Self {
        Self::Pmem(error)
    }
}

impl Flog {
    /// Opens the flog at `base`, finding out which slots hold entries.
    pub(super) fn open(region: &Region, base: u64, lanes: u32) -> Result<Self, FlogFault> {
        let mut flog = Self { base, lanes, slots: FlogSlots::ZeroOne };
        let mut found: Option<FlogSlots> = None;
        for lane in 0..lanes {
            let Some(slots) = used_slots(&flog.group(region, lane)?, lane)? else { continue };
            if *found.get_or_insert(slots) != slots {
                let reason =
                    "its entries are padded differently from the lanes' before it".to_string();
                return Err(FlogFault::Damaged { lane, reason });
            }
        }
        // Lanes that were never used look the same under both schemes, and then count as the newer
        // one.
        flog.slots = found.unwrap_or_default();
        Ok(flog)
    }

    /// The newest entry of `lane`.
    pub(super) fn newest(&self, region: &Region, lane: u32) -> Result<Newest, FlogFault> {
        let group = self.group(region, lane)?;
        let entries = match self.slots {
            FlogSlots::ZeroOne => [group[0], group[1]],
            FlogSlots::ZeroTwo => [group[0], group[2]],
        };
        let (first, second) = (entries[0].seq.get(), entries[1].seq.get());
        let which = newer(first, second).ok_or_else(|| {
            let reason = format!(
                "its sequence numbers are {first} and {second}, which cannot follow each other"
            );
            FlogFault::Damaged { lane, reason }
        })?;
        Ok(Newest { which, entry: entries[which] })
    }

    /// Stores the first half (lba, old map entry) of the slot that the lane's next entry goes to.
    /// The slot stays what it was, the lane's older entry, until [`commit`](Self::commit).
    pub(super) fn prepare(
        &self,
        region: &Region,
        lane: u32,
        which: usize,
        entry: &FlogSlot,
    ) -> Result<(), PmemError> {
        let offset = self.slot_offset(lane, which);
        region.store_u64(offset, entry.first_half())?;
        region.write_back(offset, 8)
    }

    /// Stores the second half (new map entry, sequence number), which makes the entry the lane's
    /// newest.
    pub(super) fn commit(
        &self,
        region: &Region,
        lane: u32,
        which: usize,
        entry: &FlogSlot,
    ) -> Result<(), PmemError> {
        let offset = self.slot_offset(lane, which) + 8;
        region.store_u64(offset, entry.second_half())?;
        region.write_back(offset, 8)
    }

    /// Writes the group of `lane` back, whichever of its slots was stored.
    pub(super) fn write_back(&self, region: &Region, lane: u32) -> Result<(), PmemError> {
        region.write_back(self.base + u64::from(lane) * FLOG_GROUP_BYTES, FLOG_GROUP_BYTES)
    }

    fn slot_offset(&self, lane: u32, which: usize) -> u64 {
        self.base + u64::from(lane) * FLOG_GROUP_BYTES + self.slots.offset(which)
    }

    fn group(&self, region: &Region, lane: u32) -> Result<Group, PmemError> {
        let mut group = Group::new_zeroed();
        region.read(self.base + u64::from(lane) * FLOG_GROUP_BYTES, group.as_mut_bytes())?;
        Ok(group)
    }
}

/// The scheme that a lane's slots follow; None where the lane was never used and both fit.
fn used_slots(group: &Group, lane: u32) -> Result<Option<FlogSlots>, FlogFault> {
    match group.map(|slot| !slot.is_padding()) {
        [true, false, false, false] => Ok(None),
        [true, true, false, false] => Ok(Some(FlogSlots::ZeroOne)),
        [true, false, true, false] => Ok(Some(FlogSlots::ZeroTwo)),
        used => {
            let used: Vec<_> = (0..4).filter(|&slot| used[slot]).collect();
            let reason = format!("slots {used:?} hold entries, expected 0 and 1, or 0 and 2");
            Err(FlogFault::Damaged { lane, reason })
        }
    }
}

/// Which of two sequence numbers is the newer one; None where they contradict each other. Zero is a
/// slot that was never written.
fn newer(first: u32, second: u32) -> Option<usize> {
    match (first, second) {
        (1..=3, 0) => Some(0),
        (0, 1..=3) => Some(1),
        (1..=3, 1..=3) if second == next_seq(first) => Some(1),
        (1..=3, 1..=3) if first == next_seq(second) => Some(0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_follows_the_cycle() {
        let newest: Vec<_> =
            [(1, 0), (1, 2), (3, 2), (3, 1), (2, 1), (0, 1)].map(|(a, b)| newer(a, b)).into();
        assert_eq!(newest, [Some(0), Some(1), Some(0), Some(1), Some(0), Some(1)]);
        assert!(
            [(0, 0), (1, 1), (2, 2), (4, 1), (1, 4), (u32::MAX, 1)]
                .iter()
                .all(|&(a, b)| newer(a, b).is_none())
        );
    }

    #[test]
    fn padding_schemes_are_told_apart() {
        let used = FlogSlot::new(0, 1, 1, 1);
        let none = FlogSlot::default();
        assert_eq!(used_slots(&[used, none, none, none], 0).unwrap(), None);
        assert_eq!(used_slots(&[used, used, none, none], 0).unwrap(), Some(FlogSlots::ZeroOne));
        assert_eq!(used_slots(&[used, none, used, none], 0).unwrap(), Some(FlogSlots::ZeroTwo));
        for wrong in [[none; 4], [none, used, none, none], [used; 4], [used, none, none, used]] {
            assert!(used_slots(&wrong, 3).is_err());
        }
    }
}
