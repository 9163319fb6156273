//! All tables of docs/benchmarks/ in one run: `make bench`.

use std::time::Duration;

use clap::Parser;

use crate::block_args::BlockArgs;
use crate::cache::CacheArgs;
use crate::error::Result;
use crate::log::LogArgs;
use crate::nbd::NbdArgs;
use crate::open::OpenArgs;
use crate::output::OutputArgs;
use crate::peers::libpmemblk;
use crate::progress::Progress;
use crate::publish::publish;
use crate::report::Report;
use crate::{block, nbd};

/// Arguments of the whole run.
#[derive(Debug, Clone, clap::Args)]
pub struct SuiteArgs {
    /// Three minutes instead of eighteen: shorter runs, fewer repetitions
    #[arg(long)]
    pub quick: bool,
    /// Where results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The measurements, as command lines: what `tidegate bench` would be given.
#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct Line<A: clap::Args> {
    #[command(flatten)]
    args: A,
}

/// Command lines of `bench block`, `bench nbd`, `open`, `bench log` and `bench cache`.
const FULL: [&str; 5] = [
    "--threads 1,2 --seconds 1 --repetitions 7",
    "--seconds 1.5 --repetitions 3",
    "--writes 200000 --repetitions 5",
    "--repetitions 3 --steady-seconds 5",
    "--repetitions 5",
];
/// The command lines of a run of two minutes.
const QUICK: [&str; 5] = [
    "--threads 1,2 --seconds 0.3 --repetitions 3",
    "--seconds 0.4 --repetitions 1",
    "--writes 20000 --repetitions 2",
    "--quick",
    "--size 64M --open-size 512M --seconds 0.1 --repetitions 2",
];

fn line<A: clap::Args>(words: &str) -> A {
    Line::<A>::parse_from(words.split(' ')).args
}

/// The measurements of the whole run.
struct Plan {
    block: BlockArgs,
    nbd: NbdArgs,
    open: OpenArgs,
    log: LogArgs,
    cache: CacheArgs,
}

impl Plan {
    fn new(quick: bool) -> Self {
        let [block, nbd, open, log, cache] = if quick { QUICK } else { FULL };
        let (block, nbd, open) = (line(block), line(nbd), line(open));
        Self { block, nbd, open, log: line(log), cache: line(cache) }
    }

    fn run(&self) -> Result<Report> {
        nbd::find_programs(&self.nbd)?;
        let machine = self.block.common.machine();
        self.log.check()?;
        self.cache.check()?;
        let mut progress = Progress::new(self.planned());
        let (mut series, tiers) = block::measure(&self.block, &mut progress)?;
        series.extend(nbd::measure(&self.nbd, &mut progress, true)?);
        let (opened, opening) = self.open.measure(&mut progress)?;
        series.push(opened);
        let (of_log, log) = self.log.measure(&mut progress)?;
        series.extend(of_log);
        let (of_cache, cache) = self.cache.measure(&mut progress)?;
        series.extend(of_cache);
        Ok(Report { machine, series, open: Some(opening), tiers, log, cache })
    }

    fn planned(&self) -> Duration {
        let devices = block::planned(&self.block) + nbd::planned(&self.nbd);
        devices + self.open.planned() + self.log.planned() + self.cache.planned()
    }
}

impl SuiteArgs {
    /// Measures everything, prints the tables and writes the requested files. The running program
    /// may be started again with another environment ([`libpmemblk::prepare_process`]).
    ///
    /// # Errors
    /// Errors of the measurements.
    pub fn run(&self) -> Result<()> {
        libpmemblk::prepare_process()?;
        self.output.check()?;
        publish(&Plan::new(self.quick).run()?, &self.output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_parse_and_the_quick_one_is_quick() {
        let [quick, full] = [true, false].map(|quick| {
            let plan = Plan::new(quick);
            plan.block.common.check().unwrap();
            plan.nbd.common.check().unwrap();
            plan.planned()
        });
        assert!(quick.as_secs() < 180 && full.as_secs() < 1110, "{quick:?} {full:?}");
    }
}
