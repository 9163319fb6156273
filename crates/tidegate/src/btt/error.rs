//! Errors of a BTT.

use crate::device::{DeviceError, DeviceErrorKind};
use crate::pmem::PmemError;

/// An error of the BTT engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BttError {
    /// The region holds no BTT: neither info block position has the signature.
    #[error(
        "no BTT found: no info block at offset 0 (version 2.0) or 4096 (version 1.1), and no pool of libpmemblk"
    )]
    NotFound,
    /// The header of a pool of libpmemblk is damaged, or contradicts the BTT behind it.
    #[error(
        "libpmemblk pool: {reason}; copy the data off with `tidegate serve --read-only`, or restore the pool from a backup"
    )]
    PoolDamaged {
        /// The fault.
        reason: String,
    },
    /// A pool of libpmemblk has a form that only libpmemblk can open.
    #[error("libpmemblk pool: {reason}; copy its data with a program of PMDK 1.x")]
    PoolUnsupported {
        /// The fact that is not supported.
        reason: String,
    },
    /// A pool of libpmemblk has no BTT yet, and is read-only.
    #[error(
        "libpmemblk pool: nothing was ever written to it, so there is nothing to read; open it for writing once"
    )]
    NeverWritten,
    /// An info block is damaged.
    #[error(
        "BTT arena {arena}: info block at offset {offset} is damaged: {reason}; `tidegate check --repair` restores it from the second copy where that is whole"
    )]
    InfoDamaged {
        /// Number of the arena, from 0.
        arena: usize,
        /// Offset of the info block in the region, in bytes.
        offset: u64,
        /// The fault.
        reason: String,
    },
    /// An info block is damaged, and its second copy cannot be found.
    #[error(
        "BTT arena {arena}: info block at offset {offset} is damaged: {reason}; no second copy is found at the arena's end, \
         restore the pool from a backup"
    )]
    InfoLost {
        /// Number of the arena, from 0.
        arena: usize,
        /// Offset of the info block in the region, in bytes.
        offset: u64,
        /// The fault.
        reason: String,
    },
    /// The file ends before an arena does: the arena's map and flog, which are at its end, are cut
    /// off.
    #[error(
        "BTT arena {arena}: it ends at {needed_bytes} bytes, but the pool has only {found_bytes} bytes: it was cut off, and the map of its blocks with it; \
         copy it again from where it is whole, or restore it from a backup"
    )]
    Truncated {
        /// Number of the arena, from 0.
        arena: usize,
        /// End of the arena in the region, in bytes; if its info block is cut off too, a lower
        /// bound.
        needed_bytes: u64,
        /// Size of the region.
        found_bytes: u64,
    },
    /// A write to the arena could destroy other blocks: its map or flog is damaged.
    #[error(
        "BTT arena {arena}: {first} ({faults} faults in all), so a write to one block may destroy another: \
         `tidegate check --repair` repairs what can be proved; or copy the data off with \
         `tidegate serve --read-only` to a new pool; --force writes all the same"
    )]
    Unwritable {
        /// Number of the arena, from 0.
        arena: usize,
        /// Number of faults.
        faults: u64,
        /// The first fault.
        first: String,
    },
    /// A block has several owners.
    #[error(
        "block {lba} cannot be told from another: the map or the flog is damaged where it says who has block {block} of the arena; --force reads it all the same"
    )]
    BlockDisputed {
        /// The lba in its arena.
        lba: u32,
        /// The block in its arena.
        block: u32,
    },
    /// A map entry points outside the arena.
    #[error(
        "BTT map entry of lba {lba} points at block {block}, but the arena has {blocks} blocks"
    )]
    MapDamaged {
        /// The lba in its arena.
        lba: u32,
        /// The block it points at.
        block: u32,
        /// Number of blocks in the arena.
        blocks: u32,
    },
    /// The block was marked as lost by an earlier media error; a write makes it good again.
    #[error("block {lba} was lost to an earlier media error; writing it makes it good again")]
    BlockLost {
        /// The lba in its arena.
        lba: u32,
    },
    /// Every lane of the arena has failed: its free blocks or its flog cannot be written.
    #[error("BTT arena {arena}: no lane can be written any more; copy the data off this pool")]
    NoLanes {
        /// Number of the arena, from 0.
        arena: usize,
    },
    /// The options of `create` cannot be met.
    #[error("{0}")]
    Options(String),
    /// The memory below failed.
    #[error("persistent memory failed")]
    Pmem(#[from] PmemError),
}

impl From<BttError> for DeviceError {
    fn from(error: BttError) -> Self {
        let kind = match error {
            BttError::Pmem(error) => return error.into(),
            BttError::BlockLost { .. } | BttError::NoLanes { .. } => DeviceErrorKind::Io,
            BttError::Options(_) | BttError::PoolUnsupported { .. } | BttError::NeverWritten => {
                DeviceErrorKind::Unsupported
            }
            BttError::NotFound
            | BttError::PoolDamaged { .. }
            | BttError::InfoDamaged { .. }
            | BttError::Truncated { .. }
            | BttError::InfoLost { .. }
            | BttError::Unwritable { .. }
            | BttError::BlockDisputed { .. }
            | BttError::MapDamaged { .. } => DeviceErrorKind::Corrupt,
        };
        Self::new(kind, error.to_string())
    }
}
