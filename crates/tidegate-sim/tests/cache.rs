//! The cache under the crash simulator: writers that evict and clean while they fill it, and
//! crashes also in recovery. Then planted bugs, each of which the same budget finds.
//!
//! A failure prints the line that replays it. `TIDEGATE_SIM_ROUNDS` multiplies the number of seeds.

use std::time::Instant;

use tidegate::cache::mode::Mode;
use tidegate_sim::cache::{CacheFault, CacheSubject};
use tidegate_sim::explore::{Effort, Explorer, Failure, Pool, Stats, seeded};
use tidegate_sim::history::{Mix, Op, Plan, Step};
use tidegate_sim::judge::Promise;
use tidegate_sim::medium::{Granule, StoreOrder};
use tidegate_sim::mutations::Mutation;
use tidegate_sim::random::Random;

/// Every image of every crash with one page in flight, data in two chunks.
const ENUMERATE: Effort = Effort {
    exhaustive_images: 1024,
    sampled_images: 24,
    deep_one_in: 256,
    granule: Granule::Chunk(2048),
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
const LBAS: &[u64] = &[0, 1, 2, 3, 5];
/// So few that five pages do not fit.
const SLOTS: u64 = 4;

const WB: &[Mode] = &[Mode::WriteBack];
const WT: &[Mode] = &[Mode::WriteThrough];
const DURABLE: &[Mode] = &[Mode::WriteBack, Mode::WriteThrough, Mode::WriteOnly];

fn write(lba: u64, stamp: u32) -> Step {
    Step { op: Op::Write { lba, blocks: 1, stamp, fua: false }, ordinal: 0 }
}

/// Writes of `count` pages in turn.
fn one_writer(count: u32) -> Plan {
    let step = |index| write(LBAS[index as usize % LBAS.len()], 101 + index);
    vec![(0..count).map(step).collect()]
}

/// A page is written twice, so that a dead version is left, cleaned and evicted by others.
fn rewriter() -> Plan {
    let lbas = [0, 0, 1, 1, 2, 2, 5, 6, 0, 0, 1, 5];
    vec![lbas.into_iter().zip(101..).map(|(lba, stamp)| write(lba, stamp)).collect()]
}

fn full_pool(subject: &CacheSubject) -> Pool {
    Pool::prepare(subject, &[0, 1, 5, 2, 6, 0, 1]).unwrap()
}

fn exhaustive_with(
    subject: &CacheSubject,
    plan: &Plan,
    preemptions: usize,
    mutation: Option<Mutation>,
) -> Result<Stats, Failure> {
    let explorer = Explorer::new(subject, full_pool(subject), plan.len(), ENUMERATE).unwrap();
    let mut explorer = explorer.with_mutation(mutation);
    explorer.exhaustive(plan, preemptions).map(|()| explorer.stats())
}

fn exhaustive(name: &str, plan: &Plan, preemptions: usize) {
    let start = Instant::now();
    let subject = CacheSubject::new(BLOCKS, SLOTS, WB, CacheFault::None);
    match exhaustive_with(&subject, plan, preemptions, None) {
        Ok(stats) => println!("{name}: {stats} in {:?}", start.elapsed()),
        Err(failure) => panic!("replay: cargo test -p tidegate-sim --test cache {name}\n{failure}"),
    }
}

fn random_history(
    subject: &CacheSubject,
    mixture: Mix,
    seed: u64,
    mutation: Option<Mutation>,
) -> Result<Stats, Failure> {
    let plan = mixture.plan(&mut Random::new(seed), &mut 1000);
    let explorer = Explorer::new(subject, full_pool(subject), mixture.threads, SAMPLE).unwrap();
    let mut explorer = explorer.with_mutation(mutation);
    explorer.sampled(&plan, seed).map(|()| explorer.stats())
}

#[test]
fn p1_p2_one_writer_that_evicts_and_cleans_all_subsets() {
    exhaustive("p1_p2_one_writer_that_evicts_and_cleans_all_subsets", &one_writer(6), 0);
}

#[test]
fn p1_p2_a_writer_that_leaves_dead_versions_all_subsets() {
    exhaustive("p1_p2_a_writer_that_leaves_dead_versions_all_subsets", &rewriter(), 0);
}

#[test]
fn p1_p2_two_writers_of_one_block() {
    exhaustive(
        "p1_p2_two_writers_of_one_block",
        &vec![vec![write(0, 101)], vec![write(0, 102)]],
        1,
    );
}

#[test]
fn p3_a_reader_beside_a_writer_that_evicts() {
    let read = |lba| Step { op: Op::Read { lba }, ordinal: 0 };
    let plan = vec![vec![write(0, 101), write(2, 102)], vec![read(0), read(2)]];
    exhaustive("p3_a_reader_beside_a_writer_that_evicts", &plan, 1);
}

const THREE_WRITERS: Mix =
    Mix { threads: 3, ops: 6, lbas: LBAS, blocks_max: 3, reads_pct: 25, others_pct: 8 };
const TWO_WRITERS: Mix = Mix { threads: 2, ..THREE_WRITERS };
/// Pages that are written again at once, so that older versions of them are left.
const REWRITER: Mix = Mix { threads: 1, ops: 10, lbas: &[0, 1], blocks_max: 1, ..THREE_WRITERS };

#[test]
fn p1_p2_p3_three_writers_sampled() {
    seeded("p1_p2_p3_three_writers_sampled", 16, |seed| {
        let subject = CacheSubject::new(BLOCKS, SLOTS, WB, CacheFault::None);
        random_history(&subject, THREE_WRITERS, seed, None)
    });
}

#[test]
fn p1_p2_p3_beside_fills_cleaning_and_eviction_sampled() {
    seeded("p1_p2_p3_beside_fills_cleaning_and_eviction_sampled", 16, |seed| {
        let subject = CacheSubject::new(BLOCKS, SLOTS, WB, CacheFault::None).with_background();
        random_history(&subject, Mix { reads_pct: 50, ..TWO_WRITERS }, seed, None)
    });
}

#[test]
fn p1_p2_p3_write_through_sampled() {
    seeded("p1_p2_p3_write_through_sampled", 16, |seed| {
        let subject = CacheSubject::new(BLOCKS, SLOTS, WT, CacheFault::None).with_background();
        random_history(&subject, TWO_WRITERS, seed, None)
    });
}

#[test]
fn p1_p2_p3_modes_in_turn_sampled() {
    seeded("p1_p2_p3_modes_in_turn_sampled", 16, |seed| {
        let subject = CacheSubject::new(BLOCKS, SLOTS, DURABLE, CacheFault::None).with_background();
        random_history(&subject, TWO_WRITERS, seed, None)
    });
}

#[test]
fn p1_p2_p3_eviction_of_pages_that_are_written_again_sampled() {
    let name = "p1_p2_p3_eviction_of_pages_that_are_written_again_sampled";
    seeded(name, 12, |seed| evicting(seed, None));
}

/// Two pages that are written again and again, with slots for all, and evicted as soon as they are
/// clean: with older versions beside them.
fn evicting(seed: u64, mutation: Option<Mutation>) -> Result<Stats, Failure> {
    let subject = CacheSubject::new(BLOCKS, 12, WB, CacheFault::None);
    random_history(&subject.with_background().keeping_free(12), REWRITER, seed, mutation)
}

#[test]
fn p6_kills_power_cuts_and_recoveries_in_turn() {
    let mixture = Mix { ops: 4, ..TWO_WRITERS };
    seeded("p6_kills_power_cuts_and_recoveries_in_turn", 12, |seed| {
        let subject = CacheSubject::new(BLOCKS, SLOTS, DURABLE, CacheFault::None);
        let mut explorer = Explorer::new(&subject, full_pool(&subject), 2, SAMPLE).unwrap();
        explorer.lifetime(&mixture, 3, seed).map(|()| explorer.stats())
    });
}

/// The budget of the planted bugs, first failure first.
fn hunt(
    modes: &'static [Mode],
    fault: CacheFault,
    mutation: Option<Mutation>,
) -> Result<Stats, Failure> {
    let subject = CacheSubject::new(BLOCKS, SLOTS, modes, fault);
    let mut total = exhaustive_with(&subject, &rewriter(), 0, mutation)?;
    for seed in 0..4 {
        total += random_history(&subject, TWO_WRITERS, seed, mutation)?;
    }
    Ok(total)
}

fn caught(modes: &'static [Mode], fault: CacheFault, mutation: Option<Mutation>) -> Promise {
    match hunt(modes, fault, mutation) {
        Ok(stats) => panic!("{modes:?} {fault:?} {mutation:?} went unnoticed: {stats}"),
        Err(failure) => {
            println!("{modes:?} {fault:?} {mutation:?}\n{failure}");
            failure.verdict.promise
        }
    }
}

#[test]
fn without_a_bug_the_same_budget_finds_nothing() {
    for modes in [WB, WT] {
        match hunt(modes, CacheFault::None, None) {
            Ok(stats) => println!("control: {stats}"),
            Err(failure) => panic!("{failure}"),
        }
    }
}

#[test]
fn p1_without_the_fence() {
    let found = caught(WB, CacheFault::None, Some(Mutation::DropFence(0)));
    assert_eq!(found, Promise::P1Durable);
}

#[test]
fn p1_where_the_newest_version_leaves_before_the_older_ones() {
    let broken = (0..40).find_map(|seed| evicting(seed, Some(Mutation::MergeVoids)).err());
    let failure = broken.expect("it went unnoticed");
    println!("{failure}");
    assert!(matches!(failure.verdict.promise, Promise::P1Durable | Promise::P2Atomic), "{failure}");
}

#[test]
fn p1_where_void_headers_stay_behind() {
    let found = caught(WB, CacheFault::None, Some(Mutation::DropVoidWriteBack));
    assert!(matches!(found, Promise::P1Durable | Promise::P6Recovery), "{found:?}");
}

#[test]
fn p1_where_pages_are_clean_before_the_backing_is_flushed() {
    assert_ne!(caught(WB, CacheFault::NoBackingFlush, None), Promise::Progress);
}

#[test]
fn p1_where_pages_that_are_written_through_are_clean_at_once() {
    assert_ne!(caught(WT, CacheFault::NoBackingFlush, None), Promise::Progress);
}
