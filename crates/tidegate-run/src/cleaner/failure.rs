//! Failures of the disk.
//!
//! Invariant: changes that cannot be synced stay in the log, are written to their file again from
//! there, and are tried again later.

use std::time::Duration;

use super::super::rewrite;
use super::super::writeback::Failure;
use super::handle::Event;
use super::{Step, Worker};

/// Pause after a failure; it doubles up to [`PAUSE_MOST`].
pub(super) const PAUSE_LEAST: Duration = Duration::from_millis(100);
const PAUSE_MOST: Duration = Duration::from_secs(5);
/// Syncs of the same records that may fail before the waiting requests fail.
const ATTEMPTS: u32 = 3;

impl Worker {
    /// Notes failures of a sync, so that the files are written again, and pauses.
    pub(super) fn failed(&mut self, failures: &[Failure]) -> Step {
        self.counts.failed();
        self.failed_attempts += 1;
        let message = describe(failures);
        let is_transient = failures.iter().all(Failure::is_transient);
        if !self.failure_told && (!is_transient || self.failed_attempts >= ATTEMPTS) {
            self.failure_told = true;
            let message = format!("{message}; the log keeps it, and it is tried again");
            self.events.send(Event::Notice(message));
        }
        if !is_transient {
            self.log.ring().distrust_kernel();
        }
        let failed = failures.iter().filter(|failure| !failure.is_transient());
        let ids = failed.filter_map(|failure| failure.file);
        for entry in self.log.files_with_ids(ids).into_values() {
            // The program's next sync reports it. A file that is gone from the table has no
            // program.
            let _ = self.log.note_failure(entry);
        }
        if self.failed_attempts >= ATTEMPTS {
            for waiter in self.waiters.drain(..) {
                let result = Err(message.clone());
                self.events.send(Event::Retired { ticket: waiter.ticket, result });
            }
        }
        let doubled = PAUSE_LEAST.saturating_mul(1 << (self.failed_attempts - 1).min(8));
        Step::Sleep { wake_at: u64::MAX, timeout: Some(doubled.min(PAUSE_MOST)) }
    }

    /// Writes the logged changes of these files to them again. Returns the failures.
    pub(super) fn rewrite(&mut self, files: Vec<u64>) -> Vec<Failure> {
        let mut failures = Vec::new();
        let entries = self.log.files_with_ids(files.iter().copied());
        for id in files {
            // A file that is gone from the table has no changes left to write.
            let Some(&entry) = entries.get(&id) else { continue };
            let Some(known) = self.backlog.file(id) else {
                // Its records are not summed up yet. They are before they are retired.
                let _ = self.log.drop_again(entry);
                continue;
            };
            // The descriptor is opened first, so that the next sync gets the write's error.
            let adopted = self.kept.adopt(&self.log, entry, known);
            let outcome = match (adopted, self.kept.get(id)) {
                (Ok(()), Some(kept)) => rewrite::rewrite(&self.log, entry, &kept.file),
                // A file that is not at its path any more may be removed.
                (Err(error), _) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
                (Err(error), _) => Err(error),
                (Ok(()), None) => Ok(()),
            };
            if let Err(error) = outcome {
                let failure = Failure { file: Some(id), path: known.path.clone(), error };
                if failure.is_transient() {
                    let _ = self.log.drop_again(entry);
                }
                failures.push(failure);
            }
        }
        failures
    }
}

fn describe(failures: &[Failure]) -> String {
    let Some(first) = failures.first() else { return String::new() };
    let more = match failures.len() {
        1 => String::new(),
        number => format!(", and {} more", number - 1),
    };
    let path = if first.path.as_os_str().is_empty() {
        "a file".into()
    } else {
        first.path.display().to_string()
    };
    format!("{path} cannot be written back ({}){more}", first.error)
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, channel};

    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

    use super::super::super::allocator::Allocator;
    use super::super::super::trial::Trial;
    use super::super::handle::Events;
    use super::super::{Cleaner, Event, Worker};

    /// Makes a cleaner without a thread, and its events.
    pub(in super::super) fn worker(trial: &Trial) -> (Worker, Receiver<Event>) {
        let allocator = Allocator::begin(&trial.log).unwrap();
        let (sender, events) = channel();
        let ready = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let (jobs, counts) = (Arc::default(), Arc::default());
        let worker = Worker::new(&trial.log, &jobs, &counts, Events { sender, ready }, allocator);
        (worker, events)
    }

    /// Returns the outcome of a retirement with this ticket.
    fn retired(cleaner: &Cleaner, wanted: u64) -> Result<u64, String> {
        cleaner.retire_all(wanted);
        loop {
            poll(&mut [PollFd::new(cleaner, PollFlags::IN)], None).unwrap();
            for event in cleaner.events() {
                if let Event::Retired { ticket, result } = event
                    && ticket == wanted
                {
                    return result;
                }
            }
        }
    }

    /// Otherwise the program's next sync would fail, and the program would give up its database.
    #[test]
    fn a_lock_that_is_held_is_no_failure_of_the_file() {
        let trial = Trial::new();
        let file = trial.file("file", b"0123456789");
        trial.write(&file, "file", 0, b"abc");
        trial.log.distrust_all_files();
        let allocator = Allocator::begin(&trial.log).unwrap();
        let guard = trial.lock(&file);
        let cleaner = Cleaner::start(Arc::clone(&trial.log), allocator).unwrap();
        retired(&cleaner, 1).unwrap_err();
        assert!(!guard.take_failure());
        drop(guard);
        retired(&cleaner, 2).unwrap();
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"abc3456789");
        cleaner.stop();
    }

    /// The kernel has dropped the written data, and reports no further error.
    #[test]
    fn a_file_that_is_not_summed_up_yet_is_written_once_more_when_it_is() {
        let trial = Trial::new();
        let (mut worker, _events) = worker(&trial);
        let file = trial.file("file", b"0123456789");
        trial.write(&file, "file", 0, b"abc");
        trial.lock(&file).note_dropped();
        assert!(worker.rewrite(trial.log.take_dropped()).is_empty());
        worker.look();
        assert!(worker.rewrite(trial.log.take_dropped()).is_empty());
        assert_eq!(std::fs::read(trial.path("file")).unwrap(), b"abc3456789");
    }
}
