//! Which backing the records of a log are for.

use super::super::record::{Definition, FileHandle};

/// What a log remembers of its backing, as a file: the log's definition of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// What tells the backing from all others: [`identity`](super::super::identity) for a file.
    pub identity: u64,
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Absolute path.
    pub path: Vec<u8>,
}

impl Binding {
    /// A backing that is no file, for tests and simulation.
    pub fn unnamed(identity: u64) -> Self {
        let path = b"/(unnamed)".to_vec();
        Self { identity, device: 0, inode: identity, path }
    }

    pub(super) fn definition(&self) -> Definition<'_> {
        let Self { identity, device, inode, ref path } = *self;
        let (file_system, handle) = ([0; 16], FileHandle::NONE);
        let (covered, size_bytes) = (false, 0);
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
}
