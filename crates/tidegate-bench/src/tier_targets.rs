//! The targets of the DRAM tier, as data.
//!
//! Every comparison is a gain, where larger is better: our throughput as a multiple of another
//! policy's, or another policy's latency as a multiple of ours. A target over several cells or
//! several policies is met if the worst one meets it.

use tidegate::dram::phases::Phase;

use crate::measure::{Op, Sample, Series, find, throughput};
use crate::plan::{
    BURST_CASE, DEPTH, MATRIX_CACHES, MATRIX_DEPTHS, MATRIX_THREADS, READ_CASE, duty_case,
    overrun_case,
};
use crate::targets::{Bound, Verdict};
use crate::tiers::TierReport;

const SUBJECT: &str = "transit";
const STAGING: &[&str] = &["pmbd", "pmbd70", "lru", "coactive"];

/// A cell of the paper's plan.
#[derive(Debug, Clone)]
struct Place {
    case: String,
    op: Op,
    threads: usize,
    iodepth: u32,
}

/// The required gain of the subject against the other policies.
struct Gain {
    name: &'static str,
    against: &'static [&'static str],
    places: Vec<Place>,
    /// Larger is better.
    merit: fn(&Sample) -> f64,
    at_least: f64,
}

/// Returns the verdicts on all targets that this run measured.
pub(crate) fn verdicts(series: &[Series], tiers: &TierReport) -> Vec<Verdict> {
    let gains = gains().into_iter().filter_map(|gain| gain.verdict(series));
    gains.chain(stalls(tiers)).chain(idle(tiers)).collect()
}

impl Gain {
    fn verdict(&self, series: &[Series]) -> Option<Verdict> {
        let cells = self
            .places
            .iter()
            .flat_map(|place| self.against.iter().map(move |&against| (place, against)));
        let gains = cells.filter_map(|(place, against)| {
            let at = (place.threads, place.iodepth);
            let find = |policy| find(series, policy, &place.case, place.op, at);
            let gain = find(SUBJECT)?.ratio(find(against)?, self.merit)?;
            Some((gain.median, place, against))
        });
        let (worst, place, against) = gains.min_by(|one, other| one.0.total_cmp(&other.0))?;
        let Place { case, threads, iodepth, .. } = place;
        let of = format!("worst: {against}, {case}, {threads} threads, depth {iodepth}");
        let target = format!("{} ({of})", self.name);
        Some(Verdict::new(target, Bound::AtLeast(self.at_least), worst))
    }
}

fn gains() -> Vec<Gain> {
    let gain =
        |name, against, places, merit, at_least| Gain { name, against, places, merit, at_least };
    let sustained = || vec![place(overrun_case(MATRIX_CACHES[0]), Op::Write, 1, DEPTH)];
    let burst = || vec![place(BURST_CASE.to_owned(), Op::Write, 1, 1)];
    let read = || vec![place(READ_CASE.to_owned(), Op::Read, 1, 1)];
    let flush = |duty_pct| vec![place(duty_case(duty_pct), Op::Flush, 1, 1)];
    let mean = |sample: &Sample| 1.0 / sample.mean_ns;
    let p50 = |sample: &Sample| 1.0 / sample.p50_ns as f64;
    let p9999 = |sample: &Sample| 1.0 / sample.p9999_ns as f64;
    let longest = |sample: &Sample| 1.0 / sample.max_ns as f64;
    let write_time = &["pmbd", "lru"];
    vec![
        gain("overrun: writes/s of transit / btt", &["btt"], sustained(), throughput, 1.4),
        gain("overrun: writes/s of transit / staging", STAGING, sustained(), throughput, 1.0),
        gain("every cell: writes/s of transit / btt", &["btt"], matrix(), throughput, 0.95),
        gain("bursts: mean write of btt / transit", &["btt"], burst(), mean, 2.5),
        gain("overrun: p99.99 of staging / transit", STAGING, sustained(), p9999, 1.0),
        gain("overrun: longest stall of pmbd / transit", &["pmbd"], sustained(), longest, 10.0),
        gain("overrun: p50 of lru / transit", &["lru"], sustained(), p50, 1.5),
        gain("fsync at 20 % duty: staging / transit", write_time, flush(20), mean, 10.0),
        gain("fsync at 50 % duty: staging / transit", write_time, flush(50), mean, 2.0),
        gain("read misses/s of transit / btt", &["btt"], read(), throughput, 0.95),
    ]
}

fn place(case: String, op: Op, threads: usize, iodepth: u32) -> Place {
    Place { case, op, threads, iodepth }
}

fn matrix() -> Vec<Place> {
    let mut places = Vec::new();
    for cache_bytes in MATRIX_CACHES {
        for threads in MATRIX_THREADS {
            let case = || overrun_case(cache_bytes);
            places.extend(MATRIX_DEPTHS.map(|depth| place(case(), Op::Write, threads, depth)));
        }
    }
    places
}

fn stalls(tiers: &TierReport) -> Option<Verdict> {
    let breakdown = tiers.breakdown(SUBJECT, BURST_CASE, 1)?;
    let measured = breakdown.writes_pct(Phase::StalledWrite);
    let target = "bursts: stalled writes of transit, %".to_owned();
    Some(Verdict::new(target, Bound::AtMost(0.1), measured))
}

/// Judges the CPU time at rest. The process uses some to watch itself, hence the bound above 0.
fn idle(tiers: &TierReport) -> Option<Verdict> {
    let row = tiers.idle.iter().find(|row| row.tier.policy.name() == SUBJECT)?;
    Some(Verdict::new("idle CPU of transit, %".to_owned(), Bound::AtMost(0.1), row.cpu_pct))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Key;

    fn series(policy: &str, place: &Place, sample: Sample) -> Series {
        let Place { case, op, threads, iodepth } = place.clone();
        let key = Key { policy: policy.to_owned(), case, op, threads, iodepth, block_bytes: 4096 };
        Series { key, samples: vec![sample] }
    }

    #[test]
    fn the_worst_of_all_cells_decides() {
        let at = |ops_per_s| Sample { ops_per_s, ..Sample::single(1.0) };
        let mut measured = Vec::new();
        for place in matrix() {
            let slow = place.case == "overrun-512M" && (place.threads, place.iodepth) == (4, 1);
            measured.push(series("transit", &place, at(if slow { 90.0 } else { 150.0 })));
            measured.push(series("btt", &place, at(100.0)));
        }
        let found = verdicts(&measured, &TierReport::default());
        let met: Vec<_> = found.iter().map(|verdict| (verdict.measured, verdict.met)).collect();
        assert_eq!(met, [(1.5, true), (0.9, false)]);
        assert!(found[1].target.contains("overrun-512M, 4 threads, depth 1"), "{found:?}");
    }

    #[test]
    fn shorter_times_are_gains() {
        let place = place(duty_case(20), Op::Flush, 1, 1);
        let at = |mean_ns| Sample { mean_ns, ..Sample::single(1.0) };
        let measured = [
            series("transit", &place, at(1.0)),
            series("pmbd", &place, at(30.0)),
            series("lru", &place, at(20.0)),
        ];
        let found = verdicts(&measured, &TierReport::default());
        assert_eq!((found.len(), found[0].measured.round(), found[0].met), (1, 20.0, true));
        assert!(found[0].target.contains("worst: lru"), "{found:?}");
    }

    #[test]
    fn what_was_not_measured_has_no_verdict() {
        assert_eq!(verdicts(&[], &TierReport::default()), []);
    }
}
