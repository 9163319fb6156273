//! What a program or a client did, the same for all formats.

/// A file or a device of a trace. A reader numbers them from 0 in the order in which they appear;
/// names, descriptors and positions are the reader's own business.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// One operation, and when it was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Microseconds since the first event of the trace.
    pub time_us: u64,
    /// The thread, process or queue that asked: events of one are in order.
    pub stream: u32,
    /// What was asked for.
    pub op: Op,
}

/// What was asked for. Offsets and lengths are those of the request, in bytes: whether they end
/// inside a page is what the schemes differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// `len_bytes` from `offset_bytes` were read.
    Read {
        /// Of which file.
        file: FileId,
        /// From where.
        offset_bytes: u64,
        /// How much.
        len_bytes: u64,
    },
    /// `len_bytes` from `offset_bytes` were written.
    Write {
        /// To which file.
        file: FileId,
        /// From where.
        offset_bytes: u64,
        /// How much.
        len_bytes: u64,
    },
    /// All of a file was made durable: fsync, fdatasync, a flush of a device.
    Sync {
        /// Which file.
        file: FileId,
    },
    /// All files were made durable: sync, syncfs.
    SyncAll,
    /// A file has now this length: what lies behind is gone.
    Resize {
        /// Which file.
        file: FileId,
        /// Its length in bytes.
        len_bytes: u64,
    },
    /// A file is gone: removed, or replaced by a rename. Its dirty pages need no write-back.
    Remove {
        /// Which file.
        file: FileId,
    },
}

impl Op {
    /// The file that it is of; none for all files.
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
