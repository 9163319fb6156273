//! The targets for speed, as data, and the verdicts of a run; for DRAM tiers see `tier_targets`.

use serde::Serialize;

use crate::block::{COPY_TWO_FENCES, POOL_UNIFORM};
use crate::measure::{Op, Sample, Series, find, throughput};
use crate::nbd::{COPY_IN, COPY_OUT, RANDOM};
use crate::open::{self, Opening};

/// A measurement, by its key without the block size.
#[derive(Debug, Clone, Copy)]
struct Pick {
    policy: &'static str,
    case: &'static str,
    op: Op,
    threads: usize,
    iodepth: u32,
}

/// The value that is compared with the bound.
#[derive(Debug, Clone, Copy)]
enum Measure {
    /// A value of one measurement over the same value of another, pair by pair.
    Ratio { of: Pick, to: Pick, value: fn(&Sample) -> f64 },
    /// Milliseconds of an opening after a crash.
    OpenMs,
    /// Peak memory in MiB of an opening after a crash.
    OpenPeakMib,
}

/// The bound of a target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

struct Target {
    name: String,
    measure: Measure,
    bound: Bound,
}

/// A target and its measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// The target in words.
    pub target: String,
    /// The bound in words.
    pub wanted: String,
    /// The measured value: a ratio unless the target names a unit.
    pub measured: f64,
    /// Whether the target is met.
    pub met: bool,
}

/// One number for a target, and its case.
pub(crate) type Number = (f64, String);

impl Verdict {
    pub(crate) fn new(target: String, bound: Bound, measured: f64) -> Self {
        let (wanted, met) = match bound {
            Bound::AtLeast(bound) => (format!("at least {bound}"), measured >= bound),
            Bound::AtMost(bound) => (format!("at most {bound}"), measured <= bound),
        };
        Self { target, wanted, measured, met }
    }
}

/// Returns the verdict on the smallest of several numbers, if there is one.
pub(crate) fn at_least(
    target: &str,
    bound: f64,
    numbers: impl IntoIterator<Item = Option<Number>>,
) -> Option<Verdict> {
    worst(target, Bound::AtLeast(bound), &numbers.into_iter().flatten().collect::<Vec<_>>())
}

/// Returns the verdict on the largest of several numbers, if there is one.
pub(crate) fn at_most(
    target: &str,
    bound: f64,
    numbers: impl IntoIterator<Item = Option<Number>>,
) -> Option<Verdict> {
    worst(target, Bound::AtMost(bound), &numbers.into_iter().flatten().collect::<Vec<_>>())
}

fn worst(target: &str, bound: Bound, numbers: &[Number]) -> Option<Verdict> {
    let order = |one: &&Number, other: &&Number| one.0.total_cmp(&other.0);
    let (measured, case) = match bound {
        Bound::AtLeast(_) => numbers.iter().min_by(order)?,
        Bound::AtMost(_) => numbers.iter().max_by(order)?,
    };
    let of = if numbers.len() > 1 { format!(" (worst: {case})") } else { String::new() };
    // Rounded as printed: numbers that look equal are judged as equal.
    let measured = (measured * 100.0).round() / 100.0;
    Some(Verdict::new(format!("{target}{of}"), bound, measured))
}

/// Returns the verdicts on all targets that this run measured.
pub fn verdicts(series: &[Series], opening: Option<&Opening>) -> Vec<Verdict> {
    targets().into_iter().filter_map(|target| target.verdict(series, opening)).collect()
}

impl Target {
    fn verdict(self, series: &[Series], opening: Option<&Opening>) -> Option<Verdict> {
        let find = |Pick { policy, case, op, threads, iodepth }: Pick| {
            find(series, policy, case, op, (threads, iodepth))
        };
        let measured = match self.measure {
            Measure::Ratio { of, to, value } => find(of)?.ratio(find(to)?, value)?.median,
            Measure::OpenMs => find(open_pick())?.spread(|sample| sample.mean_ns).median / 1e6,
            Measure::OpenPeakMib => opening?.peak_memory_bytes as f64 / f64::from(1 << 20),
        };
        Some(Verdict::new(self.name, self.bound, measured))
    }
}

fn targets() -> Vec<Target> {
    let opening = |unit, measure, bound| Target {
        name: format!("opening an 8 GiB BTT after a crash: {unit}"),
        measure,
        bound: Bound::AtMost(bound),
    };
    let mut targets = block_targets();
    targets.extend(nbd_targets());
    targets.push(opening("ms", Measure::OpenMs, 100.0));
    targets.push(opening("MiB of memory", Measure::OpenPeakMib, 64.0));
    targets
}

fn block_targets() -> Vec<Target> {
    use Bound::{AtLeast, AtMost};
    let pick = |policy, op, threads| Pick { policy, case: POOL_UNIFORM, op, threads, iodepth: 1 };
    let against_peer = |name, op, threads, value, bound| {
        let (of, to) = (pick("btt", op, threads), pick("peer:libpmemblk", op, threads));
        let name = format!("{name} / libpmemblk");
        Target { name, measure: Measure::Ratio { of, to, value }, bound }
    };
    let floor = Pick { case: COPY_TWO_FENCES, ..pick("copy", Op::Write, 1) };
    let p50 = |sample: &Sample| sample.p50_ns as f64;
    let p999 = |sample: &Sample| sample.p999_ns as f64;
    let p50_over_floor = Measure::Ratio { of: pick("btt", Op::Write, 1), to: floor, value: p50 };
    vec![
        against_peer("btt write, 1 thread: throughput", Op::Write, 1, throughput, AtLeast(1.8)),
        against_peer("btt write, 2 threads: throughput", Op::Write, 2, throughput, AtLeast(1.5)),
        Target {
            name: "btt write, 1 thread: p50 / bare copy with two fences".to_owned(),
            measure: p50_over_floor,
            bound: AtMost(1.6),
        },
        against_peer("btt write, 1 thread: p99.9", Op::Write, 1, p999, AtMost(1.0)),
        against_peer("btt read, 1 thread: throughput", Op::Read, 1, throughput, AtLeast(1.3)),
        against_peer("btt read, 2 threads: throughput", Op::Read, 2, throughput, AtLeast(1.3)),
    ]
}

fn nbd_targets() -> Vec<Target> {
    let against_nbdkit = |name, to: Pick, value, bound| {
        let of = Pick { policy: "btt", ..to };
        let name = format!("{name} / nbdkit memory");
        Target { name, measure: Measure::Ratio { of, to, value }, bound }
    };
    let policy = "peer:nbdkit-memory";
    let mut targets = Vec::new();
    for (iodepth, bound) in [(32, 1.5), (1, 1.0)] {
        for op in [Op::Write, Op::Read] {
            for threads in [1, 2] {
                let name = format!("nbd {} depth {iodepth}, {threads} jobs: IOPS", op.name());
                let pick = Pick { policy, case: RANDOM, op, threads, iodepth };
                targets.push(against_nbdkit(name, pick, throughput, Bound::AtLeast(bound)));
            }
        }
    }
    for (op, case) in [(Op::Write, COPY_IN), (Op::Read, COPY_OUT)] {
        let pick = Pick { policy, case, op, threads: 1, iodepth: 1 };
        let (name, bound) = (format!("{case}: time"), Bound::AtMost(1.0));
        targets.push(against_nbdkit(name, pick, |sample| sample.mean_ns, bound));
    }
    targets
}

fn open_pick() -> Pick {
    Pick { policy: "btt", case: open::CASE, op: Op::Read, threads: 1, iodepth: 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Key;

    fn series(pick: Pick, ops_per_s: f64, p50_ns: u64) -> Series {
        let Pick { policy, case, op, threads, iodepth } = pick;
        let (policy, case) = (policy.to_owned(), case.to_owned());
        let sample = Sample { ops_per_s, p50_ns, ..Sample::single(0.05) };
        Series {
            key: Key { policy, case, op, threads, iodepth, block_bytes: 4096 },
            samples: vec![sample],
        }
    }

    fn write(policy: &'static str, case: &'static str) -> Pick {
        Pick { policy, case, op: Op::Write, threads: 1, iodepth: 1 }
    }

    #[test]
    fn targets_are_met_or_missed_by_what_was_measured() {
        let mut measured = vec![
            series(write("btt", POOL_UNIFORM), 1.7e6, 800),
            series(write("peer:libpmemblk", POOL_UNIFORM), 1.0e6, 1000),
            series(write("copy", COPY_TWO_FENCES), 2.0e6, 500),
        ];
        let found = verdicts(&measured, None);
        let met: Vec<_> = found.iter().map(|verdict| (verdict.measured, verdict.met)).collect();
        assert_eq!(met, [(1.7, false), (1.6, true), (1.0, true)]);
        measured[0].samples[0].ops_per_s = 1.8e6;
        assert!(verdicts(&measured, None)[0].met, "the bound itself is enough");
    }

    #[test]
    fn what_was_not_measured_has_no_verdict() {
        assert_eq!(verdicts(&[], None), []);
    }

    #[test]
    fn openings_are_judged_in_their_units() {
        let measured = [series(open_pick(), 20.0, 0)];
        let opening = Opening { peak_memory_bytes: 65 << 20, first_hits_s: vec![0.05] };
        let found = verdicts(&measured, Some(&opening));
        assert_eq!((found[0].measured, found[0].met), (50.0, true));
        assert_eq!((found[1].measured, found[1].met), (65.0, false));
    }

    #[test]
    fn every_target_has_a_name_of_its_own() {
        let mut names: Vec<_> = targets().into_iter().map(|target| target.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
