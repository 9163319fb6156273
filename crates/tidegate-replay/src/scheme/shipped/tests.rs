//! The result of a trace does not depend on the speed of this machine.

use std::cell::Cell;
use std::rc::Rc;

use tidegate::machine::Machine;
use tidegate::pmem::MediaModel;

use super::cache::Cache;
use super::still::Still;
use super::{scheme_on, scheme_over};
use crate::model::costs::Costs;
use crate::scheme::{Scheme, Sizes};
use crate::time::{DRAM_BYTES_PER_S, Meter, Totals};
use crate::trace::{FileId, Op};

/// A machine whose clock advances by 100 ms at each reading: a backing seems slow.
struct Slow(Cell<u64>);

impl Machine for Slow {
    fn cpus(&self) -> u32 {
        Still.cpus()
    }
    fn now_ns(&self) -> u64 {
        self.0.set(self.0.get() + 100_000_000);
        self.0.get()
    }
    fn thread_cpu_ns(&self) -> u64 {
        self.0.get()
    }
    fn process_cpu_ns(&self) -> u64 {
        self.0.get()
    }
    fn spawn(&self, body: Box<dyn FnOnce() + Send>) -> u64 {
        Still.spawn(body)
    }
    fn current(&self) -> u64 {
        0
    }
    fn join(&self, _thread: u64) {}
    fn yield_now(&self) {}
    fn pause(&self) {}
    fn await_unlock(&self, lock: usize) {
        Still.await_unlock(lock);
    }
    fn locked(&self, _lock: usize) {}
    fn unlocked(&self, _lock: usize) {}
    fn wait(&self, _event: usize, _lock: usize, _until_ns: Option<u64>) -> bool {
        false
    }
    fn notify(&self, _event: usize, _all: bool) {}
    fn copied(&self, _bytes: usize) {}
}

/// Plays writes that overrun the cache repeatedly.
fn play(mut scheme: Box<dyn Scheme>) -> (f64, Totals) {
    let mut meter = Meter::new("nvme".parse().unwrap(), MediaModel::dram(), DRAM_BYTES_PER_S);
    let file = FileId(0);
    for n in 0..20_000_u64 {
        let write = Op::Write { file, offset_bytes: n * 7919 % 8000 * 4096, len_bytes: 4096 };
        scheme.play(&write, &mut meter).unwrap();
        meter.end_operation();
        if n.is_multiple_of(100) {
            scheme.play(&Op::Sync { file }, &mut meter).unwrap();
            meter.end_operation();
        }
    }
    (meter.seconds(), meter.totals)
}

#[test]
fn a_trace_has_one_answer_whatever_the_time_is() {
    let pmem_bytes = 4 << 20;
    let (dram_pages, footprint_pages) = (64, 8000);
    let sizes = Sizes {
        dram_pages,
        pmem_bytes,
        pmem_media: MediaModel::dram(),
        costs: Costs::optane(),
        footprint_pages,
        atomic: false,
    };
    let still = || play(scheme_over(&sizes, Cache::new).unwrap());
    let first = still();
    assert_eq!(first, still());
    let slow = Rc::new(Slow(Cell::new(0)));
    let slow = play(scheme_on(slow, &sizes, Cache::new).unwrap());
    assert_ne!(first, slow, "the engine does look at the clock");
}
