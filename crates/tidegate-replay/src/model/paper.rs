//! Figures of the Caiti paper that need many cores: writes a section of docs/papers.md.
//!
//! The command owns the text between the markers. Our numbers in it come from the run that wrote
//! it; the paper's claims are in `checks`.

#![allow(clippy::cast_precision_loss, reason = "ratios for people")]

use std::path::Path;

use tidegate::dram::phases::Phase;
use tidegate_bench::policy::Policy;
use tidegate_bench::table::Table;

use super::case::{Case, Length};
use super::costs::Costs;
use super::output::{Share, micros, shares, size};
use super::plan::{self, Ran};
use crate::error::Result;
use crate::papers::{self, Check};
use crate::report::grid;
use crate::stdout::print;

const CORES: u32 = 36;
const JOBS: [u32; 6] = [1, 2, 4, 8, 16, 32];
const DEPTHS: [u32; 7] = [1, 32, 64, 128, 256, 512, 1024];
/// Indices in [`DEPTHS`].
const DEPTH_1: usize = 0;
const DEPTH_1024: usize = 6;
/// Writes of 4 KiB between two flushes: the minimum and maximum of figure 2b.
const FLUSH_WRITES: [u64; 2] = [128, 32_768];
/// Figures 2d, 2e and 3: a longer request is a spike.
const SLOW_NS: u64 = 20_000;
/// Figures 2d and 2e: a request up to this time only wrote to the cache.
const CACHED_NS: u64 = 5_000;
/// Figure 5c: a million requests. Between two flushes there are as many requests as the slowest
/// cache serves in the five seconds between two commits of the file system.
const LONG_RUN_REQUESTS: u64 = 1_000_000;
const LONG_RUN_FLUSH_WRITES: u64 = 300_000;
/// Figure 6b: number of reads.
const READS: u64 = 100_000;
const CACHE_BYTES: u64 = 512 << 20;
const CACHES: [u64; 6] = [64 << 20, 128 << 20, 256 << 20, 512 << 20, 1 << 30, 2 << 30];
const POLICIES: &str =
    "raw,btt,transit,transit-no-eager,transit-no-bypass,pmbd,pmbd70,lru,coactive";
/// The policies of table 1.
const CACHED: [&str; 5] = ["pmbd", "pmbd70", "lru", "coactive", "transit"];
/// Maximum relative difference of a number that counts as equal to the paper's.
const TOLERANCE_PCT: f64 = 15.0;
/// Maximum spread of times over all cache sizes for a policy that counts as insensitive to the
/// size: the widest spread in the paper's table.
const INSENSITIVE_PCT: f64 = 5.3;

/// Runs the figures and replaces their section in the file `path`, which is created if missing.
///
/// # Errors
/// The file cannot be read or written, or has only one of the markers.
pub(super) fn update(path: &Path, seed: u64) -> Result<()> {
    papers::update(path, "model", |_| {
        let section = Figures::run(seed)?.section();
        print(&section)?;
        Ok(section)
    })
}

/// The runs that the figures are computed from.
struct Figures {
    /// Runs on the paper's machine, as the paper describes it.
    paper: Vec<Ran>,
    /// Runs on the paper's machine with flushes.
    flushing: Vec<Ran>,
    /// Runs on the paper's machine with rare flushes.
    long: Vec<Ran>,
    /// Runs on the paper's machine with reads.
    reading: Vec<Ran>,
    /// Runs on the paper's machine with Tidegate's block translation table.
    own: Vec<Ran>,
}

fn case(policy: &str, jobs: u32, cache_bytes: u64, seed: u64) -> Case {
    let case = Case {
        cores: CORES,
        jobs,
        depths: DEPTHS.to_vec(),
        cache_bytes,
        seed,
        ..Case::new(policy.parse().unwrap_or(Policy::Btt), 64 << 30)
    };
    case.overrun(100_000)
}

/// Returns the cases of figure 2: one job that flushes.
fn flushing(seed: u64) -> Vec<Case> {
    let case = |(policy, flush_every): (&str, u64)| Case {
        flush_every,
        ..case(policy, 1, CACHE_BYTES, seed)
    };
    let policies = ["btt", "pmbd", "lru", "transit"];
    let cases = FLUSH_WRITES.iter().flat_map(|&writes| policies.map(|policy| (policy, writes)));
    cases.map(case).collect()
}

/// Returns the cases of figure 5c: one job with many writes and rare flushes.
fn long_runs(seed: u64) -> Vec<Case> {
    let case = |policy| Case {
        flush_every: LONG_RUN_FLUSH_WRITES,
        length: Length::Requests(LONG_RUN_REQUESTS),
        ..case(policy, 1, CACHE_BYTES, seed)
    };
    ["btt", "pmbd", "lru", "transit"].map(case).into()
}

/// Returns the cases of figure 6b: one job that reads its writes at random. The cache holds an
/// eighth of the device.
fn reads(seed: u64) -> Vec<Case> {
    let case = |policy| Case {
        device_bytes: 4 << 30,
        length: Length::Requests(READS),
        reads: true,
        ..case(policy, 1, CACHE_BYTES, seed)
    };
    CACHED.map(case).into()
}

impl Figures {
    fn run(seed: u64) -> Result<Self> {
        let policies = || POLICIES.split(',');
        let mut cases: Vec<_> = CACHES
            .iter()
            .rev()
            .filter(|&&bytes| bytes != CACHE_BYTES)
            .flat_map(|&bytes| CACHED.map(|policy| case(policy, 1, bytes, seed)))
            .collect();
        let by_jobs = JOBS.iter().flat_map(|&jobs| policies().map(move |policy| (policy, jobs)));
        cases.extend(by_jobs.map(|(policy, jobs)| case(policy, jobs, CACHE_BYTES, seed)));
        let own: Vec<_> =
            ["btt", "transit"].map(|policy| case(policy, 1, CACHE_BYTES, seed)).to_vec();
        Ok(Self {
            paper: plan::run(&cases, &Costs::caiti())?,
            flushing: plan::run(&flushing(seed), &Costs::caiti())?,
            long: plan::run(&long_runs(seed), &Costs::caiti())?,
            reading: plan::run(&reads(seed), &Costs::caiti())?,
            own: plan::run(&own, &Costs::caiti_own())?,
        })
    }

    fn ran(&self, policy: &str, jobs: u32, cache_bytes: u64) -> &Ran {
        let is_it = |case: &Case| (case.jobs, case.cache_bytes) == (jobs, cache_bytes);
        find(&self.paper, policy, is_it)
    }

    /// Returns the run with a flush after `writes` writes.
    fn flushing(&self, policy: &str, writes: u64) -> &Ran {
        find(&self.flushing, policy, |case| case.flush_every == writes)
    }

    /// Returns the time of a request of one job, in nanoseconds.
    fn service_ns(&self, policy: &str) -> f64 {
        self.ran(policy, 1, CACHE_BYTES).outcome.service_ns(1)
    }

    /// Returns the time of a request relative to `transit`.
    fn slower(&self, policy: &str) -> f64 {
        self.service_ns(policy) / self.service_ns("transit")
    }

    /// Returns the share of a phase in the time of one job.
    fn share(&self, policy: &str, phase: Phase) -> Share {
        let shares = shares(&self.ran(policy, 1, CACHE_BYTES).outcome, 1);
        shares.into_iter().find(|share| share.phase == phase).unwrap_or(Share::none(phase))
    }

    fn checks(&self) -> Vec<Check> {
        let mut checks = self.figure_2();
        checks.extend(self.figures_2c_3_5b_7());
        checks.extend(self.figure_5a());
        checks.extend(self.figure_5c());
        checks.extend(self.figures_5d_5e());
        checks.extend(self.table_1_checks());
        checks.extend(self.figure_6());
        checks.extend(self.figures_6b_6d());
        checks
    }

    /// Compares staging caches with the table alone, without and with flushes.
    fn figure_2(&self) -> Vec<Check> {
        let slower = |policy: &str, paper: f64| {
            let ours = self.service_ns(policy) / self.service_ns("btt");
            Check::of("2a", format!("time of {policy} over btt"), paper, ours, "x", "")
        };
        let flushed = |policy: &str, paper: f64| {
            let ns = |policy| self.flushing(policy, FLUSH_WRITES[0]).outcome.service_ns(1);
            let what = format!("time of {policy} over btt, a flush after 512 KiB");
            Check::of("2a", what, paper, ns(policy) / ns("btt"), "x", FEW)
        };
        let flush_ns = |policy: &str, writes| self.flushing(policy, writes).outcome.flushes.mean();
        let grows = |policy: &str| {
            let [few, many] = FLUSH_WRITES.map(|writes| flush_ns(policy, writes));
            let what = format!("a flush of {policy} after 128 MiB over one after 512 KiB");
            Check::at_least("2b", what, 10.0, many / few, "")
        };
        let over_transit = |policy: &str| {
            let [one, transit] = [policy, "transit"].map(|it| flush_ns(it, FLUSH_WRITES[1]));
            let what = format!("a flush after 128 MiB of {policy} over one of transit");
            Check::at_least("2b", what, 10.0, one / transit, "")
        };
        let mut checks = vec![slower("pmbd", 1.063), flushed("pmbd", 1.061), flushed("lru", 1.108)];
        checks.extend(["pmbd", "lru"].map(grows));
        checks.extend(["pmbd", "lru"].map(over_transit));
        checks
    }

    /// Checks single requests: the share of slow ones, and the parts of a request's time.
    fn figures_2c_3_5b_7(&self) -> Vec<Check> {
        let between_pct = |policy: &str, from_ns, to_ns| {
            let latencies = &self.ran(policy, 1, CACHE_BYTES).outcome.latencies[DEPTH_1];
            latencies.count_between(from_ns, to_ns) as f64 * 100.0 / latencies.len() as f64
        };
        let slow_pct = |policy: &str| between_pct(policy, SLOW_NS, u64::MAX);
        let spikes = |figure, policy: &str, reason| {
            let what = format!("requests of {policy} above 20 µs, %");
            Check::at_least(figure, what, 0.0, slow_pct(policy), reason)
        };
        let quick = |figure, policy: &str| {
            let what = format!("requests of {policy} up to 20 µs, %");
            Check::at_least(figure, what, 50.0, 100.0 - slow_pct(policy), "")
        };
        let cached = |figure, policy: &str| {
            let what = format!("requests of {policy} up to 5 µs, %");
            Check::at_least(figure, what, 0.0, between_pct(policy, 0, CACHED_NS), NO_HITS)
        };
        let before = "time before a request reaches transit";
        let before_pct = Costs::caiti().request_ns as f64 * 100.0 / self.service_ns("transit");
        vec![
            quick("2c", "btt"),
            cached("2d", "pmbd"),
            cached("2e", "lru"),
            spikes("2d, 3a", "pmbd", ""),
            spikes("2e, 3b", "lru", "an eviction is one write to the table: 16 µs"),
            quick("5b", "transit"),
            Check::of("7", before.into(), 54.0, before_pct, "%", ALL_BEFORE),
        ]
    }

    fn figure_5a(&self) -> Vec<Check> {
        let ratio = |policy: &str, paper: f64, reason| {
            let what = format!("time of {policy} over transit, depth 128");
            Check::of("5a", what, paper, self.slower(policy), "x", reason)
        };
        let mut own = self.own.iter().map(|ran| ran.outcome.service_ns(1));
        let own = own.next().unwrap_or(0.0) / own.next().unwrap_or(1.0);
        let own_btt = "time of Tidegate's btt over transit, depth 128".to_owned();
        vec![
            ratio("raw", 2.20, "an input: the costs were chosen by it"),
            ratio("btt", 3.6, "an input: the costs were chosen by it"),
            Check::of("5a", own_btt, 3.6, own, "x", OWN_BTT),
            ratio("pmbd", 3.6, ""),
            ratio("pmbd70", 3.6, SYNCERS),
            ratio("lru", 3.5, ""),
            ratio("coactive", 2.9, IDLE),
        ]
    }

    /// Checks a million requests with flushes between them.
    fn figure_5c(&self) -> Vec<Check> {
        let over_transit = |policy: &str| {
            let ns = |policy| any(&self.long, policy).outcome.service_ns(1);
            let what = format!("time of {policy} over transit, a million writes with flushes");
            Check::at_least("5c", what, 1.0, ns(policy) / ns("transit"), "")
        };
        ["btt", "pmbd", "lru"].map(over_transit).into()
    }

    fn figures_5d_5e(&self) -> Vec<Check> {
        let tail = |policy| {
            let latencies = &self.ran(policy, 1, CACHE_BYTES).outcome.latencies[DEPTH_1024];
            latencies.value_at_quantile(0.9999) as f64
        };
        let over_best = |jobs: u32| {
            let rate = |policy: &str| self.ran(policy, jobs, CACHE_BYTES).outcome.ops_per_s();
            let others = ["btt", "pmbd", "pmbd70", "lru", "coactive"].map(rate);
            rate("transit") / others.into_iter().fold(0.0, f64::max)
        };
        let of_job = |policy, jobs| self.ran(policy, jobs, CACHE_BYTES).outcome.service_ns(jobs);
        let what = "p99.99 of pmbd over transit, depth 1024".into();
        let ratio = tail("pmbd") / tail("transit");
        let mut checks = vec![Check::of("5d", what, 14.0, ratio, "x", TAIL)];
        checks.extend(JOBS.map(|jobs| {
            let what = format!("rate of transit over the best other cache or btt, {jobs} jobs");
            let reason = if jobs < 32 { SYNCERS } else { FULL };
            Check::at_least("5e", what, 1.0, over_best(jobs), reason)
        }));
        let what = "time of a coactive request with 2 jobs over 1".into();
        let ours = of_job("coactive", 2) / of_job("coactive", 1);
        checks.push(Check::at_least("5e", what, 1.1, ours, IDLE));
        checks
    }

    fn table_1_checks(&self) -> Vec<Check> {
        let spread_pct = |policy: &str| {
            let all = CACHES.map(|bytes| self.ran(policy, 1, bytes).outcome.service_ns(1));
            (spread(all) - 1.0) * 100.0
        };
        let papers =
            [("pmbd", 3.6), ("pmbd70", 3.4), ("lru", 3.2), ("coactive", 5.3), ("transit", 3.5)];
        let check = |(policy, paper): (&str, f64)| {
            let ours = spread_pct(policy);
            let is_insensitive = ours <= INSENSITIVE_PCT;
            Check {
                figure: "table 1",
                what: format!("{policy}: slowest over fastest size, 64 MiB to 2 GiB"),
                paper: format!("{paper:.1} %"),
                ours: format!("{ours:.1} %"),
                verdict: if is_insensitive { "insensitive too" } else { "sensitive" }.into(),
                reason: if is_insensitive { "" } else { HITS }.into(),
            }
        };
        papers.map(check).into()
    }

    fn figure_6(&self) -> Vec<Check> {
        let share = |policy: &str, phase, name: &str, paper: f64, reason| {
            let what = format!("{name} of {policy}, share of the time");
            Check::of("6a", what, paper, self.share(policy, phase).time_pct, "%", reason)
        };
        let cached_pct = 100.0
            - self.share("transit", Phase::Bypass).writes_pct
            - self.share("transit", Phase::StalledWrite).writes_pct;
        let no_bypass = self.service_ns("transit-no-bypass") / self.service_ns("transit");
        let bypasses = self.share("transit-no-eager", Phase::Bypass).writes_pct;
        let more = "writes without eager eviction that bypass";
        vec![
            share("transit", Phase::CacheWrite, "copies", 11.5, "an input"),
            share("transit", Phase::Metadata, "metadata", 2.9, ""),
            share("pmbd", Phase::StalledWrite, "stalls", 40.5, STALLS),
            share("pmbd70", Phase::StalledWrite, "stalls", 25.3, SYNCERS),
            share("lru", Phase::StalledWrite, "stalls", 40.0, STALLS),
            share("coactive", Phase::StalledWrite, "stalls", 32.7, STALLS),
            Check::at_least("6c", "writes of transit to a slot, %".into(), 99.0, cached_pct, ""),
            Check::of("6a", "time without bypass over transit".into(), 1.0, no_bypass, "x", ""),
            Check::at_least("6c", format!("{more}, %"), 50.0, bypasses, ""),
        ]
    }

    /// Checks reads, and the time of a write that finds no free slot.
    fn figures_6b_6d(&self) -> Vec<Check> {
        let reads = CACHED.map(|policy| any(&self.reading, policy).outcome.service_ns(1));
        let what = "time of a read, slowest cache over fastest".into();
        let mut checks = vec![Check::of("6b", what, 1.0, spread(reads), "x", READ_HITS)];
        let bypass_ns = self.share("transit-no-eager", Phase::Bypass).mean_ns;
        checks.extend(["pmbd", "lru", "coactive"].map(|policy| {
            let what = format!("time of a stalled write of {policy} over a bypass");
            let ratio = self.share(policy, Phase::StalledWrite).mean_ns / bypass_ns;
            Check::at_least("6d", what, 1.0, ratio, ONE_WRITE)
        }));
        checks
    }

    fn section(&self) -> String {
        let tables = [self.figure_5e_table(), self.table_1()].map(|table| table.markdown());
        format!(
            "## Caiti on 36 cores, modelled\n\n{INTRODUCTION}\n{}\nFigure 5e: thousands of writes a \
             second by jobs.\n\n{}\nTable 1: mean time of a request in µs, one job, by the size of \
             the cache.\n\n{}",
            papers::table("caiti-model", "", &self.checks()).markdown(),
            tables[0],
            tables[1],
        )
    }

    fn figure_5e_table(&self) -> Table {
        let row = |policy| {
            let rate = |jobs| self.ran(policy, jobs, CACHE_BYTES).outcome.ops_per_s();
            (policy, JOBS.map(|jobs| format!("{:.0}", rate(jobs) / 1e3)).into())
        };
        grid(("caiti-5e", ""), ("policy", &JOBS), POLICIES.split(',').map(row))
    }

    fn table_1(&self) -> Table {
        let row = |policy| {
            let time = |bytes| micros(self.ran(policy, 1, bytes).outcome.service_ns(1));
            (policy, CACHES.map(time).into())
        };
        grid(("caiti-table-1", ""), ("policy", &CACHES.map(size)), CACHED.map(row))
    }
}

/// Returns the run of `policy` whose case fulfils `is_it`.
fn find<'a>(runs: &'a [Ran], policy: &str, is_it: impl Fn(&Case) -> bool) -> &'a Ran {
    let found = runs.iter().find(|Ran { case, .. }| case.policy.name() == policy && is_it(case));
    found.expect("all figures have run")
}

/// Returns the run of `policy` among `runs` with one case per policy.
fn any<'a>(runs: &'a [Ran], policy: &str) -> &'a Ran {
    find(runs, policy, |_| true)
}

/// Returns the largest of `numbers` divided by the smallest.
fn spread(numbers: impl IntoIterator<Item = f64>) -> f64 {
    let (least, most) = numbers
        .into_iter()
        .fold((f64::MAX, 0.0_f64), |(least, most), number| (least.min(number), most.max(number)));
    most / least
}

impl Check {
    /// Compares our number with the paper's number.
    fn of(
        figure: &'static str,
        what: String,
        paper: f64,
        ours: f64,
        unit: &str,
        reason: &'static str,
    ) -> Self {
        let off_pct = (ours / paper - 1.0) * 100.0;
        let verdict = match off_pct {
            off if off.abs() <= TOLERANCE_PCT => "same",
            off if off > 0.0 => "more",
            _ => "less",
        };
        let is_told = verdict != "same" || reason.starts_with("an input");
        let [paper, ours] = [paper, ours].map(|value| format!("{value:.2} {unit}"));
        let reason = if is_told { reason } else { "" };
        Self { figure, what, paper, ours, verdict: verdict.into(), reason: reason.into() }
    }

    /// Checks whether our number exceeds a bound that stands for a claim without a number.
    fn at_least(
        figure: &'static str,
        what: String,
        paper: f64,
        ours: f64,
        reason: &'static str,
    ) -> Self {
        let holds = ours > paper;
        let (verdict, reason) = if holds { ("holds", "") } else { ("does not hold", reason) };
        let (paper, ours) = (format!("above {paper}"), format!("{ours:.2}"));
        Self { figure, what, paper, ours, verdict: verdict.into(), reason: reason.into() }
    }
}

const INTRODUCTION: &str = "\
`tidegate model --papers docs/papers.md` runs the shipped tiers on a machine of 36 cores in virtual
time ([how](decisions/model-by-coroutines.md)) and writes this section. The costs are the preset
`caiti`: what the paper says of requests that no cache serves, and of the parts of Caiti's own, went
in; what caches do there came out. Ratios are of the time that a request takes its job, as in the
paper's table 1: a depth of D is D requests back to back. \"Same\" is within 15 %.
";
const ALL_BEFORE: &str = "an input: all software around a request counts as before it";
const OWN_BTT: &str = "our table fences twice a write and keeps no list of readers: less to gain";
const SYNCERS: &str = "ours has up to 16 syncers, which keep up on idle cores; the paper's has one";
const IDLE: &str = "a job that never rests keeps the device busy: ours writes nothing back ahead";
const TAIL: &str = "no interrupts and no other processes are modelled: transit has no spikes";
const FULL: &str = "32 jobs leave 4 cores for evictors: nearly all writes bypass";
const HITS: &str = "a larger cache has more hits";
const FEW: &str = "128 blocks stay in the cache: what is written back is the same, and once";
const NO_HITS: &str = "the cache is full: each write that is no hit evicts before it is cached";
const READ_HITS: &str = "transit has written its blocks back: it has none to hit";
const ONE_WRITE: &str = "both are one write to the table; a bypass copies nothing before";
const STALLS: &str = "40 % of the paper's 16.4 µs is half a write to its BTT: it ran another load";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_follow_the_numbers() {
        let verdict = |ours| Check::of("f", String::new(), 10.0, ours, "x", "why").verdict;
        assert_eq!([11.4, 11.6, 8.0].map(verdict), ["same", "more", "less"]);
        assert_eq!(Check::at_least("f", String::new(), 1.0, 0.9, "why").reason, "why");
    }
}
