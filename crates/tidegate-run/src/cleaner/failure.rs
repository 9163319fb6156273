//! What the disk does not take.
//!
//! Invariants:
//! 1. What cannot be synced stays in the log, is written to its file once more from there, and tried again later.

use std::time::Duration;

use super::super::redo;
use super::super::writeback::Failure;
use super::handle::Outcome;
use super::{Step, Worker};

/// Pause after a failure; it doubles up to [`PAUSE_MOST`].
pub(super) const PAUSE_LEAST: Duration = Duration::from_millis(100);
const PAUSE_MOST: Duration = Duration::from_secs(5);
/// Syncs of the same records that may fail before whoever waits is told.
const ATTEMPTS: u32 = 3;

impl Worker {
    /// Notes what could not be synced, so that it is written once more, and pauses.
    pub(super) fn failed(&mut self, failures: &[Failure]) -> Step {
        self.counts.failed();
        // Nothing is written meanwhile that it could be kept for.
        self.show(self.retired);
        self.failed_attempts += 1;
        let message = self.describe(failures);
        let is_passing = failures.iter().all(Failure::is_passing);
        if !self.failure_told && (!is_passing || self.failed_attempts >= ATTEMPTS) {
            self.failure_told = true;
            self.voice.say(Outcome::Notice(format!(
                "{message}; the log keeps it, and it is tried again"
            )));
        }
        if !is_passing {
            self.log.distrust_kernel();
        }
        let failed = failures.iter().filter(|failure| !failure.is_passing());
        let ids = failed.filter_map(|failure| failure.file);
        for entry in self.log.files_with_ids(ids).into_values() {
            // The next sync of the program will tell it; a file that is gone from the table has no program.
            let _ = self.log.note_failure(entry);
        }
        if self.failed_attempts >= ATTEMPTS {
            for waiter in self.waiters.drain(..) {
                let result = Err(message.clone());
                self.voice.say(Outcome::Retired { ticket: waiter.ticket, result });
            }
        }
        let doubled = PAUSE_LEAST.saturating_mul(1 << (self.failed_attempts - 1).min(8));
        Step::Sleep { wake_at: u64::MAX, patience: Some(doubled.min(PAUSE_MOST)) }
    }

    /// Writes all that the log has of these files to them once more: what failed.
    pub(super) fn rewrite(&mut self, files: Vec<u64>) -> Vec<Failure> {
        let mut failures = Vec::new();
        let entries = self.log.files_with_ids(files.iter().copied());
        for id in files {
            // One that is gone from the table has nothing left to be written.
            let Some(&entry) = entries.get(&id) else { continue };
            let Some(file) = self.backlog.file(id) else {
                // Its records were not looked at yet: they are before they are retired.
                let _ = self.log.drop_again(entry);
                continue;
            };
            let lent = self.absorbed.lent(entry);
            if lent.as_ref().is_some_and(|file| appends(file)) {
                // What was absorbed is brought again; the rest, which would be appended, is left to the kernel.
                continue;
            }
            // Opened before: what goes wrong with what is written now is then told to the next sync.
            match &lent {
                Some(lent) => self.writeback.adopt(file.id, lent),
                None => self.writeback.keep_open(file),
            }
            if let Err(error) = redo::rewrite(&self.log, file, entry, lent.as_deref()) {
                let name = file.names.first().cloned().unwrap_or_default();
                let failure = Failure { file: Some(file.id), name, error };
                if failure.is_passing() {
                    // As above.
                    let _ = self.log.drop_again(entry);
                }
                failures.push(failure);
            }
        }
        failures
    }

    fn describe(&self, failures: &[Failure]) -> String {
        let Some(first) = failures.first() else { return String::new() };
        let more = match failures.len() {
            1 => String::new(),
            number => format!(", and {} more", number - 1),
        };
        let name = match first.file {
            Some(id) if first.name.as_os_str().is_empty() => self.name_of(id),
            _ => first.name.display().to_string(),
        };
        format!("{name} cannot be written back ({}){more}", first.error)
    }
}

fn appends(file: &std::fs::File) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::APPEND))
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, channel};

    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

    use super::super::super::absorbed::AbsorbedFiles;
    use super::super::super::allocator::Allocator;
    use super::super::super::leases::Leases;
    use super::super::super::trial::Trial;
    use super::super::handle::Voice;
    use super::super::{Cleaner, Outcome, Worker};

    /// A cleaner without a thread, and what it says.
    pub(in super::super) fn worker(trial: &Trial) -> (Worker, Receiver<Outcome>) {
        let allocator = Allocator::begin(&trial.log).unwrap();
        let absorbed = AbsorbedFiles::new(&trial.log, Leases::default());
        let (sender, outcomes) = channel();
        let ready = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let voice = Voice { sender, ready };
        let (jobs, counts) = (Arc::default(), Arc::default());
        let worker = Worker::new(&trial.log, &jobs, &counts, voice, (allocator, absorbed));
        (worker, outcomes)
    }

    /// How the retirement with this ticket ends.
    fn retired(cleaner: &Cleaner, wanted: u64) -> Result<u64, String> {
        cleaner.retire_all(wanted);
        loop {
            poll(&mut [PollFd::new(cleaner, PollFlags::IN)], None).unwrap();
            for outcome in cleaner.outcomes() {
                if let Outcome::Retired { ticket, result } = outcome
                    && ticket == wanted
                {
                    return result;
                }
            }
        }
    }

    /// Else the program's next sync would tell of an error, and its database be given up for it.
    #[test]
    fn a_lock_that_is_held_is_no_failure_of_the_file() {
        let trial = Trial::new();
        let file = trial.file("file", b"0123456789");
        trial.write(&file, "file", 0, b"abc");
        trial.log.distrust_all_files();
        let allocator = Allocator::begin(&trial.log).unwrap();
        let guard = trial.lock(&file);
        let cleaner = Cleaner::start(Arc::clone(&trial.log), allocator, Leases::default()).unwrap();
        retired(&cleaner, 1).unwrap_err();
        assert!(!guard.take_failure());
        drop(guard);
        retired(&cleaner, 2).unwrap();
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"abc3456789");
        cleaner.stop();
    }

    /// The kernel has dropped what was written to it, and says nothing of it any more.
    #[test]
    fn a_file_that_is_not_summed_up_yet_is_written_once_more_when_it_is() {
        let trial = Trial::new();
        let (mut worker, _outcomes) = worker(&trial);
        let file = trial.file("file", b"0123456789");
        trial.write(&file, "file", 0, b"abc");
        trial.lock(&file).note_dropped();
        assert!(worker.rewrite(trial.log.take_dropped()).is_empty());
        worker.look();
        assert!(worker.rewrite(trial.log.take_dropped()).is_empty());
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"abc3456789");
    }
}
