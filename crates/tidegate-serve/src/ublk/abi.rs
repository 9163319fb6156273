//! The kernel's interface for ublk servers: structs and numbers of `linux/ublk_cmd.h`.
//!
//! All structs are in memory as the kernel has them, without padding, in the machine's byte order.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Asks the queue for a request: the first command of each tag.
pub(super) const FETCH: u32 = encoded(READ_WRITE, 0x20, size_of::<IoCommand>());
/// Answers a request, and asks for the next one with its tag.
pub(super) const COMMIT_AND_FETCH: u32 = encoded(READ_WRITE, 0x21, size_of::<IoCommand>());

/// A command for the whole driver or a device, in the encoding of `ioctl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Command(pub(super) u32);

impl Command {
    pub(super) const ADD: Self = Self::new(READ_WRITE, 0x04);
    pub(super) const DELETE: Self = Self::new(READ_WRITE, 0x05);
    pub(super) const START: Self = Self::new(READ_WRITE, 0x06);
    pub(super) const STOP: Self = Self::new(READ_WRITE, 0x07);
    pub(super) const SET_PARAMETERS: Self = Self::new(READ_WRITE, 0x08);
    pub(super) const GET_PARAMETERS: Self = Self::new(READ, 0x09);
    pub(super) const GET_INFO: Self = Self::new(READ, 0x02);
    pub(super) const START_RECOVERY: Self = Self::new(READ_WRITE, 0x10);
    pub(super) const END_RECOVERY: Self = Self::new(READ_WRITE, 0x11);
    /// Deletes a device once its last user has closed it.
    pub(super) const DELETE_LATER: Self = Self::new(READ, 0x14);

    const fn new(direction: u32, number: u32) -> Self {
        Self(encoded(direction, number, size_of::<ControlCommand>()))
    }
}

const READ: u32 = 2;
const READ_WRITE: u32 = 3;

#[expect(clippy::cast_possible_truncation, reason = "each command block is short")]
const fn encoded(direction: u32, number: u32, bytes: usize) -> u32 {
    direction << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | number
}

/// Features that a device is added with.
pub(super) mod feature {
    /// The device outlives its server; requests wait for the next one.
    pub(in crate::ublk) const RECOVERY: u64 = 1 << 3;
    /// Requests that the old server had not answered go to the next one.
    pub(in crate::ublk) const REISSUE: u64 = 1 << 4;
    /// Commands are encoded as those of `ioctl`.
    pub(in crate::ublk) const ENCODED: u64 = 1 << 6;
}

/// The states of a device.
pub(super) mod state {
    /// Not started yet, or stopped.
    pub(in crate::ublk) const DEAD: u16 = 0;
    /// Its server is gone; requests wait for the next one.
    pub(in crate::ublk) const QUIESCED: u16 = 2;
}

/// The operations of requests.
pub(super) mod op {
    pub(in crate::ublk) const READ: u32 = 0;
    pub(in crate::ublk) const WRITE: u32 = 1;
    pub(in crate::ublk) const FLUSH: u32 = 2;
    pub(in crate::ublk) const DISCARD: u32 = 3;
    pub(in crate::ublk) const WRITE_ZEROES: u32 = 5;
    /// The bits of a descriptor's `op_flags` that hold the operation.
    pub(in crate::ublk) const MASK: u32 = 0xff;
    pub(in crate::ublk) const FLAG_FUA: u32 = 1 << 13;
    pub(in crate::ublk) const FLAG_NO_UNMAP: u32 = 1 << 15;
}

/// Attributes of a device.
pub(super) mod attribute {
    pub(in crate::ublk) const READ_ONLY: u32 = 1 << 0;
    pub(in crate::ublk) const VOLATILE_CACHE: u32 = 1 << 2;
    pub(in crate::ublk) const FUA: u32 = 1 << 3;
}

/// The groups of [`Parameters`] that are set.
pub(super) mod group {
    pub(in crate::ublk) const BASIC: u32 = 1 << 0;
    pub(in crate::ublk) const DISCARD: u32 = 1 << 1;
}

/// The command block of a [`Command`].
#[derive(Debug, Clone, Copy, FromZeros, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct ControlCommand {
    pub(super) device: u32,
    /// [`NO_QUEUE`] unless the command is for a queue.
    pub(super) queue: u16,
    /// Length of the memory at `address`.
    pub(super) len: u16,
    pub(super) address: u64,
    pub(super) data: u64,
    pub(super) path_len: u16,
    pub(super) pad: u16,
    pub(super) reserved: u32,
}

/// The queue of a command that is for no queue.
pub(super) const NO_QUEUE: u16 = u16::MAX;
/// The number of a new device whose number the kernel chooses.
pub(super) const ANY_NUMBER: u32 = u32::MAX;

/// A device as the driver knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct DeviceInfo {
    pub(super) queues: u16,
    /// Tags of each queue.
    pub(super) depth: u16,
    /// One of [`state`].
    pub(super) state: u16,
    pub(super) pad0: u16,
    pub(super) buffer_bytes: u32,
    pub(super) number: u32,
    pub(super) server_pid: i32,
    pub(super) pad1: u32,
    /// Of [`feature`].
    pub(super) features: u64,
    /// A number that the driver keeps for the server.
    pub(super) server_mark: u64,
    pub(super) owner_uid: u32,
    pub(super) owner_gid: u32,
    pub(super) reserved: [u64; 2],
}

/// Parameters of a device; later groups of the kernel's struct are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Parameters {
    /// [`Self::BYTES`].
    pub(super) len: u32,
    /// Of [`group`].
    pub(super) groups: u32,
    /// Of [`attribute`].
    pub(super) attributes: u32,
    pub(super) logical_block_shift: u8,
    pub(super) physical_block_shift: u8,
    pub(super) best_shift: u8,
    pub(super) least_shift: u8,
    pub(super) max_sectors: u32,
    pub(super) chunk_sectors: u32,
    pub(super) sectors: u64,
    pub(super) boundary_mask: u64,
    pub(super) discard_alignment: u32,
    pub(super) discard_granularity: u32,
    pub(super) max_discard_sectors: u32,
    pub(super) max_zeroes_sectors: u32,
    pub(super) max_discard_segments: u16,
    pub(super) reserved: u16,
    /// Numbers of the device files, which the kernel fills in.
    pub(super) device_files: [u32; 4],
    pub(super) rest: u32,
}

impl Parameters {
    /// Length of this struct.
    pub(super) const BYTES: u32 = 80;
}

/// The command block of [`FETCH`] and [`COMMIT_AND_FETCH`].
#[derive(Debug, Clone, Copy, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct IoCommand {
    pub(super) queue: u16,
    pub(super) tag: u16,
    /// The answer: bytes, 0, or a negative error number.
    pub(super) result: i32,
    /// Address of the tag's buffer.
    pub(super) address: u64,
}

/// A request, in memory that the driver writes and the server reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(super) struct Descriptor {
    /// Of [`op`].
    pub(super) op_flags: u32,
    pub(super) sectors: u32,
    pub(super) first_sector: u64,
    pub(super) address: u64,
}

/// The most tags of a queue, from which offsets of descriptors follow.
pub(super) const DEPTH_MAX: usize = 4096;

const _: () = {
    assert!(size_of::<ControlCommand>() == 32);
    assert!(size_of::<DeviceInfo>() == 64);
    assert!(size_of::<Parameters>() == Parameters::BYTES as usize);
    assert!(size_of::<IoCommand>() == 16);
    assert!(size_of::<Descriptor>() == 24);
    assert!(std::mem::offset_of!(Parameters, sectors) == 24);
    assert!(std::mem::offset_of!(Parameters, discard_alignment) == 40);
    assert!(std::mem::offset_of!(Parameters, device_files) == 60);
    assert!(FETCH == 0xc010_7520);
    assert!(Command::ADD.0 == 0xc020_7504);
    assert!(Command::GET_INFO.0 == 0x8020_7502);
};
