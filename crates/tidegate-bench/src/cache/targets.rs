//! The targets of the cache for speed and traffic, as data, and the verdicts of a run.
//!
//! A target over several cases is met if the worst case meets it.

use super::behind::{BATCHES, BEFORE_NULL, FILL, FULL_DISK, FULL_FILE, READ};
use super::cases::Kind;
use super::peer::OCF;
use super::study::{self, Access, BACKING_AT_ONCE, FILES_PCT, WRITES_BYTES};
use super::zipf::{MEASURE, SIMULATION};
use super::{BACKING, CACHE, CacheReport, opening, served};
use crate::measure::{Op, Sample, Series, Traffic, find, throughput};
use crate::nbd;
use crate::plan::size_name;
use crate::targets::{Number, Verdict, at_least, at_most};

/// The result of OCF, the library in Open CAS, in user space on a machine of this size, with its
/// cache in a tmpfs: writes a second into a full cache before a file through the page cache.
const OCF_FULL_WRITES_PER_S: f64 = 30_000.0;
/// The pool size that the bound of an opening refers to, and seconds of that bound for each GiB.
const TARGET_GIB: f64 = 8.0;
const OPEN_S_A_GIB: f64 = 0.3 / TARGET_GIB;

/// Returns the verdicts on all targets that this run measured.
pub(crate) fn verdicts(series: &[Series], report: &CacheReport) -> Vec<Verdict> {
    let found = Found(series);
    let all = [found.cases(), found.study(), found.served(), found.behind()];
    let all = all.into_iter().flatten().flatten();
    all.chain(found.opening()).chain(hit_ratio(report)).collect()
}

fn p50(sample: &Sample) -> f64 {
    sample.p50_ns as f64
}

/// The measurements of a run.
struct Found<'a>(&'a [Series]);

impl Found<'_> {
    /// Finds the writes of one thread, one at a time.
    fn writes(&self, policy: &str, case: &str) -> Option<&Series> {
        find(self.0, policy, case, Op::Write, (1, 1))
    }

    fn cases(&self) -> Vec<Option<Verdict>> {
        let of = |kind: Kind| {
            let (bytes, time) = match kind {
                Kind::Miss | Kind::Hit => (1.02, 1.4),
                Kind::Evict => (1.05, 2.0),
            };
            let name = kind.name();
            let traffic = format!("{name}: bytes to the memory a byte");
            let latency = format!("{name}, 1 thread: p50 / bare copy with two fences");
            [
                at_most(&traffic, bytes, [self.amplification(name)]),
                at_most(&latency, time, [self.ratio(Op::Write, name, "copy", p50)]),
            ]
        };
        let scaling = [Kind::Miss, Kind::Hit].map(|kind| self.scaling(kind.name()));
        let scaling = at_least("misses and hits/s: 2 threads / 1", 1.7, scaling);
        Kind::ALL.into_iter().flat_map(of).chain([scaling]).collect()
    }

    fn amplification(&self, case: &str) -> Option<Number> {
        let found = self.writes(CACHE, case)?;
        let bytes = found.traffic_per_op(Traffic::bytes)? / found.key.block_bytes as f64;
        Some((bytes, case.to_owned()))
    }

    fn scaling(&self, case: &str) -> Option<Number> {
        let two = find(self.0, CACHE, case, Op::Write, (2, 1))?;
        let ratio = two.ratio(self.writes(CACHE, case)?, throughput)?;
        Some((ratio.median, case.to_owned()))
    }

    fn study(&self) -> Vec<Option<Verdict>> {
        let cells = |files: &'static [u64]| {
            files.iter().flat_map(|&file_pct| {
                let sizes = WRITES_BYTES.into_iter();
                sizes.flat_map(move |bytes| {
                    Access::ALL.map(|access| (u64::from(bytes), file_pct, access))
                })
            })
        };
        let against = |base, cell| self.study_ratio(base, cell, 1);
        let that_fit = cells(&FILES_PCT[..FILES_PCT.len() / 2]).map(|cell| against("btt", cell));
        let all = cells(&FILES_PCT).map(|cell| against(BACKING, cell));
        let deep = |base, cell| self.study_ratio(base, cell, study::DEPTH);
        let deep_that_fit = study::deep_cells().filter(|(_, file_pct, _)| *file_pct < 100);
        let deep_that_fit = deep_that_fit.map(|cell| deep("btt", cell));
        let bases = [BACKING, BACKING_AT_ONCE].into_iter();
        let deep_all = bases.flat_map(|base| study::deep_cells().map(move |it| deep(base, it)));
        vec![
            at_least("4 KiB-1 MiB, file that fits: MB/s / btt", 0.95, that_fit),
            at_least("4 KiB-1 MiB: MB/s / the backing alone", 0.95, all),
            at_least("32 at a time, file that fits: MB/s / btt", 0.95, deep_that_fit),
            at_least("32 at a time: MB/s / the backing alone", 0.95, deep_all),
        ]
    }

    fn study_ratio(
        &self,
        base: &str,
        (bytes, file_pct, access): (u64, u64, Access),
        iodepth: u32,
    ) -> Option<Number> {
        let case = study::case(file_pct, access);
        let find = |policy| study::find(self.0, policy, &case, (bytes, iodepth));
        let ratio = find(CACHE)?.ratio(find(base)?, throughput)?;
        Some((ratio.median, format!("{}, {case}", size_name(bytes))))
    }

    fn served(&self) -> Vec<Option<Verdict>> {
        let case = format!("{}{}", served::PREFIX, nbd::RANDOM);
        let ratio = |iodepth, op: Op| {
            let find = |policy| find(self.0, policy, &case, op, (1, iodepth));
            let ratio = find(CACHE)?.ratio(find("btt")?, throughput)?;
            Some((ratio.median, op.name().to_owned()))
        };
        let at = |iodepth| {
            let ratios = [Op::Write, Op::Read].map(|op| ratio(iodepth, op));
            at_least(&format!("hits over NBD at depth {iodepth}: IOPS / btt"), 0.95, ratios)
        };
        [1, 32].map(at).into()
    }

    fn behind(&self) -> Vec<Option<Verdict>> {
        let cases = [FULL_FILE, FULL_DISK];
        let p99_ms = cases.map(|case| {
            let p99_ns = self.writes(CACHE, case)?.spread(|sample| sample.p99_ns as f64);
            Some((p99_ns.median / 1e6, case.to_owned()))
        });
        let filled = cases.map(|case| {
            let case = format!("{FILL}{}", case.trim_start_matches("cache-full"));
            self.ratio(Op::Write, &case, BEFORE_NULL, throughput)
        });
        let stall_ms = cases.map(|case| {
            let longest = self.writes(CACHE, case)?.row().max_ns;
            Some((longest as f64 / 1e6, case.to_owned()))
        });
        let (ocf, over_ocf) = match self.ratio(Op::Write, FULL_FILE, OCF, throughput) {
            Some(ratio) => ("OCF", Some(ratio)),
            None => ("OCF elsewhere", self.over_ocf_elsewhere()),
        };
        let to_ocf = format!("full, before a file: writes/s / {ocf}");
        let to_batches = cases.map(|case| self.ratio(Op::Write, case, BATCHES, throughput));
        let reads = [self.ratio(Op::Read, READ, BACKING, p50)];
        vec![
            at_least(&to_ocf, 2.0, [over_ocf]),
            at_most("full: p99, ms", 1.0, p99_ms),
            at_least("to 90 % dirty: writes/s / before null", 0.9, filled),
            at_least("full: writes/s / the backing's, 512 at once", 0.9, to_batches),
            at_most("full: longest stall, ms", 50.0, stall_ms),
            at_most("read misses of 20 µs: p50 / the backing alone", 1.05, reads),
        ]
    }

    fn over_ocf_elsewhere(&self) -> Option<Number> {
        let writes_per_s = self.writes(CACHE, FULL_FILE)?.spread(throughput).median;
        Some((writes_per_s / OCF_FULL_WRITES_PER_S, FULL_FILE.to_owned()))
    }

    fn ratio(&self, op: Op, case: &str, base: &str, value: fn(&Sample) -> f64) -> Option<Number> {
        let find = |policy| find(self.0, policy, case, op, (1, 1));
        let ratio = find(CACHE)?.ratio(find(base)?, value)?;
        Some((ratio.median, case.to_owned()))
    }

    fn opening(&self) -> Option<Verdict> {
        let opened = find(self.0, CACHE, opening::CASE, Op::Read, (1, 1))?;
        let gib = opened.key.block_bytes as f64 / f64::from(1 << 30);
        let seconds = opened.spread(|sample| sample.mean_ns).median / 1e9;
        // The fixed part of an opening is scaled too.
        let scaled = if gib < TARGET_GIB { format!(", from {gib:.1} GiB") } else { String::new() };
        let name = format!("opening after a crash, for {TARGET_GIB} GiB{scaled}: s");
        let number = (seconds / gib * TARGET_GIB, String::new());
        at_most(&name, OPEN_S_A_GIB * TARGET_GIB, [Some(number)])
    }
}

fn hit_ratio(report: &CacheReport) -> Option<Verdict> {
    let find = |policy| report.amounts.find(MEASURE, policy).map(|spread| spread.median);
    let apart = (find(CACHE)? - find(SIMULATION)?).abs();
    let name = "Zipf 0.99 reads: hit ratio apart from the simulation, points";
    at_most(name, 1.0, [Some((apart, String::new()))])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Key;

    fn series(policy: &str, case: &str, threads: usize, sample: Sample) -> Series {
        let (policy, case) = (policy.to_owned(), case.to_owned());
        let key = Key { policy, case, op: Op::Write, threads, iodepth: 1, block_bytes: 4096 };
        Series { key, samples: vec![sample] }
    }

    fn met(found: &[Verdict], part: &str) -> Option<(f64, bool)> {
        let verdict = found.iter().find(|verdict| verdict.target.contains(part))?;
        Some((verdict.measured, verdict.met))
    }

    #[test]
    fn writes_are_judged_beside_the_floor_and_by_their_traffic() {
        let at = |p50_ns, bytes| {
            let traffic = Traffic { data_bytes: bytes, metadata_bytes: 64, fences: 1 };
            Sample { p50_ns, traffic: Some(traffic), ..Sample::single(1e-6) }
        };
        let measured = [
            series("copy", "evict", 1, at(500, 4096)),
            series(CACHE, "evict", 1, at(1100, 4160)),
            series(CACHE, "miss", 1, at(600, 8192)),
        ];
        let found = verdicts(&measured, &CacheReport::default());
        assert_eq!(met(&found, "evict, 1 thread: p50"), Some((2.2, false)));
        assert_eq!(met(&found, "evict: bytes"), Some((1.03, true)));
        assert_eq!(met(&found, "miss: bytes"), Some((2.02, false)));
        assert_eq!(found.len(), 3, "what was not measured has no verdict: {found:?}");
    }

    #[test]
    fn the_worst_cell_of_the_study_decides() {
        let at = |ops_per_s| Sample { ops_per_s, ..Sample::single(1.0) };
        let mut measured = Vec::new();
        for access in Access::ALL {
            let case = study::case(50, access);
            let slow = access == Access::Second;
            measured.push(series("btt", &case, 1, at(100.0)));
            measured.push(series(CACHE, &case, 1, at(if slow { 90.0 } else { 120.0 })));
        }
        let found = verdicts(&measured, &CacheReport::default());
        assert_eq!(met(&found, "/ btt"), Some((0.9, false)));
        assert!(found[0].target.contains("study-50pct-2nd"), "{found:?}");
    }

    #[test]
    fn a_full_cache_is_judged_beside_ocf_where_that_was_measured() {
        let at = |policy, ops_per_s| {
            series(policy, FULL_FILE, 1, Sample { ops_per_s, ..Sample::single(1.0) })
        };
        let mut measured = vec![at(CACHE, 15_000.0)];
        let found = verdicts(&measured, &CacheReport::default());
        assert_eq!(met(&found, "/ OCF elsewhere"), Some((0.5, false)));
        measured.push(at(OCF, 5_000.0));
        let found = verdicts(&measured, &CacheReport::default());
        assert_eq!(met(&found, "writes/s / OCF"), Some((3.0, true)));
        assert_eq!(met(&found, "elsewhere"), None);
    }

    #[test]
    fn many_requests_at_a_time_are_judged_beside_all_that_the_backing_takes() {
        let at = |policy, ops_per_s| {
            let sample = Sample { ops_per_s, ..Sample::single(1.0) };
            let mut series = series(policy, &study::case(125, Access::First), 1, sample);
            series.key.iodepth = study::DEPTH;
            series
        };
        let measured =
            [at(CACHE, 100.0), at("btt", 200.0), at(BACKING, 50.0), at(BACKING_AT_ONCE, 125.0)];
        let found = verdicts(&measured, &CacheReport::default());
        assert_eq!(met(&found, "32 at a time: MB/s / the backing"), Some((0.8, false)));
        assert_eq!(
            found.len(),
            1,
            "nothing of one at a time, and a file that fits was not written"
        );
    }

    #[test]
    fn openings_are_judged_by_their_size_and_hits_by_the_simulation() {
        let mut opened = series(CACHE, opening::CASE, 1, Sample::single(0.2));
        (opened.key.op, opened.key.block_bytes) = (Op::Read, 4 << 30);
        let mut report = CacheReport::default();
        report.amounts.add(MEASURE, "%", CACHE, 75.0);
        report.amounts.add(MEASURE, "%", SIMULATION, 76.5);
        let found = verdicts(&[opened], &report);
        assert_eq!(met(&found, "for 8 GiB, from 4.0 GiB"), Some((0.4, false)));
        assert_eq!(met(&found, "hit ratio"), Some((1.5, false)));
    }
}
