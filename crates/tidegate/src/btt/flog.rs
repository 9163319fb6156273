//! The flog: a cache line for each lane, with two entries; the newer one is the lane's last write.

use zerocopy::{FromZeros, IntoBytes};

use super::layout::{FLOG_GROUP_BYTES, FlogSlot, FlogSlots, next_seq};
use crate::pmem::{PmemError, Region};

type Result<T, E = PmemError> = std::result::Result<T, E>;

/// The flog of one arena.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flog<'a> {
    /// The memory of the pool.
    pub(super) region: &'a Region,
    /// Start of the flog in the region, in bytes.
    pub(super) base: u64,
    /// The slots of a group that hold entries.
    pub(super) slots: FlogSlots,
    /// The last two slots of a group are not part of the format, and count as zero.
    pub(super) is_pair: bool,
}

/// The four slots of a lane.
pub(super) type Group = [FlogSlot; 4];

/// A lane's newest entry, and the index of its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Newest {
    pub(super) which: usize,
    pub(super) entry: FlogSlot,
}

impl<'a> Flog<'a> {
    /// Opens the flog of `lanes` lanes at `base`. The majority of the lanes decides which slots
    /// hold entries. `is_pair`: only the first two slots are part of the format.
    ///
    /// # Errors
    /// The range is outside the region. Lanes that cannot be read do not count.
    pub(super) fn open(region: &'a Region, base: u64, lanes: u32, is_pair: bool) -> Result<Self> {
        let flog = Self { region, base, slots: FlogSlots::ZeroOne, is_pair };
        let (mut zero_one, mut zero_two) = (0, 0);
        for lane in 0..lanes {
            match flog.group(lane) {
                Ok([_, first, second, _]) => {
                    zero_one += u32::from(!first.is_padding());
                    zero_two += u32::from(!second.is_padding());
                }
                Err(PmemError::Poisoned { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        // Lanes that were never used look equal under both schemes, and count as the newer scheme.
        let slots = if zero_two > zero_one { FlogSlots::ZeroTwo } else { FlogSlots::ZeroOne };
        Ok(Self { slots, ..flog })
    }

    /// Stores the first half (lba, old map entry) of the slot for the lane's next entry. The slot
    /// stays the lane's older entry until [`commit`](Self::commit).
    pub(super) fn prepare(&self, lane: u32, which: usize, entry: &FlogSlot) -> Result<()> {
        self.store_half(self.slot_offset(lane, which), entry.first_half())
    }

    /// Stores the second half (new map entry, sequence number), which makes the entry the lane's
    /// newest.
    pub(super) fn commit(&self, lane: u32, which: usize, entry: &FlogSlot) -> Result<()> {
        self.store_half(self.slot_offset(lane, which) + 8, entry.second_half())
    }

    /// Stores half a slot and writes it back; the caller's next fence makes it durable.
    fn store_half(&self, offset: u64, half: u64) -> Result<()> {
        self.region.store_u64(offset, half)?;
        self.region.write_back(offset, 8)
    }

    /// Writes the group of `lane` back, whichever slot was stored.
    pub(super) fn write_back(&self, lane: u32) -> Result<()> {
        self.region.write_back(self.group_offset(lane), FLOG_GROUP_BYTES)
    }

    fn slot_offset(&self, lane: u32, which: usize) -> u64 {
        self.group_offset(lane) + self.slots.offset(which)
    }

    /// Replaces all of a lane's slots; durable on return.
    pub(super) fn replace(&self, lane: u32, group: &Group) -> Result<()> {
        self.region.write_streaming(self.group_offset(lane), group.as_bytes())?;
        self.region.fence()
    }

    /// Reads the slots of `lane` unchecked.
    pub(super) fn group(&self, lane: u32) -> Result<Group> {
        let mut group = Group::new_zeroed();
        let slots = if self.is_pair { 2 } else { group.len() };
        self.region.read(self.group_offset(lane), group[..slots].as_mut_bytes())?;
        Ok(group)
    }

    fn group_offset(&self, lane: u32) -> u64 {
        self.base + u64::from(lane) * FLOG_GROUP_BYTES
    }
}

/// Makes the slots of a lane with the free block in `block` and without a write: an entry that maps
/// the block to itself.
pub(super) fn unused_group(slots: FlogSlots, lba: u32, block: u32) -> Group {
    let mut group = Group::default();
    group[0] = FlogSlot::new(lba, block, block, 1);
    if slots == FlogSlots::ZeroTwo {
        // The second entry shows which slots are in use.
        group[2] = FlogSlot::new(lba, block, block, 2);
    }
    group
}

/// Returns the newest entry of a lane's slots.
///
/// # Errors
/// The contradiction between the slots and the format.
pub(super) fn newest_of(group: &Group, slots: FlogSlots) -> Result<Newest, String> {
    let (used, padding) = match slots {
        FlogSlots::ZeroOne => ([0, 1], [2, 3]),
        FlogSlots::ZeroTwo => ([0, 2], [1, 3]),
    };
    if let Some(slot) = padding.into_iter().find(|&slot| !group[slot].is_padding()) {
        let [first, second] = used;
        return Err(format!("slot {slot} is not zero, expected entries in {first} and {second}"));
    }
    let entries = used.map(|slot| group[slot]);
    // A write that was cut off may have left its first half in a slot that was never used before.
    if entries.iter().any(|entry| entry.seq.get() == 0 && entry.new_map.get() != 0) {
        return Err("an entry has the sequence number 0, expected 1 to 3".into());
    }
    let [first, second] = entries.map(|entry| entry.seq.get());
    let which = newer(first, second).ok_or_else(|| {
        format!("its sequence numbers are {first} and {second}, which cannot follow each other")
    })?;
    Ok(Newest { which, entry: entries[which] })
}

/// Returns the index of the newer of two sequence numbers, or `None` if they contradict each other.
/// Zero stands for a slot that was never written.
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
    fn slots_that_contradict_the_format_are_told() {
        let (used, next) = (FlogSlot::new(0, 1, 1, 1), FlogSlot::new(0, 1, 2, 2));
        let none = FlogSlot::default();
        let which = |group, slots| newest_of(&group, slots).map(|newest| newest.which).ok();
        assert_eq!(which([used, none, none, none], FlogSlots::ZeroOne), Some(0));
        assert_eq!(which([used, next, none, none], FlogSlots::ZeroOne), Some(1));
        assert_eq!(which([used, none, next, none], FlogSlots::ZeroTwo), Some(1));
        for wrong in [[none; 4], [used, none, next, none], [used, next, none, next]] {
            assert_eq!(which(wrong, FlogSlots::ZeroOne), None);
        }
        // A first half that a crash left; and a sequence number that became 0.
        let torn = FlogSlot::new(5, 6, 0, 0);
        assert_eq!(which([used, torn, none, none], FlogSlots::ZeroOne), Some(0));
        let lost = FlogSlot::new(5, 6, 7, 0);
        assert_eq!(which([used, lost, none, none], FlogSlots::ZeroOne), None);
    }
}
