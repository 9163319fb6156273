//! Times in which the system is short of something that clients need.

use std::time::Instant;

use tidegate::device::spell::{Said, Spell};

use crate::log::Log;

/// One kind of shortage: said when it begins, once a minute while it goes on, and when it is over.
#[derive(Default)]
pub(super) struct Shortage(Spell);

impl Shortage {
    /// It happens: writes `what` and `then`, which follows from it, unless that was said less than
    /// a minute ago.
    pub(super) fn note(&self, log: &Log, what: &str, then: &str) {
        match self.0.failed(Instant::now()) {
            Some(Said::Begins) => log.line(&format!("nbd: {what}; {then}")),
            Some(Said::GoesOn(so_far)) => log.line(&format!("nbd: {what}, {so_far}; {then}")),
            None => {}
        }
    }

    /// It did not happen: writes `what`, if a shortage is over with that.
    pub(super) fn over(&self, log: &Log, what: &str) {
        if !self.is_on() {
            return;
        }
        if let Some(ended) = self.0.succeeded(Instant::now()) {
            log.line(&format!("nbd: {what} again, after {ended}"));
        }
    }

    /// It has begun, and its end was not told yet.
    pub(super) fn is_on(&self) -> bool {
        self.0.is_on()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

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
