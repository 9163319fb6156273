//! The BTT under the crash simulator. Each test is named after the promise that it is about; all
//! judge all promises.
//!
//! A failure prints the line that replays it. `TIDEGATE_SIM_ROUNDS` multiplies the number of seeds.

use std::time::Instant;

use tidegate::btt::{FlogSlots, Version};
use tidegate_sim::explore::{Effort, Explorer, Failure, Pool, Stats, seeded};
use tidegate_sim::history::{Mix, Op, Plan, Step};
use tidegate_sim::medium::{Granule, StoreOrder};
use tidegate_sim::mutations::Mutation;
use tidegate_sim::random::Random;
use tidegate_sim::subject::BttSubject;

/// Every image of every crash, bulk data in two chunks.
const ENUMERATE: Effort = Effort {
    exhaustive_images: 4096,
    sampled_images: 64,
    deep_one_in: 16,
    granule: Granule::Chunk(256),
    order: StoreOrder::Word,
};

/// Samples with every 8-byte word by itself.
const SAMPLE: Effort = Effort {
    exhaustive_images: 32,
    sampled_images: 24,
    deep_one_in: 16,
    granule: Granule::Word,
    order: StoreOrder::Word,
};

/// Blocks whose map entries are in two cache lines, neighbours in each.
const LBAS: &[u64] = &[0, 1, 16, 17];

fn btt() -> BttSubject {
    BttSubject::new(20, 3, Version::V1_1, FlogSlots::ZeroOne)
}

/// A pool whose lanes are at different places of their sequence.
fn pool(subject: &BttSubject) -> Pool {
    Pool::prepare(subject, &[0, 1, 16, 0, 17, 1, 0, 16]).unwrap()
}

fn write(lba: u64, stamp: u32, lane: usize) -> Step {
    Step { op: Op::Write { lba, blocks: 1, stamp, fua: false }, ordinal: lane }
}

fn read(lba: u64) -> Step {
    Step { op: Op::Read { lba }, ordinal: 0 }
}

fn exhaustive_with(
    plan: &Plan,
    preemptions: usize,
    mutation: Option<Mutation>,
) -> Result<Stats, Failure> {
    let subject = btt();
    let explorer = Explorer::new(&subject, pool(&subject), plan.len(), ENUMERATE).unwrap();
    let mut explorer = explorer.with_mutation(mutation);
    explorer.exhaustive(plan, preemptions).map(|()| explorer.stats())
}

fn exhaustive(name: &str, plan: &Plan, preemptions: usize) {
    let start = Instant::now();
    match exhaustive_with(plan, preemptions, None) {
        Ok(stats) => println!("{name}: {stats} in {:?}", start.elapsed()),
        Err(failure) => panic!("replay: cargo test -p tidegate-sim {name}\n{failure}"),
    }
}

fn random_history(mixture: Mix, seed: u64) -> Result<Stats, Failure> {
    let subject = btt();
    let plan = mixture.plan(&mut Random::new(seed), &mut 100);
    let mut explorer = Explorer::new(&subject, pool(&subject), mixture.threads, SAMPLE).unwrap();
    explorer.sampled(&plan, seed).map(|()| explorer.stats())
}

#[test]
fn p1_p2_one_lane_all_subsets() {
    let plan = vec![vec![write(0, 101, 0), write(16, 102, 0), write(0, 103, 0), write(0, 104, 1)]];
    exhaustive("p1_p2_one_lane_all_subsets", &plan, 0);
}

#[test]
fn p1_p2_two_writers_of_one_block_all_subsets_and_interleavings() {
    let plan = vec![vec![write(0, 101, 0)], vec![write(0, 102, 1), write(16, 103, 1)]];
    exhaustive("p1_p2_two_writers_of_one_block_all_subsets_and_interleavings", &plan, 2);
}

#[test]
fn p1_p2_lanes_change_hands() {
    let plan =
        vec![vec![write(0, 101, 0), write(16, 102, 1)], vec![write(16, 103, 0), write(0, 104, 1)]];
    exhaustive("p1_p2_lanes_change_hands", &plan, 2);
}

#[test]
fn p3_reads_beside_writes() {
    let plan = vec![vec![write(0, 101, 0), write(0, 102, 0)], vec![read(0), read(0)]];
    exhaustive("p3_reads_beside_writes", &plan, 2);
}

#[test]
fn p1_p2_three_writers_of_one_block() {
    let plan = vec![vec![write(0, 101, 0)], vec![write(0, 102, 1)], vec![write(0, 103, 2)]];
    exhaustive("p1_p2_three_writers_of_one_block", &plan, 1);
}

/// Four lanes wanted and three there: writers wait, and groups take what is free.
#[test]
fn p1_p2_groups_of_neighbours() {
    let group = |lba, stamp, lane| Step {
        op: Op::Write { lba, blocks: 2, stamp, fua: false },
        ordinal: lane,
    };
    let plan = vec![vec![group(0, 101, 0)], vec![group(1, 102, 1)]];
    exhaustive("p1_p2_groups_of_neighbours", &plan, 2);
}

#[test]
fn p1_p2_old_flog_padding_and_version_2_in_the_order_of_lines() {
    let mixture =
        Mix { threads: 2, ops: 6, lbas: LBAS, blocks_max: 2, reads_pct: 10, others_pct: 5 };
    let name = "p1_p2_old_flog_padding_and_version_2_in_the_order_of_lines";
    seeded(name, 20, |seed| {
        let subject = BttSubject::new(20, 2, Version::V2_0, FlogSlots::ZeroTwo);
        let plan = mixture.plan(&mut Random::new(seed), &mut 100);
        let effort = Effort { order: StoreOrder::Line, ..SAMPLE };
        let mut explorer = Explorer::new(&subject, pool(&subject), 2, effort).unwrap();
        explorer.sampled(&plan, seed).map(|()| explorer.stats())
    });
}

#[test]
fn p1_p2_three_threads_sampled() {
    let mixture =
        Mix { threads: 3, ops: 4, lbas: LBAS, blocks_max: 2, reads_pct: 20, others_pct: 0 };
    seeded("p1_p2_three_threads_sampled", 120, |seed| random_history(mixture, seed));
}

/// Blocks of 4096 bytes, which are zeroed by the map; those of 512 bytes are zeroed by writing.
#[test]
fn p4_zeroes_discards_and_flushes_sampled() {
    let mixture =
        Mix { threads: 2, ops: 8, lbas: LBAS, blocks_max: 2, reads_pct: 20, others_pct: 15 };
    seeded("p4_zeroes_discards_and_flushes_sampled", 120, |seed| {
        let subject = BttSubject::with_lba_bytes(4096, 20, 3, Version::V1_1, FlogSlots::ZeroOne);
        let plan = mixture.plan(&mut Random::new(seed), &mut 100);
        let mut explorer = Explorer::new(&subject, pool(&subject), 2, SAMPLE).unwrap();
        explorer.sampled(&plan, seed).map(|()| explorer.stats())
    });
}

/// Pools of libpmemblk, which must find every acknowledged write: its recovery compares flags.
#[test]
fn p1_p2_pools_of_libpmemblk_sampled() {
    let mixture =
        Mix { threads: 2, ops: 8, lbas: LBAS, blocks_max: 2, reads_pct: 10, others_pct: 25 };
    seeded("p1_p2_pools_of_libpmemblk_sampled", 120, |seed| {
        let (version, slots) = (Version::Libpmemblk, FlogSlots::ZeroOne);
        let subject = BttSubject::with_lba_bytes(512, 20, 3, version, slots);
        let plan = mixture.plan(&mut Random::new(seed), &mut 100);
        let mut explorer = Explorer::new(&subject, pool(&subject), 2, SAMPLE).unwrap();
        explorer.sampled(&plan, seed).map(|()| explorer.stats())
    });
}

/// Zeroing by one thread beside writes to the same block by another: the flags in the map may not
/// be durable when the write replaces them.
#[test]
fn p1_p2_a_zeroed_block_of_libpmemblk_is_written_again() {
    let subject = BttSubject::new(20, 3, Version::Libpmemblk, FlogSlots::ZeroOne);
    let zero = Step { op: Op::WriteZeroes { lba: 0, may_unmap: true }, ordinal: 2 };
    let plan = vec![vec![zero], vec![write(0, 101, 0), write(0, 102, 1)]];
    let mut explorer = Explorer::new(&subject, pool(&subject), plan.len(), ENUMERATE).unwrap();
    if let Err(failure) = explorer.exhaustive(&plan, 2) {
        panic!("{failure}");
    }
}

#[test]
fn p6_kills_power_cuts_and_recoveries_in_turn() {
    let mixture =
        Mix { threads: 2, ops: 4, lbas: LBAS, blocks_max: 2, reads_pct: 10, others_pct: 5 };
    seeded("p6_kills_power_cuts_and_recoveries_in_turn", 80, |seed| {
        let subject = btt();
        let mut explorer = Explorer::new(&subject, pool(&subject), 2, SAMPLE).unwrap();
        explorer.lifetime(&mixture, 3, seed).map(|()| explorer.stats())
    });
}
