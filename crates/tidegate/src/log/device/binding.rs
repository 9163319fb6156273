//! Which backing the records of a log are for.

use super::super::record::Definition;

/// What a log remembers of its backing, as a file: the log's definition of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// What tells the backing from all others: [`identity`](super::super::identity) for a file.
    pub identity: u64,
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Type and permissions, as in `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Absolute path.
    pub path: Vec<u8>,
}

impl Binding {
    /// A backing that is no file, for tests and simulation.
    pub fn unnamed(identity: u64) -> Self {
        let path = b"/(unnamed)".to_vec();
        Self { identity, device: 0, inode: identity, mode: 0o100_600, uid: 0, gid: 0, path }
    }

    pub(super) fn definition(&self) -> Definition<'_> {
        let Self { identity, device, inode, mode, uid, gid, .. } = *self;
        Definition { identity, device, inode, mode, uid, gid, born: false, path: &self.path }
    }
}
