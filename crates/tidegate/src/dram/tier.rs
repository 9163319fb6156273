//! Reports of a DRAM tier as a [`Tier`](crate::tier::Tier), for every policy.

use std::time::Duration;

use serde_json::json;

use super::phases::{Phase, PhaseTimes};
use super::{DramTier, Policy, TierSummary};
use crate::device::{Geometry, OwnedOperation};
use crate::size::Size;
use crate::stats::{Collector, Latencies, Metric, Unit};
use crate::tier::{Level, Line, State, counted, line};

const CAPACITY_BYTES: Metric =
    Metric::gauge("dram_capacity_bytes", Unit::Bytes, "Bytes of data that the cache can hold");
const DIRTY_SLOTS: Metric =
    Metric::gauge("dram_dirty_slots", Unit::Count, "Slots whose data is not yet written back");
const FAILED_SLOTS: Metric = Metric::gauge(
    "dram_failed_slots",
    Unit::Count,
    "Slots whose last write-back failed; they stay dirty and are tried again",
);
const PHASE_ENTRIES: Metric =
    Metric::counter("dram_phase_entries", Unit::Count, "How often requests entered the phase");
const PHASE_SHARE: Metric = Metric::gauge(
    "dram_phase_share_pct",
    Unit::Pct,
    "Share of the phase in the time of requests, by samples",
);
const PHASE_NS: Metric =
    Metric::latencies("dram_phase_ns", "Time in the phase; short phases are sampled");

/// Reports whether `operation` is a read of uncached blocks only: it goes to the device below,
/// where it waits without a thread.
pub(super) fn is_read_below(
    operation: &OwnedOperation,
    geometry: &Geometry,
    is_cached: impl Fn(u64) -> bool,
) -> bool {
    let OwnedOperation::Read { offset, buffer } = operation else { return false };
    let (len, block_bytes) = (buffer.data().len() as u64, u64::from(geometry.block_bytes));
    let mut lbas = offset / block_bytes..(offset.saturating_add(len)) / block_bytes;
    geometry.check(*offset, len).is_ok() && !lbas.any(is_cached)
}

/// Returns the state of `tier`.
pub(super) fn state_of<T: DramTier + ?Sized>(tier: &T) -> State {
    let summary = tier.summary();
    let mut lines = lines_of(&summary);
    lines.extend(tier.phases().phases.iter().map(|times| line("dram tier", phase_text(times))));
    State {
        level: Level::Dram,
        name: summary.policy.to_string(),
        pending_bytes: summary.dirty_slots * u64::from(summary.block_bytes),
        lines,
        details: json!(summary),
    }
}

/// Describes a tier of this `summary` and its memory, for people.
pub fn lines_of(summary: &TierSummary) -> Vec<Line> {
    let TierSummary { policy, block_bytes, slots, sets, threads, .. } = summary;
    if *policy == Policy::None {
        return vec![line("dram tier", policy)];
    }
    let size = Size { bytes: summary.capacity_bytes };
    let metadata_bytes = summary.metadata_bytes_per_slot;
    let (slots, sets) = (counted(*slots, "slot"), counted((*sets).into(), "set"));
    let threads = counted((*threads).into(), "thread");
    let text = format!(
        "{policy} of {size}: {slots} of {block_bytes} bytes in {sets}, \
         {metadata_bytes:.1} bytes of metadata a slot, {threads}"
    );
    let promise = "in DRAM; durable at the next flush, FUA or SIGTERM";
    vec![line("dram tier", text), line("acknowledged", promise)]
}

fn phase_text(times: &PhaseTimes) -> String {
    let PhaseTimes { phase, count, share_pct, mean_ns, p9999_ns, max_ns, .. } = times;
    let micros = |ns: &u64| Duration::from_nanos(*ns).as_secs_f64() * 1e6;
    let (mean, p9999, max) = (micros(mean_ns), micros(p9999_ns), micros(max_ns));
    let name = words(*phase);
    format!(
        "{name:<13} {count:>10} times, {share_pct:>4.1} % of the time; mean {mean:.2} µs, \
         p99.99 {p9999:.1}, max {max:.1}"
    )
}

fn words(phase: Phase) -> &'static str {
    match phase {
        Phase::Metadata => "metadata",
        Phase::StalledWrite => "stalled write",
        Phase::Bypass => "bypass",
        Phase::CacheWrite => "cache write",
        Phase::Enqueue => "enqueue",
        Phase::Flush => "flush",
        Phase::ReadHit => "read hit",
        Phase::ReadMiss => "read miss",
        Phase::Eviction => "eviction",
        Phase::Other => "other",
    }
}

/// Adds the metrics of `tier` to `collector`.
pub(super) fn collect<T: DramTier + ?Sized>(tier: &T, collector: &mut Collector) {
    let summary = tier.summary();
    collector.add(&CAPACITY_BYTES, summary.capacity_bytes);
    collector.add(&DIRTY_SLOTS, summary.dirty_slots);
    collector.add(&FAILED_SLOTS, summary.failed_slots);
    for times in tier.phases().phases {
        collector.labelled("phase", words(times.phase), |collector| {
            collector.add(&PHASE_ENTRIES, times.count);
            collector.add(&PHASE_SHARE, times.share_pct);
            collector.add(&PHASE_NS, latencies_of(&times));
        });
    }
}

fn latencies_of(times: &PhaseTimes) -> Latencies {
    let samples: u64 = times.histogram.iter().map(|bucket| bucket.samples).sum();
    Latencies {
        count: samples,
        sum_ns: times.mean_ns.saturating_mul(samples),
        max_ns: times.max_ns,
        buckets: times.histogram.clone(),
    }
}
