//! The time of a DRAM tier by phase: the breakdown of the Caiti paper's figure 6.
//!
//! An operation is at every moment in one [`Phase`]. The recorder counts each entry into a phase.
//! It measures rare phases that take long (stalls and flushes) every time, and the others in one
//! operation of [`SAMPLE_ONE_IN`], drawn at random: two readings of the clock cost as much as the
//! bookkeeping between them. Totals are scaled by count over samples; histograms hold the samples.
//!
//! Each thread writes to its own shard; only a snapshot reads all shards.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use strum::VariantArray;

use crate::stats::histogram::{Bucket, Latencies, Samples};
use crate::sync::shard::{Shards, add};
use crate::tier::clock::now_ns;

/// One of this many operations measures its short phases.
pub const SAMPLE_ONE_IN: u32 = 32;

/// The current activity of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, VariantArray)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Cache metadata: look-up, taking a slot, changing states.
    Metadata,
    /// "Cache eviction and write": waiting for a slot, or for a write-back in the way, before a
    /// write.
    StalledWrite,
    /// "Conditional bypass": writing straight to the device below.
    Bypass,
    /// "Cache write only": copying data into a slot.
    CacheWrite,
    /// "WBQ enqueue": queueing for write-back and waking an evictor.
    Enqueue,
    /// Writing back for a flush or FUA, and flushing the device below.
    Flush,
    /// Copying data out of a slot.
    ReadHit,
    /// Reading from the device below.
    ReadMiss,
    /// Writing back in the background, which takes no time of requests.
    Eviction,
    /// All other work of requests inside the tier.
    Other,
}

impl Phase {
    /// All phases.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Returns whether the phase is measured every time.
    fn always_timed(self) -> bool {
        matches!(self, Self::StalledWrite | Self::Flush)
    }
}

/// A snapshot of the breakdown.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Phases {
    /// The phases that occurred, in the order of [`Phase::ALL`].
    pub phases: Vec<PhaseTimes>,
}

impl Phases {
    /// Returns the times of `phase`; `None` if it never occurred.
    pub fn get(&self, phase: Phase) -> Option<&PhaseTimes> {
        self.phases.iter().find(|times| times.phase == phase)
    }

    /// Returns how often `phase` was entered.
    pub fn count(&self, phase: Phase) -> u64 {
        self.get(phase).map_or(0, |times| times.count)
    }
}

/// One phase of the breakdown.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseTimes {
    /// Which phase.
    pub phase: Phase,
    /// How often it was entered.
    pub count: u64,
    /// Total time spent in it, estimated from the samples.
    pub total_ns: u64,
    /// Its share of the time that requests took; 0 for [`Phase::Eviction`].
    pub share_pct: f64,
    /// Mean over the samples.
    pub mean_ns: u64,
    /// Median; like the other quantiles the upper bound of its bucket, at most 12.5 % too high.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// 99.9th percentile.
    pub p999_ns: u64,
    /// 99.99th percentile.
    pub p9999_ns: u64,
    /// Longest sample.
    pub max_ns: u64,
    /// The samples by length; empty buckets are left out.
    pub histogram: Vec<Bucket>,
}

const PHASES: usize = Phase::ALL.len();

/// The recorder of one tier.
#[derive(Default)]
pub(super) struct Recorder {
    /// Allocated at a thread's first operation.
    shards: Shards<OnceLock<Box<Shard>>>,
}

/// One operation: tells the recorder its phase, and leaves the last phase when dropped.
pub(super) struct Operation<'a> {
    shard: &'a Shard,
    /// Whether no other thread records to the shard.
    is_exclusive: bool,
    phase: Phase,
    /// Start of the phase if it is measured.
    since_ns: Option<u64>,
    sampled: bool,
}

/// Work of one phase that one thread begins and another ends.
pub(super) struct Detached {
    phase: Phase,
    since_ns: Option<u64>,
}

#[derive(Default)]
struct Shard {
    tallies: [Tally; PHASES],
}

#[derive(Default)]
struct Tally {
    entered: AtomicU64,
    samples: Samples,
}

impl Recorder {
    /// Begins an operation of the calling thread for one request, in [`Phase::Other`].
    pub(super) fn begin(&self) -> Operation<'_> {
        self.begin_single(Phase::Other)
    }

    /// Begins work of the calling thread in a single phase: a background write-back, or a request
    /// with nothing around it.
    pub(super) fn begin_single(&self, phase: Phase) -> Operation<'_> {
        let (shard, is_exclusive) = self.shards.mine();
        let (shard, sampled) = (shard.get_or_init(Box::default), draw());
        let mut operation = Operation { shard, is_exclusive, phase, since_ns: None, sampled };
        operation.start(phase);
        operation
    }

    /// Begins work of a single phase that any thread may [`end`](Self::end).
    pub(super) fn begin_detached(&self, phase: Phase) -> Detached {
        let since_ns = self.begin_single(phase).since_ns.take();
        Detached { phase, since_ns }
    }

    /// Ends detached work.
    pub(super) fn end(&self, Detached { phase, since_ns }: Detached) {
        if let Some(since_ns) = since_ns {
            let (shard, is_exclusive) = self.shards.mine();
            shard.get_or_init(Box::default).record(phase, since_ns, is_exclusive);
        }
    }

    /// Returns the breakdown so far.
    pub(super) fn snapshot(&self) -> Phases {
        let mut phases: Vec<PhaseTimes> = Phase::ALL
            .iter()
            .map(|phase| self.times(*phase))
            .filter(|times| times.count > 0)
            .collect();
        let of_requests = |times: &&mut PhaseTimes| times.phase != Phase::Eviction;
        let total_ns: u64 = phases.iter_mut().filter(of_requests).map(|times| times.total_ns).sum();
        for times in phases.iter_mut().filter(of_requests) {
            times.share_pct = percent(times.total_ns, total_ns);
        }
        Phases { phases }
    }

    fn times(&self, phase: Phase) -> PhaseTimes {
        let shards = || self.shards.iter().filter_map(OnceLock::get);
        let tallies = || shards().map(|shard| &shard.tallies[phase as usize]);
        let count = tallies().map(|tally| tally.entered.load(Ordering::Relaxed)).sum();
        let latencies = Latencies::of(tallies().map(|tally| &tally.samples));
        PhaseTimes {
            phase,
            count,
            total_ns: scale(latencies.sum_ns, count, latencies.count),
            share_pct: 0.0,
            mean_ns: latencies.mean_ns(),
            p50_ns: latencies.quantile_ns(500_000),
            p99_ns: latencies.quantile_ns(990_000),
            p999_ns: latencies.quantile_ns(999_000),
            p9999_ns: latencies.quantile_ns(999_900),
            max_ns: latencies.max_ns,
            histogram: latencies.buckets,
        }
    }
}

impl Shard {
    /// Adds the time in `phase` since `since_ns` to the samples.
    fn record(&self, phase: Phase, since_ns: u64, is_exclusive: bool) {
        let spent_ns = now_ns().saturating_sub(since_ns);
        self.tallies[phase as usize].samples.record(spent_ns, is_exclusive);
    }
}

impl Operation<'_> {
    /// Leaves the present phase for `phase`.
    pub(super) fn enter(&mut self, phase: Phase) {
        self.stop();
        self.start(phase);
    }

    /// Enters `phase` unless the operation is in that phase.
    pub(super) fn enter_once(&mut self, phase: Phase) {
        if self.phase != phase {
            self.enter(phase);
        }
    }

    fn start(&mut self, phase: Phase) {
        self.phase = phase;
        add(&self.shard.tallies[phase as usize].entered, 1, self.is_exclusive);
        self.since_ns = (self.sampled || phase.always_timed()).then(now_ns);
    }

    fn stop(&mut self) {
        if let Some(since_ns) = self.since_ns {
            self.shard.record(self.phase, since_ns, self.is_exclusive);
        }
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        self.stop();
    }
}

fn scale(sampled_ns: u64, count: u64, samples: u64) -> u64 {
    let scaled = u128::from(sampled_ns) * u128::from(count);
    u64::try_from(scaled.checked_div(u128::from(samples)).unwrap_or(0)).unwrap_or(u64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "a share for people needs no 53 bits")]
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

thread_local! {
    static DRAWS: Cell<u32> = const { Cell::new(1) };
}

/// Reports whether to measure this time: true in one of [`SAMPLE_ONE_IN`] draws, by a linear
/// congruence, so that the draws do not align with a period of the workload.
pub(super) fn draw() -> bool {
    DRAWS.with(|draws| {
        let next = draws.get().wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        draws.set(next);
        next <= u32::MAX / SAMPLE_ONE_IN
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_counted_and_slow_phases_are_measured() {
        let recorder = Recorder::default();
        for _ in 0..1000 {
            let mut operation = recorder.begin();
            operation.enter(Phase::Metadata);
            operation.enter(Phase::StalledWrite);
        }
        let phases = recorder.snapshot();
        for phase in [Phase::Other, Phase::Metadata, Phase::StalledWrite] {
            assert_eq!(phases.count(phase), 1000);
        }
        assert_eq!(phases.get(Phase::Flush), None);
        let samples = |phase| {
            phases.get(phase).unwrap().histogram.iter().map(|bucket| bucket.samples).sum::<u64>()
        };
        assert_eq!(samples(Phase::StalledWrite), 1000);
        let sampled = samples(Phase::Metadata);
        assert!((10..100).contains(&sampled), "{sampled} of 1000 sampled");
    }

    #[test]
    fn quantiles_and_shares_follow_the_samples() {
        let recorder = Recorder::default();
        let shard = recorder.shards.mine().0.get_or_init(Box::default);
        let tally = |phase: Phase| &shard.tallies[phase as usize];
        for (phase, spent_ns, times) in
            [(Phase::Bypass, 100, 99), (Phase::Bypass, 10_000, 1), (Phase::Eviction, 5, 7)]
        {
            tally(phase).entered.fetch_add(2 * times, Ordering::Relaxed);
            (0..times).for_each(|_| tally(phase).samples.record(spent_ns, true));
        }
        let phases = recorder.snapshot();
        let bypass = phases.get(Phase::Bypass).unwrap();
        assert_eq!((bypass.count, bypass.mean_ns, bypass.total_ns), (200, 199, 39_800));
        assert_eq!((bypass.p50_ns, bypass.p99_ns, bypass.p999_ns), (103, 103, 10_000));
        assert!((bypass.share_pct - 100.0).abs() < 1e-9);
        assert!(phases.get(Phase::Eviction).unwrap().share_pct.abs() < 1e-9);
    }

    #[test]
    fn a_snapshot_has_units_in_its_keys() {
        let recorder = Recorder::default();
        drop(recorder.begin_single(Phase::Eviction));
        let json = serde_json::to_value(recorder.snapshot()).unwrap();
        let eviction = &json["phases"][0];
        assert_eq!(eviction["phase"], "eviction");
        for key in ["total_ns", "mean_ns", "p50_ns", "p9999_ns", "max_ns"] {
            assert!(eviction[key].is_u64(), "{key}: {eviction}");
        }
    }
}
