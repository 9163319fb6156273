//! Opens a fully used cache after a crash.

use std::path::Path;

use super::{Bench, CacheArgs};
use crate::error::Result;
use crate::measure::Key;
use crate::open::{Engine, OpenArgs};
use crate::output::OutputArgs;

/// Case of an opening.
pub(super) const CASE: &str = "cache-open";
/// Writes before each crash, besides those that use all of the pool.
const WRITES: u64 = 20_000;
/// Peak memory of the program that opens.
pub(super) const MEMORY: &str = "peak memory of opening after a crash";
/// From the start of an opening.
const FIRST_HIT: &str = "until the first read hit, from the start of opening after a crash";
/// The size of the pool if the machine has the memory, and the size otherwise.
const SIZES_BYTES: [u64; 2] = [8 << 30, 4 << 30];
/// Free memory for other programs, among them the ones that write and open the pool.
const SPARE_BYTES: u64 = 2 << 30;

/// Returns the size of the pool: the option, or 8 GiB if `dir` and the machine have so much free
/// memory, else 4 GiB.
pub(super) fn size_bytes(args: &CacheArgs) -> u64 {
    args.open_size.unwrap_or_else(|| {
        let free_bytes = free_in(&args.dir).min(free_memory_bytes().unwrap_or(u64::MAX));
        largest_for(free_bytes)
    })
}

fn largest_for(free_bytes: u64) -> u64 {
    let fits = |bytes: &u64| bytes.saturating_add(SPARE_BYTES) <= free_bytes;
    SIZES_BYTES.into_iter().find(fits).unwrap_or(SIZES_BYTES[1])
}

/// Returns the free bytes of the file system of `dir`, or 0 if they are unknown.
fn free_in(dir: &Path) -> u64 {
    let free = |found: rustix::fs::StatVfs| found.f_bavail.saturating_mul(found.f_frsize);
    rustix::fs::statvfs(dir).map_or(0, free)
}

/// Returns the memory that programs can allocate without swapping.
fn free_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Returns the options of `open` for this part.
pub(super) fn options(args: &CacheArgs) -> OpenArgs {
    OpenArgs {
        engine: Engine::Cache,
        dir: args.dir.clone(),
        size: size_bytes(args),
        writes: WRITES,
        repetitions: args.repetitions,
        output: OutputArgs::default(),
    }
}

/// Measures openings, each after a crash.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let (series, opening) = options(bench.args).measure(bench.progress)?;
    let peak_mib = opening.peak_memory_bytes as f64 / f64::from(1 << 20);
    bench.found.amounts.add(MEMORY, "MiB", &series.key.policy, peak_mib);
    for seconds in opening.first_hits_s {
        bench.found.amounts.add(FIRST_HIT, "ms", &series.key.policy, seconds * 1e3);
    }
    let key = Key { case: CASE.to_owned(), ..series.key };
    for sample in series.samples {
        bench.collector.add(key.clone(), sample);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_as_large_as_the_free_memory_allows() {
        const GIB: u64 = 1 << 30;
        assert_eq!([24, 10, 9, 1].map(|gib| largest_for(gib * GIB) / GIB), [8, 8, 4, 4]);
        assert_eq!(largest_for(u64::MAX) / GIB, 8);
    }

    #[test]
    fn the_free_memory_is_told() {
        assert!(free_memory_bytes().is_some_and(|bytes| bytes > 1 << 20));
        assert!(free_in(Path::new("/")) > 0);
        assert_eq!(free_in(Path::new("/nonexistent")), 0);
    }
}
