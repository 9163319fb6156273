//! Logs long waits: a backing, a disk or a copy that does not answer.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate::device::waits::{Waits, longer_than};
use tidegate_serve::Worker;
use tidegate_serve::nbd::StopHandle;

use crate::log::{Level, say};

/// Age of a wait that is logged.
const LONG: Duration = Duration::from_secs(30);
/// Interval of checks of the waits.
const LOOK: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// Interval between two messages about a wait that goes on.
const AGAIN: Duration = Duration::from_secs(600);

/// A kind of wait: the waiting requests or threads, and the resource.
type Kind = (&'static str, &'static str);

/// Starts a thread that checks the list of waits until it is dropped.
///
/// # Errors
/// The system has no thread left.
pub(crate) fn watch() -> Result<Worker> {
    let run = |stop: &StopHandle| {
        let mut told = HashMap::new();
        loop {
            let mut ready = [PollFd::new(stop, PollFlags::IN)];
            let _ = poll(&mut ready, Some(&LOOK));
            if !ready[0].revents().is_empty() {
                return;
            }
            for line in lines(&mut told, &longer_than(LONG), Instant::now()) {
                say(Level::Warning, line);
            }
        }
    };
    Ok(Worker::start("wait-watch", StopHandle::new()?, run)?)
}

/// Returns the lines to log about `waits`. `told` maps each logged kind to the time of its last
/// line.
fn lines(told: &mut HashMap<Kind, Instant>, waits: &[Waits], now: Instant) -> Vec<String> {
    let mut lines = Vec::new();
    told.retain(|(waiter, what), _| {
        let goes_on = waits.iter().any(|it| (it.waiter, it.what) == (*waiter, *what));
        if !goes_on {
            lines.push(format!("{waiter}: {what} came, no wait takes long any more"));
        }
        goes_on
    });
    for Waits { waiter, what, count, longest } in waits {
        let before = told.get(&(*waiter, *what)).copied();
        if before.is_some_and(|at| now.saturating_duration_since(at) < AGAIN) {
            continue;
        }
        told.insert((waiter, what), now);
        let others = match count {
            1 => String::new(),
            count => format!(", and {} more wait long", count - 1),
        };
        lines.push(format!("{waiter} has waited {} s for {what}{others}", longest.as_secs()));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_is_told_once_then_again_later_and_at_its_end() {
        let (mut told, began) = (HashMap::new(), Instant::now());
        let longest = Duration::from_secs(31);
        let waits = [Waits { waiter: "a write", what: "the backing", count: 3, longest }];
        let said = lines(&mut told, &waits, began);
        assert_eq!(said, ["a write has waited 31 s for the backing, and 2 more wait long"]);
        assert!(lines(&mut told, &waits, began + LONG).is_empty());
        assert_eq!(lines(&mut told, &waits, began + AGAIN).len(), 1);
        let said = lines(&mut told, &[], began + AGAIN);
        assert_eq!(said, ["a write: the backing came, no wait takes long any more"]);
        assert!(lines(&mut told, &[], began + AGAIN).is_empty());
    }
}
