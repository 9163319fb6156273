//! Hits over NBD: `tidegate serve` of a cache beside that of a BTT.

use super::{Bench, CacheArgs};
use crate::common::CommonArgs;
use crate::error::Result;
use crate::measure::{Key, Series};
use crate::nbd::{self, NbdArgs, Policy};
use crate::output::OutputArgs;

/// Prefix of the cases' names.
pub(super) const PREFIX: &str = "cache-";
/// Least seconds of a run of fio, which takes half a second to start and stop.
const SECONDS_MIN: f64 = 0.4;

/// Returns the options of `bench nbd` for this part.
pub(super) fn options(args: &CacheArgs) -> NbdArgs {
    NbdArgs {
        policies: vec![Policy::Btt, Policy::Cache],
        threads: vec![1],
        iodepth: vec![1, 32],
        server: None,
        common: CommonArgs {
            media: args.media.clone(),
            seconds: Some(args.seconds.max(SECONDS_MIN)),
            repetitions: args.repetitions,
            size: args.size,
            dir: args.dir.clone(),
        },
        output: OutputArgs::default(),
    }
}

/// Measures random writes and reads of pages that are cached.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    for Series { key, samples } in nbd::measure(&options(bench.args), bench.progress, false)? {
        for sample in samples {
            let key = Key { case: format!("{PREFIX}{}", key.case), ..key.clone() };
            bench.collector.add(key, sample);
        }
    }
    Ok(())
}
