//! The command line: the program's commands, with their measurements and outputs.
//!
//! A measurement's options stand beside its code; only this module and the suite call both a
//! measurement and the code that publishes it.

use clap::Subcommand;

use crate::block;
use crate::block_args::BlockArgs;
use crate::cache::CacheArgs;
use crate::error::Result;
use crate::log::LogArgs;
use crate::log::io::IoArgs;
use crate::machine::Machine;
use crate::nbd::{self, NbdArgs};
use crate::open::{ChildCommand, OpenArgs};
use crate::output::OutputArgs;
#[cfg(target_arch = "x86_64")]
use crate::paths::{PathCommand, PathsArgs};
use crate::peers::libpmemblk;
use crate::plan;
use crate::pmemblk::{self, PmemblkArgs};
use crate::policy::Policy;
use crate::programs::ProgramsArgs;
use crate::progress::Progress;
use crate::publish::publish;
use crate::report::Report;

/// What to measure.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Block devices in this process: BTT, bare copies, libpmemblk
    Block(BlockArgs),
    /// NBD servers over unix sockets, driven by fio and nbdcopy
    Nbd(NbdArgs),
    /// fio's pmemblk engine on the original libpmemblk and on Tidegate's
    Pmemblk(PmemblkArgs),
    /// The log in this process, and programs under `tidegate run` beside the same programs without
    Log(LogArgs),
    /// The cache: misses, hits and evictions, the matrix of the Open CAS study, slow backings
    Cache(CacheArgs),
    /// Opening a BTT or a cache after a crash: time and memory
    Open(OpenArgs),
    /// Databases and fio on ext4 over NBD, with and without DRAM tiers (needs root)
    Programs(ProgramsArgs),
    /// What hot paths cost: instructions, locked operations, fences (x86-64 only)
    #[cfg(target_arch = "x86_64")]
    Paths(PathsArgs),
    /// Load on files, as a program to be run: what it did as JSON
    #[command(hide = true)]
    Io(IoArgs),
    /// The parts played by programs of their own.
    #[command(flatten)]
    Child(ChildCommand),
    /// The program whose instructions are counted.
    #[command(flatten)]
    #[cfg(target_arch = "x86_64")]
    Traced(PathCommand),
}

impl Command {
    /// Measures, prints tables and writes the requested files.
    ///
    /// The running program may be started again with another environment
    /// ([`libpmemblk::prepare_process`]), so call this before doing anything else.
    ///
    /// # Errors
    /// Errors of measuring; [`BenchError::is_usage`](crate::error::BenchError::is_usage)
    /// distinguishes wrong usage from failure.
    pub fn run(&self) -> Result<()> {
        match self {
            Self::Block(args) => measured(&args.output, || block_report(args)),
            Self::Nbd(args) => measured(&args.output, || nbd_report(args)),
            Self::Pmemblk(args) => measured(&args.output, || pmemblk_report(args)),
            Self::Log(args) => measured(&args.output, || log_report(args)),
            Self::Cache(args) => measured(&args.output, || cache_report(args)),
            Self::Open(args) => measured(&args.output, || open_report(args)),
            Self::Programs(args) => {
                measured(&args.output, || Ok(Report::of(args.machine(), args.measure()?)))
            }
            Self::Io(args) => args.run(),
            #[cfg(target_arch = "x86_64")]
            Self::Paths(args) => args.run(),
            Self::Child(command) => command.run(),
            #[cfg(target_arch = "x86_64")]
            Self::Traced(command) => command.run(),
        }
    }
}

fn measured(output: &OutputArgs, measure: impl FnOnce() -> Result<Report>) -> Result<()> {
    output.check()?;
    publish(&measure()?, output)
}

fn block_report(args: &BlockArgs) -> Result<Report> {
    if args.policies.contains(&Policy::Libpmemblk) {
        libpmemblk::prepare_process()?;
    }
    let args = plan::with_working_set(args);
    let machine = Machine { seconds: args.run_time().as_secs_f64(), ..args.common.machine() };
    let mut progress = Progress::new(block::planned(&args));
    let (series, tiers) = block::measure(&args, &mut progress)?;
    Ok(Report { tiers, ..Report::of(machine, series) })
}

fn nbd_report(args: &NbdArgs) -> Result<Report> {
    let mut progress = Progress::new(nbd::planned(args));
    Ok(Report::of(args.common.machine(), nbd::measure(args, &mut progress, true)?))
}

fn pmemblk_report(args: &PmemblkArgs) -> Result<Report> {
    let mut progress = Progress::new(pmemblk::planned(args));
    Ok(Report::of(args.common.machine(), pmemblk::measure(args, &mut progress)?))
}

fn log_report(args: &LogArgs) -> Result<Report> {
    args.check()?;
    let (series, log) = args.measure(&mut Progress::new(args.planned()))?;
    Ok(Report { log, ..Report::of(args.machine(), series) })
}

fn cache_report(args: &CacheArgs) -> Result<Report> {
    let (series, cache) = args.measure(&mut Progress::new(args.planned()))?;
    Ok(Report { cache, ..Report::of(args.machine(), series) })
}

fn open_report(args: &OpenArgs) -> Result<Report> {
    let (series, opening) = args.measure(&mut Progress::new(args.planned()))?;
    Ok(Report { open: Some(opening), ..Report::of(args.machine(), vec![series]) })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(subcommand)]
        command: Command,
    }

    fn parse(line: &str) -> std::result::Result<Command, clap::Error> {
        Line::try_parse_from(line.split(' ')).map(|line| line.command)
    }

    #[test]
    fn the_contract_of_the_command_line_parses() {
        let line = "x block --policies btt,peer:libpmemblk,copy --media dram --threads 1,2 --iodepth 1 \
                    --seconds 0.5 --json a.json --report dir";
        let Command::Block(args) = parse(line).unwrap() else { panic!("block") };
        assert_eq!(args.policies.len(), 3);
        assert_eq!((args.threads.as_slice(), args.iodepth.as_slice()), (&[1, 2][..], &[1][..]));
        let line = "x nbd --policies btt --threads 2 --iodepth 32 --seconds 1 --json a --report b";
        assert!(matches!(parse(line), Ok(Command::Nbd(_))));
    }

    #[test]
    fn the_plots_of_the_paper_are_made_for_a_report_on_tiers_and_nothing_else() {
        let cells = |line: &str| {
            let Ok(Command::Block(args)) = parse(line) else { panic!("{line} parses") };
            args.check().unwrap();
            (args.is_paper(), plan::cells(&args).len())
        };
        let line = "x block --policies raw,btt,transit,transit-no-eager,transit-no-bypass,pmbd,pmbd70,lru,coactive \
                    --media optane --report DIR";
        let (paper, count) = cells(line);
        assert!(paper && count > 20, "{count}");
        assert_eq!(cells(&format!("{line} --cache 1M,2M --read-share 0,50")), (false, 4));
        assert_eq!(cells("x block --policies btt,lru --iodepth 1,32 --threads 1,2"), (false, 8));
        assert_eq!(cells("x block --policies btt --report DIR"), (false, 2));
    }

    #[test]
    fn wrong_arguments_are_told() {
        for (line, named) in [
            ("x block --policies nonsense", "nonsense"),
            ("x block --policies transit:64M", "transit:64M"),
            ("x block --pattern zipf:x", "zipf"),
            ("x block --size 12Q", "12Q"),
            ("x block --size 0", "more than 0"),
            ("x nbd --policies peer:ceph", "peer:ceph"),
            ("x cache --only fast", "evict"),
            ("x log --policies fast", "known are plain, run"),
            ("x log --parts fast", "postgres"),
        ] {
            let message = parse(line).unwrap_err().to_string();
            assert!(message.contains(named), "{line}: {message}");
        }
    }

    #[test]
    fn numbers_that_measure_nothing_are_refused() {
        for line in ["x block --seconds 0", "x block --seconds nan", "x block --repetitions 0"] {
            let Ok(Command::Block(args)) = parse(line) else { panic!("{line} parses") };
            assert!(args.common.check().is_err_and(|error| error.is_usage()), "{line}");
        }
    }
}
