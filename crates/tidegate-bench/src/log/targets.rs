//! The speed that `tidegate run` is built for, as data, and whether a run met it.
//!
//! A target over several cases holds if the worst of them does.

use super::bed::NO_SYNC;
use super::files::{APPEND, DISK, FDATASYNC, full_case, read_case};
use super::io::Kind;
use super::sqlite::{MODES, case_of};
use super::steady::POOLS;
use super::{
    LogReport, Measure, RUN_PREFIX, Runner, apps, names, nvcache, postgres, recovery, rocksdb,
    steady, unsynced,
};
use crate::measure::{Sample, Series};
use crate::pattern::Pattern;
use crate::targets::{Bound, Verdict};

/// Writes of 4 KiB a second, one thread, of the authors' `NVCache`: the middle of what it reached
/// on a machine of this size, its log on tmpfs and not full.
const NVCACHE_WRITES_PER_S: f64 = 543_500.0;

/// What was measured.
struct Found<'a> {
    series: &'a [Series],
    log: &'a LogReport,
}

/// One number for a target, and of which case it is.
pub(crate) type Number = (f64, String);

/// The verdicts on all targets that this run measured.
pub(crate) fn verdicts(series: &[Series], log: &LogReport) -> Vec<Verdict> {
    let found = Found { series, log };
    let runner = Runner::Run.name();
    let all = [
        found.writes(runner),
        found.others(runner),
        found.patterns(runner),
        found.steady(),
        found.databases(runner),
        found.apps(runner),
    ];
    let named = all.into_iter().flatten().flatten();
    let named =
        named.map(|verdict| Verdict { target: format!("{runner}: {}", verdict.target), ..verdict });
    named.chain(found.recovery()).collect()
}

/// The verdict on the worst of several numbers, if there is one.
pub(crate) fn worst(
    target: &str,
    bound: Bound,
    numbers: impl IntoIterator<Item = Option<Number>>,
) -> Option<Verdict> {
    let numbers: Vec<Number> = numbers.into_iter().flatten().collect();
    let order = |one: &&Number, other: &&Number| one.0.total_cmp(&other.0);
    let (measured, case) = match bound {
        Bound::AtLeast(_) => numbers.iter().min_by(order)?,
        Bound::AtMost(_) => numbers.iter().max_by(order)?,
    };
    let of = if numbers.len() > 1 { format!(" (worst: {case})") } else { String::new() };
    // As it is printed: what looks the same is the same.
    let measured = (measured * 100.0).round() / 100.0;
    let (target, wanted, met) = (format!("{target}{of}"), bound.text(), bound.holds(measured));
    Some(Verdict { target, wanted, measured, met })
}

impl Found<'_> {
    fn series(&self, policy: &str, case: &str, threads: usize) -> Option<&Series> {
        let matching = |series: &&Series| {
            let key = &series.key;
            (key.policy.as_str(), key.case.as_str(), key.threads) == (policy, case, threads)
        };
        self.series.iter().find(matching)
    }

    /// The median of a value of a case with one thread.
    fn value(&self, policy: &str, case: &str, value: fn(&Sample) -> f64) -> Option<Number> {
        let median = self.series(policy, case, 1)?.spread(value).median;
        Some((median, short(case)))
    }

    /// The longest that a request of a case with one thread took in any repetition, in ms.
    fn stall(&self, policy: &str, case: &str) -> Option<Number> {
        let longest = |sample: &Sample| sample.max_ns as f64 / 1e6;
        Some((self.series(policy, case, 1)?.spread(longest).max, short(case)))
    }

    /// A value over that of another policy in the same case.
    fn ratio(
        &self,
        [of, to]: [&str; 2],
        case: &str,
        threads: usize,
        value: fn(&Sample) -> f64,
    ) -> Option<Number> {
        let (of, to) = (self.series(of, case, threads)?, self.series(to, case, threads)?);
        Some((of.ratio(to, value)?.median, short(case)))
    }

    /// Throughput of two threads over that of one.
    fn scaling(&self, policy: &str, case: &str) -> Option<Number> {
        let (two, one) = (self.series(policy, case, 2)?, self.series(policy, case, 1)?);
        Some((two.ratio(one, throughput)?.median, short(case)))
    }

    fn amount(&self, measure: Measure, policy: &str) -> Option<Number> {
        Some((self.log.find(measure, policy)?.median, String::new()))
    }

    /// Writes with `O_DSYNC` are no target: the kernel syncs them.
    fn writes(&self, runner: &str) -> Vec<Option<Verdict>> {
        let (of_peer, name) = match self.series(nvcache::POLICY, FDATASYNC, 1) {
            Some(peer) => (peer.spread(throughput).median, "NVCache"),
            None => (NVCACHE_WRITES_PER_S, "NVCache elsewhere"),
        };
        let of = |value| self.value(runner, FDATASYNC, value);
        let against_peer =
            of(throughput).map(|(writes_per_s, case)| (writes_per_s / of_peer, case));
        vec![
            worst("durable 4 KiB write, 1 thread: p50, µs", Bound::AtMost(0.5), [of(p50_us)]),
            worst("durable 4 KiB write, 1 thread: p99.9, µs", Bound::AtMost(10.0), [of(p999_us)]),
            worst(
                &format!("durable 4 KiB writes/s, 1 thread / {name}"),
                Bound::AtLeast(3.0),
                [against_peer],
            ),
            worst(
                "durable 4 KiB writes/s, 2 threads / 1",
                Bound::AtLeast(1.7),
                [self.scaling(runner, FDATASYNC)],
            ),
            worst(
                "durable append of 128 bytes: p50, ns",
                Bound::AtMost(300.0),
                [self.value(runner, APPEND, p50_ns)],
            ),
            worst(
                "durable append of 128 bytes: bytes of log",
                Bound::AtMost(192.0),
                // What is not of the records, such as a definition, is in the number.
                [self.amount(Measure::LogBytes, runner).map(|(bytes, name)| (bytes.floor(), name))],
            ),
        ]
    }

    fn others(&self, runner: &str) -> Vec<Option<Verdict>> {
        let plain = Runner::Plain.name();
        let [in_order, random] = [Pattern::Sequential, Pattern::Uniform].map(full_case);
        let read = |kind| self.ratio([runner, plain], read_case(kind), 1, mean);
        vec![
            worst(
                "log full, in order: writes/s / plain with one sync",
                Bound::AtLeast(1.0),
                [self.ratio([runner, plain], in_order, 1, throughput)],
            ),
            worst(
                "log full, random: writes/s / the disk itself at depth 32",
                Bound::AtLeast(1.0),
                [self.ratio([runner, DISK], random, 1, throughput)],
            ),
            worst(
                "log full: longest stall, ms",
                Bound::AtMost(50.0),
                [in_order, random].map(|case| self.stall(runner, case)),
            ),
            worst(
                "read of a clean page: time / plain",
                Bound::AtMost(1.3),
                [read(Kind::ReadClean)],
            ),
            worst(
                "read of a dirty page: time / plain",
                Bound::AtMost(1.3),
                [read(Kind::ReadDirty)],
            ),
            worst(
                "read of a read-only file: time / plain",
                Bound::AtMost(1.0),
                [read(Kind::ReadOnly)],
            ),
            worst(
                "true: ms more than plain",
                Bound::AtMost(4.0),
                [self.amount(Measure::Launch, runner)],
            ),
            worst("at rest: CPU, %", Bound::AtMost(0.1), [self.amount(Measure::IdleCpu, runner)]),
            worst(
                "hot set rewritten 100 times: times on the disk",
                Bound::AtMost(2.0),
                [self.amount(Measure::HotSet, runner)],
            ),
        ]
    }

    /// What programs do with their syncs, and programs that never sync.
    fn patterns(&self, runner: &str) -> Vec<Option<Verdict>> {
        let (plain, off) = (Runner::Plain.name(), format!("{}{NO_SYNC}", Runner::Plain.name()));
        let off_under = format!("{runner}{NO_SYNC}");
        let all = names::cases();
        let against =
            |pair: [&str; 2]| all.each_ref().map(|case| self.ratio(pair, case, 1, throughput));
        vec![
            worst(
                "patterns of syncs: rounds/s / plain without",
                Bound::AtLeast(0.8),
                against([runner, &off]),
            ),
            worst(
                "patterns of syncs: rounds/s / plain",
                Bound::AtLeast(1.0),
                against([runner, plain]),
            ),
            worst(
                "patterns without syncs: rounds/s / plain without",
                Bound::AtLeast(0.98),
                against([&off_under, &off]),
            ),
            worst(
                "programs that never sync: speed / plain",
                Bound::AtLeast(0.98),
                unsynced::cases().map(|case| self.ratio([runner, plain], &case, 1, throughput)),
            ),
        ]
    }

    /// A steady load, in pools that were used before and in new ones.
    fn steady(&self) -> Vec<Option<Verdict>> {
        let off = format!("{}{NO_SYNC}", Runner::Plain.name());
        let [new, used] = [POOLS.map(|(new, ..)| new), POOLS.map(|(_, used, _)| used)];
        let all = |policies: [&'static str; POOLS.len()]| {
            let cases = steady::CASES.into_iter();
            cases.flat_map(move |(case, _)| policies.map(|policy| (policy, case)))
        };
        let named = |policy: &str, number: Option<Number>| {
            number.map(|(number, case)| (number, format!("{case}, {policy}")))
        };
        let against_off =
            |(policy, case)| named(policy, self.ratio([policy, &off], case, 1, throughput));
        let stall = |(policy, case)| named(policy, self.stall(policy, case));
        let (in_new, in_used, _) = POOLS[0];
        let paced = || steady::PACED.into_iter().map(|(case, _)| case);
        let paced = || paced().flat_map(|case| [(in_new, case), (in_used, case)]);
        vec![
            worst(
                "steady load, pool used before: writes/s / plain without",
                Bound::AtLeast(0.95),
                all(used).map(against_off),
            ),
            worst(
                "steady load, new pool: writes/s / plain without",
                Bound::AtLeast(0.9),
                all(new).map(against_off),
            ),
            worst(
                "steady load: longest stall, ms",
                Bound::AtMost(5.0),
                all(used).chain(all(new)).map(stall),
            ),
            worst(
                "steady load at half of what the disk takes: writes/s / plain without",
                Bound::AtLeast(0.95),
                paced().map(against_off),
            ),
            worst(
                "steady load at half of what the disk takes: longest stall, ms",
                Bound::AtMost(5.0),
                paced().map(stall),
            ),
        ]
    }

    fn databases(&self, runner: &str) -> Vec<Option<Verdict>> {
        let off = format!("{}{NO_SYNC}", Runner::Plain.name());
        let off_under = format!("{runner}{NO_SYNC}");
        let against_off =
            |case: &str, threads| self.ratio([runner, &off], case, threads, throughput);
        let mut verdicts: Vec<_> = MODES
            .into_iter()
            .map(|mode| {
                let target = format!("SQLite {mode} FULL: rows/s / plain OFF");
                let wanted = if mode == "wal" { 1.05 } else { 0.92 };
                worst(&target, Bound::AtLeast(wanted), [against_off(&case_of(mode), 1)])
            })
            .collect();
        let unsynced =
            MODES.map(|mode| self.ratio([&off_under, &off], &case_of(mode), 1, throughput));
        verdicts.push(worst("SQLite OFF: rows/s / plain OFF", Bound::AtLeast(0.98), unsynced));
        let rocksdb = against_off(rocksdb::CASE, 1);
        verdicts.push(worst(
            "RocksDB sync: records/s / plain without",
            Bound::AtLeast(1.1),
            [rocksdb],
        ));
        verdicts.extend(postgres::CLIENTS.map(|clients| {
            let target = format!("pgbench, {clients} clients: transactions/s / fsync=off");
            let wanted = if clients == 1 { 0.97 } else { 0.95 };
            worst(&target, Bound::AtLeast(wanted), [against_off(postgres::CASE, clients)])
        }));
        verdicts
    }

    /// Programs by their own benchmarks.
    fn apps(&self, runner: &str) -> Vec<Option<Verdict>> {
        let (plain, off) = (Runner::Plain.name(), format!("{}{NO_SYNC}", Runner::Plain.name()));
        let against = |policy: &str, name: &str| {
            self.ratio([runner, policy], &apps::case_of(name), 1, throughput)
        };
        let without = apps::names().map(|name| {
            let target = format!("{name}: operations/s / plain without");
            worst(&target, Bound::AtLeast(0.8), [against(&off, name)])
        });
        let with = worst(
            "programs: operations/s / plain",
            Bound::AtLeast(1.0),
            apps::names().map(|name| against(plain, name)),
        );
        without.chain([with]).collect()
    }

    fn recovery(&self) -> Option<Verdict> {
        let pair = [recovery::RECOVER, recovery::IN_ORDER];
        let ratio = self.ratio(pair, recovery::CASE, 1, mean);
        worst("recovery of a full log: time / writing in order", Bound::AtMost(1.5), [ratio])
    }
}

fn short(case: &str) -> String {
    case.trim_start_matches(RUN_PREFIX).to_owned()
}

fn throughput(sample: &Sample) -> f64 {
    sample.ops_per_s
}

fn mean(sample: &Sample) -> f64 {
    sample.mean_ns
}

fn p50_ns(sample: &Sample) -> f64 {
    sample.p50_ns as f64
}

fn p50_us(sample: &Sample) -> f64 {
    sample.p50_ns as f64 / 1e3
}

fn p999_us(sample: &Sample) -> f64 {
    sample.p999_ns as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{Key, Op};

    fn series(policy: &str, case: &str, threads: usize, ops_per_s: f64) -> Series {
        let (policy, case) = (policy.to_owned(), case.to_owned());
        Series {
            key: Key { policy, case, op: Op::Write, threads, iodepth: 1, block_bytes: 4096 },
            samples: vec![Sample { ops_per_s, ..Sample::single(1.0 / ops_per_s) }],
        }
    }

    fn found(series: &[Series]) -> Vec<(String, f64, bool)> {
        let verdicts = verdicts(series, &LogReport::default()).into_iter();
        verdicts.map(|verdict| (verdict.target, verdict.measured, verdict.met)).collect()
    }

    #[test]
    fn the_worst_case_decides_and_is_named() {
        let cases = [Pattern::Sequential, Pattern::Uniform].map(full_case);
        let measured = [series("run", cases[0], 1, 1e6), series("run", cases[1], 1, 10.0)];
        let found = found(&measured);
        let stall = found.iter().find(|(target, ..)| target.contains("longest stall")).unwrap();
        assert!(
            stall.0.starts_with("run: ") && stall.0.ends_with("(worst: full-random)"),
            "{stall:?}"
        );
        assert_eq!((stall.1, stall.2), (100.0, false));
    }

    #[test]
    fn a_durable_write_is_one_with_a_sync_behind_it() {
        let measured = [series("run", FDATASYNC, 1, 1e6), series("run", "run-write-dsync", 1, 1e3)];
        let found = found(&measured);
        let of = |part: &str| {
            let (_, measured, met) = found.iter().find(|it| it.0.contains(part)).unwrap();
            (*measured, *met)
        };
        assert_eq!((of("p50, µs"), of("NVCache")), ((1.0, false), (1.84, false)));
    }

    #[test]
    fn databases_are_judged_against_those_that_do_not_sync() {
        let case = case_of("wal");
        let measured = [series("plain-nosync", &case, 1, 100.0), series("run", &case, 1, 104.9)];
        let found: Vec<_> =
            found(&measured).into_iter().map(|(_, measured, met)| (measured, met)).collect();
        assert_eq!(found, [(1.05, true)], "the number is judged as it is printed");
    }

    #[test]
    fn two_threads_are_compared_with_one_and_amounts_with_their_bounds() {
        let mut log = LogReport::default();
        log.add(Measure::HotSet, "run", 2.5);
        log.add(Measure::LogBytes, "run", 192.01);
        let measured = [series("run", FDATASYNC, 1, 1e6), series("run", FDATASYNC, 2, 1.9e6)];
        let verdicts = verdicts(&measured, &log);
        let met = |part: &str| {
            let verdict = verdicts.iter().find(|verdict| verdict.target.contains(part)).unwrap();
            (verdict.measured, verdict.met)
        };
        assert_eq!(met("2 threads / 1"), (1.9, true));
        assert_eq!(met("hot set"), (2.5, false));
        assert_eq!(met("bytes of log"), (192.0, true));
    }

    #[test]
    fn what_was_not_measured_has_no_verdict() {
        assert_eq!(found(&[]), []);
    }
}
