//! Room on its way to writers, in step with what the disk takes.

use std::collections::HashMap;
use std::time::Instant;

use tidegate::log::Log;

use super::super::backlog::{Backlog, Due, Window};
use super::super::pace::{PART_BYTES, Pace, Part};
use super::super::policy::Situation;
use super::super::writeback::{Failure, Writeback};
use super::Worker;

/// With more parts of files to write than this, waiting for each would cost more than it brings.
const PARTS_PACED: usize = 256;

impl Worker {
    /// Gives the kernel what was absorbed before `goal`, and the disk what is due of it, while writers are shown the room of the
    /// last batch. What failed, and up to where room may be shown when all is durable.
    pub(super) fn bring(
        &mut self,
        situation: &Situation,
        goal: u64,
        due: &Due,
    ) -> (Vec<Failure>, u64) {
        let (shown, owed) = (self.log.tail(), self.retired - self.log.tail());
        let brought = self.absorbed.bytes_to_bring(goal);
        let parts = parts(due, &brought);
        let is_paced = owed > 0 && situation.is_paced(owed, due.dirty_bytes());
        let is_in_parts = is_paced && parts.len() <= PARTS_PACED;
        let mut room = owed;
        if is_paced {
            room = self.policy.room_to_show(owed, goal.saturating_sub(self.retired));
        } else {
            self.show(self.retired);
        }
        let own_bytes = if is_in_parts { parts.iter().map(|part| part.bytes).sum() } else { 0 };
        let batch_bytes = brought.values().sum::<u64>() + own_bytes;
        let mut feed = Feed {
            log: &self.log,
            backlog: &self.backlog,
            writeback: &mut self.writeback,
            pace: Pace::new(shown, if is_paced { room } else { 0 }, batch_bytes, self.shown_at),
            begun: self.begun,
        };
        let scanned = self.backlog.scanned();
        let mut failures =
            self.absorbed.bring(goal, scanned, &mut |part| feed.give(part, part.bytes));
        if is_in_parts {
            failures.extend(parts.iter().find_map(|part| feed.give(*part, part.bytes).err()));
        }
        self.shown_at = feed.pace.shown_at();
        (failures, shown + room)
    }

    /// Shows writers the room for the next batch: the rest is for the time that it takes.
    pub(super) fn show_for_next(&mut self) {
        let (shown, head) = (self.log.tail(), self.log.head());
        let room = self.policy.room_for_next(self.retired - shown, head - shown);
        self.show(shown + room.next_multiple_of(64).min(self.retired - shown));
    }

    /// Shows writers the room up to `position`, which was retired.
    pub(super) fn show(&mut self, position: u64) {
        if position > self.log.tail() {
            self.log.show_room(position);
            self.shown_at = self.begun.elapsed();
        }
    }
}

/// What is due, in parts, but for files whose bytes are `brought`.
fn parts(due: &Due, brought: &HashMap<u64, u64>) -> Vec<Part> {
    let own = due.parts(PART_BYTES.max(due.dirty_bytes() / PARTS_PACED as u64 * 2));
    let own: Vec<_> = own.into_iter().filter(|(id, _)| !brought.contains_key(id)).collect();
    let bytes = due.dirty_bytes() / (own.len() as u64).max(1);
    own.into_iter().map(|(id, Window { start, end, .. })| Part { id, start, end, bytes }).collect()
}

/// Parts of files on their way to the disk.
struct Feed<'a> {
    log: &'a Log,
    backlog: &'a Backlog,
    writeback: &'a mut Writeback,
    pace: Pace,
    begun: Instant,
}

impl Feed<'_> {
    /// Has the disk take a part, and shows room for `bytes` of it.
    ///
    /// # Errors
    /// The disk does not take it.
    fn give(&mut self, part: Part, bytes: u64) -> Result<(), Failure> {
        let known = self.backlog.file(part.id);
        let finished = known.map_or(Ok(()), |file| self.writeback.finish(file, part));
        if let Some(position) = self.pace.took(bytes, self.begun.elapsed()) {
            self.log.show_room(position);
        }
        finished
    }
}
