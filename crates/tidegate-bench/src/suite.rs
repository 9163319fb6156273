//! All tables of docs/benchmarks.md in one run: `make bench`.

use std::time::Duration;

use clap::Parser;

use crate::block_args::BlockArgs;
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
    /// Two minutes instead of twelve: shorter runs, fewer repetitions
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

/// Command lines of `bench block`, `bench nbd`, `open` and `bench log`.
const FULL: [&str; 4] = [
    "--threads 1,2 --seconds 1 --repetitions 7",
    "--seconds 1.5 --repetitions 3",
    "--writes 200000 --repetitions 5",
    "--repetitions 3",
];
/// The command lines of a run of two minutes.
const QUICK: [&str; 4] = [
    "--threads 1,2 --seconds 0.3 --repetitions 3",
    "--seconds 0.4 --repetitions 1",
    "--writes 20000 --repetitions 2",
    "--quick",
];

fn line<A: clap::Args>(words: &str) -> A {
    Line::<A>::parse_from(words.split(' ')).args
}

/// What the whole run measures.
struct Plan {
    block: BlockArgs,
    nbd: NbdArgs,
    open: OpenArgs,
    log: LogArgs,
}

impl Plan {
    fn new(quick: bool) -> Self {
        let [block, nbd, open, log] = if quick { QUICK } else { FULL };
        Self { block: line(block), nbd: line(nbd), open: line(open), log: line(log) }
    }

    fn run(&self) -> Result<Report> {
        nbd::find_programs(&self.nbd)?;
        let machine = self.block.common.machine();
        self.log.check()?;
        let mut progress = Progress::new(self.planned());
        let (mut series, tiers) = block::measure(&self.block, &mut progress)?;
        series.extend(nbd::measure(&self.nbd, &mut progress)?);
        let (opened, opening) = self.open.measure(&mut progress)?;
        series.push(opened);
        let (of_log, log) = self.log.measure(&mut progress)?;
        series.extend(of_log);
        Ok(Report { machine, series, open: Some(opening), tiers, log })
    }

    fn planned(&self) -> Duration {
        let devices = block::planned(&self.block) + nbd::planned(&self.nbd);
        devices + self.open.planned() + self.log.planned()
    }
}

impl SuiteArgs {
    /// Measures everything, prints the tables and writes the files asked for. The running program
    /// may be started again with another environment ([`libpmemblk::prepare_process`]).
    ///
    /// # Errors
    /// Those of measuring.
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
        assert!(quick.as_secs() < 180 && full.as_secs() < 900, "{quick:?} {full:?}");
    }
}
