//! Spends the time of a media model on the CPU that stores or reads.
//!
//! The real time of an operation counts: only the rest of the modeled time is spent, by spinning.
//!
//! - A read takes its latency and its transfer, from its start.
//! - Bytes leave for the medium in streaming stores and write-backs. They are posted: the thread
//!   goes on while up to [`POSTED_BYTES`] bytes are under way, as with the write queue of a memory
//!   controller, and then keeps the medium's pace.
//! - A fence returns when all bytes that its thread posted have arrived, one write latency after
//!   the last of the bytes left.
//! - This accounting costs some 30 ns an operation, which shows only if the hardware is as slow as
//!   the model.
//! - Loads and stores of words cost nothing by themselves: hot metadata is in the CPU's caches.
//!
//! The bandwidth of all threads together is one virtual time for each direction: the end of the
//! medium's bookings. A transfer is booked behind the earlier ones. An idle medium saves nothing
//! up. Writes are booked [`BOOK_BYTES`] at a time: booking needs a locked instruction, which on x86
//! waits for all streaming stores to be visible, longer than a fence does. In between each thread
//! keeps to the pace of the medium by itself.
//!
//! Time is the CPU's time stamp counter, calibrated once against the system's monotonic clock, if
//! the counter is invariant; else that clock itself. Sleeping would cost more than most delays.

#![expect(clippy::disallowed_methods, reason = "a delay is the one thing here that needs a clock")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crossbeam_utils::CachePadded;

use super::MediaModel;
use crate::sync::shard::Shards;

/// Time in sixteenths of a nanosecond, so that small costs add up exactly; 36 years fit.
type Fine = u64;
const FINE_PER_NS: u64 = 16;

/// Bytes that a thread has under way before its stores wait for the medium.
const POSTED_BYTES: u64 = 1024;
/// Bytes of the medium that a thread writes before it books them.
const BOOK_BYTES: u64 = 16 << 10;

/// The start of an operation.
#[derive(Clone, Copy)]
pub(super) struct Start(Fine);

/// The delays of a region with a slow medium.
pub(super) struct Delay {
    clock: &'static Clock,
    granularity_bytes: u64,
    read: Direction,
    write: Direction,
    posted: Shards<Posted>,
}

/// The posted bytes of a thread. Threads that share a shard delay each other, roughly.
#[derive(Default)]
struct Posted {
    /// When the last posted byte arrives, without the latency; 0: no byte was posted since the last
    /// fence.
    due: AtomicU64,
    /// Bytes of the medium that are not booked yet, and when the first of the bytes left.
    unbooked_bytes: AtomicU64,
    unbooked_since: AtomicU64,
}

impl Delay {
    /// Makes the delays of `model`, or returns `None` if it has none.
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
            posted: Shards::default(),
        })
    }

    pub(super) fn start(&self) -> Start {
        Start(self.clock.now())
    }

    /// Spends the rest of the time of a read since `start`.
    pub(super) fn finish_read(&self, start: Start, offset: u64, len: u64) {
        let on_medium = self.on_medium(offset, len);
        let shared = self.read.book(start.0, on_medium);
        let done = shared.max(start.0 + self.read.alone(len, on_medium));
        self.spin_until(done + self.read.latency);
    }

    /// Posts the bytes that left for the medium since `start`; waits while too many are under way.
    pub(super) fn finish_write(&self, start: Start, offset: u64, len: u64) {
        let posted = self.posted.mine().0;
        let on_medium = self.on_medium(offset, len);
        let mut due = posted.add(start.0, self.write.alone(len, on_medium), on_medium);
        if posted.unbooked_bytes.load(Ordering::Relaxed) >= BOOK_BYTES {
            due = posted.book(&self.write);
        }
        let go_on = due.saturating_sub(self.write.posted);
        if go_on > start.0 {
            self.spin_until(go_on);
        }
    }

    /// Waits until all posted bytes of the thread have arrived.
    pub(super) fn finish_fence(&self) {
        let posted = self.posted.mine().0;
        let due = posted.due.load(Ordering::Relaxed);
        if due != 0 {
            posted.due.store(0, Ordering::Relaxed);
            self.spin_until(due + self.write.latency);
        }
    }

    /// Returns the bytes of the medium that an access occupies.
    fn on_medium(&self, offset: u64, len: u64) -> u64 {
        let first = offset - offset % self.granularity_bytes;
        (offset + len).next_multiple_of(self.granularity_bytes) - first
    }

    /// Spins without `pause`, which takes longer than the shortest delays.
    fn spin_until(&self, time: Fine) {
        #[cfg(test)]
        if matches!(self.clock, Clock::Simulated) {
            return simulated::pass_until(time);
        }
        while self.clock.now() < time {}
    }

    /// Gives each thread a [`simulated`] time of its own, which only delays advance.
    #[cfg(test)]
    pub(super) fn simulate_time(&mut self) {
        self.clock = &Clock::Simulated;
    }
}

impl Posted {
    /// Posts a transfer that takes the thread `time`. Returns when it arrives.
    fn add(&self, start: Fine, time: Fine, on_medium: u64) -> Fine {
        let unbooked = self.unbooked_bytes.load(Ordering::Relaxed);
        if unbooked == 0 {
            self.unbooked_since.store(start, Ordering::Relaxed);
        }
        self.unbooked_bytes.store(unbooked.saturating_add(on_medium), Ordering::Relaxed);
        let due = self.due.load(Ordering::Relaxed).max(start) + time;
        self.due.store(due, Ordering::Relaxed);
        due
    }

    /// Books all bytes that are not booked yet. Returns when they have arrived.
    fn book(&self, write: &Direction) -> Fine {
        let unbooked = self.unbooked_bytes.load(Ordering::Relaxed);
        self.unbooked_bytes.store(0, Ordering::Relaxed);
        let shared = write.book(self.unbooked_since.load(Ordering::Relaxed), unbooked);
        let due = self.due.load(Ordering::Relaxed).max(shared);
        self.due.store(due, Ordering::Relaxed);
        due
    }
}

/// One direction of transfer.
struct Direction {
    latency: Fine,
    thread: Pace,
    all: Pace,
    /// The time that [`POSTED_BYTES`] take.
    posted: Fine,
    booked_until: CachePadded<AtomicU64>,
}

impl Direction {
    fn new(latency_ns: u32, thread: Option<u64>, all: Option<u64>) -> Self {
        let (thread, all) = (Pace::new(thread), Pace::new(all));
        Self {
            latency: u64::from(latency_ns) * FINE_PER_NS,
            posted: thread.time(POSTED_BYTES).max(all.time(POSTED_BYTES)),
            thread,
            all,
            booked_until: CachePadded::default(),
        }
    }

    /// Returns the time of a transfer for a thread that has the medium to itself.
    fn alone(&self, len: u64, on_medium: u64) -> Fine {
        self.thread.time(len).max(self.all.time(on_medium))
    }

    /// Books a transfer that starts at `start` on the medium. Returns its end.
    fn book(&self, start: Fine, on_medium: u64) -> Fine {
        let share = self.all.time(on_medium);
        if share == 0 {
            return start;
        }
        let end = |until: Fine| until.max(start) + share;
        let extend = |until| Some(end(until));
        let booked = self.booked_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, extend);
        booked.map_or(start, end)
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
        // Far below the clock's range: sums of times cannot overflow.
        u64::try_from(time).unwrap_or(u64::MAX).min(u64::MAX >> 16)
    }
}

/// The source of the time.
enum Clock {
    Counter(Counter),
    /// The system's clock, since a first moment.
    System(Instant),
    #[cfg(test)]
    Simulated,
}

/// The CPU's counter and its speed.
struct Counter {
    origin: u64,
    /// In units of 2^-32 [`Fine`] per tick.
    per_tick: u64,
}

impl Clock {
    /// Returns the process's clock for delays.
    fn get() -> &'static Self {
        static CLOCK: OnceLock<Clock> = OnceLock::new();
        CLOCK.get_or_init(|| {
            Counter::calibrate().map_or_else(|| Self::System(Instant::now()), Self::Counter)
        })
    }

    fn now(&self) -> Fine {
        match self {
            Self::Counter(counter) => counter.now(),
            Self::System(origin) => fine(origin.elapsed().as_nanos()),
            #[cfg(test)]
            Self::Simulated => simulated::now(),
        }
    }
}

fn fine(ns: u128) -> Fine {
    u64::try_from(ns * u128::from(FINE_PER_NS)).unwrap_or(u64::MAX)
}

impl Counter {
    /// Measures the counter for a few milliseconds. Returns `None` without a counter of constant
    /// speed.
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

    /// Samples both clocks at the same moment. Takes the closest of a few tries, since the thread
    /// may lose the CPU between the two clocks.
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

    /// Returns whether the counter runs at one speed in all power states.
    pub(super) fn invariant() -> bool {
        const LEAF: u32 = 0x8000_0007;
        __cpuid(0x8000_0000).eax >= LEAF && __cpuid(LEAF).edx & (1 << 8) != 0
    }

    #[inline]
    pub(super) fn now() -> u64 {
        // SAFETY: the instruction only reads a counter.
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

/// A time of each thread that passes in delays only, so that tests of delays need no real clock.
#[cfg(test)]
pub(super) mod simulated {
    use std::cell::Cell;

    use super::{FINE_PER_NS, Fine};

    thread_local! {
        static NOW: Cell<Fine> = const { Cell::new(0) };
    }

    pub(super) fn now() -> Fine {
        NOW.get()
    }

    pub(super) fn pass_until(time: Fine) {
        NOW.set(NOW.get().max(time));
    }

    /// Returns the sum of this thread's delays so far.
    pub(in crate::pmem) fn now_ns() -> u64 {
        NOW.get() / FINE_PER_NS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB_PER_S: Option<u64> = Some(1_000_000_000);

    fn ns(fine: Fine) -> u64 {
        fine / FINE_PER_NS
    }

    #[test]
    fn a_thread_keeps_its_own_pace() {
        let pace = Pace::new(GB_PER_S);
        let posted = Posted::default();
        assert_eq!(ns(posted.add(0, pace.time(4096), 4096)), 4096);
        assert_eq!(ns(posted.add(0, pace.time(64), 256)), 4160, "one behind the other");
        assert_eq!(ns(posted.add(16 * 9000, pace.time(1000), 1000)), 10_000, "after a pause");
    }

    #[test]
    fn what_was_posted_is_booked_once() {
        let write = Direction::new(0, None, GB_PER_S);
        let posted = Posted::default();
        posted.add(160, 0, 256);
        posted.add(320, 0, 256);
        assert_eq!(ns(posted.book(&write)), 10 + 512, "from when the first left");
        assert_eq!(ns(posted.book(&write)), 10 + 512);
    }

    #[test]
    fn threads_book_the_medium_one_behind_the_other() {
        let all = Direction::new(0, None, GB_PER_S);
        let mut ends: Vec<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| all.book(0, 1000))).collect();
            threads.into_iter().map(|thread| ns(thread.join().unwrap())).collect()
        });
        ends.sort_unstable();
        assert_eq!(ends, [1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000]);
    }

    #[test]
    fn an_idle_medium_saves_nothing_up() {
        let all = Direction::new(0, None, GB_PER_S);
        all.book(0, 1000);
        let later = 1_000_000 * FINE_PER_NS;
        assert_eq!(ns(all.book(later, 1000) - later), 1000);
        assert_eq!(ns(all.book(later, 1000) - later), 2000);
    }

    #[test]
    fn an_access_takes_up_whole_units_of_the_medium() {
        let delay = Delay::new(&MediaModel::optane()).unwrap();
        let cases = [(0, 64, 256), (255, 2, 512), (256, 256, 256), (100, 4096, 4352)];
        for (offset, len, on_medium) in cases {
            assert_eq!(delay.on_medium(offset, len), on_medium);
        }
        assert!(Delay::new(&MediaModel::dram()).is_none());
    }

    #[test]
    fn absurd_transfers_do_not_overflow() {
        let slow = Direction::new(1_000_000_000, Some(1), Some(1));
        let once = slow.book(u64::MAX >> 8, u64::MAX);
        assert!(slow.book(once, u64::MAX) + slow.thread.time(u64::MAX) > once);
    }

    #[test]
    fn the_counter_agrees_with_the_clock() {
        let Some(counter) = Counter::calibrate() else {
            assert!(!cycles::invariant());
            return;
        };
        let errors_ns = (0..20).map(|_| {
            let (start, from) = (Instant::now(), counter.now());
            while start.elapsed().as_millis() < 20 {}
            let (passed, elapsed) = (ns(counter.now() - from), start.elapsed().as_nanos());
            passed.abs_diff(u64::try_from(elapsed).unwrap())
        });
        // Between the two readings of a try the thread may lose its CPU.
        let errors_ns: Vec<_> = errors_ns.collect();
        assert!(errors_ns.iter().any(|error_ns| *error_ns < 2_000_000), "{errors_ns:?}");
    }
}
