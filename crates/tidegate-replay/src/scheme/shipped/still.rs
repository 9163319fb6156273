//! A machine whose clock stands still. An engine that measured this machine's time, or counted its
//! CPUs, would give another answer for the same trace on the next run.

use std::rc::Rc;

use tidegate::machine::{Machine, enter};

use crate::error::Result;
use crate::scheme::devices::Devices;
use crate::scheme::{Requests, Scheme};
use crate::trace::Op;

/// As many as the machine of the DRAM tiers has.
const CPUS: u32 = 4;

/// The machine. Its one thread is the caller's: engines run without threads of their own.
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

    /// The time comes first: no other thread notifies.
    fn wait(&self, _event: usize, _lock: usize, _until_ns: Option<u64>) -> bool {
        false
    }

    fn notify(&self, _event: usize, _all: bool) {}

    fn copied(&self, _bytes: usize) {}
}

/// A scheme on a machine of its own, which `machine` is.
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
