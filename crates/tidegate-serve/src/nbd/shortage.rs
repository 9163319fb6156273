//! Times in which the system is short of something that clients need.
//!
//! Invariant: what begins with a line ends with one, told with the first success after
//! [`QUIET`] without a failure.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::log::Log;

/// It is over with the first success so long after the last failure.
pub(super) const QUIET: Duration = Duration::from_secs(5);
/// While it goes on, a line comes so often.
const REPEAT: Duration = Duration::from_secs(60);

/// One kind of shortage: said when it begins, once a minute while it goes on, and when it is over.
#[derive(Default)]
pub(super) struct Shortage {
    /// So that a success costs no lock.
    is_on: AtomicBool,
    failures: Mutex<Option<Failures>>,
}

#[derive(Clone, Copy)]
struct Failures {
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

impl Shortage {
    /// It happens: writes `what` and `then`, which follows from it, unless that was said less than
    /// a minute ago.
    pub(super) fn note(&self, log: &Log, what: &str, then: &str) {
        match self.failed(Instant::now()) {
            Some(Failures { count: 1, .. }) => log.line(&format!("nbd: {what}; {then}")),
            Some(so_far) => log.line(&format!("nbd: {what}, {so_far}; {then}")),
            None => {}
        }
    }

    /// It did not happen: writes `what`, if a shortage is over with that.
    pub(super) fn over(&self, log: &Log, what: &str) {
        if let Some(ended) = self.succeeded(Instant::now()) {
            log.line(&format!("nbd: {what} again, after {ended}"));
        }
    }

    /// It has begun, and its end was not told yet.
    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// The failures so far, where they are to be told.
    fn failed(&self, now: Instant) -> Option<Failures> {
        let mut failures = self.failures.lock();
        self.is_on.store(true, Ordering::Relaxed);
        let Some(known) = failures.as_mut() else {
            return Some(*failures.insert(Failures { count: 1, first: now, last: now, said: now }));
        };
        known.count += 1;
        known.last = now;
        if now.duration_since(known.said) < REPEAT {
            return None;
        }
        known.said = now;
        Some(*known)
    }

    /// The failures that are over.
    fn succeeded(&self, now: Instant) -> Option<Failures> {
        if !self.is_on() {
            return None;
        }
        let mut failures = self.failures.lock();
        let ended = failures.filter(|known| now.duration_since(known.last) >= QUIET)?;
        *failures = None;
        self.is_on.store(false, Ordering::Relaxed);
        Some(ended)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_shortage_is_said_once_a_minute_with_a_count() {
        let (shortage, start) = (Shortage::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(shortage.failed(start).map(|it| it.count), Some(1));
        assert!((1..6).all(|seconds| shortage.failed(after(seconds)).is_none()));
        let so_far = shortage.failed(after(60)).expect("a minute has passed");
        assert_eq!(so_far.to_string(), "7 failures in 60 s");
        assert!(shortage.failed(after(61)).is_none());
    }

    #[test]
    fn a_shortage_is_over_with_the_first_success_after_five_quiet_seconds() {
        let (shortage, start) = (Shortage::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(shortage.succeeded(start).is_none(), "nothing has begun");
        assert!(shortage.failed(start).is_some() && shortage.failed(after(2)).is_none());
        assert!(shortage.succeeded(after(6)).is_none() && shortage.is_on());
        let ended = shortage.succeeded(after(7)).expect("it was quiet for five seconds");
        assert_eq!(ended.to_string(), "2 failures in 2 s");
        assert!(!shortage.is_on() && shortage.succeeded(after(20)).is_none());
        assert!(shortage.failed(after(21)).is_some(), "it begins again");
    }

    #[test]
    fn the_log_has_a_line_when_it_begins() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        let log = Log::new(Arc::new(move |line: &str| sink.lock().push(line.to_owned())));
        let shortage = Shortage::default();
        shortage.over(&log, "there is memory");
        (0..3).for_each(|_| shortage.note(&log, "there is no memory", "clients wait"));
        shortage.over(&log, "there is memory");
        assert_eq!(*lines.lock(), ["nbd: there is no memory; clients wait"]);
    }
}
