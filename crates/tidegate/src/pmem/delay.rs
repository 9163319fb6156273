//! Spends the time that a media model asks for on the CPU that stores or reads.
//!
//! An operation notes when it started, does its real work, and then spins until the modeled time has
//! passed since the start: the real time counts. Bandwidth of all threads together is one virtual time
//! for each direction, up to which the medium is booked out: an operation books its bytes behind what is booked
//! already and waits for its turn to end. A thread that falls behind saves nothing up.
//!
//! Bandwidth of writes is spent where bytes leave for the medium: in streaming stores and write-backs. Their latency
//! is spent once, in the fence that waits for them.
//!
//! Time is the CPU's time stamp counter, calibrated once against the system's monotonic clock, where the
//! counter is invariant; else that clock itself. Sleeping would cost more than most delays.

#![expect(clippy::disallowed_methods, reason = "a delay is the one thing here that needs a clock")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crossbeam_utils::CachePadded;

use super::MediaModel;
use super::shard::Shards;

/// Time in sixteenths of a nanosecond, for small costs to add up exactly: 36 years fit.
type Fine = u64;
const FINE_PER_NS: u64 = 16;

/// The start of an operation.
#[derive(Clone, Copy)]
pub(super) struct Start(Fine);

/// The delays of a region with a slow medium.
pub(super) struct Delay {
    clock: &'static Clock,
    granularity_bytes: u64,
    read: Direction,
    write: Direction,
    /// The thread has stored since its last fence. The threads that share a shard wait for each other's stores.
    stored: Shards<AtomicBool>,
}

impl Delay {
    /// `None` for a model without delays.
    pub(super) fn new(model: &MediaModel) -> Option<Self> {
        let write = Direction::new(
            model.write_latency_ns,
            model.thread_write_bytes_per_s,
            model.write_bytes_per_s,
        );
        let read = Direction::new(
            model.read_latency_ns,
            model.thread_read_bytes_per_s,
            model.read_bytes_per_s,
        );
        (!model.is_undelayed()).then(|| Self {
            clock: Clock::get(),
            granularity_bytes: u64::from(model.granularity_bytes),
            read,
            write,
            stored: Shards::new(),
        })
    }

    pub(super) fn start(&self) -> Start {
        Start(self.clock.now())
    }

    /// Bytes were read since `start`.
    pub(super) fn finish_read(&self, start: Start, offset: u64, len: u64) {
        let done = self.read.book(start, len, self.on_medium(offset, len));
        self.spin_until(done + self.read.latency);
    }

    /// Bytes left for the medium since `start`.
    pub(super) fn finish_write(&self, start: Start, offset: u64, len: u64) {
        self.stored.mine().0.store(true, Ordering::Relaxed);
        let done = self.write.book(start, len, self.on_medium(offset, len));
        self.spin_until(done);
    }

    /// The thread fenced since `start`.
    pub(super) fn finish_fence(&self, start: Start) {
        let (stored, exclusive) = self.stored.mine();
        let waits = stored.load(Ordering::Relaxed);
        if waits && exclusive {
            stored.store(false, Ordering::Relaxed);
        }
        if waits {
            self.spin_until(start.0 + self.write.latency);
        }
    }

    /// Bytes of the medium that an access takes up.
    fn on_medium(&self, offset: u64, len: u64) -> u64 {
        let first = offset - offset % self.granularity_bytes;
        (offset + len).next_multiple_of(self.granularity_bytes) - first
    }

    /// Without `pause`, which takes longer than the shortest delays.
    fn spin_until(&self, time: Fine) {
        while self.clock.now() < time {}
    }
}

/// One direction of transfer.
struct Direction {
    latency: Fine,
    thread: Pace,
    all: Pace,
    booked_until: CachePadded<AtomicU64>,
}

impl Direction {
    fn new(latency_ns: u32, thread: Option<u64>, all: Option<u64>) -> Self {
        Self {
            latency: u64::from(latency_ns) * FINE_PER_NS,
            thread: Pace::new(thread),
            all: Pace::new(all),
            booked_until: CachePadded::default(),
        }
    }

    /// When a transfer that started at `start` is over.
    fn book(&self, start: Start, len: u64, on_medium: u64) -> Fine {
        let alone = start.0 + self.thread.time(len);
        let share = self.all.time(on_medium);
        if share == 0 {
            return alone;
        }
        let extend = |until: Fine| Some(until.max(start.0) + share);
        let before = self.booked_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, extend);
        let shared = before.unwrap_or_else(|until| until).max(start.0) + share;
        alone.max(shared)
    }
}

/// Time per byte.
struct Pace {
    /// In units of 2^-32 [`Fine`]; 0: no limit.
    per_byte: u64,
}

impl Pace {
    fn new(bytes_per_s: Option<u64>) -> Self {
        let per_s = (u128::from(FINE_PER_NS) * 1_000_000_000) << 32;
        let per_byte = bytes_per_s.map_or(0, |limit| per_s / u128::from(limit.max(1)));
        Self { per_byte: u64::try_from(per_byte).unwrap_or(u64::MAX) }
    }

    fn time(&self, bytes: u64) -> Fine {
        let time = (u128::from(self.per_byte) * u128::from(bytes)) >> 32;
        // Half of the clock's range: adding it to a time cannot overflow.
        u64::try_from(time).unwrap_or(u64::MAX).min(u64::MAX / 2)
    }
}

/// The process's clock for delays.
struct Clock {
    origin: Instant,
    counter: Option<Counter>,
}

/// The CPU's counter and its speed.
struct Counter {
    origin: u64,
    /// In units of 2^-32 [`Fine`] per tick.
    per_tick: u64,
}

impl Clock {
    fn get() -> &'static Self {
        static CLOCK: OnceLock<Clock> = OnceLock::new();
        CLOCK.get_or_init(|| Self { origin: Instant::now(), counter: Counter::calibrate() })
    }

    fn now(&self) -> Fine {
        match &self.counter {
            Some(counter) => counter.now(),
            None => fine(self.origin.elapsed().as_nanos()),
        }
    }
}

fn fine(ns: u128) -> Fine {
    u64::try_from(ns * u128::from(FINE_PER_NS)).unwrap_or(u64::MAX)
}

impl Counter {
    /// Measures the counter for a few milliseconds; `None` where there is none of constant speed.
    fn calibrate() -> Option<Self> {
        const MEASURE_NS: u128 = 5_000_000;
        if !cycles::invariant() {
            return None;
        }
        let (first_ticks, first) = Self::sample();
        while first.elapsed().as_nanos() < MEASURE_NS {}
        let (last_ticks, last) = Self::sample();
        let passed = u128::from(fine(last.duration_since(first).as_nanos()));
        let ticks = u128::from(last_ticks.checked_sub(first_ticks).filter(|&ticks| ticks > 0)?);
        let per_tick = u64::try_from((passed << 32) / ticks).ok()?;
        Some(Self { origin: first_ticks, per_tick })
    }

    /// Both clocks at the same moment: the closest of a few tries, for the thread may lose the CPU between.
    fn sample() -> (u64, Instant) {
        let tries = (0..8).map(|_| {
            let before = cycles::now();
            let time = Instant::now();
            (cycles::now().wrapping_sub(before), before, time)
        });
        let (gap, before, time) = tries.min_by_key(|sample| sample.0).expect("eight samples");
        (before + gap / 2, time)
    }

    fn now(&self) -> Fine {
        let ticks = cycles::now().saturating_sub(self.origin);
        let time = (u128::from(ticks) * u128::from(self.per_tick)) >> 32;
        u64::try_from(time).unwrap_or(u64::MAX)
    }
}

#[cfg(target_arch = "x86_64")]
mod cycles {
    use std::arch::x86_64::{__cpuid, _rdtsc};

    /// The counter runs at one speed in all power states.
    pub(super) fn invariant() -> bool {
        const LEAF: u32 = 0x8000_0007;
        __cpuid(0x8000_0000).eax >= LEAF && __cpuid(LEAF).edx & (1 << 8) != 0
    }

    #[inline]
    pub(super) fn now() -> u64 {
        // SAFETY: reads a counter.
        unsafe { _rdtsc() }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod cycles {
    pub(super) fn invariant() -> bool {
        false
    }

    pub(super) fn now() -> u64 {
        0
    }
}
