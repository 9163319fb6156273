//! The one place where tiers read clocks: to measure themselves and to rest, never to decide what
//! is correct. The wall clock dates what the log says: recovery tells changes from outside by that.
//!
//! Invariant: no lock, and nothing that is made at the first call. The preload library asks for the
//! time inside the programs of others, whose signal handlers may leave it by `longjmp`.

use std::time::Duration;

use rustix::time::ClockId;

use crate::sync::machine::modelled;

/// How often two clocks are read until the thread did not wait for a CPU meanwhile, and how long
/// both readings take then.
const READINGS_MOST: u32 = 16;
const READING_NS: u64 = 100_000;

/// Nanoseconds since some moment before the first call.
pub(crate) fn now_ns() -> u64 {
    modelled().map_or_else(system_now_ns, |machine| machine.now_ns())
}

fn system_now_ns() -> u64 {
    let now_ns = monotonic_ns();
    #[cfg(all(test, not(loom)))]
    let now_ns = now_ns + AHEAD_NS.get();
    now_ns
}

/// Nanoseconds of a clock that all processes of the machine have in common.
pub(crate) fn monotonic_ns() -> u64 {
    of_clock_ns(ClockId::Monotonic)
}

/// Nanoseconds since 1970, by the clock of times of files. No time that the kernel has given a file
/// is later.
pub(crate) fn wall_ns() -> u64 {
    modelled().map_or_else(|| of_clock_ns(ClockId::Realtime), |machine| machine.now_ns())
}

/// As [`wall_ns`], a tick earlier at most.
pub(crate) fn wall_coarse_ns() -> u64 {
    modelled().map_or_else(|| of_clock_ns(ClockId::RealtimeCoarse), |machine| machine.now_ns())
}

/// How far the wall clock is ahead of one that nobody sets, in nanoseconds. A thread that waits for
/// a CPU between the two readings asks again: else the wall clock would seem to be set back.
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

/// Lets `ns` pass on the clock of the calling thread.
#[cfg(all(test, not(loom)))]
pub(crate) fn advance(ns: u64) {
    AHEAD_NS.set(AHEAD_NS.get() + ns);
}

/// Nanoseconds that the calling thread has spent on a CPU.
pub(crate) fn thread_cpu_ns() -> u64 {
    modelled().map_or_else(|| of_clock_ns(ClockId::ThreadCPUTime), |it| it.thread_cpu_ns())
}

/// Nanoseconds that the threads of this process have spent on CPUs, but for the last few
/// milliseconds.
pub(crate) fn process_cpu_ns() -> u64 {
    modelled().map_or_else(|| of_clock_ns(ClockId::ProcessCPUTime), |it| it.process_cpu_ns())
}

fn of_clock_ns(clock: ClockId) -> u64 {
    let time = Duration::try_from(rustix::time::clock_gettime(clock)).unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
