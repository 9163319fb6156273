//! The flush gate: concurrent callers share flushes, and failures stay until the file is reopened.
//!
//! `fdatasync` alone is not enough: the kernel reports a write-back error once per open file. With
//! two calls at once, one thread gets the error and the other may get success for the very bytes
//! that were lost; and the next call succeeds although the pages were dropped. So:
//! 1. At most one flush runs at a time, so that its outcome is known before the next one starts.
//! 2. The answer to a caller comes from a flush that *started* after the call, so it covers all
//!    writes acknowledged before the call. Callers that wait together share one flush.
//! 3. After one failure every later call fails too. Only reopening the file, and writing the lost
//!    bytes again, restores the promise ([`reopen`](FlushGate::reopen)).

use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use crate::device::wake::Wake;

#[derive(Debug, Default)]
struct State {
    /// Flushes started so far; while one runs it has this number.
    started: u64,
    running: bool,
    failure: Option<Errno>,
}

/// The next step of a caller that needs flush number n or a later one to succeed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// A flush failed earlier.
    Refused(Errno),
    /// A sufficient flush has succeeded.
    Covered,
    /// The caller makes the flush.
    Run,
    /// An earlier flush still runs.
    Wait,
}

impl State {
    fn turn(&self, needed: u64) -> Turn {
        let ended = self.started - u64::from(self.running);
        match self.failure {
            Some(errno) => Turn::Refused(errno),
            None if ended >= needed => Turn::Covered,
            None if self.running => Turn::Wait,
            None => Turn::Run,
        }
    }

    /// Returns the next step. [`Turn::Run`] marks the flush as begun.
    fn begin(&mut self, needed: u64) -> Turn {
        let turn = self.turn(needed);
        if turn == Turn::Run {
            self.started += 1;
            self.running = true;
        }
        turn
    }
}

/// Why a flush failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// The flush that covers the call failed.
    Now(Errno),
    /// An earlier flush failed.
    Earlier(Errno),
}

/// The gate of one file; see the module.
#[derive(Default)]
pub(super) struct FlushGate {
    state: Mutex<State>,
    done: Condvar,
    /// Wakes the thread that serves requests waiting here without a thread each.
    wake: OnceLock<Arc<Wake>>,
}

impl FlushGate {
    /// Returns the number of the first flush that covers all writes acknowledged before this call.
    pub(super) fn needed(&self) -> u64 {
        self.state.lock().started + 1
    }

    /// Returns the next step of a request that needs flush `needed`. On [`Turn::Run`] the flush has
    /// begun: the caller makes it and reports its outcome to [`finish`](Self::finish).
    pub(super) fn begin(&self, needed: u64) -> Turn {
        self.state.lock().begin(needed)
    }

    /// Registers `wake`, to be woken after each flush, for requests that wait without a thread.
    pub(super) fn wake_after_flushes(&self, wake: Arc<Wake>) {
        let _ = self.wake.set(wake);
    }

    /// Waits until a flush that started after this call has succeeded; runs `flush` if it is this
    /// caller's turn. Fails if that flush or an earlier one failed.
    pub(super) fn pass(&self, flush: impl FnOnce() -> Result<(), Errno>) -> Result<(), Failure> {
        let mut state = self.state.lock();
        let needed = state.started + 1;
        loop {
            match state.begin(needed) {
                Turn::Refused(errno) => return Err(Failure::Earlier(errno)),
                Turn::Covered => return Ok(()),
                Turn::Run => break,
                Turn::Wait => self.done.wait(&mut state),
            }
        }
        drop(state);
        self.finish(flush())
    }

    /// Ends the running flush with `outcome`.
    pub(super) fn finish(&self, outcome: Result<(), Errno>) -> Result<(), Failure> {
        let mut state = self.state.lock();
        state.running = false;
        self.done.notify_all();
        if let Some(wake) = self.wake.get() {
            wake.wake();
        }
        outcome.map_err(|errno| {
            state.failure.get_or_insert(errno);
            Failure::Now(errno)
        })
    }

    /// Makes every later flush fail, after a forced write failed outside the gate.
    pub(super) fn fail(&self, errno: Errno) {
        self.state.lock().failure.get_or_insert(errno);
    }

    /// Lets flushes succeed again, after the file was opened again. Its users write lost bytes
    /// again.
    pub(super) fn reopen(&self) {
        self.state.lock().failure = None;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn a_failure_is_never_forgotten() {
        let gate = FlushGate::default();
        assert_eq!(gate.pass(|| Ok(())), Ok(()));
        assert_eq!(gate.pass(|| Err(Errno::IO)), Err(Failure::Now(Errno::IO)));
        for _ in 0..3 {
            assert_eq!(gate.pass(|| Ok(())), Err(Failure::Earlier(Errno::IO)));
        }
    }

    #[test]
    fn a_failed_write_through_closes_the_gate() {
        let gate = FlushGate::default();
        gate.fail(Errno::NOSPC);
        assert_eq!(gate.pass(|| Ok(())), Err(Failure::Earlier(Errno::NOSPC)));
    }

    /// Every thread writes (a counter) and flushes. Its write must then be covered by a flush.
    #[test]
    fn a_flush_covers_what_was_written_before_it() {
        let gate = FlushGate::default();
        let (written, durable, flushes) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let mine = written.fetch_add(1, Ordering::SeqCst) + 1;
                        gate.pass(|| {
                            let seen = written.load(Ordering::SeqCst);
                            std::thread::yield_now();
                            flushes.fetch_add(1, Ordering::SeqCst);
                            durable.store(seen, Ordering::SeqCst);
                            Ok(())
                        })
                        .unwrap();
                        assert!(durable.load(Ordering::SeqCst) >= mine, "write {mine} not covered");
                    }
                });
            }
        });
        assert!(flushes.into_inner() <= 2000);
    }

    /// A caller that comes while flush 5 runs needs flush 6: flush 5 may have missed its write.
    #[test]
    fn a_running_flush_does_not_answer_a_later_call() {
        let state = |started, running| State { started, running, failure: None };
        let needed = state(5, true).started + 1;
        assert_eq!(state(5, true).turn(needed), Turn::Wait);
        assert_eq!(state(5, false).turn(needed), Turn::Run);
        assert_eq!(state(6, true).turn(needed), Turn::Wait);
        assert_eq!(state(6, false).turn(needed), Turn::Covered);
        assert_eq!(state(7, true).turn(needed), Turn::Covered);
    }
}
