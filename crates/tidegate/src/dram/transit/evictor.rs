//! The evictors: workers that write back. Load and CPUs determine how many are awake.
//!
//! An evictor is idle (no work), awake, or rests (writers or other processes need the CPUs). Rules:
//!
//! - While no block is queued, all evictors are idle, without a timeout: an idle tier costs no CPU.
//! - A write that finds no evictor awake wakes one. When its work ends, the evictor looks for more
//!   for a moment and then naps a few times before it turns idle. So among paced writes only the
//!   first one pays for a wake-up, which costs more than a bypass. A full cache ends a nap.
//! - An evictor that cannot keep up, and has a CPU to itself, wakes another.
//! - If the device below works at the speed of memory, awake evictors and writers together never
//!   exceed the CPUs: surplus evictors rest, and look again from time to time. Writing back beside
//!   writers that need all CPUs only adds the cost of the copy; full caches are bypassed instead.
//! - An evictor that nevertheless had to wait for a CPU, because other processes use it, pauses,
//!   twice as long each time, and no evictor is woken in its place. It tries again by itself,
//!   because no event tells it that a CPU becomes idle; and at once while no writer is active,
//!   since it takes no CPU from writers then.
//! - Pauses grow longest if this process alone keeps all CPUs busy, because each try takes time
//!   from its own requests. If other processes do, each try takes most of its time from those.

use std::sync::Arc;

use super::Core;
use super::costs::Worth;
use super::cpu_share::{CpuShare, Verdict};
use super::drain::Scratch;
use crate::sync::Ordering;
use crate::sync::machine::{pause, yield_now};
use crate::tier::background::{Step, Work};
use crate::tier::clock::{now_ns, process_cpu_ns};

/// Blocks that an evictor takes from a set before it goes to the next one.
const BATCH_BLOCKS: usize = 8;
/// How long an evictor looks for new work before it naps.
const SPIN_NS: u64 = 20_000;
/// Windows in a row without waiting after which an evictor wakes another. They take longer than a
/// time slice, which a thread gets whole before it notices waiting threads.
const WINDOWS_ALONE: u32 = 8;
/// Length of a nap, and the number of naps without work before the evictor turns idle.
const NAP_NS: u64 = 1_000_000;
const NAPS: u32 = 8;
/// Time until an evictor that leaves its CPU to a writer looks again.
const LOOK_AGAIN_NS: u64 = 4_000_000;
/// Time between two checks for active writers during a pause, and the length of a check: a busy
/// writer is between two writes for less time.
const LOOK_UP_NS: u64 = 500_000;
const GLANCE_NS: u64 = 3_000;

/// One evictor.
pub(super) struct Evictor {
    core: Arc<Core>,
    /// The first set of the next search for work.
    cursor: usize,
    share: CpuShare,
    scratch: Scratch,
    /// Naps left before the evictor turns idle.
    naps_left: u32,
    pause: Option<Pause>,
    /// Whether the evictor slept during the window of `share`.
    has_slept: bool,
}

/// A time during which an evictor leaves the CPU to other threads.
struct Pause {
    until_ns: u64,
    /// When it began: real time, and CPU time of the process.
    began_ns: (u64, u64),
    /// [`Waker::alarms`](crate::tier::background::Waker::alarms) when it began.
    alarms: u64,
}

impl Evictor {
    /// Makes evictor `number` of a tier.
    pub(super) fn new(core: Arc<Core>, number: u32) -> Self {
        Self {
            cursor: number as usize * core.sets.count() / 2,
            share: CpuShare::new(core.cpus),
            scratch: Scratch::default(),
            naps_left: 0,
            pause: None,
            has_slept: true,
            core,
        }
    }

    fn work(&mut self) -> Step {
        let Some(set) = self.look_for_work() else { return self.nap() };
        self.naps_left = NAPS;
        if let Some(awake_max) = self.awake_max()
            && self.core.waker.awake() > awake_max
        {
            return Step::Yield { awake_max, wake_at_ns: now_ns() + LOOK_AGAIN_NS };
        }
        self.cursor = set + 1;
        // The ledger has the failure.
        self.core.evict_queued(set, u64::MAX, BATCH_BLOCKS, &mut self.scratch);
        // A writer that lost its CPU to this thread gets it back now, not after a time slice.
        yield_now();
        self.adapt()
    }

    /// Naps: waits for work a moment, during which writes need not wake this evictor.
    fn nap(&mut self) -> Step {
        if self.naps_left == 0 {
            self.naps_left = NAPS;
            return Step::IDLE;
        }
        self.naps_left -= 1;
        self.core.napping.store(1, Ordering::Relaxed);
        Step::rest(NAP_NS)
    }

    /// Adapts at the end of a window: pauses if the CPUs are needed, wakes another evictor if not.
    fn adapt(&mut self) -> Step {
        match self.share.verdict() {
            Some(Verdict::Crowded { pause_ns }) => self.begin_pause(pause_ns),
            Some(Verdict::Alone { windows }) => {
                let core = &self.core;
                if windows >= WINDOWS_ALONE && core.used_slots() > core.slots.count() / 4 {
                    core.waker.wake_another();
                }
                Step::Again
            }
            None => Step::Again,
        }
    }

    pub(super) fn begin_pause(&mut self, pause_ns: u64) -> Step {
        let began_ns = (now_ns(), process_cpu_ns());
        let alarms = self.core.waker.alarms();
        self.pause = Some(Pause { until_ns: began_ns.0 + pause_ns, began_ns, alarms });
        Step::rest(pause_ns.min(LOOK_UP_NS))
    }

    /// Returns how long to pause still; `None` if not at all, or if no other thread gains by that.
    fn pause_left_ns(&mut self) -> Option<u64> {
        let Pause { until_ns, began_ns, alarms } = self.pause.as_ref()?;
        let now_ns = now_ns();
        let left_ns = until_ns.saturating_sub(now_ns);
        let was_called = *alarms != self.core.waker.alarms();
        if left_ns > 0 && !was_called && !no_writer_is_active(&self.core) {
            return Some(left_ns);
        }
        let process_ns = process_cpu_ns().saturating_sub(began_ns.1);
        self.share.paused(now_ns.saturating_sub(began_ns.0), process_ns);
        self.pause = None;
        None
    }

    /// Returns how many evictors may be awake so that each active writer has a CPU, if writers
    /// would write below at memory speed themselves. Returns `None` if the number does not matter:
    /// the device below is slower, or the cache is only being emptied for bypassing.
    fn awake_max(&self) -> Option<u32> {
        let core = &*self.core;
        let matters = core.is_below_memory && core.costs.worth() != Worth::Bypass;
        matters.then(|| core.cpus.saturating_sub(core.writers()))
    }

    /// Returns the next set with work, if one appears within [`SPIN_NS`].
    fn look_for_work(&self) -> Option<usize> {
        let mut until_ns = None;
        loop {
            let found = self.core.sets.ready.next_from(self.cursor);
            if found.is_some() {
                return found;
            }
            let now = now_ns();
            if now > *until_ns.get_or_insert(now + SPIN_NS) {
                return None;
            }
            pause();
        }
    }
}

impl Work for Evictor {
    fn step(&mut self) -> Step {
        if let Some(left_ns) = self.pause_left_ns() {
            return Step::rest(left_ns.min(LOOK_UP_NS));
        }
        if self.has_slept {
            self.share.begin_window();
        }
        let step = self.work();
        self.has_slept = step != Step::Again;
        step
    }

    fn has_work(&self) -> bool {
        self.core.sets.ready.any()
    }
}

/// An evictor that never rests; a scheduler decides when it steps.
pub(super) struct UnpacedEvictor {
    pub(super) core: Arc<Core>,
}

impl Work for UnpacedEvictor {
    fn step(&mut self) -> Step {
        let Some(number) = self.core.sets.ready.next_from(0) else { return Step::IDLE };
        // The ledger has the failure.
        self.core.evict_queued(number, u64::MAX, BATCH_BLOCKS, &mut Scratch::default());
        Step::Again
    }

    fn has_work(&self) -> bool {
        self.core.sets.ready.any()
    }
}

/// Returns whether no writer is active for [`GLANCE_NS`].
fn no_writer_is_active(core: &Core) -> bool {
    let until_ns = now_ns() + GLANCE_NS;
    // At least one look, however long the scheduler delayed this thread.
    loop {
        if core.writers() > 0 {
            return false;
        }
        if now_ns() >= until_ns {
            return true;
        }
    }
}
