//! The speed and the traffic that the cache is built for, as data, and whether a run met them.
//!
//! A target over several cases holds if the worst of them does.

use super::behind::{BATCHES, BEFORE_NULL, FILL, FULL_DISK, FULL_FILE, READ};
use super::cases::Kind;
use super::peer::OCF;
use super::study::{self, Access, BACKING_AT_ONCE, FILES_PCT, WRITES_BYTES};
use super::zipf::{MEASURE, SIMULATION};
use super::{BACKING, CACHE, CacheReport, opening, served};
use crate::log::targets::{Number, worst};
use crate::measure::{Op, Sample, Series, Traffic};
use crate::nbd;
use crate::plan::size_name;
use crate::targets::{Bound, Verdict};

/// What OCF, the library in Open CAS, reached in user space on a machine of this size, its cache in
/// a tmpfs: writes a second into a full cache before a file through the page cache.
const OCF_FULL_WRITES_PER_S: f64 = 30_000.0;
/// The pool of which the opening has a bound, and seconds of that bound for each GiB.
const TARGET_GIB: f64 = 8.0;
const OPEN_S_A_GIB: f64 = 0.3 / TARGET_GIB;

/// The verdicts on all targets that this run measured.
pub(crate) fn verdicts(series: &[Series], report: &CacheReport) -> Vec<Verdict> {
    let found = Found(series);
    let all = [found.cases(), found.study(), found.served(), found.behind()];
    let all = all.into_iter().flatten().flatten();
    all.chain(found.opening()).chain(hit_ratio(report)).collect()
}

fn throughput(sample: &Sample) -> f64 {
    sample.ops_per_s
}

fn p50(sample: &Sample) -> f64 {
    sample.p50_ns as f64
}

/// What was measured.
struct Found<'a>(&'a [Series]);

impl Found<'_> {
    fn series(&self, policy: &str, case: &str, op: Op, at: (usize, u32)) -> Option<&Series> {
        self.0.iter().find(|series| {
            let key = &series.key;
            (key.policy.as_str(), key.case.as_str()) == (policy, case)
                && (key.op, (key.threads, key.iodepth)) == (op, at)
        })
    }

    /// Writes of one thread, one at a time.
    fn writes(&self, policy: &str, case: &str) -> Option<&Series> {
        self.series(policy, case, Op::Write, (1, 1))
    }

    fn cases(&self) -> Vec<Option<Verdict>> {
        let bounds = |kind| match kind {
            Kind::Miss | Kind::Hit => (1.02, 1.4),
            Kind::Evict => (1.05, 2.0),
        };
        let of = |kind: Kind| {
            let (bytes, time) = bounds(kind);
            let name = kind.name();
            [
                worst(
                    &format!("{name}: bytes to the memory a byte"),
                    Bound::AtMost(bytes),
                    [self.amplification(kind)],
                ),
                worst(
                    &format!("{name}, 1 thread: p50 / bare copy with two fences"),
                    Bound::AtMost(time),
                    [self.over_the_floor(kind)],
                ),
            ]
        };
        let mut all: Vec<_> = Kind::ALL.into_iter().flat_map(of).collect();
        let scaling = [Kind::Miss, Kind::Hit].map(|kind| self.scaling(kind));
        all.push(worst("misses and hits/s: 2 threads / 1", Bound::AtLeast(1.7), scaling));
        all
    }

    fn amplification(&self, kind: Kind) -> Option<Number> {
        let found = self.writes(CACHE, kind.name())?;
        let all = |traffic: &Traffic| traffic.data_bytes + traffic.metadata_bytes;
        let bytes = found.traffic_per_op(all)? / found.key.block_bytes as f64;
        Some((bytes, kind.name().to_owned()))
    }

    fn over_the_floor(&self, kind: Kind) -> Option<Number> {
        let floor = self.writes("copy", kind.name())?;
        let ratio = self.writes(CACHE, kind.name())?.ratio(floor, p50)?;
        Some((ratio.median, kind.name().to_owned()))
    }

    fn scaling(&self, kind: Kind) -> Option<Number> {
        let two = self.series(CACHE, kind.name(), Op::Write, (2, 1))?;
        let ratio = two.ratio(self.writes(CACHE, kind.name())?, throughput)?;
        Some((ratio.median, kind.name().to_owned()))
    }

    fn study(&self) -> Vec<Option<Verdict>> {
        let half = FILES_PCT.len() / 2;
        let against = |base: &'static str, files: &[u64]| {
            let ratio = |(file_pct, access, bytes): (u64, Access, u32)| {
                self.study_ratio(base, file_pct, access, (u64::from(bytes), 1))
            };
            let cells = files.iter().flat_map(|&file_pct| {
                let sizes = WRITES_BYTES.into_iter();
                sizes.flat_map(move |bytes| Access::ALL.map(|access| (file_pct, access, bytes)))
            });
            cells.map(ratio).collect::<Vec<_>>()
        };
        let bound = Bound::AtLeast(0.95);
        vec![
            worst(
                "4 KiB-1 MiB, file that fits: MB/s / btt",
                bound,
                against("btt", &FILES_PCT[..half]),
            ),
            worst("4 KiB-1 MiB: MB/s / the backing alone", bound, against(BACKING, &FILES_PCT)),
            self.deep("32 at a time, file that fits: MB/s / btt", &["btt"], |pct| pct < 100),
            self.deep(
                "32 at a time: MB/s / the backing alone",
                &[BACKING, BACKING_AT_ONCE],
                |_| true,
            ),
        ]
    }

    /// The worst of the study's cells with many requests at a time, of files for which `is_meant`.
    fn deep(
        &self,
        target: &str,
        bases: &[&str],
        is_meant: impl Fn(u64) -> bool,
    ) -> Option<Verdict> {
        let cells = || study::deep_cells().filter(|(_, file_pct, _)| is_meant(*file_pct));
        let against = |base: &str| {
            let ratio = |(bytes, file_pct, access)| {
                self.study_ratio(base, file_pct, access, (bytes, study::DEPTH))
            };
            cells().map(ratio).collect::<Vec<_>>()
        };
        worst(target, Bound::AtLeast(0.95), bases.iter().flat_map(|base| against(base)))
    }

    fn study_ratio(
        &self,
        base: &str,
        file_pct: u64,
        access: Access,
        writes: (u64, u32),
    ) -> Option<Number> {
        let case = study::case(file_pct, access);
        let find = |policy| study::find(self.0, policy, &case, writes);
        let ratio = find(CACHE)?.ratio(find(base)?, throughput)?;
        Some((ratio.median, format!("{}, {case}", size_name(writes.0))))
    }

    fn served(&self) -> Vec<Option<Verdict>> {
        let case = format!("{}{}", served::PREFIX, nbd::RANDOM);
        let ratio = |iodepth, op: Op| {
            let find = |policy| self.series(policy, &case, op, (1, iodepth));
            let ratio = find(CACHE)?.ratio(find("btt")?, throughput)?;
            Some((ratio.median, op.name().to_owned()))
        };
        let at = |iodepth| {
            let ratios = [Op::Write, Op::Read].map(|op| ratio(iodepth, op));
            let name = format!("hits over NBD at depth {iodepth}: IOPS / btt");
            worst(&name, Bound::AtLeast(0.95), ratios)
        };
        [1, 32].map(at).into()
    }

    fn behind(&self) -> Vec<Option<Verdict>> {
        let cases = [FULL_FILE, FULL_DISK];
        let of = |value: fn(&Sample) -> f64, scale: f64| {
            cases.map(|case| {
                let found = self.writes(CACHE, case)?.spread(value).median * scale;
                Some((found, case.to_owned()))
            })
        };
        let filled = cases.map(|case| {
            let case = format!("{FILL}{}", case.trim_start_matches("cache-full"));
            self.write_ratio(&case, BEFORE_NULL)
        });
        let p99_ms = |sample: &Sample| sample.p99_ns as f64;
        let stall_ms = cases.map(|case| {
            let longest = self.writes(CACHE, case)?.row().max_ns;
            Some((longest as f64 / 1e6, case.to_owned()))
        });
        let ocf = match self.write_ratio(FULL_FILE, OCF) {
            Some(ratio) => ("OCF", Some(ratio)),
            None => ("OCF elsewhere", of(throughput, 1.0 / OCF_FULL_WRITES_PER_S)[0].clone()),
        };
        vec![
            worst(
                &format!("full, before a file: writes/s / {}", ocf.0),
                Bound::AtLeast(2.0),
                [ocf.1],
            ),
            worst("full: p99, ms", Bound::AtMost(1.0), of(p99_ms, 1e-6)),
            worst("to 90 % dirty: writes/s / before null", Bound::AtLeast(0.9), filled),
            worst(
                "full: writes/s / the backing's, 512 at once",
                Bound::AtLeast(0.9),
                cases.map(|case| self.write_ratio(case, BATCHES)),
            ),
            worst("full: longest stall, ms", Bound::AtMost(50.0), stall_ms),
            worst(
                "read misses of 20 µs: p50 / the backing alone",
                Bound::AtMost(1.05),
                [self.reads()],
            ),
        ]
    }

    fn write_ratio(&self, case: &str, base: &str) -> Option<Number> {
        let ratio = self.writes(CACHE, case)?.ratio(self.writes(base, case)?, throughput)?;
        Some((ratio.median, case.to_owned()))
    }

    fn reads(&self) -> Option<Number> {
        let find = |policy| self.series(policy, READ, Op::Read, (1, 1));
        let ratio = find(CACHE)?.ratio(find(BACKING)?, p50)?;
        Some((ratio.median, READ.to_owned()))
    }

    fn opening(&self) -> Option<Verdict> {
        let opened = self.series(CACHE, opening::CASE, Op::Read, (1, 1))?;
        let gib = opened.key.block_bytes as f64 / f64::from(1 << 30);
        let seconds = opened.spread(|sample| sample.mean_ns).median / 1e9;
        let bound = Bound::AtMost(OPEN_S_A_GIB * TARGET_GIB);
        // The part of an opening that does not grow with the pool is scaled too.
        let scaled = if gib < TARGET_GIB { format!(", from {gib:.1} GiB") } else { String::new() };
        let name = format!("opening after a crash, for {TARGET_GIB} GiB{scaled}: s");
        worst(&name, bound, [Some((seconds / gib * TARGET_GIB, String::new()))])
    }
}

fn hit_ratio(report: &CacheReport) -> Option<Verdict> {
    let find = |policy| report.amounts.find(MEASURE, policy).map(|spread| spread.median);
    let apart = (find(CACHE)? - find(SIMULATION)?).abs();
    let name = "Zipf 0.99 reads: hit ratio apart from the simulation, points";
    worst(name, Bound::AtMost(1.0), [Some((apart, String::new()))])
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
