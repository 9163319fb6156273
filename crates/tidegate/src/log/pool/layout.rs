//! The layout of the log on the medium, and nothing else. docs/formats.md explains it.
//!
//! All numbers are little-endian. Offsets of the areas are bytes from the start of the pool's data:
//!
//! | offset | what |
//! |---|---|
//! | 0 | [`LogHeaderBytes`], written once when the pool is made |
//! | 4096 | its second copy |
//! | 8192 | the tail: no record before this position counts any more, a [`position_word`] |
//! | 8256 | the limit: no record ends after this position, a [`position_word`] |
//! | 8320 | [`SessionBytes`] |
//! | 8384 | [`HeartbeatBytes`] |
//! | 12288, 12352, 12416, 12480 | the second copies of these four |
//! | 16384 | the ring |

use std::mem::offset_of;

use crate::tier::EngineCode;
use zerocopy::little_endian::{I32, I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The number of this engine in superblocks.
pub const CODE: EngineCode = EngineCode(2);
/// Where the second copy of the header lies.
pub const SECOND_HEADER_OFFSET: u64 = 4096;
/// Where the persistent tail lies.
pub const TAIL_OFFSET: u64 = 8192;
/// Where the limit lies.
pub const LIMIT_OFFSET: u64 = 8256;
/// Where [`SessionBytes`] lie.
pub const SESSION_OFFSET: u64 = 8320;
/// Where [`HeartbeatBytes`] lie.
pub const HEARTBEAT_OFFSET: u64 = 8384;
/// How far behind tail, limit, session and heartbeat their second copies lie.
pub const COPY_DISTANCE: u64 = 4096;
/// Where the ring begins.
pub const RING_OFFSET: u64 = 16384;
/// A record starts at a multiple of this, and its header has this length.
pub const RECORD_ALIGN_BYTES: u64 = 64;
/// The limit moves in steps of this, or less in a small ring: hundreds of records share a store.
pub const LIMIT_STEP_BYTES: u64 = 1 << 20;
/// The first bytes of a header.
pub const MAGIC: [u8; 8] = *b"TIDELOG4";
/// The first bytes of a header of the former format. It has no record of names; everything in it
/// has the same meaning in this format.
pub const FORMER_MAGIC: [u8; 8] = *b"TIDELOG3";
/// The longest path in a record, in bytes.
pub const PATH_BYTES_MAX: usize = 4095;
/// The longest file handle, in bytes: `MAX_HANDLE_SZ` of the kernel.
pub const HANDLE_BYTES_MAX: usize = 128;
/// The longest name in a directory, in bytes: `NAME_MAX`.
pub const NAME_BYTES_MAX: usize = 255;
/// The longest extended attributes of a file in a record, in bytes, all together.
pub const EXTENDED_BYTES_MAX: usize = 8192;

/// Set in each word that holds a position with its checksum. A word of the former format has
/// neither bit 63 nor a checksum.
const WORD_CHECKED: u64 = 1 << 63;
/// The bits of a word that hold the position, a multiple of 64 below 2^62.
const WORD_POSITION: u64 = (1 << 62) - RECORD_ALIGN_BYTES;

/// Encodes a position as one word for the medium, which is stored whole or not at all. The 7 bits
/// that no position uses hold a checksum.
pub fn position_word(position: u64) -> u64 {
    let check = u64::from(position_check(position));
    WORD_CHECKED | (check >> 6) << 62 | position & WORD_POSITION | check & 63
}

/// Decodes a position. Returns `None` if the checksum is wrong or the position is 0.
pub fn position_of(word: u64) -> Option<u64> {
    let position = word & WORD_POSITION;
    let is_whole = word == position_word(position) || word == position;
    (is_whole && position != 0).then_some(position)
}

/// Computes the CRC-7 (polynomial 9) of the position's 56 bits. It detects up to two changed bits.
fn position_check(position: u64) -> u8 {
    (6..62).rev().fold(0x7F, |check: u8, bit| {
        let carry = (check >> 6) ^ u8::from(position & 1 << bit != 0);
        (check << 1) & 0x7F ^ if carry & 1 == 1 { 0x09 } else { 0 }
    })
}

/// The header of a log pool, written once.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LogHeaderBytes {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// CRC-64/NVME of the header with zero here.
    pub checksum: U64,
    /// A random number that starts each record's checksum, so that no user data passes for a
    /// record.
    pub salt: U64,
    /// Bytes of the ring: a multiple of 4096.
    pub ring_bytes: U64,
    /// Zeroes.
    pub reserved: [u8; 32],
}

/// The boot of the machine that wrote the records in the log.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct SessionBytes {
    /// The kernel's boot id. Zeroes: the log was closed.
    pub boot_id: [u8; 16],
    /// CRC-64/NVME of the boot id.
    pub checksum: U64,
}

/// A [`Heartbeat`](crate::log::Heartbeat). Releases without heartbeats leave zeroes here.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct HeartbeatBytes {
    /// CRC-64/NVME of the other fields.
    pub checksum: U64,
    /// Time of this heartbeat in nanoseconds since 1970, by the clock of file timestamps.
    pub wall_ns: U64,
    /// At `wall_ns` the kernel had done the operations of all records below this position.
    pub done: U64,
    /// The largest step back of the clock in this session, in nanoseconds.
    pub set_back_ns: U64,
    /// Time when the first recovery of this session's records began to write to files; 0: none has.
    pub recovery_ns: U64,
}

/// The header of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RecordHeaderBytes {
    /// CRC-64/NVME of the header with the pool's salt here, and 64 zeroes behind it.
    pub checksum: U64,
    /// The record's position in the endless log. Modulo the ring's size it is the offset in the
    /// ring.
    pub position: U64,
    /// Id of the file.
    pub file: U64,
    /// Offset in the file, or the file's new size.
    pub offset: U64,
    /// In a Zero: bytes that the operation covers. In all other records: time of the record in
    /// nanoseconds since 1970, or 0 if unknown.
    pub len: U64,
    /// Position of a voided record.
    pub aux: U64,
    /// Bytes that follow the header.
    pub payload_bytes: U32,
    /// CRC-32C of the payload.
    pub payload_checksum: U32,
    /// The operation: [`RecordKind`](crate::log::RecordKind).
    pub kind: U16,
    /// Bit 0: reserved. Bit 1: [`RECORD_GROWS`].
    pub flags: U16,
    /// Distance back to the finished position when the record was stored, in units of 64 bytes,
    /// plus 1. 0: unknown.
    pub finished: U32,
}

/// Bit of [`RecordHeaderBytes::flags`]: the operation becomes durable in the file only by a commit
/// of its file system.
pub const RECORD_GROWS: u16 = 2;

/// The start of the payload of a record that defines a file; its handle and its path follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DefinitionBytes {
    /// Distinguishes the file from all others of all times: [`identity`](crate::log::identity).
    pub identity: U64,
    /// UUID of the file's file system.
    pub file_system: [u8; 16],
    /// Durable size of the file, if the definition is covered.
    pub size_bytes: U64,
    /// Device number when the record was written.
    pub device: U64,
    /// Inode number.
    pub inode: U64,
    /// Type of the file's handle.
    pub handle_type: I32,
    /// Bytes of the handle, at most [`HANDLE_BYTES_MAX`].
    pub handle_bytes: U16,
    /// Bit 0: [`DEFINITION_COVERED`].
    pub flags: U16,
}

/// Bit of [`DefinitionBytes::flags`]: the file's story is confirmed by a sync of the file.
pub const DEFINITION_COVERED: u16 = 1;
/// Bit of [`DefinitionBytes::flags`]: a story begins here, so no earlier record of the file counts.
pub const DEFINITION_STARTS: u16 = 2;

/// The start of the payload of a record that can create a file again. Handle of the parent, name,
/// extended attributes and content follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MakeBytes {
    /// Seconds since 1970 of the parent's last change (`st_ctime`).
    pub parent_changed_s: I64,
    /// Seconds since 1970 of the last access.
    pub accessed_s: I64,
    /// Seconds since 1970 of the last modification.
    pub modified_s: I64,
    /// Nanoseconds of the parent's last change.
    pub parent_changed_ns: U32,
    /// Nanoseconds of the last access.
    pub accessed_ns: U32,
    /// Nanoseconds of the last modification.
    pub modified_ns: U32,
    /// Permission bits, with set-user-ID and the like.
    pub mode: U32,
    /// User.
    pub owner: U32,
    /// Group.
    pub group: U32,
    /// Type of the parent's handle.
    pub parent_type: I32,
    /// Bytes of the extended attributes, at most [`EXTENDED_BYTES_MAX`].
    pub extended_bytes: U32,
    /// Bytes of the parent's handle, at most [`HANDLE_BYTES_MAX`].
    pub parent_bytes: U16,
    /// Bytes of the name, at most [`NAME_BYTES_MAX`].
    pub name_bytes: U16,
    /// Zero.
    pub reserved: U32,
}

/// The start of the payload of a record of a change of names. It is followed by the handle of the
/// former parent, the former name, the handle of the new parent, the new name, and the handle of
/// the file that the change replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct NameBytes {
    /// 1: link, 2: unlink, 3: rename.
    pub change: U16,
    /// Zero.
    pub reserved: U16,
    /// Number of names that the file has after the change.
    pub links: U32,
    /// Type of the former parent's handle.
    pub from_type: I32,
    /// Type of the new parent's handle.
    pub to_type: I32,
    /// Type of the replaced file's handle.
    pub replaced_type: I32,
    /// Bytes of the former parent's handle.
    pub from_bytes: U16,
    /// Bytes of the former name; 0: there is none.
    pub from_name_bytes: U16,
    /// Bytes of the new parent's handle.
    pub to_bytes: U16,
    /// Bytes of the new name; 0: there is none.
    pub to_name_bytes: U16,
    /// Bytes of the replaced file's handle; 0: nothing is replaced.
    pub replaced_bytes: U16,
    /// Zero.
    pub reserved_too: U16,
}

const _: () = {
    assert!(size_of::<MakeBytes>() == 64);
    assert!(offset_of!(MakeBytes, parent_changed_ns) == 24);
    assert!(offset_of!(MakeBytes, parent_type) == 48);
    assert!(offset_of!(MakeBytes, name_bytes) == 58);
    assert!(size_of::<NameBytes>() == 32);
    assert!(offset_of!(NameBytes, from_type) == 8);
    assert!(offset_of!(NameBytes, from_bytes) == 20);
    assert!(offset_of!(NameBytes, replaced_bytes) == 28);
    assert!(size_of::<LogHeaderBytes>() == 64);
    assert!(offset_of!(LogHeaderBytes, checksum) == 8);
    assert!(offset_of!(LogHeaderBytes, salt) == 16);
    assert!(offset_of!(LogHeaderBytes, ring_bytes) == 24);
    assert!(size_of::<SessionBytes>() == 24);
    assert!(size_of::<HeartbeatBytes>() == 40);
    assert!(offset_of!(HeartbeatBytes, recovery_ns) == 32);
    assert!(size_of::<RecordHeaderBytes>() == 64);
    assert!(offset_of!(RecordHeaderBytes, position) == 8);
    assert!(offset_of!(RecordHeaderBytes, file) == 16);
    assert!(offset_of!(RecordHeaderBytes, offset) == 24);
    assert!(offset_of!(RecordHeaderBytes, len) == 32);
    assert!(offset_of!(RecordHeaderBytes, aux) == 40);
    assert!(offset_of!(RecordHeaderBytes, payload_bytes) == 48);
    assert!(offset_of!(RecordHeaderBytes, payload_checksum) == 52);
    assert!(offset_of!(RecordHeaderBytes, kind) == 56);
    assert!(offset_of!(RecordHeaderBytes, flags) == 58);
    assert!(offset_of!(RecordHeaderBytes, finished) == 60);
    assert!(size_of::<DefinitionBytes>() == 56);
    assert!(offset_of!(DefinitionBytes, file_system) == 8);
    assert!(offset_of!(DefinitionBytes, size_bytes) == 24);
    assert!(offset_of!(DefinitionBytes, handle_type) == 48);
    assert!(offset_of!(DefinitionBytes, handle_bytes) == 52);
    assert!(offset_of!(DefinitionBytes, flags) == 54);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_survives_the_medium_and_no_change_of_one_or_two_bits_does() {
        for position in [64, 1 << 20, (1 << 40) + 192, WORD_POSITION] {
            let word = position_word(position);
            assert_eq!(position_of(word), Some(position));
            for one in 0..64 {
                for other in 0..64 {
                    let changed = word ^ 1 << one ^ if one == other { 0 } else { 1 << other };
                    let found = position_of(changed);
                    assert!(found.is_none() || found == Some(position), "bits {one} and {other}");
                }
            }
        }
        assert_eq!([position_of(0), position_of(u64::MAX)], [None, None]);
        assert_eq!(position_of(65536), Some(65536), "a word of the former format");
        assert_eq!(position_of(65536 + 8), None);
    }
}
