//! The disk of the files: a named directory, or a file system of the bench's own.
//!
//! Invariants:
//! 1. `tidegate run` covers files there: elsewhere their syncs are real, and a measurement would be
//!    one of plain files.
//! 2. All created files lie in a directory that is removed with the [`Disk`], after the file system
//!    in it was unmounted.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise, fstatfs};
use tempfile::TempDir;
use tidegate::log::recover::{file_system_id, keeps_identities};

use crate::block::scratch;
use crate::error::{BenchError, Result};
use crate::machine::is_tmpfs;
use crate::pattern::Rng;
use crate::programs::{Loop, Mount, call};

/// The directory of the files by default, or of the image with their file system.
const DEFAULT: &str = "/var/tmp";
/// Size of a file system of the bench's own.
pub(super) const DISK_BYTES: u64 = 8 << 30;
/// Size of a write to the image.
const PIECE_BYTES: usize = 1 << 20;

/// Location of the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// This directory.
    Directory(PathBuf),
    /// An ext4 in an image in this directory.
    Image(PathBuf),
}

impl Place {
    /// Returns the directory `named`, or a default that works on this machine.
    ///
    /// # Errors
    /// [`BenchError::Usage`] if `run` covers no file there, and no file system can be made.
    pub(super) fn of(named: Option<&Path>) -> Result<Self> {
        Self::for_user(named, rustix::process::geteuid().is_root())
    }

    fn for_user(named: Option<&Path>, is_root: bool) -> Result<Self> {
        let dir = named.unwrap_or(Path::new(DEFAULT));
        let Some(reason) = why_plain(dir)? else { return Ok(Self::Directory(dir.to_owned())) };
        if named.is_none() && is_root && !is_tmpfs(dir) {
            return Ok(Self::Image(dir.to_owned()));
        }
        let else_do = match named {
            Some(_) => "or leave --files out as root: bench log then makes one",
            None => "or, where this is a disk, run it as root: bench log then makes one",
        };
        Err(BenchError::Usage(format!(
            "--files {}: {reason}, so tidegate run covers no file there; name a directory on an \
             ext4 or XFS with a UUID, {else_do}",
            dir.display()
        )))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(dir) => write!(f, "files in {}", dir.display()),
            Self::Image(dir) => {
                write!(f, "files on an ext4 on a loop device, its image in {}", dir.display())
            }
        }
    }
}

/// Returns the reason why `tidegate run` covers no file in `dir`, or `None` if it covers files.
fn why_plain(dir: &Path) -> Result<Option<String>> {
    let opened = File::open(dir).map_err(BenchError::os("open", dir))?;
    let found = fstatfs(&opened).map_err(std::io::Error::from);
    let found = found.map_err(BenchError::os("inspect the file system of", dir))?;
    if is_tmpfs(dir) {
        return Ok(Some("is a tmpfs, where nothing is ever synced".to_owned()));
    }
    if !keeps_identities(found.f_type) {
        let why = format!("its file system has the magic number {:#x}", found.f_type);
        return Ok(Some(format!("{why}, which is neither ext4 nor XFS")));
    }
    let has_none = file_system_id(&opened).is_err();
    Ok(has_none.then(|| "its file system has no UUID".to_owned()))
}

/// A directory for files, removed on drop.
pub(super) struct Disk {
    path: PathBuf,
    _mount: Option<Mount>,
    /// Removed last: fields drop in order.
    dir: TempDir,
}

impl Disk {
    /// Makes a directory at `place`, or a file system of `bytes` bytes there.
    pub(super) fn new(place: &Place, bytes: u64) -> Result<Self> {
        let disk = match place {
            Place::Directory(parent) => {
                let dir = scratch(parent)?;
                Self { path: dir.path().to_owned(), _mount: None, dir }
            }
            Place::Image(parent) => Self::in_image(scratch(parent)?, bytes)?,
        };
        open_to_all(disk.dir.path())?;
        open_to_all(&disk.path)?;
        Ok(disk)
    }

    /// Makes a file system in a fully written image; discards do not free its blocks. A request
    /// then costs the same as on the disk below, without allocation there.
    fn in_image(dir: TempDir, bytes: u64) -> Result<Self> {
        let (image, path) = (dir.path().join("image"), dir.path().join("mnt"));
        std::fs::create_dir(&path).map_err(BenchError::os("create", &path))?;
        let file = File::create(&image).map_err(BenchError::os("create", &image))?;
        let written = write_in_order(&file, bytes, PIECE_BYTES).and_then(|()| file.sync_all());
        written.map_err(BenchError::os("write", &image))?;
        let forgotten = fadvise(&file, 0, None, Advice::DontNeed).map_err(std::io::Error::from);
        forgotten.map_err(BenchError::os("drop the page cache of", &image))?;
        let options = "nodiscard,lazy_itable_init=0,lazy_journal_init=0";
        let words = ["-q", "-F", "-b4096", "-E", options, &image.to_string_lossy()];
        call("mkfs.ext4", "e2fsprogs", &words)?;
        // Bypasses the page cache, which would report syncs as done before they reach a disk.
        let device = Loop::attach(&image, &["--direct-io=on"])?;
        let mount = Mount::new(&device, path.clone())?;
        Ok(Self { path, _mount: Some(mount), dir })
    }

    /// Returns the directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// Lets other users enter a directory: a server does not run as root.
pub(super) fn open_to_all(dir: &Path) -> Result<()> {
    set_mode(dir, 0o755)
}

/// Sets the permissions of a file or directory.
pub(super) fn set_mode(path: &Path, mode: u32) -> Result<()> {
    let permissions = std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(path, permissions).map_err(BenchError::os("set the mode of", path))
}

/// Writes `bytes` random bytes from the position of `file`, `piece_bytes` at a time.
pub(super) fn write_in_order(
    mut file: &File,
    bytes: u64,
    piece_bytes: usize,
) -> std::io::Result<()> {
    use std::io::Write;
    let mut rng = Rng::new(1, 0);
    let piece: Vec<u8> = (0..piece_bytes).map(|_| rng.next_u64().to_le_bytes()[0]).collect();
    let mut left = bytes;
    while left > 0 {
        let now = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
        file.write_all(&piece[..now])?;
        left -= now as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_where_nothing_is_covered_are_refused_with_what_to_do() {
        for (dir, reason) in [("/dev/shm", "is a tmpfs"), ("/proc", "magic number 0x9fa0")] {
            let refused = Place::for_user(Some(Path::new(dir)), true).unwrap_err();
            let told = refused.to_string();
            assert!(refused.is_usage() && !told.contains('\n'), "{told}");
            for part in [dir, reason, "ext4 or XFS with a UUID", "leave --files out"] {
                assert!(told.contains(part), "{part}: {told}");
            }
        }
        let missing = Place::of(Some(Path::new("/nonexistent"))).unwrap_err();
        assert!(missing.with_causes().contains("/nonexistent"), "{missing}");
    }

    #[test]
    fn root_has_a_file_system_made_only_where_none_is_named() {
        let default = Path::new(DEFAULT);
        let plain = why_plain(default).unwrap().is_some();
        let expected = if plain && !is_tmpfs(default) {
            Place::Image(default.to_owned())
        } else {
            Place::Directory(default.to_owned())
        };
        match Place::for_user(None, true) {
            Ok(place) => assert_eq!(place, expected),
            Err(error) => assert!(is_tmpfs(default), "{error}"),
        }
        assert_eq!(Place::for_user(None, false).is_err(), plain, "another user cannot mount");
    }

    /// Needs root.
    #[test]
    fn files_on_a_disk_of_its_own_can_be_covered() {
        let parent = tempfile::tempdir().unwrap();
        let place = Place::Image(parent.path().to_owned());
        let disk = Disk::new(&place, 32 << 20).unwrap();
        assert_eq!(why_plain(disk.path()).unwrap(), None);
        let named = Place::for_user(Some(disk.path()), false).unwrap();
        assert_eq!(named, Place::Directory(disk.path().to_owned()));
        std::fs::write(disk.path().join("file"), "content").unwrap();
        drop(disk);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0, "all of it is gone");
    }
}
