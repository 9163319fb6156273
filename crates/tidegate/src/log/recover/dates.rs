//! Detects changes of a file from outside, by its modification time and the log's heartbeats.
//!
//! A record has the time when it was made, before the kernel did its operation. A heartbeat has the
//! position below which all operations were done by its time. Both use the clock of file
//! timestamps, and the kernel never sets a timestamp later than that clock. So the session leaves
//! no timestamp in a file later than the first moment when the file's last operation is known to be
//! done. If the log has no such moment, the session ended before the next heartbeat was due: none
//! of its timestamps is later. If the record of a sync has the file's timestamp, and nothing
//! changed the file since, the session left that timestamp or an earlier one. In a record of a
//! whole file it is the ctime, which no program can set back.
//!
//! Invariants:
//! 1. A timestamp that the session may have left is never taken for a change from outside. If the
//!    clock was set back, the bound moves by as much.
//! 2. A change from outside is noticed if the clock of file timestamps has since moved on from the
//!    session's last change: by a tick after a sync, by [`LATE_NS`] at the end of the session.

use super::named::MadeFile;
use crate::log::{Header, Heartbeat, RecordKind};

/// The longest time from the session's last record or heartbeat to its last change of a file: the
/// interval of heartbeats and their delay.
pub(super) const LATE_NS: u64 = 500_000_000;
/// The longest tick of the clock of file timestamps.
const TICK_NS: u64 = 10_000_000;

/// The timestamps in the records of one story.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StoryDates {
    /// The last record.
    last: Option<Last>,
    /// The latest time of a record, not always the last one's: the clock may have been set back.
    latest_ns: u64,
    /// The last change of bytes or size that was synced: the file's timestamp at the sync, or the
    /// time of the change's record if the sync's record has no timestamp.
    pub(super) synced_ns: u64,
    /// The last change of bytes or size that was not synced.
    unsynced_ns: u64,
    /// The latest timestamp of the file until its last sync, if nothing changed it since.
    shown_ns: Option<u64>,
    /// The whole file was recorded after its last change of bytes or size: a program may have set
    /// its modification time back.
    was_made: bool,
}

#[derive(Debug, Clone, Copy)]
struct Last {
    position: u64,
    wall_ns: u64,
    /// The kernel did the operation after the record was made.
    is_before_operation: bool,
}

impl StoryDates {
    /// Adds the story's next record.
    pub(super) fn add(&mut self, header: &Header) {
        let is_before_operation = matches!(header.kind, RecordKind::Write | RecordKind::SetSize);
        let &Header { position, wall_ns, .. } = header;
        self.last = Some(Last { position, wall_ns, is_before_operation });
        self.latest_ns = self.latest_ns.max(wall_ns);
        match header.kind {
            RecordKind::Write | RecordKind::SetSize => {
                self.unsynced_ns = wall_ns;
                (self.shown_ns, self.was_made) = (None, false);
            }
            RecordKind::Mark if header.aux != 0 => {
                (self.synced_ns, self.unsynced_ns) = (header.aux, 0);
                let made_ns = self.shown_ns.map(|shown_ns| shown_ns.max(header.aux));
                self.shown_ns = if self.was_made { made_ns } else { Some(header.aux) };
            }
            RecordKind::Mark if self.unsynced_ns != 0 => {
                self.synced_ns = std::mem::take(&mut self.unsynced_ns);
            }
            RecordKind::Make => {
                (self.synced_ns, self.unsynced_ns) = (0, 0);
                (self.shown_ns, self.was_made) = (Some(header.aux).filter(|ns| *ns != 0), true);
            }
            _ => {}
        }
    }
}

/// The timestamps of a log.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Dates {
    heartbeat: Option<Heartbeat>,
    latest_ns: u64,
}

impl Dates {
    pub(super) fn new(heartbeat: Option<Heartbeat>) -> Self {
        Self { heartbeat, latest_ns: heartbeat.map_or(0, |beat| beat.wall_ns) }
    }

    /// Adds the log's next record.
    pub(super) fn add(&mut self, header: &Header) {
        self.latest_ns = self.latest_ns.max(header.wall_ns);
    }

    /// Returns a bound on the session's timestamps, or `None` if the log has no times.
    pub(super) fn ended_ns(&self) -> Option<i128> {
        let set_back_ns = self.heartbeat.map_or(0, |beat| beat.set_back_ns);
        let ended_ns = self.latest_ns.saturating_add(LATE_NS).saturating_add(set_back_ns);
        (self.latest_ns != 0).then(|| ended_ns.into())
    }

    /// Returns the latest modification time that the session may have left in a file with this
    /// story.
    pub(super) fn modified_until(
        &self,
        story: &StoryDates,
        made: Option<&MadeFile>,
    ) -> Option<u64> {
        let last = story.last.filter(|last| last.wall_ns != 0)?;
        let beat = self.heartbeat.unwrap_or_default();
        let made_ns = made.map_or(0, MadeFile::modified_ns);
        // If the clock was set back, an older state of the file may have a later timestamp.
        let is_ordered = beat.set_back_ns == 0 && story.latest_ns <= last.wall_ns;
        if let Some(shown_ns) = story.shown_ns.filter(|_| is_ordered) {
            return Some(shown_ns.max(made_ns));
        }
        let done_ns = if !last.is_before_operation {
            last.wall_ns
        } else if last.position < beat.done {
            beat.wall_ns
        } else {
            self.latest_ns.saturating_add(LATE_NS)
        };
        let latest_ns = done_ns.max(story.latest_ns).saturating_add(beat.set_back_ns);
        Some(latest_ns.max(made_ns))
    }

    /// Returns whether a process outside modified the file at `modified_ns`, if the session can
    /// have left no timestamp after `until_ns`. An interrupted recovery has left later ones, so
    /// changes after its start do not count.
    pub(super) fn is_from_outside(&self, modified_ns: i128, until_ns: impl Into<i128>) -> bool {
        let recovery_ns = self.heartbeat.map_or(0, |beat| beat.recovery_ns);
        modified_ns > until_ns.into()
            && (recovery_ns == 0 || modified_ns < recovery_ns.saturating_sub(TICK_NS).into())
    }
}
