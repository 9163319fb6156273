//! The backing that the records of a log are for.

use crate::log::pool::record::{Definition, FileHandle};

/// The identity of a log's backing, in the log's definition of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// Distinguishes the backing from all others: [`identity`](super::super::identity) for a file.
    pub identity: u64,
    /// Absolute path of a file or disk, for `tidegate recover`; `/(NAME)` for all others.
    pub path: Vec<u8>,
}

impl Binding {
    /// Creates the binding of the backing whose path or URL is `name`.
    pub fn new(identity: u64, name: &[u8]) -> Self {
        let path = match name {
            [b'/', ..] => name.to_vec(),
            url => [b"/(", url, b")"].concat(),
        };
        Self { identity, path }
    }

    /// Returns the path or URL that [`new`](Self::new) has converted to `path`.
    pub fn name_of(path: &[u8]) -> &[u8] {
        let url = path.strip_prefix(b"/(").and_then(|rest| rest.strip_suffix(b")"));
        url.filter(|url| url.contains(&b':')).unwrap_or(path)
    }

    /// Creates the binding of a backing that is no file, for tests and simulation.
    pub fn unnamed(identity: u64) -> Self {
        Self::new(identity, b"unnamed")
    }

    pub(super) fn definition(&self) -> Definition<'_> {
        // The log's records name files; a device has neither file system nor inode numbers.
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_binding_keeps_paths_and_urls() {
        for name in ["/srv/disk", "/(disk)", "nbd://host/x", "null:1M"] {
            let binding = Binding::new(1, name.as_bytes());
            assert!(binding.path.starts_with(b"/"), "as the log's records need it");
            assert_eq!(Binding::name_of(&binding.path), name.as_bytes());
        }
    }
}
