//! Latency over time: the slowest and the mean request of each short interval of a run.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Requests that were answered in one interval.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Tick {
    requests: u64,
    total_ns: u64,
    max_ns: u64,
}

/// The latencies of a run by the time of their answer.
#[derive(Debug, Clone, Default)]
pub struct Timeline {
    tick_ns: u64,
    ticks: Vec<Tick>,
}

/// A timeline as it is published; an interval without an answer has neither maximum nor mean.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct TimelineRow {
    /// The policy.
    pub policy: String,
    /// The case.
    pub case: String,
    /// Length of an interval.
    pub tick_ns: u64,
    /// Requests that were answered in each interval.
    pub requests: Vec<u64>,
    /// Slowest request of each interval, 0 for none.
    pub max_ns: Vec<u64>,
    /// Mean of each interval, 0 for none.
    pub mean_ns: Vec<u64>,
}

pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Timeline {
    /// Notes a request answered `at` after the start; notes nothing if intervals have no length.
    pub(crate) fn note(&mut self, tick: Duration, at: Duration, latency_ns: u64) {
        let (tick_ns, at_ns) = (nanoseconds(tick), nanoseconds(at));
        let Some(index) = at_ns.checked_div(tick_ns).and_then(|n| usize::try_from(n).ok()) else {
            return;
        };
        self.tick_ns = tick_ns;
        if index >= self.ticks.len() {
            self.ticks.resize(index + 1, Tick::default());
        }
        self.ticks[index].merge(Tick { requests: 1, total_ns: latency_ns, max_ns: latency_ns });
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.tick_ns = self.tick_ns.max(other.tick_ns);
        let len = self.ticks.len().max(other.ticks.len());
        self.ticks.resize(len, Tick::default());
        for (mine, theirs) in self.ticks.iter_mut().zip(&other.ticks) {
            mine.merge(*theirs);
        }
    }

    /// Returns the row of `policy` and `case`.
    pub(crate) fn row(&self, policy: &str, case: &str) -> TimelineRow {
        let mean = |tick: &Tick| tick.total_ns.checked_div(tick.requests).unwrap_or(0);
        TimelineRow {
            policy: policy.to_owned(),
            case: case.to_owned(),
            tick_ns: self.tick_ns,
            requests: self.ticks.iter().map(|tick| tick.requests).collect(),
            max_ns: self.ticks.iter().map(|tick| tick.max_ns).collect(),
            mean_ns: self.ticks.iter().map(mean).collect(),
        }
    }
}

impl Tick {
    fn merge(&mut self, other: Self) {
        self.requests += other.requests;
        self.total_ns += other.total_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_keep_the_slowest_and_the_mean_of_all_threads() {
        let tick = Duration::from_micros(1);
        let (mut first, mut second) = (Timeline::default(), Timeline::default());
        first.note(tick, Duration::from_nanos(900), 10);
        first.note(tick, Duration::from_nanos(2_100), 7);
        second.note(tick, Duration::from_nanos(100), 30);
        first.merge(&second);
        let row = first.row("lru", "overrun");
        assert_eq!((row.tick_ns, row.requests), (1000, vec![2, 0, 1]));
        assert_eq!((row.max_ns, row.mean_ns), (vec![30, 0, 7], vec![20, 0, 7]));
    }

    #[test]
    fn a_run_without_intervals_notes_nothing() {
        let mut timeline = Timeline::default();
        timeline.note(Duration::ZERO, Duration::from_secs(1), 10);
        assert!(timeline.row("lru", "overrun").max_ns.is_empty());
    }
}
