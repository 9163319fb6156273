//! `RocksDB`: `db_bench` with a sync of each write, and without.

use super::bed::Way;
use super::files::pool;
use super::{Bench, Part, RUN_PREFIX, Runner};
use crate::child::{find_program, output_of};
use crate::error::Result;
use crate::measure::{Key, Op, Sample};
use crate::programs::{db_bench_options, parse_db_bench};

/// The case.
pub(super) const CASE: &str = "run-rocksdb-fillrandom";
const BENCHMARK: &str = "fillrandom";
/// Size of a value.
const VALUE_BYTES: u64 = 100;
/// Records if each costs a sync of the disk.
const SYNCED_RECORDS: u64 = 4000;
/// Records if none costs a sync.
const RECORDS: u64 = 150_000;

/// Measures `fillrandom`.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    bench.prepare_pool(pool(bench.args))?;
    let ways = Way::all(&bench.args.policies, false);
    let name = |way: Way| format!("{} {}", way.policy(), CASE.trim_start_matches(RUN_PREFIX));
    bench.in_turns(Part::Rocksdb, &ways, name, |bench, way| {
        let sample = fill(bench, way)?;
        Ok(Some((Key::new(way.policy(), CASE, Op::Write, VALUE_BYTES), sample)))
    })
}

fn fill(bench: &Bench<'_>, way: Way) -> Result<Sample> {
    let dir = bench.bed.empty_directory()?;
    let slow = way.runner == Runner::Plain && way.syncs;
    let records = bench.args.scaled(if slow { SYNCED_RECORDS } else { RECORDS }, 100);
    let program = find_program("db_bench", "rocksdb-tools")?;
    let mut command = bench.bed.command(way.runner, pool(bench.args), program);
    let db = dir.path().join("db");
    command.args(db_bench_options(&[BENCHMARK], &db, records, VALUE_BYTES, way.syncs));
    parse_db_bench(&output_of(command)?, BENCHMARK)
}
