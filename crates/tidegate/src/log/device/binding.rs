//! Which backing the records of a log are for.

use super::super::record::{Definition, FileHandle};

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
        // The log's records know files; a device has neither file system nor numbers.
        let Self { identity, ref path } = *self;
        Definition {
            identity,
            file_system: [0; 16],
            handle: FileHandle::NONE,
            covered: false,
            starts: false,
            size_bytes: 0,
            device: 0,
            inode: identity,
            path,
        }
    }
}
