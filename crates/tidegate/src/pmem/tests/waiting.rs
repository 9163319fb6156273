//! Threads that wait for each other.

use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::pmem::Region;

/// Two threads on one CPU wait for each other in turns. If a waiter kept the CPU, a turn would take
/// a whole time slice, and this test longer than its time limit.
#[test]
fn a_waiter_gives_its_cpu_to_the_thread_that_it_waits_for() {
    const TURNS: u32 = 100_000;
    let region = Region::anonymous(4096).unwrap();
    let turn = AtomicU32::new(0);
    let allowed = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap());
    let take_turns = |own: u32| {
        sched_setaffinity(None, &one).unwrap();
        for number in (own..TURNS).step_by(2) {
            while turn.load(Ordering::Acquire) != number {
                region.relax();
            }
            turn.store(number + 1, Ordering::Release);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| take_turns(0));
        scope.spawn(|| take_turns(1));
    });
    assert_eq!(turn.into_inner(), TURNS);
}
