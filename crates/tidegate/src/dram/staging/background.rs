//! Background threads: asleep until a set calls, and with no call without a timeout, so an idle tier costs no CPU.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::super::phases::Phase;
use super::replacement::Replacement;
use super::runtime::{Activity, Core, SetGuard, no_thread};
use super::settle::Batch;
use crate::device::Result;

/// How long the device below must be without requests to count as idle.
const IDLE: Duration = Duration::from_millis(1);

/// The sets that call for a background thread.
#[derive(Default)]
pub(super) struct Bell {
    gate: Mutex<Gate>,
    called: Condvar,
    stopped: Condvar,
}

#[derive(Default)]
struct Gate {
    calls: VecDeque<usize>,
    stopping: bool,
}

impl Bell {
    /// Set `number` has work.
    pub(super) fn call(&self, number: usize) {
        self.gate.lock().calls.push_back(number);
        self.called.notify_one();
    }

    /// The next set that has work. None: the thread is to end.
    fn answer(&self) -> Option<usize> {
        let mut gate = self.gate.lock();
        loop {
            if gate.stopping {
                return None;
            }
            if let Some(number) = gate.calls.pop_front() {
                return Some(number);
            }
            self.called.wait(&mut gate);
        }
    }

    /// Waits for as long as the device below must be idle, or until the thread is to end.
    fn wait_for_idle(&self) {
        let mut gate = self.gate.lock();
        if !gate.stopping {
            self.stopped.wait_for(&mut gate, IDLE);
        }
    }

    fn is_stopping(&self) -> bool {
        self.gate.lock().stopping
    }

    fn stop(&self) {
        self.gate.lock().stopping = true;
        self.called.notify_all();
        self.stopped.notify_all();
    }
}

/// The threads of one tier.
pub(super) struct Threads(Mutex<Vec<JoinHandle<()>>>);

impl Threads {
    /// Starts `count` threads.
    ///
    /// # Errors
    /// The system refuses one; those already started have ended.
    pub(super) fn start<R: Replacement>(core: &Arc<Core<R>>, count: usize) -> Result<Self> {
        let threads = Self(Mutex::new(Vec::with_capacity(count)));
        for number in 0..count {
            let of_thread = core.clone();
            let thread = std::thread::Builder::new()
                .name(format!("stager-{number}"))
                .spawn(move || of_thread.serve());
            match thread {
                Ok(thread) => threads.0.lock().push(thread),
                Err(error) => {
                    threads.stop(&core.bell);
                    return Err(no_thread(error));
                }
            }
        }
        Ok(threads)
    }

    /// Number of threads that run.
    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.0.lock().len()).unwrap_or(u32::MAX)
    }

    /// Ends the threads, once each has finished the blocks it is writing.
    pub(super) fn stop(&self, bell: &Bell) {
        bell.stop();
        for thread in self.0.lock().drain(..) {
            // A thread that panicked has already said why.
            let _ = thread.join();
        }
    }
}

/// Whether a device is idle, by its requests at one look and the next.
#[derive(Default)]
struct Idleness {
    seen: Option<Activity>,
}

impl Idleness {
    /// Nothing is under way, and nothing came since the last look.
    fn look(&mut self, now: Activity) -> bool {
        let before = self.seen.replace(now);
        now.begun == now.ended && before == Some(now)
    }
}

impl<R: Replacement> Core<R> {
    /// The life of a background thread.
    fn serve(&self) {
        let (mut batch, mut idleness) = (Batch::default(), Idleness::default());
        while let Some(number) = self.bell.answer() {
            let mut set = self.lock(number);
            while self.take_background(&mut set, &mut batch, &mut idleness) {
                let _operation = self.recorder.begin_single(Phase::Eviction);
                // What failed is in the ledger.
                let _ = self.write_back_in_background(&mut set, &mut batch);
            }
            set.set().end_background();
            set.end_call();
            set.notify();
        }
    }

    /// Starts writing back what the policy wants, when it wants it. False: that is nothing, or the thread is to end.
    fn take_background(
        &self,
        set: &mut SetGuard<'_, R>,
        batch: &mut Batch,
        idleness: &mut Idleness,
    ) -> bool {
        while !self.bell.is_stopping() {
            if !R::WHEN_IDLE || idleness.look(self.below.activity()) {
                return set.set().take_background(&mut batch.run);
            }
            if !set.set().wants_background() {
                return false;
            }
            set.unlocked(|| self.bell.wait_for_idle());
        }
        false
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_idle_after_two_looks_without_a_request() {
        let mut idleness = Idleness::default();
        let mut look = |begun, ended| idleness.look(Activity { begun, ended });
        assert!(!look(0, 0), "one look tells nothing");
        assert!(look(0, 0));
        assert!(!look(1, 0), "a request is under way");
        assert!(!look(1, 0), "and stays under way");
        assert!(!look(1, 1), "it ended only now");
        assert!(look(1, 1));
        assert!(!look(2, 2), "one came and went");
    }
}
