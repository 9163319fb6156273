//! Reaps processes that have ended.
//!
//! Invariant: a dead process keeps its slots, which hold the tail, and its notes, which keep files
//! pinned to the kernel path, until the cleaner has repaired or released them. If a held lock
//! prevents that, each later step tries again.

use std::time::Duration;

use rustix::process::Pid;
use tidegate::log::{FileRef, Interrupted};

use super::super::repair::{self, Repaired};
use super::Worker;
use super::handle::Event;

/// How long the first attempt waits for a lock. Later attempts do not wait.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Operations and pins that could not be repaired yet.
#[derive(Debug, Default)]
pub(super) struct Unrepaired {
    operations: Vec<Interrupted>,
    /// Files that are pinned to the kernel path, each with the ended process that pinned it.
    pinned: Vec<(u32, FileRef)>,
}

impl Unrepaired {
    pub(super) fn is_empty(&self) -> bool {
        self.operations.is_empty() && self.pinned.is_empty()
    }
}

impl Worker {
    /// Repairs the interrupted operations of `process`, which has ended, and releases its pins.
    pub(super) fn reap(&mut self, process: Pid) {
        let process = process.as_raw_nonzero().get().unsigned_abs();
        self.log.lanes().release_of(process);
        let repaired = repair::repair_after(&self.log, process, LOCK_TIMEOUT);
        let mut pinned = self.log.keepers().stop_keeping_of(process, LOCK_TIMEOUT);
        pinned.retain(|file| !self.gives_back(process, *file, LOCK_TIMEOUT));
        if !repaired.left.is_empty() || !pinned.is_empty() {
            self.events.send(Event::Notice(
                "what a dead process left is in use and cannot be repaired yet; it is tried again"
                    .into(),
            ));
        }
        self.note(repaired);
        repair::release_names(&self.log, true);
        self.unrepaired.pinned.extend(pinned.into_iter().map(|file| (process, file)));
    }

    /// Tries the failed repairs again.
    pub(super) fn repair_unrepaired(&mut self) {
        let Unrepaired { operations, mut pinned } = std::mem::take(&mut self.unrepaired);
        self.note(repair::repair(&self.log, operations, Duration::ZERO));
        repair::release_names(&self.log, false);
        pinned.retain(|(process, file)| !self.gives_back(*process, *file, Duration::ZERO));
        self.unrepaired.pinned = pinned;
    }

    /// Releases one pin of a process that has ended. Returns whether that was possible. A file that
    /// the process had sealed leaves before, since no record has the later writes of its stream.
    fn gives_back(&self, process: u32, file: FileRef, timeout: Duration) -> bool {
        repair::end_sealed(&self.log, file, timeout)
            && self.log.keepers().stop_keeping_for(process, file, timeout)
    }

    fn note(&mut self, repaired: Repaired) {
        for message in repaired.failures {
            self.events.send(Event::Notice(message));
        }
        for it in repaired.left {
            if !self.unrepaired.operations.contains(&it) {
                self.unrepaired.operations.push(it);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::super::super::trial::Trial;
    use super::super::Step;
    use super::super::failure::PAUSE_LEAST;
    use super::super::failure::tests::worker;
    use super::super::handle::Job;

    /// Recovery would write the record over the process's later writes.
    #[test]
    fn a_file_that_was_sealed_by_a_process_that_ended_leaves() {
        let trial = Trial::new();
        let (mut worker, events) = worker(&trial);
        let file = trial.file("file", b"data");
        trial.begin_story(&file, "file");
        trial.lock(&file).keep_unlogged();
        assert!(trial.lock(&file).is_sealed());
        let ended = Job::Ended(rustix::process::getpid());
        worker.jobs.lock().unwrap().push_back(ended);
        worker.step();
        let guard = trial.lock(&file);
        assert!(guard.pins() == 0 && !guard.is_logged() && events.try_iter().next().is_none());
    }

    /// Otherwise its slot holds the tail, and its mark keeps the file plain, until the tree ends.
    #[test]
    fn what_is_locked_when_its_process_ends_is_repaired_later() {
        let trial = Trial::new();
        let (mut worker, events) = worker(&trial);
        let file = trial.file("file", b"");
        trial.lock(&file).keep_unlogged();
        std::thread::scope(|scope| {
            let dying = scope.spawn(|| {
                std::mem::forget(trial.lock(&file).begin().unwrap());
            });
            dying.join().unwrap();
        });
        std::thread::scope(|scope| {
            let (lock, locked) = channel();
            let (unlock, unlocked) = channel::<()>();
            let (trial, file) = (&trial, &file);
            scope.spawn(move || {
                let _guard = trial.lock(file);
                lock.send(()).unwrap();
                let _ = unlocked.recv();
            });
            let () = locked.recv().unwrap();
            let ended = Job::Ended(rustix::process::getpid());
            worker.jobs.lock().unwrap().push_back(ended);
            for _ in 0..2 {
                let step = worker.step();
                let again = matches!(step, Step::Sleep { timeout: Some(PAUSE_LEAST), .. });
                assert!(again, "{step:?}");
            }
            assert_eq!(trial.log.operations().all().count(), 1);
            drop(unlock);
        });
        assert_eq!(events.try_iter().count(), 1, "told once");
        assert!(trial.lock(&file).pins() > 0);
        let step = worker.step();
        assert!(matches!(step, Step::Sleep { timeout: None, .. }), "{step:?}");
        assert_eq!(trial.log.operations().all().count(), 0);
        assert!(trial.lock(&file).pins() == 0 && events.try_iter().next().is_none());
    }
}
