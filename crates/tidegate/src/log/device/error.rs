//! The errors of opening a log as a device.

use super::super::error::{AppendError, LogError};
use crate::device::DeviceError;
use crate::log::pool::losses::DeviceLoss;
use crate::pmem::PmemError;

/// An error of opening a [`LogDevice`](super::LogDevice).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogDeviceError {
    /// The log itself cannot be used.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The backing failed, or is not suitable.
    #[error(transparent)]
    Backing(#[from] DeviceError),
    /// The log has records for another backing.
    #[error(
        "the log holds {records} records for another backing, {path}: use that one, or say that this one is to get them"
    )]
    OtherBacking {
        /// Path of that backing in the log.
        path: String,
        /// Its records.
        records: u64,
    },
    /// The log has records of files.
    #[error("the log holds {records} records of files: destage them with `tidegate recover`")]
    Files {
        /// Number of records.
        records: u64,
    },
    /// A record lies outside the backing.
    #[error(
        "the log holds {len} bytes at offset {offset}, and the backing has {size_bytes} bytes in blocks of {block_bytes}: it \
         was cut short, has other blocks, or is another one; make it as it was, or name the right one"
    )]
    Misfit {
        /// First byte of the record.
        offset: u64,
        /// Its bytes.
        len: u64,
        /// Size of the backing.
        size_bytes: u64,
        /// Size of its blocks.
        block_bytes: u32,
    },
    /// Records were lost with the memory that they were in.
    #[error(
        "{bytes} bytes of the log cannot be read: acknowledged writes may be lost, restore from a backup"
    )]
    Unreadable {
        /// Bytes that cannot be read.
        bytes: u64,
    },
    /// Records that were acknowledged are damaged or not there any more.
    #[error(
        "{}{}; restore from a backup, or go on without by `tidegate recover --salvage`",
        losses[0],
        match losses.len() { 1 => String::new(), number => format!(", and {} more", number - 1) }
    )]
    Lost {
        /// The losses; not empty.
        losses: Vec<DeviceLoss>,
    },
    /// The log did not take the definition of the device.
    #[error("the log cannot say which backing it is for")]
    Define(#[source] AppendError),
    /// The kernel refused a thread.
    #[error("the cleaner's thread cannot be started")]
    Thread(#[source] std::io::Error),
}

impl From<PmemError> for LogDeviceError {
    fn from(error: PmemError) -> Self {
        Self::Log(error.into())
    }
}
