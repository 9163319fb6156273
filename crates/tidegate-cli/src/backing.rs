//! The device behind a log: how it is named on the command line, opened, and told from all others.

use std::fs::{File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use tidegate::device::BlockDevice;
use tidegate::device::file::{FileDevice, FileOptions};
use tidegate::log::device::Binding;
use tidegate::log::identity;
use tidegate::log::recover::identity_of;
use tidegate::pool::{Glance, glance};

/// A backing as `--backing` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackingAddress {
    /// A file or a block device.
    pub(crate) path: PathBuf,
}

impl FromStr for BackingAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = text.strip_prefix("file:").unwrap_or(text);
        if path.is_empty() {
            return Err("expected a path, or file:PATH".into());
        }
        if path.contains("://") {
            return Err(
                "this release has backings that are files or block devices only: file:PATH".into(),
            );
        }
        Ok(Self { path: path.into() })
    }
}

impl std::fmt::Display for BackingAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "file:{}", self.path.display())
    }
}

/// A backing that nobody else uses.
pub(crate) struct Backing {
    /// The file or disk itself.
    pub(crate) device: FileDevice,
    /// What the log is to remember of it.
    pub(crate) binding: Binding,
    /// Keeps others out until it is closed, as pools are locked: a backing, as a disk alone, is not up to date.
    pub(crate) lock: File,
}

/// Opens the backing for the log pool at `pool`.
///
/// # Errors
/// It is not there, in use, neither file nor block device, smaller than a block, or the pool itself.
pub(crate) fn open(address: &BackingAddress, pool: &Path) -> Result<Backing> {
    let cannot_open = || format!("cannot open the backing {address}");
    let lock = File::options().read(true).write(true).open(&address.path);
    let lock = lock.with_context(cannot_open)?;
    // It would write its records over itself.
    if is_at(&lock, pool).with_context(cannot_open)? {
        bail!("the backing {address} is the log pool itself: name another file, or a block device");
    }
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => {
            bail!(
                "the backing {address} is in use: another program has it locked, such as `tidegate serve`"
            )
        }
        locked => locked.with_context(cannot_open)?,
    }
    let device = FileDevice::open(&address.path, &FileOptions::default())?;
    let geometry = device.geometry();
    if geometry.blocks == 0 {
        bail!("the backing {address} has not one block of {} bytes", geometry.block_bytes);
    }
    let binding = binding_of(&address.path)
        .with_context(|| format!("cannot tell {address} from other backings"))?;
    Ok(Backing { device, binding, lock })
}

/// Whether `file` is open at `path`.
fn is_at(file: &File, path: &Path) -> std::io::Result<bool> {
    let number = |found: &Metadata| (found.dev(), found.ino());
    Ok(number(&file.metadata()?) == number(&std::fs::metadata(path)?))
}

/// The pool that the backing holds, if it does, and which the log's writes would destroy.
///
/// # Errors
/// It cannot be read.
pub(crate) fn pool_in(address: &BackingAddress, backing: &Backing) -> Result<Option<Glance>> {
    let found = glance(&backing.lock);
    let found = found.with_context(|| format!("cannot read the backing {address}"))?;
    Ok(Some(found).filter(|found| !matches!(found, Glance::Unknown(_))))
}

fn binding_of(path: &Path) -> Result<Binding> {
    let path = path.canonicalize()?;
    let file = File::open(&path)?;
    let metadata = file.metadata()?;
    let identity = if metadata.file_type().is_block_device() {
        identity_of_disk(&path, &metadata)
    } else {
        // A file system without handles: by the file's number and the moment of its birth.
        identity_of(&file).or_else(|_| identity_without_handle(&metadata))?
    };
    Ok(Binding {
        identity,
        device: metadata.dev(),
        inode: metadata.ino(),
        path: path.as_os_str().as_bytes().to_vec(),
    })
}

fn identity_without_handle(metadata: &Metadata) -> std::io::Result<u64> {
    let born = metadata.created()?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let numbers = [u128::from(metadata.ino()), born.as_nanos()];
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    Ok(identity(&[0; 16], -1, &bytes))
}

/// What a disk says of itself, which it says after the next boot too; its path where it says nothing.
fn identity_of_disk(path: &Path, metadata: &Metadata) -> u64 {
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    let folder = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let names =
        ["dm/uuid", "md/uuid", "uuid", "wwid", "device/wwid", "serial", "loop/backing_file"];
    let said = names.iter().find_map(|name| {
        let text = std::fs::read(folder.join(name)).ok()?;
        (!text.trim_ascii().is_empty()).then_some(text)
    });
    let partition = std::fs::read(folder.join("partition")).unwrap_or_default();
    let name = said.unwrap_or_else(|| path.as_os_str().as_bytes().to_vec());
    identity(&[1; 16], -2, &[name, partition].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_file_addresses_name_the_same() {
        let parse = |text: &str| text.parse::<BackingAddress>();
        assert_eq!(parse("file:/a b"), parse("/a b"));
        assert_eq!(parse("x").unwrap().to_string(), "file:x");
        assert!(parse("file:").is_err());
        assert!(parse("nbd://host/").unwrap_err().contains("file:PATH"));
    }

    #[test]
    fn a_backing_keeps_its_identity_when_it_is_renamed_and_shares_it_with_none() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two, three] = ["one", "two", "three"].map(|name| dir.path().join(name));
        std::fs::write(&one, [0; 4096]).unwrap();
        std::fs::write(&two, [0; 4096]).unwrap();
        let first = binding_of(&one).unwrap();
        assert_ne!(first.identity, binding_of(&two).unwrap().identity);
        std::fs::rename(&one, &three).unwrap();
        let renamed = binding_of(&three).unwrap();
        assert_eq!(renamed.identity, first.identity);
        assert!(renamed.path.ends_with(b"/three"));
        let metadata = std::fs::metadata(&three).unwrap();
        let weak = identity_without_handle(&metadata).unwrap();
        assert_ne!(weak, identity_without_handle(&std::fs::metadata(&two).unwrap()).unwrap());
    }
}
