//! Processes that have ended.
//!
//! Invariants:
//! 1. What a dead process left stays its own until it is mended: its slots hold the tail, its notes keep files unlogged. What
//!    somebody else's lock keeps from being mended is tried again, at each step, until it is.

use std::time::Duration;

use rustix::process::Pid;
use tidegate::log::{FileRef, Interrupted};

use super::super::redo::{self, Mended};
use super::Worker;
use super::handle::Outcome;

/// How long a lock is waited for at first; later nobody is kept waiting for it.
const PATIENCE: Duration = Duration::from_secs(1);

/// What could not be mended yet.
#[derive(Debug, Default)]
pub(super) struct Unmended {
    operations: Vec<Interrupted>,
    /// Marks of files that are kept unlogged, each with its process.
    kept: Vec<(u32, FileRef)>,
}

impl Unmended {
    pub(super) fn is_empty(&self) -> bool {
        self.operations.is_empty() && self.kept.is_empty()
    }
}

impl Worker {
    /// Mends what the process left that has ended.
    pub(super) fn mend_after(&mut self, process: Pid) {
        let process = process.as_raw_nonzero().get().unsigned_abs();
        let mended = redo::mend_after(&self.log, process, PATIENCE);
        let kept = self.log.stop_keeping_of(process, PATIENCE);
        if !mended.left.is_empty() || !kept.is_empty() {
            self.voice.say(Outcome::Notice(
                "what a dead process left is in use and cannot be mended yet; it is tried again"
                    .into(),
            ));
        }
        self.note(mended);
        self.unmended.kept.extend(kept.into_iter().map(|file| (process, file)));
        let absorbed: Vec<_> = self.log.absorbed_by(Some(process)).collect();
        for file in absorbed {
            self.settle(file, None, false);
        }
    }

    /// Tries again what could not be mended.
    pub(super) fn mend_unmended(&mut self) {
        let Unmended { operations, mut kept } = std::mem::take(&mut self.unmended);
        self.note(redo::mend(&self.log, operations, Duration::ZERO));
        kept.retain(|(process, file)| !self.log.stop_keeping_for(*process, *file, Duration::ZERO));
        self.unmended.kept = kept;
    }

    fn note(&mut self, mended: Mended) {
        for message in mended.failures {
            self.voice.say(Outcome::Notice(message));
        }
        for it in mended.left {
            if !self.unmended.operations.contains(&it) {
                self.unmended.operations.push(it);
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

    /// Else its slot would hold the tail, and its mark keep the file unlogged, until the whole tree has ended.
    #[test]
    fn what_is_locked_when_its_process_ends_is_mended_later() {
        let trial = Trial::new();
        let (mut worker, outcomes) = worker(&trial);
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
                let again = matches!(step, Step::Sleep { patience: Some(PAUSE_LEAST), .. });
                assert!(again, "{step:?}");
            }
            assert_eq!(trial.log.in_the_middle().count(), 1);
            drop(unlock);
        });
        assert_eq!(outcomes.try_iter().count(), 1, "told once");
        assert!(trial.lock(&file).is_sticky());
        let step = worker.step();
        assert!(matches!(step, Step::Sleep { patience: None, .. }), "{step:?}");
        assert_eq!(trial.log.in_the_middle().count(), 0);
        assert!(!trial.lock(&file).is_sticky() && outcomes.try_iter().next().is_none());
    }
}
