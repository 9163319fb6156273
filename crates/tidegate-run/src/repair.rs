//! Repairs the interrupted operations of killed processes. This is done when a process has ended,
//! unless another process locks the file before and repairs the operation itself.

use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use tidegate::log::{
    Definition, FileGuard, FileRef, Interrupted, LockError, Log, RecordKind, RepairError,
};

use super::backlog::Known;
use super::locate;

/// Outcome of a repair of interrupted operations.
#[derive(Debug, Default)]
pub(crate) struct Repaired {
    /// Operations that could not be repaired yet, since a lock is held; for another [`repair`].
    pub(crate) left: Vec<Interrupted>,
    /// The reasons of repairs that failed.
    pub(crate) failures: Vec<String>,
}

/// Repairs the interrupted operations of an ended process. Waits at most `timeout` for each lock.
pub(crate) fn repair_after(log: &Log, process: u32, timeout: Duration) -> Repaired {
    repair(log, log.operations().interrupted_by(process).collect(), timeout)
}

/// Repairs these operations, whose processes have ended. Waits at most `timeout` for each lock.
pub(crate) fn repair(log: &Log, interrupted: Vec<Interrupted>, timeout: Duration) -> Repaired {
    let mut repaired = Repaired::default();
    // Some may be repaired by now: a living process may have an ended one's number.
    for it in interrupted.into_iter().filter(|it| log.operations().is_interrupted(it)) {
        match repair_one(log, &it, timeout) {
            None => repaired.left.push(it),
            Some(Err(error)) => repaired.failures.push(format!(
                "a file that a killed process was in the middle of changing has not left the log: {error}"
            )),
            Some(Ok(())) => {}
        }
    }
    repaired
}

/// Repairs one operation. Returns `None` if another process has the file locked, or if the
/// operation's thread lives.
fn repair_one(
    log: &Log,
    interrupted: &Interrupted,
    timeout: Duration,
) -> Option<Result<(), RepairError>> {
    let Some(file) = log.operations().file_of(interrupted) else {
        // The thread was killed before the slot got a file. No lock distinguishes such a slot from
        // that of an operation that begins.
        return has_ended(interrupted.process, interrupted.thread()).then(|| {
            log.operations().complete(interrupted);
            Ok(())
        });
    };
    let guard = log.lock_within(file, timeout).ok()?;
    // The lock's previous owner may have repaired it already.
    Some(log.operations().repair(&guard, || sync_names(log, &guard)))
}

/// Ends the story of a [sealed](FileGuard::is_sealed) file. Returns whether it is sealed no more.
pub(crate) fn end_sealed(log: &Log, file: FileRef, timeout: Duration) -> bool {
    match log.lock_within(file, timeout) {
        Ok(guard) => {
            !guard.is_sealed() || sync_names(log, &guard).is_ok() && guard.end_story().is_ok()
        }
        Err(error) => error == LockError::Stale,
    }
}

/// Makes the current names of a file durable.
fn sync_names(log: &Log, guard: &FileGuard<'_>) -> Result<(), Errno> {
    let payload = log.definition_of(guard.file());
    let definition = payload.as_deref().and_then(Definition::decode);
    let known = definition.map(|definition| Known::of(&definition, 0));
    let path = known.map(|known| known.path).unwrap_or_default();
    let synced = locate::sync_file_system(log.device_of(guard.file()), &path);
    synced.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// Allows names to be recorded again after a holder of their lock was killed, once no interrupted
/// record of a name is left. With `looks_at_all`, also takes locks that were not found orphaned
/// yet.
pub(crate) fn release_names(log: &Log, looks_at_all: bool) {
    let is_killed = |it: &Interrupted| {
        it.header.is_some_and(|header| header.kind == RecordKind::Name)
            && has_ended(it.process, it.thread())
    };
    for file_system in log.file_systems().all() {
        if !looks_at_all && !log.file_systems().has_orphaned_names(file_system) {
            continue;
        }
        // A living holder repairs the names itself.
        let Ok(names) = log.file_systems().lock_names_within(file_system, Duration::ZERO) else {
            continue;
        };
        if names.is_orphaned() && !log.operations().all().any(|it| is_killed(&it)) {
            names.repaired();
        }
    }
}

/// Returns whether a thread has ended, as far as this user may know.
fn has_ended(process: u32, thread: u32) -> bool {
    match std::fs::read(format!("/proc/{process}/task/{thread}/stat")) {
        // The state follows the name, which may contain any characters.
        Ok(stat) => stat
            .rsplit(|byte| *byte == b')')
            .next()
            .is_some_and(|rest| matches!(rest.get(1), Some(b'Z' | b'X'))),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => false,
        // The thread does not exist, or is hidden from this user.
        Err(_) => Pid::from_raw(process.cast_signed())
            .is_none_or(|process| test_kill_process(process) != Err(Errno::PERM)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::IoSlice;

    use tidegate::log::{FileHandle, NameAt, NameChange, NameRecord};

    use super::super::trial::Trial;
    use super::*;

    fn own() -> u32 {
        rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()
    }

    /// Ends a thread in the middle of `operation`, with its slot taken and its lock held.
    fn die_in(
        trial: &Trial,
        file: &File,
        operation: impl FnOnce(&mut tidegate::log::Ticket<'_>) + Send,
    ) {
        trial.begin_story(file, "file");
        std::thread::scope(|scope| {
            let dying = scope.spawn(|| {
                let guard = trial.lock(file);
                let mut ticket = guard.begin().unwrap();
                operation(&mut ticket);
                std::mem::forget(ticket);
                std::mem::forget(guard);
            });
            // Only now does the kernel release the thread's locks.
            dying.join().unwrap();
        });
    }

    /// Returns how many operations are left, and the failures.
    fn repaired(trial: &Trial) -> (usize, Vec<String>) {
        let Repaired { left, failures } = repair_after(&trial.log, own(), Duration::ZERO);
        (left.len(), failures)
    }

    #[test]
    fn a_file_that_its_process_was_killed_in_the_middle_of_changing_leaves_the_log() {
        let trial = Trial::new();
        let file = trial.file("file", b"0123456789");
        let write = |ticket: &mut tidegate::log::Ticket<'_>| {
            ticket.write(4, &[IoSlice::new(b"abcd")], false).unwrap();
        };
        let cut = |ticket: &mut tidegate::log::Ticket<'_>| {
            ticket.set_size(6, false).unwrap();
        };
        for change in [write, cut] {
            die_in(&trial, &file, change);
            let unlogged = trial.lock(&file).unlogged();
            assert_eq!(repaired(&trial), (0, vec![]));
            let guard = trial.lock(&file);
            assert!(guard.unlogged() > unlogged && !guard.owner_died() && !guard.is_logged());
            let records =
                trial.log.ring().records(trial.log.ring().tail(), trial.log.ring().head());
            assert_eq!(records.last().unwrap().kind, RecordKind::End);
        }
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"0123456789");
        assert_eq!(trial.log.operations().all().count(), 0);
        assert_eq!(trial.log.ring().safe_position(), trial.log.ring().head());
    }

    #[test]
    fn a_file_whose_names_its_process_was_changing_leaves_the_log() {
        let trial = Trial::new();
        let file = trial.file("file", b"");
        trial.make(&file, "file", b"content");
        let to = NameAt { parent: FileHandle::new(1, &[1; 8]).unwrap(), name: b"to" };
        let names = trial.log.file_systems().find_or_add(1, true).unwrap();
        std::thread::scope(|scope| {
            let dying = scope.spawn(|| {
                std::mem::forget(trial.log.file_systems().lock_names(names).unwrap());
                let guard = trial.lock(&file);
                let mut ticket = guard.begin().unwrap();
                ticket.name(&NameRecord { change: NameChange::Link { to }, links: 2 }).unwrap();
                std::mem::forget(ticket);
                std::mem::forget(guard);
            });
            dying.join().unwrap();
        });
        assert!(trial.log.file_systems().lock_names(names).unwrap().is_orphaned());
        assert_eq!(repaired(&trial), (0, vec![]));
        assert!(!trial.lock(&file).is_logged() && !trial.log.has_names(trial.lock(&file).file()));
        let records = trial.log.ring().records(trial.log.ring().tail(), trial.log.ring().head());
        assert_eq!(records.last().unwrap().kind, RecordKind::End);
        release_names(&trial.log, false);
        assert!(!trial.log.file_systems().lock_names(names).unwrap().is_orphaned());
    }

    #[test]
    fn a_slot_without_a_record_is_given_back() {
        let trial = Trial::new();
        let file = trial.file("file", b"same");
        die_in(&trial, &file, |_| {});
        assert_eq!(repaired(&trial), (0, vec![]));
        assert_eq!(trial.log.operations().all().count(), 0);
    }

    #[test]
    fn what_is_locked_is_left_for_later() {
        let trial = Trial::new();
        let file = trial.file("file", b"");
        trial.begin_story(&file, "file");
        let guard = trial.lock(&file);
        let ticket = guard.begin().unwrap();
        let left = std::thread::scope(|scope| scope.spawn(|| repaired(&trial)).join().unwrap());
        assert_eq!(left, (1, vec![]));
        drop(ticket);
        drop(guard);
        assert_eq!(repaired(&trial), (0, vec![]));
    }

    #[test]
    fn threads_are_known_to_have_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let number = child.id();
        let pid = Pid::from_child(&child);
        let exited =
            rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(rustix::process::WaitId::Pid(pid), exited).unwrap();
        assert!(has_ended(number, number), "one that was not waited for");
        child.wait().unwrap();
        assert!(has_ended(number, number));
        assert!(!has_ended(own(), own()) && !has_ended(1, 1));
    }
}
