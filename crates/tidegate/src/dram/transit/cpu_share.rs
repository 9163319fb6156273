//! Measures whether a thread gets a CPU whenever it wants to run, and how long it should rest.

use crate::tier::clock::{now_ns, thread_cpu_ns};

/// The time over which a thread measures whether it had a CPU to itself.
const WINDOW_NS: u64 = 1_000_000;
/// The share of a window that the thread may have waited for a CPU: 1 in this many.
const WAITED_SHARE: u64 = 8;
/// Windows in a row without waiting that halve the next pause.
const WINDOWS_TO_RECOVER: u32 = 64;
const SHORTEST_PAUSE_NS: u64 = 1_000_000;
/// Longest pause if other processes use the CPUs, and if this one uses all CPUs.
const LONGEST_PAUSE_NS: u64 = 32_000_000;
const LONGEST_BUSY_PAUSE_NS: u64 = 256_000_000;
/// This process uses all CPUs if it leaves at most this share of their time, the inaccuracy of the
/// clock.
const IDLE_SHARE: u64 = 8;

/// The result of a window.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The thread had a CPU to itself, for this many windows in a row.
    Alone { windows: u32 },
    /// The thread had to wait for a CPU.
    Crowded { pause_ns: u64 },
}

/// The CPU time of a thread against real time.
pub(super) struct CpuShare {
    cpus: u32,
    /// When the window began: real time, and CPU time of the thread.
    window_ns: (u64, u64),
    next_pause_ns: u64,
    longest_pause_ns: u64,
    windows_alone: u32,
}

impl CpuShare {
    /// Makes the measurement of a thread on a machine of `cpus` CPUs.
    pub(super) fn new(cpus: u32) -> Self {
        Self {
            cpus,
            window_ns: (0, 0),
            next_pause_ns: SHORTEST_PAUSE_NS,
            longest_pause_ns: LONGEST_PAUSE_NS,
            windows_alone: 0,
        }
    }

    pub(super) fn begin_window(&mut self) {
        self.window_ns = (now_ns(), thread_cpu_ns());
    }

    /// Returns the result of the window if it has ended, and begins the next one.
    pub(super) fn verdict(&mut self) -> Option<Verdict> {
        let real_ns = now_ns().saturating_sub(self.window_ns.0);
        if real_ns < WINDOW_NS {
            return None;
        }
        let waited_ns = real_ns.saturating_sub(thread_cpu_ns().saturating_sub(self.window_ns.1));
        self.begin_window();
        Some(self.judge(real_ns, waited_ns))
    }

    /// Notes that all threads of this process ran for `process_ns` during a pause of `real_ns`.
    pub(super) fn paused(&mut self, real_ns: u64, process_ns: u64) {
        let all_ns = real_ns * u64::from(self.cpus);
        let is_busy = all_ns.saturating_sub(process_ns) <= all_ns / IDLE_SHARE;
        self.longest_pause_ns = if is_busy { LONGEST_BUSY_PAUSE_NS } else { LONGEST_PAUSE_NS };
        self.next_pause_ns = self.next_pause_ns.min(self.longest_pause_ns);
    }

    fn judge(&mut self, real_ns: u64, waited_ns: u64) -> Verdict {
        if waited_ns > real_ns / WAITED_SHARE {
            let pause_ns = self.next_pause_ns;
            self.next_pause_ns = (pause_ns * 2).min(self.longest_pause_ns);
            self.windows_alone = 0;
            return Verdict::Crowded { pause_ns };
        }
        self.windows_alone += 1;
        if self.windows_alone.is_multiple_of(WINDOWS_TO_RECOVER) {
            self.next_pause_ns = (self.next_pause_ns / 2).max(SHORTEST_PAUSE_NS);
        }
        Verdict::Alone { windows: self.windows_alone }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waits_for_a_cpu_pauses_ever_longer_and_recovers() {
        let mut share = CpuShare::new(2);
        assert_eq!(share.judge(1000, 100), Verdict::Alone { windows: 1 });
        for pause_ns in [1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000, 32_000_000] {
            assert_eq!(share.judge(1000, 200), Verdict::Crowded { pause_ns });
        }
        assert_eq!(share.judge(1000, 200), Verdict::Crowded { pause_ns: LONGEST_PAUSE_NS });
        for windows in 1..=WINDOWS_TO_RECOVER {
            assert_eq!(share.judge(1000, 100), Verdict::Alone { windows });
        }
        assert_eq!(share.judge(1000, 200), Verdict::Crowded { pause_ns: LONGEST_PAUSE_NS / 2 });
    }

    #[test]
    fn pauses_grow_longest_where_the_requests_of_this_process_need_all_cpus() {
        let mut share = CpuShare::new(2);
        let longest = |share: &mut CpuShare, process_ns| {
            for _ in 0..20 {
                share.judge(1000, 1000);
                share.paused(1000, process_ns);
            }
            share.judge(1000, 1000)
        };
        let busy = Verdict::Crowded { pause_ns: LONGEST_BUSY_PAUSE_NS };
        let shared = Verdict::Crowded { pause_ns: LONGEST_PAUSE_NS };
        assert_eq!(longest(&mut share, 1000), shared);
        assert_eq!(longest(&mut share, 1800), busy);
        assert_eq!(longest(&mut share, 1700), shared);
    }
}
