//! A record: what it says, its checksums, its length in the ring.
//!
//! Why a record needs one fence: its header carries the checksum of its payload, and its own
//! checksum carries the pool's salt and the record's position. Whatever subset of its words a crash
//! leaves, one of the two sums does not hold, or all of it is there. So header and payload may
//! become durable in any order, and nothing has to be stored after them.

use std::io::IoSlice;
use std::mem::offset_of;
use std::sync::LazyLock;

use crc_fast::{CrcAlgorithm, Digest, checksum};
use zerocopy::little_endian::{I32, U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::log::pool::layout::{
    DEFINITION_COVERED, DEFINITION_STARTS, DefinitionBytes, HANDLE_BYTES_MAX, PATH_BYTES_MAX,
    RECORD_ALIGN_BYTES, RECORD_GROWS, RecordHeaderBytes,
};

/// What a record tells.
///
/// A file's *story* begins at a definition without [`Definition::covered`] and ends at an `End`.
/// Recovery applies a story only if a definition in it is covered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::FromRepr)]
#[repr(u16)]
pub enum RecordKind {
    /// The payload was written at `offset`.
    Write = 1,
    /// `len` bytes at `offset` became zero, and stay allocated where `aux` is not 0. Only a log
    /// before a device has such records.
    Zero = 2,
    /// The file's size became `offset`.
    SetSize = 3,
    /// The file is the one that the payload, a [`Definition`], names.
    Define = 4,
    /// The story ends: the file has all earlier records, or none of them counts.
    End = 8,
    /// The operation of the record at `aux` failed.
    Void = 9,
    /// A sync: all that the file became before this record is to outlive a crash, `offset` bytes
    /// long.
    Mark = 11,
    /// A sync of a file that the program has made: the payload, a [`Make`](crate::log::Make) and
    /// the content, is all of the file at this place of its story. The story is covered.
    Make = 12,
    /// The names of a covered file change as the payload, a [`NameRecord`](crate::log::NameRecord),
    /// says.
    Name = 13,
    /// What recovery has decided to do with names, before it does that: the payload has a part of
    /// it, which begins at byte `offset`.
    Decided = 14,
    /// Recovery has done what it decided.
    Done = 15,
    /// What the log has no record of between `aux` and this record was never acknowledged: the rest
    /// of a lap, or what a crash cut off.
    Gap = 16,
    /// Recovery is about to touch files: the payload has what each of them has that a write takes
    /// away.
    Begun = 17,
    /// Recovery left some files, and has restored those with the ids in the payload.
    Restored = 18,
}

/// A record's header, as the log's users see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Where the record is in the endless log.
    pub position: u64,
    /// The operation.
    pub kind: RecordKind,
    /// Id of the file.
    pub file: u64,
    /// Byte of the file, or its new size.
    pub offset: u64,
    /// Bytes of the file that a [`RecordKind::Zero`] covers.
    pub len: u64,
    /// When the record was made, in nanoseconds since 1970. 0: that is not said, as of a
    /// [`RecordKind::Zero`].
    pub wall_ns: u64,
    /// See [`RecordKind`].
    pub aux: u64,
    /// Bytes of the payload.
    pub payload_bytes: u32,
    /// CRC-32C of the payload.
    pub payload_checksum: u32,
    /// The operation needs a commit of the file system to be durable: it ends beyond the durable
    /// size, or may meet bytes that are not written or not allocated.
    pub grows: bool,
    /// All records below this position were finished when this one was stored: durable, or known
    /// never to be. 0: that is not said.
    pub finished: u64,
}

/// Bytes that the checksum of a header is taken over: the header, then zeroes.
///
/// As strong as over the header alone: what follows multiplies the remainder by a power of x, which
/// can be undone. But this is where the checksum's wide instructions begin: 14 ns instead of 37,
/// measured here, for each record.
const CHECKED_BYTES: usize = 128;

/// Bits of a header before those of its position.
const POSITION_BITS: usize = offset_of!(RecordHeaderBytes, position) * 8;

/// The checksum of a header that has the pool's salt in its place.
fn header_checksum(salted: &RecordHeaderBytes) -> u64 {
    let mut checked = [0; CHECKED_BYTES];
    checked[..size_of::<RecordHeaderBytes>()].copy_from_slice(salted.as_bytes());
    checksum(CrcAlgorithm::Crc64Nvme, &checked)
}

const HEADER_BITS: usize = size_of::<RecordHeaderBytes>() * 8;

/// How each bit of a header changes its checksum, whatever the others are: a CRC is linear. A bit
/// of the checksum itself changes what is compared with it.
static DIFFERENCES: LazyLock<[u64; HEADER_BITS]> = LazyLock::new(|| {
    let of_zeroes = header_checksum(&RecordHeaderBytes::new_zeroed());
    std::array::from_fn(|bit| {
        if bit < CHECKSUM_BITS {
            return 1 << bit;
        }
        let mut bytes = RecordHeaderBytes::new_zeroed();
        bytes.as_mut_bytes()[bit / 8] ^= 1 << (bit % 8);
        header_checksum(&bytes) ^ of_zeroes
    })
});
/// Bits of the checksum, the first field.
const CHECKSUM_BITS: usize = 64;

/// The bit whose change makes the checksum of a header right, if there is one.
fn changed_bit(bytes: &RecordHeaderBytes, salt: u64) -> Option<usize> {
    let salted = RecordHeaderBytes { checksum: U64::new(salt), ..*bytes };
    let difference = header_checksum(&salted) ^ bytes.checksum.get();
    DIFFERENCES.iter().position(|of_bit| *of_bit == difference)
}

impl Header {
    /// One of this kind that says nothing more.
    pub(in crate::log) const fn of(kind: RecordKind) -> Self {
        Self {
            position: 0,
            kind,
            file: 0,
            offset: 0,
            len: 0,
            wall_ns: 0,
            aux: 0,
            payload_bytes: 0,
            payload_checksum: 0,
            grows: false,
            finished: 0,
        }
    }

    /// The header's bytes, with its checksum.
    pub(in crate::log) fn encode(&self, salt: u64) -> RecordHeaderBytes {
        let mut bytes = RecordHeaderBytes {
            checksum: U64::new(salt),
            position: U64::new(self.position),
            file: U64::new(self.file),
            offset: U64::new(self.offset),
            len: U64::new(if self.kind == RecordKind::Zero { self.len } else { self.wall_ns }),
            aux: U64::new(self.aux),
            payload_bytes: U32::new(self.payload_bytes),
            payload_checksum: U32::new(self.payload_checksum),
            kind: U16::new(self.kind as u16),
            flags: U16::new(if self.grows { RECORD_GROWS } else { 0 }),
            finished: U32::new(finished_distance(self.position, self.finished)),
        };
        bytes.checksum = U64::new(header_checksum(&bytes));
        bytes
    }

    /// Reads a header that should be at `position`; none, where there is no such record.
    pub(in crate::log) fn decode(
        bytes: &RecordHeaderBytes,
        salt: u64,
        position: u64,
    ) -> Option<Self> {
        if bytes.position.get() != position {
            return None;
        }
        let salted = RecordHeaderBytes { checksum: U64::new(salt), ..*bytes };
        if header_checksum(&salted) != bytes.checksum.get() {
            return None;
        }
        let kind = RecordKind::from_repr(bytes.kind.get())?;
        let (len, wall_ns) =
            if kind == RecordKind::Zero { (bytes.len.get(), 0) } else { (0, bytes.len.get()) };
        Some(Self {
            position,
            kind,
            file: bytes.file.get(),
            offset: bytes.offset.get(),
            len,
            wall_ns,
            aux: bytes.aux.get(),
            payload_bytes: bytes.payload_bytes.get(),
            payload_checksum: bytes.payload_checksum.get(),
            grows: bytes.flags.get() & RECORD_GROWS != 0,
            finished: finished_position(position, bytes.finished.get()),
        })
    }

    /// As [`decode`](Self::decode), also where one bit of the header has changed: then only one
    /// change makes its checksum right.
    ///
    /// A header that a crash cut off does not pass for such a one: all of its words but one would
    /// have to be there, and that one to differ in one bit from what lay there before. And then the
    /// record is what was being written, if its payload is whole, and may count.
    pub(in crate::log) fn decode_repairing(
        bytes: &RecordHeaderBytes,
        salt: u64,
        position: u64,
    ) -> Option<Self> {
        let changed = |bit: usize| {
            let mut bytes = *bytes;
            bytes.as_mut_bytes()[bit / 8] ^= 1 << (bit % 8);
            Self::decode(&bytes, salt, position)
        };
        let wrong_position = bytes.position.get() ^ position;
        match wrong_position.count_ones() {
            0 => Self::decode(bytes, salt, position)
                .or_else(|| changed_bit(bytes, salt).and_then(changed)),
            1 => changed(POSITION_BITS + wrong_position.trailing_zeros() as usize),
            _ => None,
        }
    }

    /// Position of the payload's first byte.
    pub fn data_position(&self) -> u64 {
        self.position + RECORD_ALIGN_BYTES
    }

    /// Bytes that the record takes in the log.
    pub fn record_bytes(&self) -> u64 {
        record_bytes(u64::from(self.payload_bytes))
    }
}

/// How a record at `position` says that all records below `finished` were finished: 0 says nothing,
/// as where the distance is 256 GiB or more.
fn finished_distance(position: u64, finished: u64) -> u32 {
    let distance = position.checked_sub(finished).filter(|_| finished != 0);
    let units = distance.map_or(0, |bytes| bytes / RECORD_ALIGN_BYTES + 1);
    u32::try_from(units).unwrap_or(0)
}

/// The position of which [`finished_distance`] made `units`; 0: it says nothing.
fn finished_position(position: u64, units: u32) -> u64 {
    let distance = u64::from(units).checked_sub(1).map(|units| units * RECORD_ALIGN_BYTES);
    distance.and_then(|bytes| position.checked_sub(bytes)).unwrap_or(0)
}

/// Bytes that a record with so much payload takes in the log.
pub(in crate::log) fn record_bytes(payload_bytes: u64) -> u64 {
    RECORD_ALIGN_BYTES + payload_bytes.next_multiple_of(RECORD_ALIGN_BYTES)
}

/// CRC-32C of a payload in parts.
///
/// CRC-32C through the crate `crc-fast`: 66 ns for 4 KiB where it was measured, `crc32c` took 150.
pub(in crate::log) fn payload_checksum(parts: &[IoSlice<'_>]) -> u32 {
    let sum = match parts {
        [] => checksum(CrcAlgorithm::Crc32Iscsi, &[]),
        [one] => checksum(CrcAlgorithm::Crc32Iscsi, one),
        parts => {
            let mut digest = PayloadDigest::default();
            for part in parts {
                digest.add(part);
            }
            return digest.finish();
        }
    };
    u32::try_from(sum).unwrap_or(u32::MAX)
}

/// The checksum of a payload that comes in pieces.
pub(in crate::log) struct PayloadDigest(Digest);

impl Default for PayloadDigest {
    fn default() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }
}

impl PayloadDigest {
    /// Takes the next piece.
    pub(in crate::log) fn add(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    /// The checksum of all pieces.
    pub(in crate::log) fn finish(&self) -> u32 {
        u32::try_from(self.0.finalize()).unwrap_or(u32::MAX)
    }
}

/// What tells a file system from all others: its UUID.
pub type FileSystemId = [u8; 16];

/// A file's handle on its file system, as `name_to_handle_at` gives it: it outlives a reboot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileHandle {
    kind: i32,
    len: u8,
    /// Behind the handle zeroes.
    bytes: [u8; HANDLE_BYTES_MAX],
}

impl FileHandle {
    /// No handle: what a log before a device records.
    pub const NONE: Self = Self { kind: 0, len: 0, bytes: [0; HANDLE_BYTES_MAX] };

    /// The handle of this type with these bytes; none, where there are more than any handle has.
    pub fn new(kind: i32, handle: &[u8]) -> Option<Self> {
        let mut bytes = [0; HANDLE_BYTES_MAX];
        bytes.get_mut(..handle.len())?.copy_from_slice(handle);
        Some(Self { kind, len: u8::try_from(handle.len()).ok()?, bytes })
    }

    /// The handle's type, which the file system chooses.
    pub fn kind(&self) -> i32 {
        self.kind
    }

    /// The handle's bytes, at most 128.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// What a [`RecordKind::Define`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Definition<'a> {
    /// What tells the file from all others of all times: [`identity`].
    pub identity: u64,
    /// The file's file system.
    pub file_system: FileSystemId,
    /// The file's handle there.
    pub handle: FileHandle,
    /// The story is confirmed: all that the file was when the story began is durable in the file.
    pub covered: bool,
    /// The story begins here: no earlier record of the file counts. Else it goes on, and the
    /// definition is repeated, since the tail is about to pass the former one.
    pub starts: bool,
    /// Size of the file in bytes that is durable, if `covered`. Growth in records before the
    /// position that the header's `aux` says is promised then, too.
    pub size_bytes: u64,
    /// Device number when the record was written.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Absolute path, for messages and to find the file where its handle cannot be opened. Empty:
    /// none is known.
    pub path: &'a [u8],
}

impl<'a> Definition<'a> {
    /// The fixed part of the payload; [`parts`](Self::parts) has all of it.
    pub(in crate::log) fn encode(&self) -> DefinitionBytes {
        DefinitionBytes {
            identity: U64::new(self.identity),
            file_system: self.file_system,
            size_bytes: U64::new(self.size_bytes),
            device: U64::new(self.device),
            inode: U64::new(self.inode),
            handle_type: I32::new(self.handle.kind),
            handle_bytes: U16::new(u16::from(self.handle.len)),
            flags: U16::new(
                if self.covered { DEFINITION_COVERED } else { 0 }
                    | if self.starts { DEFINITION_STARTS } else { 0 },
            ),
        }
    }

    /// The payload, whose fixed part is `fixed`: that, the handle, the path.
    pub(in crate::log) fn parts<'b>(&'b self, fixed: &'b DefinitionBytes) -> [IoSlice<'b>; 3] {
        [fixed.as_bytes(), self.handle.bytes(), self.path].map(IoSlice::new)
    }

    /// Reads a payload; none, where it makes no sense.
    pub fn decode(payload: &'a [u8]) -> Option<Self> {
        let (fixed, rest) = DefinitionBytes::read_from_prefix(payload).ok()?;
        let (handle, path) = rest.split_at_checked(usize::from(fixed.handle_bytes.get()))?;
        Some(Self {
            identity: fixed.identity.get(),
            file_system: fixed.file_system,
            handle: FileHandle::new(fixed.handle_type.get(), handle)?,
            covered: fixed.flags.get() & DEFINITION_COVERED != 0,
            starts: fixed.flags.get() & DEFINITION_STARTS != 0,
            size_bytes: fixed.size_bytes.get(),
            device: fixed.device.get(),
            inode: fixed.inode.get(),
            path: if path.is_empty() { path } else { checked_path(path)? },
        })
    }
}

/// The path, if it is one that the log may hold: absolute, whole, without a NUL, not too long.
pub fn checked_path(path: &[u8]) -> Option<&[u8]> {
    let fine = path.first() == Some(&b'/') && path.len() <= PATH_BYTES_MAX && !path.contains(&0);
    fine.then_some(path)
}

/// What tells a file from all others of all times: a checksum of its file system and of its handle
/// there, which has the inode's generation in it. Never 0.
pub fn identity(file_system: &FileSystemId, handle_type: i32, handle: &[u8]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    digest.update(file_system);
    digest.update(&handle_type.to_le_bytes());
    digest.update(handle);
    digest.finalize().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            position: 1 << 20,
            kind: RecordKind::Write,
            file: 3,
            offset: 77,
            len: 0,
            wall_ns: 5,
            aux: 9,
            payload_bytes: 4,
            payload_checksum: payload_checksum(&[IoSlice::new(b"data")]),
            grows: true,
            finished: (1 << 20) - 192,
        }
    }

    #[test]
    fn a_header_comes_back() {
        for finished in [0, 64, (1 << 20) - 64, 1 << 20] {
            let header = Header { finished, ..header() };
            assert_eq!(Header::decode(&header.encode(42), 42, 1 << 20), Some(header));
        }
    }

    #[test]
    fn what_a_header_cannot_say_of_finished_records_it_does_not_say() {
        let position = 1 << 40;
        let said = |finished| finished_position(position, finished_distance(position, finished));
        let farthest = position - (u64::from(u32::MAX) - 1) * 64;
        assert_eq!([farthest - 64, farthest, position + 64].map(said), [0, farthest, 0]);
        assert_eq!(finished_position(64, 3), 0, "before the first position");
    }

    #[test]
    fn the_checksum_covers_salt_header_and_zeroes() {
        let bytes = header().encode(42);
        let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
        crc.update(&42_u64.to_le_bytes());
        bytes.as_bytes()[8..].iter().for_each(|byte| crc.update(&[*byte]));
        (0..64).for_each(|_| crc.update(&[0]));
        assert_eq!(bytes.checksum.get(), crc.finalize());
    }

    #[test]
    fn a_header_of_another_pool_or_place_does_not_count() {
        let bytes = header().encode(42);
        assert_eq!(Header::decode(&bytes, 43, 1 << 20), None);
        assert_eq!(Header::decode(&bytes, 42, (1 << 20) + 64), None);
    }

    #[test]
    fn a_header_with_any_word_of_an_older_one_does_not_count() {
        let bytes = header().encode(42);
        for word in 0..8 {
            let mut torn = bytes;
            torn.as_mut_bytes()[word * 8..][..8].copy_from_slice(&[0xA5; 8]);
            assert_eq!(Header::decode(&torn, 42, 1 << 20), None, "word {word}");
        }
    }

    #[test]
    fn parts_have_the_checksum_of_the_whole() {
        let parts = [IoSlice::new(b"123"), IoSlice::new(b""), IoSlice::new(b"456789")];
        assert_eq!(payload_checksum(&parts), payload_checksum(&[IoSlice::new(b"123456789")]));
        assert_eq!(payload_checksum(&parts), 0xE306_9283, "the published check value");
    }

    #[test]
    fn kinds_have_the_codes_of_the_format_and_no_others() {
        let known = |code| RecordKind::from_repr(code).map(|kind| kind as u16);
        for code in 0..=u16::MAX {
            let expected = matches!(code, 1..=4 | 8 | 9 | 11..=18).then_some(code);
            assert_eq!(known(code), expected);
        }
    }

    #[test]
    fn the_flag_of_growth_is_bit_1_alone() {
        let flags = |grows| Header { grows, ..header() }.encode(42).flags.get();
        assert_eq!((flags(true), flags(false)), (2, 0));
    }

    fn definition(path: &[u8]) -> Definition<'_> {
        let handle = FileHandle::new(-1, &[9; 12]).expect("a handle of 12 bytes");
        let (file_system, size_bytes) = ([7; 16], 1 << 33);
        let (identity, device, inode, covered) = (1, 2, 3, true);
        Definition {
            identity,
            file_system,
            handle,
            covered,
            starts: false,
            size_bytes,
            device,
            inode,
            path,
        }
    }

    fn payload(definition: &Definition<'_>) -> Vec<u8> {
        definition.parts(&definition.encode()).iter().flat_map(|part| part.to_vec()).collect()
    }

    #[test]
    fn definitions_come_back() {
        for path in [&b"/a/b"[..], b""] {
            for covered in [true, false] {
                let definition = Definition { covered, ..definition(path) };
                assert_eq!(Definition::decode(&payload(&definition)), Some(definition));
            }
        }
        let none = Definition { handle: FileHandle::NONE, ..definition(b"/a") };
        assert_eq!(Definition::decode(&payload(&none)), Some(none));
    }

    #[test]
    fn definitions_that_make_no_sense_are_refused() {
        let good = payload(&definition(b"/a/b"));
        for len in 0..size_of::<DefinitionBytes>() + 12 {
            assert_eq!(Definition::decode(&good[..len]), None, "{len} bytes");
        }
        assert_eq!(Definition::decode(&payload(&definition(b"a/b"))), None);
        let mut long = definition(b"/a/b").encode();
        long.handle_bytes = U16::new(129);
        let long = [long.as_bytes(), &[b'/'; 200]].concat();
        assert_eq!(Definition::decode(&long), None);
    }

    #[test]
    fn handles_compare_by_type_and_bytes() {
        let handle = |kind, bytes: &[u8]| FileHandle::new(kind, bytes).expect("128 bytes at most");
        assert_eq!(handle(1, &[5; 128]), handle(1, &[5; 128]));
        assert_ne!(handle(1, b"ab"), handle(2, b"ab"));
        assert_ne!(handle(1, b"ab"), handle(1, b"ab\0"));
        assert!(FileHandle::new(1, &[0; 129]).is_none());
    }

    #[test]
    fn only_absolute_paths_count() {
        assert!(checked_path(b"/x").is_some());
        for bad in [&b""[..], b"x", b"/a\0b", &[b'/'; 4096]] {
            assert!(checked_path(bad).is_none());
        }
    }
}
