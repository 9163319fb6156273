//! The format of the superblock on the medium: constants, structure, size and offsets.
//!
//! docs/formats.md describes it. All numbers are little-endian. Nothing here touches memory.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of a superblock.
pub(super) const MAGIC: [u8; 8] = *b"TIDEGATE";
/// Version of the superblock's layout.
pub(super) const VERSION: u32 = 1;
/// Size of a superblock in bytes. Parts of a pool are multiples of this.
pub(super) const PAGE_BYTES: u64 = 4096;
/// Lowest offset of the data: behind the first copy, and the page where a BTT 1.1 has its first
/// info block. That page holds zeroes, so that users' data never makes a pool look like a BTT.
pub(super) const DATA_OFFSET_MIN: u64 = 2 * PAGE_BYTES;
/// Maximum length of a backing's name in a superblock, in bytes.
pub(super) const BACKING_NAME_BYTES_MAX: usize = 512;

/// [`BackingState::flags`](BackingStateBytes): the other fields are valid.
pub(super) const STATE_IS_KNOWN: u32 = 1;
/// [`BackingState::flags`](BackingStateBytes): the pool writes to the backing.
pub(super) const STATE_IS_WRITING: u32 = 2;

/// The state of a backing as it lies on the medium; zeroes if it is unknown.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct BackingStateBytes {
    pub(super) flags: U32,
    pub(super) block_bytes: U32,
    pub(super) said: U64,
    pub(super) size_bytes: U64,
    pub(super) noted_ns: U64,
    pub(super) modified_ns: U64,
    pub(super) areas: U64,
    pub(super) boot: [u8; 16],
    pub(super) disk_sequence: U64,
    pub(super) changed_sectors: U64,
    pub(super) mark: U64,
    pub(super) mark_before: U64,
    pub(super) said_before: U64,
}

/// A superblock as it lies on the medium.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct SuperblockBytes {
    pub(super) magic: [u8; 8],
    pub(super) version: U32,
    pub(super) engine: U32,
    pub(super) compatible: U64,
    pub(super) read_only_compatible: U64,
    pub(super) incompatible: U64,
    pub(super) uuid: [u8; 16],
    pub(super) sequence: U64,
    pub(super) pool_bytes: U64,
    pub(super) data_offset: U64,
    pub(super) data_bytes: U64,
    pub(super) block_bytes: U32,
    pub(super) backing_name_bytes: U32,
    pub(super) backing_identity: U64,
    pub(super) backing_name: [u8; BACKING_NAME_BYTES_MAX],
    pub(super) state: BackingStateBytes,
    pub(super) reserved: [u8; 3368],
    pub(super) checksum: U64,
}

const _: () = {
    assert!(size_of::<SuperblockBytes>() as u64 == PAGE_BYTES);
    assert!(offset_of!(SuperblockBytes, magic) == 0);
    assert!(offset_of!(SuperblockBytes, version) == 8);
    assert!(offset_of!(SuperblockBytes, engine) == 12);
    assert!(offset_of!(SuperblockBytes, compatible) == 16);
    assert!(offset_of!(SuperblockBytes, read_only_compatible) == 24);
    assert!(offset_of!(SuperblockBytes, incompatible) == 32);
    assert!(offset_of!(SuperblockBytes, uuid) == 40);
    assert!(offset_of!(SuperblockBytes, sequence) == 56);
    assert!(offset_of!(SuperblockBytes, pool_bytes) == 64);
    assert!(offset_of!(SuperblockBytes, data_offset) == 72);
    assert!(offset_of!(SuperblockBytes, data_bytes) == 80);
    assert!(offset_of!(SuperblockBytes, block_bytes) == 88);
    assert!(offset_of!(SuperblockBytes, backing_name_bytes) == 92);
    assert!(offset_of!(SuperblockBytes, backing_identity) == 96);
    assert!(offset_of!(SuperblockBytes, backing_name) == 104);
    assert!(offset_of!(SuperblockBytes, state) == 616);
    assert!(offset_of!(BackingStateBytes, said) == 8);
    assert!(offset_of!(BackingStateBytes, boot) == 48);
    assert!(offset_of!(BackingStateBytes, mark) == 80);
    assert!(offset_of!(BackingStateBytes, said_before) == 96);
    assert!(size_of::<BackingStateBytes>() == 104);
    assert!(offset_of!(SuperblockBytes, reserved) == 720);
    assert!(offset_of!(SuperblockBytes, checksum) == 4088);
};

impl SuperblockBytes {
    /// Returns the CRC-64/NVME over the page, with the checksum field taken as zero.
    ///
    /// Not CRC-32C, which the payloads of log records use: a superblock is read once per open, so
    /// speed does not matter, and everything else depends on it, so 1 in 2^64 for wild bytes is
    /// worth its cost. `NVMe` publishes check values that other programs can test their code with.
    pub(super) fn expected_checksum(&self) -> u64 {
        let zeroed = Self { checksum: U64::ZERO, ..*self };
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, zeroed.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    /// The check value that the `NVMe` specification and the CRC catalogue give.
    #[test]
    fn the_checksum_is_the_published_one() {
        let check = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, b"123456789");
        assert_eq!(check, 0xAE8B_1486_0A79_9888);
    }
}
