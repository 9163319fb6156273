//! The file of a copy that is not whole yet: it gets its name, or is removed.
//!
//! The file has no name meanwhile, and a killed server leaves nothing. Where the file system has no
//! unnamed files, it has a temporary name beside the requested one.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, linkat, open, renameat_with};
use rustix::io::Errno;
use uuid::Uuid;

/// Access to a copy: the user's alone.
const MODE: u32 = 0o600;

/// A copy that is not whole yet.
pub(super) struct Partial {
    pub(super) file: File,
    /// The temporary name, if the file has one.
    temporary: Option<PathBuf>,
}

impl Partial {
    /// Creates an empty file for `target`, which must not exist.
    ///
    /// # Errors
    /// `target` exists, or the file system takes no file in its directory.
    pub(super) fn create(target: &Path) -> Result<Self> {
        let failed = || format!("cannot make {}", target.display());
        if target.symlink_metadata().is_ok() {
            return Err(io::Error::from(Errno::EXIST)).with_context(failed);
        }
        target.file_name().ok_or(io::Error::from(Errno::ISDIR)).with_context(failed)?;
        match unnamed_in(directory_of(target)) {
            Ok(file) => Ok(Self { file, temporary: None }),
            Err(_) => Self::create_named(target),
        }
    }

    /// Creates the file under a temporary name.
    fn create_named(target: &Path) -> Result<Self> {
        loop {
            let name = format!(".tidegate-{}.partial", Uuid::new_v4().simple());
            let path = target.with_file_name(name);
            let mut options = File::options();
            match options.write(true).create_new(true).mode(MODE).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                opened => {
                    let failed = || format!("cannot make {}: {}", target.display(), path.display());
                    let file = opened.with_context(failed)?;
                    return Ok(Self { file, temporary: Some(path) });
                }
            }
        }
    }

    /// Gives the file the name `target`, durably.
    ///
    /// # Errors
    /// `target` exists by now, or the file system fails.
    pub(super) fn publish(self, target: &Path) -> Result<()> {
        let named = match &self.temporary {
            None => link_unnamed(&self.file, target),
            Some(path) => rename(path, target),
        };
        let synced = named.and_then(|()| File::open(directory_of(target))?.sync_all());
        synced.with_context(|| match &self.temporary {
            None => format!("cannot make {}", target.display()),
            Some(path) => format!("cannot make {} of {}", target.display(), path.display()),
        })
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if let Some(path) = &self.temporary {
            // After `publish` the temporary name is gone, or is a second name of the copy.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn directory_of(file: &Path) -> &Path {
    file.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Creates a file without a name in `directory`.
///
/// # Errors
/// The file system has no such files, or the file could not get a name later.
fn unnamed_in(directory: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = File::from(open(directory, flags, Mode::from_raw_mode(MODE))?);
    // The link needs `/proc`.
    std::fs::metadata(path_of(&file))?;
    Ok(file)
}

/// Returns a path that leads to the open `file`.
fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn link_unnamed(file: &File, target: &Path) -> io::Result<()> {
    Ok(linkat(CWD, path_of(file), CWD, target, AtFlags::SYMLINK_FOLLOW)?)
}

fn rename(path: &Path, target: &Path) -> io::Result<()> {
    match renameat_with(CWD, path, CWD, target, RenameFlags::NOREPLACE) {
        // This file system cannot refuse to replace a file.
        Err(Errno::INVAL | Errno::NOSYS) => std::fs::hard_link(path, target),
        renamed => Ok(renamed?),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let names = std::fs::read_dir(directory).unwrap().map(|it| it.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    }

    /// Publishes a copy that `create` begins, and abandons another one.
    fn publishes_or_leaves_nothing(create: fn(&Path) -> Result<Partial>) {
        let dir = tempfile::tempdir().unwrap();
        // The longest name of a file.
        let target = dir.path().join("n".repeat(255));
        drop(create(&target).unwrap());
        assert!(names(dir.path()).is_empty());
        let (mut first, second) = (create(&target).unwrap(), create(&target).unwrap());
        first.file.write_all(b"copy").unwrap();
        first.publish(&target).unwrap();
        let error = format!("{:#}", second.publish(&target).unwrap_err());
        assert!(error.contains("cannot make") && error.contains("exists"), "{error}");
        assert_eq!(names(dir.path()), ["n".repeat(255)]);
        let mut text = String::new();
        File::open(&target).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "copy");
    }

    #[test]
    fn a_copy_gets_its_name_when_it_is_whole_or_leaves_nothing() {
        publishes_or_leaves_nothing(Partial::create);
        publishes_or_leaves_nothing(Partial::create_named);
    }

    #[test]
    fn the_temporary_file_is_named_in_errors() {
        let error = Partial::create_named(Path::new("/nowhere/copy")).err().expect("refused");
        let error = format!("{error:#}");
        assert!(error.starts_with("cannot make /nowhere/copy: /nowhere/.tidegate-"), "{error}");
        let error = format!("{:#}", Partial::create(Path::new("/nowhere/copy")).err().unwrap());
        assert!(error.contains("No such file"), "{error}");
    }
}
