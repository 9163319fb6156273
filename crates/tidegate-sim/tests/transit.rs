//! The DRAM tier `transit` over a BTT under the crash simulator: a crash loses what was not
//! flushed, but never tears a block, never takes a flush or FUA write back, and keeps the order of
//! the writes of a block.
//!
//! A failure prints the line that replays it. `TIDEGATE_SIM_ROUNDS` multiplies the number of seeds.

use std::sync::Arc;

use tidegate::btt::{FlogSlots, Version};
use tidegate::device::{BlockDevice, Geometry, Operation, Result as DeviceResult};
use tidegate::pmem::Region;
use tidegate_sim::explore::{Effort, Explorer, Failure, Pool, Stats, seeded};
use tidegate_sim::history::{Mix, Op, Plan, Step};
use tidegate_sim::judge::Promise;
use tidegate_sim::medium::{Granule, StoreOrder};
use tidegate_sim::random::Random;
use tidegate_sim::subject::{BttSubject, Subject, TransitSubject};

const ENUMERATE: Effort = Effort {
    exhaustive_images: 1024,
    sampled_images: 32,
    deep_one_in: 32,
    granule: Granule::Chunk(256),
    order: StoreOrder::Word,
};

const SAMPLE: Effort = Effort {
    exhaustive_images: 32,
    sampled_images: 24,
    deep_one_in: 32,
    granule: Granule::Word,
    order: StoreOrder::Word,
};

/// More blocks than [`SLOTS`]: the cache overruns.
const LBAS: &[u64] = &[0, 1, 2, 16, 17];
const SLOTS: u32 = 3;
/// Threads of requests.
const THREADS_MAX: usize = 2;

/// Nothing is evicted but on demand.
fn on_demand() -> TransitSubject {
    TransitSubject::new(BttSubject::new(20, 3, Version::V1_1, FlogSlots::ZeroOne), SLOTS, 0)
}

/// Two evictors write back whenever the scheduler lets them, and change the write mode.
fn eager() -> TransitSubject {
    TransitSubject::new(BttSubject::new(20, 4, Version::V1_1, FlogSlots::ZeroOne), SLOTS, 2)
}

fn step(op: Op) -> Step {
    Step { op, ordinal: 0 }
}

fn write(lba: u64, stamp: u32) -> Step {
    step(Op::Write { lba, blocks: 1, stamp, fua: false })
}

fn fua(lba: u64, stamp: u32) -> Step {
    step(Op::Write { lba, blocks: 1, stamp, fua: true })
}

fn explore(
    subject: &dyn Subject,
    effort: Effort,
    run: impl Fn(&mut Explorer<'_>) -> Result<(), Failure>,
) -> Result<Stats, Failure> {
    let pool = Pool::prepare(subject, &[0, 1, 16, 0, 17, 1, 0, 16]).unwrap();
    let mut explorer = Explorer::new(subject, pool, THREADS_MAX, effort).unwrap();
    run(&mut explorer).map(|()| explorer.stats())
}

fn enumerated(name: &str, steps: &[Step]) {
    let plan: Plan = vec![steps.to_vec()];
    match explore(&on_demand(), ENUMERATE, |explorer| explorer.exhaustive(&plan, 0)) {
        Ok(stats) => println!("{name}: {stats}"),
        Err(failure) => {
            panic!("replay: cargo test -p tidegate-sim --test transit {name}\n{failure}")
        }
    }
}

/// Three versions of a block, a flush after the second: the first is gone, the last may be.
#[test]
fn p1_p4_what_was_flushed_survives_all_subsets() {
    let steps = [write(0, 101), write(0, 102), step(Op::Flush), write(0, 103)];
    enumerated("p1_p4_what_was_flushed_survives_all_subsets", &steps);
}

#[test]
fn p1_p2_fua_beside_cached_writes_all_subsets() {
    let steps = [write(0, 101), fua(0, 102), write(16, 103), fua(1, 104), step(Op::Flush)];
    enumerated("p1_p2_fua_beside_cached_writes_all_subsets", &steps);
}

/// Five blocks, three slots: the others go around the cache.
#[test]
fn p1_p2_an_overrun_cache_all_subsets() {
    let mut steps: Vec<Step> = (100..).zip(LBAS).map(|(stamp, &lba)| write(lba, stamp)).collect();
    steps.extend([write(0, 201), step(Op::Flush), write(16, 202)]);
    enumerated("p1_p2_an_overrun_cache_all_subsets", &steps);
}

/// Random plans of `mixture`, each under one random interleaving.
fn sampled(name: &str, subject: &TransitSubject, mixture: &Mix, seeds_count: usize) {
    seeded(name, seeds_count, |seed| {
        let plan = mixture.plan(&mut Random::new(seed), &mut 100);
        explore(subject, SAMPLE, |explorer| explorer.sampled(&plan, seed))
    });
}

const MIX: Mix =
    Mix { threads: 1, ops: 12, lbas: LBAS, blocks_max: 2, reads_pct: 15, others_pct: 8 };

#[test]
fn p1_p2_p3_p4_random_histories() {
    sampled("p1_p2_p3_p4_random_histories", &on_demand(), &MIX, 120);
}

#[test]
fn p1_p2_p3_p4_random_histories_with_evictors() {
    sampled("p1_p2_p3_p4_random_histories_with_evictors", &eager(), &MIX, 120);
}

#[test]
fn p1_p2_p3_p4_two_threads_with_evictors() {
    let mixture = Mix { threads: 2, ops: 6, reads_pct: 30, ..MIX };
    sampled("p1_p2_p3_p4_two_threads_with_evictors", &eager(), &mixture, 120);
}

/// Writes, their evictions, and a flush in every order with two preemptions.
#[test]
fn p1_p4_an_eviction_beside_a_flush_all_interleavings() {
    let name = "p1_p4_an_eviction_beside_a_flush_all_interleavings";
    let subject =
        TransitSubject::new(BttSubject::new(20, 2, Version::V1_1, FlogSlots::ZeroOne), SLOTS, 1);
    let plan: Plan = vec![vec![write(0, 101), write(0, 102), step(Op::Flush), write(1, 103)]];
    match explore(&subject, SAMPLE, |explorer| explorer.exhaustive(&plan, 2)) {
        Ok(stats) => println!("{name}: {stats}"),
        Err(failure) => {
            panic!("replay: cargo test -p tidegate-sim --test transit {name}\n{failure}")
        }
    }
}

/// A tier whose flush does nothing must be found out.
#[test]
fn a_forgotten_flush_is_found() {
    struct Forgetful(TransitSubject);
    struct NoFlush(Arc<dyn BlockDevice>);

    impl BlockDevice for NoFlush {
        fn geometry(&self) -> Geometry {
            self.0.geometry()
        }
        fn run(&self, operation: &mut Operation<'_>) -> DeviceResult<()> {
            match operation {
                Operation::Flush => Ok(()),
                _ => self.0.run(operation),
            }
        }
    }

    impl Subject for Forgetful {
        fn create(&self, region: &Region) -> Result<(), String> {
            self.0.create(region)
        }
        fn open(&self, region: &Arc<Region>) -> Result<Arc<dyn BlockDevice>, String> {
            Ok(Arc::new(NoFlush(self.0.open(region)?)))
        }
        fn check(&self, region: &Region) -> Result<(), String> {
            self.0.check(region)
        }
        fn region_bytes(&self) -> u64 {
            self.0.region_bytes()
        }
        fn rounds_after_recovery(&self) -> u32 {
            self.0.rounds_after_recovery()
        }
    }

    let plan: Plan = vec![vec![write(0, 101), step(Op::Flush), fua(1, 102)]];
    let subject = Forgetful(on_demand());
    let found = explore(&subject, ENUMERATE, |explorer| explorer.exhaustive(&plan, 0));
    assert_eq!(found.unwrap_err().verdict.promise, Promise::P4Flush);
}
