//! The one place where tiers read clocks: to measure themselves and to rest, never to decide what
//! is correct.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::time::ClockId;

use crate::sync::machine::modelled;

/// Nanoseconds since some moment before the first call.
pub(crate) fn now_ns() -> u64 {
    modelled().map_or_else(system_now_ns, |machine| machine.now_ns())
}

fn system_now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    #[expect(
        clippy::disallowed_methods,
        reason = "phases, costs and rests are measured in real time"
    )]
    let now = Instant::now();
    let now_ns = nanoseconds(now.duration_since(*START.get_or_init(|| now)));
    #[cfg(all(test, not(feature = "loom")))]
    let now_ns = now_ns + AHEAD_NS.get();
    now_ns
}

#[cfg(all(test, not(feature = "loom")))]
thread_local! {
    static AHEAD_NS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Lets `ns` pass on the clock of the calling thread.
#[cfg(all(test, not(feature = "loom")))]
pub(crate) fn advance(ns: u64) {
    AHEAD_NS.set(AHEAD_NS.get() + ns);
}

/// Nanoseconds that the calling thread has spent on a CPU.
pub(crate) fn thread_cpu_ns() -> u64 {
    modelled().map_or_else(|| cpu_ns(ClockId::ThreadCPUTime), |it| it.thread_cpu_ns())
}

/// Nanoseconds that the threads of this process have spent on CPUs, but for the last few
/// milliseconds.
pub(crate) fn process_cpu_ns() -> u64 {
    modelled().map_or_else(|| cpu_ns(ClockId::ProcessCPUTime), |it| it.process_cpu_ns())
}

fn cpu_ns(clock: ClockId) -> u64 {
    nanoseconds(Duration::try_from(rustix::time::clock_gettime(clock)).unwrap_or_default())
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
