//! The errors of a log.

use crate::pmem::{LockFailure, PmemError};
use crate::pool::PoolError;

/// An error of opening, making or cleaning a log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// The pool under the log cannot be used.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The memory failed.
    #[error(transparent)]
    Pmem(#[from] PmemError),
    /// Neither copy of the log's header is whole.
    #[error(
        "the log's header is damaged in both copies: found checksum {found:#018x}, expected {expected:#018x}; \
         nothing in the log can be told from chance, restore the pool or make a new one"
    )]
    Header {
        /// The checksum in the first copy.
        found: u64,
        /// The checksum of its bytes.
        expected: u64,
    },
    /// The log is of a format that this build does not know.
    #[error(
        "the log has format {found}, this release of tidegate reads TIDELOG4 and TIDELOG3: recover the pool by the \
         release that made it, then create it anew"
    )]
    Format {
        /// The log's magic, printable.
        found: String,
    },
    /// Both copies of the tail or of the limit are damaged.
    #[error(
        "the log's {field} is damaged in both copies: `tidegate check --repair` finds it by the records, where \
         they prove it; otherwise restore the pool from a backup, or give its records up by \
         `tidegate create --force`"
    )]
    Position {
        /// Tail or limit.
        field: &'static str,
    },
    /// A number on the medium is out of its range.
    #[error("the log's {field} is {found}, expected {expected}")]
    Inconsistent {
        /// Name of the number.
        field: &'static str,
        /// The number.
        found: u64,
        /// The expected value or range, in words.
        expected: &'static str,
    },
    /// The log holds writes to a device, not to files of programs.
    #[error(
        "the log holds writes to the device {backing}: destage them by `tidegate recover`, or serve the pool with \
         that --backing"
    )]
    OfDevice {
        /// The path or URL of the device.
        backing: String,
    },
    /// The pool is too small for a log.
    #[error(
        "the pool has free space for a log of {found_bytes} bytes, at least {least_bytes} are needed"
    )]
    TooSmall {
        /// Bytes for the ring.
        found_bytes: u64,
        /// The least.
        least_bytes: u64,
    },
    /// No space is left for the notes of recovery.
    #[error("the log has no space left for the notes of its recovery")]
    NoteSpace,
    /// The control memory belongs to another pool or to another version.
    #[error(
        "the control memory does not belong to this pool: stop all that uses the pool, and remove it"
    )]
    ForeignControl,
    /// A lock of the control memory was not acquired.
    #[error("a lock of the control memory was not had")]
    Lock(#[source] LockFailure),
    /// More files are in use than the table holds.
    #[error("the table of files is full: {most} files are in use at once")]
    TableFull {
        /// Files that the table holds.
        most: u64,
    },
}

/// Why a file's lock was not acquired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LockError {
    /// The entry belongs to another file by now.
    #[error("the entry belongs to another file by now")]
    Stale,
    /// The holder did not release the lock in time.
    #[error("the lock of the file is held")]
    Busy,
    /// This thread holds the lock: a signal handler has interrupted an operation on the same file.
    #[error("this thread holds the lock of the file")]
    Reentered,
}

/// Why a record was not appended. Recovery ignores any part that was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// The log has no free space until the cleaner moves the tail.
    #[error("the log is full")]
    Full,
    /// More operations are in progress than there are slots.
    #[error("no slot is free")]
    NoSlot,
    /// The record is larger than a quarter of the log.
    #[error("the record is too large for the log")]
    TooLarge,
    /// The record's content is impossible for a file, or exceeds the format's limits.
    #[error("the record makes no sense")]
    Unsound,
    /// The memory failed.
    #[error("the memory of the log failed")]
    Memory,
}
