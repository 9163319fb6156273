//! The BTT's bytes on the medium: constants, structures, their sizes and offsets, and the sizing
//! rules.
//!
//! The format is the Linux kernel's (versions 1.1 and 2.0); docs/formats.md describes it. All
//! numbers are little-endian. Nothing in this file touches memory.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of an info block.
pub(super) const SIGNATURE: [u8; 16] = *b"BTT_ARENA_INFO\0\0";
/// Size of an info block in bytes; the parts of an arena are rounded up to this size.
pub(super) const PAGE_BYTES: u64 = 4096;
/// Smallest arena that the kernel makes, in bytes.
pub(super) const ARENA_BYTES_MIN: u64 = 16 << 20;
/// Largest arena, in bytes.
pub(super) const ARENA_BYTES_MAX: u64 = 512 << 30;
/// Lanes (free blocks) of an arena that the kernel makes.
pub(super) const LANES: u32 = 256;
/// Most blocks of an arena: a map entry has 30 bits for the block.
pub(super) const BLOCKS_MAX: u64 = 1 << 30;
/// Size of a lane's flog group in bytes: one cache line.
pub(super) const FLOG_GROUP_BYTES: u64 = 64;
/// Size of a flog slot in bytes.
pub(super) const FLOG_SLOT_BYTES: u64 = 16;
/// Size of a map entry in bytes.
pub(super) const MAP_ENTRY_BYTES: u64 = 4;
/// Internal blocks are rounded up to a multiple of this many bytes.
const BLOCK_ALIGN_BYTES: u32 = 64;
/// Bit 0 of the flags: the arena had an error that makes it read-only.
pub(super) const FLAG_ERROR: u32 = 1;

/// External lba sizes of the format in bytes: data, and data with 8, 16, 64 or 128 bytes of
/// metadata.
pub const LBA_SIZES: [u32; 7] = [512, 520, 528, 4096, 4104, 4160, 4224];

/// Smallest block on the medium in a pool of libpmemblk, in bytes.
const LIBPMEMBLK_BLOCK_MIN_BYTES: u32 = 512;
/// Blocks on the medium in a pool of libpmemblk are rounded up to a multiple of this many bytes.
const LIBPMEMBLK_ALIGN_BYTES: u32 = 256;

/// Version of the format; it decides where the first arena starts, and which blocks there are.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, strum::Display, strum::EnumString,
)]
pub enum Version {
    /// 1.1: the first arena starts 4 KiB into the namespace.
    #[serde(rename = "1.1")]
    #[strum(serialize = "1.1")]
    V1_1,
    /// 2.0: the first arena starts at 0.
    #[serde(rename = "2.0")]
    #[strum(serialize = "2.0")]
    V2_0,
    /// 1.1 in a pool of libpmemblk (PMDK 1.x): the first arena starts 8 KiB into the file, behind
    /// the pool's header. A block has any size, and no metadata.
    #[serde(rename = "libpmemblk")]
    #[strum(serialize = "libpmemblk")]
    Libpmemblk,
}

impl Version {
    /// Returns the offset of the first arena, in bytes.
    pub(super) fn base(self) -> u64 {
        match self {
            Self::V1_1 => PAGE_BYTES,
            Self::V2_0 => 0,
            Self::Libpmemblk => 2 * PAGE_BYTES,
        }
    }

    pub(super) fn numbers(self) -> (u16, u16) {
        match self {
            Self::V1_1 | Self::Libpmemblk => (1, 1),
            Self::V2_0 => (2, 0),
        }
    }

    /// Returns the bytes of data in an lba of `lba_bytes`; the rest is metadata.
    pub(super) fn data_bytes(self, lba_bytes: u32) -> u32 {
        match self {
            Self::Libpmemblk => lba_bytes,
            _ if lba_bytes >= 4096 => 4096,
            _ => 512,
        }
    }

    /// Returns the size of the block on the medium for an lba of `lba_bytes`. Returns `None` if the
    /// format has no such lbas.
    pub(super) fn stored_bytes(self, lba_bytes: u32) -> Option<u32> {
        match self {
            Self::Libpmemblk if lba_bytes > 0 => lba_bytes
                .max(LIBPMEMBLK_BLOCK_MIN_BYTES)
                .checked_next_multiple_of(LIBPMEMBLK_ALIGN_BYTES),
            Self::Libpmemblk => None,
            _ => LBA_SIZES
                .contains(&lba_bytes)
                .then(|| lba_bytes.next_multiple_of(BLOCK_ALIGN_BYTES)),
        }
    }

    /// Returns the lba sizes that the format has, in words.
    pub(super) fn lba_sizes(self) -> String {
        match self {
            Self::Libpmemblk => "1 or more".into(),
            _ => format!("one of {LBA_SIZES:?}"),
        }
    }

    /// Returns whether flog entries keep the flag bits of map entries. Recovery by libpmemblk
    /// compares them.
    pub(super) fn flog_has_flags(self) -> bool {
        self == Self::Libpmemblk
    }

    /// Returns the map entry that the flog holds for block `block` of a lane without a write.
    pub(super) fn unused_map(self, block: u32) -> u32 {
        if self.flog_has_flags() { MapEntry::zero(block).0 } else { block }
    }

    /// Returns the map entry that the flog holds for a written block `block`.
    pub(super) fn written_map(self, block: u32) -> u32 {
        if self.flog_has_flags() { MapEntry::normal(block).0 } else { block }
    }

    /// Returns what the flog holds for `entry`, which a write replaces, and which points at
    /// `block`. The kernel strips the flags, except of a block in error.
    pub(super) fn replaced_map(self, entry: MapEntry, block: u32) -> u32 {
        match entry.state() {
            MapState::Unwritten => self.written_map(block),
            _ if self.flog_has_flags() => entry.0,
            MapState::Error => block | MapEntry::ERROR,
            MapState::Normal | MapState::Zero => block,
        }
    }
}

/// The two slots of a flog group's four that hold entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize)]
pub enum FlogSlots {
    /// Slots 0 and 1: kernels since 4.15.
    #[default]
    #[serde(rename = "0,1")]
    ZeroOne,
    /// Slots 0 and 2: older kernels.
    #[serde(rename = "0,2")]
    ZeroTwo,
}

impl FlogSlots {
    /// Returns the offset of the first (`which` = 0) or second (1) slot in its group, in bytes.
    pub(super) fn offset(self, which: usize) -> u64 {
        match (self, which) {
            (_, 0) => 0,
            (Self::ZeroOne, _) => FLOG_SLOT_BYTES,
            (Self::ZeroTwo, _) => 2 * FLOG_SLOT_BYTES,
        }
    }
}

/// An info block. It has two copies: at the arena's start and in the arena's last 4 KiB.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub(super) struct Info {
    pub(super) signature: [u8; 16],
    pub(super) uuid: [u8; 16],
    pub(super) parent_uuid: [u8; 16],
    pub(super) flags: U32,
    pub(super) major: U16,
    pub(super) minor: U16,
    pub(super) external_lbasize: U32,
    pub(super) external_nlba: U32,
    pub(super) internal_lbasize: U32,
    pub(super) internal_nlba: U32,
    pub(super) nfree: U32,
    pub(super) infosize: U32,
    pub(super) nextoff: U64,
    pub(super) dataoff: U64,
    pub(super) mapoff: U64,
    pub(super) logoff: U64,
    pub(super) info2off: U64,
    pub(super) padding: [u8; 3968],
    pub(super) checksum: U64,
}

const _: () = {
    assert!(size_of::<Info>() == 4096);
    assert!(offset_of!(Info, flags) == 48);
    assert!(offset_of!(Info, external_lbasize) == 56);
    assert!(offset_of!(Info, nextoff) == 80);
    assert!(offset_of!(Info, info2off) == 112);
    assert!(offset_of!(Info, checksum) == 4088);
    assert!(size_of::<FlogSlot>() == 16);
};

impl Info {
    /// Computes the Fletcher-64 checksum of the block, with its checksum field as zero.
    pub(super) fn fletcher64(&self) -> u64 {
        fletcher64(Self { checksum: U64::ZERO, ..*self }.as_bytes())
    }

    /// Checks the info block of an arena with `space_bytes` bytes from its start to the region's
    /// end. The error names the first contradiction.
    pub(super) fn validate(&self, version: Version, space_bytes: u64) -> Result<(), String> {
        if self.signature != SIGNATURE {
            return Err("its signature is missing".into());
        }
        if self.checksum.get() != self.fletcher64() {
            let (found, expected) = (self.checksum.get(), self.fletcher64());
            return Err(format!("its checksum is {found:#018x}, expected {expected:#018x}"));
        }
        let (major, minor) = (self.major.get(), self.minor.get());
        if (major, minor) != version.numbers() {
            return Err(format!("its version is {major}.{minor}, expected {version}"));
        }
        self.validate_sizes(version)?;
        self.validate_offsets(space_bytes)
    }

    /// Returns the end of the arena, counted from its start, if the info block is whole.
    pub(super) fn end_bytes(&self, version: Version) -> Option<u64> {
        let end = self.info2off.get().checked_add(PAGE_BYTES)?;
        // Far below the largest number, so that sums with the end do not overflow.
        (end <= u64::MAX / 2 && self.validate(version, u64::MAX / 2).is_ok()).then_some(end)
    }

    fn validate_sizes(&self, version: Version) -> Result<(), String> {
        let lba_bytes = self.external_lbasize.get();
        let Some(least_bytes) = version.stored_bytes(lba_bytes) else {
            let expected = version.lba_sizes();
            return Err(format!("its lba size is {lba_bytes} bytes, expected {expected}"));
        };
        let block_bytes = self.internal_lbasize.get();
        if block_bytes < lba_bytes
            || !block_bytes.is_multiple_of(BLOCK_ALIGN_BYTES)
            || block_bytes > least_bytes.max(1 << 16)
        {
            return Err(format!(
                "its internal block size of {block_bytes} bytes does not suit lbas of {lba_bytes} bytes"
            ));
        }
        let (lbas, blocks, lanes) =
            (self.external_nlba.get(), self.internal_nlba.get(), self.nfree.get());
        if lanes == 0 || lanes > LANES {
            return Err(format!("it has {lanes} lanes, expected 1 to {LANES}"));
        }
        if lbas == 0
            || u64::from(blocks) > BLOCKS_MAX
            || u64::from(lbas) + u64::from(lanes) != u64::from(blocks)
        {
            return Err(format!(
                "its {lbas} lbas and {lanes} lanes do not add up to its {blocks} blocks"
            ));
        }
        match self.infosize.get() {
            4096 => Ok(()),
            other => Err(format!("its info size is {other} bytes, expected 4096")),
        }
    }

    fn validate_offsets(&self, space_bytes: u64) -> Result<(), String> {
        let data_bytes =
            u64::from(self.internal_nlba.get()) * u64::from(self.internal_lbasize.get());
        let map_bytes = u64::from(self.external_nlba.get()) * MAP_ENTRY_BYTES;
        let flog_bytes = u64::from(self.nfree.get()) * FLOG_GROUP_BYTES;
        let parts = [
            ("info block", 0, PAGE_BYTES),
            ("data", self.dataoff.get(), data_bytes),
            ("map", self.mapoff.get(), map_bytes),
            ("flog", self.logoff.get(), flog_bytes),
            ("second info block", self.info2off.get(), PAGE_BYTES),
        ];
        let mut end = 0;
        for (name, offset, len) in parts {
            if offset < end || !offset.is_multiple_of(64) {
                return Err(format!(
                    "its {name} at offset {offset} overlaps what is before it or is unaligned"
                ));
            }
            end = offset.saturating_add(len);
        }
        if end > space_bytes {
            return Err(format!(
                "it needs {end} bytes, but only {space_bytes} are there: the pool is truncated"
            ));
        }
        let next = self.nextoff.get();
        if next != 0 && (next < end || !next.is_multiple_of(PAGE_BYTES) || next >= space_bytes) {
            return Err(format!(
                "its next arena at offset {next} does not follow it in {space_bytes} bytes"
            ));
        }
        Ok(())
    }
}

/// Computes the Fletcher-64 checksum of whole words of 4 bytes.
pub(super) fn fletcher64(bytes: &[u8]) -> u64 {
    let (mut lo, mut hi) = (0_u32, 0_u32);
    for word in bytes.chunks_exact(4) {
        let word = word.iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte));
        lo = lo.wrapping_add(word);
        hi = hi.wrapping_add(lo);
    }
    u64::from(hi) << 32 | u64::from(lo)
}

/// One flog slot. It is written as two halves of 8 bytes, the half with `seq` last.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub(super) struct FlogSlot {
    pub(super) lba: U32,
    pub(super) old_map: U32,
    pub(super) new_map: U32,
    pub(super) seq: U32,
}

impl FlogSlot {
    pub(super) fn new(lba: u32, old_map: u32, new_map: u32, seq: u32) -> Self {
        Self { lba: lba.into(), old_map: old_map.into(), new_map: new_map.into(), seq: seq.into() }
    }

    /// Returns the first half: lba and old map entry.
    pub(super) fn first_half(&self) -> u64 {
        u64::from(self.lba.get()) | u64::from(self.old_map.get()) << 32
    }

    /// Returns the second half: new map entry and the sequence number that makes the slot valid.
    pub(super) fn second_half(&self) -> u64 {
        u64::from(self.new_map.get()) | u64::from(self.seq.get()) << 32
    }

    /// Returns whether the slot is unused, that is, all zero.
    pub(super) fn is_padding(&self) -> bool {
        *self == Self::default()
    }
}

/// Returns the sequence number after `seq`: 1, 2, 3, 1, ...
pub(super) fn next_seq(seq: u32) -> u32 {
    if seq >= 3 { 1 } else { seq + 1 }
}

/// A map entry: 30 bits of block number and two flag bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MapEntry(pub(super) u32);

/// The state of an lba in its map entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MapState {
    /// Never written: the block has the lba's number, and reads give zeroes.
    Unwritten,
    /// Written.
    Normal,
    /// Discarded: reads give zeroes.
    Zero,
    /// Lost to a media error: reads fail.
    Error,
}

impl MapEntry {
    const ZERO: u32 = 1 << 31;
    pub(super) const ERROR: u32 = 1 << 30;
    const BLOCK: u32 = !(Self::ZERO | Self::ERROR);

    pub(super) fn normal(block: u32) -> Self {
        Self(block & Self::BLOCK | Self::ZERO | Self::ERROR)
    }

    pub(super) fn zero(block: u32) -> Self {
        Self(block & Self::BLOCK | Self::ZERO)
    }

    pub(super) fn error(block: u32) -> Self {
        Self(block & Self::BLOCK | Self::ERROR)
    }

    /// Returns the entry with its flags and another block.
    pub(super) fn with_block(self, block: u32) -> Self {
        Self(self.0 & !Self::BLOCK | block)
    }

    pub(super) fn state(self) -> MapState {
        match (self.0 & Self::ZERO != 0, self.0 & Self::ERROR != 0) {
            (false, false) => MapState::Unwritten,
            (true, true) => MapState::Normal,
            (true, false) => MapState::Zero,
            (false, true) => MapState::Error,
        }
    }

    /// Returns the block of `lba`, whose entry this is.
    pub(super) fn block(self, lba: u32) -> u32 {
        match self.state() {
            MapState::Unwritten => lba,
            _ => strip_flags(self.0),
        }
    }
}

/// Strips the flag bits that libpmemblk keeps in flog entries from a block number.
pub(super) fn strip_flags(entry: u32) -> u32 {
    entry & MapEntry::BLOCK
}

/// The parts of one new arena and its number of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ArenaPlan {
    pub(super) size_bytes: u64,
    pub(super) block_bytes: u32,
    pub(super) blocks: u32,
    pub(super) lbas: u32,
    pub(super) data_offset: u64,
    pub(super) map_offset: u64,
    pub(super) flog_offset: u64,
    pub(super) info2_offset: u64,
}

impl ArenaPlan {
    /// Splits `size_bytes` as the kernel and libpmemblk do, for blocks of `block_bytes` on the
    /// medium and `lanes` lanes. Returns `None` if not even one lba fits.
    pub(super) fn new(size_bytes: u64, block_bytes: u32, lanes: u32) -> Option<Self> {
        let flog_bytes = (u64::from(lanes) * FLOG_GROUP_BYTES).next_multiple_of(PAGE_BYTES);
        let usable = size_bytes - size_bytes % PAGE_BYTES;
        let available = usable.checked_sub(2 * PAGE_BYTES + flog_bytes)?;
        let blocks =
            available.checked_sub(PAGE_BYTES)? / (u64::from(block_bytes) + MAP_ENTRY_BYTES);
        let blocks = u32::try_from(blocks.min(BLOCKS_MAX)).ok()?;
        let lbas = blocks.checked_sub(lanes).filter(|&lbas| lbas > 0)?;
        let map_bytes = (u64::from(lbas) * MAP_ENTRY_BYTES).next_multiple_of(PAGE_BYTES);
        let map_offset = PAGE_BYTES + available - map_bytes;
        let flog_offset = map_offset + map_bytes;
        let info2_offset = flog_offset + flog_bytes;
        let data_offset = PAGE_BYTES;
        Some(Self {
            size_bytes,
            block_bytes,
            blocks,
            lbas,
            data_offset,
            map_offset,
            flog_offset,
            info2_offset,
        })
    }
}

/// Returns the sizes of the arenas that the kernel makes in `space_bytes`: 512 GiB each, the rest
/// for the last one. A rest below 16 MiB stays unused.
pub(super) fn arena_sizes(space_bytes: u64, arena_bytes_min: u64) -> Vec<u64> {
    let arenas = 0..space_bytes.div_ceil(ARENA_BYTES_MAX);
    let sizes = arenas.map(|number| (space_bytes - number * ARENA_BYTES_MAX).min(ARENA_BYTES_MAX));
    sizes.filter(|&size_bytes| size_bytes >= arena_bytes_min).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizing_follows_the_kernel() {
        // 32 MiB minus the 4 KiB of version 1.1, lba size 4096, as a real kernel splits it.
        let plan = ArenaPlan::new((32 << 20) - 4096, 4096, 256).unwrap();
        assert_eq!(plan.blocks, ((32 << 20) - 4096 - 8192 - 16384 - 4096) / 4100);
        assert_eq!(plan.lbas, plan.blocks - 256);
        assert_eq!(plan.info2_offset + PAGE_BYTES, plan.size_bytes);
        assert!(plan.data_offset + u64::from(plan.blocks) * 4096 <= plan.map_offset);
    }

    #[test]
    fn sequence_numbers_cycle() {
        assert_eq!([next_seq(1), next_seq(2), next_seq(3)], [2, 3, 1]);
    }

    #[test]
    fn map_states_round_trip() {
        assert_eq!(MapEntry(0).state(), MapState::Unwritten);
        assert_eq!(MapEntry(0).block(7), 7);
        for (entry, state) in [
            (MapEntry::normal(5), MapState::Normal),
            (MapEntry::zero(5), MapState::Zero),
            (MapEntry::error(5), MapState::Error),
        ] {
            assert_eq!((entry.state(), entry.block(9)), (state, 5));
        }
    }

    #[test]
    fn arenas_split_at_512_gib_and_drop_a_small_rest() {
        assert_eq!(
            arena_sizes(ARENA_BYTES_MAX + ARENA_BYTES_MIN - 1, ARENA_BYTES_MIN),
            [ARENA_BYTES_MAX]
        );
        assert_eq!(
            arena_sizes(ARENA_BYTES_MAX + ARENA_BYTES_MIN, ARENA_BYTES_MIN),
            [ARENA_BYTES_MAX, ARENA_BYTES_MIN]
        );
        assert!(arena_sizes(ARENA_BYTES_MIN - 1, ARENA_BYTES_MIN).is_empty());
    }
}
