//! A slot in DRAM: its page and flags in one word, and its version.

/// The slot is live.
pub(super) const LIVE: u64 = 1;
/// The backing does not have the bytes.
pub(super) const DIRTY: u64 = 2;
/// The page is all zeroes and the slot has no data.
pub(super) const ZERO: u64 = 4;
/// The data was not compared with its checksum since the pool was opened.
pub(super) const UNVERIFIED: u64 = 8;
/// The slot holds a record: some lines of the page, over another page or the backing's bytes.
pub(super) const RECORD: u64 = 1 << 12;
/// The slot holds the page under the newest version of its page, which is a record.
pub(super) const BASE: u64 = 1 << 11;
/// The page under the record is damaged.
pub(super) const LOST_BASE: u64 = 1 << 10;
/// The IO class of the page, in six bits.
pub(super) const CLASS_SHIFT: u32 = 4;
pub(super) const CLASS: u64 = 0x3F << CLASS_SHIFT;
/// The slot holds a member of an uncommitted group: the newest group that the page waits for.
pub(super) const MEMBER: u64 = 1 << 13;
/// The page has a member in the even or the odd uncommitted group.
pub(super) const WAITS: [u64; 2] = [1 << 14, 1 << 15];
pub(super) const WAITS_ANY: u64 = WAITS[0] | WAITS[1];
/// The flags that determine the counts of a shard that include a live slot.
pub(super) const COUNTED: u64 = DIRTY | RECORD | CLASS;

pub(super) const PAGE_SHIFT: u32 = 16;
pub(super) const NONE: u64 = u64::MAX;

/// A slot: 16 bytes.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    /// The page and flags.
    pub(super) word: u64,
    /// The version, or for a free slot the next free slot.
    pub(super) version: u64,
}

impl Slot {
    pub(super) fn page(self) -> u64 {
        self.word >> PAGE_SHIFT
    }

    pub(super) fn is(self, flag: u64) -> bool {
        self.word & flag != 0
    }

    pub(super) fn class(self) -> u8 {
        u8::try_from((self.word & CLASS) >> CLASS_SHIFT).unwrap_or_default()
    }

    pub(super) fn set_class(&mut self, class: u8) {
        self.word = self.word & !CLASS | u64::from(class) << CLASS_SHIFT;
    }

    /// Returns whether the slot holds its page's newest version, dirty.
    pub(super) fn is_dirty(self) -> bool {
        self.is(LIVE) && self.is(DIRTY)
    }

    /// Returns whether the slot holds its page's newest version, dirty, and waits for no commit.
    pub(super) fn can_be_cleaned(self) -> bool {
        self.is_dirty() && !self.is(WAITS_ANY)
    }
}

/// Returns `flag` if `is`, and otherwise 0.
pub(super) fn flag(is: bool, flag: u64) -> u64 {
    if is { flag } else { 0 }
}
