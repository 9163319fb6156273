//! Results about DRAM tiers besides latencies: where their time goes, latency over time, cost when
//! idle.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tidegate::dram::phases::{Phase, PhaseTimes};
use tidegate::dram::{Phases, TierSummary};

use crate::table::Table;
use crate::timeline::TimelineRow;

/// All results; empty if no tier was measured.
#[derive(Debug, Clone, Default)]
pub struct TierReport {
    /// Whether the plots of the Caiti paper were measured.
    pub paper: bool,
    /// Breakdowns, summed over the repetitions.
    pub breakdowns: Vec<Breakdown>,
    /// Latencies over time, of the first repetition.
    pub timelines: Vec<TimelineRow>,
    /// The cost of tiers that have no requests.
    pub idle: Vec<IdleRow>,
}

/// The policy and the cell of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The policy.
    pub policy: String,
    /// The case.
    pub case: String,
    /// Threads.
    pub threads: usize,
    /// Requests of a thread in flight.
    pub iodepth: u32,
}

/// The time of one policy in one cell, by phase: figure 6 of the paper.
#[derive(Debug, Clone)]
pub struct Breakdown {
    /// The policy and the cell.
    pub place: Place,
    /// Whether the breakdown is in the table.
    pub shown: bool,
    writes: u64,
    tallies: Vec<Tally>,
}

#[derive(Debug, Clone, Copy)]
struct Tally {
    phase: Phase,
    count: u64,
    total_ns: u64,
}

/// One phase of a breakdown: the JSON's `phases`.
#[derive(Debug, Clone, Serialize)]
pub struct PhaseRow<'a> {
    #[serde(flatten)]
    place: &'a Place,
    phase: Phase,
    count: u64,
    total_ns: u64,
    mean_ns: u64,
    share_pct: f64,
    writes_pct: f64,
}

impl Breakdown {
    /// Makes the breakdown of a run with `writes` writes, from the snapshots before and after.
    pub(crate) fn between(
        place: Place,
        shown: bool,
        before: &Phases,
        after: &Phases,
        writes: u64,
    ) -> Self {
        let since = |times: &PhaseTimes| {
            let old = before.get(times.phase);
            Tally {
                phase: times.phase,
                count: times.count - old.map_or(0, |old| old.count),
                total_ns: times.total_ns.saturating_sub(old.map_or(0, |old| old.total_ns)),
            }
        };
        Self { place, shown, writes, tallies: after.phases.iter().map(since).collect() }
    }

    fn merge(&mut self, other: &Self) {
        self.writes += other.writes;
        for theirs in &other.tallies {
            match self.tallies.iter_mut().find(|mine| mine.phase == theirs.phase) {
                Some(mine) => {
                    mine.count += theirs.count;
                    mine.total_ns += theirs.total_ns;
                }
                None => self.tallies.push(*theirs),
            }
        }
    }

    fn tally(&self, phase: Phase) -> Tally {
        let found = self.tallies.iter().find(|tally| tally.phase == phase);
        found.copied().unwrap_or(Tally { phase, count: 0, total_ns: 0 })
    }

    /// Returns the share of `phase` in the time of requests; 0 for evictions in the background.
    pub fn share_pct(&self, phase: Phase) -> f64 {
        let of_requests = self.tallies.iter().filter(|tally| tally.phase != Phase::Eviction);
        let all_ns: u64 = of_requests.map(|tally| tally.total_ns).sum();
        if phase == Phase::Eviction || all_ns == 0 {
            return 0.0;
        }
        self.tally(phase).total_ns as f64 * 100.0 / all_ns as f64
    }

    /// Returns the entries into `phase` for 100 writes.
    pub fn writes_pct(&self, phase: Phase) -> f64 {
        let count = self.tally(phase).count;
        if self.writes == 0 { 0.0 } else { count as f64 * 100.0 / self.writes as f64 }
    }

    /// Returns the mean time of an entry into `phase`.
    pub fn mean_ns(&self, phase: Phase) -> u64 {
        let Tally { count, total_ns, .. } = self.tally(phase);
        total_ns.checked_div(count).unwrap_or(0)
    }

    /// Returns the mean time of a write in `phase`.
    pub fn ns_a_write(&self, phase: Phase) -> f64 {
        self.tally(phase).total_ns as f64 / self.writes.max(1) as f64
    }

    /// Returns a row for each phase that occurred.
    pub(crate) fn rows(&self) -> impl Iterator<Item = PhaseRow<'_>> {
        self.tallies.iter().filter(|tally| tally.count > 0).map(
            |&Tally { phase, count, total_ns }| PhaseRow {
                place: &self.place,
                phase,
                count,
                total_ns,
                mean_ns: self.mean_ns(phase),
                share_pct: self.share_pct(phase),
                writes_pct: self.writes_pct(phase),
            },
        )
    }
}

/// The phases of the paper's figure 6a with their names, bottom to top.
pub(crate) const REQUEST_PHASES: [(Phase, &str); 9] = [
    (Phase::Metadata, "metadata"),
    (Phase::StalledWrite, "stalled"),
    (Phase::Bypass, "bypass"),
    (Phase::CacheWrite, "cache write"),
    (Phase::Enqueue, "enqueue"),
    (Phase::Flush, "flush"),
    (Phase::ReadHit, "read hit"),
    (Phase::ReadMiss, "read miss"),
    (Phase::Other, "other"),
];

impl TierReport {
    /// Adds the breakdown of a run to that of the same policy in the same cell.
    pub(crate) fn add(&mut self, breakdown: Breakdown) {
        match self.breakdowns.iter_mut().find(|old| old.place == breakdown.place) {
            Some(old) => old.merge(&breakdown),
            None => self.breakdowns.push(breakdown),
        }
    }

    /// Finds the breakdown of `policy` in the cell of `case` with one thread at `iodepth`.
    pub(crate) fn breakdown(&self, policy: &str, case: &str, iodepth: u32) -> Option<&Breakdown> {
        let matching = |place: &Place| {
            place.policy == policy
                && place.case == case
                && (place.threads, place.iodepth) == (1, iodepth)
        };
        self.breakdowns.iter().find(|breakdown| matching(&breakdown.place))
    }

    /// Makes the table of phases' shares, and of the writes that stalled or bypassed the cache.
    pub(crate) fn breakdown_table(&self) -> Table {
        let mut headers = vec!["policy", "case", "threads", "depth"];
        headers.extend(REQUEST_PHASES.map(|(_, name)| name));
        headers.extend(["stalled / 100 writes", "bypassed / 100 writes"]);
        let mut table = Table::new("breakdown", "Where the time of requests goes, %", &headers);
        for breakdown in self.breakdowns.iter().filter(|breakdown| breakdown.shown) {
            let Place { policy, case, threads, iodepth } = &breakdown.place;
            let mut cells =
                vec![policy.clone(), case.clone(), threads.to_string(), iodepth.to_string()];
            let share = |(phase, _)| match breakdown.share_pct(phase) {
                0.0 => String::new(),
                share => format!("{share:.1}"),
            };
            cells.extend(REQUEST_PHASES.map(share));
            cells.extend(
                [Phase::StalledWrite, Phase::Bypass]
                    .map(|phase| format!("{:.3}", breakdown.writes_pct(phase))),
            );
            table.push(cells);
        }
        table
    }

    /// Makes the table of the tiers, with their cost without requests.
    pub(crate) fn idle_table(&self) -> Table {
        let rows = self.idle.iter().map(|IdleRow { tier, cpu_pct }| {
            [
                ("policy", tier.policy.to_string()),
                ("metadata B/slot", format!("{:.1}", tier.metadata_bytes_per_slot)),
                ("threads at most", tier.threads.to_string()),
                ("idle CPU %", format!("{cpu_pct:.2}")),
            ]
        });
        Table::of_rows("idle", "Tiers at rest", rows)
    }
}

/// The cost of a tier that has nothing to do.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IdleRow {
    /// The tier.
    #[serde(flatten)]
    pub tier: TierSummary,
    /// Time of all CPUs that the process used, as a share of the time that passed.
    pub cpu_pct: f64,
}

impl IdleRow {
    /// Watches the process for `time`, while it only keeps `tier`.
    pub(crate) fn watch(tier: TierSummary, time: Duration) -> Self {
        let (begun, used) = (Instant::now(), cpu_time());
        std::thread::sleep(time);
        let used = cpu_time().saturating_sub(used);
        Self { tier, cpu_pct: used.as_secs_f64() * 100.0 / begun.elapsed().as_secs_f64() }
    }
}

fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phases(stalled: (u64, u64), cached: (u64, u64), evicted: (u64, u64)) -> Phases {
        let times = |phase, (count, total_ns): (u64, u64)| PhaseTimes {
            phase,
            count,
            total_ns,
            share_pct: 0.0,
            mean_ns: 0,
            p50_ns: 0,
            p99_ns: 0,
            p999_ns: 0,
            p9999_ns: 0,
            max_ns: 0,
            histogram: Vec::new(),
        };
        let kinds = [
            (Phase::StalledWrite, stalled),
            (Phase::CacheWrite, cached),
            (Phase::Eviction, evicted),
        ];
        Phases { phases: kinds.map(|(phase, numbers)| times(phase, numbers)).to_vec() }
    }

    fn place() -> Place {
        Place { policy: "lru".into(), case: "overrun-64M".into(), threads: 1, iodepth: 32 }
    }

    #[test]
    fn breakdowns_count_what_happened_in_between_and_sum_up() {
        let before = phases((1, 100), (10, 1000), (5, 900));
        let after = phases((2, 400), (110, 1700), (55, 9000));
        let mut report = TierReport::default();
        for _ in 0..2 {
            report.add(Breakdown::between(place(), true, &before, &after, 100));
        }
        let found = report.breakdown("lru", "overrun-64M", 32).unwrap();
        assert_eq!(found.rows().map(|row| row.count).collect::<Vec<_>>(), [2, 200, 100]);
        assert_eq!(
            (found.mean_ns(Phase::StalledWrite), found.mean_ns(Phase::CacheWrite)),
            (300, 7)
        );
        let shares = [Phase::StalledWrite, Phase::CacheWrite, Phase::Eviction];
        assert_eq!(
            shares.map(|phase| format!("{:.1}", found.share_pct(phase))),
            ["30.0", "70.0", "0.0"]
        );
        assert_eq!(format!("{:.1}", found.writes_pct(Phase::StalledWrite)), "1.0");
        let table = report.breakdown_table().without_empty_columns().to_string();
        assert!(table.contains("30.0") && !table.contains("metadata"), "{table}");
    }
}
