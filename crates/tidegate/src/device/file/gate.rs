//! The flush gate: concurrent callers share flushes, and each loss is reported to all its writers.
//!
//! `fdatasync` alone is not enough: the kernel drops the data that it could not write, and reports
//! the error once per open file. With two calls at once, one thread gets the error and the other
//! may get success for the very bytes that were lost; and the next call succeeds although the pages
//! were dropped. So:
//! 1. At most one flush runs at a time, so that its outcome is known before the next one starts.
//! 2. The answer to a caller comes from a flush that *started* after the call, so it covers all
//!    writes acknowledged before the call. Callers that wait together share one flush.
//! 3. A failed flush or forced write may have dropped every write that no flush has made durable,
//!    also one that was acknowledged while the flush ran. A later flush whose caller asked for such
//!    a write fails, until a failure was reported to a caller that asked for it. `flushes` has the
//!    rule; opening the file again changes nothing about it.
//! 4. A failure closes the gate: every later call fails until the file is opened again
//!    ([`reopen`](FlushGate::reopen)). The writes that no flush made durable are lost then, too, if
//!    the file that was opened does not have them.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;

use crate::device::flushes::{Clock, Ended, Flushes, Moment};
use crate::device::wake::Wake;

/// A request that needs a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    /// A flush, of all writes that were acknowledged before.
    Flush,
    /// A forced write whose data is written.
    ForcedWrite,
}

/// The next step of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The request ends with this result.
    Answered(Result<(), Failure>),
    /// The caller makes the flush and reports its outcome to [`finish`](FlushGate::finish).
    Run,
    /// A flush still runs.
    Wait,
}

/// Why a flush failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// The flush that covers the call failed, or one that ran during the call.
    Now(Errno),
    /// An earlier flush failed.
    Earlier(Errno),
}

#[derive(Default)]
struct State {
    flushes: Flushes,
    last_job: u64,
    /// Results that the callers have not taken yet, by job.
    answers: BTreeMap<u64, Result<(), Failure>>,
    /// The last failure.
    failure: Option<Errno>,
    /// The file has to be opened again.
    is_closed: bool,
}

impl State {
    fn ask(&mut self, call: Call, moment: Moment) -> u64 {
        self.last_job += 1;
        let job = self.last_job;
        let is_taken = match call {
            Call::Flush => self.flushes.ask(job, moment),
            Call::ForcedWrite if self.flushes.clock().has_lost_since(moment) => false,
            Call::ForcedWrite => {
                self.flushes.ask_for_write(job);
                true
            }
        };
        if !is_taken {
            self.refuse(vec![job]);
        }
        job
    }

    fn turn(&mut self, job: u64) -> Turn {
        let refused = if self.is_closed { self.flushes.refuse() } else { self.flushes.doomed() };
        self.refuse(refused);
        match self.answers.remove(&job) {
            Some(answer) => Turn::Answered(answer),
            None if self.flushes.begin() => Turn::Run,
            None => Turn::Wait,
        }
    }

    fn finish(&mut self, outcome: Result<(), Errno>) {
        match outcome {
            Ok(()) => {
                let Ended { done, failed } = self.flushes.succeed();
                self.answer(done, Ok(()));
                self.refuse(failed);
            }
            Err(errno) => {
                self.close(errno);
                let failed = self.flushes.fail();
                self.answer(failed, Err(Failure::Now(errno)));
            }
        }
    }

    fn close(&mut self, errno: Errno) {
        (self.failure, self.is_closed) = (Some(errno), true);
    }

    /// Handles a loss beside the flush that may run.
    fn lose(&mut self) {
        let lost = self.flushes.lose();
        self.refuse(lost);
    }

    /// Fails `jobs` for an earlier failure; a disk that went away may have shown none.
    fn refuse(&mut self, jobs: Vec<u64>) {
        let errno = self.failure.unwrap_or(Errno::IO);
        self.answer(jobs, Err(Failure::Earlier(errno)));
    }

    fn answer(&mut self, jobs: Vec<u64>, answer: Result<(), Failure>) {
        self.answers.extend(jobs.into_iter().map(|job| (job, answer)));
    }
}

/// The gate of one file; see the module.
pub(super) struct FlushGate {
    state: Mutex<State>,
    clock: Clock,
    done: Condvar,
    /// Wakes the thread that serves requests waiting here without a thread each.
    wake: OnceLock<Arc<Wake>>,
}

impl Default for FlushGate {
    fn default() -> Self {
        let state = State::default();
        let (clock, done, wake) = (state.flushes.clock(), Condvar::new(), OnceLock::new());
        Self { state: Mutex::new(state), clock, done, wake }
    }
}

impl FlushGate {
    /// Returns the present moment. A write takes it before it takes the file that it goes to; a
    /// flush takes it at the call.
    pub(super) fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Counts a write that began at `begun` and is about to be acknowledged without a flush.
    pub(super) fn wrote(&self, begun: Moment) {
        let write = self.clock.wrote();
        if self.clock.has_lost_since(begun) {
            self.state.lock().flushes.lose_write(write);
        }
    }

    /// Adds a flush that was called at `moment`, or a forced write that began then. Returns its
    /// number, for [`turn`](Self::turn).
    pub(super) fn ask(&self, call: Call, moment: Moment) -> u64 {
        self.state.lock().ask(call, moment)
    }

    /// Returns the number of the last request.
    #[cfg(all(test, not(loom)))]
    pub(super) fn asked(&self) -> u64 {
        self.state.lock().last_job
    }

    /// Returns the next step of the request `job`. An answer is returned once.
    pub(super) fn turn(&self, job: u64) -> Turn {
        self.state.lock().turn(job)
    }

    /// Registers `wake`, to be woken after each flush, for requests that wait without a thread.
    pub(super) fn wake_after_flushes(&self, wake: Arc<Wake>) {
        let _ = self.wake.set(wake);
    }

    /// Waits for the result of a request, as [`ask`](Self::ask) takes it. Runs `flush` if it is
    /// this caller's turn.
    pub(super) fn pass(
        &self,
        call: Call,
        moment: Moment,
        flush: impl Fn() -> Result<(), Errno>,
    ) -> Result<(), Failure> {
        let mut state = self.state.lock();
        let job = state.ask(call, moment);
        loop {
            match state.turn(job) {
                Turn::Answered(answer) => return answer,
                Turn::Wait => self.done.wait(&mut state),
                Turn::Run => MutexGuard::unlocked(&mut state, || self.finish(flush())),
            }
        }
    }

    /// Ends the running flush with `outcome`.
    pub(super) fn finish(&self, outcome: Result<(), Errno>) {
        self.state.lock().finish(outcome);
        self.done.notify_all();
        if let Some(wake) = self.wake.get() {
            wake.wake();
        }
    }

    /// Closes the gate, after a forced write failed outside of it.
    pub(super) fn fail(&self, errno: Errno) {
        let mut state = self.state.lock();
        state.close(errno);
        state.lose();
    }

    /// Opens the gate again, after the file was opened again.
    pub(super) fn reopen(&self) {
        self.state.lock().is_closed = false;
    }

    /// Has `replace` put another file into place, which lacks the writes that are not flushed. No
    /// flush begins between the two.
    pub(super) fn lose_with(&self, replace: impl FnOnce()) {
        let mut state = self.state.lock();
        replace();
        state.lose();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use proptest::prelude::*;

    use super::*;

    fn flush(gate: &FlushGate, outcome: Result<(), Errno>) -> Result<(), Failure> {
        gate.pass(Call::Flush, gate.now(), || outcome)
    }

    const FAILED: Result<(), Failure> = Err(Failure::Now(Errno::IO));
    const LOST: Result<(), Failure> = Err(Failure::Earlier(Errno::IO));

    #[test]
    fn a_failure_closes_the_gate_until_the_file_is_opened_again() {
        let gate = FlushGate::default();
        assert_eq!(flush(&gate, Ok(())), Ok(()));
        assert_eq!(flush(&gate, Err(Errno::IO)), FAILED);
        for _ in 0..3 {
            assert_eq!(flush(&gate, Ok(())), LOST);
        }
        gate.reopen();
        assert_eq!(flush(&gate, Ok(())), Ok(()));
    }

    #[test]
    fn a_failed_write_through_closes_the_gate() {
        let gate = FlushGate::default();
        gate.fail(Errno::NOSPC);
        assert_eq!(flush(&gate, Ok(())), Err(Failure::Earlier(Errno::NOSPC)));
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
                        gate.pass(Call::Flush, gate.now(), || {
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

    #[test]
    fn a_running_flush_does_not_answer_a_later_call() {
        let gate = FlushGate::default();
        let early = gate.ask(Call::Flush, gate.now());
        assert_eq!(gate.turn(early), Turn::Run);
        let late = gate.ask(Call::Flush, gate.now());
        assert_eq!(gate.turn(late), Turn::Wait);
        gate.finish(Ok(()));
        assert_eq!(gate.turn(late), Turn::Run);
        gate.finish(Ok(()));
        let answers = [gate.turn(early), gate.turn(late)];
        assert_eq!(answers, [Turn::Answered(Ok(())), Turn::Answered(Ok(()))]);
    }

    #[test]
    fn a_write_that_a_failed_flush_dropped_fails_the_flush_of_its_writer() {
        for is_under_way in [false, true] {
            let gate = FlushGate::default();
            let begun = gate.now();
            let first = gate.pass(Call::Flush, gate.now(), || {
                if !is_under_way {
                    gate.wrote(begun);
                }
                Err(Errno::IO)
            });
            assert_eq!(first, FAILED);
            if is_under_way {
                gate.wrote(begun);
            }
            gate.reopen();
            assert_eq!(flush(&gate, Ok(())), LOST, "is under way: {is_under_way}");
            assert_eq!(flush(&gate, Ok(())), Ok(()));
        }
    }

    #[test]
    fn a_forced_write_that_a_failed_flush_dropped_fails() {
        let gate = FlushGate::default();
        let begun = gate.now();
        assert_eq!(flush(&gate, Err(Errno::IO)), FAILED);
        gate.reopen();
        assert_eq!(gate.pass(Call::ForcedWrite, begun, || Ok(())), LOST);
        assert_eq!(gate.pass(Call::ForcedWrite, gate.now(), || Ok(())), Ok(()));
    }

    #[test]
    fn a_flush_that_was_called_before_a_failure_fails_too() {
        let gate = FlushGate::default();
        gate.wrote(gate.now());
        let called = gate.now();
        assert_eq!(flush(&gate, Err(Errno::IO)), FAILED);
        gate.reopen();
        assert_eq!(gate.pass(Call::Flush, called, || Ok(())), LOST);
        assert_eq!(flush(&gate, Ok(())), Ok(()));
    }

    /// The flush that runs meanwhile may be of either file.
    #[test]
    fn another_file_in_place_of_the_old_one_loses_its_unflushed_writes() {
        for is_flushing in [false, true] {
            let gate = FlushGate::default();
            gate.wrote(gate.now());
            if is_flushing {
                let replace = || {
                    gate.lose_with(|| ());
                    Ok(())
                };
                assert_eq!(gate.pass(Call::Flush, gate.now(), replace), LOST);
            } else {
                gate.lose_with(|| ());
                assert_eq!(flush(&gate, Ok(())), LOST);
            }
            assert_eq!(flush(&gate, Ok(())), Ok(()));
        }
    }

    /// The data of a write, in a model of the kernel.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Data {
        Unwritten,
        Dirty,
        Dropped,
        Durable,
    }

    struct Write {
        begun: Moment,
        data: Data,
        /// Its file was replaced.
        is_apart: bool,
        /// When it was acknowledged, if it was.
        acked: Option<u64>,
        is_forced: bool,
    }

    /// A flush, or the forced write `write`, that waits at the gate.
    struct Asked {
        job: u64,
        called: u64,
        write: Option<usize>,
    }

    #[derive(Debug, Clone, Copy)]
    enum Act {
        BeginWrite,
        WriteData(usize),
        Acknowledge(usize),
        Force(usize),
        CallFlush,
        AskForFlush(usize),
        /// The kernel fails to write all dirty data.
        Drop,
        /// The running flush ends, with an error if data was dropped.
        EndFlush,
        Reopen,
        /// Another file takes the place of the old one, with its page cache.
        Replace,
        /// A forced write fails around the gate.
        Fail,
    }

    fn act() -> impl Strategy<Value = Act> {
        let any = 0..8_usize;
        prop_oneof![
            3 => Just(Act::BeginWrite),
            3 => any.clone().prop_map(Act::WriteData),
            3 => any.clone().prop_map(Act::Acknowledge),
            1 => any.clone().prop_map(Act::Force),
            2 => Just(Act::CallFlush),
            3 => any.prop_map(Act::AskForFlush),
            2 => Just(Act::Drop),
            4 => Just(Act::EndFlush),
            2 => Just(Act::Reopen),
            1 => Just(Act::Replace),
            1 => Just(Act::Fail),
        ]
    }

    /// A file, its users and its gate.
    #[derive(Default)]
    struct Play {
        gate: FlushGate,
        now: u64,
        writes: Vec<Write>,
        called: Vec<(u64, Moment)>,
        asked: Vec<Asked>,
        /// The writes that the running flush covers.
        running: Option<Vec<usize>>,
        has_dropped: bool,
        /// When each failed flush was called, and when it failed.
        failed: Vec<(u64, u64)>,
    }

    impl Play {
        fn act(&mut self, act: Act) {
            self.now += 1;
            match act {
                Act::BeginWrite => {
                    let (begun, data) = (self.gate.now(), Data::Unwritten);
                    let (is_apart, acked, is_forced) = (false, None, false);
                    self.writes.push(Write { begun, data, is_apart, acked, is_forced });
                }
                Act::WriteData(index) => {
                    self.write_data(index);
                }
                Act::Acknowledge(index) => {
                    if let Some(index) = self.write_data(index) {
                        self.gate.wrote(self.writes[index].begun);
                        self.writes[index].acked = Some(self.now);
                    }
                }
                Act::Force(index) => {
                    if let Some(write) = self.write_data(index) {
                        self.writes[write].is_forced = true;
                        let job = self.gate.ask(Call::ForcedWrite, self.writes[write].begun);
                        self.asked.push(Asked { job, called: self.now, write: Some(write) });
                    }
                }
                Act::CallFlush => self.called.push((self.now, self.gate.now())),
                Act::AskForFlush(index) if index < self.called.len() => {
                    let (called, moment) = self.called.remove(index);
                    let job = self.gate.ask(Call::Flush, moment);
                    self.asked.push(Asked { job, called, write: None });
                }
                Act::Drop if self.running.is_some() => self.drop_data(),
                Act::AskForFlush(_) | Act::Drop => {}
                Act::EndFlush => self.end_flush(),
                Act::Reopen => self.gate.reopen(),
                Act::Replace => {
                    let gate = std::mem::take(&mut self.gate);
                    gate.lose_with(|| self.replace());
                    self.gate = gate;
                }
                Act::Fail => {
                    self.drop_data();
                    self.gate.fail(Errno::IO);
                }
            }
            self.poll();
        }

        /// Writes the data of the write at `index` among those that are not acknowledged.
        fn write_data(&mut self, index: usize) -> Option<usize> {
            let is_open = |it: &Write| it.acked.is_none() && !it.is_forced;
            let mut open = self.writes.iter_mut().enumerate().filter(|it| is_open(it.1));
            let (number, write) = open.nth(index)?;
            if write.data == Data::Unwritten {
                write.data = if write.is_apart { Data::Dropped } else { Data::Dirty };
            }
            Some(number)
        }

        fn drop_data(&mut self) {
            self.has_dropped = self.running.is_some();
            let dirty = self.writes.iter_mut().filter(|it| it.data == Data::Dirty);
            dirty.for_each(|it| it.data = Data::Dropped);
        }

        fn replace(&mut self) {
            let dirty = self.writes.iter_mut().filter(|it| it.data == Data::Dirty);
            dirty.for_each(|it| it.data = Data::Dropped);
            for write in &mut self.writes {
                write.is_apart = true;
            }
        }

        fn end_flush(&mut self) {
            let Some(covered) = self.running.take() else { return };
            if std::mem::take(&mut self.has_dropped) {
                return self.gate.finish(Err(Errno::IO));
            }
            for write in covered {
                if self.writes[write].data == Data::Dirty {
                    self.writes[write].data = Data::Durable;
                }
            }
            self.gate.finish(Ok(()));
        }

        fn poll(&mut self) {
            for asked in std::mem::take(&mut self.asked) {
                match self.gate.turn(asked.job) {
                    Turn::Wait => self.asked.push(asked),
                    Turn::Run => {
                        let numbers = 0..self.writes.len();
                        let is_dirty = |it: &usize| self.writes[*it].data == Data::Dirty;
                        self.running = Some(numbers.filter(is_dirty).collect());
                        self.asked.push(asked);
                    }
                    Turn::Answered(Ok(())) => self.check(&asked),
                    Turn::Answered(Err(_)) if asked.write.is_none() => {
                        self.failed.push((asked.called, self.now));
                    }
                    Turn::Answered(Err(_)) => {}
                }
            }
        }

        /// Checks a request that succeeded.
        fn check(&self, asked: &Asked) {
            if let Some(write) = asked.write {
                assert_eq!(self.writes[write].data, Data::Durable, "forced write {write}");
                return;
            }
            for (number, write) in self.writes.iter().enumerate() {
                let Some(acked) = write.acked.filter(|acked| *acked < asked.called) else {
                    continue;
                };
                let is_told = |it: &(u64, u64)| it.0 > acked && it.1 < asked.called;
                let is_sound = write.data == Data::Durable || self.failed.iter().any(is_told);
                assert!(is_sound, "write {number} is {:?} after a flush", write.data);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Checks for any order of events: when a flush succeeds, each write that was acknowledged
        /// before it was called is durable, unless a flush that was called after that write has
        /// failed before. A forced write that succeeds is durable.
        #[test]
        fn flushes_keep_their_word_over_losses(acts in prop::collection::vec(act(), 1..80)) {
            let mut play = Play::default();
            for act in acts {
                play.act(act);
            }
            for _ in 0..4 {
                play.act(Act::EndFlush);
                play.act(Act::Reopen);
            }
            prop_assert!(play.asked.is_empty(), "every request is answered");
            play.act(Act::CallFlush);
            play.act(Act::AskForFlush(0));
            play.act(Act::EndFlush);
        }
    }
}
