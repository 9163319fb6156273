//! Which changes of a file are from outside: told by its time of modification and what the log's
//! session knew when.
//!
//! A record says when it was made, before the kernel did its operation; a heartbeat, which
//! operations were done by then. The clock of both is that of times of files, and the kernel never
//! gives a file a later time than it has. So the session leaves no time in a file that is later
//! than the first moment at which the last operation on it is known to be done. Where the log has
//! no such moment, the session ended before the next heartbeat: no own time is later than that.
//! Where the record of a sync says which time the file had, and nothing was done to it since, the
//! session has left that one, or an earlier one. For a record of a whole file that time is its
//! ctime, which no program can set back.
//!
//! Invariants:
//! 1. A time that the session may have left is never taken for one from outside. A clock that was
//!    set back moves the bound by as much.
//! 2. A change from outside is noticed if the clock of times of files has moved on since the last
//!    own one: by a tick at once after a sync, by [`LATE_NS`] at the end of the session.

use super::named::MadeFile;
use crate::log::{Header, Heartbeat, RecordKind};

/// How much later than its last word the session may have changed a file: a heartbeat, and how late
/// one may come.
pub(super) const LATE_NS: u64 = 500_000_000;
/// A tick of the clock of times of files, at most.
const TICK_NS: u64 = 10_000_000;

/// What the records of one story say of time.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StoryDates {
    /// The last record.
    last: Option<Last>,
    /// The latest time of a record: the clock may have been set back while no supervisor noticed.
    latest_ns: u64,
    /// The last change of bytes or size that was synced: the time that the file had at the sync, or
    /// where no record says that, the time of the record of the change.
    pub(super) synced_ns: u64,
    /// The last change of bytes or size that was not synced.
    unsynced_ns: u64,
    /// The latest time that the file can have had until its last sync, if nothing was done to it
    /// since.
    shown_ns: Option<u64>,
    /// All of the file was recorded after its last change of bytes or size: a program may have set
    /// its time back.
    was_made: bool,
}

#[derive(Debug, Clone, Copy)]
struct Last {
    position: u64,
    wall_ns: u64,
    /// The kernel did its operation after it was made.
    is_before_operation: bool,
}

impl StoryDates {
    /// Takes the story's next record.
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

/// What a log says of time.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Dates {
    heartbeat: Option<Heartbeat>,
    latest_ns: u64,
}

impl Dates {
    pub(super) fn new(heartbeat: Option<Heartbeat>) -> Self {
        Self { heartbeat, latest_ns: heartbeat.map_or(0, |beat| beat.wall_ns) }
    }

    /// Takes the log's next record.
    pub(super) fn add(&mut self, header: &Header) {
        self.latest_ns = self.latest_ns.max(header.wall_ns);
    }

    /// No time that the session has left is later; none where the log does not say.
    pub(super) fn ended_ns(&self) -> Option<i128> {
        let set_back_ns = self.heartbeat.map_or(0, |beat| beat.set_back_ns);
        let ended_ns = self.latest_ns.saturating_add(LATE_NS).saturating_add(set_back_ns);
        (self.latest_ns != 0).then(|| ended_ns.into())
    }

    /// The latest time of modification that the session can have left in a file with this story.
    pub(super) fn modified_until(
        &self,
        story: &StoryDates,
        made: Option<&MadeFile>,
    ) -> Option<u64> {
        let last = story.last.filter(|last| last.wall_ns != 0)?;
        let beat = self.heartbeat.unwrap_or_default();
        let made_ns = made.map_or(0, MadeFile::modified_ns);
        // Where the clock was set back, an older state of the file has a later time.
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

    /// A file that was modified then was so from outside, if `until_ns` is the latest time that the
    /// session can have left. A recovery that was interrupted has left later ones, which cannot be
    /// told from those of an outsider after it.
    pub(super) fn is_from_outside(&self, modified_ns: i128, until_ns: u64) -> bool {
        let recovery_ns = self.heartbeat.map_or(0, |beat| beat.recovery_ns);
        modified_ns > until_ns.into()
            && (recovery_ns == 0 || modified_ns < recovery_ns.saturating_sub(TICK_NS).into())
    }
}
