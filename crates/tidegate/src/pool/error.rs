//! The errors of pools.

use super::content::Content;
use super::superblock::CopyFault;
use crate::btt::BttError;
use crate::device::{DeviceError, DeviceErrorKind};
use crate::pmem::PmemError;
use crate::tier::EngineCode;

/// An error of a pool's superblock.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// There is no Tidegate superblock.
    #[error("no Tidegate superblock found, the pool starts with {found}: create a pool first")]
    NotAPool {
        /// The content at the start of the pool.
        found: Content,
    },
    /// A superblock was here, but neither copy can be trusted.
    #[error(
        "both superblocks are damaged: the first {first}, the second {second}; restore the pool from a backup"
    )]
    Damaged {
        /// The fault of the copy at the start.
        first: CopyFault,
        /// The fault of the copy at the end.
        second: CopyFault,
    },
    /// The pool is too small for its engine.
    #[error("{found_bytes} bytes are too few for a pool: this engine needs at least {least_bytes}")]
    TooSmall {
        /// Size of the pool in bytes.
        found_bytes: u64,
        /// The smallest sufficient size in bytes.
        least_bytes: u64,
    },
    /// The file is shorter than the pool in it.
    #[error(
        "the pool was made with {expected_bytes} bytes, but only {found_bytes} are there: it was cut short, restore the rest"
    )]
    Truncated {
        /// Size that the superblock gives, in bytes.
        expected_bytes: u64,
        /// Size of the region in bytes.
        found_bytes: u64,
    },
    /// A later Tidegate made this pool.
    #[error("the superblock has version {found}, this program knows {known}: use a later Tidegate")]
    UnknownVersion {
        /// Version of the superblock.
        found: u32,
        /// The version that this program knows.
        known: u32,
    },
    /// The pool uses features that this program does not know.
    #[error(
        "the pool uses {class} features {bits:#x} that this program does not know: use a later Tidegate{hint}"
    )]
    UnknownFeatures {
        /// The class: features that forbid all access, or only writes.
        class: &'static str,
        /// The unknown bits.
        bits: u64,
        /// An alternative for the user.
        hint: &'static str,
    },
    /// The pool belongs to another engine.
    #[error(
        "the pool was made for the engine with {found}, expected {expected}: open it with that engine"
    )]
    WrongEngine {
        /// The engine that the superblock names.
        found: EngineCode,
        /// The engine that was asked to open it.
        expected: EngineCode,
    },
    /// A field makes no sense although the checksum is right.
    #[error(
        "the superblock's {field} is {found}, expected {expected}: the pool was made by a faulty program"
    )]
    Inconsistent {
        /// The field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The values that would be valid.
        expected: String,
    },
    /// The block size asked for is impossible.
    #[error("block size of {found} bytes: it must be 512, 1024, 2048 or 4096")]
    BlockBytes {
        /// The block size asked for.
        found: u32,
    },
    /// The persistent memory failed.
    #[error("persistent memory under the pool failed")]
    Pmem(#[from] PmemError),
    /// The search for a BTT failed.
    #[error("the search for a BTT failed")]
    Btt(#[from] BttError),
}

impl From<PoolError> for DeviceError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Pmem(error) => error.into(),
            PoolError::Btt(error) => error.into(),
            other => {
                let kind = match &other {
                    PoolError::TooSmall { .. } => DeviceErrorKind::NoSpace,
                    PoolError::UnknownVersion { .. }
                    | PoolError::UnknownFeatures { .. }
                    | PoolError::WrongEngine { .. }
                    | PoolError::BlockBytes { .. } => DeviceErrorKind::Unsupported,
                    _ => DeviceErrorKind::Corrupt,
                };
                Self::with_source(kind, "the pool cannot be used", other)
            }
        }
    }
}
