//! The only place where tiers read clocks: to measure themselves and to rest, never to decide about
//! correctness. Wall-clock times date the log's records, and recovery compares these with files'
//! times to detect changes from outside.
//!
//! Invariant: the functions take no lock and initialize nothing at the first call. The preload
//! library calls them inside programs whose signal handlers may leave them by `longjmp`.

use std::time::Duration;

use rustix::time::ClockId;

use crate::sync::machine::modelled;

/// Maximum number of attempts to read two clocks without waiting for a CPU in between, and the
/// longest time that such an attempt takes.
const READINGS_MOST: u32 = 16;
const READING_NS: u64 = 100_000;

/// Returns the nanoseconds since some moment before the first call.
pub(crate) fn now_ns() -> u64 {
    modelled().map_or_else(system_now_ns, |machine| machine.now_ns())
}

fn system_now_ns() -> u64 {
    let now_ns = monotonic_ns();
    #[cfg(all(test, not(loom)))]
    let now_ns = now_ns + AHEAD_NS.get();
    now_ns
}

/// Returns the nanoseconds of a clock that all processes of the machine share.
pub(crate) fn monotonic_ns() -> u64 {
    of_clock_ns(ClockId::Monotonic)
}

/// Returns the nanoseconds since 1970, by the clock of file times: no file has got a later time.
pub(crate) fn wall_ns() -> u64 {
    modelled().map_or_else(|| of_clock_ns(ClockId::Realtime), |machine| machine.now_ns())
}

/// Returns the nanoseconds since 1970, at most a tick earlier than [`wall_ns`].
pub(crate) fn wall_coarse_ns() -> u64 {
    modelled().map_or_else(|| of_clock_ns(ClockId::RealtimeCoarse), |machine| machine.now_ns())
}

/// Returns how far the wall clock is ahead of the boot clock, which is never set, in nanoseconds.
/// Reads again if the thread waited for a CPU in between. Otherwise the wall clock would seem to be
/// set back.
pub(crate) fn wall_ahead_ns() -> u64 {
    let boot_ns = || of_clock_ns(ClockId::Boottime);
    let reading = || {
        let (start_ns, wall_ns) = (boot_ns(), of_clock_ns(ClockId::Realtime));
        (boot_ns().saturating_sub(start_ns), wall_ns.saturating_sub(start_ns))
    };
    let mut best = reading();
    for _ in 1..READINGS_MOST {
        if best.0 <= READING_NS {
            break;
        }
        best = best.min(reading());
    }
    best.1
}

#[cfg(all(test, not(loom)))]
thread_local! {
    static AHEAD_NS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Advances the clock of the calling thread by `ns`.
#[cfg(all(test, not(loom)))]
pub(crate) fn advance(ns: u64) {
    AHEAD_NS.set(AHEAD_NS.get() + ns);
}

/// Returns the nanoseconds that the calling thread has spent on a CPU.
pub(crate) fn thread_cpu_ns() -> u64 {
    modelled().map_or_else(|| of_clock_ns(ClockId::ThreadCPUTime), |it| it.thread_cpu_ns())
}

/// Returns the nanoseconds of CPU time of this process, except for the last few milliseconds.
pub(crate) fn process_cpu_ns() -> u64 {
    modelled().map_or_else(|| of_clock_ns(ClockId::ProcessCPUTime), |it| it.process_cpu_ns())
}

fn of_clock_ns(clock: ClockId) -> u64 {
    let time = Duration::try_from(rustix::time::clock_gettime(clock)).unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
