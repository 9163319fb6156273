//! Keeps each file of this machine out of all pools' logs but one.
//!
//! Two logs of one file would each replay over the other's changes. So a supervisor claims a file
//! before it notes that it holds the file's descriptor. The claim is a lock on one byte of a file
//! in shared memory, which all users may open. Device and inode of the claimed file give the byte's
//! number. The kernel frees the locks of a supervisor that was killed.
//!
//! Two files with equal bytes keep each other out, which makes the second one's syncs real. Nothing
//! is claimed if the shared file cannot be used, as when another user has put something else there,
//! nor between containers that do not share it.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use super::kernel::{ByteLock, lock_byte};

const REGISTRY: &str = "/dev/shm/tidegate.files";

/// The files that this supervisor has claimed.
#[derive(Debug)]
pub(crate) struct Registry {
    file: Option<Arc<File>>,
}

/// A claimed file. Dropping it frees the file.
#[derive(Debug)]
pub(crate) struct Claim(Option<(Arc<File>, i64)>);

impl Default for Registry {
    fn default() -> Self {
        Self::at(Path::new(REGISTRY))
    }
}

impl Registry {
    fn at(path: &Path) -> Self {
        Self { file: open(path).ok().map(Arc::new) }
    }

    /// Claims a file.
    ///
    /// # Errors
    /// Fails with `ResourceBusy` if the file is in the log of another pool.
    pub(crate) fn claim(&self, file: &File) -> io::Result<Claim> {
        let Some(registry) = &self.file else { return Ok(Claim(None)) };
        let metadata = file.metadata()?;
        let byte = byte_of(metadata.dev(), metadata.ino());
        if lock_byte(registry, byte, ByteLock::Taken)? {
            Ok(Claim(Some((Arc::clone(registry), byte))))
        } else {
            Err(io::ErrorKind::ResourceBusy.into())
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some((registry, byte)) = &self.0 {
            // Freeing fails only without memory: the file then stays claimed by this process.
            let _ = lock_byte(registry, *byte, ByteLock::Free);
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    let open = |creates| {
        let mut options = OpenOptions::new();
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        options.read(true).write(true).create_new(creates).custom_flags(flags).open(path)
    };
    match open(false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    match open(true) {
        Ok(file) => {
            // All users may open it, whatever this user's mask is.
            file.set_permissions(Permissions::from_mode(0o666))?;
            Ok(file)
        }
        // Another supervisor made it first.
        Err(_) => open(false),
    }
}

/// Returns the number of the byte that stands for a file.
fn byte_of(device: u64, inode: u64) -> i64 {
    let mixed = (inode ^ device.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 2).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_claimed_by_one_supervisor_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("files");
        let (one, other) = (Registry::at(&path), Registry::at(&path));
        let [file, second] = ["a", "b"].map(|name| File::create(directory.path().join(name)));
        let (file, second) = (file.unwrap(), second.unwrap());
        let claim = one.claim(&file).unwrap();
        assert_eq!(other.claim(&file).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        other.claim(&second).unwrap();
        drop(claim);
        other.claim(&file).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o666);
    }

    #[test]
    fn without_a_registry_nothing_is_claimed() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::at(directory.path());
        let file = File::create(directory.path().join("a")).unwrap();
        let _claim = registry.claim(&file).unwrap();
        registry.claim(&file).unwrap();
    }
}
