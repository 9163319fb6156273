//! Which backing the records of a log are for.

use super::super::record::Definition;

/// What a log remembers of its backing: the log's definition of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// What tells the backing from all others: [`identity`](super::super::identity) for a file.
    pub identity: u64,
    /// Absolute path of a file or disk, by which `tidegate recover` finds it; `/(NAME)` for all
    /// others.
    pub path: Vec<u8>,
}

impl Binding {
    /// The backing whose path or URL is `name`.
    pub fn new(identity: u64, name: &[u8]) -> Self {
        let path = match name {
            [b'/', ..] => name.to_vec(),
            url => [b"/(", url, b")"].concat(),
        };
        Self { identity, path }
    }

    /// A backing that is no file, for tests and simulation.
    pub fn unnamed(identity: u64) -> Self {
        Self::new(identity, b"unnamed")
    }

    pub(super) fn definition(&self) -> Definition<'_> {
        // The log's records know files; what a device has no numbers for is that of an ordinary
        // file.
        let (device, inode, mode) = (0, self.identity, 0o100_600);
        let (identity, path) = (self.identity, &self.path);
        Definition { identity, device, inode, mode, uid: 0, gid: 0, born: false, path }
    }
}
