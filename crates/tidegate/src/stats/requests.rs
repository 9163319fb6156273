//! The requests to a block device: requests and bytes by kind, and a sample of the latencies.
//!
//! Counting takes plain stores to cache lines of the calling thread. One request in
//! [`SAMPLE_ONE_IN`] of a thread has its latency measured: two readings of the clock cost as much
//! as a short write.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::histogram::Histogram;
use super::metric::{Collector, Metric, Unit};
use crate::sync::shard::{Shards, add};

/// For each thread and kind, one request in so many has its latency measured.
pub const SAMPLE_ONE_IN: u64 = 64;

/// Kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// Reads.
    Read,
    /// Writes of data.
    Write,
    /// Flushes.
    Flush,
    /// Discards, and writes of zeroes.
    Zero,
}

const KINDS: usize = 4;

const READS: Metric = Metric::counter("reads", Unit::Count, "Reads that the tier was asked for");
const WRITES: Metric = Metric::counter("writes", Unit::Count, "Writes that the tier was asked for");
const FLUSHES: Metric =
    Metric::counter("flushes", Unit::Count, "Flushes that the tier was asked for");
const ZEROES: Metric = Metric::counter(
    "zeroes",
    Unit::Count,
    "Discards and writes of zeroes that the tier was asked for",
);
const READ_BYTES: Metric = Metric::counter("read_bytes", Unit::Bytes, "Bytes of the reads");
const WRITTEN_BYTES: Metric = Metric::counter("written_bytes", Unit::Bytes, "Bytes of the writes");
const ZEROED_BYTES: Metric =
    Metric::counter("zeroed_bytes", Unit::Bytes, "Bytes of the discards and writes of zeroes");
const READ_NS: Metric = Metric::latencies("read_ns", "Latency of reads, one in 64 of them");
const WRITE_NS: Metric = Metric::latencies("write_ns", "Latency of writes, one in 64 of them");

#[derive(Default)]
struct Shard {
    requests: [AtomicU64; KINDS],
    bytes: [AtomicU64; KINDS],
}

/// The requests of one device.
#[derive(Default)]
pub struct Requests {
    shards: Shards<Shard>,
    read_ns: Histogram,
    write_ns: Histogram,
}

/// A running request. Its drop counts it and ends its latency.
#[must_use = "the request ends when this is dropped"]
pub struct Running<'a> {
    requests: &'a Requests,
    begun: Begun,
}

impl Running<'_> {
    /// Returns the nanoseconds since the request began, if its latency is measured.
    pub fn sampled_ns(&self) -> Option<u64> {
        self.begun.since.map(|since| u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Drops the request uncounted: nothing was done, and the request comes again.
    pub fn hand_back(self) {
        std::mem::forget(self);
    }

    /// Detaches the request from this thread; it goes on elsewhere.
    pub fn detach(self) -> Begun {
        let begun = self.begun;
        std::mem::forget(self);
        begun
    }
}

/// A request that runs on no thread: [`Requests::resume`] attaches it to one.
#[derive(Debug, Clone, Copy)]
pub struct Begun {
    kind: RequestKind,
    len: u64,
    since: Option<Instant>,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let Begun { kind, len, .. } = self.begun;
        let (shard, exclusive) = self.requests.shards.mine();
        add(&shard.requests[kind as usize], 1, exclusive);
        add(&shard.bytes[kind as usize], len, exclusive);
        if let (Some(ns), Some(histogram)) = (self.sampled_ns(), self.requests.histogram(kind)) {
            histogram.record(ns);
        }
    }
}

impl Requests {
    /// Begins a request of `len` bytes now.
    #[inline]
    pub fn begin(&self, kind: RequestKind, len: u64) -> Running<'_> {
        let (shard, _) = self.shards.mine();
        let number = shard.requests[kind as usize].load(Ordering::Relaxed);
        let is_sampled = number.is_multiple_of(SAMPLE_ONE_IN) && self.histogram(kind).is_some();
        #[expect(clippy::disallowed_methods, reason = "latencies are measured in real time")]
        let since = is_sampled.then(Instant::now);
        self.resume(Begun { kind, len, since })
    }

    /// Counts a request of `len` bytes that was passed on. Its latency is not measured, since
    /// another thread will see its end.
    pub fn count(&self, kind: RequestKind, len: u64) {
        drop(self.resume(Begun { kind, len, since: None }));
    }

    /// Resumes a request that began on another thread; its end counts it.
    #[inline]
    pub fn resume(&self, begun: Begun) -> Running<'_> {
        Running { requests: self, begun }
    }

    fn histogram(&self, kind: RequestKind) -> Option<&Histogram> {
        match kind {
            RequestKind::Read => Some(&self.read_ns),
            RequestKind::Write => Some(&self.write_ns),
            RequestKind::Flush | RequestKind::Zero => None,
        }
    }

    /// Adds all metrics to `collector`.
    pub fn collect(&self, collector: &mut Collector) {
        let sum = |of: fn(&Shard) -> &[AtomicU64; KINDS], kind: RequestKind| -> u64 {
            self.shards.iter().map(|it| of(it)[kind as usize].load(Ordering::Relaxed)).sum()
        };
        let requests = |kind| sum(|shard| &shard.requests, kind);
        let bytes = |kind| sum(|shard| &shard.bytes, kind);
        collector.add(&READS, requests(RequestKind::Read));
        collector.add(&READ_BYTES, bytes(RequestKind::Read));
        collector.add(&READ_NS, self.read_ns.snapshot());
        collector.add(&WRITES, requests(RequestKind::Write));
        collector.add(&WRITTEN_BYTES, bytes(RequestKind::Write));
        collector.add(&WRITE_NS, self.write_ns.snapshot());
        collector.add(&FLUSHES, requests(RequestKind::Flush));
        collector.add(&ZEROES, requests(RequestKind::Zero));
        collector.add(&ZEROED_BYTES, bytes(RequestKind::Zero));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::stats::Value;

    #[test]
    fn requests_of_all_threads_are_counted_and_some_are_measured() {
        let requests = Requests::default();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..2 * SAMPLE_ONE_IN {
                        drop(requests.begin(RequestKind::Write, 512));
                    }
                });
            }
        });
        drop(requests.begin(RequestKind::Flush, 0));
        requests.begin(RequestKind::Read, 512).hand_back();
        let mut collector = Collector::default();
        requests.collect(&mut collector);
        let readings = collector.finish();
        let value = |name| &readings.iter().find(|it| it.metric.name == name).unwrap().value;
        assert_eq!(value("writes"), &Value::Whole(3 * 2 * SAMPLE_ONE_IN));
        assert_eq!(value("written_bytes"), &Value::Whole(3 * 2 * SAMPLE_ONE_IN * 512));
        assert_eq!((value("flushes"), value("reads")), (&Value::Whole(1), &Value::Whole(0)));
        let Value::Latencies(latencies) = value("write_ns") else { panic!("latencies") };
        assert_eq!(latencies.count, 6, "threads count by themselves");
    }
}
