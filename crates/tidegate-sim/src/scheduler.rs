//! Deterministic interleaving of real threads.
//!
//! Invariants:
//! 1. One thread at a time runs: the one that holds the baton. The others wait on their condition
//!    variable.
//! 2. The baton moves only at yield points (each operation on the region, each wait, the end of a
//!    thread), so that an interleaving is the list of choices made there, and can be replayed.
//! 3. A thread that waits ([`Scheduler::relax`]) does not get the baton back before another one
//!    made a step, unless all threads wait. Too many such rounds are a deadlock; too many steps are
//!    a livelock. Both unwind all threads.
//!
//! Entry points: [`Workers::run`]; the strategies [`Exhaustive`] (all interleavings with a bound on
//! preemptions) and [`Sampled`] (random by seed); [`Scheduler`], which the recorder calls.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::context;
use crate::random::Random;

/// Far more steps than any history of the tests takes.
const STEPS_LIMIT: usize = 200_000;
/// After this many rounds where every thread only waits, the execution is a deadlock.
const IDLE_ROUNDS_LIMIT: usize = 1_000;
/// How long a thread may hold the baton without reaching a yield point before it counts as blocked.
const BATON_TIMEOUT: Duration = Duration::from_secs(60);

/// A moment when another thread may get the baton.
#[derive(Debug)]
pub struct Point<'a> {
    /// Threads that can run; the first is the one to prefer.
    pub candidates: &'a [usize],
    /// The first candidate is the running thread and could go on: any other choice is a preemption.
    pub preemptible: bool,
    /// Number of events recorded so far.
    pub position: usize,
}

/// Decides which thread runs.
pub trait Strategy: Send {
    /// Returns an index into the candidates of `point`.
    fn choose(&mut self, point: &Point<'_>) -> usize;
}

/// The reason why an execution did not complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stuck {
    /// The process was killed, as ordered by [`Workers::run`].
    Killed,
    /// All threads wait for each other.
    Deadlock(String),
    /// The threads go on without finishing.
    Livelock(String),
    /// A thread panicked.
    Panic(String),
    /// A thread blocked outside the simulator, such as on a lock that another thread held at a
    /// yield point.
    Blocked(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Ready,
    Waiting,
    Done,
}

struct State {
    current: usize,
    status: Vec<Status>,
    steps: usize,
    idle_rounds: usize,
    kill_after: Option<usize>,
    stuck: Option<Stuck>,
}

/// Hands the baton from thread to thread. One for each execution, which may have several sessions.
pub struct Scheduler {
    state: Mutex<State>,
    wake: Vec<Condvar>,
    strategy: Arc<Mutex<dyn Strategy>>,
    position: AtomicUsize,
}

/// The panic payload that unwinds the threads of an abandoned execution.
struct Abandoned;

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scheduler {
    /// Makes a scheduler of `threads` threads that asks `strategy` at each yield point.
    pub fn new(threads: usize, strategy: Arc<Mutex<dyn Strategy>>) -> Self {
        Self {
            state: Mutex::new(State {
                current: 0,
                status: vec![Status::Ready; threads],
                steps: 0,
                idle_rounds: 0,
                kill_after: None,
                stuck: None,
            }),
            wake: (0..threads).map(|_| Condvar::new()).collect(),
            strategy,
            position: AtomicUsize::new(0),
        }
    }

    /// Prepares the next session of all threads, which is killed after `kill_after` steps.
    fn start(&self, kill_after: Option<usize>) {
        let mut state = lock(&self.state);
        state.status.fill(Status::Ready);
        (state.steps, state.idle_rounds) = (0, 0);
        (state.kill_after, state.stuck) = (kill_after, None);
        let first: Vec<_> = (0..state.status.len()).collect();
        state.current = self.ask(&first, false);
    }

    /// Notes that the trace now holds `events` events: the position told to strategies.
    pub fn recorded(&self, events: usize) {
        self.position.store(events, Ordering::Relaxed);
    }

    /// Yields on a simulated thread that can go on. Does nothing on other threads.
    pub fn step(&self) {
        if let Some(thread) = context::simulated()
            && !std::thread::panicking()
        {
            self.pass(thread, Status::Ready);
        }
    }

    /// Yields on a simulated thread that waits for another. Does nothing on other threads.
    pub fn relax(&self) {
        if let Some(thread) = context::simulated()
            && !std::thread::panicking()
        {
            self.pass(thread, Status::Waiting);
        }
    }

    fn ask(&self, candidates: &[usize], preemptible: bool) -> usize {
        let position = self.position.load(Ordering::Relaxed);
        let point = Point { candidates, preemptible, position };
        candidates[lock(&self.strategy).choose(&point)]
    }

    /// Waits for the baton before the first step of `thread`.
    fn enter(&self, thread: usize) {
        let state = lock(&self.state);
        self.wait_for_baton(thread, state);
    }

    /// Marks `thread` as done; another thread gets the baton.
    fn leave(&self, thread: usize) {
        let mut state = lock(&self.state);
        state.status[thread] = Status::Done;
        progress(&mut state);
        self.hand_on(thread, &mut state);
    }

    fn pass(&self, thread: usize, status: Status) {
        let mut state = lock(&self.state);
        state.status[thread] = status;
        state.steps += 1;
        if status == Status::Ready {
            progress(&mut state);
        }
        if state.steps > STEPS_LIMIT {
            let stuck = format!("no end after {STEPS_LIMIT} steps; threads: {:?}", state.status);
            self.abandon(&mut state, Stuck::Livelock(stuck));
        }
        if state.kill_after.is_some_and(|limit| state.steps > limit) {
            self.abandon(&mut state, Stuck::Killed);
        }
        self.hand_on(thread, &mut state);
        self.wait_for_baton(thread, state);
    }

    fn hand_on(&self, thread: usize, state: &mut State) {
        if state.stuck.is_some() {
            return;
        }
        if !state.status.contains(&Status::Ready) {
            self.idle(thread, state);
        }
        let threads = state.status.len();
        let in_turn = (0..threads).map(|step| (thread + step) % threads);
        let candidates: Vec<usize> =
            in_turn.filter(|&other| state.status[other] == Status::Ready).collect();
        let next = match candidates[..] {
            [] => return,
            [only] => only,
            _ => self.ask(&candidates, candidates[0] == thread),
        };
        if next != state.current {
            state.current = next;
            self.wake[next].notify_one();
        }
    }

    /// Lets the other threads look again if every thread waits, for a limited number of rounds.
    fn idle(&self, thread: usize, state: &mut State) {
        state.idle_rounds += 1;
        if state.idle_rounds > IDLE_ROUNDS_LIMIT {
            let stuck = format!("every thread waits for another: {:?}", state.status);
            self.abandon(state, Stuck::Deadlock(stuck));
        }
        let alone = state.status.iter().filter(|status| **status == Status::Waiting).count() == 1;
        for (other, status) in state.status.iter_mut().enumerate() {
            if *status == Status::Waiting && (other != thread || alone) {
                *status = Status::Ready;
            }
        }
    }

    fn abandon(&self, state: &mut State, stuck: Stuck) {
        state.stuck.get_or_insert(stuck);
        for wake in &self.wake {
            wake.notify_one();
        }
    }

    fn wait_for_baton(&self, thread: usize, mut state: MutexGuard<'_, State>) {
        while state.current != thread && state.stuck.is_none() {
            state = self.wake[thread].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let abandoned = state.stuck.is_some();
        drop(state);
        if abandoned {
            resume_unwind(Box::new(Abandoned));
        }
    }

    /// Runs `body` as `thread` of this execution.
    fn drive(&self, thread: usize, body: Body) {
        let run = AssertUnwindSafe(|| {
            self.enter(thread);
            body();
        });
        if let Err(payload) = catch_unwind(run)
            && !payload.is::<Abandoned>()
        {
            let message = panic_message(payload.as_ref());
            self.abandon(&mut lock(&self.state), Stuck::Panic(message));
        }
        self.leave(thread);
    }
}

/// Notes a step: waiting threads may look again.
fn progress(state: &mut State) {
    state.idle_rounds = 0;
    for status in state.status.iter_mut().filter(|status| **status == Status::Waiting) {
        *status = Status::Ready;
    }
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// The body of one simulated thread.
pub type Body = Box<dyn FnOnce() + Send>;

struct Job {
    scheduler: Arc<Scheduler>,
    body: Body,
}

/// The OS threads that play the simulated ones, kept between executions.
pub struct Workers {
    jobs: Vec<Sender<Job>>,
    done: Receiver<usize>,
}

impl Workers {
    /// Starts `threads` OS threads.
    pub fn new(threads: usize) -> Self {
        let (finished, done) = channel();
        let jobs = (0..threads).map(|thread| start_worker(thread, finished.clone())).collect();
        Self { jobs, done }
    }

    /// Runs `bodies`, one on each thread, interleaved by `scheduler`, and kills them after
    /// `kill_after` steps.
    ///
    /// # Errors
    /// Returns [`Stuck`] if they did not all finish. After [`Stuck::Blocked`] the workers are
    /// unusable.
    ///
    /// # Panics
    /// If a worker died before.
    pub fn run(
        &self,
        scheduler: &Arc<Scheduler>,
        bodies: Vec<Body>,
        kill_after: Option<usize>,
    ) -> Result<(), Stuck> {
        let expected = bodies.len();
        scheduler.start(kill_after);
        for (jobs, body) in self.jobs.iter().zip(bodies) {
            let job = Job { scheduler: Arc::clone(scheduler), body };
            jobs.send(job).expect("workers outlive their pool");
        }
        for _ in 0..expected {
            self.wait_for_one(scheduler)?;
        }
        lock(&scheduler.state).stuck.clone().map_or(Ok(()), Err)
    }

    fn wait_for_one(&self, scheduler: &Scheduler) -> Result<(), Stuck> {
        let steps = || lock(&scheduler.state).steps;
        let mut before = steps();
        loop {
            match self.done.recv_timeout(BATON_TIMEOUT) {
                Ok(_) => return Ok(()),
                Err(RecvTimeoutError::Timeout) if steps() == before => {
                    let current = lock(&scheduler.state).current;
                    return Err(Stuck::Blocked(format!(
                        "thread {current} blocked outside the region: a lock that is held across an operation \
                         on the region must be waited for through Region::relax"
                    )));
                }
                Err(RecvTimeoutError::Timeout) => before = steps(),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Stuck::Panic("all workers died".to_owned()));
                }
            }
        }
    }
}

fn start_worker(thread: usize, finished: Sender<usize>) -> Sender<Job> {
    let (jobs, inbox) = channel::<Job>();
    std::thread::spawn(move || {
        context::enter(thread);
        for job in inbox {
            job.scheduler.drive(thread, job.body);
            drop(job.scheduler);
            if finished.send(thread).is_err() {
                return;
            }
        }
    });
    jobs
}

/// One decision of the path that [`Exhaustive`] follows.
#[derive(Debug)]
struct Decision {
    candidates: Vec<usize>,
    taken: usize,
    preemptible: bool,
    position: usize,
}

/// Depth-first search over all interleavings with at most a given number of preemptions.
///
/// Few preemptions find most bugs of concurrency (the observation behind CHESS); switches at waits
/// and at the end of threads are free. Use: run an execution, then [`Exhaustive::advance`], until
/// that returns false.
#[derive(Debug)]
pub struct Exhaustive {
    path: Vec<Decision>,
    depth: usize,
    preemptions_limit: usize,
    preemptions: usize,
    diverged: Option<String>,
}

impl Exhaustive {
    /// Makes a search at its first interleaving.
    pub fn new(preemptions_limit: usize) -> Self {
        Self { path: Vec::new(), depth: 0, preemptions_limit, preemptions: 0, diverged: None }
    }

    /// Moves to the next interleaving. Returns false after the last one.
    pub fn advance(&mut self) -> bool {
        self.path.truncate(self.depth);
        self.depth = 0;
        self.preemptions = 0;
        while let Some(last) = self.path.last_mut() {
            last.taken += 1;
            if last.taken < last.candidates.len() {
                return true;
            }
            self.path.pop();
        }
        false
    }

    /// Returns the position where this interleaving departs from the one that ran before.
    pub fn fresh_from(&self) -> usize {
        self.path.last().map_or(0, |last| last.position)
    }

    /// Returns a description if the engine behaved differently under the same schedule: it then
    /// depends on time, chance or addresses, and no result of this search is reliable.
    pub fn diverged(&self) -> Option<&str> {
        self.diverged.as_deref()
    }

    /// Lists the threads chosen at each decision, for a report.
    pub fn schedule(&self) -> String {
        let chosen = |decision: &Decision| decision.candidates[decision.taken].to_string();
        self.path.iter().map(chosen).collect::<String>()
    }
}

impl Strategy for Exhaustive {
    fn choose(&mut self, point: &Point<'_>) -> usize {
        if self.depth == self.path.len() {
            let exhausted = point.preemptible && self.preemptions >= self.preemptions_limit;
            let open = if exhausted { &point.candidates[..1] } else { point.candidates };
            self.path.push(Decision {
                candidates: open.to_vec(),
                taken: 0,
                preemptible: point.preemptible,
                position: point.position,
            });
        }
        let decision = &self.path[self.depth];
        let same = decision.position == point.position
            && point.candidates.starts_with(&decision.candidates);
        if !same {
            let number = self.depth;
            let what = format!("decision {number} was {decision:?} and is now {point:?}");
            self.diverged.get_or_insert(what);
            return 0;
        }
        self.preemptions += usize::from(decision.preemptible && decision.taken > 0);
        self.depth += 1;
        decision.taken
    }
}

/// Random choices, with a random tendency to preempt.
#[derive(Debug)]
pub struct Sampled {
    random: Random,
    period: usize,
}

impl Sampled {
    /// Makes a strategy whose choices all follow from `seed`.
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let period = *random.pick(&[1, 2, 4, 8, 24]);
        Self { random, period }
    }
}

impl Strategy for Sampled {
    fn choose(&mut self, point: &Point<'_>) -> usize {
        if point.preemptible && !self.random.one_in(self.period) {
            return 0;
        }
        self.random.below(point.candidates.len())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Runs `threads` threads that append their number to a log at each of `steps` steps.
    fn log_of(workers: &Workers, strategy: Arc<Mutex<dyn Strategy>>, threads: usize) -> String {
        let scheduler = Arc::new(Scheduler::new(threads, strategy));
        let log = Arc::new(Mutex::new(String::new()));
        let bodies = (0..threads).map(|thread| {
            let (scheduler, log) = (Arc::clone(&scheduler), Arc::clone(&log));
            Box::new(move || {
                for _ in 0..2 {
                    scheduler.step();
                    lock(&log).push_str(&thread.to_string());
                }
            }) as Body
        });
        workers.run(&scheduler, bodies.collect(), None).expect("nobody waits");
        lock(&log).clone()
    }

    fn interleavings(threads: usize, preemptions_limit: usize) -> BTreeSet<String> {
        let workers = Workers::new(threads);
        let search = Arc::new(Mutex::new(Exhaustive::new(preemptions_limit)));
        let mut logs = BTreeSet::new();
        loop {
            logs.insert(log_of(&workers, search.clone(), threads));
            if !lock(&search).advance() {
                return logs;
            }
        }
    }

    #[test]
    fn exhaustive_finds_every_interleaving_within_the_bound() {
        assert_eq!(interleavings(2, 0), ["0011", "1100"].map(str::to_owned).into());
        let all = ["0011", "0101", "0110", "1001", "1010", "1100"].map(str::to_owned);
        assert_eq!(interleavings(2, 4), all.into());
        assert_eq!(interleavings(3, 6).len(), 90, "6! / (2! 2! 2!)");
    }

    #[test]
    fn sampled_repeats_by_seed() {
        let workers = Workers::new(3);
        let mut run = |seed| log_of(&workers, Arc::new(Mutex::new(Sampled::new(seed))), 3);
        let first: Vec<_> = (0..20).map(&mut run).collect();
        let second: Vec<_> = (0..20).map(&mut run).collect();
        assert_eq!(first, second);
        assert!(first.iter().collect::<BTreeSet<_>>().len() > 5, "seeds differ: {first:?}");
    }

    fn run_all(bodies: Vec<Body>, scheduler: &Arc<Scheduler>) -> Result<(), Stuck> {
        Workers::new(bodies.len()).run(scheduler, bodies, None)
    }

    fn waiting_forever(scheduler: &Arc<Scheduler>) -> Body {
        let scheduler = Arc::clone(scheduler);
        Box::new(move || {
            loop {
                scheduler.relax();
            }
        })
    }

    fn sampled(threads: usize) -> Arc<Scheduler> {
        Arc::new(Scheduler::new(threads, Arc::new(Mutex::new(Sampled::new(1)))))
    }

    #[test]
    fn threads_that_only_wait_are_a_deadlock() {
        let scheduler = sampled(2);
        let bodies = vec![waiting_forever(&scheduler), waiting_forever(&scheduler)];
        assert!(matches!(run_all(bodies, &scheduler), Err(Stuck::Deadlock(_))));
    }

    #[test]
    fn a_wait_that_another_thread_ends_is_none() {
        let scheduler = sampled(2);
        let flag = Arc::new(Mutex::new(false));
        let (waiter, setter) = (Arc::clone(&scheduler), Arc::clone(&scheduler));
        let (seen, set) = (Arc::clone(&flag), flag);
        let wait: Body = Box::new(move || {
            while !*lock(&seen) {
                waiter.relax();
            }
        });
        let work: Body = Box::new(move || {
            (0..50).for_each(|_| setter.step());
            *lock(&set) = true;
        });
        assert_eq!(run_all(vec![wait, work], &scheduler), Ok(()));
    }

    #[test]
    fn threads_that_go_in_circles_are_a_livelock() {
        let scheduler = sampled(2);
        let circle = |scheduler: &Arc<Scheduler>| -> Body {
            let scheduler = Arc::clone(scheduler);
            Box::new(move || {
                loop {
                    scheduler.step();
                    scheduler.relax();
                }
            })
        };
        let bodies = vec![circle(&scheduler), circle(&scheduler)];
        assert!(matches!(run_all(bodies, &scheduler), Err(Stuck::Livelock(_))));
    }

    #[test]
    fn a_kill_ends_all_threads_wherever_they_are() {
        let scheduler = sampled(2);
        let endless = |scheduler: &Arc<Scheduler>| -> Body {
            let scheduler = Arc::clone(scheduler);
            Box::new(move || {
                loop {
                    scheduler.step();
                }
            })
        };
        let bodies = vec![endless(&scheduler), endless(&scheduler)];
        let killed = Workers::new(2).run(&scheduler, bodies, Some(30));
        assert_eq!(killed, Err(Stuck::Killed));
        assert_eq!(lock(&scheduler.state).steps, 31);
    }

    #[test]
    fn a_panic_is_told_and_ends_the_other_threads() {
        let scheduler = sampled(2);
        let failing: Body = Box::new(|| resume_unwind(Box::new("broken")));
        let bodies = vec![waiting_forever(&scheduler), failing];
        assert_eq!(run_all(bodies, &scheduler), Err(Stuck::Panic("broken".to_owned())));
    }
}
