//! The parts of a backing that file systems and partition tables change with each use, and the
//! UUIDs there.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crc_fast::{CrcAlgorithm, Digest};

use crate::device::nbd::Part;
use crate::device::{BlockDevice, BlockDeviceExt, DeviceError};

/// Superblocks and tables at the start: all except the superblock of Btrfs.
const START_BYTES: usize = 8192;
/// Offset of the superblock of Btrfs.
const BTRFS: usize = 64 << 10;
/// Bytes of the superblock of Btrfs, and of the last area, which has the second header of a GPT.
const AREA_BYTES: usize = 4096;

/// The bytes of the areas.
pub(super) struct Areas {
    /// From the start to behind the superblock of Btrfs; zeroes where the backing is smaller.
    start: Vec<u8>,
    end: Vec<u8>,
}

/// The file system, table or volume on a backing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContentId {
    kind: &'static str,
    uuid: Vec<u8>,
}

/// A kind of content: its name, and the offsets of its signature and its UUID.
struct Kind {
    name: &'static str,
    signature: (usize, &'static [u8]),
    uuid: (usize, usize),
}

const fn kind(name: &'static str, signature: (usize, &'static [u8]), uuid: (usize, usize)) -> Kind {
    Kind { name, signature, uuid }
}

/// Partition tables come before the contents of a partition, and weak signatures last.
const KINDS: &[Kind] = &[
    kind("gpt", (512, b"EFI PART"), (568, 16)),
    kind("gpt", (4096, b"EFI PART"), (4152, 16)),
    kind("luks", (0, b"LUKS\xba\xbe"), (168, 40)),
    kind("lvm", (512, b"LABELONE"), (544, 32)),
    kind("lvm", (0, b"LABELONE"), (32, 32)),
    // The number of the member, not of the array.
    kind("md", (4096, b"\xfc\x4e\x2b\xa9"), (4264, 16)),
    kind("md", (0, b"\xfc\x4e\x2b\xa9"), (168, 16)),
    kind("bcache", (4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"), (4136, 16)),
    kind("xfs", (0, b"XFSB"), (32, 16)),
    kind("btrfs", (BTRFS + 64, b"_BHRfS_M"), (BTRFS + 32, 16)),
    kind("swap", (4086, b"SWAPSPACE2"), (1036, 16)),
    kind("f2fs", (1024, b"\x10\x20\xf5\xf2"), (1132, 16)),
    kind("ext", (1080, b"\x53\xef"), (1128, 16)),
    kind("ntfs", (3, b"NTFS    "), (72, 8)),
    kind("exfat", (3, b"EXFAT   "), (100, 4)),
    kind("fat32", (82, b"FAT32   "), (67, 4)),
    kind("fat", (54, b"FAT1"), (39, 4)),
    kind("mbr", (510, b"\x55\xaa"), (440, 4)),
];

impl Areas {
    /// Reads the areas of `file`, which has `size_bytes` bytes.
    pub(super) fn of_file(file: &File, size_bytes: u64) -> io::Result<Self> {
        Self::read(size_bytes, 1, |bytes, at| file.read_exact_at(bytes, at))
    }

    /// Reads the areas of `device`.
    pub(super) fn of_device(device: &dyn BlockDevice) -> Result<Self, DeviceError> {
        let geometry = device.geometry();
        let block_bytes = u64::from(geometry.block_bytes);
        Self::read(geometry.size_bytes(), block_bytes, |bytes, at| device.read(at, bytes))
    }

    /// Reads the areas by `read`, which fills bytes from an offset. All offsets and lengths are
    /// multiples of `block_bytes`, as `size_bytes` is.
    fn read<E>(
        size_bytes: u64,
        block_bytes: u64,
        read: impl Fn(&mut [u8], u64) -> Result<(), E>,
    ) -> Result<Self, E> {
        let bytes = |range: Range<u64>| {
            debug_assert!(range.start.is_multiple_of(block_bytes));
            let len = usize::try_from(range.end - range.start).unwrap_or_default();
            let mut bytes = vec![0; len];
            read(&mut bytes, range.start).map(|()| (range.start, bytes))
        };
        let parts = ranges(size_bytes).into_iter().map(bytes).collect::<Result<Vec<_>, E>>()?;
        Ok(Self::of_parts(&parts))
    }

    /// Makes the areas from the bytes of all [`ranges`], with their offsets. The last one is the
    /// end.
    fn of_parts(parts: &[Part]) -> Self {
        let mut start = vec![0; BTRFS + AREA_BYTES];
        let Some(((_, end), parts)) = parts.split_last() else {
            return Self { start, end: Vec::new() };
        };
        for (offset, bytes) in parts {
            let at = usize::try_from(*offset).unwrap_or(usize::MAX);
            if let Some(target) = start.get_mut(at..at.saturating_add(bytes.len())) {
                target.copy_from_slice(bytes);
            }
        }
        Self { start, end: end.clone() }
    }

    /// Returns the checksum of the areas; never 0.
    pub(super) fn checksum(&self) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&self.start);
        digest.update(&self.end);
        digest.finalize().max(1)
    }

    /// Returns the content of the backing, if it has a UUID or a number of its own.
    pub(super) fn content(&self) -> Option<ContentId> {
        let has = |at: usize, bytes: &[u8]| self.start[at..].starts_with(bytes);
        KINDS.iter().filter(|kind| has(kind.signature.0, kind.signature.1)).find_map(|kind| {
            let (at, len) = kind.uuid;
            let uuid = self.start[at..at + len].to_vec();
            let is_known = uuid.iter().any(|byte| *byte != 0);
            is_known.then_some(ContentId { kind: kind.name, uuid })
        })
    }

    /// Returns the sector size of the backing's GPT, or `None` without a GPT.
    pub(super) fn table_sector_bytes(&self) -> Option<u32> {
        let has = |at: usize| self.start[at..].starts_with(b"EFI PART");
        [512, 4096].into_iter().find(|sector| has(*sector)).and_then(|it| u32::try_from(it).ok())
    }
}

/// Returns the areas of a backing of `size_bytes` bytes.
pub(super) fn ranges(size_bytes: u64) -> Vec<Range<u64>> {
    let of_start = [(0, START_BYTES), (BTRFS, AREA_BYTES)].map(|(at, len)| {
        let (at, len) = (at as u64, len as u64);
        at.min(size_bytes)..(at + len).min(size_bytes)
    });
    let end = size_bytes.saturating_sub(AREA_BYTES as u64)..size_bytes;
    of_start.into_iter().filter(|range| !range.is_empty()).chain([end]).collect()
}

/// Describes a backing by the bytes of all [`ranges`], with their offsets.
pub(super) fn describe(parts: &[Part]) -> String {
    let is_empty = parts.iter().all(|(_, bytes)| bytes.iter().all(|byte| *byte == 0));
    match Areas::of_parts(parts).content() {
        Some(ContentId { kind, uuid }) => {
            let digits = uuid.iter().flat_map(|byte| [byte >> 4, byte & 15]);
            let digits = digits.filter_map(|digit| char::from_digit(digit.into(), 16));
            format!("{kind} with the UUID {}", digits.collect::<String>())
        }
        None if is_empty => "zeroes in its first and last bytes".into(),
        None => "no file system or partition table with a UUID".into(),
    }
}

impl ContentId {
    /// Returns the bytes that tell this content from others.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        [self.kind.as_bytes(), &[0], &self.uuid].concat()
    }

    /// Makes a content for tests.
    #[cfg(all(test, not(loom)))]
    pub(super) fn new(kind: &'static str, uuid: &[u8]) -> Self {
        Self { kind, uuid: uuid.to_vec() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::WriteFlags;
    use crate::device::memory::MemoryDevice;

    fn device() -> MemoryDevice {
        MemoryDevice::new(512, 4096).unwrap()
    }

    fn put(device: &MemoryDevice, at: usize, bytes: &[u8]) {
        let sector = at / 512 * 512;
        let mut block = [0; 1024];
        device.read(sector as u64, &mut block).unwrap();
        block[at - sector..at - sector + bytes.len()].copy_from_slice(bytes);
        device.write(sector as u64, &block, WriteFlags::default()).unwrap();
    }

    #[test]
    fn each_kind_of_content_is_known_by_its_uuid_and_not_without() {
        for kind in KINDS {
            let device = device();
            let found = || Areas::of_device(&device).unwrap().content();
            put(&device, kind.signature.0, kind.signature.1);
            assert_eq!(found(), None, "{}: without a UUID", kind.name);
            put(&device, kind.uuid.0, &[7]);
            let first = found().expect(kind.name);
            assert_eq!(first.kind, kind.name);
            put(&device, kind.uuid.0 + kind.uuid.1 - 1, &[9]);
            assert_ne!(found().expect(kind.name), first, "{}: another UUID", kind.name);
        }
    }

    #[test]
    fn every_area_is_in_the_checksum() {
        let device = device();
        let checksum = || Areas::of_device(&device).unwrap().checksum();
        let mut before = checksum();
        for at in [0, 1080, 4096, 8191, BTRFS, BTRFS + 4095, (2 << 20) - 4096, (2 << 20) - 600] {
            put(&device, at, &[1]);
            let after = checksum();
            assert_ne!(after, before, "{at}");
            before = after;
        }
        put(&device, 9000, &[1]);
        assert_eq!(checksum(), before, "between the areas");
    }

    #[test]
    fn small_backings_have_areas_too() {
        for blocks in [1, 8, 16, 17, 130] {
            let device = MemoryDevice::new(512, blocks).unwrap();
            let before = Areas::of_device(&device).unwrap().checksum();
            device.write((blocks - 1) * 512, &[3; 512], WriteFlags::default()).unwrap();
            assert_ne!(Areas::of_device(&device).unwrap().checksum(), before, "{blocks}");
        }
    }

    #[test]
    fn a_table_tells_its_sectors() {
        for sector in [512, 4096] {
            let device = device();
            assert_eq!(Areas::of_device(&device).unwrap().table_sector_bytes(), None);
            put(&device, sector, b"EFI PART");
            let found = Areas::of_device(&device).unwrap().table_sector_bytes();
            assert_eq!(found, u32::try_from(sector).ok());
        }
    }
}
