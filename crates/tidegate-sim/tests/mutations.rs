//! Planted bugs: the simulator objects to each, and to nothing under the same budget without one.

use tidegate::btt::{FlogSlots, Version};
use tidegate_sim::explore::{Effort, Explorer, Failure, Pool, Stats};
use tidegate_sim::history::{Mix, Op, Plan, Step};
use tidegate_sim::judge::Promise;
use tidegate_sim::medium::{Granule, StoreOrder};
use tidegate_sim::mutations::Mutation;
use tidegate_sim::random::Random;
use tidegate_sim::subject::BttSubject;

const EFFORT: Effort = Effort {
    exhaustive_images: 1024,
    sampled_images: 32,
    deep_one_in: 64,
    granule: Granule::Chunk(256),
    order: StoreOrder::Word,
};

fn write(lba: u64, stamp: u32, lane: usize) -> Step {
    Step { op: Op::Write { lba, blocks: 1, stamp, fua: false }, ordinal: lane }
}

/// One thread that moves through the lanes; two threads that meet at a block through lanes in
/// either order.
fn plans() -> [Plan; 3] {
    [
        vec![vec![write(0, 101, 0), write(16, 102, 0), write(0, 103, 1), write(0, 104, 0)]],
        vec![vec![write(0, 101, 1), write(0, 102, 0), write(16, 103, 1)]],
        vec![vec![write(0, 101, 1), write(16, 102, 0)], vec![write(0, 103, 0), write(16, 104, 1)]],
    ]
}

/// The budget: all interleavings and images of the plans, then random histories, first failure
/// first.
fn hunt(mutation: Option<Mutation>) -> Result<Stats, Failure> {
    let subject = BttSubject::new(20, 3, Version::V1_1, FlogSlots::ZeroOne);
    let pool = Pool::prepare(&subject, &[0, 1, 16, 0, 17, 1, 0, 16]).unwrap();
    let mut total = Stats::default();
    for plan in plans() {
        let explorer = Explorer::new(&subject, pool.clone(), plan.len(), EFFORT).unwrap();
        let mut explorer = explorer.with_mutation(mutation);
        explorer.exhaustive(&plan, 1)?;
        total += explorer.stats();
    }
    let mixture =
        Mix { threads: 2, ops: 5, lbas: &[0, 16], blocks_max: 1, reads_pct: 0, others_pct: 0 };
    for seed in 0..20 {
        let plan = mixture.plan(&mut Random::new(seed), &mut 100);
        let explorer = Explorer::new(&subject, pool.clone(), 2, EFFORT).unwrap();
        let mut explorer = explorer.with_mutation(mutation);
        explorer.sampled(&plan, seed)?;
        total += explorer.stats();
    }
    Ok(total)
}

fn caught(mutation: Mutation) -> Promise {
    match hunt(Some(mutation)) {
        Ok(stats) => panic!("{mutation:?} went unnoticed: {stats}"),
        Err(failure) => {
            println!("{mutation:?}\n{failure}");
            failure.verdict.promise
        }
    }
}

#[test]
fn without_a_mutation_the_same_budget_finds_nothing() {
    match hunt(None) {
        Ok(stats) => println!("control: {stats}"),
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn p2_without_the_first_fence() {
    caught(Mutation::DropFence(0));
}

#[test]
fn p1_without_the_second_fence() {
    assert_eq!(caught(Mutation::DropFence(1)), Promise::P1Durable);
}

#[test]
fn p1_without_the_write_back_of_the_replaced_map_entry() {
    caught(Mutation::DropMapWriteBack);
}

#[test]
fn p1_without_the_write_back_of_the_previous_map_entry() {
    caught(Mutation::DropPreviousMapWriteBack);
}

#[test]
fn p6_without_the_write_back_of_the_first_flog_half() {
    caught(Mutation::DropFlogWriteBack(0));
}

#[test]
fn p1_without_the_write_back_of_the_second_flog_half() {
    assert_eq!(caught(Mutation::DropFlogWriteBack(1)), Promise::P1Durable);
}

#[test]
fn p2_with_data_left_in_the_cache() {
    caught(Mutation::CachedData);
}

#[test]
fn p2_with_the_sequence_number_before_the_first_fence() {
    caught(Mutation::EarlySequence);
}
