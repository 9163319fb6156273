//! The speed at which writers are shown room while a batch is on its way to the disk.
//!
//! Writers are faster than the disk: room that is shown at once is filled at once, and then they wait for all of the next batch. Shown
//! in step with the disk it lasts until that is done. Steps are as large as a wait may be long: of more steps, each of which
//! somebody waits for, more operations are slow.
//!
//! Pure: what the disk has taken and the time in, a position out.
//!
//! Invariants:
//! 1. Only room that was retired before is shown, none of it twice, and never more than in proportion to what the disk has taken.
//! 2. From one step to the next there is a part of a batch, or [`STEP`] and a part.

use std::time::Duration;

/// Bytes that the disk is given at once: many, for it has nothing to do between two parts, but no more than a slow one takes in
/// the time of a [`STEP`].
pub(super) const PART_BYTES: u64 = 2 << 20;
/// Writers wait for at most about this, and a part.
pub(super) const STEP: Duration = Duration::from_millis(25);
/// More than this is shown earlier.
const STEP_BYTES: u64 = 8 << 20;
/// Of a batch, what is kept for the time that the sync takes.
const SYNC_SHARE: u64 = 8;

/// A part of a file that is to reach the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// Id of the file.
    pub(super) id: u64,
    /// Its first byte.
    pub(super) start: u64,
    /// The byte behind its last one.
    pub(super) end: u64,
    /// Bytes to write in it, about.
    pub(super) bytes: u64,
}

impl Part {
    /// Nothing of a file yet.
    pub(super) fn of(id: u64) -> Self {
        Self { id, start: u64::MAX, end: 0, bytes: 0 }
    }

    /// Adds a place of the file.
    pub(super) fn add(&mut self, offset: u64, bytes: u64) {
        self.start = self.start.min(offset);
        self.end = self.end.max(offset.saturating_add(bytes));
        self.bytes += bytes;
    }
}

/// How far writers are shown room.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    from: u64,
    room_bytes: u64,
    batch_bytes: u64,
    done_bytes: u64,
    shown_bytes: u64,
    shown_at: Duration,
}

impl Pace {
    /// Room of `room_bytes` from position `from` on is to be shown while the disk takes `batch_bytes`; at `shown_at` some was shown
    /// last.
    pub(super) fn new(from: u64, room_bytes: u64, batch_bytes: u64, shown_at: Duration) -> Self {
        let batch_bytes = batch_bytes.saturating_add(batch_bytes / SYNC_SHARE).max(1);
        Self { from, room_bytes, batch_bytes, done_bytes: 0, shown_bytes: 0, shown_at }
    }

    /// The disk has taken `bytes` more at the time `now`: up to where room is to be shown, if it is time.
    pub(super) fn took(&mut self, bytes: u64, now: Duration) -> Option<u64> {
        self.done_bytes = self.done_bytes.saturating_add(bytes).min(self.batch_bytes);
        let share = u128::from(self.room_bytes) * u128::from(self.done_bytes);
        let share = u64::try_from(share / u128::from(self.batch_bytes)).unwrap_or(0);
        let (due_bytes, step_bytes) = (share / 64 * 64, share / 64 * 64 - self.shown_bytes);
        let is_time = now.saturating_sub(self.shown_at) >= STEP || step_bytes >= STEP_BYTES;
        if step_bytes == 0 || !is_time {
            return None;
        }
        (self.shown_bytes, self.shown_at) = (due_bytes, now);
        Some(self.from + due_bytes)
    }

    /// When room was shown last.
    pub(super) fn shown_at(&self) -> Duration {
        self.shown_at
    }
}

/// How fast the disk takes batches.
#[derive(Debug, Clone, Copy)]
pub(super) struct DiskSpeed {
    bytes_per_s: u64,
}

/// Until a batch was measured: what a slow disk takes in order of none.
impl Default for DiskSpeed {
    fn default() -> Self {
        Self { bytes_per_s: 100 << 20 }
    }
}

impl DiskSpeed {
    /// Fewer bytes than this say more of a sync than of the disk.
    const MEASURED_BYTES: u64 = 1 << 20;

    /// A batch of `bytes` took `time`.
    pub(super) fn measured(&mut self, bytes: u64, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1);
        if bytes >= Self::MEASURED_BYTES {
            self.bytes_per_s = bytes.saturating_mul(1_000_000) / us;
        }
    }

    /// How much it takes in `time`.
    pub(super) fn bytes_in(self, time: Duration) -> u64 {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        (self.bytes_per_s / 1000).saturating_mul(ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn room_is_shown_in_step_with_the_disk_and_the_last_of_it_after_the_sync() {
        let mut pace = Pace::new(640, 32 * MIB, 32 * MIB, Duration::ZERO);
        let (mut now, mut shown, mut longest) = (Duration::ZERO, 640, Duration::ZERO);
        let mut last = now;
        for _ in 0..32 {
            now += 7 * MS;
            if let Some(position) = pace.took(MIB, now) {
                assert!(position > shown && position % 64 == 0);
                longest = longest.max(now.saturating_sub(last));
                (shown, last) = (position, now);
            }
            assert!(shown - 640 <= u64::try_from(now.as_millis()).unwrap() / 7 * MIB);
        }
        assert!(longest < STEP + 7 * MS, "{longest:?}");
        assert!(shown < 640 + 32 * MIB);
        assert_eq!(pace.took(99 * MIB, now + STEP), Some(640 + 32 * MIB), "never more");
        assert_eq!(pace.took(99 * MIB, now + 2 * STEP), None);
    }

    #[test]
    fn a_fast_disk_is_followed_in_few_steps() {
        let mut pace = Pace::new(0, 32 * MIB, 32 * MIB, Duration::ZERO);
        let steps = (0..32).filter(|_| pace.took(MIB, MS).is_some()).count();
        assert_eq!(steps, 3, "all but the last quarter of them, 8 MiB each");
    }

    #[test]
    fn a_speed_is_that_of_the_last_batch_that_says_something() {
        let mut speed = DiskSpeed::default();
        speed.measured(40 * MIB, 100 * MS);
        speed.measured(4096, 100 * MS);
        assert_eq!(speed.bytes_in(50 * MS) / MIB, 19);
    }
}
