//! A machine whose clock stands still. An engine that used the time or the number of CPUs of the
//! real machine could give different results in every run of a trace.

use std::rc::Rc;

use tidegate::machine::{Machine, enter};

use crate::error::Result;
use crate::scheme::devices::Devices;
use crate::scheme::{Requests, Scheme};
use crate::trace::Op;

/// The number of CPUs, as in the machine of the DRAM tiers.
const CPUS: u32 = 4;

/// The machine. Its only thread is the caller: the engines start no threads.
pub(super) struct Still;

impl Machine for Still {
    fn cpus(&self) -> u32 {
        CPUS
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn thread_cpu_ns(&self) -> u64 {
        0
    }

    fn process_cpu_ns(&self) -> u64 {
        0
    }

    fn spawn(&self, _body: Box<dyn FnOnce() + Send>) -> u64 {
        unreachable!("engines of a replay have no threads")
    }

    fn current(&self) -> u64 {
        0
    }

    fn join(&self, _thread: u64) {}

    fn yield_now(&self) {}

    fn pause(&self) {}

    fn await_unlock(&self, _lock: usize) {
        unreachable!("no other thread holds a lock")
    }

    fn locked(&self, _lock: usize) {}

    fn unlocked(&self, _lock: usize) {}

    /// Times out at once, because no other thread can notify.
    fn wait(&self, _event: usize, _lock: usize, _until_ns: Option<u64>) -> bool {
        false
    }

    fn notify(&self, _event: usize, _all: bool) {}

    fn copied(&self, _bytes: usize) {}
}

/// A scheme that runs on `machine`.
pub(super) struct OnMachine<S> {
    pub(super) scheme: S,
    pub(super) machine: Rc<dyn Machine>,
}

impl<S: Scheme> Scheme for OnMachine<S> {
    fn play(&mut self, op: &Op, devices: &mut dyn Devices) -> Result<()> {
        let _entered = enter(Rc::clone(&self.machine));
        self.scheme.play(op, devices)
    }

    fn requests(&self) -> Requests {
        self.scheme.requests()
    }

    fn index_bytes_peak(&self) -> u64 {
        self.scheme.index_bytes_peak()
    }
}
