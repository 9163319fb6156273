//! A batch of records: summed up, chosen, made durable in its files, retired.
//!
//! Invariants:
//! 1. The tail moves to a position only after a sync without failures of all data that the records
//!    before it make due (invariant 3 of `backlog` lists the exceptions). After that, all file
//!    systems whose names they record are synced. Both syncs begin when the kernel has made all
//!    these changes.
//! 2. While a writer waits for free space a batch is as small as the disk takes in [`BATCH`], and
//!    no batch that may be divided is more than three times that.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidegate::log::{Counter, RecordKind};

use super::super::backlog::Due;
use super::super::policy::Situation;
use super::super::writeback::{Synced, Writeback};
use super::handle::Event;
use super::{Step, Worker};

/// How long a batch may take while a writer waits for free space.
const BATCH: Duration = Duration::from_millis(40);
/// Pause while the batch waits for a writer in an operation. The writer does not report its end.
const PAUSE_FOR_WRITER: Duration = Duration::from_millis(1);

impl Worker {
    /// Sums up the records that can be retired by now, and returns their end.
    pub(super) fn look(&mut self) -> u64 {
        let safe = self.log.ring().safe_position();
        self.scan(safe);
        safe
    }

    /// Makes the kernel start to write about `dirty_bytes` that will not be written again soon.
    pub(super) fn start_writing(&mut self, dirty_bytes: u64) {
        let due = self.backlog.worth_starting(dirty_bytes);
        self.writeback().start(&due);
    }

    fn writeback(&self) -> Writeback<'_> {
        Writeback { log: &self.log, kept: &self.kept, held: &self.held, backlog: &self.backlog }
    }

    fn scan(&mut self, until: u64) {
        let mut payload = Vec::new();
        let mut records = self.log.ring().records(self.backlog.scanned(), until);
        for header in records.by_ref() {
            payload.clear();
            if header.kind == RecordKind::Define {
                payload.resize(header.payload_bytes as usize, 0);
                if self.log.ring().pool().read_payload(&header, 0, &mut payload).is_err() {
                    // Failed memory: if the file is not kept, all file systems are synced.
                    payload.clear();
                }
            }
            self.backlog.add(&header, &payload);
        }
        let unreadable_bytes = records.unreadable_bytes();
        self.backlog.reached(until);
        if unreadable_bytes > 0 {
            // The kernel has the changes of these records, and any file may have been changed.
            let synced = self.writeback().sync_known();
            let outcome = match synced {
                Ok(()) => "what programs wrote is on the disk without them".into(),
                Err(error) => format!("what programs wrote may not be on the disk: {error}"),
            };
            self.events.send(Event::Notice(format!(
                "{unreadable_bytes} bytes of the log cannot be read; {outcome}"
            )));
        }
    }

    /// Makes a batch of records durable in their files, and frees the log up to the batch's end.
    pub(super) fn retire(&mut self, situation: &Situation) -> Step {
        let (names_since, head) =
            (self.log.file_systems().take_names_since(), self.log.ring().head());
        let step = self.retire_batch(situation);
        if let Some(since_ns) = names_since.filter(|_| self.log.ring().tail() < head) {
            self.log.file_systems().names_remain(since_ns);
        }
        step
    }

    fn retire_batch(&mut self, situation: &Situation) -> Step {
        let safe = self.look();
        let (goal, due) = self.choose(situation, safe);
        let dirty_bytes = due.dirty_bytes();
        let failures = self.rewrite(self.log.take_dropped());
        if !failures.is_empty() {
            return self.failed(&failures);
        }
        let started = Instant::now();
        let synced = self.sync(&due);
        self.count(Counter::CleanerSyncs, synced.calls);
        self.count(Counter::CleanerSyncNs, nanoseconds(started.elapsed()));
        if !synced.failures.is_empty() {
            return self.failed(&synced.failures);
        }
        (self.failed_attempts, self.failure_told) = (0, false);
        self.log.ring().stats().raise(Counter::HighWaterBytes, situation.used_bytes);
        let is_retired = goal > self.log.ring().tail() && self.retire_to(goal);
        if is_retired {
            self.is_blocked = false;
            self.speed.measured(dirty_bytes, started.elapsed());
            self.counts.written_back(dirty_bytes, self.backlog.files_seen());
        }
        self.answer_waiters();
        if is_retired || self.log.ring().head() == self.log.ring().tail() {
            return Step::Again;
        }
        // A writer is in the middle of an operation. Each look asks writers for newer definitions,
        // so looks are rare.
        Step::Sleep { wake_at: u64::MAX, timeout: Some(PAUSE_FOR_WRITER) }
    }

    /// Makes all due data durable. Meanwhile opens files that programs want kept, and allocates
    /// space, so that no program waits for a disk for these.
    fn sync(&mut self, due: &Due) -> Synced {
        if due.is_empty() {
            return Synced::default();
        }
        let is_over = AtomicBool::new(false);
        let (log, kept, held, backlog) = (&self.log, &self.kept, &self.held, &self.backlog);
        let writeback = Writeback { log, kept, held, backlog };
        let mut opened = Vec::new();
        let synced = std::thread::scope(|scope| {
            let syncing = scope.spawn(|| {
                let synced = writeback.sync(due);
                is_over.store(true, Ordering::Release);
                log.ring().wake_cleaner();
                synced
            });
            loop {
                let seen = log.ring().work();
                if is_over.load(Ordering::Acquire) {
                    break syncing.join();
                }
                opened.extend(writeback.kept.open_wanted(log));
                if let Err(message) =
                    self.allocator.keep_ahead(log, log.ring().has_blocked_writer())
                {
                    self.events.send(Event::Notice(message));
                }
                let wake_at = self.allocator.wake_at(log).unwrap_or(u64::MAX);
                log.ring().wait_for_work(seen, wake_at, None);
            }
        });
        self.kept.insert(opened);
        synced.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Moves the tail to `position`.
    fn retire_to(&mut self, position: u64) -> bool {
        let tail = self.log.ring().tail();
        match self.log.ring().retire_to(position) {
            Ok(()) => {
                self.count(Counter::RetiredBytes, position - tail);
                self.backlog.retired(position);
                true
            }
            Err(error) => {
                let message = format!("the log's tail cannot be moved: {error}");
                self.events.send(Event::Notice(message));
                false
            }
        }
    }

    /// Chooses the end of the records to retire next, and returns it with the data that they make
    /// due. Starts to write later data meanwhile.
    fn choose(&mut self, situation: &Situation, safe: u64) -> (u64, Due) {
        let situation = Situation { dirty_bytes: self.backlog.dirty_bytes(), ..*situation };
        let disk_bytes = self.speed.bytes_in(BATCH);
        let limit = self.policy.batch_bytes(&situation, disk_bytes);
        if let Some(limit) = limit {
            let tail = self.log.ring().tail();
            let may_be_goal =
                |goal| tail < goal && goal <= safe && self.log.ring().may_retire_to(goal);
            let log_bytes = self.policy.batch_log_bytes();
            if let Some(chosen) = self.backlog.due_for(limit, log_bytes, may_be_goal) {
                // Only as much as keeps the disk busy until the next batch: this thread waits while
                // the disk's queue is full.
                self.start_writing(disk_bytes);
                return chosen;
            }
        }
        (safe, self.backlog.due())
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::super::trial::Trial;
    use super::super::failure::tests::worker;
    use super::super::{NAMES_AGE, QUIET};
    use super::*;

    #[test]
    fn names_are_retired_half_a_second_after_the_first_of_them() {
        let trial = Trial::new();
        let (mut worker, _events) = worker(&trial);
        let file = trial.file("file", b"content");
        trial.make(&file, "file", b"content");
        let Step::Sleep { timeout, .. } = worker.step() else { panic!("names are young") };
        assert!(timeout.is_some_and(|timeout| timeout <= NAMES_AGE), "{timeout:?}");
        assert!(trial.log.has_names(trial.lock(&file).file()));
        // The first record looks as if it was appended when the machine was started.
        trial.log.file_systems().names_remain(1);
        worker.step();
        assert_eq!(
            (trial.log.ring().tail(), trial.log.file_systems().names_age()),
            (trial.log.ring().head(), None)
        );
        assert!(!trial.log.has_names(trial.lock(&file).file()) && trial.lock(&file).is_covered());
    }

    #[test]
    fn names_in_the_middle_are_retired_later() {
        let trial = Trial::new();
        let (mut worker, _events) = worker(&trial);
        let (file, other) = (trial.file("file", b""), trial.file("other", b""));
        trial.begin_story(&other, "other");
        let guard = trial.lock(&other);
        let ticket = guard.begin().unwrap();
        trial.make(&file, "file", b"");
        trial.log.file_systems().names_remain(1);
        worker.step();
        assert!(
            trial.log.has_names(trial.lock(&file).file())
                && trial.log.file_systems().names_age().is_some()
        );
        drop(ticket);
        worker.step();
        assert!(
            !trial.log.has_names(trial.lock(&file).file())
                && trial.log.file_systems().names_age().is_none()
        );
    }
    /// The stories of its files end then, and the ends are records too.
    #[test]
    fn an_idle_log_is_empty_once_it_was_looked_at() {
        let trial = Trial::new();
        let (mut worker, _events) = worker(&trial);
        let file = trial.file("file", b"0123456789");
        trial.write(&file, "file", 0, b"abc");
        trial.log.want_kept(trial.lock(&file).file());
        assert!(matches!(worker.step(), Step::Sleep { .. }), "the log is in use");
        assert!(trial.log.ring().head() > trial.log.ring().tail() && trial.lock(&file).is_logged());
        let long_ago = Instant::now().checked_sub(QUIET).unwrap();
        worker.quiet_since = (trial.log.ring().head(), long_ago);
        while worker.step() == Step::Again {}
        assert!(!trial.lock(&file).is_logged(), "its story has ended");
        assert_eq!(trial.log.ring().tail(), trial.log.ring().head());
    }
}
