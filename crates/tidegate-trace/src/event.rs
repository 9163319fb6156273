//! Operations of a program or a client, in one form for all formats.

/// A file or a device of a trace, numbered from 0 in the order of appearance. The reader resolves
/// names, descriptors and positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// An operation and the time of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Microseconds since the first event of the trace.
    pub time_us: u64,
    /// The thread, process or queue that made the request. Events of one stream are in order.
    pub stream: u32,
    /// The requested operation.
    pub op: Op,
}

/// A requested operation. Offsets and lengths are in bytes and not rounded to pages, because the
/// schemes treat partial pages differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// `len_bytes` from `offset_bytes` were read.
    Read {
        /// The file.
        file: FileId,
        /// Start of the range.
        offset_bytes: u64,
        /// Length of the range.
        len_bytes: u64,
    },
    /// `len_bytes` from `offset_bytes` were written.
    Write {
        /// The file.
        file: FileId,
        /// Start of the range.
        offset_bytes: u64,
        /// Length of the range.
        len_bytes: u64,
    },
    /// A file was made durable: fsync, fdatasync, a flush of a device.
    Sync {
        /// The file.
        file: FileId,
    },
    /// All files were made durable: sync, syncfs.
    SyncAll,
    /// The length of a file was set; bytes behind the new end are gone.
    Resize {
        /// The file.
        file: FileId,
        /// The new length in bytes.
        len_bytes: u64,
    },
    /// A file was removed, or replaced by a rename. Its dirty pages need no write-back.
    Remove {
        /// The file.
        file: FileId,
    },
}

impl Op {
    /// Returns the operation's file, or `None` if it is about all files.
    pub fn file_mut(&mut self) -> Option<&mut FileId> {
        match self {
            Self::Read { file, .. }
            | Self::Write { file, .. }
            | Self::Sync { file }
            | Self::Resize { file, .. }
            | Self::Remove { file } => Some(file),
            Self::SyncAll => None,
        }
    }
}
