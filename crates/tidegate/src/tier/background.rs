//! Background work of a tier, in steps: run by threads in production, by a simulator's scheduler in
//! tests.
//!
//! A worker is awake, idle (asleep until it is woken, perhaps with a timeout) or resting (asleep
//! until a time). Invariants:
//!
//! 1. An idle worker sleeps without a timeout, unless it dozes until known work: a tier without
//!    work costs no CPU.
//! 2. No wake-up is lost. A caller makes work visible and then loads `call`. A worker that turns
//!    idle sets `call` and then looks for work. So at least one of the two sees the other, provided
//!    that the tier orders the caller's store before its load of `call`. Each tier says how.
//! 3. While no worker is idle, or some worker will look for work itself, a caller only loads
//!    `call`.
//!
//! Entry points: a tier implements [`Work`], its requests call `Waker`, `Workers` are the threads.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::clock::now_ns;
use crate::sync::lock::{Condvar, Mutex};
use crate::sync::machine::Thread;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, store_before_loads};

/// The action of a worker after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Takes the next step at once.
    Again,
    /// Sleeps until `wake_at_ns` on the clock of tiers. Only an alarm, and no new work, wakes the
    /// worker earlier. Without a time, sleeps until work or an alarm wakes the worker.
    Sleep {
        /// When the worker wakes by itself; `None` if it has nothing to do before it is woken.
        wake_at_ns: Option<u64>,
    },
    /// Sleeps at most until `wake_at_ns`. New work wakes the worker earlier.
    Doze {
        /// When the worker wakes by itself.
        wake_at_ns: u64,
    },
    /// Sleeps like `Sleep` if more than `awake_max` workers, this one included, are awake.
    /// Otherwise takes the next step at once. Of workers that yield together, `awake_max` stay
    /// awake.
    Yield {
        /// The number of workers that should be awake at most.
        awake_max: u32,
        /// When the worker wakes by itself.
        wake_at_ns: u64,
    },
    /// Ends.
    Stop,
}

impl Step {
    /// Sleeps until it is woken.
    pub(crate) const IDLE: Self = Self::Sleep { wake_at_ns: None };

    /// Sleeps for `rest_ns`, unless all workers are woken earlier.
    pub(crate) fn rest(rest_ns: u64) -> Self {
        Self::Sleep { wake_at_ns: Some(now_ns().saturating_add(rest_ns)) }
    }
}

/// The work of one worker.
pub trait Work: Send {
    /// Does a piece of work, short enough for a stop to await its end.
    fn step(&mut self) -> Step;

    /// Returns whether a step would find work. A worker that is about to turn idle calls this.
    fn has_work(&self) -> bool;
}

/// Wakes the workers of one tier.
pub(crate) struct Waker {
    /// 1 while a caller with work has to wake a worker.
    call: AtomicU64,
    /// How often all workers were woken. A worker that was awake then does not rest after its step.
    alarms: AtomicU64,
    /// A copy of `gate.awake`, for loads without the lock.
    awake: AtomicU32,
    /// Whether threads run the work, and have not been told to stop.
    running: AtomicBool,
    gate: Mutex<Gate>,
    idle: Condvar,
    resting: Condvar,
}

struct Gate {
    awake: u32,
    idle: u32,
    resting: u32,
    /// Idle workers that were woken and have not noticed that yet.
    woken: u32,
}

impl Gate {
    fn needs_call(&self) -> bool {
        self.awake == 0 && self.resting == 0 && self.woken == 0 && self.idle > 0
    }
}

impl Waker {
    /// Returns a waker for `workers` awake threads: 0 if a simulator or requests do the work.
    pub(crate) fn new(workers: u32) -> Self {
        Self {
            call: AtomicU64::new(0),
            alarms: AtomicU64::new(0),
            awake: AtomicU32::new(workers),
            running: AtomicBool::new(workers > 0),
            gate: Mutex::new(Gate { awake: workers, idle: 0, resting: 0, woken: 0 }),
            idle: Condvar::new(),
            resting: Condvar::new(),
        }
    }

    /// Wakes a worker after work was made visible, unless a worker is awake or will wake by itself.
    #[inline]
    pub(crate) fn wake(&self) {
        if self.call.load(Ordering::SeqCst) == 1 {
            self.wake_another();
        }
    }

    /// Returns whether a caller with work has to wake a worker: a cheap test before a costly one.
    #[inline]
    pub(crate) fn needs_call(&self) -> bool {
        self.call.load(Ordering::SeqCst) == 1
    }

    /// Wakes one more idle worker, unless some worker rests, which leaves the CPU to other threads.
    pub(crate) fn wake_another(&self) {
        let mut gate = self.gate.lock();
        if gate.resting == 0 && gate.idle > gate.woken {
            gate.woken += 1;
            self.idle.notify_one();
            self.publish(&gate);
        }
    }

    /// Wakes resting workers.
    pub(crate) fn wake_resting(&self) {
        let _gate = self.gate.lock();
        self.resting.notify_all();
    }

    /// Wakes all workers. Workers that are awake take one more step before they rest.
    pub(crate) fn wake_all(&self) {
        let mut gate = self.gate.lock();
        self.alarms.fetch_add(1, Ordering::SeqCst);
        gate.woken = gate.idle;
        self.idle.notify_all();
        self.resting.notify_all();
        self.publish(&gate);
    }

    /// Returns how often all workers were woken.
    pub(crate) fn alarms(&self) -> u64 {
        self.alarms.load(Ordering::SeqCst)
    }

    /// Returns the approximate number of workers that are awake.
    pub(crate) fn awake(&self) -> u32 {
        self.awake.load(Ordering::Relaxed)
    }

    /// Returns whether threads do the work. Turns `false` as soon as they are told to stop.
    pub(crate) fn is_running(&self) -> bool {
        self.running.load(Ordering::SeqCst)
    }

    fn sleep_idle(&self, work: &impl Work, wake_at_ns: Option<u64>) {
        let mut gate = self.gate.lock();
        gate.awake -= 1;
        gate.idle += 1;
        self.publish(&gate);
        // After `call` was set: invariant 2.
        if work.has_work() {
            gate.woken += 1;
        }
        while gate.woken == 0 && self.is_running() {
            let Some(wake_at_ns) = wake_at_ns else {
                self.idle.wait(&mut gate);
                continue;
            };
            let left = Duration::from_nanos(wake_at_ns.saturating_sub(now_ns()));
            if !self.idle.wait_for(&mut gate, left) {
                break;
            }
        }
        gate.woken = gate.woken.saturating_sub(1);
        gate.idle -= 1;
        gate.awake += 1;
        self.publish(&gate);
    }

    /// Sleeps until `wake_at_ns`, unless at most `awake_max` workers are awake. The lock under
    /// which this worker stops counting as awake also covers the check.
    fn sleep_until(&self, alarms: u64, awake_max: u32, wake_at_ns: u64) {
        let mut gate = self.gate.lock();
        let rest_ns = wake_at_ns.saturating_sub(now_ns());
        let is_needed = gate.awake <= awake_max;
        if is_needed || rest_ns == 0 || self.alarms() != alarms || !self.is_running() {
            return;
        }
        gate.awake -= 1;
        gate.resting += 1;
        self.publish(&gate);
        self.resting.wait_for(&mut gate, Duration::from_nanos(rest_ns));
        gate.resting -= 1;
        gate.awake += 1;
        self.publish(&gate);
    }

    fn publish(&self, gate: &Gate) {
        store_before_loads(&self.call, gate.needs_call().into());
        self.awake.store(gate.awake, Ordering::Relaxed);
    }

    /// Notes that a worker ended.
    fn leave(&self) {
        let mut gate = self.gate.lock();
        gate.awake -= 1;
        self.publish(&gate);
    }

    /// Waits until every worker is idle.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn await_all_idle(&self) {
        self.await_gate(|gate| gate.awake + gate.resting + gate.woken == 0);
    }

    /// Waits until a worker rests.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn await_resting(&self) {
        self.await_gate(|gate| gate.resting > 0);
    }

    #[cfg(all(test, not(loom)))]
    fn await_gate(&self, is_reached: impl Fn(&Gate) -> bool) {
        while !is_reached(&self.gate.lock()) {
            std::thread::yield_now();
        }
    }
}

/// The threads that run the work of one tier.
pub(crate) struct Workers {
    waker: Arc<Waker>,
    threads: Mutex<Vec<Thread>>,
}

impl Workers {
    /// Starts a thread, named `name` and a number, for each of `works`, as many as `waker` is for.
    ///
    /// # Errors
    /// Fails if the system refuses another thread. Earlier threads have ended then.
    pub(crate) fn start(
        name: &str,
        waker: Arc<Waker>,
        works: impl IntoIterator<Item = impl Work + 'static>,
    ) -> io::Result<Self> {
        let workers = Self { waker, threads: Mutex::default() };
        for (number, work) in works.into_iter().enumerate() {
            let waker = Arc::clone(&workers.waker);
            match Thread::spawn(format!("{name}-{number}"), move || run(work, &waker)) {
                Ok(thread) => workers.threads.lock().push(thread),
                Err(error) => {
                    workers.stop();
                    return Err(error);
                }
            }
        }
        Ok(workers)
    }

    /// Returns the number of running threads.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.threads.lock().len()).unwrap_or(u32::MAX)
    }

    /// Ends the threads and waits for that. Each ends after its step.
    pub(crate) fn stop(&self) {
        let threads = self.dismiss();
        // A worker may hold the last reference to its tier, and so stop the tier itself.
        threads.into_iter().filter(|it| !it.is_current()).for_each(Thread::join);
    }

    /// Tells the threads to end, and does not wait. Each ends after its step, or with the process.
    pub(crate) fn abandon(&self) {
        drop(self.dismiss());
    }

    /// Tells the threads to end, and returns them.
    fn dismiss(&self) -> Vec<Thread> {
        self.waker.running.store(false, Ordering::SeqCst);
        self.waker.wake_all();
        std::mem::take(&mut *self.threads.lock())
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Runs the steps of a worker until it ends.
fn run(mut work: impl Work, waker: &Waker) {
    struct Leave<'a>(&'a Waker);
    impl Drop for Leave<'_> {
        fn drop(&mut self) {
            self.0.leave();
        }
    }
    // Runs after a panic too, so that other workers are woken in place of this one.
    let _leave = Leave(waker);
    while waker.is_running() {
        let alarms = waker.alarms();
        match work.step() {
            Step::Again => {}
            Step::Sleep { wake_at_ns: Some(at_ns) } => waker.sleep_until(alarms, 0, at_ns),
            Step::Yield { awake_max, wake_at_ns } => {
                waker.sleep_until(alarms, awake_max, wake_at_ns);
            }
            Step::Sleep { wake_at_ns: None } => waker.sleep_idle(&work, None),
            Step::Doze { wake_at_ns } => waker.sleep_idle(&work, Some(wake_at_ns)),
            Step::Stop => return,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Returns a time a day from now. The clock of tiers may begin days after zero.
    fn in_a_day_ns() -> u64 {
        now_ns() + 86_400_000_000_000
    }

    /// Sends the numbers of its inbox on, one by one.
    struct Courier {
        inbox: Arc<Mutex<Vec<u32>>>,
        outbox: Sender<u32>,
        when_empty: Step,
    }

    impl Work for Courier {
        fn step(&mut self) -> Step {
            let next = self.inbox.lock().pop();
            next.map_or(self.when_empty, |number| {
                self.outbox.send(number).unwrap();
                Step::Again
            })
        }

        fn has_work(&self) -> bool {
            !self.inbox.lock().is_empty()
        }
    }

    struct Office {
        waker: Arc<Waker>,
        inbox: Arc<Mutex<Vec<u32>>>,
        delivered: Receiver<u32>,
        workers: Workers,
    }

    fn office(count: u32, when_empty: Step) -> Office {
        let (waker, inbox) = (Arc::new(Waker::new(count)), Arc::new(Mutex::new(Vec::new())));
        let (outbox, delivered) = channel();
        let courier = |_| Courier { inbox: Arc::clone(&inbox), outbox: outbox.clone(), when_empty };
        let couriers: Vec<_> = (0..count).map(courier).collect();
        let workers = Workers::start("courier", Arc::clone(&waker), couriers).unwrap();
        Office { waker, inbox, delivered, workers }
    }

    impl Office {
        fn send(&self, number: u32) {
            self.inbox.lock().push(number);
            self.waker.wake();
        }
    }

    #[test]
    fn idle_workers_do_all_work_that_they_are_woken_for() {
        let office = office(3, Step::IDLE);
        for round in 0..200 {
            if round % 2 == 0 {
                office.waker.await_all_idle();
            }
            office.send(round);
            assert_eq!(office.delivered.recv().unwrap(), round);
        }
        assert_eq!(office.workers.count(), 3);
    }

    #[test]
    fn a_resting_worker_is_woken_by_an_alarm_only() {
        let office = office(1, Step::Sleep { wake_at_ns: Some(in_a_day_ns()) });
        office.waker.await_resting();
        office.send(7);
        assert!(office.delivered.try_recv().is_err(), "a rest is not ended by work");
        office.waker.wake_all();
        assert_eq!(office.delivered.recv().unwrap(), 7);
        office.waker.await_resting();
        office.workers.stop();
        assert!(!office.waker.is_running());
        assert_eq!(office.workers.count(), 0);
    }

    #[test]
    fn a_dozing_worker_is_woken_by_work_and_by_its_time() {
        let office = office(1, Step::Doze { wake_at_ns: in_a_day_ns() });
        for round in 0..50 {
            office.waker.await_all_idle();
            office.send(round);
            assert_eq!(office.delivered.recv().unwrap(), round);
        }
        let waker = Waker::new(1);
        let (inbox, outbox) = (Arc::default(), channel().0);
        // Else this would not return.
        waker.sleep_idle(&Courier { inbox, outbox, when_empty: Step::IDLE }, Some(now_ns() + 1));
        assert_eq!(waker.awake(), 1);
    }

    /// A worker in the middle of its step is not waited for, and an idle one is woken to end.
    #[test]
    fn workers_that_are_abandoned_end_by_themselves() {
        struct Blocked(Sender<()>, Receiver<()>);
        impl Work for Blocked {
            fn step(&mut self) -> Step {
                self.0.send(()).unwrap();
                // Until the test drops the other end.
                let _ = self.1.recv();
                Step::IDLE
            }
            fn has_work(&self) -> bool {
                false
            }
        }
        let (waker, (begun, has_begun)) = (Arc::new(Waker::new(1)), channel());
        let (end, ends) = channel();
        let workers =
            Workers::start("blocked", Arc::clone(&waker), [Blocked(begun, ends)]).unwrap();
        has_begun.recv().unwrap();
        workers.abandon();
        assert!(!waker.is_running());
        drop(workers);
        assert_eq!(waker.awake(), 1, "it is in its step");
        drop(end);
        waker.await_gate(|gate| gate.awake == 0);
        let office = office(2, Step::IDLE);
        office.waker.await_all_idle();
        office.workers.abandon();
        office.waker.await_gate(|gate| gate.awake + gate.idle == 0);
    }

    #[test]
    fn an_alarm_during_a_step_makes_the_worker_step_again() {
        let waker = Waker::new(1);
        let alarms = waker.alarms();
        waker.wake_all();
        // Else this would take a day.
        waker.sleep_until(alarms, 0, in_a_day_ns());
        assert_eq!(waker.awake(), 1);
    }

    /// Two workers find one worker too many. If both slept, no work would be done for a day.
    #[test]
    fn of_workers_that_yield_together_as_many_stay_awake_as_may() {
        struct Yielding(Option<Step>, Sender<()>);
        impl Work for Yielding {
            fn step(&mut self) -> Step {
                self.0.take().unwrap_or_else(|| {
                    self.1.send(()).unwrap();
                    Step::Stop
                })
            }
            fn has_work(&self) -> bool {
                false
            }
        }
        let waker = Arc::new(Waker::new(2));
        let (stays, stayed) = channel();
        let step = Step::Yield { awake_max: 1, wake_at_ns: in_a_day_ns() };
        let yielding = |_| Yielding(Some(step), stays.clone());
        let workers = Workers::start("yielding", Arc::clone(&waker), (0..2).map(yielding)).unwrap();
        stayed.recv().unwrap();
        waker.await_resting();
        assert!(stayed.try_recv().is_err(), "the other one sleeps");
        workers.stop();
    }

    #[test]
    fn a_call_is_needed_only_where_all_workers_are_idle() {
        let gate = |awake, idle, resting, woken| Gate { awake, idle, resting, woken };
        assert!(gate(0, 2, 0, 0).needs_call());
        for other in [gate(1, 1, 0, 0), gate(0, 1, 1, 0), gate(0, 2, 0, 1), gate(0, 0, 0, 0)] {
            assert!(!other.needs_call());
        }
    }

    #[test]
    fn work_that_ends_or_panics_ends_its_thread() {
        struct Ending(bool);
        impl Work for Ending {
            fn step(&mut self) -> Step {
                assert!(!self.0, "on purpose");
                Step::Stop
            }
            fn has_work(&self) -> bool {
                false
            }
        }
        let waker = Arc::new(Waker::new(2));
        let workers =
            Workers::start("ending", Arc::clone(&waker), [Ending(false), Ending(true)]).unwrap();
        waker.await_gate(|gate| gate.awake == 0);
        workers.stop();
    }
}
