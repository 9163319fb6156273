//! The interface of virtio block devices: structs and numbers of `linux/virtio_blk.h` and of the
//! virtio specification. All numbers are little-endian.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{QUEUES_MAX, SEGMENT_BYTES_MAX, SEGMENTS_MAX};
use crate::request::{Rules, SECTOR_BYTES};

/// Bytes of the answer to a question for the device's serial number.
pub(super) const SERIAL_BYTES: usize = 20;

/// Most bytes of a discard or of zeroes: a stop waits for those in progress.
const RANGE_BYTES_MAX: u64 = 64 << 20;

/// Features of the device, and of its queues.
pub(super) mod feature {
    pub(in crate::vhost_user) const SEGMENT_BYTES: u64 = 1 << 1;
    pub(in crate::vhost_user) const SEGMENTS: u64 = 1 << 2;
    pub(in crate::vhost_user) const READ_ONLY: u64 = 1 << 5;
    pub(in crate::vhost_user) const BLOCK_BYTES: u64 = 1 << 6;
    pub(in crate::vhost_user) const FLUSH: u64 = 1 << 9;
    pub(in crate::vhost_user) const TOPOLOGY: u64 = 1 << 10;
    pub(in crate::vhost_user) const QUEUES: u64 = 1 << 12;
    pub(in crate::vhost_user) const DISCARD: u64 = 1 << 13;
    pub(in crate::vhost_user) const WRITE_ZEROES: u64 = 1 << 14;
    /// A descriptor may refer to a table of descriptors.
    pub(in crate::vhost_user) const INDIRECT: u64 = 1 << 28;
    /// Each side names the index whose entry it wants to be notified of.
    pub(in crate::vhost_user) const EVENT_INDEX: u64 = 1 << 29;
    /// The protocol has features of its own.
    pub(in crate::vhost_user) const PROTOCOL: u64 = 1 << 30;
    pub(in crate::vhost_user) const VERSION_1: u64 = 1 << 32;
}

/// The types of requests.
pub(super) mod kind {
    pub(in crate::vhost_user) const READ: u32 = 0;
    pub(in crate::vhost_user) const WRITE: u32 = 1;
    pub(in crate::vhost_user) const FLUSH: u32 = 4;
    pub(in crate::vhost_user) const SERIAL: u32 = 8;
    pub(in crate::vhost_user) const DISCARD: u32 = 11;
    pub(in crate::vhost_user) const WRITE_ZEROES: u32 = 13;
}

/// The last byte of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Done = 0,
    Failed = 1,
    Unsupported = 2,
}

/// The front of a request.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Header {
    pub(super) kind: U32,
    pub(super) reserved: U32,
    pub(super) first_sector: U64,
}

/// The data of a discard, or of a request for zeroes.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Range {
    pub(super) first_sector: U64,
    pub(super) sectors: U32,
    pub(super) flags: U32,
}

impl Range {
    /// The flag of zeroes whose space may be given back.
    pub(super) const UNMAP: u32 = 1;
}

/// The configuration that a guest reads.
#[derive(Debug, Clone, Copy, FromZeros, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Configuration {
    sectors: U64,
    segment_bytes_max: U32,
    segments_max: U32,
    geometry: [u8; 4],
    block_bytes: U32,
    physical_block_exponent: u8,
    alignment_offset: u8,
    least_blocks: U16,
    best_blocks: U32,
    write_back: u8,
    unused: u8,
    queues: U16,
    discard_sectors_max: U32,
    discard_segments_max: U32,
    discard_alignment_sectors: U32,
    zeroes_sectors_max: U32,
    zeroes_segments_max: U32,
    zeroes_may_unmap: u8,
    unused_end: [u8; 3],
}

const _: () = assert!(size_of::<Header>() == 16 && size_of::<Range>() == 16);
const _: () = assert!(size_of::<Configuration>() == 60);

impl Configuration {
    /// Returns the configuration of a device with these `rules`.
    pub(super) fn new(rules: &Rules) -> Self {
        let geometry = &rules.geometry;
        let narrow = |bytes: u64, unit: u64| u32::try_from(bytes / unit).unwrap_or(u32::MAX);
        let block_bytes = u64::from(geometry.block_bytes);
        let range_sectors = U32::new(narrow(RANGE_BYTES_MAX, SECTOR_BYTES));
        Self {
            sectors: U64::new(geometry.size_bytes() / SECTOR_BYTES),
            segment_bytes_max: U32::new(SEGMENT_BYTES_MAX),
            segments_max: U32::new(SEGMENTS_MAX),
            block_bytes: U32::new(geometry.block_bytes),
            least_blocks: U16::new(1),
            best_blocks: U32::new(narrow(geometry.preferred_bytes.into(), block_bytes)),
            queues: U16::new(QUEUES_MAX),
            discard_sectors_max: range_sectors,
            discard_segments_max: U32::new(1),
            discard_alignment_sectors: U32::new(narrow(block_bytes, SECTOR_BYTES)),
            zeroes_sectors_max: range_sectors,
            zeroes_segments_max: U32::new(1),
            zeroes_may_unmap: 1,
            ..Self::new_zeroed()
        }
    }

    /// Returns `size` bytes at `offset`, zeroes behind the configuration's end.
    pub(super) fn part(&self, offset: u32, size: u32) -> Vec<u8> {
        let rest = self.as_bytes().iter().copied().chain(std::iter::repeat(0));
        rest.skip(offset as usize).take(size as usize).collect()
    }
}

/// Returns the features of a device with these `rules`.
pub(super) fn features(rules: &Rules) -> u64 {
    let is_read_only = rules.read_only || rules.geometry.read_only;
    let changes = feature::DISCARD | feature::WRITE_ZEROES;
    feature::SEGMENT_BYTES
        | feature::SEGMENTS
        | feature::BLOCK_BYTES
        | feature::TOPOLOGY
        | feature::QUEUES
        | feature::INDIRECT
        | feature::EVENT_INDEX
        | feature::PROTOCOL
        | feature::VERSION_1
        | if is_read_only { feature::READ_ONLY } else { changes }
        | if rules.geometry.volatile_cache { feature::FLUSH } else { 0 }
}

/// Returns the features that a guest may have, since an earlier server of the disk may have offered
/// more: flushes do no harm, and changes of a read-only disk fail.
pub(super) fn accepted(rules: &Rules) -> u64 {
    features(rules) | feature::FLUSH | feature::DISCARD | feature::WRITE_ZEROES | feature::READ_ONLY
}

#[cfg(test)]
mod tests {
    use tidegate::device::BlockDevice;
    use tidegate::device::memory::MemoryDevice;

    use super::*;

    #[test]
    fn a_guest_reads_the_geometry_where_it_looks_for_it() {
        let geometry = MemoryDevice::new(4096, 16).expect("a device").geometry();
        let rules = Rules { geometry, read_only: false, request_bytes_max: 1 << 20 };
        let configuration = Configuration::new(&rules);
        assert_eq!(configuration.part(0, 8), 128_u64.to_le_bytes());
        assert_eq!(configuration.part(20, 4), 4096_u32.to_le_bytes());
        assert_eq!(configuration.part(44, 4), 8_u32.to_le_bytes());
        assert_eq!(configuration.part(56, 6), [1, 0, 0, 0, 0, 0]);
        assert_eq!(configuration.part(u32::MAX, 2), [0, 0]);
        let read_only = Rules { read_only: true, ..rules };
        assert_eq!(features(&rules) & feature::READ_ONLY, 0);
        assert_eq!(features(&read_only) & feature::DISCARD, 0);
    }
}
