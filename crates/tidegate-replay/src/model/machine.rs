//! A machine in virtual time that runs the shipped tiers.
//!
//! Each thread of the modelled machine is a coroutine with its own stack, on one thread of the
//! system. It runs the unmodified code of the tiers until that code calls its machine (see
//! [`tidegate::machine`]) or touches persistent memory. Virtual time passes there, and another
//! coroutine may run next. So a run depends only on its inputs, and a switch needs no system call.
//!
//! Map: `schedule` decides which thread runs when; `medium` and `costs` determine how long
//! operations take; this module has locks, events, threads and coroutines.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use generator::{Generator, Gn};
use tidegate::machine::{Machine, enter};
use tidegate::pmem::MediaModel;

use super::costs::{Costs, transfer_ns};
use super::medium::Medium;
use super::schedule::{Rules, Schedule, ThreadId};

/// Words of a coroutine's stack: 256 KiB of address space; the system allocates the pages in use.
const STACK_WORDS: usize = 32 << 10;
/// Cost of one turn of a loop that waits for another thread.
const RELAX_NS: u64 = 50;
/// Cost of one turn of a loop that polls another thread, with 16 pause instructions.
const PAUSE_NS: u64 = 400;
/// Time that a thread spins on a lock before it sleeps.
const LOOK_NS: u64 = 2_000;
/// Cost of a call that yields the CPU.
const YIELD_NS: u64 = 300;

type Body = Box<dyn FnOnce() + Send>;
/// Coroutines by thread; `None` for a thread that has not run yet or has ended.
type Coroutines = Vec<Option<Generator<'static, (), ()>>>;
/// The thread that was spawned first.
const FIRST: ThreadId = 0;

/// The error of a machine whose threads all wait for each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, thiserror::Error)]
#[error("all threads of the modelled machine wait for each other after {at_ns} ns")]
pub(crate) struct Deadlock {
    /// The virtual time of the deadlock.
    at_ns: u64,
}

/// The modelled machine.
struct Modelled {
    costs: Costs,
    cpus: u32,
    state: RefCell<State>,
}

struct State {
    schedule: Schedule,
    medium: Medium,
    locks: HashMap<usize, Lock>,
    events: HashMap<usize, VecDeque<Waiter>>,
    joiners: Vec<Vec<ThreadId>>,
    /// Work of the running thread that is not yet spent as virtual time.
    debt_ns: u64,
    /// Spawned threads that have not run yet.
    bodies: Vec<(ThreadId, Body)>,
}

#[derive(Default)]
struct Lock {
    is_held: bool,
    last_cpu: Option<u32>,
    waiters: VecDeque<LockWaiter>,
}

/// A thread that waits for a lock, spinning first and then asleep.
struct LockWaiter {
    thread: ThreadId,
    asleep_from_ns: u64,
}

/// A thread that waits for an event, and the lock that it takes afterwards.
struct Waiter {
    thread: ThreadId,
    lock: usize,
}

thread_local! {
    static PRESENT: RefCell<Option<Rc<Modelled>>> = const { RefCell::new(None) };
}

/// Runs `main` as the first thread of a machine of `cpus` CPUs, and all threads that it starts,
/// until they end. The calling thread must not be inside a model.
///
/// # Errors
/// [`Deadlock`] if all remaining threads wait for each other.
///
/// # Panics
/// If a thread of the machine panics.
pub(super) fn run<T: Send + 'static>(
    costs: &Costs,
    media: MediaModel,
    cpus: u32,
    main: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Deadlock> {
    let mut session = Session::new(costs, media, cpus);
    let (value, _) = session.call(main)?;
    session.end()?;
    Ok(value)
}

/// Unregisters the machine when dropped.
struct Left;

impl Drop for Left {
    fn drop(&mut self) {
        PRESENT.replace(None);
    }
}

fn present() -> Option<Rc<Modelled>> {
    PRESENT.with_borrow(Clone::clone)
}

/// Spends `ns` of work on the calling thread of the machine.
pub(crate) fn spend(ns: u64) {
    if let Some(machine) = present() {
        machine.pass(ns);
    }
}

/// Returns the virtual time; 0 outside of a machine.
pub(super) fn now_ns() -> u64 {
    present().map_or(0, |machine| machine.state.borrow().schedule.now_ns())
}

/// Waits for an event that never occurs.
#[cfg(test)]
pub(super) fn wait_for_ever() {
    if let Some(machine) = present() {
        machine.wait(1, 2, None);
    }
}

/// A handle to a thread of the machine.
pub(super) struct JoinHandle(u64);

impl JoinHandle {
    /// Waits until the thread has ended.
    pub(super) fn join(self) {
        if let Some(machine) = present() {
            machine.join(self.0);
        }
    }
}

/// Starts a thread on the machine of the calling thread.
///
/// # Panics
/// If the caller is not a thread of a machine.
pub(super) fn spawn(body: impl FnOnce() + Send + 'static) -> JoinHandle {
    let machine = present().expect("called by a thread of a machine");
    JoinHandle(machine.spawn(Box::new(body)))
}

/// A machine whose first thread runs the caller's requests one by one. The machine's time stops
/// between requests.
pub(crate) struct Session {
    machine: Rc<Modelled>,
    coroutines: Coroutines,
    desk: Arc<Mutex<Desk>>,
}

/// The request for a session's first thread.
#[derive(Default)]
struct Desk {
    request: Option<Body>,
    /// The first thread has finished its requests, and waits.
    is_idle: bool,
    is_closed: bool,
}

impl Session {
    /// Returns a machine of `cpus` CPUs.
    pub(crate) fn new(costs: &Costs, media: MediaModel, cpus: u32) -> Self {
        let machine = Rc::new(Modelled::new(costs, media, cpus));
        let desk: Arc<Mutex<Desk>> = Arc::default();
        let for_first = Arc::clone(&desk);
        machine.spawn(Box::new(move || serve(&for_first)));
        Self { machine, coroutines: Vec::new(), desk }
    }

    /// Runs `request` on the first thread, while the other threads continue. Returns the result and
    /// the virtual time of the request.
    ///
    /// # Errors
    /// [`Deadlock`] if the request waits for an event that no thread can cause.
    pub(crate) fn call<T: Send + 'static>(
        &mut self,
        request: impl FnOnce() -> T + Send + 'static,
    ) -> Result<(T, u64), Deadlock> {
        let result = Arc::new(Mutex::new(None));
        let for_request = Arc::clone(&result);
        let begun_ns = self.machine.state.borrow().schedule.now_ns();
        let keep = move || {
            let value = request();
            *lock(&for_request) = Some(value);
        };
        lock(&self.desk).request = Some(Box::new(keep));
        self.play();
        let now_ns = self.machine.state.borrow().schedule.now_ns();
        let value = lock(&result).take();
        let value = value.ok_or(Deadlock { at_ns: now_ns })?;
        Ok((value, now_ns - begun_ns))
    }

    /// Runs all threads until they end.
    fn end(&mut self) -> Result<(), Deadlock> {
        lock(&self.desk).is_closed = true;
        self.play();
        if self.coroutines.iter().all(Option::is_none) {
            return Ok(());
        }
        Err(Deadlock { at_ns: self.machine.state.borrow().schedule.now_ns() })
    }

    /// Runs the machine until the first thread is idle or has ended.
    fn play(&mut self) {
        let _left = Left;
        PRESENT.replace(Some(Rc::clone(&self.machine)));
        let _entered = enter(Rc::clone(&self.machine) as Rc<dyn Machine>);
        // Only an idle thread is woken here. If a request blocks, another thread wakes it.
        if std::mem::take(&mut lock(&self.desk).is_idle) {
            self.machine.state.borrow_mut().schedule.wake(FIRST, 0);
        }
        let desk = Arc::clone(&self.desk);
        self.machine.play(&mut self.coroutines, || lock(&desk).is_idle);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // No caller waits for threads that remain at the end of a session.
            let _ = self.end();
        }
        // Deadlocked threads cannot be unwound, because their locks are held.
        if self.coroutines.iter().any(Option::is_some) {
            std::mem::forget(std::mem::take(&mut self.coroutines));
        }
    }
}

/// Runs the requests of a session on its first thread.
fn serve(desk: &Mutex<Desk>) {
    loop {
        let request = lock(desk).request.take();
        match request {
            Some(request) => request(),
            None if lock(desk).is_closed => return,
            None => {
                // Unspent work of the request belongs to its time.
                spend(0);
                lock(desk).is_idle = true;
                if let Some(machine) = present() {
                    machine.wait_for(None, |_, _| {});
                }
            }
        }
    }
}

/// Locks a mutex that no coroutine holds across a switch, and that is therefore free.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Modelled {
    fn new(costs: &Costs, media: MediaModel, cpus: u32) -> Self {
        let Costs { switch_ns, slice_ns, .. } = *costs;
        let rules = Rules { switch_ns, slice_ns, granularity_ns: slice_ns / 3 };
        let state = State {
            schedule: Schedule::new(cpus, rules),
            medium: Medium::new(media, costs),
            locks: HashMap::new(),
            events: HashMap::new(),
            joiners: Vec::new(),
            debt_ns: 0,
            bodies: Vec::new(),
        };
        Self { costs: costs.clone(), cpus, state: RefCell::new(state) }
    }

    /// Runs threads until `is_over`, or until no thread can run: all have ended or deadlocked.
    fn play(&self, coroutines: &mut Coroutines, is_over: impl Fn() -> bool) {
        while !is_over() {
            let next = self.state.borrow_mut().schedule.next();
            for (thread, body) in std::mem::take(&mut self.state.borrow_mut().bodies) {
                coroutines.resize_with(coroutines.len().max(thread + 1), || None);
                coroutines[thread] = Some(Gn::<()>::new_opt(STACK_WORDS, body));
            }
            let Some(thread) = next else { return };
            let coroutine = coroutines[thread].as_mut().expect("a thread that runs has not ended");
            // A panic of the thread propagates here.
            coroutine.resume();
            if coroutine.is_done() {
                coroutines[thread] = None;
                self.end(thread);
            }
        }
    }

    fn end(&self, thread: ThreadId) {
        let mut state = self.state.borrow_mut();
        state.schedule.end();
        for joiner in std::mem::take(&mut state.joiners[thread]) {
            state.schedule.wake(joiner, self.costs.wake_latency_ns);
        }
    }

    /// Spends `ns` of work on the running thread.
    fn pass(&self, ns: u64) {
        let mut state = self.state.borrow_mut();
        let ns = ns + std::mem::take(&mut state.debt_ns);
        let goes_on = ns == 0 || std::thread::panicking() || state.schedule.spend(ns);
        drop(state);
        if !goes_on {
            switch();
        }
    }

    /// Blocks the running thread, after `prepare` has registered it with its waker. Returns `false`
    /// if the deadline ended the wait.
    fn wait_for(&self, until_ns: Option<u64>, prepare: impl FnOnce(&mut State, ThreadId)) -> bool {
        let mut state = self.state.borrow_mut();
        let Some(waiter) = state.schedule.wait(until_ns) else { return true };
        // The thread spends the cost of its last wake-ups while its CPU turns idle.
        state.debt_ns = 0;
        prepare(&mut state, waiter);
        drop(state);
        switch();
        !self.state.borrow().schedule.timed_out(waiter)
    }

    /// Wakes a sleeping thread, at the cost of the running thread.
    fn rouse(&self, state: &mut State, thread: ThreadId) {
        state.debt_ns += self.costs.wake_ns;
        state.schedule.wake(thread, self.costs.wake_latency_ns);
    }

    /// Wakes a notified thread if its lock is free, else queues it there, as `parking_lot` does.
    fn hand_to_lock(&self, state: &mut State, waiter: &Waiter, is_first: bool) {
        let lock = state.locks.entry(waiter.lock).or_default();
        if is_first && !lock.is_held {
            return self.rouse(state, waiter.thread);
        }
        lock.waiters.push_back(LockWaiter { thread: waiter.thread, asleep_from_ns: 0 });
        state.schedule.void_timer(waiter.thread);
    }

    fn with_medium(&self, time: impl FnOnce(&mut Medium, ThreadId, u64) -> u64) {
        let mut state = self.state.borrow_mut();
        let Some(thread) = state.schedule.running() else { return };
        let now_ns = state.schedule.now_ns();
        let ns = time(&mut state.medium, thread, now_ns);
        drop(state);
        self.pass(ns);
    }
}

/// Suspends the running coroutine until it is resumed.
#[allow(deprecated, reason = "the scoped form needs a handle in each frame of the tiers")]
fn switch() {
    generator::yield_with(());
}

impl Machine for Modelled {
    fn cpus(&self) -> u32 {
        self.cpus
    }

    fn now_ns(&self) -> u64 {
        self.pass(self.costs.clock_ns);
        self.state.borrow().schedule.now_ns()
    }

    fn thread_cpu_ns(&self) -> u64 {
        self.pass(self.costs.clock_ns);
        let state = self.state.borrow();
        state.schedule.running().map_or(0, |thread| state.schedule.cpu_ns(thread))
    }

    fn process_cpu_ns(&self) -> u64 {
        self.pass(self.costs.clock_ns);
        self.state.borrow().schedule.busy_ns()
    }

    fn spawn(&self, body: Body) -> u64 {
        let mut state = self.state.borrow_mut();
        let thread = state.schedule.add();
        state.joiners.push(Vec::new());
        state.bodies.push((thread, body));
        state.schedule.wake(thread, self.costs.wake_latency_ns);
        thread as u64
    }

    fn current(&self) -> u64 {
        self.state.borrow().schedule.running().map_or(u64::MAX, |thread| thread as u64)
    }

    fn join(&self, thread: u64) {
        let Ok(thread) = ThreadId::try_from(thread) else { return };
        if !self.state.borrow().schedule.has_ended(thread) {
            self.wait_for(None, |state, waiter| state.joiners[thread].push(waiter));
        }
    }

    fn yield_now(&self) {
        self.pass(YIELD_NS);
        let is_alone = self.state.borrow_mut().schedule.pass_on();
        if !is_alone {
            switch();
        }
    }

    fn await_unlock(&self, lock: usize) {
        self.wait_for(None, |state, thread| {
            let asleep_from_ns = state.schedule.now_ns() + LOOK_NS;
            let waiter = LockWaiter { thread, asleep_from_ns };
            state.locks.entry(lock).or_default().waiters.push_back(waiter);
        });
    }

    fn locked(&self, lock: usize) {
        let mut state = self.state.borrow_mut();
        let Some(thread) = state.schedule.running() else { return };
        let cpu = Some(state.schedule.cpu_of(thread));
        let lock = state.locks.entry(lock).or_default();
        lock.is_held = true;
        let last_cpu = std::mem::replace(&mut lock.last_cpu, cpu);
        drop(state);
        let Costs { lock_ns, handover_ns, section_ns, .. } = self.costs;
        self.pass(section_ns + if last_cpu == cpu { lock_ns } else { handover_ns });
    }

    fn unlocked(&self, lock: usize) {
        let mut state = self.state.borrow_mut();
        let Some(lock) = state.locks.get_mut(&lock) else { return };
        lock.is_held = false;
        match lock.waiters.pop_front() {
            Some(waiter) if waiter.asleep_from_ns <= state.schedule.now_ns() => {
                self.rouse(&mut state, waiter.thread);
            }
            // The waiter spends the handover of the lock when it takes the lock.
            Some(waiter) => state.schedule.wake(waiter.thread, 0),
            None => {}
        }
    }

    fn wait(&self, event: usize, lock: usize, until_ns: Option<u64>) -> bool {
        let in_time = self.wait_for(until_ns, |state, thread| {
            state.events.entry(event).or_default().push_back(Waiter { thread, lock });
        });
        if !in_time {
            let mut state = self.state.borrow_mut();
            let running = state.schedule.running();
            if let Some(waiters) = state.events.get_mut(&event) {
                waiters.retain(|waiter| Some(waiter.thread) != running);
            }
        }
        in_time
    }

    fn notify(&self, event: usize, all: bool) {
        let mut state = self.state.borrow_mut();
        let mut notified = 0;
        while all || notified == 0 {
            let waiters = state.events.get_mut(&event);
            let Some(waiter) = waiters.and_then(VecDeque::pop_front) else { break };
            // The wait of any other thread has timed out.
            if state.schedule.is_waiting(waiter.thread) {
                self.hand_to_lock(&mut state, &waiter, notified == 0);
                notified += 1;
            }
        }
    }

    fn pause(&self) {
        self.pass(PAUSE_NS);
    }

    fn copied(&self, bytes: usize) {
        self.pass(transfer_ns(bytes as u64, self.costs.dram_copy_bytes_per_s));
    }
}

/// Persistent memory of the machine: observes a region, and spends the modelled medium's time for
/// its operations.
pub(crate) struct ModelledMemory;

impl tidegate::pmem::Observer for ModelledMemory {
    fn store(&self, offset: u64, data: &[u8], non_temporal: bool) {
        let Some(machine) = present() else { return };
        if non_temporal {
            let len = data.len() as u64;
            machine
                .with_medium(|medium, thread, now_ns| medium.stream(thread, now_ns, offset, len));
        } else {
            machine.pass(machine.costs.word_store_ns);
        }
    }

    fn write_back(&self, offset: u64, len: u64) {
        const LINE_BYTES: u64 = 64;
        let Some(machine) = present() else { return };
        let first = offset / LINE_BYTES * LINE_BYTES;
        let bytes = (offset + len).next_multiple_of(LINE_BYTES) - first;
        let issue_ns = bytes / LINE_BYTES * machine.costs.write_back_ns;
        machine.with_medium(|medium, thread, now_ns| {
            medium.post(thread, now_ns, first, bytes).max(issue_ns)
        });
    }

    fn fence(&self) {
        if let Some(machine) = present() {
            machine.with_medium(Medium::fence);
        }
    }

    fn load(&self, offset: u64, len: u64) {
        const WORD_BYTES: u64 = 8;
        let Some(machine) = present() else { return };
        if len <= WORD_BYTES {
            machine.pass(machine.costs.word_load_ns);
        } else {
            machine.with_medium(|medium, _, now_ns| medium.read(now_ns, offset, len));
        }
    }

    fn relax(&self) {
        spend(RELAX_NS);
    }

    fn thread_ordinal(&self) -> usize {
        present().map_or(0, |machine| usize::try_from(machine.current()).unwrap_or(0))
    }
}
