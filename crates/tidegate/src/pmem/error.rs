//! Errors of persistent memory.

use std::path::PathBuf;

use crate::opening::Expected;

/// An error of a [`Region`](super::Region).
#[derive(Debug, thiserror::Error)]
pub enum PmemError {
    /// An access passes the end of the region: a bug of the caller or a corrupt offset.
    #[error(
        "access to {len} bytes at offset {offset} passes the end of a region of {region_bytes} bytes"
    )]
    OutOfRange {
        /// First byte of the access.
        offset: u64,
        /// Length of the access in bytes.
        len: u64,
        /// Size of the region in bytes.
        region_bytes: u64,
    },
    /// The memory itself failed: the access hit a missing page. The page is poisoned, the file
    /// under the mapping shrank, or the file is sparse and the disk is full.
    #[error(
        "memory error in the {len} bytes at offset {offset}: the page is poisoned or gone, or the file is sparse and its file system full"
    )]
    Poisoned {
        /// First byte of the access.
        offset: u64,
        /// Length of the access in bytes.
        len: u64,
    },
    /// The region was opened read-only.
    #[error("the region is read-only")]
    ReadOnly,
    /// An earlier write-back of this region failed; nothing can be promised durable any more.
    #[error(
        "an earlier write-back failed with OS error {errno}: the region no longer promises durability"
    )]
    WritebackFailed {
        /// The operating system's error number.
        errno: i32,
    },
    /// The region cannot become so long: it was opened with a smaller limit.
    #[error(
        "{path} cannot grow to {len_bytes} bytes: it was opened with a limit of {limit_bytes} bytes"
    )]
    Limit {
        /// The file.
        path: PathBuf,
        /// The length that was asked for, in bytes.
        len_bytes: u64,
        /// The most bytes that the region can have.
        limit_bytes: u64,
    },
    /// A word access whose offset is not a multiple of the word's size: a bug of the caller or a
    /// corrupt offset.
    #[error("offset {offset} of a word is not a multiple of {align_bytes}")]
    Misaligned {
        /// First byte of the access.
        offset: u64,
        /// Size of the word in bytes.
        align_bytes: u64,
    },
    /// Another process, or this one, has the pool open.
    #[error("{path} is in use: it is open already, stop the process that uses it and try again")]
    Busy {
        /// The pool file.
        path: PathBuf,
    },
    /// A symbolic link points to a missing file.
    #[error(
        "{path} is a link to {target}, which is not there; make what it points to, or remove the link"
    )]
    DanglingLink {
        /// The link.
        path: PathBuf,
        /// Where it points to.
        target: PathBuf,
    },
    /// The file has no bytes to map.
    #[error("{path} holds 0 bytes: a pool is expected, create one first")]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The path names something that cannot be mapped as persistent memory.
    #[error("{path} is {found}: {} is expected, name one", Expected::Pool)]
    NotMappable {
        /// The path.
        path: PathBuf,
        /// The kind of file that was found.
        found: &'static str,
    },
    /// The operating system refused an operation on the file under the region.
    #[error("cannot {action} {path}")]
    Os {
        /// The action that failed, as in "cannot *map* /mnt/pmem/pool".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
}

/// A user's name or number that makes no sense, with the expected ones in the message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ParseError {
    message: String,
}

impl ParseError {
    pub(super) fn new(message: String) -> Self {
        Self { message }
    }
}
