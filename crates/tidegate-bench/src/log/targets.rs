//! The targets of `tidegate run` for speed, as data, and the verdicts of a run.
//!
//! A target over several cases is met if the worst case meets it.

use super::bed::{PLAIN, PLAIN_NO_SYNC, RUN, RUN_NO_SYNC};
use super::files::{APPEND, DISK, FDATASYNC, full_case, read_case};
use super::io::Kind;
use super::sqlite::{MODES, case_of};
use super::steady::POOLS;
use super::{
    LogReport, Measure, RUN_PREFIX, apps, names, nvcache, postgres, recovery, rocksdb, steady,
    unsynced,
};
use crate::measure::{Sample, Series, throughput};
use crate::pattern::Pattern;
use crate::targets::{Number, Verdict, at_least, at_most};

/// Writes of 4 KiB a second by one thread of the authors' `NVCache`: the middle of its results on a
/// machine of this size, its log on tmpfs and not full.
const NVCACHE_WRITES_PER_S: f64 = 543_500.0;

/// The measurements of a run.
struct Found<'a> {
    series: &'a [Series],
    log: &'a LogReport,
}

/// Returns the verdicts on all targets that this run measured.
pub(crate) fn verdicts(series: &[Series], log: &LogReport) -> Vec<Verdict> {
    let found = Found { series, log };
    let all = [
        found.writes(),
        found.others(),
        found.patterns(),
        found.steady(),
        found.databases(),
        found.apps(),
    ];
    let named = all.into_iter().flatten().flatten();
    let named =
        named.map(|verdict| Verdict { target: format!("{RUN}: {}", verdict.target), ..verdict });
    named.chain(found.recovery()).collect()
}

impl Found<'_> {
    fn series(&self, policy: &str, case: &str, threads: usize) -> Option<&Series> {
        let matching = |series: &&Series| {
            let key = &series.key;
            (key.policy.as_str(), key.case.as_str(), key.threads) == (policy, case, threads)
        };
        self.series.iter().find(matching)
    }

    /// Returns the median of a value in a case of `run` with one thread.
    fn value(&self, case: &str, value: fn(&Sample) -> f64) -> Option<Number> {
        let median = self.series(RUN, case, 1)?.spread(value).median;
        Some((median, short(case)))
    }

    /// Returns the longest request of a case with one thread in any repetition, in ms.
    fn stall_ms(&self, policy: &str, case: &str) -> Option<Number> {
        let longest = |sample: &Sample| sample.max_ns as f64 / 1e6;
        Some((self.series(policy, case, 1)?.spread(longest).max, short(case)))
    }

    /// Returns the throughput as a multiple of another policy's in the same case, with one thread.
    fn speed(&self, policies: [&str; 2], case: &str) -> Option<Number> {
        self.ratio(policies, case, 1, throughput)
    }

    /// Returns the mean latency as a multiple of another policy's in one case, with one thread.
    fn time(&self, policies: [&str; 2], case: &str) -> Option<Number> {
        self.ratio(policies, case, 1, |sample| sample.mean_ns)
    }

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

    /// Returns the throughput of two threads of `run` as a multiple of one thread's.
    fn scaling(&self, case: &str) -> Option<Number> {
        let (two, one) = (self.series(RUN, case, 2)?, self.series(RUN, case, 1)?);
        Some((two.ratio(one, throughput)?.median, short(case)))
    }

    fn amount(&self, measure: Measure) -> Option<Number> {
        Some((self.log.find(measure, RUN)?.median, String::new()))
    }

    /// Judges durable writes. Writes with `O_DSYNC` have no target: the kernel syncs them.
    fn writes(&self) -> Vec<Option<Verdict>> {
        let (of_peer, name) = match self.series(nvcache::POLICY, FDATASYNC, 1) {
            Some(peer) => (peer.spread(throughput).median, "NVCache"),
            None => (NVCACHE_WRITES_PER_S, "NVCache elsewhere"),
        };
        let of = |value| self.value(FDATASYNC, value);
        let against_peer =
            of(throughput).map(|(writes_per_s, case)| (writes_per_s / of_peer, case));
        let to_peer = format!("durable 4 KiB writes/s, 1 thread / {name}");
        let p50_us = of(|sample| sample.p50_ns as f64 / 1e3);
        let p999_us = of(|sample| sample.p999_ns as f64 / 1e3);
        let append_ns = self.value(APPEND, |sample| sample.p50_ns as f64);
        // Rounds down the share of other records, such as definitions.
        let log_bytes = self.amount(Measure::LOG_BYTES).map(|(bytes, name)| (bytes.floor(), name));
        vec![
            at_most("durable 4 KiB write, 1 thread: p50, µs", 0.5, [p50_us]),
            at_most("durable 4 KiB write, 1 thread: p99.9, µs", 10.0, [p999_us]),
            at_least(&to_peer, 3.0, [against_peer]),
            at_least("durable 4 KiB writes/s, 2 threads / 1", 1.7, [self.scaling(FDATASYNC)]),
            at_most("durable append of 128 bytes: p50, ns", 300.0, [append_ns]),
            at_most("durable append of 128 bytes: bytes of log", 192.0, [log_bytes]),
        ]
    }

    fn others(&self) -> Vec<Option<Verdict>> {
        let [in_order, random] = [Pattern::Sequential, Pattern::Uniform].map(full_case);
        let over_plain = self.speed([RUN, PLAIN], in_order);
        let over_disk = self.speed([RUN, DISK], random);
        let stalls_ms = [in_order, random].map(|case| self.stall_ms(RUN, case));
        let read = |kind| [self.time([RUN, PLAIN], read_case(kind))];
        let rewrites = self.amount(Measure::HOT_SET);
        vec![
            at_least("log full, in order: writes/s / plain with one sync", 1.0, [over_plain]),
            at_least("log full, random: writes/s / the disk itself at depth 32", 1.0, [over_disk]),
            at_most("log full: longest stall, ms", 50.0, stalls_ms),
            at_most("read of a clean page: time / plain", 1.3, read(Kind::ReadClean)),
            at_most("read of a dirty page: time / plain", 1.3, read(Kind::ReadDirty)),
            at_most("read of a read-only file: time / plain", 1.0, read(Kind::ReadOnly)),
            at_most("true: ms more than plain", 4.0, [self.amount(Measure::LAUNCH)]),
            at_most("at rest: CPU, %", 0.1, [self.amount(Measure::IDLE_CPU)]),
            at_most("hot set rewritten 100 times: times on the disk", 2.0, [rewrites]),
        ]
    }

    /// Judges programs by their patterns of syncs, and programs that never sync.
    fn patterns(&self) -> Vec<Option<Verdict>> {
        let all = names::cases();
        let speeds = |pair: [&str; 2]| all.each_ref().map(|case| self.speed(pair, case));
        let synced = speeds([RUN, PLAIN_NO_SYNC]);
        let unsynced = speeds([RUN_NO_SYNC, PLAIN_NO_SYNC]);
        let programs = unsynced::cases().map(|case| self.speed([RUN, PLAIN], &case));
        vec![
            at_least("patterns of syncs: rounds/s / plain without", 0.8, synced),
            at_least("patterns of syncs: rounds/s / plain", 1.0, speeds([RUN, PLAIN])),
            at_least("patterns without syncs: rounds/s / plain without", 0.98, unsynced),
            at_least("programs that never sync: speed / plain", 0.98, programs),
        ]
    }

    /// Judges a steady load, in used pools and in new ones.
    fn steady(&self) -> Vec<Option<Verdict>> {
        let [new, used] = [POOLS.map(|(new, ..)| new), POOLS.map(|(_, used, _)| used)];
        let all = |policies: [&'static str; POOLS.len()]| {
            let cases = steady::CASES.into_iter();
            cases.flat_map(move |(case, _)| policies.map(|policy| (policy, case)))
        };
        let named = |policy: &str, number: Option<Number>| {
            number.map(|(number, case)| (number, format!("{case}, {policy}")))
        };
        let against_off = |(policy, case)| named(policy, self.speed([policy, PLAIN_NO_SYNC], case));
        let stall_ms = |(policy, case)| named(policy, self.stall_ms(policy, case));
        let (in_new, in_used, _) = POOLS[0];
        let paced = || {
            let cases = steady::PACED.into_iter();
            cases.flat_map(|(case, _)| [(in_new, case), (in_used, case)])
        };
        let speed = |which: &str| format!("steady load{which}: writes/s / plain without");
        let stall = |which: &str| format!("steady load{which}: longest stall, ms");
        let at_half = " at half of what the disk takes";
        vec![
            at_least(&speed(", pool used before"), 0.95, all(used).map(against_off)),
            at_least(&speed(", new pool"), 0.9, all(new).map(against_off)),
            at_most(&stall(""), 5.0, all(used).chain(all(new)).map(stall_ms)),
            at_least(&speed(at_half), 0.95, paced().map(against_off)),
            at_most(&stall(at_half), 5.0, paced().map(stall_ms)),
        ]
    }

    fn databases(&self) -> Vec<Option<Verdict>> {
        let sqlite = MODES.map(|mode| {
            let target = format!("SQLite {mode} FULL: rows/s / plain OFF");
            let wanted = if mode == "wal" { 1.05 } else { 0.92 };
            at_least(&target, wanted, [self.speed([RUN, PLAIN_NO_SYNC], &case_of(mode))])
        });
        let unsynced = MODES.map(|mode| self.speed([RUN_NO_SYNC, PLAIN_NO_SYNC], &case_of(mode)));
        let rocksdb = self.speed([RUN, PLAIN_NO_SYNC], rocksdb::CASE);
        let pgbench = postgres::CLIENTS.map(|clients| {
            let target = format!("pgbench, {clients} clients: transactions/s / fsync=off");
            let wanted = if clients == 1 { 0.97 } else { 0.95 };
            let speed = self.ratio([RUN, PLAIN_NO_SYNC], postgres::CASE, clients, throughput);
            at_least(&target, wanted, [speed])
        });
        let others = [
            at_least("SQLite OFF: rows/s / plain OFF", 0.98, unsynced),
            at_least("RocksDB sync: records/s / plain without", 1.1, [rocksdb]),
        ];
        sqlite.into_iter().chain(others).chain(pgbench).collect()
    }

    /// Judges programs by their own benchmarks.
    fn apps(&self) -> Vec<Option<Verdict>> {
        let against = |policy, name| self.speed([RUN, policy], &apps::case_of(name));
        let without = apps::names().map(|name| {
            let target = format!("{name}: operations/s / plain without");
            at_least(&target, 0.8, [against(PLAIN_NO_SYNC, name)])
        });
        let with = apps::names().map(|name| against(PLAIN, name));
        without.chain([at_least("programs: operations/s / plain", 1.0, with)]).collect()
    }

    fn recovery(&self) -> Option<Verdict> {
        let ratio = self.time([recovery::RECOVER, recovery::IN_ORDER], recovery::CASE);
        at_most("recovery of a full log: time / writing in order", 1.5, [ratio])
    }
}

fn short(case: &str) -> String {
    case.trim_start_matches(RUN_PREFIX).to_owned()
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
        log.add(Measure::HOT_SET, "run", 2.5);
        log.add(Measure::LOG_BYTES, "run", 192.01);
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
