//! Log messages about shortages of a resource that clients need.

use std::time::Instant;

use tidegate::device::spell::{Said, Spell};

use crate::log::Log;

/// One kind of shortage, logged when it begins, once a minute while it lasts, and at its end.
#[derive(Default)]
pub(super) struct Shortage(Spell);

impl Shortage {
    /// Logs that the shortage happens: `what` and its consequence `then`, at most once a minute.
    pub(super) fn note(&self, log: &Log, what: &str, then: &str) {
        match self.0.failed(Instant::now()) {
            Some(Said::Begins) => log.line(&format!("nbd: {what}; {then}")),
            Some(Said::GoesOn(so_far)) => log.line(&format!("nbd: {what}, {so_far}; {then}")),
            None => {}
        }
    }

    /// Notes that the shortage did not happen. Logs `what` if that ends a shortage.
    pub(super) fn over(&self, log: &Log, what: &str) {
        if !self.is_on() {
            return;
        }
        if let Some(ended) = self.0.succeeded(Instant::now()) {
            log.line(&format!("nbd: {what} again, after {ended}"));
        }
    }

    /// Returns whether the shortage has begun and its end is not yet logged.
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
