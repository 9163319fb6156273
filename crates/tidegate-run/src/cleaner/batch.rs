//! A batch of records: summed up, chosen, made durable in its files, retired.
//!
//! Invariants:
//! 1. The tail moves to a position only after a sync without failures of all files and directories that the records
//!    before it name, begun when the kernel had done all their operations.

use std::io;
use std::time::{Duration, Instant};

use tidegate::log::{Counter, RecordKind};

use super::super::backlog::{Due, Window};
use super::super::mounts;
use super::super::pace::{PART_BYTES, Part};
use super::super::policy::Situation;
use super::super::writeback::Failure;
use super::handle::Outcome;
use super::{Step, Worker};

/// How long a batch may take where no room is left to be shown meanwhile.
const BATCH: Duration = Duration::from_millis(40);
/// Pause where a writer is in the middle of an operation that somebody waits for.
const PAUSE_FOR_WRITER: Duration = Duration::from_millis(1);

impl Worker {
    /// Sums up what can be retired by now: how far that is.
    pub(super) fn look(&mut self) -> u64 {
        let safe = self.log.safe_position();
        self.scan(safe);
        safe
    }

    /// Has the kernel start to write what will not be written again soon, until somebody waits for room.
    pub(super) fn start_writing(&mut self) {
        self.absorbed.lend(&mut self.writeback);
        for (id, window) in self.backlog.worth_starting() {
            let Some(file) = self.backlog.file(id) else { continue };
            for part in window.parts(PART_BYTES) {
                if self.log.is_starving() {
                    return;
                }
                let Window { start, end, .. } = part;
                self.writeback.start(file, Part { id, start, end, bytes: 0 });
            }
        }
    }

    fn scan(&mut self, until: u64) {
        let mut payload = Vec::new();
        let mut records = self.log.records(self.backlog.scanned(), until);
        for header in records.by_ref() {
            payload.clear();
            let names =
                [RecordKind::Define, RecordKind::Link, RecordKind::Unlink, RecordKind::Rename];
            if names.contains(&header.kind) {
                payload.resize(header.payload_bytes as usize, 0);
                if self.log.pool().read_payload(&header, 0, &mut payload).is_err() {
                    // Failed memory under a name: its file is synced with its file system.
                    payload.clear();
                }
            }
            self.backlog.add(&header, &payload);
            self.absorbed.add(&header);
        }
        let unreadable_bytes = records.unreadable_bytes();
        self.backlog.reached(until);
        if unreadable_bytes > 0 {
            // Whatever files they are about: the kernel has done what they say, but for what was absorbed.
            rustix::fs::sync();
            self.voice.say(Outcome::Notice(format!(
                "{unreadable_bytes} bytes of the log cannot be read; what programs wrote is on its way to the disk without them"
            )));
        }
    }

    /// Makes the files durable and frees the log up to where that holds.
    pub(super) fn retire(&mut self, situation: &Situation) -> Step {
        let started = Instant::now();
        let safe = self.look();
        // Before anything is opened: to open a file that is lent would break its lease.
        self.absorbed.lend(&mut self.writeback);
        let (goal, due) = self.choose(situation, safe);
        if goal <= self.retired
            && situation.starving
            && !situation.wanted
            && situation.owed_bytes > 0
        {
            // Writers are in the middle of what would be next. They do not tell when they have done it.
            self.show_for_next();
            return Step::Sleep { wake_at: u64::MAX, patience: Some(PAUSE_FOR_WRITER) };
        }
        let (failures, shown) = self.bring(situation, goal, &due);
        if !failures.is_empty() {
            return self.failed(&failures);
        }
        let failures = self.rewrite(self.log.take_dropped());
        if !failures.is_empty() {
            return self.failed(&failures);
        }
        let files: Vec<_> = due.files.keys().filter_map(|id| self.backlog.file(*id)).collect();
        if let Some(name) = mounts::mounted_anew(&self.log, &files) {
            let error = io::Error::other("its file system was mounted anew");
            return self.failed(&[Failure { file: None, name, error }]);
        }
        let synced_from = Instant::now();
        if files.len() < due.files.len() {
            // Of a file that no record defines nothing is known but that it is somewhere.
            rustix::fs::sync();
        }
        let synced = self.writeback.sync(&files, &due.directories);
        self.count(Counter::CleanerSyncs, synced.calls);
        self.count(Counter::CleanerSyncNs, nanoseconds(synced_from.elapsed()));
        if !synced.failures.is_empty() {
            return self.failed(&synced.failures);
        }
        (self.failed_attempts, self.failure_told) = (0, false);
        self.log.stats().raise(Counter::HighWaterBytes, situation.used_bytes);
        let retired = goal > self.retired && self.retire_to(goal);
        if retired {
            self.speed.measured(due.dirty_bytes(), started.elapsed());
            self.counts.written_back(due.dirty_bytes(), self.backlog.files_seen());
        }
        // Or has begun to wait meanwhile.
        let starving = situation.starving || self.log.is_starving();
        let situation = Situation { starving, ..*situation };
        if situation.is_paced(self.retired - self.log.tail(), due.dirty_bytes()) {
            self.show(shown);
            // Who was not woken by that does not say again that he waits.
            self.pressed = Some(Instant::now());
        } else {
            if retired {
                // Who has asked so far is woken by what follows, and asks again if that is not enough.
                self.log.take_starving();
            }
            self.show(self.retired);
        }
        self.answer_waiters();
        if !retired {
            // A writer is in the middle of something: it does not tell when it has done it. Each look asks writers for newer
            // definitions, so there must not be too many.
            let patience = Some(PAUSE_FOR_WRITER);
            return Step::Sleep { wake_at: u64::MAX, patience };
        }
        Step::Again
    }

    /// Moves the tail to `position`, whose room writers are not shown yet.
    fn retire_to(&mut self, position: u64) -> bool {
        match self.log.retire_unseen(position) {
            Ok(()) => {
                self.count(Counter::RetiredBytes, position - self.retired);
                self.retired = position;
                self.backlog.retired(position);
                self.absorbed.retired(position);
                true
            }
            Err(error) => {
                self.voice.say(Outcome::Notice(format!("the log's tail cannot be moved: {error}")));
                false
            }
        }
    }

    /// Up to where records are retired next, and what is due for them.
    ///
    /// Not all that could be, where writers would wait for all of it with nothing to be shown meanwhile. Only of streams: what is
    /// written again and again is not to reach the disk with each part of the log. And only where bytes are brought: what
    /// the kernel has, a sync writes anyway.
    fn choose(&self, situation: &Situation, safe: u64) -> (u64, Due) {
        let due = self.backlog.due();
        let live_bytes = safe.saturating_sub(self.retired);
        let is_stream = due.dirty_bytes().saturating_mul(2) > live_bytes;
        let is_limited = is_stream && !situation.wanted && situation.owed_bytes == 0;
        if is_limited && self.absorbed.has_unbrought() {
            let limit = self.policy.batch_bytes(situation, self.speed.bytes_in(BATCH));
            let may_be_goal = |position| {
                self.retired < position && position <= safe && self.log.may_retire_to(position)
            };
            return self.backlog.due_for(limit, may_be_goal).unwrap_or((safe, due));
        }
        (safe, due)
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
