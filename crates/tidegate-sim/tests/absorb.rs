//! Absorbed files under the crash simulator: three writers, who absorb files, settle them, write through, replace files by renaming, and
//! clean the log; supervisors that die; crashes also in recovery. Then planted bugs, each of which the same budget finds.
//!
//! A failure prints the line that replays it. `TIDEGATE_SIM_ROUNDS` multiplies the number of seeds.

use std::time::Instant;

use tidegate_sim::absorb::{AbsorbFault, AbsorbSubject};
use tidegate_sim::explore::{Effort, Explorer, Failure, Pool, Stats, seeded};
use tidegate_sim::history::{Mix, Op, Plan, Step};
use tidegate_sim::judge::Promise;
use tidegate_sim::medium::{Granule, StoreOrder};
use tidegate_sim::random::Random;

/// Every image of every crash with few stores in flight.
const ENUMERATE: Effort = Effort {
    exhaustive_images: 64,
    sampled_images: 8,
    deep_one_in: 1024,
    granule: Granule::Chunk(256),
    order: StoreOrder::Word,
};

/// Samples with every 8-byte word by itself.
const SAMPLE: Effort = Effort {
    exhaustive_images: 8,
    sampled_images: 6,
    deep_one_in: 512,
    granule: Granule::Word,
    order: StoreOrder::Word,
};

const FILES: u64 = 4;
const LBAS: &[u64] = &[0, 1, 2, 5];

/// What is wrong shows in the histories, not in what they start from.
const SOUND: AbsorbSubject = AbsorbSubject::new(FILES, AbsorbFault::None);

fn pool() -> Pool {
    Pool::prepare(&SOUND, &[0, 1, 5, 0, 4]).unwrap()
}

/// A pool whose records have gone around the ring and are near its end again.
fn old_pool() -> Pool {
    let blocks: Vec<u64> = (0..170).map(|round| round * 3 % (2 * FILES)).collect();
    Pool::prepare(&SOUND, &blocks).unwrap()
}

const THREE_WRITERS: Mix =
    Mix { threads: 3, ops: 6, lbas: LBAS, blocks_max: 3, reads_pct: 15, others_pct: 7 };

fn random_history(seed: u64, fault: AbsorbFault, pool: fn() -> Pool) -> Result<Stats, Failure> {
    let subject = AbsorbSubject::new(FILES, fault);
    let plan = THREE_WRITERS.plan(&mut Random::new(seed), &mut 1000);
    let mut explorer = Explorer::new(&subject, pool(), THREE_WRITERS.threads, SAMPLE).unwrap();
    explorer.sampled(&plan, seed).map(|()| explorer.stats())
}

/// One writer, by the ordinals that lead its writes; then what is there is cleaned and one more write comes.
fn one_writer(ordinals: &[usize]) -> Plan {
    let write = |(stamp, ordinal): (u32, &usize)| Step {
        op: Op::Write { lba: 0, blocks: 1, stamp, fua: false },
        ordinal: *ordinal,
    };
    let flush = Step { op: Op::Flush, ordinal: 0 };
    let steps = (101..).zip(ordinals).map(write).chain([flush]).chain([write((200, &1))]);
    vec![steps.collect()]
}

fn exhaustive(plan: &Plan) -> Result<Stats, Failure> {
    let mut explorer = Explorer::new(&SOUND, pool(), plan.len(), ENUMERATE).unwrap();
    explorer.exhaustive(plan, 0).map(|()| explorer.stats())
}

#[test]
fn p1_p2_one_writer_each_way_after_each() {
    let start = Instant::now();
    let mut total = Stats::default();
    for ways in 0..64 {
        let ordinals = [ways % 4, ways / 4 % 4, ways / 16];
        match exhaustive(&one_writer(&ordinals)) {
            Ok(stats) => total += stats,
            Err(failure) => panic!("ways {ordinals:?}\n{failure}"),
        }
    }
    println!("each way after each: {total} in {:?}", start.elapsed());
}

#[test]
fn p1_p2_p3_three_writers_who_absorb_settle_and_clean_sampled() {
    seeded("p1_p2_p3_three_writers_who_absorb_settle_and_clean_sampled", 12, |seed| {
        random_history(seed, AbsorbFault::None, pool)
    });
}

#[test]
fn p1_p2_p3_around_the_end_of_the_ring_sampled() {
    seeded("p1_p2_p3_around_the_end_of_the_ring_sampled", 6, |seed| {
        random_history(seed, AbsorbFault::None, old_pool)
    });
}

fn lifetime(seed: u64) -> Result<Stats, Failure> {
    let mixture = Mix { ops: 4, ..THREE_WRITERS };
    let mut explorer = Explorer::new(&SOUND, old_pool(), mixture.threads, SAMPLE).unwrap();
    explorer.lifetime(&mixture, 3, seed).map(|()| explorer.stats())
}

#[test]
fn p6_kills_power_cuts_and_recoveries_in_turn() {
    seeded("p6_kills_power_cuts_and_recoveries_in_turn", 6, lifetime);
}

/// A process was killed while it raised the limit of the log, before that was durable.
#[test]
fn p6_a_kill_between_a_new_limit_and_its_write_back() {
    lifetime(0x0d44_9f7d_dca4_2281).unwrap_or_else(|failure| panic!("{failure}"));
}

/// The budget of the planted bugs, first failure first.
fn hunt(fault: AbsorbFault) -> Result<Stats, Failure> {
    let mut total = Stats::default();
    for seed in 0..60 {
        total += random_history(seed, fault, pool)?;
    }
    Ok(total)
}

/// Bytes are lost, all of a block's or some, after a crash or at once.
fn caught(fault: AbsorbFault) {
    match hunt(fault) {
        Ok(stats) => panic!("{fault:?} went unnoticed: {stats}"),
        Err(failure) => {
            println!("{fault:?}\n{failure}");
            let lost = [Promise::P1Durable, Promise::P2Atomic, Promise::P3Latest];
            assert!(lost.contains(&failure.verdict.promise), "something else went wrong");
        }
    }
}

#[test]
fn without_a_bug_the_same_budget_finds_nothing() {
    match hunt(AbsorbFault::None) {
        Ok(stats) => println!("control: {stats}"),
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn p1_with_the_tail_moved_before_the_absorbed_bytes_were_brought() {
    caught(AbsorbFault::TailFirst);
}

#[test]
fn p1_with_bytes_that_were_brought_and_not_synced() {
    caught(AbsorbFault::BroughtNotSynced);
}

#[test]
fn p1_with_a_settle_record_before_the_bytes() {
    caught(AbsorbFault::SettleFirst);
}

#[test]
fn p1_with_settled_records_brought_again_over_newer_bytes() {
    caught(AbsorbFault::SettledAgain);
}

#[test]
fn p1_with_a_file_replaced_that_was_not_settled() {
    caught(AbsorbFault::ReplacedUnsettled);
}

/// Bytes are lost, or recovery says that it cannot tell whose they are.
fn noticed(fault: AbsorbFault) {
    match hunt(fault) {
        Ok(stats) => panic!("{fault:?} went unnoticed: {stats}"),
        Err(failure) => println!("{fault:?}\n{failure}"),
    }
}

#[test]
fn p1_with_what_lies_behind_a_part_that_was_retired_forgotten() {
    noticed(AbsorbFault::PartForgetsAll);
}

#[test]
fn p1_with_a_part_retired_that_defines_what_lies_behind_it() {
    noticed(AbsorbFault::PartUndefined);
}
