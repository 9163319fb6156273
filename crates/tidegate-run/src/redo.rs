//! What processes left half done when they were killed, and what a disk did not take.
//!
//! Rules, which the processes themselves follow too when they find a dead holder's lock:
//! 1. A change of a file's bytes or size whose record is whole is done, again if need be: nobody was told of it, and the
//!    log says that it happened.
//! 2. A change of names that did not happen is voided, one that did happen stays.
//! 3. All of it is done under the lock of the file: nobody has changed the file since the holder died.
//!
//! A file that cannot be opened for writing (its owner may not write to it by name) keeps what it has: of an operation
//! that was never answered both outcomes are right.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use tidegate::log::recover::{
    Content, Extent, Fate, FilePlan, FileSystem, LocalFiles, Plan, Planner, identity_of,
};
use tidegate::log::{
    FileGuard, FileKey, FileRef, Header, Interrupted, Log, RecordKind, RenamePaths, copy_to_file,
    has_happened,
};

use super::backlog::{Known, as_path};
use super::writeback;

/// Bytes copied at once.
const COPY_BYTES: usize = 1 << 20;

/// How it went with what the dead left.
#[derive(Debug, Default)]
pub(crate) struct Mended {
    /// What somebody else's locks keep from being done, for [`mend`].
    pub(crate) left: Vec<Interrupted>,
    /// What cannot be done at all.
    pub(crate) failures: Vec<String>,
}

/// Does or voids what threads of `process`, which is dead, were killed in; waits for each lock for no longer than `patience`.
pub(crate) fn mend_after(log: &Log, process: u32, patience: Duration) -> Mended {
    mend(log, log.interrupted_by(process).collect(), patience)
}

/// Does or voids these, which the dead left.
pub(crate) fn mend(log: &Log, mut interrupted: Vec<Interrupted>, patience: Duration) -> Mended {
    let mut mended = Mended::default();
    if interrupted.is_empty() {
        return mended;
    }
    // Held for names, and for the files under them.
    let Ok(names) = log.lock_names_within(patience) else {
        return Mended { left: interrupted, ..mended };
    };
    // What was seen before may have ended: a process that lives may have a dead one's number.
    interrupted.retain(|it| log.is_interrupted(it));
    if names.owner_died() {
        // Who has the lock next is not told, and changes the names by which these are judged.
        let others = log.in_the_middle().filter(|it| is_of_names(it) && !interrupted.contains(it));
        let others: Vec<_> = others.collect();
        interrupted.extend(others);
    }
    for it in interrupted {
        match mend_one(log, &it, patience) {
            None => mended.left.push(it),
            Some(outcome) => mended.failures.extend(outcome.err()),
        }
    }
    mended
}

fn is_of_names(interrupted: &Interrupted) -> bool {
    let kind = interrupted.header.map(|header| header.kind);
    matches!(kind, Some(RecordKind::Link | RecordKind::Rename | RecordKind::Unlink))
}

/// None: somebody has the file locked, or it is the operation of a thread that lives.
fn mend_one(
    log: &Log,
    interrupted: &Interrupted,
    patience: Duration,
) -> Option<Result<(), String>> {
    let Some(file) = log.file_of(interrupted) else {
        // No lock tells it from an operation that begins.
        if !has_ended(interrupted.process, interrupted.thread()) {
            return None;
        }
        let outcome = void_undone_unlink(log, interrupted);
        log.settle(interrupted);
        return Some(
            outcome.map_err(|error| format!("a name may be lost at a power cut: {error}")),
        );
    };
    let guard = log.lock_within(file, patience).ok()?;
    // Once more, under the lock: who had it in between may have done it.
    let still: Vec<_> = log.interrupted_on(&guard).filter(|it| it == interrupted).collect();
    let outcome = still.iter().try_for_each(|it| match &it.header {
        Some(header) => complete(log, &guard, header),
        None => Ok(()),
    });
    for it in &still {
        log.settle(it);
    }
    if log.interrupted_on(&guard).next().is_none() {
        guard.mended();
    }
    let text = "the last operation of a dead process is left undone";
    Some(outcome.map_err(|error| format!("{text}: {error}")))
}

/// Whether a thread has ended, as far as this user may know.
fn has_ended(process: u32, thread: u32) -> bool {
    match std::fs::read(format!("/proc/{process}/task/{thread}/stat")) {
        // The state is behind the name, which may have anything in it.
        Ok(stat) => stat
            .rsplit(|byte| *byte == b')')
            .next()
            .is_some_and(|rest| matches!(rest.get(1), Some(b'Z' | b'X'))),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => false,
        // Not there, or hidden from this user.
        Err(_) => Pid::from_raw(process.cast_signed())
            .is_none_or(|process| test_kill_process(process) != Err(Errno::PERM)),
    }
}

/// The removal of a name of a file without an entry: where something has the name, it is taken for not done.
fn void_undone_unlink(log: &Log, interrupted: &Interrupted) -> io::Result<()> {
    let Some(header) = interrupted.header.filter(|it| it.kind == RecordKind::Unlink) else {
        return Ok(());
    };
    let mut path = vec![0; header.payload_bytes as usize];
    log.pool().read_payload(&header, 0, &mut path).map_err(io::Error::other)?;
    log.mark_names_unlogged();
    if as_path(&path).symlink_metadata().is_err() {
        return Ok(());
    }
    let voided = log.begin_on_names().and_then(|mut ticket| ticket.void(header.position));
    voided.map(|_| ()).map_err(io::Error::other)
}

fn complete(log: &Log, guard: &FileGuard<'_>, header: &Header) -> io::Result<()> {
    match header.kind {
        // The cleaner brings it, with all others of the file.
        RecordKind::Write if header.absorbed => Ok(()),
        RecordKind::Write | RecordKind::Zero | RecordKind::SetSize => {
            let file = Target::of(log, header.file, &log.key_of(guard.file())).open()?;
            repeat(log, &file, header)
        }
        RecordKind::Link | RecordKind::Unlink | RecordKind::Rename => {
            let mut payload = vec![0; header.payload_bytes as usize];
            log.pool().read_payload(header, 0, &mut payload).map_err(io::Error::other)?;
            let identity = log.key_of(guard.file()).identity;
            // What cannot be seen stays: a replay does what the record says.
            if has_happened(header.kind, &payload, |path| is_at(identity, path)) == Some(false) {
                let voided = guard.begin().and_then(|mut ticket| ticket.void(header.position));
                voided.map_err(io::Error::other)?;
            }
            Ok(())
        }
        RecordKind::Define | RecordKind::Retire | RecordKind::Void | RecordKind::Settle => Ok(()),
    }
}

/// Does once more to `file` what the record says.
fn repeat(log: &Log, file: &File, header: &Header) -> io::Result<()> {
    match header.kind {
        RecordKind::Write => {
            let end = header.offset.saturating_add(header.payload_bytes.into());
            let content = Content::Log(header.data_position());
            copy(log, file, &Extent { start: header.offset, end, content })
        }
        RecordKind::Zero => zero(file, header.offset, header.len),
        RecordKind::SetSize => file.set_len(header.offset),
        _ => Ok(()),
    }
}

fn zero(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let size = FallocateFlags::KEEP_SIZE;
    let ways = [FallocateFlags::ZERO_RANGE | size, FallocateFlags::PUNCH_HOLE | size];
    let mut ways = ways.map(|flags| rustix::fs::fallocate(file, flags, offset, len)).into_iter();
    Ok(ways.find(Result::is_ok).unwrap_or(Err(rustix::io::Errno::OPNOTSUPP))?)
}

/// Copies `extent` from the log to `file`.
fn copy(log: &Log, file: &File, extent: &Extent) -> io::Result<()> {
    let Content::Log(position) = extent.content else {
        return zero(file, extent.start, extent.bytes());
    };
    let mut buffer = vec![0; usize::try_from(extent.bytes()).unwrap_or(COPY_BYTES).min(COPY_BYTES)];
    copy_to_file(log.pool(), position, extent.bytes(), file.as_fd(), extent.start, &mut buffer)
}

/// Whether the file of this identity is at the path; none, where that cannot be seen.
fn is_at(identity: u64, path: &[u8]) -> Option<bool> {
    let found = LocalFiles.look(as_path(path)).ok()?;
    Some(found.is_some_and(|found| found.identity == identity))
}

/// Writes all that the log has of `file` to it once more: the kernel may have dropped what it could not write. A file that is under
/// none of its names is left alone: it may be gone.
///
/// # Errors
/// It cannot be written now.
pub(crate) fn rewrite(
    log: &Log,
    file: &Known,
    entry: FileRef,
    lent: Option<&File>,
) -> io::Result<()> {
    let guard = log.lock(entry).map_err(io::Error::other)?;
    let target = Target::of(log, file.id, &log.key_of(guard.file()));
    // A file that is lent cannot be opened: its lease would be broken.
    let opened = match lent.map_or_else(|| target.open(), File::try_clone) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    if target.is_lost {
        return Err(io::Error::other("a part of the log cannot be read"));
    }
    let Some(plan) = target.plan.files().first() else { return Ok(()) };
    let size = opened.metadata()?.len();
    for extent in &plan.extents {
        // Never longer than it is: what is behind the end was cut off.
        let extent = Extent { end: extent.end.min(size), ..*extent };
        if extent.start < extent.end {
            copy(log, &opened, &extent)?;
        }
    }
    Ok(())
}

/// Opens a locked file for writing, by one of its names; none where the log has nothing for it: no record, or the removal of its
/// last name.
///
/// # Errors
/// It is under none of its names, or may not be written.
pub(crate) fn open(log: &Log, guard: &FileGuard<'_>) -> io::Result<Option<File>> {
    let target = Target::of(log, guard.id(), &log.key_of(guard.file()));
    match target.open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound && target.is_owed_nothing() => {
            Ok(None)
        }
        opened => opened.map(Some),
    }
}

/// A file that the log has records of.
struct Target {
    plan: Plan,
    known: Known,
    /// A part of the log cannot be read: it may be about this file.
    is_lost: bool,
}

impl Target {
    /// The file with `id`; its lock is held, so that all of its records are finished.
    fn of(log: &Log, id: u64, key: &FileKey) -> Self {
        let mut planner = Planner::new();
        let mut payload = Vec::new();
        let mut is_lost = false;
        let mut records = log.records(log.tail(), log.head());
        for header in records.by_ref().filter(|header| is_about(header, id, key)) {
            payload.clear();
            if Planner::needs_payload(header.kind) {
                payload.resize(header.payload_bytes as usize, 0);
                if log.pool().read_payload(&header, 0, &mut payload).is_err() {
                    is_lost = true;
                    continue;
                }
            }
            if header.kind != RecordKind::Rename || header.file == id {
                planner.add(&header, &payload);
            } else if let Some(paths) = RenamePaths::decode(&payload) {
                // To the file that is replaced it is the removal of that name.
                let header = Header { kind: RecordKind::Unlink, file: id, ..header };
                planner.add(&header, paths.to);
            }
        }
        let is_lost = is_lost || records.unreadable_bytes() > 0;
        let plan = planner.finish();
        let names = plan.files().first().map(|file| names(&plan, file)).unwrap_or_default();
        let FileKey { device, inode, identity } = *key;
        let known = Known::at(id, (device, inode, identity), names);
        Self { plan, known, is_lost }
    }

    /// No record of the log is about a file that is to be found.
    fn is_owed_nothing(&self) -> bool {
        !self.is_lost && self.plan.files().first().is_none_or(|file| file.fate == Fate::Dead)
    }

    /// Opens it for writing.
    fn open(&self) -> io::Result<File> {
        let file = writeback::open_with(&self.known, File::options().write(true))?;
        // Where a file system has no handles, the numbers have to do.
        match identity_of(&file) {
            Ok(found) if found != self.known.identity => Err(io::ErrorKind::NotFound.into()),
            _ => Ok(file),
        }
    }
}

/// Whether the record may tell something of the file: where another file replaced it, that one's record does.
fn is_about(header: &Header, id: u64, key: &FileKey) -> bool {
    match header.kind {
        RecordKind::Rename => header.file == id || header.aux == key.identity,
        RecordKind::Void => true,
        _ => header.file == id,
    }
}

/// Paths at which the file may be, the likeliest first.
fn names(plan: &Plan, file: &FilePlan) -> Vec<PathBuf> {
    let bound = file.names.iter().map(|name| name.path);
    let paths = bound.chain(file.known_paths.iter().copied());
    let paths = paths.filter_map(|path| plan.paths().get(path));
    paths.map(|plan| as_path(&plan.path).to_path_buf()).collect()
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    use super::super::trial::{Trial, define};
    use super::*;

    fn own() -> u32 {
        rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()
    }

    /// A thread that dies in the middle of `operation`, with the slot taken and the lock held.
    fn die_in(
        trial: &Trial,
        file: &File,
        name: &str,
        operation: impl FnOnce(&mut tidegate::log::Ticket<'_>) + Send,
    ) {
        std::thread::scope(|scope| {
            let dying = scope.spawn(|| {
                let guard = trial.lock(file);
                let mut ticket = guard.begin().unwrap();
                define(&mut ticket, file, &trial.path(name));
                operation(&mut ticket);
                std::mem::forget(ticket);
                std::mem::forget(guard);
            });
            // Only then does the kernel give its locks away.
            dying.join().unwrap();
        });
    }

    /// How many operations are left, and what cannot be done.
    fn mended(trial: &Trial) -> (usize, Vec<String>) {
        let Mended { left, failures } = mend_after(&trial.log, own(), Duration::ZERO);
        (left.len(), failures)
    }

    fn bytes(path: &Path) -> &[u8] {
        path.as_os_str().as_bytes()
    }

    #[test]
    fn changes_of_a_file_that_are_in_the_log_are_done() {
        let trial = Trial::new();
        let file = trial.file("file", b"0123456789");
        die_in(&trial, &file, "file", |ticket| {
            ticket.write(4, &[IoSlice::new(b"abcd")]).unwrap();
        });
        assert_eq!(mended(&trial), (0, vec![]));
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"0123abcd89");
        die_in(&trial, &file, "file", |ticket| {
            ticket.set_size(6).unwrap();
        });
        assert_eq!(mended(&trial), (0, vec![]));
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"0123ab");
        die_in(&trial, &file, "file", |ticket| {
            ticket.zero(0, 2).unwrap();
        });
        assert_eq!(mended(&trial), (0, vec![]));
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"\0\x0023ab");
        assert_eq!(trial.log.in_the_middle().count(), 0);
        assert_eq!(trial.log.safe_position(), trial.log.head());
    }

    #[test]
    fn a_slot_without_a_record_is_given_back() {
        let trial = Trial::new();
        let file = trial.file("file", b"same");
        die_in(&trial, &file, "file", |_| {});
        assert_eq!(mended(&trial), (0, vec![]));
        assert_eq!(trial.log.in_the_middle().count(), 0);
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"same");
    }

    /// The records that count, in the end: what recovery would make of the names.
    fn voided(trial: &Trial) -> usize {
        let records = trial.log.records(trial.log.tail(), trial.log.head());
        records.filter(|header| header.kind == RecordKind::Void).count()
    }

    #[test]
    fn changes_of_names_count_only_where_they_happened() {
        let trial = Trial::new();
        let file = trial.file("one", b"");
        let (one, two) = (trial.path("one"), trial.path("two"));
        die_in(&trial, &file, "one", |ticket| {
            ticket.rename(bytes(&one), bytes(&two), 0).unwrap();
        });
        assert_eq!(mended(&trial), (0, vec![]));
        assert_eq!((voided(&trial), one.exists()), (1, true));
        die_in(&trial, &file, "one", |ticket| {
            ticket.rename(bytes(&one), bytes(&two), 0).unwrap();
            std::fs::rename(&one, &two).unwrap();
        });
        assert_eq!(mended(&trial), (0, vec![]));
        assert_eq!((voided(&trial), two.exists()), (1, true));
        die_in(&trial, &file, "two", |ticket| {
            ticket.unlink(bytes(&two)).unwrap();
        });
        die_in(&trial, &trial.file("three", b""), "three", |ticket| {
            ticket.link(bytes(&trial.path("four"))).unwrap();
        });
        assert_eq!(mended(&trial), (0, vec![]));
        assert_eq!(voided(&trial), 3);
    }

    /// The next holder of the lock of names would judge it by what they are by then.
    #[test]
    fn nothing_is_mended_while_somebody_has_the_names_locked() {
        let trial = Trial::new();
        let file = trial.file("file", b"old");
        die_in(&trial, &file, "file", |ticket| {
            ticket.write(0, &[IoSlice::new(b"new")]).unwrap();
        });
        let names = trial.log.lock_names().unwrap();
        let left = std::thread::scope(|scope| scope.spawn(|| mended(&trial)).join().unwrap());
        assert_eq!(left, (1, vec![]));
        drop(names);
        assert_eq!(mended(&trial), (0, vec![]));
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"new");
    }

    /// Two processes die, and what the one left is mended first.
    #[test]
    fn whoever_is_told_that_the_names_holder_died_mends_what_it_left() {
        let trial = Trial::new();
        let (one, two) = (trial.path("one"), trial.path("two"));
        let file = trial.file("one", b"");
        let names = std::thread::scope(|scope| {
            let dying = scope.spawn(|| std::mem::forget(trial.log.lock_names().unwrap()));
            dying.join()
        });
        names.unwrap();
        die_in(&trial, &file, "one", |ticket| {
            ticket.rename(bytes(&one), bytes(&two), 0).unwrap();
            std::fs::rename(&one, &two).unwrap();
        });
        let written = trial.file("written", b"old");
        die_in(&trial, &written, "written", |ticket| {
            ticket.write(0, &[IoSlice::new(b"new")]).unwrap();
        });
        let of_write = |it: &Interrupted| it.header.is_some_and(|it| it.kind == RecordKind::Write);
        let of_write = trial.log.in_the_middle().filter(of_write).collect();
        mend(&trial.log, of_write, Duration::ZERO);
        // By somebody who is told nothing of it.
        assert!(!trial.log.lock_names().unwrap().owner_died());
        std::fs::rename(&two, &one).unwrap();
        assert_eq!(mended(&trial), (0, vec![]));
        assert_eq!((voided(&trial), trial.log.in_the_middle().count()), (0, 0));
    }

    /// Takes a slot for the removal of the file at `path`, of which the log has nothing.
    fn unlink<'a>(trial: &'a Trial, path: &Path) -> tidegate::log::NameTicket<'a> {
        let mut ticket = trial.log.begin_on_names().unwrap();
        ticket.unlink(bytes(path), 1).unwrap();
        ticket
    }

    #[test]
    fn a_removal_without_a_file_counts_only_where_it_happened() {
        let trial = Trial::new();
        let (there, gone) = (trial.path("there"), trial.path("gone"));
        trial.file("there", b"");
        std::thread::scope(|scope| {
            let dying = scope.spawn(|| {
                std::mem::forget((unlink(&trial, &there), unlink(&trial, &gone)));
                rustix::thread::gettid()
            });
            let task = format!("/proc/self/task/{}", dying.join().unwrap());
            // The kernel lets others go on a little before it has forgotten it.
            while Path::new(&task).exists() {
                std::thread::yield_now();
            }
        });
        assert_eq!(mended(&trial), (0, vec![]));
        assert_eq!((voided(&trial), trial.log.in_the_middle().count()), (1, 0));
    }

    /// A process may have the number of one that has ended.
    #[test]
    fn what_the_living_do_is_left_to_them() {
        let trial = Trial::new();
        let path = trial.path("file");
        trial.file("file", b"");
        let ticket = unlink(&trial, &path);
        let seen: Vec<_> = trial.log.interrupted_by(own()).collect();
        assert_eq!(mended(&trial), (1, vec![]));
        assert_eq!((voided(&trial), trial.log.in_the_middle().count()), (0, 1));
        std::fs::remove_file(&path).unwrap();
        drop(ticket);
        // Another one, under the old name.
        trial.file("file", b"");
        let Mended { left, failures } = mend(&trial.log, seen, Duration::ZERO);
        assert!(left.is_empty() && failures.is_empty() && voided(&trial) == 0);
    }

    #[test]
    fn threads_are_known_to_have_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let number = child.id();
        let pid = Pid::from_child(&child);
        let exited =
            rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(rustix::process::WaitId::Pid(pid), exited).unwrap();
        assert!(has_ended(number, number), "one that nobody has waited for");
        child.wait().unwrap();
        assert!(has_ended(number, number));
        assert!(!has_ended(own(), own()) && !has_ended(1, 1));
    }

    #[test]
    fn another_file_under_the_name_is_left_alone() {
        let trial = Trial::new();
        let file = trial.file("file", b"old");
        die_in(&trial, &file, "file", |ticket| {
            ticket.write(0, &[IoSlice::new(b"new")]).unwrap();
        });
        std::fs::remove_file(trial.path("file")).unwrap();
        std::fs::write(trial.path("file"), "another").unwrap();
        let (left, failures) = mended(&trial);
        assert!(left == 0 && failures[0].contains("left undone"), "{failures:?}");
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"another");
        assert_eq!(trial.log.in_the_middle().count(), 0);
    }

    #[test]
    fn what_the_kernel_may_have_dropped_is_written_once_more() {
        let trial = Trial::new();
        let file = trial.file("file", b"..........");
        for (offset, data) in [(0, &b"aaaa"[..]), (2, b"bb"), (8, b"cccc")] {
            trial.write(&file, "file", offset, data);
        }
        let backlog = trial.backlog();
        let known = backlog.file(trial.lock(&file).id()).unwrap();
        let entry = trial.log.file_with_id(known.id).unwrap();
        rewrite(&trial.log, known, entry, None).unwrap();
        // No longer than the file is.
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"aabb....cc");
    }
}
