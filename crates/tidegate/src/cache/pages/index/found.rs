//! What a shard tells of its slots, and what it is told.

use crate::cache::store::layout::{SlotHeader, UNITS, whole_slot};

/// Where the newest version of a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub(in crate::cache) struct Found {
    pub(in crate::cache) page: u64,
    /// The slot, numbered through all shards.
    pub(in crate::cache) slot: u32,
    pub(in crate::cache) version: u64,
    pub(in crate::cache) dirty: bool,
    pub(in crate::cache) zero: bool,
    /// Some lines of the page are in the slot.
    pub(in crate::cache) record: bool,
    /// The page over which a record lies; else its rest is the backing's.
    pub(in crate::cache) base: Option<Base>,
    pub(in crate::cache) verified: bool,
}

/// The page over which a record lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub(in crate::cache) struct Base {
    pub(in crate::cache) slot: u32,
    pub(in crate::cache) version: u64,
    /// The backing does not have it.
    pub(in crate::cache) dirty: bool,
    pub(super) zero: bool,
    pub(super) verified: bool,
    /// It is not there any more.
    pub(in crate::cache) is_lost: bool,
}

impl Found {
    /// The version in `slot` that `header` describes, not yet verified. A record lies over no page.
    pub(in crate::cache) fn of_header(slot: u32, header: &SlotHeader) -> Self {
        let SlotHeader { page, version, dirty, zero, .. } = *header;
        let (record, base) = (header.is_record(), None);
        Self { page, slot, version, dirty, zero, record, base, verified: false }
    }

    /// It is the same version of the page, in the same slot.
    pub(in crate::cache) fn is_same(&self, other: &Self) -> bool {
        (self.page, self.slot, self.version) == (other.page, other.slot, other.version)
    }

    /// The page over which the record lies.
    pub(in crate::cache) fn under(&self) -> Option<Self> {
        let Base { slot, version, dirty, zero, verified, .. } = self.base?;
        let (page, record, base) = (self.page, false, None);
        Some(Self { page, slot, version, dirty, zero, record, base, verified })
    }
}

/// A slot to be filled.
#[derive(Debug, Clone, Copy)]
pub(in crate::cache) struct Taken {
    pub(in crate::cache) slot: u32,
    /// The version that goes into it.
    pub(in crate::cache) version: u64,
    /// The page of which the slot holds an older version.
    pub(in crate::cache) dead_page: Option<u64>,
    /// Units of a part; of a slot 0.
    pub(in crate::cache) units: u32,
    /// The slot is the first part of one that is to be split, and holds that version as a whole.
    pub(in crate::cache) splits: bool,
}

impl Taken {
    /// The slot that is to be split, or what was taken.
    pub(in crate::cache) fn whole(self) -> Self {
        let slot = if self.splits { whole_slot(self.slot) } else { self.slot };
        Self { slot, splits: false, ..self }
    }
}

/// What a slot was filled with.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::struct_excessive_bools)]
pub(in crate::cache) struct Stored {
    /// The backing does not have it.
    pub(in crate::cache) dirty: bool,
    /// The page reads as zeroes.
    pub(in crate::cache) zero: bool,
    /// Some lines of the page, the rest of which is the backing's.
    pub(in crate::cache) record: bool,
    /// Of a record: it lies over the page that it replaces, or that the replaced record lay over.
    pub(in crate::cache) over: bool,
    /// The group that it is a member of; 0: none.
    pub(in crate::cache) group: u64,
    /// Its IO class.
    pub(in crate::cache) class: u8,
}

/// Slots by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::cache) struct Usage {
    pub(in crate::cache) live: u64,
    pub(in crate::cache) dirty: u64,
    /// Pages that wait for the commit of a group; all of them are dirty.
    pub(in crate::cache) waiting: u64,
    pub(in crate::cache) retained: u64,
    /// Live slots that hold records.
    pub(in crate::cache) records: u64,
    /// Those of them that are parts.
    pub(in crate::cache) parts: u64,
    /// Slots that are split.
    pub(in crate::cache) splits: u64,
    /// What is dirty, in [`UNITS`] of slots.
    pub(in crate::cache) dirty_units: u64,
    /// Slots that hold pages over which records lie.
    pub(in crate::cache) bases: u64,
}

impl Usage {
    /// Slots that hold something.
    pub(in crate::cache) fn used_slots(self) -> u64 {
        self.live + self.splits - self.parts
    }

    /// Dirty slots that can be cleaned; the parts of one count together.
    pub(super) fn cleanable(self) -> u64 {
        (self.dirty - self.waiting).min(self.dirty_units.div_ceil(UNITS.into()))
    }

    /// Both together.
    pub(in crate::cache) fn plus(self, other: Self) -> Self {
        Self {
            live: self.live + other.live,
            dirty: self.dirty + other.dirty,
            waiting: self.waiting + other.waiting,
            retained: self.retained + other.retained,
            records: self.records + other.records,
            parts: self.parts + other.parts,
            splits: self.splits + other.splits,
            dirty_units: self.dirty_units + other.dirty_units,
            bases: self.bases + other.bases,
        }
    }
}
