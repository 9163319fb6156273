//! The evictors: background threads that write back, as many as the load and the CPUs call for.
//!
//! An evictor is asleep (no work), awake, or paused (others need the CPUs). Rules:
//!
//! - While nothing is queued all are asleep, without a timeout: an idle tier costs no CPU.
//! - A write that finds nobody awake wakes one. When the work ends, that one looks on for a moment and then
//!   naps a few times before it sleeps, so that of paced writes only the first pays for a wake-up, which
//!   costs more than a bypass. A cache that is full ends a nap.
//! - An evictor that cannot keep up, and has a CPU to itself, wakes another.
//! - Where the device below works at the speed of memory, evictors and writers together are never more than
//!   there are CPUs: an evictor that finds more leaves at once, and looks again from time to time. Writing back
//!   beside writers that need all CPUs only adds the cost of the copy; full caches are bypassed instead.
//! - An evictor that had to wait for a CPU all the same, since others use it, pauses, twice as long each time, and
//!   nobody is woken in its place. It tries again by itself, for nothing tells it when a CPU becomes idle; and at once
//!   while the writers rest, for then it takes nothing from them.
//! - Pauses grow longest where this process alone keeps all CPUs busy meanwhile: each try takes time from its
//!   requests. Where other processes do, each try takes most of its time from those.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::super::clock::{now_ns, process_cpu_ns, thread_cpu_ns};
use super::costs::Worth;
use super::evict::Scratch;
use super::{Core, Result};
use crate::device::{DeviceError, DeviceErrorKind};
use crate::sync::{AtomicU32, Ordering};

/// Blocks that an evictor takes from a set before it looks at the next one.
const BATCH_BLOCKS: usize = 8;
/// How long an evictor looks for new work before it sleeps.
const SPIN_NS: u64 = 20_000;
/// Over how long an evictor measures whether it had a CPU to itself.
const WINDOW_NS: u64 = 1_000_000;
/// The share of a window that it may have waited for one.
const WAITED_SHARE: u64 = 8;
/// Windows in a row without waiting after which an evictor calls for help: longer than a time slice, which a
/// thread gets whole before it sees that others wait.
const WINDOWS_ALONE: u32 = 8;
/// Windows in a row without waiting that halve the next pause.
const WINDOWS_TO_RECOVER: u32 = 64;
/// Length of a nap, and how many in a row find no work before the evictor sleeps.
const NAP_NS: u64 = 1_000_000;
const NAPS: u32 = 8;
/// How often an evictor for which there is no room looks again.
const LOOK_AGAIN_NS: u64 = 4_000_000;
const SHORTEST_PAUSE_NS: u64 = 1_000_000;
/// How often an evictor that pauses looks whether the writers rest, and for how long: writers that never do are between
/// two writes for less.
const LOOK_UP_NS: u64 = 500_000;
const GLANCE_NS: u64 = 3_000;
/// Longest pause where other processes use the CPUs, and where this one uses all of them.
const LONGEST_PAUSE_NS: u64 = 32_000_000;
const LONGEST_BUSY_PAUSE_NS: u64 = 256_000_000;
/// This process uses all CPUs where it leaves at most this share of their time, the inaccuracy of the clock.
const IDLE_SHARE: u64 = 8;

/// Who sleeps, who is awake, and how to change it.
pub(super) struct Doorbell {
    /// 1 where a write that queues work has to wake somebody.
    call: AtomicU32,
    /// 1 where a write that finds the cache full should end a nap.
    napping: AtomicU32,
    /// 1 once the threads are to end.
    stopping: AtomicU32,
    /// `gate.awake`, for a look without its lock.
    awake: AtomicU32,
    cpus: u32,
    gate: Mutex<Gate>,
    ring: Condvar,
    resume: Condvar,
}

struct Gate {
    awake: u32,
    asleep: u32,
    paused: u32,
    /// Sleepers that were woken and have not noticed yet.
    woken: u32,
}

impl Gate {
    fn needs_call(&self) -> bool {
        self.awake == 0 && self.paused == 0 && self.woken == 0 && self.asleep > 0
    }
}

impl Doorbell {
    /// For `evictors` threads, all awake.
    pub(super) fn new(evictors: u32) -> Self {
        Self {
            call: AtomicU32::new(0),
            napping: AtomicU32::new(0),
            stopping: AtomicU32::new(0),
            awake: AtomicU32::new(0),
            cpus: cpus(),
            gate: Mutex::new(Gate { awake: evictors, asleep: 0, paused: 0, woken: 0 }),
            ring: Condvar::new(),
            resume: Condvar::new(),
        }
    }

    /// Work was queued and its set's flag raised. Wakes an evictor where none is awake.
    ///
    /// No wake-up is lost: this looks at `call` after the flag was raised, and an evictor sets `call` before
    /// it looks at the flags for the last time (see `flags`).
    pub(super) fn ring(&self) {
        if self.call.load(Ordering::Acquire) == 1 {
            self.wake_one();
        }
    }

    /// The cache is full: whoever naps has something to do.
    pub(super) fn hurry(&self) {
        if self.napping.load(Ordering::Relaxed) == 1 && self.napping.swap(0, Ordering::Relaxed) == 1
        {
            let _gate = self.gate.lock();
            self.resume.notify_all();
        }
    }

    /// Much is to be done at once: everybody is called, also those who paused.
    pub(super) fn ring_all(&self) {
        let mut gate = self.gate.lock();
        gate.woken = gate.asleep;
        self.ring.notify_all();
        self.resume.notify_all();
        self.update(&gate);
    }

    fn wake_one(&self) {
        let mut gate = self.gate.lock();
        if gate.paused == 0 && gate.asleep > gate.woken {
            gate.woken += 1;
            self.ring.notify_one();
            self.update(&gate);
        }
    }

    /// The calling evictor sleeps until it is woken; not at all where `has_work` and nobody else is awake.
    /// False where it is to end.
    fn sleep(&self, has_work: impl Fn() -> bool) -> bool {
        let mut gate = self.gate.lock();
        gate.awake -= 1;
        gate.asleep += 1;
        self.update(&gate);
        if gate.awake + gate.paused == 0 && has_work() {
            gate.woken += 1;
        }
        while gate.woken == 0 && !self.is_stopping() {
            self.ring.wait(&mut gate);
        }
        gate.woken = gate.woken.saturating_sub(1);
        gate.asleep -= 1;
        gate.awake += 1;
        self.update(&gate);
        !self.is_stopping()
    }

    /// The calling evictor leaves the CPU to others for `pause_ns`; less, and true, where all are called or end.
    fn pause(&self, pause_ns: u64) -> bool {
        let mut gate = self.gate.lock();
        gate.awake -= 1;
        gate.paused += 1;
        self.update(&gate);
        let was_called = self.is_stopping()
            || !self.resume.wait_for(&mut gate, Duration::from_nanos(pause_ns)).timed_out();
        gate.paused -= 1;
        gate.awake += 1;
        self.update(&gate);
        was_called
    }

    /// The calling evictor has no work and waits for some for a moment; writes need not wake it.
    fn nap(&self) {
        self.napping.store(1, Ordering::Relaxed);
        self.pause(NAP_NS);
    }

    /// Whether an evictor beside so many writers would find a CPU.
    pub(super) fn has_room(&self, writers: u32) -> bool {
        writers < self.cpus
    }

    /// Returns at once while the awake evictors and the `writers` have a CPU each; else once there is one for the
    /// calling evictor, or it is to end. Whether it waited.
    fn await_room(&self, writers: impl Fn() -> u32) -> bool {
        if writers() + self.awake.load(Ordering::Relaxed) <= self.cpus {
            return false;
        }
        let mut gate = self.gate.lock();
        gate.awake -= 1;
        gate.paused += 1;
        self.update(&gate);
        while !self.is_stopping() && writers() + gate.awake + 1 > self.cpus {
            self.resume.wait_for(&mut gate, Duration::from_nanos(LOOK_AGAIN_NS));
        }
        gate.paused -= 1;
        gate.awake += 1;
        self.update(&gate);
        true
    }

    /// Waits until nobody is awake, napping or about to wake.
    #[cfg(all(test, not(feature = "loom")))]
    pub(super) fn await_all_asleep(&self) {
        loop {
            let gate = self.gate.lock();
            if gate.awake + gate.paused + gate.woken == 0 {
                return;
            }
            drop(gate);
            std::thread::yield_now();
        }
    }

    /// Waits until one pauses.
    #[cfg(all(test, not(feature = "loom")))]
    pub(super) fn await_paused(&self) {
        while self.gate.lock().paused == 0 {
            std::thread::yield_now();
        }
    }

    fn update(&self, gate: &Gate) {
        self.call.store(gate.needs_call().into(), Ordering::Release);
        self.awake.store(gate.awake, Ordering::Relaxed);
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed) == 1
    }
}

/// The threads of one tier.
pub(super) struct Pool {
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Pool {
    /// Starts `evictors` threads.
    ///
    /// # Errors
    /// The system refuses another thread; those already started have ended.
    pub(super) fn start(core: &Arc<Core>, evictors: u32) -> Result<Self> {
        let pool = Self { threads: Mutex::new(Vec::with_capacity(evictors as usize)) };
        for number in 0..evictors {
            let core_of_thread = core.clone();
            let thread = std::thread::Builder::new()
                .name(format!("evictor-{number}"))
                .spawn(move || core_of_thread.evict(number));
            match thread {
                Ok(thread) => pool.threads.lock().push(thread),
                Err(error) => {
                    pool.stop(&core.bell);
                    let context = format!("cannot start evictor {number} of {evictors}");
                    return Err(DeviceError::with_source(DeviceErrorKind::Io, context, error));
                }
            }
        }
        Ok(pool)
    }

    /// Number of threads that run.
    pub(super) fn threads(&self) -> u32 {
        u32::try_from(self.threads.lock().len()).unwrap_or(u32::MAX)
    }

    /// Ends the threads, once each has finished the block it is writing.
    pub(super) fn stop(&self, bell: &Doorbell) {
        bell.stopping.store(1, Ordering::Relaxed);
        bell.ring_all();
        for thread in self.threads.lock().drain(..) {
            // An evictor that panicked has already said why.
            let _ = thread.join();
        }
    }
}

impl Core {
    /// The life of evictor `number`.
    fn evict(&self, number: u32) {
        let mut cursor = number as usize * self.sets.count() / 2;
        let mut share = CpuShare::new(cpus());
        let mut scratch = Scratch::default();
        while self.bell.sleep(|| self.sets.ready.any()) {
            share.begin_window();
            while let Some(set) = self.await_work(cursor, &mut share) {
                if self.makes_room() && self.bell.await_room(|| self.writers()) {
                    share.begin_window();
                    continue;
                }
                cursor = set + 1;
                self.evict_from(set, &mut scratch);
                // A writer whose CPU this took gets it back now, not at the end of a time slice.
                std::thread::yield_now();
                self.adapt(&mut share);
            }
        }
    }

    /// Writes back some of what set `number` holds.
    pub(super) fn evict_from(&self, number: usize, scratch: &mut Scratch) {
        // What fails is kept and reported elsewhere (`faults`).
        self.drain(number, u64::MAX, BATCH_BLOCKS, scratch);
    }

    /// Evictors leave the CPUs to writers: where those would go below at memory speed themselves, and unless the
    /// cache should become empty, which ends.
    fn makes_room(&self) -> bool {
        self.is_below_memory && self.costs.worth() != Worth::Bypass
    }

    /// The next set with work. None where there was none for a while, or the evictor is to end.
    fn await_work(&self, cursor: usize, share: &mut CpuShare) -> Option<usize> {
        for _ in 0..NAPS {
            let found = self.look_on(cursor);
            if found.is_some() || self.bell.is_stopping() {
                return found.filter(|_| !self.bell.is_stopping());
            }
            self.bell.nap();
            share.begin_window();
        }
        None
    }

    /// The next set with work, where some comes within [`SPIN_NS`].
    fn look_on(&self, cursor: usize) -> Option<usize> {
        let mut until_ns = None;
        loop {
            let found = self.sets.ready.next_from(cursor);
            if found.is_some() {
                return found;
            }
            let now = now_ns();
            if now > *until_ns.get_or_insert(now + SPIN_NS) {
                return None;
            }
            for _ in 0..16 {
                std::hint::spin_loop();
            }
        }
    }

    /// At the end of a window: pauses where the CPUs are needed, calls for help where they are not.
    fn adapt(&self, share: &mut CpuShare) {
        match share.verdict() {
            Some(Verdict::Alone { windows })
                if windows >= WINDOWS_ALONE && self.used_slots() > self.slots.count() / 4 =>
            {
                self.bell.wake_one();
            }
            Some(Verdict::Alone { .. }) | None => {}
            Some(Verdict::Crowded { pause_ns }) => {
                let began_ns = (now_ns(), process_cpu_ns());
                self.pause(pause_ns);
                let real_ns = now_ns().saturating_sub(began_ns.0);
                share.paused(real_ns, process_cpu_ns().saturating_sub(began_ns.1));
                share.begin_window();
            }
        }
    }

    /// Leaves the CPU to others for `pause_ns`, or until that gives them nothing.
    pub(super) fn pause(&self, pause_ns: u64) {
        let until_ns = now_ns() + pause_ns;
        loop {
            let left_ns = until_ns.saturating_sub(now_ns());
            if left_ns == 0 || self.bell.pause(left_ns.min(LOOK_UP_NS)) || self.writers_rest() {
                return;
            }
        }
    }

    /// Whether nobody writes for a moment.
    fn writers_rest(&self) -> bool {
        let until_ns = now_ns() + GLANCE_NS;
        // At least one look, however long this thread was kept from it.
        loop {
            if self.writers() > 0 {
                return false;
            }
            if now_ns() >= until_ns {
                return true;
            }
        }
    }
}

/// Threads of this process that can run at once.
pub(super) fn cpus() -> u32 {
    std::thread::available_parallelism()
        .map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX))
}

/// What a window told.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// The evictor had a CPU to itself, for so many windows in a row.
    Alone { windows: u32 },
    /// It had to wait for one.
    Crowded { pause_ns: u64 },
}

/// Measures whether a thread gets the CPU whenever it wants to run: its CPU time against real time.
struct CpuShare {
    cpus: u32,
    /// When the window began: real time, and CPU time of the thread.
    window_ns: (u64, u64),
    next_pause_ns: u64,
    longest_pause_ns: u64,
    windows_alone: u32,
}

impl CpuShare {
    fn new(cpus: u32) -> Self {
        Self {
            cpus,
            window_ns: (0, 0),
            next_pause_ns: SHORTEST_PAUSE_NS,
            longest_pause_ns: LONGEST_PAUSE_NS,
            windows_alone: 0,
        }
    }

    fn begin_window(&mut self) {
        self.window_ns = (now_ns(), thread_cpu_ns());
    }

    /// The verdict of the window, where it is over; the next one begins.
    fn verdict(&mut self) -> Option<Verdict> {
        let real_ns = now_ns().saturating_sub(self.window_ns.0);
        if real_ns < WINDOW_NS {
            return None;
        }
        let waited_ns = real_ns.saturating_sub(thread_cpu_ns().saturating_sub(self.window_ns.1));
        self.begin_window();
        Some(self.judge(real_ns, waited_ns))
    }

    /// During a pause of `real_ns` all threads of this process ran for `process_ns`.
    fn paused(&mut self, real_ns: u64, process_ns: u64) {
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

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn an_evictor_that_waits_for_a_cpu_pauses_ever_longer_and_recovers() {
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

    #[test]
    fn a_call_is_needed_only_where_all_sleep() {
        let gate = |awake, asleep, paused, woken| Gate { awake, asleep, paused, woken };
        assert!(gate(0, 2, 0, 0).needs_call());
        for other in [gate(1, 1, 0, 0), gate(0, 1, 1, 0), gate(0, 2, 0, 1), gate(0, 0, 0, 0)] {
            assert!(!other.needs_call());
        }
    }
}
