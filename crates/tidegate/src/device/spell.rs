//! Rate-limits reports of repeated failures: one line at the beginning, one a minute, and one at
//! the end, instead of a line for each failure.
//!
//! Invariant: a spell whose beginning was reported has its end reported, at the first success after
//! [`QUIET`] without a failure.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A spell ends with the first success at least this long after the last failure.
pub const QUIET: Duration = Duration::from_secs(5);
/// Interval of reports during a spell.
const REPEAT: Duration = Duration::from_secs(60);

/// A time of repeated failures.
#[derive(Default)]
pub struct Spell {
    /// Whether a spell goes on; read without the lock on success.
    is_on: AtomicBool,
    failures: Mutex<Option<Failures>>,
}

/// The failures so far; displayed as their number and duration.
#[derive(Debug, Clone, Copy)]
pub struct Failures {
    count: u64,
    first: Instant,
    last: Instant,
    said: Instant,
}

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.last.duration_since(self.first).as_secs();
        let plural = if self.count == 1 { "" } else { "s" };
        write!(f, "{} failure{plural} in {seconds} s", self.count)
    }
}

/// The report due after a failure.
#[derive(Debug, Clone, Copy)]
pub enum Said {
    /// The spell begins with this failure.
    Begins,
    /// The spell goes on, a minute after the last report.
    GoesOn(Failures),
}

impl Spell {
    /// Returns whether a spell has begun and its end was not reported yet.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Counts a failure at `now`. Returns the report that is due, if any.
    pub fn failed(&self, now: Instant) -> Option<Said> {
        let mut failures = self.failures.lock();
        let Some(known) = failures.as_mut() else {
            *failures = Some(Failures { count: 1, first: now, last: now, said: now });
            self.is_on.store(true, Ordering::Relaxed);
            return Some(Said::Begins);
        };
        known.count += 1;
        known.last = now;
        if now.duration_since(known.said) < REPEAT {
            return None;
        }
        known.said = now;
        Some(Said::GoesOn(*known))
    }

    /// Counts a success at `now`. Returns the failures of a spell that has ended. Call it only if
    /// [`is_on`](Self::is_on), so that other successes need not read the clock.
    pub fn succeeded(&self, now: Instant) -> Option<Failures> {
        let mut failures = self.failures.lock();
        let ended = failures.filter(|known| now.duration_since(known.last) >= QUIET)?;
        *failures = None;
        self.is_on.store(false, Ordering::Relaxed);
        Some(ended)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "a moment to count from")]

    use super::*;

    #[test]
    fn a_spell_is_told_again_after_a_while_and_ends_when_it_is_quiet() {
        let (spell, start) = (Spell::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(spell.succeeded(start).is_none(), "nothing has begun");
        assert!(matches!(spell.failed(start), Some(Said::Begins)));
        assert!(spell.failed(after(1)).is_none() && spell.succeeded(after(2)).is_none());
        let Some(Said::GoesOn(so_far)) = spell.failed(after(61)) else { panic!("it goes on") };
        assert_eq!(so_far.to_string(), "3 failures in 61 s");
        assert!(spell.failed(after(62)).is_none() && spell.succeeded(after(66)).is_none());
        assert!(spell.is_on());
        let ended = spell.succeeded(after(67)).expect("it is quiet");
        assert_eq!(ended.to_string(), "4 failures in 62 s");
        assert!(!spell.is_on() && spell.succeeded(after(80)).is_none());
        assert!(matches!(spell.failed(after(81)), Some(Said::Begins)));
    }

    #[test]
    fn a_spell_goes_on_a_minute_after_its_beginning_was_told() {
        let (spell, start) = (Spell::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(matches!(spell.failed(start), Some(Said::Begins)));
        assert!((1..6).all(|seconds| spell.failed(after(seconds)).is_none()));
        let Some(Said::GoesOn(so_far)) = spell.failed(after(60)) else {
            panic!("a minute has passed")
        };
        assert_eq!(so_far.to_string(), "7 failures in 60 s");
        assert!(spell.failed(after(61)).is_none());
    }

    #[test]
    fn a_spell_is_over_after_five_quiet_seconds() {
        let (spell, start) = (Spell::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(spell.failed(start).is_some() && spell.failed(after(2)).is_none());
        assert!(spell.succeeded(after(6)).is_none() && spell.is_on());
        let ended = spell.succeeded(after(7)).expect("it was quiet for five seconds");
        assert_eq!(ended.to_string(), "2 failures in 2 s");
        assert!(!spell.is_on() && spell.succeeded(after(20)).is_none());
        assert!(spell.failed(after(21)).is_some(), "it begins again");
    }
}
