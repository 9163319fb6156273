//! Times in which the system is short of something that clients need.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::log::Log;

/// While it goes on, a line comes so often.
const REPEAT: Duration = Duration::from_secs(60);

/// One kind of shortage: said when it begins, and once a minute while it goes on.
#[derive(Default)]
pub(super) struct Shortage(Mutex<Said>);

#[derive(Default)]
struct Said {
    last: Option<Instant>,
    /// How often it happened since.
    unsaid: u64,
}

impl Shortage {
    /// It happens: writes `what` and `then`, which follows from it, unless that was said less than
    /// a minute ago.
    pub(super) fn note(&self, log: &Log, what: &str, then: &str) {
        if let Some(unsaid) = self.0.lock().take(Instant::now()) {
            let before = match unsaid {
                0 => String::new(),
                unsaid => format!(" ({unsaid} times more since this was said)"),
            };
            log.line(&format!("nbd: {what}{before}; {then}"));
        }
    }
}

impl Said {
    /// How often it happened since it was said; none where it need not be said again yet.
    fn take(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < REPEAT) {
            self.unsaid += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_said_once_a_minute_with_a_count() {
        let (mut said, start) = (Said::default(), Instant::now());
        assert_eq!(said.take(start), Some(0));
        assert!((0..5).all(|seconds| said.take(start + Duration::from_secs(seconds)).is_none()));
        assert_eq!(said.take(start + REPEAT), Some(5));
        assert_eq!(said.take(start + REPEAT), None);
    }
}
