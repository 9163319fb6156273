//! Schedules threads on CPUs in virtual time: which thread runs next, and when.
//!
//! A thread is on a CPU, ready (it waits for a CPU), waiting for another event, or ended. Rules:
//!
//! - A thread that becomes ready takes an idle CPU, preferably its last one, or else queues.
//! - The queue is ordered by virtual runtime, the CPU time of a thread, as in Linux's fair
//!   schedulers. A thread that slept is at most half a slice ahead of the other threads.
//! - A thread leaves its CPU to a queued thread when its slice is over, or when a woken thread is
//!   more than a granularity ahead of it.
//!
//! Invariants:
//! 1. Time never goes back. Of two events at one time, the one that was added first comes first, so
//!    that a run depends only on its inputs.
//! 2. A CPU is idle only while no thread is ready.
//! 3. Each thread on a CPU has exactly one pending step, except the running thread, which has none.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// A thread's number: its index in the order of creation.
pub(super) type ThreadId = usize;

/// The costs of scheduling, and the time that a thread keeps its CPU.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_field_names, reason = "the unit of a number is part of its name")]
pub(super) struct Rules {
    /// Switching a CPU from one thread to another.
    pub(super) switch_ns: u64,
    /// Time that a thread keeps its CPU while other threads are ready.
    pub(super) slice_ns: u64,
    /// Minimum lead in runtime for a woken thread to take the CPU of another thread.
    pub(super) granularity_ns: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    OnCpu,
    Ready,
    #[default]
    Waiting,
    Ended,
}

#[derive(Default)]
struct Thread {
    state: State,
    cpu: u32,
    cpu_ns: u64,
    runtime_ns: u64,
    slice_from_ns: u64,
    /// A woken thread should take this thread's CPU.
    is_preempted: bool,
    /// Number of wake-ups; voids the timer of an earlier wait.
    wakes: u64,
    timed_out: bool,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at_ns: u64,
    order: u64,
    thread: ThreadId,
    /// The wait that the event ends, or `None` for a step.
    timer_of: Option<u64>,
}

/// All threads and CPUs of a machine.
#[derive(Default)]
pub(super) struct Schedule {
    rules: Rules,
    now_ns: u64,
    order: u64,
    threads: Vec<Thread>,
    events: BinaryHeap<Reverse<Event>>,
    ready: BTreeSet<(u64, u64, ThreadId)>,
    idle_cpus: BTreeSet<u32>,
    /// The highest virtual runtime of a thread when it got a CPU; never decreases.
    floor_ns: u64,
    running: Option<ThreadId>,
}

impl Schedule {
    pub(super) fn new(cpus: u32, rules: Rules) -> Self {
        Self { rules, idle_cpus: (0..cpus).collect(), ..Self::default() }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Returns the running thread.
    pub(super) fn running(&self) -> Option<ThreadId> {
        self.running
    }

    pub(super) fn cpu_of(&self, thread: ThreadId) -> u32 {
        self.threads[thread].cpu
    }

    pub(super) fn cpu_ns(&self, thread: ThreadId) -> u64 {
        self.threads[thread].cpu_ns
    }

    /// Returns the CPU time of all threads.
    pub(super) fn busy_ns(&self) -> u64 {
        self.threads.iter().map(|thread| thread.cpu_ns).sum()
    }

    pub(super) fn has_ended(&self, thread: ThreadId) -> bool {
        self.threads[thread].state == State::Ended
    }

    pub(super) fn is_waiting(&self, thread: ThreadId) -> bool {
        self.threads[thread].state == State::Waiting
    }

    /// Returns whether the deadline ended the last wait of `thread`.
    pub(super) fn timed_out(&self, thread: ThreadId) -> bool {
        self.threads[thread].timed_out
    }

    /// Adds a thread in the state of waiting.
    pub(super) fn add(&mut self) -> ThreadId {
        self.threads.push(Thread::default());
        self.threads.len() - 1
    }

    /// Spends `ns` of work on the running thread. Returns `true` if the thread can continue,
    /// because no other event occurs until then. Otherwise the caller asks for the
    /// [`next`](Self::next) thread.
    pub(super) fn spend(&mut self, ns: u64) -> bool {
        let Some(running) = self.running else { return true };
        let end_ns = self.now_ns + ns;
        let thread = &mut self.threads[running];
        thread.cpu_ns += ns;
        thread.runtime_ns += ns;
        let is_next = self.events.peek().is_none_or(|Reverse(event)| event.at_ns > end_ns);
        if is_next && !self.must_leave(running, end_ns) {
            self.now_ns = end_ns;
            return true;
        }
        self.push(end_ns, running, None);
        self.running = None;
        false
    }

    /// Blocks the running thread, until `until_ns` at most. Returns the thread.
    pub(super) fn wait(&mut self, until_ns: Option<u64>) -> Option<ThreadId> {
        let waiter = self.running.take()?;
        let thread = &mut self.threads[waiter];
        (thread.state, thread.timed_out) = (State::Waiting, false);
        let (cpu, timer_of) = (thread.cpu, Some(thread.wakes));
        if let Some(until_ns) = until_ns {
            self.push(until_ns.max(self.now_ns), waiter, timer_of);
        }
        self.give(cpu);
        Some(waiter)
    }

    /// Ends the running thread.
    pub(super) fn end(&mut self) {
        if let Some(ended) = self.running.take() {
            self.threads[ended].state = State::Ended;
            self.give(self.threads[ended].cpu);
        }
    }

    /// Yields the CPU of the running thread. Returns `true` if no other thread is ready.
    pub(super) fn pass_on(&mut self) -> bool {
        let Some(thread) = self.running.filter(|_| !self.ready.is_empty()) else { return true };
        self.running = None;
        self.leave(thread);
        false
    }

    /// Wakes `thread`, which waits. If a CPU is idle, the thread runs in `delay_ns`.
    pub(super) fn wake(&mut self, thread: ThreadId, delay_ns: u64) {
        let least_ns = self.floor_ns.saturating_sub(self.rules.slice_ns / 2);
        let woken = &mut self.threads[thread];
        debug_assert_eq!(woken.state, State::Waiting);
        woken.wakes += 1;
        woken.runtime_ns = woken.runtime_ns.max(least_ns);
        let idle = self.idle_cpus.take(&woken.cpu).or_else(|| self.idle_cpus.pop_first());
        let Some(cpu) = idle else {
            self.queue(thread);
            return self.preempt_for(thread);
        };
        self.put_on(thread, cpu, delay_ns);
    }

    /// Cancels the deadline of the wait of `thread`.
    pub(super) fn void_timer(&mut self, thread: ThreadId) {
        self.threads[thread].wakes += 1;
    }

    /// Advances the time until a thread runs. Returns `None` if no thread can ever run.
    pub(super) fn next(&mut self) -> Option<ThreadId> {
        loop {
            let Reverse(Event { at_ns, thread, timer_of, .. }) = self.events.pop()?;
            self.now_ns = at_ns;
            match timer_of {
                Some(wakes) if self.is_waiting(thread) && self.threads[thread].wakes == wakes => {
                    self.threads[thread].timed_out = true;
                    self.wake(thread, 0);
                }
                Some(_) => {}
                None if self.must_leave(thread, at_ns) => self.leave(thread),
                None => {
                    self.running = Some(thread);
                    return self.running;
                }
            }
        }
    }

    fn must_leave(&self, thread: ThreadId, at_ns: u64) -> bool {
        let Thread { slice_from_ns, is_preempted, .. } = self.threads[thread];
        let is_over = at_ns.saturating_sub(slice_from_ns) >= self.rules.slice_ns;
        !self.ready.is_empty() && (is_preempted || is_over)
    }

    /// Moves `thread` from its CPU to the queue, and puts the first queued thread on that CPU.
    fn leave(&mut self, thread: ThreadId) {
        let (_, _, next) = self.ready.pop_first().expect("a thread is ready");
        let cpu = self.threads[thread].cpu;
        self.queue(thread);
        self.put_on(next, cpu, self.rules.switch_ns);
    }

    /// Gives an idle CPU to the first queued thread, if any.
    fn give(&mut self, cpu: u32) {
        match self.ready.pop_first() {
            Some((_, _, next)) => self.put_on(next, cpu, self.rules.switch_ns),
            None => {
                self.idle_cpus.insert(cpu);
            }
        }
    }

    fn put_on(&mut self, thread: ThreadId, cpu: u32, delay_ns: u64) {
        let at_ns = self.now_ns + delay_ns;
        let it = &mut self.threads[thread];
        (it.state, it.cpu, it.slice_from_ns) = (State::OnCpu, cpu, at_ns);
        it.is_preempted = false;
        self.floor_ns = self.floor_ns.max(it.runtime_ns);
        self.push(at_ns, thread, None);
    }

    fn queue(&mut self, thread: ThreadId) {
        self.order += 1;
        self.threads[thread].state = State::Ready;
        self.ready.insert((self.threads[thread].runtime_ns, self.order, thread));
    }

    /// Preempts the thread on a CPU with the longest runtime, if it is far ahead of `woken`.
    fn preempt_for(&mut self, woken: ThreadId) {
        let least_ns = self.threads[woken].runtime_ns + self.rules.granularity_ns;
        let on_cpu = self.threads.iter_mut().filter(|it| it.state == State::OnCpu);
        let longest = on_cpu.max_by_key(|it| it.runtime_ns);
        if let Some(longest) = longest.filter(|it| it.runtime_ns > least_ns) {
            longest.is_preempted = true;
        }
    }

    /// Adds an event at `at_ns`: a step of `thread` is done, or the wait `timer_of` ends.
    fn push(&mut self, at_ns: u64, thread: ThreadId, timer_of: Option<u64>) {
        self.order += 1;
        self.events.push(Reverse(Event { at_ns, order: self.order, thread, timer_of }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules { switch_ns: 10, slice_ns: 1000, granularity_ns: 300 };

    fn with_threads(cpus: u32, threads: usize) -> Schedule {
        let mut schedule = Schedule::new(cpus, RULES);
        for _ in 0..threads {
            let thread = schedule.add();
            schedule.wake(thread, 0);
        }
        schedule
    }

    #[test]
    fn threads_on_their_own_cpus_run_in_the_order_of_time() {
        let mut schedule = with_threads(2, 2);
        assert_eq!(schedule.next(), Some(0));
        assert!(!schedule.spend(50), "thread 1 is at time 0");
        assert_eq!((schedule.next(), schedule.now_ns()), (Some(1), 0));
        assert!(schedule.spend(49), "nothing happens until 50");
        assert!(!schedule.spend(1), "thread 0 asked for time 50 first");
        assert_eq!((schedule.next(), schedule.now_ns()), (Some(0), 50));
        assert_eq!((schedule.cpu_ns(0), schedule.busy_ns()), (50, 100));
    }

    #[test]
    fn a_thread_keeps_its_cpu_for_a_slice() {
        let mut schedule = with_threads(1, 2);
        assert_eq!(schedule.next(), Some(0));
        assert!(schedule.spend(999));
        assert!(!schedule.spend(1));
        assert_eq!((schedule.next(), schedule.now_ns()), (Some(1), 1010), "after a switch");
        schedule.end();
        assert_eq!((schedule.next(), schedule.now_ns()), (Some(0), 1020));
        schedule.end();
        assert_eq!(schedule.next(), None);
    }

    #[test]
    fn a_timer_ends_the_wait_that_it_was_set_for_only() {
        let mut schedule = with_threads(2, 2);
        assert_eq!(schedule.next(), Some(0));
        schedule.wait(Some(500));
        assert_eq!(schedule.next(), Some(1));
        schedule.wake(0, 5);
        schedule.wait(Some(700));
        assert_eq!(
            (schedule.next(), schedule.now_ns(), schedule.timed_out(0)),
            (Some(0), 5, false)
        );
        schedule.wait(None);
        assert_eq!(
            (schedule.next(), schedule.now_ns(), schedule.timed_out(1)),
            (Some(1), 700, true)
        );
        schedule.wait(None);
        assert_eq!(schedule.next(), None, "both wait for ever");
    }

    #[test]
    fn a_thread_that_slept_takes_the_cpu_of_one_that_ran() {
        let mut schedule = with_threads(1, 2);
        assert_eq!(schedule.next(), Some(0));
        schedule.wait(Some(600));
        assert_eq!(schedule.next(), Some(1));
        assert!(!schedule.spend(650), "the timer comes before that");
        assert_eq!((schedule.next(), schedule.now_ns()), (Some(0), 10 + 650 + 10));
        assert_eq!(schedule.cpu_ns(0), 0);
    }
}
