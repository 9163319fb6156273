//! Time limits for clients that take their answers and send the data of their writes.
//!
//! A client with something to take or to send must move at least a byte in each stall timeout.
//! While other clients wait for the memory that it holds, it must move [`LAP_BYTES`] in each of the
//! shorter timeouts, or all that is left where that is less: a client that takes a byte a second
//! would keep its memory for days.
//!
//! [`Work`] tells how long a client has been idle: at the limit of connections it gives up its
//! place.

use std::time::{Duration, Instant};

use super::Limits;

/// Bytes that a client must move in each timeout under pressure.
pub(super) const LAP_BYTES: usize = 1 << 20;

/// The bytes that a client has to move.
#[derive(Clone, Copy)]
pub(super) struct Due {
    /// Bytes of answers to take, or of the data of a write to send where no answer waits.
    pub(super) bytes: usize,
    /// Other clients wait for memory that this one holds.
    pub(super) is_pressed: bool,
}

/// A part of the due bytes that the client must move within one timeout under pressure.
struct Lap {
    since: Instant,
    left_bytes: usize,
}

/// The pace of one client.
#[derive(Default)]
pub(super) struct Pace {
    /// Start of a period without moved bytes; `None` if bytes moved since the last look.
    still_since: Option<Instant>,
    /// `None` if no other client waits for this one's memory, or before the next lap begins.
    lap: Option<Lap>,
}

impl Pace {
    /// Notes that the client has taken or sent `bytes`.
    pub(super) fn moved(&mut self, bytes: usize) {
        self.still_since = None;
        if let Some(lap) = &mut self.lap {
            lap.left_bytes = lap.left_bytes.saturating_sub(bytes);
        }
        self.lap.take_if(|lap| lap.left_bytes == 0);
    }

    /// Notes that nothing is due.
    pub(super) fn rest(&mut self) {
        *self = Self::default();
    }

    /// Returns the deadline of a client that moves nothing until then.
    pub(super) fn deadline(&mut self, now: Instant, due: Due, limits: &Limits) -> Option<Instant> {
        let still_since = *self.still_since.get_or_insert(now);
        let timeout = timeout(due, limits);
        let still_until = still_since.checked_add(timeout);
        if !due.is_pressed || due.bytes == 0 {
            self.lap = None;
            return still_until;
        }
        let left_bytes = due.bytes.min(LAP_BYTES);
        let lap = self.lap.get_or_insert(Lap { since: now, left_bytes });
        still_until.into_iter().chain(lap.since.checked_add(timeout)).min()
    }

    /// Returns the log message for a client whose deadline has passed.
    pub(super) fn lateness(&self, due: Due, limits: &Limits) -> String {
        let timeout = timeout(due, limits);
        if self.still_since.is_none() || self.is_slow() {
            return format!(
                "took less than {LAP_BYTES} bytes of answers, and sent no more of a write, in \
                 {timeout:?}, while others waited for its memory"
            );
        }
        format!("took no answer, and sent no data of a write, for {timeout:?}")
    }

    /// Returns whether the client has moved bytes in its lap.
    fn is_slow(&self) -> bool {
        matches!((&self.lap, self.still_since), (Some(lap), Some(still)) if still > lap.since)
    }
}

/// Bytes that count as work even before their request ends: a large one may take long.
const WORK_BYTES: usize = 64 << 10;

/// The time of a client's last activity that counts.
pub(super) struct Work {
    last: Instant,
    moved_bytes: usize,
}

impl Work {
    /// Starts with a client that has just connected.
    pub(super) fn new(now: Instant) -> Self {
        Self { last: now, moved_bytes: 0 }
    }

    /// Adds `bytes` that the client has sent or taken.
    pub(super) fn moved(&mut self, bytes: usize) {
        self.moved_bytes = self.moved_bytes.saturating_add(bytes);
    }

    /// Notes that all answers are taken, or that the server is busy for the client.
    pub(super) fn done(&mut self) {
        self.moved(WORK_BYTES);
    }

    /// Returns the time of the last work. Work since the previous call counts as done at `now`.
    pub(super) fn last(&mut self, now: Instant) -> Instant {
        if self.moved_bytes >= WORK_BYTES {
            *self = Self::new(now);
        }
        self.last
    }
}

/// Returns the time within which a client has to move bytes.
fn timeout(due: Due, limits: &Limits) -> Duration {
    if due.is_pressed {
        limits.stall_timeout_under_pressure.min(limits.stall_timeout)
    } else {
        limits.stall_timeout
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limits() -> Limits {
        let (stall_timeout, stall_timeout_under_pressure) = (30 * SECOND, 2 * SECOND);
        Limits { stall_timeout, stall_timeout_under_pressure, ..Limits::default() }
    }

    fn due(bytes: usize, is_pressed: bool) -> Due {
        Due { bytes, is_pressed }
    }

    #[test]
    fn without_pressure_each_byte_gives_more_time() {
        let (mut pace, start, limits) = (Pace::default(), Instant::now(), limits());
        for second in 0..100 {
            let now = start + second * SECOND;
            assert_eq!(pace.deadline(now, due(1 << 30, false), &limits), Some(now + 30 * SECOND));
            pace.moved(1);
        }
        pace.deadline(start, due(1, false), &limits);
        let late = pace.deadline(start + 40 * SECOND, due(1, false), &limits);
        assert_eq!(late, Some(start + 30 * SECOND));
        let said = pace.lateness(due(1, false), &limits);
        assert!(said.starts_with("took no answer, and sent no data"), "{said}");
    }

    #[test]
    fn under_pressure_a_few_bytes_give_no_more_time() {
        let (mut pace, start, limits) = (Pace::default(), Instant::now(), limits());
        for second in 0..4 {
            let now = start + second * SECOND;
            let until = pace.deadline(now, due(1 << 30, true), &limits);
            assert_eq!(until, Some(start + 2 * SECOND), "{second}");
            pace.moved(LAP_BYTES / 5);
        }
        pace.deadline(start + 4 * SECOND, due(1 << 30, true), &limits);
        let said = pace.lateness(due(1 << 30, true), &limits);
        assert!(said.starts_with("took less than 1048576 bytes"), "{said}");
    }

    #[test]
    fn a_lap_ends_with_its_bytes_or_with_all_that_is_left() {
        let (mut pace, start, limits) = (Pace::default(), Instant::now(), limits());
        for (lap, bytes) in [(0, 1 << 30), (1, LAP_BYTES), (2, 1000)] {
            let now = start + lap * SECOND;
            let until = pace.deadline(now, due(bytes, true), &limits);
            assert_eq!(until, Some(now + 2 * SECOND), "{bytes}");
            pace.moved(bytes.min(LAP_BYTES));
        }
        let now = start + 9 * SECOND;
        pace.deadline(now, due(1000, true), &limits);
        pace.moved(999);
        assert_eq!(pace.deadline(now + SECOND, due(1, true), &limits), Some(now + 2 * SECOND));
        pace.rest();
        let later = now + 2 * SECOND;
        assert_eq!(pace.deadline(later, due(1, true), &limits), Some(later + 2 * SECOND));
    }

    #[test]
    fn a_request_or_many_bytes_are_work_and_a_few_bytes_are_none() {
        let start = Instant::now();
        let mut work = Work::new(start);
        work.moved(WORK_BYTES - 1);
        assert_eq!(work.last(start + SECOND), start);
        work.moved(1);
        assert_eq!(work.last(start + 2 * SECOND), start + 2 * SECOND);
        assert_eq!(work.last(start + 3 * SECOND), start + 2 * SECOND);
        work.done();
        assert_eq!(work.last(start + 4 * SECOND), start + 4 * SECOND);
    }

    #[test]
    fn pressure_that_ends_is_forgotten() {
        let (mut pace, start, limits) = (Pace::default(), Instant::now(), limits());
        pace.deadline(start, due(1 << 30, true), &limits);
        pace.moved(1);
        let now = start + SECOND;
        assert_eq!(pace.deadline(now, due(1 << 30, false), &limits), Some(now + 30 * SECOND));
        pace.moved(1);
        let now = start + 3 * SECOND;
        assert_eq!(pace.deadline(now, due(1 << 30, true), &limits), Some(now + 2 * SECOND));
    }
}
