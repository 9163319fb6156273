//! `RocksDB`: `db_bench` with a sync of each write, and without.

use std::ffi::OsString;

use super::bed::Way;
use super::files::pool;
use super::{Bench, Part, RUN_PREFIX, Runner};
use crate::child::{find_program, output_of};
use crate::error::Result;
use crate::measure::{Key, Op, Sample};
use crate::programs::parse_db_bench;

/// The case.
pub(super) const CASE: &str = "run-rocksdb-fillrandom";
const BENCHMARK: &str = "fillrandom";
/// Size of a value.
const VALUE_BYTES: u64 = 100;
/// Records where each costs a sync of the disk.
const SYNCED_RECORDS: u64 = 4000;
/// Records where none does.
const RECORDS: u64 = 150_000;

/// Whether `db_bench` is there.
pub(super) fn find_programs() -> Result<()> {
    find_program("db_bench", "rocksdb-tools").map(drop)
}

/// Measures `fillrandom`.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    bench.prepare_pool(pool(bench.args))?;
    let ways = Way::all(&bench.args.policies, false);
    let name = |way: Way| format!("{} {}", way.policy(), CASE.trim_start_matches(RUN_PREFIX));
    bench.in_turns(Part::Rocksdb, &ways, name, |bench, way| {
        let (policy, case, op) = (way.policy(), CASE.to_owned(), Op::Write);
        let key = Key { policy, case, op, threads: 1, iodepth: 1, block_bytes: VALUE_BYTES };
        let sample = fill(bench, way)?;
        bench.add(key, sample);
        Ok(())
    })
}

fn fill(bench: &Bench<'_>, way: Way) -> Result<Sample> {
    let dir = super::bed::directory(bench.bed.files())?;
    let slow = way.runner == Runner::Plain && way.syncs;
    let records = bench.args.scaled(if slow { SYNCED_RECORDS } else { RECORDS }, 100);
    let mut words: Vec<OsString> = vec![find_program("db_bench", "rocksdb-tools")?.into()];
    words.extend(
        [
            format!("--benchmarks={BENCHMARK}"),
            format!("--db={}", dir.path().join("db").display()),
            format!("--num={records}"),
            format!("--value_size={VALUE_BYTES}"),
            format!("--sync={}", u8::from(way.syncs)),
            "--histogram=1".to_owned(),
            "--compression_type=none".to_owned(),
            "--seed=1".to_owned(),
        ]
        .map(OsString::from),
    );
    bench.bed.sync_disk()?;
    parse_db_bench(&output_of(bench.bed.command(way.runner, pool(bench.args), &words))?, BENCHMARK)
}
