//! How fast a client must take its answers and send the data of its writes.
//!
//! A client with something to take or to send must move at least a byte in each stall timeout.
//! While other clients wait for the memory that it holds, it must move [`LAP_BYTES`] in each of the
//! shorter timeouts for that, or all that is left where that is less: one that takes a byte a
//! second would keep its memory for days.
//!
//! [`Work`] says since when a client has done nothing: at the limit of connections such a one gives
//! its place up.

use std::time::{Duration, Instant};

use super::Limits;

/// Bytes that a client must move in each timeout under pressure.
pub(super) const LAP_BYTES: usize = 1 << 20;

/// What a client has to do.
#[derive(Clone, Copy)]
pub(super) struct Due {
    /// Bytes of answers to take, or of the data of a write to send where no answer waits.
    pub(super) bytes: usize,
    /// Other clients wait for memory that it holds.
    pub(super) is_pressed: bool,
}

/// A share of what is due under pressure.
struct Lap {
    since: Instant,
    left_bytes: usize,
}

/// How a client keeps up.
#[derive(Default)]
pub(super) struct Pace {
    /// Since when it has moved nothing; none where it has moved something since the last look.
    still_since: Option<Instant>,
    /// None where nobody waits for its memory, or where it is about to begin another one.
    lap: Option<Lap>,
}

impl Pace {
    /// The client has taken or sent so many bytes.
    pub(super) fn moved(&mut self, bytes: usize) {
        self.still_since = None;
        if let Some(lap) = &mut self.lap {
            lap.left_bytes = lap.left_bytes.saturating_sub(bytes);
        }
        self.lap.take_if(|lap| lap.left_bytes == 0);
    }

    /// Nothing is due.
    pub(super) fn rest(&mut self) {
        *self = Self::default();
    }

    /// When the client will have been too slow, if it moves nothing until then.
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

    /// What a client did whose deadline has passed.
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

    /// It has moved something in its lap.
    fn is_slow(&self) -> bool {
        matches!((&self.lap, self.still_since), (Some(lap), Some(still)) if still > lap.since)
    }
}

/// Bytes that count as work though no request ends with them: a slow client may take long for a
/// large request.
const WORK_BYTES: usize = 64 << 10;

/// When a client last did something that counts.
pub(super) struct Work {
    last: Instant,
    moved_bytes: usize,
}

impl Work {
    /// A client that has just connected.
    pub(super) fn new(now: Instant) -> Self {
        Self { last: now, moved_bytes: 0 }
    }

    /// So many bytes came from the client, or were taken by it.
    pub(super) fn moved(&mut self, bytes: usize) {
        self.moved_bytes = self.moved_bytes.saturating_add(bytes);
    }

    /// All answers are taken, or the server is busy for the client.
    pub(super) fn done(&mut self) {
        self.moved(WORK_BYTES);
    }

    /// Since when the client has done nothing. What it did since the last look counts as done now.
    pub(super) fn last(&mut self, now: Instant) -> Instant {
        if self.moved_bytes >= WORK_BYTES {
            *self = Self::new(now);
        }
        self.last
    }
}

/// Time in which a client has to move something.
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
