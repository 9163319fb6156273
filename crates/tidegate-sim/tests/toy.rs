//! The simulator itself, on an engine whose faults are known.

use tidegate_sim::explore::{Effort, Explorer, Failure, Pool};
use tidegate_sim::history::{Mix, Op, Plan, Step};
use tidegate_sim::judge::Promise;
use tidegate_sim::medium::{Granule, StoreOrder};
use tidegate_sim::toy::{Fault, Toy};

const EFFORT: Effort = Effort {
    exhaustive_images: 4096,
    sampled_images: 64,
    deep_one_in: 1,
    granule: Granule::Chunk(256),
    order: StoreOrder::Word,
};

fn write(lba: u64, stamp: u32) -> Step {
    Step { op: Op::Write { lba, blocks: 1, stamp, fua: false }, ordinal: 0 }
}

fn read(lba: u64) -> Step {
    Step { op: Op::Read { lba }, ordinal: 0 }
}

fn flush() -> Step {
    Step { op: Op::Flush, ordinal: 0 }
}

fn run(toy: Toy, plan: &Plan, preemptions: usize) -> Result<(), Failure> {
    let pool = Pool::prepare(&toy, &[0, 1, 2, 3, 0]).unwrap();
    let mut explorer = Explorer::new(&toy, pool, plan.len(), EFFORT).unwrap();
    explorer.exhaustive(plan, preemptions)
}

fn broken(fault: Fault, volatile_cache: bool, plan: &Plan) -> Promise {
    let failure = run(Toy { fault, volatile_cache }, plan, 2).unwrap_err();
    println!("{fault:?}: {failure}");
    failure.verdict.promise
}

fn two_writers_and_a_reader() -> Plan {
    vec![vec![write(0, 101), write(0, 102)], vec![write(0, 103)], vec![read(0)]]
}

#[test]
fn a_sound_engine_passes_every_plan() {
    let toy = Toy { fault: Fault::None, volatile_cache: false };
    run(toy, &two_writers_and_a_reader(), 2).unwrap();
    let cached = Toy { fault: Fault::None, volatile_cache: true };
    run(cached, &vec![vec![write(0, 101), write(1, 102), flush(), write(0, 103)]], 0).unwrap();
}

#[test]
fn p1_a_write_acknowledged_too_early_is_found() {
    let plan = vec![vec![write(0, 101), read(0)]];
    assert_eq!(broken(Fault::NoSelectorFence, false, &plan), Promise::P1Durable);
}

#[test]
fn p2_unordered_data_is_found() {
    let plan = vec![vec![write(0, 101), write(0, 102)]];
    let found = broken(Fault::NoDataFence, false, &plan);
    assert!(matches!(found, Promise::P1Durable | Promise::P2Atomic), "torn, or older than old");
}

#[test]
fn p2_overwriting_in_place_is_found() {
    assert_eq!(broken(Fault::InPlace, false, &vec![vec![write(0, 101)]]), Promise::P2Atomic);
}

#[test]
fn p3_a_stale_read_is_found() {
    let plan = vec![vec![write(0, 101), write(0, 102), write(0, 103)], vec![read(0), read(0)]];
    let found = broken(Fault::UnlockedRead, false, &plan);
    assert!(matches!(found, Promise::P1Durable | Promise::P3Latest), "stale, or undone by a crash");
}

#[test]
fn p3_a_race_for_a_lock_is_found() {
    let plan = two_writers_and_a_reader();
    let found = broken(Fault::RacyLock, false, &plan);
    assert!(matches!(found, Promise::P1Durable | Promise::P2Atomic | Promise::P3Latest));
}

#[test]
fn p4_a_forgetful_flush_is_found() {
    let plan = vec![vec![write(0, 101), write(1, 102), flush()]];
    assert_eq!(broken(Fault::ForgetfulFlush, true, &plan), Promise::P4Flush);
}

#[test]
fn p6_a_careless_recovery_is_found() {
    assert_eq!(
        broken(Fault::CarelessRecovery, false, &vec![vec![write(0, 101)]]),
        Promise::P1Durable,
        "a crash between clearing and rewriting the selector brings the old value back"
    );
}

#[test]
fn a_lock_never_given_back_is_a_deadlock() {
    let plan = vec![vec![write(3, 101)], vec![write(3, 102)]];
    assert_eq!(broken(Fault::LostUnlock, false, &plan), Promise::Progress);
}

#[test]
fn lifetimes_repeat_by_seed() {
    let toy = Toy { fault: Fault::RacyLock, volatile_cache: false };
    let mixture =
        Mix { threads: 3, ops: 6, lbas: &[0, 1], blocks_max: 2, reads_pct: 40, others_pct: 0 };
    let life = |seed| {
        let pool = Pool::prepare(&toy, &[0, 1]).unwrap();
        let mut explorer = Explorer::new(&toy, pool, 3, EFFORT).unwrap();
        explorer.lifetime(&mixture, 2, seed).map_err(|failure| failure.to_string())
    };
    let outcomes: Vec<_> = (0..6).map(life).collect();
    assert!(outcomes.iter().any(Result::is_err), "some seed meets the race");
    assert_eq!(outcomes, (0..6).map(life).collect::<Vec<_>>());
}
