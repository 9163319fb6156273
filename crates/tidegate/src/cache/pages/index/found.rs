//! The descriptions of slots that a shard returns and takes.

use crate::cache::store::layout::{SlotHeader, UNITS, whole_slot};

/// The newest version of a page, and the slot that holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub(in crate::cache) struct Found {
    pub(in crate::cache) page: u64,
    /// The slot, numbered through all shards.
    pub(in crate::cache) slot: u32,
    pub(in crate::cache) version: u64,
    pub(in crate::cache) dirty: bool,
    pub(in crate::cache) zero: bool,
    /// The slot holds a record: some lines of the page.
    pub(in crate::cache) record: bool,
    /// The page under a record; `None` if the backing has the rest.
    pub(in crate::cache) base: Option<Base>,
    pub(in crate::cache) verified: bool,
}

/// The page under a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub(in crate::cache) struct Base {
    pub(in crate::cache) slot: u32,
    pub(in crate::cache) version: u64,
    /// The backing does not have the page's bytes.
    pub(in crate::cache) dirty: bool,
    pub(super) zero: bool,
    pub(super) verified: bool,
    /// The page is damaged and has no slot.
    pub(in crate::cache) is_lost: bool,
}

impl Found {
    /// Returns the version in `slot` that `header` describes: not verified, and over no page.
    pub(in crate::cache) fn of_header(slot: u32, header: &SlotHeader) -> Self {
        let SlotHeader { page, version, dirty, zero, .. } = *header;
        let (record, base) = (header.is_record(), None);
        Self { page, slot, version, dirty, zero, record, base, verified: false }
    }

    /// Returns whether `other` is the same version of the same page, in the same slot.
    pub(in crate::cache) fn is_same(&self, other: &Self) -> bool {
        (self.page, self.slot, self.version) == (other.page, other.slot, other.version)
    }

    /// Returns the page under the record.
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
    /// The page that has an older version in the slot, if the slot is dead.
    pub(in crate::cache) dead_page: Option<u64>,
    /// Number of units of a part; 0 for a slot.
    pub(in crate::cache) units: u32,
    /// The slot is the first part of a slot that is to be split and has `dead_page` as a whole.
    pub(in crate::cache) splits: bool,
}

impl Taken {
    /// Returns the whole slot if it is to be split, and otherwise the slot or part that was taken.
    pub(in crate::cache) fn whole(self) -> Self {
        let slot = if self.splits { whole_slot(self.slot) } else { self.slot };
        Self { slot, splits: false, ..self }
    }
}

/// The content that a slot was filled with.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::struct_excessive_bools)]
pub(in crate::cache) struct Stored {
    /// The backing does not have the bytes.
    pub(in crate::cache) dirty: bool,
    /// The page reads as zeroes.
    pub(in crate::cache) zero: bool,
    /// A record: some lines of the page. The rest is in the page under it or in the backing.
    pub(in crate::cache) record: bool,
    /// A record over the page that it replaces, or over the page under the record that it replaces.
    pub(in crate::cache) over: bool,
    /// The group that the version is a member of; 0 for none.
    pub(in crate::cache) group: u64,
    /// The IO class.
    pub(in crate::cache) class: u8,
}

/// Numbers of slots, by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::cache) struct Usage {
    pub(in crate::cache) live: u64,
    pub(in crate::cache) dirty: u64,
    /// Pages that wait for the commit of a group, all dirty.
    pub(in crate::cache) waiting: u64,
    pub(in crate::cache) retained: u64,
    /// Live slots that hold records.
    pub(in crate::cache) records: u64,
    /// Live records that are in parts.
    pub(in crate::cache) parts: u64,
    /// Slots that are split.
    pub(in crate::cache) splits: u64,
    /// Dirty slots and parts, in units: [`UNITS`] for a slot.
    pub(in crate::cache) dirty_units: u64,
    /// Slots that hold pages under records.
    pub(in crate::cache) bases: u64,
}

impl Usage {
    /// Returns the number of whole slots that are live or split.
    pub(in crate::cache) fn used_slots(self) -> u64 {
        self.live + self.splits - self.parts
    }

    /// Returns the number of dirty slots that can be cleaned. Parts count by their units.
    pub(super) fn cleanable(self) -> u64 {
        (self.dirty - self.waiting).min(self.dirty_units.div_ceil(UNITS.into()))
    }

    /// Returns the sum of both.
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
