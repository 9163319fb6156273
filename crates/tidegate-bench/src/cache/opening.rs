//! Opening a cache after a crash, all of it used.

use std::time::Duration;

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

/// The options of `open` for this part.
fn options(args: &CacheArgs) -> OpenArgs {
    OpenArgs {
        engine: Engine::Cache,
        dir: args.dir.clone(),
        size: args.open_size,
        writes: WRITES,
        repetitions: args.repetitions,
        output: OutputArgs::default(),
    }
}

/// Time that [`measure`] should take.
pub(super) fn planned(args: &CacheArgs) -> Duration {
    options(args).planned()
}

/// Measures openings, each after a crash.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let (series, opening) = options(bench.args).measure(bench.progress)?;
    let peak_mib = opening.peak_memory_bytes as f64 / f64::from(1 << 20);
    bench.found.amounts.add(MEMORY, "MiB", &series.key.policy, peak_mib);
    let key = Key { case: CASE.to_owned(), ..series.key };
    for sample in series.samples {
        bench.collector.add(key.clone(), sample);
    }
    Ok(())
}
