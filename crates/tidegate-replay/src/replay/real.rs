//! `replay --real`: executes the operations of a trace on real files, by plain system calls.
//!
//! One thread makes one call after the other, in the order of the trace, as the schemes are played.
//! So the seconds are comparable. Files have numbers as names, in a directory of their own; the
//! names, directories and renames of the trace are not reproduced.
//!
//! Invariants:
//! 1. Only the new directory is touched. It is removed at the end, also after a failure or the
//!    first signal that asks the process to end.
//! 2. Only the calls of the trace are timed. Opening files, and extending them for reads, is not.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::fs::StatVfs;
use serde::Serialize;

use crate::error::{Error, Result};
use crate::profile::Profile;
use crate::scheme::page::PAGE_BYTES;
use crate::trace::{FileId, Op};

/// Maximum number of open files.
const OPEN_FILES: usize = 256;
/// Maximum length of a read or write call.
const BUFFER_BYTES: usize = 1 << 20;

/// Results on real files: `real` of `tidegate replay --json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The directory of the files.
    pub folder: String,
    /// Number of operations of the trace.
    pub operations: u64,
    /// Number of syncs among the operations.
    pub syncs: u64,
    /// Time of all operations, one after the other.
    pub seconds: f64,
    /// Time of the syncs.
    pub sync_seconds: f64,
}

/// The files that a trace is executed on.
pub(super) struct Real {
    folder: Folder,
    /// Open files.
    open: FxHashMap<FileId, File>,
    /// Lengths of existing files.
    len_bytes: FxHashMap<FileId, u64>,
    buffer: Vec<u8>,
    operations: u64,
    syncs: u64,
    time: Duration,
    sync_time: Duration,
}

/// A directory that is removed when dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // If the removal fails, the directory's name shows the user that this program created it.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Real {
    /// Creates a directory in `parent` for a trace with this profile.
    ///
    /// # Errors
    /// [`Error::Usage`] if the trace needs more space than is free in `parent`, [`Error::Io`] if
    /// the directory cannot be created.
    pub(super) fn create(parent: &Path, profile: &Profile) -> Result<Self> {
        let found = rustix::fs::statvfs(parent).map_err(io::Error::from);
        check_space(parent, profile, &found.map_err(Error::io(parent))?)?;
        let path = parent.join(format!("tidegate-replay-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(Error::io(&path))?;
        Ok(Self {
            folder: Folder(path),
            open: FxHashMap::default(),
            len_bytes: FxHashMap::default(),
            buffer: filled_buffer(),
            operations: 0,
            syncs: 0,
            time: Duration::ZERO,
            sync_time: Duration::ZERO,
        })
    }

    /// Executes one operation.
    ///
    /// # Errors
    /// [`Error::Io`] with the file's path.
    pub(super) fn play(&mut self, op: &Op) -> Result<()> {
        let result = match *op {
            Op::Read { file, offset_bytes, len_bytes } => self.read(file, offset_bytes, len_bytes),
            Op::Write { file, offset_bytes, len_bytes } => {
                self.write(file, offset_bytes, len_bytes)
            }
            Op::Sync { file } => self.sync(file),
            Op::SyncAll => self.sync_all(),
            Op::Resize { file, len_bytes } => self.resize(file, len_bytes),
            Op::Remove { file } => self.remove(file),
        };
        self.operations += 1;
        let mut op = *op;
        let path = op.file_mut().map_or_else(|| self.folder.0.clone(), |file| self.path(*file));
        result.map_err(Error::io(&path))
    }

    /// Returns the results.
    pub(super) fn row(&self) -> Row {
        Row {
            folder: self.folder.0.parent().unwrap_or(&self.folder.0).display().to_string(),
            operations: self.operations,
            syncs: self.syncs,
            seconds: self.time.as_secs_f64(),
            sync_seconds: self.sync_time.as_secs_f64(),
        }
    }

    fn path(&self, file: FileId) -> PathBuf {
        self.folder.0.join(file.0.to_string())
    }

    /// Opens a file. Closes all other files if too many are open.
    fn open(&mut self, file: FileId) -> io::Result<()> {
        if self.open.contains_key(&file) {
            return Ok(());
        }
        if self.open.len() >= OPEN_FILES {
            self.open.clear();
        }
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        self.open.insert(file, options.open(self.path(file))?);
        Ok(())
    }

    /// Runs `call` with the file and the buffer, and adds its time.
    fn timed(
        &mut self,
        file: FileId,
        call: impl FnOnce(&File, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.open(file)?;
        let Some(opened) = self.open.get(&file) else { return Ok(()) };
        let begun = Instant::now();
        call(opened, &mut self.buffer)?;
        self.time += begun.elapsed();
        Ok(())
    }

    /// Reads a range. A file that is read beyond its written end existed before the trace: a hole
    /// stands for its old content.
    fn read(&mut self, file: FileId, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.saturating_add(len);
        self.open(file)?;
        let known = self.len_bytes.entry(file).or_insert(0);
        if *known < end {
            *known = end;
            self.open.get(&file).map_or(Ok(()), |opened| opened.set_len(end))?;
        }
        self.timed(file, |opened, buffer| {
            for (at, part) in parts(offset, len) {
                opened.read_exact_at(&mut buffer[..part], at)?;
            }
            Ok(())
        })
    }

    fn write(&mut self, file: FileId, offset: u64, len: u64) -> io::Result<()> {
        let known = self.len_bytes.entry(file).or_insert(0);
        *known = offset.saturating_add(len).max(*known);
        self.timed(file, |opened, buffer| {
            parts(offset, len).try_for_each(|(at, part)| opened.write_all_at(&buffer[..part], at))
        })
    }

    fn sync(&mut self, file: FileId) -> io::Result<()> {
        let before = self.time;
        self.timed(file, |opened, _| opened.sync_data())?;
        self.sync_time += self.time.saturating_sub(before);
        self.syncs += 1;
        Ok(())
    }

    /// Makes the whole file system durable by `syncfs`.
    fn sync_all(&mut self) -> io::Result<()> {
        let folder = File::open(&self.folder.0)?;
        let begun = Instant::now();
        rustix::fs::syncfs(&folder)?;
        let taken = begun.elapsed();
        (self.time, self.sync_time) = (self.time + taken, self.sync_time + taken);
        self.syncs += 1;
        Ok(())
    }

    fn resize(&mut self, file: FileId, len_bytes: u64) -> io::Result<()> {
        self.len_bytes.insert(file, len_bytes);
        self.timed(file, |opened, _| opened.set_len(len_bytes))
    }

    fn remove(&mut self, file: FileId) -> io::Result<()> {
        let path = self.path(file);
        self.open.remove(&file);
        self.len_bytes.remove(&file);
        let begun = Instant::now();
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => self.time += begun.elapsed(),
        }
        Ok(())
    }
}

/// Returns offset and length of each call for a range.
fn parts(offset: u64, len: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..len).step_by(BUFFER_BYTES).map(move |done| {
        let part = usize::try_from(len - done).unwrap_or(BUFFER_BYTES).min(BUFFER_BYTES);
        (offset + done, part)
    })
}

/// Returns incompressible data for writes.
fn filled_buffer() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(BUFFER_BYTES / 8).flatten().collect()
}

/// Rejects a trace that could fill the file system.
fn check_space(parent: &Path, profile: &Profile, found: &StatVfs) -> Result<()> {
    let needed = profile.footprint_pages.saturating_mul(PAGE_BYTES);
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if needed <= free {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "{}: the trace touches {} MiB, and {} MiB are free; name a folder with more by --real",
        parent.display(),
        needed >> 20,
        free >> 20,
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId(3);

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn operations_are_done_and_nothing_is_left() {
        let parent = tempfile::tempdir().unwrap();
        let mut real = Real::create(parent.path(), &Profile::default()).unwrap();
        let folder = real.folder.0.clone();
        let len = |real: &Real| real.path(FILE).metadata().unwrap().len();
        let long = 5 * (1 << 20) / 2;
        for op in [
            Op::Write { file: FILE, offset_bytes: 100, len_bytes: long },
            Op::Sync { file: FILE },
            Op::Read { file: FILE, offset_bytes: 0, len_bytes: 2 * long },
            Op::SyncAll,
        ] {
            real.play(&op).unwrap();
        }
        assert_eq!(len(&real), 2 * long, "what was there before the trace is a hole");
        let bytes = std::fs::read(real.path(FILE)).unwrap();
        assert!(bytes[100] != 0 && bytes[..100].iter().all(|byte| *byte == 0));
        real.play(&Op::Resize { file: FILE, len_bytes: 10 }).unwrap();
        assert_eq!(len(&real), 10);
        for number in 0..2 * u32::try_from(OPEN_FILES).unwrap() {
            let file = FileId(number);
            real.play(&Op::Write { file, offset_bytes: 0, len_bytes: 1 }).unwrap();
        }
        assert!(real.open.len() <= OPEN_FILES && names(&folder).len() == 2 * OPEN_FILES);
        real.play(&Op::Remove { file: FILE }).unwrap();
        real.play(&Op::Remove { file: FileId(9999) }).unwrap();
        assert!(!real.path(FILE).exists());
        let row = real.row();
        assert_eq!((row.operations, row.syncs), (5 + 2 * OPEN_FILES as u64 + 2, 2));
        assert!(row.seconds >= row.sync_seconds && row.sync_seconds > 0.0, "{row:?}");
        drop(real);
        assert_eq!(names(parent.path()), Vec::<String>::new());
    }

    #[test]
    fn a_trace_that_needs_more_than_is_free_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let mut profile = Profile::default();
        profile.footprint_pages = u64::MAX / 2;
        let refused = Real::create(parent.path(), &profile).err().unwrap().to_string();
        assert!(refused.contains("are free"), "{refused}");
        assert_eq!(names(parent.path()), Vec::<String>::new());
    }

    #[test]
    fn a_failure_names_the_file_and_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let mut real = Real::create(parent.path(), &Profile::default()).unwrap();
        let end = i64::MAX.unsigned_abs();
        let failed = real.play(&Op::Resize { file: FILE, len_bytes: end }).unwrap_err();
        assert!(failed.to_string().contains("/3: "), "{failed}");
        drop(real);
        assert_eq!(names(parent.path()), Vec::<String>::new());
    }
}
