//! The log as a device under the crash simulator: three writers that clean the log while they fill
//! it, and crashes also in recovery. Then planted bugs, each of which the same budget finds.
//!
//! A failure prints the line that replays it. `TIDEGATE_SIM_ROUNDS` multiplies the number of seeds.

use std::time::Instant;

use tidegate_sim::explore::{Effort, Explorer, Failure, Pool, Stats, seeded};
use tidegate_sim::history::{Mix, Op, Plan, Step};
use tidegate_sim::judge::Promise;
use tidegate_sim::log::{LogFault, LogSubject};
use tidegate_sim::medium::{Granule, StoreOrder};
use tidegate_sim::mutations::Mutation;
use tidegate_sim::random::Random;

/// Every image of every crash with one record in flight, payloads in two chunks.
const ENUMERATE: Effort = Effort {
    exhaustive_images: 1024,
    sampled_images: 24,
    deep_one_in: 256,
    granule: Granule::Chunk(256),
    order: StoreOrder::Word,
};

/// Samples with every 8-byte word by itself.
const SAMPLE: Effort = Effort {
    exhaustive_images: 16,
    sampled_images: 12,
    deep_one_in: 64,
    granule: Granule::Word,
    order: StoreOrder::Word,
};

const BLOCKS: u64 = 8;
const LBAS: &[u64] = &[0, 1, 2, 5];

fn write(lba: u64, stamp: u32) -> Step {
    Step { op: Op::Write { lba, blocks: 1, stamp, fua: false }, ordinal: 0 }
}

/// A pool whose first records lie where an older pool's were.
fn young_pool(subject: &LogSubject) -> Pool {
    Pool::prepare(subject, &[0, 1, 5]).unwrap()
}

/// A pool whose records have gone around the ring and are near its end again.
fn old_pool(subject: &LogSubject) -> Pool {
    let blocks: Vec<u64> = (0..195).map(|round| round * 3 % BLOCKS).collect();
    Pool::prepare(subject, &blocks).unwrap()
}

fn exhaustive_with(
    plan: &Plan,
    preemptions: usize,
    fault: LogFault,
    mutation: Option<Mutation>,
) -> Result<Stats, Failure> {
    let subject = LogSubject::new(BLOCKS, fault);
    let explorer = Explorer::new(&subject, young_pool(&subject), plan.len(), ENUMERATE).unwrap();
    let mut explorer = explorer.with_mutation(mutation);
    explorer.exhaustive(plan, preemptions).map(|()| explorer.stats())
}

fn exhaustive(name: &str, plan: &Plan, preemptions: usize) {
    let start = Instant::now();
    match exhaustive_with(plan, preemptions, LogFault::None, None) {
        Ok(stats) => println!("{name}: {stats} in {:?}", start.elapsed()),
        Err(failure) => panic!("replay: cargo test -p tidegate-sim --test log {name}\n{failure}"),
    }
}

fn random_history(
    mixture: Mix,
    seed: u64,
    fault: LogFault,
    mutation: Option<Mutation>,
    pool: fn(&LogSubject) -> Pool,
) -> Result<Stats, Failure> {
    let subject = LogSubject::new(BLOCKS, fault);
    let plan = mixture.plan(&mut Random::new(seed), &mut 1000);
    let explorer = Explorer::new(&subject, pool(&subject), mixture.threads, SAMPLE).unwrap();
    let mut explorer = explorer.with_mutation(mutation);
    explorer.sampled(&plan, seed).map(|()| explorer.stats())
}

#[test]
fn p1_p2_one_writer_who_cleans_all_subsets() {
    let steps = (0..5).map(|index| write(index % 2 * 5, 101 + u32::try_from(index).unwrap()));
    exhaustive("p1_p2_one_writer_who_cleans_all_subsets", &vec![steps.collect()], 0);
}

#[test]
fn p1_p2_three_writers_of_one_block() {
    let plan = vec![vec![write(0, 101)], vec![write(0, 102)], vec![write(0, 103)]];
    exhaustive("p1_p2_three_writers_of_one_block", &plan, 1);
}

#[test]
fn p3_reads_beside_writes_and_cleaning() {
    let read = Step { op: Op::Read { lba: 0 }, ordinal: 0 };
    let plan = vec![vec![write(0, 101), write(1, 102), write(0, 103)], vec![read, read, read]];
    exhaustive("p3_reads_beside_writes_and_cleaning", &plan, 1);
}

const THREE_WRITERS: Mix =
    Mix { threads: 3, ops: 6, lbas: LBAS, blocks_max: 3, reads_pct: 20, others_pct: 8 };

#[test]
fn p1_p2_p3_p4_three_writers_and_their_cleaning_sampled() {
    seeded("p1_p2_p3_p4_three_writers_and_their_cleaning_sampled", 24, |seed| {
        random_history(THREE_WRITERS, seed, LogFault::None, None, young_pool)
    });
}

#[test]
fn p1_p2_p3_p4_around_the_end_of_the_ring_sampled() {
    seeded("p1_p2_p3_p4_around_the_end_of_the_ring_sampled", 16, |seed| {
        random_history(THREE_WRITERS, seed, LogFault::None, None, old_pool)
    });
}

#[test]
fn p6_kills_power_cuts_and_recoveries_in_turn() {
    let mixture = Mix { ops: 4, ..THREE_WRITERS };
    seeded("p6_kills_power_cuts_and_recoveries_in_turn", 12, |seed| {
        let subject = LogSubject::new(BLOCKS, LogFault::None);
        let mut explorer = Explorer::new(&subject, old_pool(&subject), 3, SAMPLE).unwrap();
        explorer.lifetime(&mixture, 3, seed).map(|()| explorer.stats())
    });
}

#[test]
fn p1_p2_p3_p4_writers_beside_a_cleaner_sampled() {
    let mixture = Mix { threads: 2, ..THREE_WRITERS };
    seeded("p1_p2_p3_p4_writers_beside_a_cleaner_sampled", 16, |seed| {
        let subject = LogSubject::new(BLOCKS, LogFault::None).with_cleaner();
        let plan = mixture.plan(&mut Random::new(seed), &mut 1000);
        let pool = young_pool(&subject);
        let mut explorer = Explorer::new(&subject, pool, mixture.threads, SAMPLE).unwrap();
        explorer.sampled(&plan, seed).map(|()| explorer.stats())
    });
}

/// A ring, and writes from a block to more than all of it.
const RING_BYTES: u64 = 64 << 10;
const LARGE: Mix =
    Mix { threads: 3, ops: 3, lbas: &[0, 1, 40], blocks_max: 150, reads_pct: 10, others_pct: 8 };

/// Images are of no interest here: a few.
const FEW: Effort = Effort { exhaustive_images: 2, sampled_images: 2, deep_one_in: 4096, ..SAMPLE };

/// Writers wait for a cleaner, whatever the log is cleaned from: a wait that nothing ends is a
/// deadlock of the scheduler.
#[test]
fn writes_larger_than_the_log_end_with_every_setting() {
    let name = "writes_larger_than_the_log_end_with_every_setting";
    for pct in [1, 25, 50, 75, 90] {
        seeded(name, 6, |seed| {
            let subject =
                LogSubject::new(200, LogFault::None).with_writers_that_wait(RING_BYTES * pct / 100);
            let plan = LARGE.plan(&mut Random::new(seed), &mut 1000);
            let pool = Pool::prepare(&subject, &[0, 1, 40]).unwrap();
            let mut explorer = Explorer::new(&subject, pool, LARGE.threads, FEW).unwrap();
            explorer.sampled(&plan, seed).map(|()| explorer.stats())
        });
    }
}

/// The budget of the planted bugs, first failure first.
fn hunt(fault: LogFault, mutation: Option<Mutation>) -> Result<Stats, Failure> {
    let steps = (0..7).map(|index| write(index % 2 * 5, 101 + u32::try_from(index).unwrap()));
    let mut total = exhaustive_with(&vec![steps.collect()], 0, fault, mutation)?;
    for seed in 0..6 {
        total += random_history(THREE_WRITERS, seed, fault, mutation, young_pool)?;
    }
    Ok(total)
}

fn caught(fault: LogFault, mutation: Option<Mutation>) -> Promise {
    match hunt(fault, mutation) {
        Ok(stats) => panic!("{fault:?} {mutation:?} went unnoticed: {stats}"),
        Err(failure) => {
            println!("{fault:?} {mutation:?}\n{failure}");
            failure.verdict.promise
        }
    }
}

#[test]
fn without_a_bug_the_same_budget_finds_nothing() {
    match hunt(LogFault::None, None) {
        Ok(stats) => println!("control: {stats}"),
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn p1_without_the_fence() {
    // What is gone is also missed, where a later record calls it finished.
    let promise = caught(LogFault::None, Some(Mutation::DropFence(0)));
    assert!(matches!(promise, Promise::P1Durable | Promise::P6Recovery), "{promise:?}");
}

#[test]
fn p6_with_records_called_finished_before_their_fence() {
    let mutation = Some(Mutation::EarlyFinished);
    assert_eq!(caught(LogFault::None, mutation), Promise::P6Recovery);
}

#[test]
fn p1_without_the_limit_on_the_medium() {
    assert_eq!(caught(LogFault::None, Some(Mutation::DropLimitWriteBack)), Promise::P1Durable);
}

#[test]
fn p2_with_payloads_that_nobody_checks() {
    assert_eq!(caught(LogFault::PayloadsIgnored, None), Promise::P2Atomic);
}

#[test]
fn p1_with_the_salt_of_an_older_pool() {
    caught(LogFault::NoSalt, None);
}

#[test]
fn p1_with_the_tail_moved_before_the_backing_was_flushed() {
    caught(LogFault::NoBackingFlush, None);
}
