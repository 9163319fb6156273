//! Closed-loop workloads on a block device, and their measurements.
//!
//! Invariants:
//! 1. Each thread issues its next batch when the one before is answered; a latency is the time from
//!    the issue of the batch to the answer of the request, so no instant of the run is left out (no
//!    coordinated omission). With depth 1 and no think time that is the time from answer to answer:
//!    every latency includes the choice of the block (2 ns, Zipf 40) and one reading of the clock,
//!    and no other cost of the harness. At a pace, a latency counts from the moment when the batch
//!    was due: a slow request delays the requests behind it, whose latencies show the delay.
//! 2. Devices here are synchronous, so a depth of D means batches of D requests back to back;
//!    latencies then contain the wait for the requests ahead in the batch, as in a queue of that
//!    depth.
//! 3. The requests are a function of the description alone ([`crate::pattern`]).
//!
//! Entry points: [`Workload::run`] measures, [`Workload::fill`] writes every block once beforehand.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tidegate::device::{BlockDevice, BlockDeviceExt, DeviceError, WriteFlags};

use crate::pattern::{Pattern, Picker, Rng};
use crate::timeline::{Timeline, nanoseconds};

/// Latencies above this many nanoseconds (100 s) count as this many.
const LATENCY_MAX_NS: u64 = 100_000_000_000;

/// Request buffers begin at a page boundary, as in a page cache or a database.
const BUFFER_ALIGN_BYTES: usize = 4096;

/// Longest delay of a wake-up: for this time the thread polls the clock instead of sleeping.
const SLEEP_LATE: Duration = Duration::from_micros(60);

/// The end of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// After this much time.
    After(Duration),
    /// After this many requests by each thread (flushes not counted).
    Requests(u64),
}

/// Requests in bursts with rests between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bursts {
    /// Requests of a thread between two rests, rounded up to whole batches.
    pub requests: u64,
    /// Share of a thread's time spent on requests, 1 to 100. The thread rests for the remaining
    /// share, leaving its CPU to other threads. Flushes count as neither.
    pub duty_pct: u8,
}

/// A workload: the requests to a device.
#[derive(Debug, Clone)]
pub struct Workload {
    /// The choice of blocks.
    pub pattern: Pattern,
    /// Reads among 100 requests; the others are writes.
    pub read_pct: u8,
    /// Size of a request in bytes: whole blocks of the device.
    pub block_bytes: u32,
    /// The part of the device in use, in bytes from its start.
    pub working_set_bytes: u64,
    /// Threads that issue requests at the same time.
    pub threads: usize,
    /// Requests of one thread issued as a batch.
    pub iodepth: u32,
    /// The end of the run.
    pub stop: Stop,
    /// A flush after this many writes of a thread; 0: never.
    pub flush_every: u64,
    /// Busy time of a thread between an answer and its next batch.
    pub think: Duration,
    /// Bursts and rests; `None`: no rests.
    pub bursts: Option<Bursts>,
    /// Time from one due batch of a thread to the next; zero: due when the one before is answered.
    pub pace: Duration,
    /// Length of the intervals of [`Outcome::timeline`]; zero: none.
    pub tick: Duration,
    /// Seed of everything random.
    pub seed: u64,
}

/// Latencies of one kind of request, in nanoseconds, to three digits.
pub type Latencies = Histogram<u64>;

/// The measurements of a workload.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// From the common start to the end of the last thread.
    pub elapsed: Duration,
    /// Latencies of reads.
    pub read: Latencies,
    /// Latencies of writes.
    pub write: Latencies,
    /// Latencies of flushes.
    pub flush: Latencies,
    /// Latencies of reads and writes over time, if requested.
    pub timeline: Timeline,
}

impl Outcome {
    fn empty() -> Self {
        let (read, write, flush) = (latencies(), latencies(), latencies());
        Self { elapsed: Duration::ZERO, read, write, flush, timeline: Timeline::default() }
    }

    fn merge(&mut self, other: &Self) {
        self.elapsed = self.elapsed.max(other.elapsed);
        for (mine, theirs) in [
            (&mut self.read, &other.read),
            (&mut self.write, &other.write),
            (&mut self.flush, &other.flush),
        ] {
            mine.add(theirs).expect("all histograms have the same bounds");
        }
        self.timeline.merge(&other.timeline);
    }
}

/// Makes an empty histogram.
pub(crate) fn latencies() -> Latencies {
    Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3).expect("constant bounds are valid")
}

/// Measures one reading of the clock in nanoseconds: the harness's share of each latency.
pub fn clock_overhead_ns() -> f64 {
    const READINGS: u32 = 100_000;
    let begun = Instant::now();
    for _ in 0..READINGS {
        std::hint::black_box(Instant::now());
    }
    begun.elapsed().as_secs_f64() * 1e9 / f64::from(READINGS)
}

impl Workload {
    /// Makes a workload of writes by one thread, one at a time, without flushes and rests.
    pub fn writes(pattern: Pattern, block_bytes: u32, working_set_bytes: u64, stop: Stop) -> Self {
        Self {
            pattern,
            read_pct: 0,
            block_bytes,
            working_set_bytes,
            threads: 1,
            iodepth: 1,
            stop,
            flush_every: 0,
            think: Duration::ZERO,
            bursts: None,
            pace: Duration::ZERO,
            tick: Duration::ZERO,
            seed: 1,
        }
    }

    /// Runs the workload on `device`.
    ///
    /// # Errors
    /// Fails with the first error of the device; the other threads run to their own end.
    ///
    /// # Panics
    /// Panics if the device panics.
    pub fn run(&self, device: &dyn BlockDevice) -> Result<Outcome, DeviceError> {
        let start = Barrier::new(self.threads);
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|thread| {
                    let start = &start;
                    scope.spawn(move || Client::new(self, device, thread).run(start))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("clients do not panic")).collect()
        });
        let mut merged = Outcome::empty();
        for outcome in outcomes {
            merged.merge(&outcome?);
        }
        Ok(merged)
    }

    /// Writes every block of the working set once, in order, so that later requests meet no
    /// untouched memory.
    ///
    /// # Errors
    /// Fails with the first error of the device.
    pub fn fill(&self, device: &dyn BlockDevice) -> Result<(), DeviceError> {
        let mut buffer = Buffer::random(self.block_bytes, self.seed);
        for block in 0..self.blocks() {
            buffer.stamp(block);
            let offset = block * u64::from(self.block_bytes);
            device.write(offset, buffer.bytes(), WriteFlags::default())?;
        }
        device.flush()
    }

    fn blocks(&self) -> u64 {
        self.working_set_bytes / u64::from(self.block_bytes)
    }
}

/// One thread of a workload.
struct Client<'a> {
    workload: &'a Workload,
    device: &'a dyn BlockDevice,
    picker: Picker,
    buffer: Buffer,
    read_into: Buffer,
    outcome: Outcome,
    requests: u64,
    writes_since_flush: u64,
    requests_in_burst: u64,
    busy_in_burst: Duration,
    begun: Instant,
    /// When the last batch was due, at a pace.
    due: Instant,
}

impl<'a> Client<'a> {
    fn new(workload: &'a Workload, device: &'a dyn BlockDevice, thread: usize) -> Self {
        let (stream, threads) = (thread as u64, workload.threads as u64);
        let seed = workload.seed;
        Self {
            workload,
            device,
            picker: Picker::new(workload.pattern, workload.blocks(), seed, stream, threads),
            buffer: Buffer::random(workload.block_bytes, seed ^ stream),
            read_into: Buffer::random(workload.block_bytes, 0),
            outcome: Outcome::empty(),
            requests: 0,
            writes_since_flush: 0,
            requests_in_burst: 0,
            busy_in_burst: Duration::ZERO,
            begun: Instant::now(),
            due: Instant::now(),
        }
    }

    fn run(mut self, start: &Barrier) -> Result<Outcome, DeviceError> {
        start.wait();
        self.begun = Instant::now();
        self.due = self.begun;
        let mut answered = self.begun;
        while !self.done(answered - self.begun) {
            answered = self.batch(answered)?;
            if !self.workload.pace.is_zero() {
                answered = self.await_turn();
            }
            if let Some(bursts) = self.workload.bursts {
                answered = self.rest(bursts, answered);
            }
            if !self.workload.think.is_zero() {
                answered = spin_until(answered + self.workload.think);
            }
        }
        self.outcome.elapsed = answered - self.begun;
        Ok(self.outcome)
    }

    fn done(&self, elapsed: Duration) -> bool {
        match self.workload.stop {
            Stop::After(limit) => elapsed >= limit,
            Stop::Requests(limit) => self.requests >= limit,
        }
    }

    /// Returns the number of requests of the next batch; the last batch of a run may be shorter.
    fn batch_len(&self) -> u64 {
        let whole = u64::from(self.workload.iodepth);
        match self.workload.stop {
            Stop::After(_) => whole,
            Stop::Requests(limit) => whole.min(limit.saturating_sub(self.requests)),
        }
    }

    /// Runs one batch, issued at `issued`; returns the time of its last answer.
    fn batch(&mut self, issued: Instant) -> Result<Instant, DeviceError> {
        let mut answered = issued;
        for _ in 0..self.batch_len() {
            let read = self.picker.chance(self.workload.read_pct);
            self.request(read)?;
            answered = Instant::now();
            let latencies = if read { &mut self.outcome.read } else { &mut self.outcome.write };
            let latency_ns = nanoseconds(answered - issued);
            latencies.saturating_record(latency_ns);
            self.outcome.timeline.note(self.workload.tick, answered - self.begun, latency_ns);
        }
        self.busy_in_burst += answered - issued;
        if self.workload.flush_every > 0 && self.writes_since_flush >= self.workload.flush_every {
            self.writes_since_flush = 0;
            self.device.flush()?;
            let before = std::mem::replace(&mut answered, Instant::now());
            self.outcome.flush.saturating_record(nanoseconds(answered - before));
        }
        Ok(answered)
    }

    /// Waits until the next batch is due; returns the time when it was due.
    fn await_turn(&mut self) -> Instant {
        self.due += self.workload.pace;
        let wait = self.due.saturating_duration_since(Instant::now());
        std::thread::sleep(wait.saturating_sub(SLEEP_LATE));
        spin_until(self.due);
        self.due
    }

    /// Rests if the burst is over; returns the time when the next batch is issued.
    fn rest(&mut self, bursts: Bursts, answered: Instant) -> Instant {
        self.requests_in_burst += u64::from(self.workload.iodepth);
        if self.requests_in_burst < bursts.requests {
            return answered;
        }
        let duty = f64::from(bursts.duty_pct.clamp(1, 100)) / 100.0;
        std::thread::sleep(self.busy_in_burst.mul_f64((1.0 - duty) / duty));
        self.requests_in_burst = 0;
        self.busy_in_burst = Duration::ZERO;
        Instant::now()
    }

    fn request(&mut self, read: bool) -> Result<(), DeviceError> {
        self.requests += 1;
        let offset = self.picker.next_block() * u64::from(self.workload.block_bytes);
        if read {
            return self.device.read(offset, self.read_into.bytes_mut());
        }
        self.writes_since_flush += 1;
        self.buffer.stamp(self.requests);
        self.device.write(offset, self.buffer.bytes(), WriteFlags::default())
    }
}

fn spin_until(when: Instant) -> Instant {
    loop {
        let now = Instant::now();
        if now >= when {
            return now;
        }
        std::hint::spin_loop();
    }
}

/// Bytes at a page boundary.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    fn random(len: u32, seed: u64) -> Self {
        let len = len as usize;
        let mut rng = Rng::new(seed, u64::MAX);
        let memory: Vec<u8> =
            (0..len + BUFFER_ALIGN_BYTES).map(|_| rng.next_u64().to_le_bytes()[0]).collect();
        let start = memory.as_ptr().align_offset(BUFFER_ALIGN_BYTES).min(BUFFER_ALIGN_BYTES);
        Self { memory, start, len }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }

    /// Makes the content differ from that of the request before.
    fn stamp(&mut self, number: u64) {
        self.bytes_mut()[..8].copy_from_slice(&number.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tidegate::device::{Geometry, Operation};

    use super::*;

    /// Records requests, and can refuse them.
    #[derive(Default)]
    struct Recorder {
        requests: Mutex<Vec<(char, u64)>>,
        refuse_after: Option<usize>,
    }

    impl Recorder {
        fn note(&self, kind: char, offset: u64) -> Result<(), DeviceError> {
            let mut requests = self.requests.lock().unwrap();
            requests.push((kind, offset));
            match self.refuse_after {
                Some(limit) if requests.len() > limit => {
                    Err(DeviceError::out_of_range(offset, 0, 0))
                }
                _ => Ok(()),
            }
        }

        fn taken(&self) -> Vec<(char, u64)> {
            std::mem::take(&mut self.requests.lock().unwrap())
        }
    }

    impl BlockDevice for Recorder {
        fn geometry(&self) -> Geometry {
            unreachable!("workloads are checked against the geometry by their caller")
        }
        fn run(&self, operation: &mut Operation<'_>) -> Result<(), DeviceError> {
            let kind = match operation {
                Operation::Read { .. } => 'r',
                Operation::Write { .. } => 'w',
                Operation::Flush => 'f',
                Operation::Discard { .. } => 'd',
                Operation::WriteZeroes { .. } => 'z',
                Operation::Status { .. } => 's',
            };
            self.note(kind, operation.range().0)
        }
    }

    fn workload() -> Workload {
        Workload {
            pattern: Pattern::Uniform,
            read_pct: 50,
            block_bytes: 512,
            working_set_bytes: 512 * 100,
            threads: 1,
            iodepth: 1,
            stop: Stop::Requests(1000),
            flush_every: 0,
            think: Duration::ZERO,
            bursts: None,
            pace: Duration::ZERO,
            tick: Duration::ZERO,
            seed: 1,
        }
    }

    #[test]
    fn the_same_description_requests_the_same() {
        let device = Recorder::default();
        workload().run(&device).unwrap();
        let first = device.taken();
        workload().run(&device).unwrap();
        assert_eq!(first, device.taken());
        Workload { seed: 2, ..workload() }.run(&device).unwrap();
        assert_ne!(first, device.taken());
    }

    #[test]
    fn counts_mix_and_flushes_come_out_as_asked() {
        let device = Recorder::default();
        let asked = Workload { flush_every: 10, threads: 2, ..workload() };
        let outcome = asked.run(&device).unwrap();
        assert_eq!(outcome.read.len() + outcome.write.len(), 2000);
        assert!((800..1200).contains(&outcome.read.len()), "{}", outcome.read.len());
        let requests = device.taken();
        let count = |kind| requests.iter().filter(|(found, _)| *found == kind).count() as u64;
        assert_eq!(count('r'), outcome.read.len());
        assert_eq!(count('w'), outcome.write.len());
        assert_eq!(count('f'), outcome.flush.len());
        assert!(outcome.flush.len() >= outcome.write.len() / 10 - 1);
        assert!(requests.iter().all(|(_, offset)| offset % 512 == 0 && *offset < 51200));
    }

    #[test]
    fn latencies_of_a_batch_add_up_and_never_leave_the_run() {
        let device = Recorder::default();
        let asked = Workload { iodepth: 8, read_pct: 0, ..workload() };
        let outcome = asked.run(&device).unwrap();
        assert_eq!(outcome.write.len(), 1000);
        assert!(Duration::from_nanos(outcome.write.max()) <= outcome.elapsed * 1001 / 1000);
    }

    #[test]
    fn rests_take_their_share_of_the_time_and_are_in_no_latency() {
        let device = Recorder::default();
        let bursts = Some(Bursts { requests: 10, duty_pct: 1 });
        let asked = Workload { bursts, tick: Duration::from_millis(1), ..workload() };
        let outcome = asked.run(&device).unwrap();
        let busy_ns = outcome.write.mean() * outcome.write.len() as f64
            + outcome.read.mean() * outcome.read.len() as f64;
        assert!(outcome.elapsed.as_secs_f64() * 1e9 > 50.0 * busy_ns, "{outcome:?}");
        let ticks = outcome.timeline.row("", "").max_ns;
        assert!(ticks.into_iter().max() <= Some(outcome.write.max().max(outcome.read.max())));
    }

    #[test]
    fn a_pace_is_kept_and_what_is_late_counts_from_when_it_was_due() {
        struct SlowOnce(AtomicBool);
        impl BlockDevice for SlowOnce {
            fn geometry(&self) -> Geometry {
                Recorder::default().geometry()
            }
            fn run(&self, operation: &mut Operation<'_>) -> Result<(), DeviceError> {
                let is_write = matches!(operation, Operation::Write { .. });
                if is_write && self.0.swap(false, Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Ok(())
            }
        }
        let (pace, stop) = (Duration::from_micros(500), Stop::Requests(100));
        let asked = Workload { read_pct: 0, pace, stop, ..workload() };
        let outcome = asked.run(&SlowOnce(AtomicBool::new(true))).unwrap();
        assert!(outcome.elapsed >= pace * 99, "{:?}", outcome.elapsed);
        let late = outcome.write.count_between(10_000_000, u64::MAX);
        assert!(late >= 20, "20 ms are 40 requests, of which 20 waited for 10 ms: {late}");
    }

    #[test]
    fn the_last_batch_of_a_run_is_no_longer_than_the_run() {
        let device = Recorder::default();
        let stop = Stop::Requests(80);
        Workload { iodepth: 32, threads: 2, stop, ..workload() }.run(&device).unwrap();
        assert_eq!(device.taken().len(), 2 * 80);
    }

    #[test]
    fn fill_writes_each_block_once_and_flushes() {
        let device = Recorder::default();
        workload().fill(&device).unwrap();
        let mut expected: Vec<_> = (0..100).map(|block| ('w', block * 512)).collect();
        expected.push(('f', 0));
        assert_eq!(device.taken(), expected);
    }

    #[test]
    fn an_error_of_the_device_is_the_result() {
        let device = Recorder { refuse_after: Some(10), ..Recorder::default() };
        assert!(workload().run(&device).is_err());
    }
}
