//! The cache under the crash simulator: writers that evict and clean while they fill it, and
//! crashes also in recovery. Then planted bugs, each of which the same budget finds.
//!
//! A failure prints the line that replays it. `TIDEGATE_SIM_ROUNDS` multiplies the number of seeds.

use std::cell::Cell;
use std::time::Instant;

use tidegate::cache::mode::Mode;
use tidegate_sim::cache::{CacheFault, CacheSubject, Change};
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
const ATOMIC: &[Mode] = &[Mode::WriteBack, Mode::WriteOnly];
const WI: &[Mode] = &[Mode::WriteInvalidate];
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

/// Slots for three versions of each block: no group fills the cache.
const AMPLE_SLOTS: u64 = 28;

fn flush() -> Step {
    Step { op: Op::Flush, ordinal: 0 }
}

fn fua(lba: u64, stamp: u32) -> Step {
    Step { op: Op::Write { lba, blocks: 1, stamp, fua: true }, ordinal: 0 }
}

fn atomic(slots: u64) -> CacheSubject {
    CacheSubject::new(BLOCKS, slots, ATOMIC, CacheFault::None).with_atomic_flush()
}

/// Groups of several pages, with pages that are in more than one group, and FUA writes among them.
fn groups() -> Plan {
    let first = [write(0, 101), write(1, 102), write(3, 103), flush()];
    let second = [write(0, 104), write(3, 105), write(0, 106), fua(1, 107), flush()];
    let third = [fua(0, 108), write(0, 109), write(5, 110)];
    vec![[&first[..], &second, &third].concat()]
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
    history_from(full_pool(subject), subject, mixture, seed, mutation)
}

/// A random history that begins with `pool`.
fn history_from(
    pool: Pool,
    subject: &CacheSubject,
    mixture: Mix,
    seed: u64,
    mutation: Option<Mutation>,
) -> Result<Stats, Failure> {
    let plan = mixture.plan(&mut Random::new(seed), &mut 1000);
    let explorer = Explorer::new(subject, pool, mixture.threads, SAMPLE).unwrap();
    let mut explorer = explorer.with_mutation(mutation);
    explorer.sampled(&plan, seed).map(|()| explorer.stats())
}

/// As [`seeded`], of subjects whose background makes `changes`: each of them is made.
fn seeded_with_changes(
    name: &str,
    count: usize,
    changes: &[Change],
    subject: impl Fn() -> CacheSubject,
    run: impl Fn(&CacheSubject, u64) -> Result<Stats, Failure>,
) {
    let made: Vec<Cell<u64>> = changes.iter().map(|_| Cell::new(0)).collect();
    seeded(name, count, |seed| {
        let subject = subject();
        let stats = run(&subject, seed)?;
        let counts = changes.iter().map(|change| subject.changes(*change));
        made.iter().zip(counts).for_each(|(made, count)| made.set(made.get() + count));
        Ok(stats)
    });
    println!("{name}: {changes:?} {made:?}");
    assert!(made.iter().all(|it| it.get() > 0), "{changes:?} {made:?}");
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

const LARGE_WRITERS: Mix =
    Mix { lbas: &[0, 3, 6], blocks_max: 18, ops: 6, reads_pct: 40, ..TWO_WRITERS };
const LARGE_BLOCKS: u64 = 24;

/// Two threads that each begin with a large write, which misses, before a backing that serves its
/// share by cost.
fn large_history(
    slots: u64,
    share_pct: u32,
    fault: CacheFault,
    seed: u64,
) -> Result<Stats, Failure> {
    let subject = CacheSubject::new(LARGE_BLOCKS, slots, WB, fault);
    let subject = subject.with_backing_share(share_pct).with_background();
    let mut plan = LARGE_WRITERS.plan(&mut Random::new(seed), &mut 1000);
    for (steps, (lba, stamp)) in plan.iter_mut().zip([(0, 101), (6, 102)]) {
        let op = Op::Write { lba, blocks: 16, stamp, fua: false };
        steps.insert(0, Step { op, ordinal: 0 });
    }
    let pool = Pool::prepare(&subject, &[]).unwrap();
    let mut explorer = Explorer::new(&subject, pool, plan.len(), SAMPLE).unwrap();
    explorer.sampled(&plan, seed).map(|()| explorer.stats())
}

/// Half of the large writes go around the cache, and half of the reads of clean pages, or all; what
/// is acknowledged is durable all the same.
#[test]
fn p1_p3_the_backings_share_by_cost_sampled() {
    for (slots, share_pct) in [(8, 50), (8, 100), (40, 100)] {
        seeded("p1_p3_the_backings_share_by_cost_sampled", 8, |seed| {
            large_history(slots, share_pct, CacheFault::None, seed)
        });
    }
}

#[test]
fn p1_where_a_large_write_is_acknowledged_before_the_backing_is_flushed() {
    let fault = CacheFault::NoBackingFlush;
    let broken = (0..8).find_map(|seed| large_history(40, 100, fault, seed).err());
    let failure = broken.expect("it went unnoticed");
    println!("{failure}");
    assert!(matches!(failure.verdict.promise, Promise::P1Durable | Promise::P2Atomic), "{failure}");
}

/// Clusters of four pages, of which the device has two: reads fill the rest of them beside writers
/// of the same pages, and cleaning takes neighbours along.
const LINE_BYTES: u32 = 16 << 10;

#[test]
fn p1_p2_p3_clusters_that_are_filled_beside_writers_sampled() {
    let mixture = Mix { reads_pct: 50, ..TWO_WRITERS };
    for (slots, modes) in [(SLOTS, WB), (2 * BLOCKS, WB), (2 * BLOCKS, DURABLE)] {
        seeded("p1_p2_p3_clusters_that_are_filled_beside_writers_sampled", 12, |seed| {
            let subject = CacheSubject::new(BLOCKS, slots, modes, CacheFault::None);
            let subject = subject.with_line_bytes(LINE_BYTES).with_background();
            random_history(&subject, mixture, seed, None)
        });
    }
}

#[test]
fn p3_p4_clusters_beside_writes_around_the_cache_sampled() {
    seeded("p3_p4_clusters_beside_writes_around_the_cache_sampled", 12, |seed| {
        let subject = CacheSubject::new(BLOCKS, 2 * BLOCKS, Mode::ALL, CacheFault::None);
        let subject = subject.with_line_bytes(LINE_BYTES).with_background();
        random_history(&subject, Mix { reads_pct: 50, ..TWO_WRITERS }, seed, None)
    });
}

#[test]
fn p2_p3_clusters_of_pages_that_wait_for_a_commit_sampled() {
    seeded("p2_p3_clusters_of_pages_that_wait_for_a_commit_sampled", 12, |seed| {
        let subject = atomic(AMPLE_SLOTS).with_line_bytes(LINE_BYTES).with_background();
        random_history(&subject, Mix { reads_pct: 30, ..FLUSHERS }, seed, None)
    });
}

/// Records and pages of one cluster of four pages, before a backing with blocks of either size.
#[test]
fn p1_p2_p3_records_in_clusters_sampled() {
    for backing in [512, 4096] {
        seeded("p1_p2_p3_records_in_clusters_sampled", 8, |seed| {
            let subject = small(SLOTS_WITH_BASES, WB, backing).with_line_bytes(LINE_BYTES);
            let mixture = Mix { threads: 2, ops: 6, ..PAGES_AND_PARTS };
            small_history(&subject.with_background(), mixture, seed, None)
        });
    }
}

/// Writes of up to more pages than the cache has slots.
const LARGER: Mix = Mix { lbas: &[0, 1, 2], blocks_max: 6, reads_pct: 10, ..THREE_WRITERS };

/// Writers wait for the background, whatever the cache is cleaned from: a wait that nothing ends is
/// a deadlock of the scheduler.
#[test]
fn writes_larger_than_the_cache_end_with_every_setting() {
    let name = "writes_larger_than_the_cache_end_with_every_setting";
    let cache = |slots, modes| CacheSubject::new(BLOCKS, slots, modes, CacheFault::None);
    let subjects: [(&str, &dyn Fn() -> CacheSubject); 6] = [
        ("write-back", &|| cache(SLOTS, WB)),
        ("modes in turn", &|| cache(SLOTS, Mode::ALL)),
        ("groups that fill the cache", &|| atomic(SLOTS)),
        ("clusters", &|| cache(SLOTS, WB).with_line_bytes(LINE_BYTES)),
        ("classes", &|| cache(SLOTS, WB).with_classes(CLASSES)),
        ("sizes", &|| cache(6, WB).with_sizes(SIZES)),
    ];
    for pct in [1, 40, 90, 100] {
        for (kind, subject) in &subjects {
            println!("{kind}, cleaned from {pct} %");
            seeded(name, 2, |seed| {
                random_history(&subject().with_writers_that_wait(pct), LARGER, seed, None)
            });
        }
    }
}

#[test]
fn a_wait_that_nothing_ends_is_seen() {
    let subject = CacheSubject::new(BLOCKS, SLOTS, WB, CacheFault::NoBackground);
    let failure = random_history(&subject.with_writers_that_wait(40), LARGER, 1, None).unwrap_err();
    assert!(matches!(failure.verdict.promise, Promise::Progress), "{failure}");
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
    let subject = || CacheSubject::new(BLOCKS, SLOTS, DURABLE, CacheFault::None).with_background();
    let name = "p1_p2_p3_modes_in_turn_sampled";
    seeded_with_changes(name, 16, &[Change::Mode], subject, |subject, seed| {
        random_history(subject, TWO_WRITERS, seed, None)
    });
}

#[test]
fn p3_p4_modes_that_write_around_sampled() {
    for modes in [&[Mode::WriteAround][..], WI, &[Mode::PassThrough], Mode::ALL] {
        let changes = if modes.len() > 1 { &[Change::Mode][..] } else { &[] };
        let subject =
            || CacheSubject::new(BLOCKS, SLOTS, modes, CacheFault::None).with_background();
        let name = "p3_p4_modes_that_write_around_sampled";
        seeded_with_changes(name, 8, changes, subject, |subject, seed| {
            random_history(subject, TWO_WRITERS, seed, None)
        });
    }
}

/// Classes with less of the cache than their requests ask for, a pinned one, and none.
const CLASSES: &[&str] = &[
    "IO class id,IO class name,Eviction priority,Allocation;1,io_direction:write,10,0.50",
    "IO class id,IO class name,Eviction priority,Allocation;1,lba:lt:16,,0.50;2,lba:ge:24,9,0.25",
    "none",
];

#[test]
fn p3_p4_io_classes_that_change_beside_requests_sampled() {
    for slots in [SLOTS, 2 * SLOTS] {
        let subject = || {
            let subject = CacheSubject::new(BLOCKS, slots, WB, CacheFault::None);
            subject.with_background().with_classes(CLASSES)
        };
        let name = "p3_p4_io_classes_that_change_beside_requests_sampled";
        seeded_with_changes(name, 12, &[Change::Classes], subject, |subject, seed| {
            random_history(subject, TWO_WRITERS, seed, None)
        });
    }
}

#[test]
fn p3_p4_io_classes_that_change_beside_writers_of_parts_sampled() {
    for slots in [SLOTS, SLOTS_WITH_BASES] {
        let subject = || small(slots, WB, 4096).with_background().with_classes(CLASSES);
        let name = "p3_p4_io_classes_that_change_beside_writers_of_parts_sampled";
        seeded_with_changes(name, 12, &[Change::Classes], subject, |subject, seed| {
            small_history(subject, PARTS, seed, None)
        });
    }
}

/// More slots than at first, fewer, and very many, so that slots come and go in both layouts.
const SIZES: &[u64] = &[9, SLOTS, 70, 6];

#[test]
fn p1_p2_p3_p4_a_pool_that_grows_and_shrinks_beside_requests_sampled() {
    let subject = || {
        let subject = CacheSubject::new(BLOCKS, 6, WB, CacheFault::None);
        subject.with_background().with_sizes(SIZES)
    };
    let name = "p1_p2_p3_p4_a_pool_that_grows_and_shrinks_beside_requests_sampled";
    seeded_with_changes(name, 16, &[Change::Size], subject, |subject, seed| {
        random_history(subject, TWO_WRITERS, seed, None)
    });
}

#[test]
fn p3_p4_groups_in_a_pool_that_grows_and_shrinks_sampled() {
    const SIZES: &[u64] = &[40, 30, 90, AMPLE_SLOTS];
    let subject = || atomic(32).with_background().with_sizes(SIZES);
    let name = "p3_p4_groups_in_a_pool_that_grows_and_shrinks_sampled";
    seeded_with_changes(name, 12, &[Change::Size], subject, |subject, seed| {
        random_history(subject, FLUSHERS, seed, None)
    });
}

/// Two threads that flush beside a pool that grows: the subject, and what was covered, or the first
/// failure. In a long life the pool shrinks again, and groups are committed early.
fn groups_while_a_pool_grows(
    seeds: std::ops::Range<u64>,
    mutation: Option<Mutation>,
) -> (CacheSubject, Result<Stats, Failure>) {
    const SIZES: &[u64] = &[40, 90];
    let subject = atomic(AMPLE_SLOTS).with_background().with_sizes(SIZES);
    let run = |mut total: Stats, seed| {
        total += random_history(&subject, FLUSHERS, seed, mutation)?;
        Ok(total)
    };
    let result = seeds.into_iter().try_fold(Stats::default(), run);
    (subject, result)
}

#[test]
fn p2_p3_a_flush_is_atomic_while_a_pool_grows_sampled() {
    let (subject, result) = groups_while_a_pool_grows(0..12, None);
    let stats = result.unwrap_or_else(|failure| panic!("{failure}"));
    let (changes, lives) = (subject.changes(Change::Size), subject.atomic_lives());
    println!("{stats}, {changes} sizes, {lives} lives judged as atomic");
    assert!(changes > 0 && lives > 0, "{changes} sizes, {lives} lives");
}

#[test]
fn p2_where_pages_of_a_group_commit_by_themselves_while_a_pool_grows() {
    let (_, result) = groups_while_a_pool_grows(0..12, Some(Mutation::CommitAlone));
    let found = result.expect_err("it went unnoticed").verdict.promise;
    assert!(matches!(found, Promise::P2Atomic | Promise::P4Flush), "{found:?}");
}

#[test]
fn p1_p2_p3_modes_in_a_pool_that_grows_and_shrinks_sampled() {
    let subject = || {
        let subject = CacheSubject::new(BLOCKS, 6, DURABLE, CacheFault::None);
        subject.with_background().with_sizes(SIZES)
    };
    let name = "p1_p2_p3_modes_in_a_pool_that_grows_and_shrinks_sampled";
    seeded_with_changes(name, 12, &[Change::Size, Change::Mode], subject, |subject, seed| {
        random_history(subject, TWO_WRITERS, seed, None)
    });
}

#[test]
fn p1_p2_p3_records_in_a_pool_that_grows_and_shrinks_sampled() {
    const SIZES: &[u64] = &[2 * SLOTS_WITH_BASES, SLOTS, SLOTS_WITH_BASES + 3, 6];
    let subject = || small(SLOTS_WITH_BASES, WB, 4096).with_background().with_sizes(SIZES);
    let name = "p1_p2_p3_records_in_a_pool_that_grows_and_shrinks_sampled";
    seeded_with_changes(name, 12, &[Change::Size], subject, |subject, seed| {
        small_history(subject, PARTS, seed, None)
    });
}

/// The budget of the planted bugs of other sizes, first failure first: all subsets of the stores of
/// a change beside one write, then samples.
fn hunt_sizes(
    sizes: &'static [u64],
    fault: CacheFault,
    mutation: Option<Mutation>,
) -> Result<Stats, Failure> {
    let subject = CacheSubject::new(BLOCKS, 6, WB, fault).with_background().with_sizes(sizes);
    let mut total = exhaustive_with(&subject, &one_writer(1), 0, mutation)?;
    for seed in 0..4 {
        total += random_history(&subject, TWO_WRITERS, seed, mutation)?;
    }
    Ok(total)
}

fn caught_in_sizes(
    sizes: &'static [u64],
    fault: CacheFault,
    mutation: Option<Mutation>,
) -> Promise {
    match hunt_sizes(sizes, fault, mutation) {
        Ok(stats) => panic!("{sizes:?} {fault:?} {mutation:?} went unnoticed: {stats}"),
        Err(failure) => {
            println!("{sizes:?} {fault:?} {mutation:?}\n{failure}");
            failure.verdict.promise
        }
    }
}

#[test]
fn without_a_bug_the_budget_of_sizes_finds_nothing() {
    for sizes in [&[9, 70][..], &[SLOTS], SIZES] {
        match hunt_sizes(sizes, CacheFault::None, None) {
            Ok(stats) => println!("control: {stats}"),
            Err(failure) => panic!("{failure}"),
        }
    }
}

#[test]
fn p1_where_new_slots_are_used_before_their_headers_are_free() {
    let found = caught_in_sizes(&[9, 70], CacheFault::None, Some(Mutation::ResizeAlone));
    assert_eq!(found, Promise::P1Durable);
}

#[test]
fn p1_where_a_pool_shrinks_before_its_pages_have_left() {
    let found = caught_in_sizes(&[SLOTS], CacheFault::None, Some(Mutation::ResizeAlone));
    assert_eq!(found, Promise::P1Durable);
}

#[test]
fn p1_where_pages_leave_a_pool_before_the_backing_is_flushed() {
    let found = caught_in_sizes(&[SLOTS], CacheFault::NoBackingFlush, None);
    assert!(matches!(found, Promise::P1Durable | Promise::P2Atomic), "{found:?}");
}

/// A pool with slots for all pages, so that they leave by the purge alone.
fn purged(modes: &'static [Mode], fault: CacheFault) -> CacheSubject {
    CacheSubject::new(BLOCKS, 2 * BLOCKS, modes, fault).with_background().with_purges()
}

#[test]
fn p1_p2_p3_a_cache_that_is_purged_beside_requests_sampled() {
    let name = "p1_p2_p3_a_cache_that_is_purged_beside_requests_sampled";
    let mixture = Mix { reads_pct: 40, ..TWO_WRITERS };
    for modes in [WB, DURABLE] {
        let subject = || purged(modes, CacheFault::None);
        seeded_with_changes(name, 12, &[Change::Purge], subject, |subject, seed| {
            random_history(subject, mixture, seed, None)
        });
    }
    let subject =
        || CacheSubject::new(BLOCKS, SLOTS, WB, CacheFault::None).with_background().with_purges();
    seeded_with_changes(name, 12, &[Change::Purge], subject, |subject, seed| {
        random_history(subject, mixture, seed, None)
    });
}

#[test]
fn p3_p4_a_cache_that_is_purged_beside_writes_around_it_sampled() {
    let subject = || purged(Mode::ALL, CacheFault::None);
    let name = "p3_p4_a_cache_that_is_purged_beside_writes_around_it_sampled";
    seeded_with_changes(name, 12, &[Change::Purge, Change::Mode], subject, |subject, seed| {
        random_history(subject, TWO_WRITERS, seed, None)
    });
}

#[test]
fn p1_p2_p3_records_in_a_cache_that_is_purged_sampled() {
    for backing in [512, 4096] {
        let subject = || small(SLOTS_WITH_BASES, WB, backing).with_background().with_purges();
        let name = "p1_p2_p3_records_in_a_cache_that_is_purged_sampled";
        seeded_with_changes(name, 10, &[Change::Purge], subject, |subject, seed| {
            small_history(subject, Mix { threads: 2, ops: 6, ..PAGES_AND_PARTS }, seed, None)
        });
    }
}

/// Clusters that reads fill, in a cache that is purged meanwhile.
#[test]
fn p1_p2_p3_clusters_in_a_cache_that_is_purged_sampled() {
    let subject = || purged(WB, CacheFault::None).with_line_bytes(LINE_BYTES);
    let name = "p1_p2_p3_clusters_in_a_cache_that_is_purged_sampled";
    seeded_with_changes(name, 10, &[Change::Purge], subject, |subject, seed| {
        random_history(subject, Mix { reads_pct: 50, ..TWO_WRITERS }, seed, None)
    });
}

/// The pages of a group stay until its commit, and so do the versions that they replace.
#[test]
fn p2_p3_flushes_beside_purges_sampled() {
    let subject = || atomic(AMPLE_SLOTS).with_background().with_purges();
    let name = "p2_p3_flushes_beside_purges_sampled";
    seeded_with_changes(name, 12, &[Change::Purge], subject, |subject, seed| {
        random_history(subject, FLUSHERS, seed, None)
    });
}

/// The budget of the planted bugs of a purge, first failure first: all subsets of the stores of
/// purges beside one write, then samples.
fn hunt_purges(
    fault: CacheFault,
    mutation: Option<Mutation>,
) -> (CacheSubject, Result<Stats, Failure>) {
    let subject = purged(WB, fault);
    let hunt = || {
        let mut total = exhaustive_with(&subject, &one_writer(1), 0, mutation)?;
        for seed in 0..4 {
            total += random_history(&subject, TWO_WRITERS, seed, mutation)?;
        }
        Ok(total)
    };
    let result = hunt();
    (subject, result)
}

fn caught_in_purges(fault: CacheFault, mutation: Option<Mutation>) -> Promise {
    match hunt_purges(fault, mutation).1 {
        Ok(stats) => panic!("{fault:?} {mutation:?} went unnoticed: {stats}"),
        Err(failure) => {
            println!("{fault:?} {mutation:?}\n{failure}");
            failure.verdict.promise
        }
    }
}

/// Purges beside which no request is under way leave the cache empty, or the background ends.
#[test]
fn without_a_bug_the_budget_of_purges_finds_nothing() {
    let (subject, result) = hunt_purges(CacheFault::None, None);
    let stats = result.unwrap_or_else(|failure| panic!("{failure}"));
    let [all, quiet] = [Change::Purge, Change::QuietPurge].map(|it| subject.changes(it));
    println!("control: {stats}, {all} purges, {quiet} beside no request");
    assert!(all > 0 && quiet > 0, "{all} purges, {quiet} beside no request");
}

#[test]
fn p1_where_a_purge_gives_a_page_up_before_the_backing_is_flushed() {
    let found = caught_in_purges(CacheFault::None, Some(Mutation::PurgeBeforeFlush));
    assert!(matches!(found, Promise::P1Durable | Promise::P2Atomic), "{found:?}");
}

#[test]
fn p1_where_pages_leave_a_purged_cache_though_the_backing_is_not_flushed() {
    let found = caught_in_purges(CacheFault::NoBackingFlush, None);
    assert!(matches!(found, Promise::P1Durable | Promise::P2Atomic), "{found:?}");
}

/// As in eviction, of whose code a purge is made.
#[test]
fn p1_where_a_purge_voids_the_newest_version_before_the_older_ones() {
    let found = caught_in_purges(CacheFault::None, Some(Mutation::MergeVoids));
    assert!(matches!(found, Promise::P1Durable | Promise::P2Atomic), "{found:?}");
}

#[test]
fn p2_a_flush_is_atomic_all_subsets() {
    atomic_exhaustive("p2_a_flush_is_atomic_all_subsets", &groups(), 0);
}

#[test]
fn p2_a_writer_beside_a_flush() {
    let plan = vec![vec![write(0, 101), write(1, 102)], vec![flush()]];
    atomic_exhaustive("p2_a_writer_beside_a_flush", &plan, 1);
}

#[test]
fn p2_two_flushes_at_once() {
    let plan = vec![vec![write(0, 101), flush(), write(1, 102)], vec![write(1, 103), flush()]];
    atomic_exhaustive("p2_two_flushes_at_once", &plan, 1);
}

/// Few images of each of many moments.
const CUTS: Effort =
    Effort { exhaustive_images: 4, sampled_images: 10, deep_one_in: 512, ..SAMPLE };

/// A client writes 64 random blocks, flushes, and does that again: all of them or none, wherever it
/// is cut.
#[test]
fn p2_sixty_four_random_blocks_and_a_flush_cut_a_thousand_times() {
    let name = "p2_sixty_four_random_blocks_and_a_flush_cut_a_thousand_times";
    seeded(name, 2, |seed| {
        let subject = CacheSubject::new(96, 336, ATOMIC, CacheFault::None).with_atomic_flush();
        let subject = subject.with_background();
        let mut random = Random::new(seed);
        let mut blocks: Vec<u64> = (0..96).collect();
        let mut plan = Vec::new();
        for first_stamp in [1001, 2001] {
            for chosen in 0..64 {
                blocks.swap(chosen, chosen + random.below(96 - chosen));
            }
            let chosen = blocks[..64].iter().zip(first_stamp..);
            plan.extend(chosen.map(|(block, stamp)| write(*block, stamp)));
            plan.push(flush());
        }
        let pool = Pool::prepare(&subject, &blocks).unwrap();
        let mut explorer = Explorer::new(&subject, pool, 1, CUTS).unwrap();
        explorer.sampled(&vec![plan], seed)?;
        let images = explorer.stats().images;
        assert!(images >= 1000, "{images} cuts");
        assert_eq!(subject.atomic_lives(), 1, "no group was committed early");
        Ok(explorer.stats())
    });
}

fn atomic_exhaustive(name: &str, plan: &Plan, preemptions: usize) {
    let start = Instant::now();
    match exhaustive_with(&atomic(AMPLE_SLOTS), plan, preemptions, None) {
        Ok(stats) => println!("{name}: {stats} in {:?}", start.elapsed()),
        Err(failure) => panic!("replay: cargo test -p tidegate-sim --test cache {name}\n{failure}"),
    }
}

/// Flushes among writes, zeroes and discards.
const FLUSHERS: Mix = Mix { ops: 8, reads_pct: 10, others_pct: 18, ..TWO_WRITERS };

#[test]
fn p2_p3_flushes_beside_writers_sampled() {
    seeded("p2_p3_flushes_beside_writers_sampled", 12, |seed| {
        let mixture = Mix { threads: 3, ops: 5, ..FLUSHERS };
        random_history(&atomic(AMPLE_SLOTS), mixture, seed, None)
    });
}

#[test]
fn p2_p3_flushes_beside_cleaning_and_eviction_sampled() {
    seeded("p2_p3_flushes_beside_cleaning_and_eviction_sampled", 16, |seed| {
        atomic_history(seed, None)
    });
}

/// Pages are cleaned and evicted as soon as they may be.
fn atomic_history(seed: u64, mutation: Option<Mutation>) -> Result<Stats, Failure> {
    let slots = u32::try_from(AMPLE_SLOTS).unwrap();
    let subject = atomic(AMPLE_SLOTS).with_background().keeping_free(slots);
    random_history(&subject, FLUSHERS, seed, mutation)
}

#[test]
fn p3_p4_groups_that_fill_the_cache_sampled() {
    seeded("p3_p4_groups_that_fill_the_cache_sampled", 12, |seed| {
        random_history(&atomic(SLOTS).with_background(), FLUSHERS, seed, None)
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

/// Blocks of 512 bytes: three pages, of which the first two are written.
const SMALL_BLOCKS: u64 = 24;
const SMALL_LBAS: &[u64] = &[0, 1, 7, 8, 10];
const PARTS: Mix = Mix { lbas: SMALL_LBAS, ..TWO_WRITERS };

fn small(slots: u64, modes: &'static [Mode], backing_block_bytes: u32) -> CacheSubject {
    let subject = CacheSubject::new(SMALL_BLOCKS, slots, modes, CacheFault::None);
    subject.with_block_bytes(512, backing_block_bytes)
}

fn small_pool(subject: &CacheSubject) -> Pool {
    Pool::prepare(subject, &[0, 1, 9, 17, 0]).unwrap()
}

fn small_history(
    subject: &CacheSubject,
    mixture: Mix,
    seed: u64,
    mutation: Option<Mutation>,
) -> Result<Stats, Failure> {
    history_from(small_pool(subject), subject, mixture, seed, mutation)
}

#[test]
fn p1_p2_two_writers_of_parts_of_a_page() {
    let subject = small(SLOTS, WB, 4096);
    let plan = vec![vec![write(0, 101)], vec![write(2, 102)]];
    let mut explorer = Explorer::new(&subject, small_pool(&subject), 2, ENUMERATE).unwrap();
    match explorer.exhaustive(&plan, 1) {
        Ok(()) => println!("{}", explorer.stats()),
        Err(failure) => panic!("{failure}"),
    }
}

/// A record of one block takes a dead part of three, while another writer looks for a part.
#[test]
fn p1_p2_what_a_small_record_leaves_of_a_larger_dead_part() {
    let of_page =
        |blocks, stamp| Step { op: Op::Write { lba: 0, blocks, stamp, fua: false }, ordinal: 0 };
    let plan = vec![vec![of_page(3, 101), of_page(8, 102), write(8, 103)], vec![write(16, 104)]];
    let subject = small(SLOTS, WB, 4096);
    let pool = Pool::prepare(&subject, &[]).unwrap();
    let mut explorer = Explorer::new(&subject, pool, 2, ENUMERATE).unwrap();
    match explorer.exhaustive(&plan, 1) {
        Ok(()) => println!("{}", explorer.stats()),
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn p1_p2_p3_parts_of_pages_sampled() {
    let cases = [
        (WB, 4096, "record"),
        (DURABLE, 4096, "record"),
        (DURABLE, 512, "record"),
        (WB, 4096, "page"),
        (DURABLE, 512, "page"),
    ];
    for (modes, backing, granularity) in cases {
        seeded("p1_p2_p3_parts_of_pages_sampled", 6, |seed| {
            let subject = small(SLOTS, modes, backing).with_granularity(granularity);
            small_history(&subject.with_background(), PARTS, seed, None)
        });
    }
}

#[test]
fn p3_p4_parts_in_modes_that_write_around_sampled() {
    for backing in [512, 4096] {
        let subject = || small(SLOTS, Mode::ALL, backing).with_background();
        let name = "p3_p4_parts_in_modes_that_write_around_sampled";
        seeded_with_changes(name, 6, &[Change::Mode], subject, |subject, seed| {
            small_history(subject, PARTS, seed, None)
        });
    }
}

#[test]
fn p6_kills_power_cuts_and_recoveries_with_records_in_turn() {
    let mixture = Mix { ops: 4, ..PARTS };
    seeded("p6_kills_power_cuts_and_recoveries_with_records_in_turn", 8, |seed| {
        let subject = small(SLOTS, DURABLE, 4096);
        let mut explorer = Explorer::new(&subject, small_pool(&subject), 2, SAMPLE).unwrap();
        explorer.lifetime(&mixture, 3, seed).map(|()| explorer.stats())
    });
}

/// Whole blocks and parts of pages that differ in few lines from those before.
#[test]
fn p1_p2_p3_changed_lines_sampled() {
    let mixture = Mix { threads: 2, ops: 8, reads_pct: 10, ..PARTS };
    for (backing, modes) in [(512, WB), (4096, WB), (512, DURABLE)] {
        seeded("p1_p2_p3_changed_lines_sampled", 8, |seed| {
            let subject = small(SLOTS_WITH_BASES, modes, backing).by_content();
            small_history(&subject.with_background(), mixture, seed, None)
        });
    }
    for keep_free in [1, 16] {
        seeded("p1_p2_p3_changed_lines_sampled, whole pages", 8, |seed| {
            let subject = CacheSubject::new(BLOCKS, SLOTS_WITH_BASES, WB, CacheFault::None);
            let subject = subject.by_content().with_background().keeping_free(keep_free);
            random_history(&subject, TWO_WRITERS, seed, None)
        });
    }
}

#[test]
fn p2_p3_flushes_beside_changed_lines_sampled() {
    seeded("p2_p3_flushes_beside_changed_lines_sampled", 10, |seed| {
        let subject = small(SLOTS_WITH_BASES, ATOMIC, 4096).with_atomic_flush().by_content();
        small_history(&subject.with_background(), PARTS, seed, None)
    });
    seeded("p2_p3_flushes_beside_changed_lines_sampled, whole pages", 10, |seed| {
        let subject = atomic(40).by_content().with_background();
        random_history(&subject, TWO_WRITERS, seed, None)
    });
}

#[test]
fn p6_kills_power_cuts_and_recoveries_with_changed_lines_in_turn() {
    let mixture = Mix { ops: 4, ..PARTS };
    seeded("p6_kills_power_cuts_and_recoveries_with_changed_lines_in_turn", 8, |seed| {
        let subject = small(SLOTS_WITH_BASES, WB, 4096).by_content();
        let mut explorer = Explorer::new(&subject, small_pool(&subject), 2, SAMPLE).unwrap();
        explorer.lifetime(&mixture, 3, seed).map(|()| explorer.stats())
    });
}

/// Pages and parts of them, with reads that load pages into the cache.
const PAGES_AND_PARTS: Mix =
    Mix { threads: 1, ops: 12, lbas: &[0, 8, 2], blocks_max: 8, reads_pct: 30, others_pct: 5 };
/// So many that records may lie over pages.
const SLOTS_WITH_BASES: u64 = 16;

/// Pages with records over them, evicted as soon as they are clean.
fn evicting_records(seed: u64, mutation: Option<Mutation>) -> Result<Stats, Failure> {
    let slots = u32::try_from(SLOTS_WITH_BASES).unwrap();
    let backing = if seed.is_multiple_of(2) { 512 } else { 4096 };
    let subject = small(SLOTS_WITH_BASES, WB, backing).with_background().keeping_free(slots);
    small_history(&subject, PAGES_AND_PARTS, seed, mutation)
}

#[test]
fn p1_p2_p3_records_over_pages_that_are_evicted_sampled() {
    seeded("p1_p2_p3_records_over_pages_that_are_evicted_sampled", 24, |seed| {
        evicting_records(seed, None)
    });
}

#[test]
fn p1_p2_p3_records_over_pages_beside_a_second_writer_sampled() {
    seeded("p1_p2_p3_records_over_pages_beside_a_second_writer_sampled", 12, |seed| {
        let subject = small(SLOTS_WITH_BASES, DURABLE, 4096).with_background();
        let mixture = Mix { threads: 2, ops: 6, ..PAGES_AND_PARTS };
        small_history(&subject, mixture, seed, None)
    });
}

#[test]
fn p2_p3_flushes_beside_records_over_pages_sampled() {
    seeded("p2_p3_flushes_beside_records_over_pages_sampled", 12, |seed| {
        let subject = small(SLOTS_WITH_BASES, ATOMIC, 4096).with_atomic_flush();
        let mixture = Mix { threads: 2, ops: 6, others_pct: 18, ..PAGES_AND_PARTS };
        small_history(&subject.with_background(), mixture, seed, None)
    });
}

#[test]
fn p1_where_a_record_leaves_before_the_page_under_it() {
    let broken = (0..60).find_map(|seed| evicting_records(seed, Some(Mutation::MergeVoids)).err());
    let failure = broken.expect("it went unnoticed");
    println!("{failure}");
    assert!(matches!(failure.verdict.promise, Promise::P1Durable | Promise::P2Atomic), "{failure}");
}

/// Records of pages that become larger ones and pages, in few slots: these are split, and made
/// whole again, all the time.
const CHANGING_PARTS: Mix =
    Mix { threads: 1, ops: 14, lbas: &[0, 9, 16], blocks_max: 8, reads_pct: 5, others_pct: 5 };

fn changing_parts(seed: u64, mutation: Option<Mutation>) -> Result<Stats, Failure> {
    let backing = if seed.is_multiple_of(2) { 512 } else { 4096 };
    let subject = small(SLOTS, WB, backing).with_background().keeping_free(4);
    small_history(&subject, CHANGING_PARTS, seed, mutation)
}

#[test]
fn p1_p2_p3_slots_that_are_split_and_made_whole_again_sampled() {
    seeded("p1_p2_p3_slots_that_are_split_and_made_whole_again_sampled", 24, |seed| {
        changing_parts(seed, None)
    });
    seeded("p1_p2_p3_slots_that_are_split_and_made_whole_again_sampled, two writers", 12, |seed| {
        let subject = small(SLOTS, DURABLE, 4096).with_background().keeping_free(4);
        small_history(&subject, Mix { threads: 2, ops: 7, ..CHANGING_PARTS }, seed, None)
    });
}

/// The first failure of histories with parts that change.
fn caught_in_parts(mutation: Mutation) -> Failure {
    let broken = (0..200).find_map(|seed| changing_parts(seed, Some(mutation)).err());
    let failure = broken.expect("it went unnoticed");
    println!("{mutation:?}\n{failure}");
    failure
}

#[test]
fn p1_where_a_slot_is_split_over_headers_that_lie_in_it() {
    let found = caught_in_parts(Mutation::StaleParts).verdict.promise;
    assert!(matches!(found, Promise::P1Durable | Promise::P2Atomic), "{found:?}");
}

#[test]
fn p1_where_a_slot_is_split_before_the_void_headers_in_it_are_durable() {
    let found = caught_in_parts(Mutation::UnfencedParts).verdict.promise;
    assert!(matches!(found, Promise::P1Durable | Promise::P2Atomic), "{found:?}");
}

#[test]
fn p1_where_a_slot_stays_split_whose_parts_hold_older_versions() {
    let found = caught_in_parts(Mutation::KeepSplit).verdict.promise;
    assert!(matches!(found, Promise::P1Durable | Promise::P2Atomic), "{found:?}");
}

/// Slots for three versions of each of three pages.
const AMPLE_SMALL_SLOTS: u64 = 12;

#[test]
fn p2_p3_flushes_beside_writers_of_parts_sampled() {
    seeded("p2_p3_flushes_beside_writers_of_parts_sampled", 12, |seed| {
        let slots = u32::try_from(AMPLE_SMALL_SLOTS).unwrap();
        let subject = small(AMPLE_SMALL_SLOTS, ATOMIC, 4096).with_atomic_flush();
        let subject = subject.with_background().keeping_free(slots);
        small_history(&subject, Mix { lbas: SMALL_LBAS, ..FLUSHERS }, seed, None)
    });
}

/// Records that become records of more blocks, and pages; with slots for all of them.
fn growing_records() -> Plan {
    let parts = [write(0, 101), write(2, 102), write(9, 103), write(1, 104), flush()];
    let page = Step { op: Op::Write { lba: 0, blocks: 8, stamp: 105, fua: false }, ordinal: 0 };
    vec![[&parts[..], &[page, write(3, 106), write(5, 107)]].concat()]
}

/// The budget of the planted bugs of records, first failure first.
fn hunt_records(fault: CacheFault, mutation: Option<Mutation>) -> Result<Stats, Failure> {
    let subject = CacheSubject::new(SMALL_BLOCKS, SLOTS_WITH_BASES, WB, fault);
    let subject = subject.with_block_bytes(512, 4096);
    let pool = Pool::prepare(&subject, &[]).unwrap();
    let explorer = Explorer::new(&subject, pool, 1, ENUMERATE).unwrap();
    let mut explorer = explorer.with_mutation(mutation);
    explorer.exhaustive(&growing_records(), 0)?;
    let mut total = explorer.stats();
    let subject = CacheSubject::new(SMALL_BLOCKS, SLOTS, WB, fault).with_block_bytes(512, 4096);
    let subject = subject.with_background();
    for seed in 0..4 {
        total += small_history(&subject, PARTS, seed, mutation)?;
    }
    Ok(total)
}

fn caught_in_records(fault: CacheFault, mutation: Option<Mutation>) -> Promise {
    match hunt_records(fault, mutation) {
        Ok(stats) => panic!("{fault:?} {mutation:?} went unnoticed: {stats}"),
        Err(failure) => {
            println!("{fault:?} {mutation:?}\n{failure}");
            failure.verdict.promise
        }
    }
}

#[test]
fn without_a_bug_the_budget_of_records_finds_nothing() {
    match hunt_records(CacheFault::None, None) {
        Ok(stats) => println!("control: {stats}"),
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn p1_where_a_line_is_lost_in_a_merge() {
    let found = caught_in_records(CacheFault::None, Some(Mutation::LostLines));
    assert_eq!(found, Promise::P1Durable);
}

#[test]
fn p1_where_an_older_record_goes_over_a_newer_page() {
    let found = caught_in_records(CacheFault::None, Some(Mutation::RecordOverPage));
    // The page under the record may be gone: then it counts as damaged.
    let expected = [Promise::P1Durable, Promise::P2Atomic, Promise::P6Recovery];
    assert!(expected.contains(&found), "{found:?}");
}

#[test]
fn p1_where_a_record_is_dead_before_the_fence_of_its_successor() {
    let found = caught_in_records(CacheFault::None, Some(Mutation::DeadBeforeFence));
    assert_eq!(found, Promise::P1Durable);
}

#[test]
fn p1_where_a_record_is_clean_before_the_backing_is_flushed() {
    assert_ne!(caught_in_records(CacheFault::NoBackingFlush, None), Promise::Progress);
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
fn p1_where_pages_that_are_written_through_are_evicted_before_the_backing_is_flushed() {
    assert_ne!(caught(WT, CacheFault::NoBackingFlush, None), Promise::Progress);
}

/// Recovery finds a clean page that is not what the backing has: it gives the page up, or refuses
/// the pool where others are dirty.
#[test]
fn p1_where_pages_that_are_written_through_are_clean_at_once() {
    let found = caught(WT, CacheFault::None, Some(Mutation::CleanAtOnce));
    assert!(matches!(found, Promise::P1Durable | Promise::P6Recovery), "{found:?}");
}

#[test]
fn p1_where_a_slot_is_dead_before_the_fence_of_its_successor() {
    let found = caught(WB, CacheFault::None, Some(Mutation::DeadBeforeFence));
    assert_eq!(found, Promise::P1Durable);
}

/// Pages are durable as a whole, so that one is lost rather than torn.
const WHOLE_PAGES: Effort = Effort { granule: Granule::Chunk(4096), ..ENUMERATE };

/// A page is written and flushed in wb, the mode changes to wi, and the page is written again: its
/// dirty copy, which nothing else cleans, is given up for one in the backing.
fn give_up_dirty_pages(fault: CacheFault) -> (CacheSubject, Result<Stats, Failure>) {
    const MODES: &[Mode] = &[Mode::WriteBack, Mode::WriteInvalidate];
    let subject = CacheSubject::new(BLOCKS, SLOTS, MODES, fault).with_background();
    let read = Step { op: Op::Read { lba: 0 }, ordinal: 0 };
    let steps = [[write(0, 101), flush()], [read, read], [read, read], [write(0, 102), flush()]];
    let plan = vec![steps.concat()];
    let run = |mut total: Stats, seed| {
        let pool = Pool::prepare(&subject, &[]).unwrap();
        let mut explorer = Explorer::new(&subject, pool, 1, WHOLE_PAGES).unwrap();
        explorer.sampled(&plan, seed)?;
        total += explorer.stats();
        Ok(total)
    };
    let result = (0..24).try_fold(Stats::default(), run);
    (subject, result)
}

#[test]
fn p3_p4_dirty_pages_are_given_up_after_a_change_of_the_mode() {
    let (subject, result) = give_up_dirty_pages(CacheFault::None);
    let stats = result.unwrap_or_else(|failure| panic!("{failure}"));
    let changes = subject.changes(Change::Mode);
    println!("control: {stats}, {changes} changes of the mode");
    assert!(changes > 0, "the mode did not change");
}

#[test]
fn p4_where_the_only_durable_copy_is_given_up_before_the_backing_is_flushed() {
    let (_, result) = give_up_dirty_pages(CacheFault::NoBackingFlush);
    let failure = result.expect_err("it went unnoticed");
    println!("{failure}");
    assert_eq!(failure.verdict.promise, Promise::P4Flush, "{failure}");
}

/// Two threads: one writes a batch of three pages, and the other one pages of its own beside it.
fn batch_beside_a_writer(mutation: Option<Mutation>) -> Result<Stats, Failure> {
    let batch = Step { op: Op::Write { lba: 0, blocks: 3, stamp: 101, fua: false }, ordinal: 0 };
    let plan = vec![vec![batch], vec![write(5, 201), write(6, 202)]];
    let subject = CacheSubject::new(BLOCKS, 2 * BLOCKS, WB, CacheFault::None);
    let pool = Pool::prepare(&subject, &[0, 1, 2]).unwrap();
    let mut explorer = Explorer::new(&subject, pool, 2, SAMPLE).unwrap().with_mutation(mutation);
    for seed in 0..16 {
        explorer.sampled(&plan, seed)?;
    }
    Ok(explorer.stats())
}

#[test]
fn p1_p2_a_batch_beside_a_writer_sampled() {
    let stats = batch_beside_a_writer(None).unwrap_or_else(|failure| panic!("{failure}"));
    println!("control: {stats}");
}

#[test]
fn p1_where_members_of_a_batch_are_left_to_the_fence_of_another_thread() {
    let failure = batch_beside_a_writer(Some(Mutation::LateMember)).expect_err("unnoticed");
    println!("{failure}");
    assert_eq!(failure.verdict.promise, Promise::P1Durable, "{failure}");
}

/// Pages are written, evicted and read again, so that fills come after writes.
fn fills_after_writes(seed: u64, mutation: Option<Mutation>) -> Result<Stats, Failure> {
    let subject = CacheSubject::new(BLOCKS, SLOTS, WB, CacheFault::None).with_background();
    let read = |lba| Step { op: Op::Read { lba }, ordinal: 0 };
    let mut steps = vec![write(0, 101), write(0, 102)];
    let others = [1, 2, 3, 5, 6].into_iter().zip(103..);
    steps.extend(others.map(|(lba, stamp)| write(lba, stamp)));
    steps.extend([read(0), read(1), read(0), write(7, 108), read(0)]);
    let pool = Pool::prepare(&subject, &[]).unwrap();
    let mut explorer = Explorer::new(&subject, pool, 1, SAMPLE).unwrap().with_mutation(mutation);
    explorer.sampled(&vec![steps], seed).map(|()| explorer.stats())
}

#[test]
fn p3_pages_that_are_read_after_their_eviction_sampled() {
    seeded("p3_pages_that_are_read_after_their_eviction_sampled", 16, |seed| {
        fills_after_writes(seed, None)
    });
}

/// Recovery itself may find that a clean page is not what the backing has.
#[test]
fn p1_where_a_fill_does_not_look_at_the_version_of_its_page() {
    let mutation = Some(Mutation::StaleFill);
    let broken = (0..16).find_map(|seed| fills_after_writes(seed, mutation).err());
    let failure = broken.expect("it went unnoticed");
    println!("{failure}");
    let found = failure.verdict.promise;
    assert!(matches!(found, Promise::P1Durable | Promise::P6Recovery), "{failure}");
}

/// The budget of the planted bugs of atomic flush, first failure first.
fn hunt_groups(mutation: Option<Mutation>) -> Result<Stats, Failure> {
    let mut total = exhaustive_with(&atomic(AMPLE_SLOTS), &groups(), 0, mutation)?;
    for seed in 0..6 {
        total += atomic_history(seed, mutation)?;
    }
    Ok(total)
}

fn caught_in_groups(mutation: Mutation) -> Promise {
    match hunt_groups(Some(mutation)) {
        Ok(stats) => panic!("{mutation:?} went unnoticed: {stats}"),
        Err(failure) => {
            println!("{mutation:?}\n{failure}");
            failure.verdict.promise
        }
    }
}

#[test]
fn without_a_bug_the_budget_of_atomic_flush_finds_nothing() {
    match hunt_groups(None) {
        Ok(stats) => println!("control: {stats}"),
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn p2_where_the_commit_word_comes_before_the_fences_of_its_members() {
    assert_ne!(caught_in_groups(Mutation::EarlyCommit), Promise::Progress);
}

#[test]
fn p4_where_a_slot_is_dead_before_the_commit_of_its_successor() {
    assert_eq!(caught_in_groups(Mutation::DeadBeforeCommit), Promise::P4Flush);
}

#[test]
fn p2_where_a_member_is_cleaned_before_its_commit() {
    let found = caught_in_groups(Mutation::CleanBeforeCommit);
    assert!(matches!(found, Promise::P2Atomic | Promise::P4Flush), "{found:?}");
}

#[test]
fn p2_where_each_page_of_a_group_commits_by_itself() {
    let found = caught_in_groups(Mutation::CommitAlone);
    assert!(matches!(found, Promise::P2Atomic | Promise::P4Flush), "{found:?}");
}
