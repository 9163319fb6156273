//! The cache's format on the medium: slot headers, the cache header, and the offsets of slots.
//!
//! docs/formats.md describes it. All numbers are little-endian. Nothing here touches memory.

use std::mem::{offset_of, size_of};

use crc_fast::{CrcAlgorithm, Digest, checksum};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::pmem::is_of_one_bit;

/// Size of a slot, and of a page of the backing, in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// [`PAGE_BYTES`] as the length of a buffer.
pub(in crate::cache) const PAGE: usize = 4096;
/// Size of a slot's header in bytes: a cache line.
pub const HEADER_BYTES: u64 = HEADER as u64;
/// [`HEADER_BYTES`] as the length of a buffer.
pub(in crate::cache) const HEADER: usize = 64;
/// Bytes of a line. Each bit of a header's bitmaps stands for one line.
pub(in crate::cache) const LINE: usize = 64;
/// All lines of a page.
pub const ALL_LINES: u64 = u64::MAX;
/// Size of a chunk in bytes. The last chunk of a pool may be shorter.
pub const CHUNK_BYTES: u64 = 64 << 20;
/// Slots of a whole chunk.
pub const CHUNK_SLOTS: u32 = 16_128;
/// Pages at the start of a chunk, reserved for its description. They are zero in this version.
const CHUNK_HEAD_PAGES: u64 = 4;
/// Bytes before the slot headers of a chunk.
pub(in crate::cache) const CHUNK_HEAD_BYTES: u64 = CHUNK_HEAD_PAGES * PAGE_BYTES;
const HEADERS_A_PAGE: u64 = PAGE_BYTES / HEADER_BYTES;
const HEADERS_A_PAGE_U32: u32 = 64;
/// Offset of the page of commit words from the engine's first byte: behind both cache headers.
const COMMIT_OFFSET: u64 = 2 * PAGE_BYTES;
/// Offset of the first chunk from the engine's first byte.
pub(in crate::cache) const CHUNKS_OFFSET: u64 = COMMIT_OFFSET + PAGE_BYTES;
/// Size of a commit word in bytes.
pub(in crate::cache) const COMMIT_BYTES: usize = 16;
/// Page numbers are below this. The upper bits of the field are for the number of a backing.
pub(in crate::cache) const PAGES_MAX: u64 = 1 << 48;
const BATCH_BITS: u32 = 48;
/// Numbers of batches, versions and groups are below half the range of their fields, so that the
/// successor of any valid number can be stored.
const BATCHES_MAX: u64 = 1 << (BATCH_BITS - 1);
const VERSIONS_MAX: u64 = 1 << 63;
/// The page reads as zeroes, whatever the slot's data.
const FLAG_ZERO: u64 = 1;
/// The slot is split: its parts have their own headers.
const FLAG_SPLIT: u64 = 2;
/// The group field of a split slot.
const SPLIT_MARK: u64 = 0x0054_494c_5053;
/// The data check field of a split slot. Version 3 stored 1 to 4 here, for parts of one size.
const SPLIT_FORM: u32 = 5;
/// The group is in the bits above the flags.
const GROUP_SHIFT: u32 = 8;
const FLAGS: u64 = (1 << GROUP_SHIFT) - 1;
/// See [`BATCHES_MAX`].
pub(in crate::cache) const GROUPS_MAX: u64 = 1 << (63 - GROUP_SHIFT);
/// Maximum length of the backing's name in a cache header, in bytes.
pub(in crate::cache) const NAME_BYTES_MAX: usize = 512;
/// Maximum length of the settings in a cache header, in bytes.
pub(in crate::cache) const SETTINGS_BYTES_MAX: usize = 3064;
const MAGIC: [u8; 8] = *b"TGCACHE\0";
pub(in crate::cache) const VERSION: u32 = 4;
/// Versions that opening a pool upgrades to [`VERSION`]. Version 1 had no records, version 2 no
/// split slots. Version 3 is not upgraded, because its parts differ.
pub(in crate::cache) const VERSIONS_BEFORE: [u32; 2] = [1, 2];

const _: () = {
    assert!((CHUNK_SLOTS as u64).is_multiple_of(HEADERS_A_PAGE));
    assert!(HEADERS_A_PAGE_U32 as u64 == HEADERS_A_PAGE);
    let header_pages = CHUNK_SLOTS as u64 / HEADERS_A_PAGE;
    let pages = CHUNK_HEAD_PAGES + header_pages + CHUNK_SLOTS as u64;
    assert!(pages * PAGE_BYTES == CHUNK_BYTES);
};

/// Slots of a stripe. Their headers fill one page.
const STRIPE_SLOTS: u64 = HEADERS_A_PAGE;
const STRIPE_BYTES: u64 = (1 + STRIPE_SLOTS) * PAGE_BYTES;
/// Half of the range of `u32`, so that tables may be twice as long.
const SLOTS_MAX: u32 = u32::MAX / 2;

/// Offsets of slot headers and slot data in the region. Slots lie in the chunks that the pool was
/// created with, and in the stripes that it grew by. A resize never moves a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    base: u64,
    chunk_slots: u32,
    /// Offset of the first stripe.
    stripes: u64,
    slots: u32,
}

impl Places {
    /// Returns the slots of a new pool: chunks that fill `bytes` bytes from `base` on.
    pub(in crate::cache) fn fitting(base: u64, bytes: u64) -> Self {
        let rest_pages = (bytes % CHUNK_BYTES / PAGE_BYTES).saturating_sub(CHUNK_HEAD_PAGES);
        // n slots need n pages of data and n / 64 pages of headers, rounded up.
        let rest = rest_pages * HEADERS_A_PAGE / (HEADERS_A_PAGE + 1);
        let slots = at_most_all(bytes / CHUNK_BYTES * u64::from(CHUNK_SLOTS) + rest);
        Self { slots, ..Self::made_with(base, slots) }
    }

    /// Returns the slots in `bytes` bytes from `base` on, for a pool created with `chunk_slots`
    /// slots.
    pub(in crate::cache) fn within(base: u64, bytes: u64, chunk_slots: u32) -> Self {
        let all = Self::made_with(base, chunk_slots.min(SLOTS_MAX));
        let end = base.saturating_add(bytes);
        let slots = match end.checked_sub(all.stripes) {
            Some(bytes) => all.slots_of_stripes(bytes / PAGE_BYTES),
            None => all.slots_of_chunks(end),
        };
        Self { slots, ..all }
    }

    /// Returns the layout of a pool created with `chunk_slots` slots, with a slot count of 0.
    fn made_with(base: u64, chunk_slots: u32) -> Self {
        let places = Self { base, chunk_slots, stripes: 0, slots: 0 };
        let chunks_end = chunk_slots.checked_sub(1).map(|last| places.data(last) + PAGE_BYTES);
        // The rest at the end of the pool as created, at most five pages, never gets a slot.
        Self { stripes: chunks_end.unwrap_or(base) + CHUNK_HEAD_BYTES, ..places }
    }

    /// Returns the number of all slots if `pages` pages are available for stripes.
    fn slots_of_stripes(&self, pages: u64) -> u32 {
        let (stripes, rest) = (pages * PAGE_BYTES / STRIPE_BYTES, pages % (1 + STRIPE_SLOTS));
        let slots = stripes * STRIPE_SLOTS + rest.saturating_sub(1);
        at_most_all(u64::from(self.chunk_slots).saturating_add(slots))
    }

    /// Returns the number of slots in chunks whose data ends at `end` or before.
    fn slots_of_chunks(&self, end: u64) -> u32 {
        let fits = |slot: &u32| self.data(*slot) + PAGE_BYTES <= end;
        let (mut fitting, mut first_not) = (0, self.chunk_slots);
        while fitting < first_not {
            let slot = fitting + (first_not - fitting) / 2;
            if fits(&slot) { fitting = slot + 1 } else { first_not = slot }
        }
        fitting
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns the number of slots in chunks, fixed when the pool was created.
    pub(in crate::cache) fn chunk_slots(&self) -> u32 {
        self.chunk_slots
    }

    /// Returns the offset of the header of `slot`. Headers of parts lie before all lines.
    pub fn header(&self, slot: u32) -> u64 {
        if let Some(part) = part_number(slot) {
            return self.data(part.slot) + u64::from(part.unit) * HEADER_BYTES;
        }
        let Located { headers, within, .. } = self.locate(slot);
        headers + within * HEADER_BYTES
    }

    /// Returns the offset of the data of `slot`.
    pub fn data(&self, slot: u32) -> u64 {
        if let Some(part) = part_number(slot) {
            return self.data(part.slot) + PART_HEADERS_BYTES + u64::from(part.unit) * UNIT_BYTES;
        }
        let Located { headers, header_pages, within } = self.locate(slot);
        headers + (header_pages + within) * PAGE_BYTES
    }

    /// Returns the slots from `first` to `end` in runs of at most 64 with contiguous headers: the
    /// first slot and the number of slots of each run.
    pub(in crate::cache) fn header_runs(
        &self,
        first: u32,
        end: u32,
    ) -> impl Iterator<Item = (u32, u32)> {
        let places = *self;
        let run_of = move |first: u32| {
            if first >= end {
                return None;
            }
            let (from, until) = match first.checked_sub(places.chunk_slots) {
                Some(own) => (own, end - places.chunk_slots),
                None => (first, end.min(places.chunk_slots)),
            };
            let of_page = HEADERS_A_PAGE_U32 - from % HEADERS_A_PAGE_U32;
            Some((first, of_page.min(until - from)))
        };
        std::iter::successors(run_of(first), move |(first, count)| run_of(first + count))
    }

    /// Locates `slot` in its chunk or stripe. `slot` is not a part.
    #[inline]
    fn locate(&self, slot: u32) -> Located {
        if let Some(own) = slot.checked_sub(self.chunk_slots) {
            let (stripe, within) = (u64::from(own) / STRIPE_SLOTS, u64::from(own) % STRIPE_SLOTS);
            return Located {
                headers: self.stripes + stripe * STRIPE_BYTES,
                header_pages: 1,
                within,
            };
        }
        let (chunk, within) = (u64::from(slot / CHUNK_SLOTS), slot % CHUNK_SLOTS);
        let in_chunk = u64::from(CHUNK_SLOTS.min(self.chunk_slots - (slot - within)));
        let headers = self.base + chunk * CHUNK_BYTES + CHUNK_HEAD_BYTES;
        let header_pages = in_chunk.div_ceil(HEADERS_A_PAGE);
        Located { headers, header_pages, within: within.into() }
    }
}

/// A chunk or stripe, which has contiguous headers followed by the data, and one slot in it.
struct Located {
    /// Offset of the first header in the region.
    headers: u64,
    /// Pages that the headers take.
    header_pages: u64,
    /// The number of the slot in its chunk or stripe.
    within: u64,
}

/// Returns `slots`, limited to [`SLOTS_MAX`].
fn at_most_all(slots: u64) -> u32 {
    u32::try_from(slots).unwrap_or(u32::MAX).min(SLOTS_MAX)
}

/// Bytes at the start of a split slot for the headers of its parts. AFCM's fine slots have as much
/// metadata, and 56 lines behind it too.
const PART_HEADERS_BYTES: u64 = 512;
/// Lines of a unit.
const UNIT_LINES: u32 = 8;
/// Units of a split slot. A part is one unit or several adjacent ones, and holds a record.
pub const UNITS: u32 = 7;
const UNIT_BYTES: u64 = UNIT_LINES as u64 * LINE as u64;
/// Maximum units of a part. A longer record takes a whole slot, as it would leave no unit anyway.
pub(in crate::cache) const PART_UNITS_MAX: u32 = UNITS - 1;
/// Bytes of the headers of all parts that a slot can have: one for each unit.
pub const ALL_PART_HEADERS: usize = UNITS as usize * HEADER;
/// Flag in the number of a part, above the slot number and the part's first unit.
const PART_FLAG: u32 = 1 << 31;
const UNIT_BITS: u32 = 3;
/// Slots from this number on are never split: their parts' numbers would not fit.
const SPLIT_SLOTS_MAX: u32 = 1 << (31 - UNIT_BITS);

const _: () = {
    assert!(ALL_PART_HEADERS as u64 <= PART_HEADERS_BYTES);
    assert!(PART_HEADERS_BYTES + UNITS as u64 * UNIT_BYTES == PAGE_BYTES);
    assert!(UNITS <= 1 << UNIT_BITS);
};

/// Returns the units of a record of `lines` lines. More than [`PART_UNITS_MAX`] take a slot.
#[inline]
pub(in crate::cache) fn units_of(lines: u32) -> u32 {
    lines.div_ceil(UNIT_LINES)
}

/// Returns the number of the part that begins at `unit` of `slot`, which is below 2^28.
pub fn part_of(slot: u32, unit: u32) -> u32 {
    PART_FLAG | slot << UNIT_BITS | unit
}

/// Returns the numbers of all parts that `slot` can have, one for each unit.
pub fn parts_of(slot: u32) -> impl Iterator<Item = u32> {
    (0..UNITS).map(move |unit| part_of(slot, unit))
}

/// A decoded part number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cache) struct PartNumber {
    /// The split slot.
    pub(in crate::cache) slot: u32,
    /// The first unit.
    pub(in crate::cache) unit: u32,
}

/// Decodes the number of a part. Returns `None` if `slot` is the number of a whole slot.
#[inline]
pub(in crate::cache) fn part_number(slot: u32) -> Option<PartNumber> {
    let number = slot.checked_sub(PART_FLAG)?;
    Some(PartNumber { slot: number >> UNIT_BITS, unit: number & ((1 << UNIT_BITS) - 1) })
}

/// Returns whether `slot` is the number of a part.
pub(in crate::cache) fn is_part(slot: u32) -> bool {
    slot & PART_FLAG != 0
}

/// Returns the slot that contains the part `slot`, or `slot` itself if it is no part.
pub fn whole_slot(slot: u32) -> u32 {
    part_number(slot).map_or(slot, |part| part.slot)
}

/// Returns whether `slot` may be split, which requires that its parts' numbers fit.
pub(in crate::cache) fn can_split(slot: u32) -> bool {
    slot < SPLIT_SLOTS_MAX
}

/// Returns how many lines a header of `slot` may name: a page's, or the longest record's in a part.
fn lines_max(slot: u32) -> u32 {
    part_number(slot)
        .map_or(u64::BITS, |part| UNITS.saturating_sub(part.unit).min(PART_UNITS_MAX) * UNIT_LINES)
}

/// Encodes the header that splits `slot` of the pool with `salt`. All its words but the checksum's
/// are constant, to tell a header that a crash tore from one with a changed bit.
pub(in crate::cache) fn split_header(salt: u64, slot: u32) -> [u8; HEADER] {
    let mut bytes = HeaderBytes::new_zeroed();
    bytes.data_check = U32::new(SPLIT_FORM);
    bytes.flags_group = U64::new(FLAG_SPLIT | SPLIT_MARK << GROUP_SHIFT);
    bytes.check = U32::new(header_check(&bytes, salt, slot));
    zerocopy::transmute!(bytes)
}

/// A slot header as it lies on the medium.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HeaderBytes {
    check: U32,
    data_check: U32,
    page: U64,
    version: U64,
    lane_batch: U64,
    flags_group: U64,
    valid: U64,
    dirty_or_over: U64,
    verdict: U64,
}

const _: () = {
    assert!(size_of::<HeaderBytes>() as u64 == HEADER_BYTES);
    assert!(offset_of!(HeaderBytes, check) == 0);
    assert!(offset_of!(HeaderBytes, data_check) == 4);
    assert!(offset_of!(HeaderBytes, page) == 8);
    assert!(offset_of!(HeaderBytes, version) == 16);
    assert!(offset_of!(HeaderBytes, lane_batch) == 24);
    assert!(offset_of!(HeaderBytes, flags_group) == 32);
    assert!(offset_of!(HeaderBytes, valid) == 40);
    assert!(offset_of!(HeaderBytes, dirty_or_over) == 48);
    assert!(offset_of!(HeaderBytes, verdict) as u64 == VERDICT_OFFSET);
};

/// Offset of the verdict in a slot header.
pub const VERDICT_OFFSET: u64 = 56;

/// The decoded header of a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlotHeader {
    /// The page of the backing that the slot holds, below 2^48.
    pub page: u64,
    /// Grows with each write of the page; below 2^63.
    pub version: u64,
    /// The lane that wrote the slot.
    pub lane: u16,
    /// The number of the lane's batch, below 2^47.
    pub batch: u64,
    /// The group that must be committed before the header counts, below 2^55; 0 if there is none.
    pub group: u64,
    /// The lines of the page that the slot holds, one bit each. Not all bits are set for a record.
    pub lines: u64,
    /// For a record, the version of the page under it, or 0 if the backing's bytes are under it.
    pub over: u64,
    /// The page reads as zeroes, and the slot's data is ignored.
    pub zero: bool,
    /// The backing does not have these bytes.
    pub dirty: bool,
    /// CRC-32C of the slot's data; 0 for a page of zeroes.
    pub data_check: u32,
}

/// The result of decoding the bytes of a slot header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoded {
    /// The slot is free.
    Free {
        /// The slot was used before, and the word that freed it may not be durable yet.
        used: bool,
    },
    /// No valid header: a write that never finished, or damage.
    Bad,
    /// The slot is split: its parts have headers.
    Split,
    /// A valid header.
    Header(SlotHeader),
}

impl SlotHeader {
    /// Returns whether the slot holds a record: only some lines of the page, written by a client.
    pub fn is_record(&self) -> bool {
        self.lines != ALL_LINES
    }

    /// Encodes this header for `slot` of the pool with `salt`. A record is always encoded as dirty.
    pub fn encode(&self, salt: u64, slot: u32) -> [u8; HEADER] {
        let flags = if self.zero { FLAG_ZERO } else { 0 };
        let dirty = if self.dirty { ALL_LINES } else { 0 };
        let mut bytes = HeaderBytes {
            check: U32::ZERO,
            data_check: U32::new(self.data_check),
            page: U64::new(self.page),
            version: U64::new(self.version),
            lane_batch: U64::new(u64::from(self.lane) << BATCH_BITS | self.batch),
            flags_group: U64::new(flags | self.group << GROUP_SHIFT),
            valid: U64::new(self.lines),
            dirty_or_over: U64::new(if self.is_record() { self.over } else { dirty }),
            verdict: U64::ZERO,
        };
        bytes.check = U32::new(header_check(&bytes, salt, slot));
        zerocopy::transmute!(bytes)
    }

    /// Searches for a single changed bit that makes `bytes` [`Decoded::Bad`]. Returns the bit's
    /// number and the result of decoding without the change, or `None` if there is no such bit.
    pub(in crate::cache) fn decode_changed(
        bytes: &[u8; HEADER],
        salt: u64,
        slot: u32,
    ) -> Option<(usize, Decoded)> {
        (0..HEADER * 8).find_map(|bit| {
            let mut changed = *bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            let decoded = Self::decode(&changed, salt, slot);
            (decoded != Decoded::Bad).then_some((bit, decoded))
        })
    }

    /// Decodes the header of `slot` of the pool with `salt`.
    pub fn decode(bytes: &[u8; HEADER], salt: u64, slot: u32) -> Decoded {
        let bytes: HeaderBytes = zerocopy::transmute!(*bytes);
        if bytes.check == U32::ZERO && bytes.data_check == U32::ZERO {
            return Decoded::Free { used: bytes.as_bytes().iter().any(|byte| *byte != 0) };
        }
        let is_whole = bytes.check.get() == header_check(&bytes, salt, slot);
        let (page, flags) = (bytes.page.get(), bytes.flags_group.get());
        if flags & FLAG_SPLIT != 0 {
            let is_split = can_split(slot) && is_whole && is_split_header(&bytes, salt, slot);
            return if is_split { Decoded::Split } else { Decoded::Bad };
        }
        let (version, group) = (bytes.version.get(), flags >> GROUP_SHIFT);
        let batch = bytes.lane_batch.get() & ((1 << BATCH_BITS) - 1);
        let lines = bytes.valid.get();
        let is_record = lines != ALL_LINES;
        let is_known = page < PAGES_MAX
            && version < VERSIONS_MAX
            && batch < BATCHES_MAX
            && group < GROUPS_MAX
            && flags & FLAGS & !FLAG_ZERO == 0
            && lines.count_ones() <= lines_max(slot)
            && !(is_record && (lines == 0 || flags & FLAG_ZERO != 0))
            && (is_record || [0, ALL_LINES].contains(&bytes.dirty_or_over.get()));
        if !is_whole || !is_known {
            return Decoded::Bad;
        }
        let is_stored_clean = bytes.dirty_or_over == U64::ZERO && !is_record;
        let is_clean = is_stored_clean || bytes.verdict.get() == clean_verdict(salt, slot, version);
        Decoded::Header(Self {
            page,
            version,
            lane: u16::try_from(bytes.lane_batch.get() >> BATCH_BITS).unwrap_or(u16::MAX),
            batch,
            group,
            lines,
            over: if is_record { bytes.dirty_or_over.get() } else { 0 },
            zero: flags & FLAG_ZERO != 0,
            dirty: !is_clean,
            data_check: bytes.data_check.get(),
        })
    }
}

/// Returns whether `bytes`, verdict aside, are one bit off the header that splits `slot`.
pub(in crate::cache) fn is_changed_split(bytes: &[u8; HEADER], salt: u64, slot: u32) -> bool {
    let whole = split_header(salt, slot);
    let pairs = whole[..56].iter().zip(bytes);
    can_split(slot) && pairs.map(|(one, other)| (one ^ other).count_ones()).sum::<u32>() == 1
}

/// Returns whether `bytes`, verdict aside, are the header that splits `slot`.
fn is_split_header(bytes: &HeaderBytes, salt: u64, slot: u32) -> bool {
    split_header(salt, slot)[..56] == bytes.as_bytes()[..56]
}

/// Returns the CRC-32C over salt, slot number and bytes 4 to 56; never 0, which means free.
fn header_check(bytes: &HeaderBytes, salt: u64, slot: u32) -> u32 {
    let mut covered = [0; 64];
    covered[..8].copy_from_slice(&salt.to_le_bytes());
    covered[8..12].copy_from_slice(&slot.to_le_bytes());
    covered[12..].copy_from_slice(&bytes.as_bytes()[4..56]);
    low(checksum(CrcAlgorithm::Crc32Iscsi, &covered)).max(1)
}

/// Returns the verdict that `version` in `slot` is clean: the backing has flushed its bytes.
pub fn clean_verdict(salt: u64, slot: u32, version: u64) -> u64 {
    let mut covered = *b"CLEAN...salt....slotversion.";
    covered[8..16].copy_from_slice(&salt.to_le_bytes());
    covered[16..20].copy_from_slice(&slot.to_le_bytes());
    covered[20..].copy_from_slice(&version.to_le_bytes());
    checksum(CrcAlgorithm::Crc64Nvme, &covered).max(1)
}

/// Returns which of the two commit words `group` uses. Groups alternate between the words.
pub(in crate::cache) fn parity(group: u64) -> usize {
    usize::from(!group.is_multiple_of(2))
}

/// Returns the offset of the commit word of `group` from the engine's first byte. Each of the words
/// has its own cache line.
pub(in crate::cache) fn commit_offset(group: u64) -> u64 {
    COMMIT_OFFSET + parity(group) as u64 * HEADER_BYTES
}

/// Returns the commit word that commits all groups up to `group`: the number and its checksum.
/// Before the first commit both words are zero, which stands for group 0.
pub(in crate::cache) fn commit_word(salt: u64, group: u64) -> [u64; 2] {
    let mut covered = *b"COMMIT..salt....group...";
    covered[8..16].copy_from_slice(&salt.to_le_bytes());
    covered[16..].copy_from_slice(&group.to_le_bytes());
    let sum = checksum(CrcAlgorithm::Crc64Nvme, &covered).max(1);
    [group, if group == 0 { 0 } else { sum }]
}

/// Returns the last group that `words` (of even groups, of odd groups) commit; `None` if damaged.
///
/// A crash can tear only the word of the next group. Each half of that word is then that group's or
/// that of the group before the returned one. Other content is damage, and may hide a lost commit.
pub(in crate::cache) fn committed_group(salt: u64, words: [[u64; 2]; 2]) -> Option<u64> {
    let is_whole = |(place, word): &(usize, [u64; 2])| {
        let group = word[0];
        parity(group) == *place && group < GROUPS_MAX && *word == commit_word(salt, group)
    };
    let group = (0..).zip(words).filter(is_whole).map(|(_, word)| word[0]).max()?;
    let other = words[1 - parity(group)];
    let before = commit_word(salt, group.saturating_sub(1));
    let after = commit_word(salt, group + 1);
    let is_cut_off = (0..2).all(|half| [before[half], after[half]].contains(&other[half]));
    is_cut_off.then_some(group)
}

/// Returns how many bytes of data a slot with `lines` stores.
pub(in crate::cache) fn stored_bytes(lines: u64) -> usize {
    lines.count_ones() as usize * LINE
}

/// Returns the CRC-32C of a slot's data.
pub fn data_check(data: &[u8]) -> u32 {
    low(checksum(CrcAlgorithm::Crc32Iscsi, data))
}

/// Returns whether changing one bit of `data` would make its checksum `expected`.
pub(in crate::cache) fn is_one_bit_off(data: &[u8], expected: u32) -> bool {
    is_of_one_bit(data_check(data) ^ expected, data.len() as u64)
}

fn low(sum: u64) -> u32 {
    u32::try_from(sum & u64::from(u32::MAX)).unwrap_or_default()
}

/// A cache header as it lies on the medium.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(in crate::cache) struct CacheHeaderBytes {
    magic: [u8; 8],
    pub(in crate::cache) version: U32,
    pub(in crate::cache) mode: U32,
    pub(in crate::cache) sequence: U64,
    pub(in crate::cache) salt: U64,
    pub(in crate::cache) chunks_offset: U64,
    pub(in crate::cache) slots: U64,
    pub(in crate::cache) backing_identity: U64,
    pub(in crate::cache) backing_pages: U64,
    pub(in crate::cache) backing_name_bytes: U32,
    pub(in crate::cache) shards: U32,
    pub(in crate::cache) backing_name: [u8; NAME_BYTES_MAX],
    /// Size of the clusters in bytes; 0 stands for 4096.
    pub(in crate::cache) line_bytes: U32,
    reserved: [u8; 436],
    /// Text that ends at the first zero byte.
    pub(in crate::cache) settings: [u8; SETTINGS_BYTES_MAX],
    checksum: U64,
}

const _: () = {
    assert!(size_of::<CacheHeaderBytes>() as u64 == PAGE_BYTES);
    assert!(offset_of!(CacheHeaderBytes, mode) == 12);
    assert!(offset_of!(CacheHeaderBytes, sequence) == 16);
    assert!(offset_of!(CacheHeaderBytes, salt) == 24);
    assert!(offset_of!(CacheHeaderBytes, chunks_offset) == 32);
    assert!(offset_of!(CacheHeaderBytes, slots) == 40);
    assert!(offset_of!(CacheHeaderBytes, backing_identity) == 48);
    assert!(offset_of!(CacheHeaderBytes, backing_pages) == 56);
    assert!(offset_of!(CacheHeaderBytes, backing_name_bytes) == 64);
    assert!(offset_of!(CacheHeaderBytes, shards) == 68);
    assert!(offset_of!(CacheHeaderBytes, backing_name) == 72);
    assert!(offset_of!(CacheHeaderBytes, line_bytes) == 584);
    assert!(offset_of!(CacheHeaderBytes, settings) == 1024);
    assert!(offset_of!(CacheHeaderBytes, checksum) == 4088);
};

/// The reason why a page is not a valid cache header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderFault {
    /// The page does not start with the magic bytes, or its checksum is wrong.
    Damaged,
    /// The header has a version that this program does not know.
    Version(u32),
}

impl CacheHeaderBytes {
    pub(in crate::cache) fn new() -> Self {
        let mut bytes = Self::new_zeroed();
        bytes.magic = MAGIC;
        bytes.version = U32::new(VERSION);
        bytes.chunks_offset = U64::new(CHUNKS_OFFSET);
        bytes
    }

    /// Stores the checksum of all other bytes.
    pub(in crate::cache) fn seal(&mut self) {
        self.checksum = U64::new(self.expected_checksum());
    }

    /// Returns whether `other` has the same values in the fields that no update changes.
    pub(in crate::cache) fn is_of_one_pool(&self, other: &Self) -> bool {
        let fixed = |it: &Self| {
            let sizes = (it.slots, it.shards, it.line_bytes);
            (it.magic, it.salt, it.chunks_offset, sizes, it.reserved)
        };
        fixed(self) == fixed(other)
    }

    pub(in crate::cache) fn validate(&self) -> Result<(), HeaderFault> {
        if self.magic != MAGIC || self.checksum.get() != self.expected_checksum() {
            return Err(HeaderFault::Damaged);
        }
        match self.version.get() {
            version if version == VERSION || VERSIONS_BEFORE.contains(&version) => Ok(()),
            other => Err(HeaderFault::Version(other)),
        }
    }

    fn expected_checksum(&self) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&self.as_bytes()[..offset_of!(Self, checksum)]);
        digest.finalize()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn headers() -> impl Strategy<Value = SlotHeader> {
        let (versions, batches) = (0..VERSIONS_MAX, 0..BATCHES_MAX);
        let numbers = (0..PAGES_MAX, versions, any::<u16>(), batches, any::<u32>());
        let lines = prop_oneof![Just(ALL_LINES), 1..ALL_LINES];
        let rest = (0..GROUPS_MAX, any::<bool>(), any::<bool>(), lines, any::<u64>());
        (numbers, rest).prop_map(|(numbers, (group, zero, dirty, lines, over))| {
            let (page, version, lane, batch, data_check) = numbers;
            let is_record = lines != ALL_LINES;
            let (zero, dirty) = (zero && !is_record, dirty || is_record);
            let over = if is_record { over } else { 0 };
            SlotHeader { page, version, lane, batch, group, lines, over, zero, dirty, data_check }
        })
    }

    /// All parts have distinct numbers that encode their offsets. Units fill the slot behind the
    /// headers.
    #[test]
    fn parts_have_numbers_and_places_of_their_own() {
        let places = Places::fitting(8192, 200 << 20);
        let mut numbers = std::collections::BTreeSet::new();
        for slot in [0, 1, 77, CHUNK_SLOTS, places.slots() - 1] {
            let first = places.data(slot);
            for (unit, part) in (0..).zip(parts_of(slot)) {
                assert!(numbers.insert(part) && part > SLOTS_MAX);
                assert_eq!(part_number(part), Some(PartNumber { slot, unit }));
                assert_eq!((whole_slot(part), part_of(slot, unit)), (slot, part));
                assert_eq!(places.header(part), first + u64::from(unit) * HEADER_BYTES);
                assert_eq!(places.data(part), first + 512 * (1 + u64::from(unit)));
                let rest = (UNITS - unit) * UNIT_LINES;
                assert_eq!(lines_max(part), rest.min(48), "unit {unit}");
            }
        }
        let units = [1, 8, 9, 16, 31, 48, 49, 64].map(units_of);
        assert_eq!(units, [1, 1, 2, 2, 4, PART_UNITS_MAX, 7, 8]);
    }

    proptest! {
        #[test]
        fn headers_survive_the_medium(header in headers(), salt: u64, slot in 0..PART_FLAG) {
            let bytes = header.encode(salt, slot);
            prop_assert_eq!(SlotHeader::decode(&bytes, salt, slot), Decoded::Header(header));
        }

        #[test]
        fn a_header_holds_for_one_slot_of_one_pool(
            header in headers(), salt: u64, slot in 0..PART_FLAG,
        ) {
            let bytes = header.encode(salt, slot);
            prop_assert_eq!(SlotHeader::decode(&bytes, salt ^ 1, slot), Decoded::Bad);
            prop_assert_eq!(SlotHeader::decode(&bytes, salt, slot ^ 1), Decoded::Bad);
        }

        #[test]
        fn a_changed_bit_is_found(header in headers(), salt: u64, bit in 0_usize..448) {
            let mut bytes = header.encode(salt, 3);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(SlotHeader::decode(&bytes, salt, 3), Decoded::Header(header));
        }

        #[test]
        fn any_bytes_are_decoded(bytes: [u8; 32], more: [u8; 32], salt: u64, slot: u32) {
            let mut all = [0; 64];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&more);
            SlotHeader::decode(&all, salt, slot);
        }

        /// Any mixture of the words of two headers of one slot is one of the two, free, or bad.
        #[test]
        fn a_torn_header_is_never_a_third_one(
            old in headers(), new in headers(), salt: u64, words: u8, void: bool,
        ) {
            let (mut torn, bytes) = (old.encode(salt, 9), new.encode(salt, 9));
            if void {
                torn[..8].fill(0);
            }
            for word in (0..8).filter(|word| words & 1 << word != 0) {
                torn[word * 8..][..8].copy_from_slice(&bytes[word * 8..][..8]);
            }
            match SlotHeader::decode(&torn, salt, 9) {
                Decoded::Header(found) => prop_assert!(found == new || !void && found == old),
                Decoded::Free { .. } => prop_assert!(void && words & 1 == 0),
                Decoded::Bad => {}
                Decoded::Split => prop_assert!(false, "neither was split"),
            }
        }

        /// Any mixture of the words of a header and of the header that splits its slot is one of
        /// the two, free, or bad, and is not mistaken for the latter with a changed bit.
        #[test]
        fn a_torn_header_that_splits_a_slot_is_that_or_none(
            old in headers(), salt: u64, words: u8, void: bool,
        ) {
            let (mut torn, bytes) = (old.encode(salt, 9), split_header(salt, 9));
            if void {
                torn[..8].fill(0);
            }
            for word in (0..8).filter(|word| words & 1 << word != 0) {
                torn[word * 8..][..8].copy_from_slice(&bytes[word * 8..][..8]);
            }
            match SlotHeader::decode(&torn, salt, 9) {
                Decoded::Header(found) => prop_assert!(!void && found == old),
                Decoded::Free { .. } => prop_assert!(void && words & 1 == 0),
                Decoded::Bad => prop_assert!(!is_changed_split(&torn, salt, 9)),
                Decoded::Split => prop_assert_eq!(&torn[..56], &bytes[..56]),
            }
        }

        #[test]
        fn one_changed_bit_of_a_header_that_splits_a_slot_is_found(
            salt: u64, slot in 0..SPLIT_SLOTS_MAX, bit in 0_usize..448,
        ) {
            let mut bytes = split_header(salt, slot);
            prop_assert_eq!(SlotHeader::decode(&bytes, salt, slot), Decoded::Split);
            prop_assert_eq!(SlotHeader::decode(&bytes, salt, slot ^ 1), Decoded::Bad);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(SlotHeader::decode(&bytes, salt, slot), Decoded::Bad);
            prop_assert!(is_changed_split(&bytes, salt, slot));
        }

        /// A part may only hold a record that fits.
        #[test]
        fn headers_of_parts_name_as_many_lines_as_there_are(
            header in headers(), salt: u64, slot in 0..SPLIT_SLOTS_MAX,
        ) {
            for part in parts_of(slot) {
                let found = SlotHeader::decode(&header.encode(salt, part), salt, part);
                let fits = header.lines.count_ones() <= lines_max(part);
                prop_assert_eq!(found == Decoded::Header(header), fits);
                let bytes = split_header(salt, part);
                prop_assert_eq!(SlotHeader::decode(&bytes, salt, part), Decoded::Bad);
            }
        }

        #[test]
        fn a_verdict_is_about_one_version(header in headers(), salt: u64) {
            let mut bytes = SlotHeader { dirty: true, ..header }.encode(salt, 5);
            for (version, dirty) in [(header.version ^ 1, true), (header.version, false)] {
                let verdict = clean_verdict(salt, 5, version);
                bytes[56..].copy_from_slice(&verdict.to_le_bytes());
                let found = SlotHeader::decode(&bytes, salt, 5);
                prop_assert_eq!(found, Decoded::Header(SlotHeader { dirty, ..header }));
            }
        }

        /// When a pool changes its size, the slots that it keeps stay at their offsets.
        #[test]
        fn slots_stay_where_they_are(bytes in 0_u64..200 << 20, later_bytes in 0_u64..300 << 20) {
            let (made, base) = (Places::fitting(8192, bytes), 8192);
            let chunk_slots = made.chunk_slots();
            prop_assert_eq!(Places::within(base, bytes, chunk_slots), made);
            let later = Places::within(base, later_bytes, chunk_slots);
            let mut end = base;
            for (first, count) in later.header_runs(0, later.slots()) {
                prop_assert!(count > 0 && u64::from(count) <= HEADERS_A_PAGE);
                if first < made.slots() {
                    prop_assert_eq!(later.header(first), made.header(first));
                    prop_assert_eq!(later.data(first), made.data(first));
                }
                let last = first + count - 1;
                let run_bytes = later.header(last) - later.header(first);
                prop_assert_eq!(run_bytes, u64::from(count - 1) * HEADER_BYTES);
                prop_assert_eq!(later.data(last) - later.data(first), run_bytes * 64);
                prop_assert!(later.header(last) + HEADER_BYTES <= later.data(first));
                // Data of a run lies behind the data of the run before.
                prop_assert!(later.data(first) >= end);
                end = later.data(last) + PAGE_BYTES;
            }
            prop_assert!(end <= base + later_bytes || later.slots() == 0);
        }

        #[test]
        fn slots_lie_side_by_side(bytes in 0_u64..200 << 20) {
            let places = Places::fitting(8192, bytes);
            for slot in [0, 1, CHUNK_SLOTS - 1, CHUNK_SLOTS, places.slots().saturating_sub(1)] {
                if slot < places.slots() {
                    prop_assert!(places.header(slot) + HEADER_BYTES <= places.data(slot));
                    prop_assert!(places.data(slot) + PAGE_BYTES <= 8192 + bytes);
                }
            }
            if places.slots() > CHUNK_SLOTS {
                let next_chunk = 8192 + CHUNK_BYTES;
                prop_assert_eq!(places.data(CHUNK_SLOTS - 1) + PAGE_BYTES, next_chunk);
            }
        }
    }

    /// Returns the commit words after the commit of `group`.
    fn words_at(salt: u64, group: u64) -> [[u64; 2]; 2] {
        let mut words = [[0; 2]; 2];
        for group in group.saturating_sub(1)..=group {
            words[parity(group)] = commit_word(salt, group);
        }
        words
    }

    #[test]
    fn a_commit_that_is_cut_off_is_the_group_before_or_that_group() {
        for group in 0..6 {
            let (old, new) = (words_at(7, group), words_at(7, group + 1));
            for halves in 0..4 {
                let mut cut = old;
                let place = usize::from(group.is_multiple_of(2));
                (0..2).filter(|half| halves & 1 << half != 0).for_each(|half| {
                    cut[place][half] = new[place][half];
                });
                let expected = if halves == 3 { group + 1 } else { group };
                assert_eq!(committed_group(7, cut), Some(expected), "{group} {halves}");
            }
        }
    }

    #[test]
    fn a_damaged_commit_word_is_told_from_one_that_is_cut_off() {
        for (group, place, half, bit) in
            (0..6).flat_map(|group| (0..256).map(move |it| (group, it / 128, it / 64 % 2, it % 64)))
        {
            let mut words = words_at(7, group);
            words[place][half] ^= 1 << bit;
            let found = committed_group(7, words);
            // A flip may turn the number into that of the commit before or after in this word.
            let is_number_of_another =
                half == 0 && words[place][0].abs_diff(words_at(7, group)[place][0]) <= 2;
            assert!(found.is_none() || is_number_of_another, "{group} {words:x?}");
        }
        assert_eq!(committed_group(8, words_at(7, 4)), None, "those of another pool");
    }

    #[test]
    fn zeroes_are_a_free_slot_that_was_never_used() {
        assert_eq!(SlotHeader::decode(&[0; 64], 7, 0), Decoded::Free { used: false });
        let mut void = [3; 64];
        void[..8].fill(0);
        assert_eq!(SlotHeader::decode(&void, 7, 0), Decoded::Free { used: true });
    }
}
