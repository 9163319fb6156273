//! The threads that run requests of devices without asynchrony of their own.
//!
//! Invariants:
//! 1. All devices of a process share at most [`THREADS_MAX`] threads.
//! 2. A thread starts when a job arrives and no thread is idle; it ends after [`IDLE_TIMEOUT`]
//!    without a job. A process without jobs has no thread here.
//! 3. A job never waits for another job of the pool, so a full pool makes progress.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// Most threads.
const THREADS_MAX: usize = 16;
/// How long a thread waits for work before it ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

struct Pool {
    state: Mutex<State>,
    work: Condvar,
}

static POOL: Pool = Pool {
    state: Mutex::new(State { queue: VecDeque::new(), threads: 0, idle: 0 }),
    work: Condvar::new(),
};

/// Runs `job` on a thread of the pool, or on this one if the system refuses the first thread.
pub(super) fn run(job: impl FnOnce() + Send + 'static) {
    let mut state = POOL.state.lock();
    state.queue.push_back(Box::new(job));
    if state.idle >= state.queue.len() {
        POOL.work.notify_one();
        return;
    }
    if state.threads < THREADS_MAX {
        state.threads += 1;
        drop(state);
        let spawned = std::thread::Builder::new().name("device-pool".into()).spawn(work);
        if spawned.is_err() {
            POOL.do_without_thread();
        }
    }
}

fn work() {
    while let Some(job) = POOL.next() {
        // The panic was printed when it happened, and does not concern the next job.
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}

impl Pool {
    /// Waits for the next job. Returns `None` if the thread, no longer counted, has to end.
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.queue.pop_front() {
                return Some(job);
            }
            state.idle += 1;
            let timed_out = self.work.wait_for(&mut state, IDLE_TIMEOUT).timed_out();
            state.idle -= 1;
            if timed_out && state.queue.is_empty() {
                state.threads -= 1;
                return None;
            }
        }
    }

    /// Runs the jobs on the calling thread if no thread could be started and none exists.
    fn do_without_thread(&self) {
        let mut state = self.state.lock();
        state.threads -= 1;
        while state.threads == 0
            && let Some(job) = state.queue.pop_front()
        {
            MutexGuard::unlocked(&mut state, job);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::mpsc::channel;
    use std::sync::{Arc, Barrier};

    use super::*;

    #[test]
    fn many_jobs_run_on_few_threads_and_all_of_them_run() {
        let (ran, threads) = channel();
        for _ in 0..500 {
            let ran = ran.clone();
            run(move || ran.send(std::thread::current().id()).unwrap());
        }
        let threads: Vec<_> = threads.iter().take(500).collect();
        assert!(threads.iter().collect::<HashSet<_>>().len() <= THREADS_MAX);
    }

    /// Checks that jobs run side by side: these jobs wait for each other.
    #[test]
    fn jobs_run_side_by_side() {
        let (barrier, (ended, ends)) = (Arc::new(Barrier::new(4)), channel());
        for _ in 0..4 {
            let (barrier, ended) = (Arc::clone(&barrier), ended.clone());
            run(move || {
                barrier.wait();
                ended.send(()).unwrap();
            });
        }
        assert_eq!(ends.iter().take(4).count(), 4);
    }
}
