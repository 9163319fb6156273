//! The command line of measurements, shared by `tidegate bench` and `tidegate-bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use tidegate::pmem::MediaModel;
use tidegate::size::parse_bytes;

use crate::block;
use crate::error::{BenchError, Result};
use crate::log::LogArgs;
use crate::log::io::IoArgs;
use crate::machine::Machine;
use crate::nbd;
use crate::pattern::Pattern;
use crate::peers::libpmemblk;
use crate::plan::{self, Cell};
use crate::progress::Progress;
use crate::report::{OutputArgs, Report};

/// What to measure.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    /// Block devices in this process: BTT, bare copies, libpmemblk
    Block(BlockArgs),
    /// NBD servers over unix sockets, driven by fio and nbdcopy
    Nbd(NbdArgs),
    /// The log in this process, and programs under `tidegate run` beside the same programs without
    Log(LogArgs),
    /// Load on files, as a program to be run: what it did as JSON
    #[command(hide = true)]
    Io(IoArgs),
}

impl BenchCommand {
    /// Measures, prints tables and writes the files asked for.
    ///
    /// The running program may be started again with another environment ([`libpmemblk::prepare_process`]), so call
    /// this before doing anything else.
    ///
    /// # Errors
    /// Those of measuring; [`BenchError::is_usage`] tells wrong usage from failure.
    pub fn run(&self) -> Result<()> {
        let output = match self {
            Self::Block(args) => &args.output,
            Self::Nbd(args) => &args.output,
            Self::Log(args) => &args.output,
            Self::Io(args) => return args.run(),
        };
        output.check()?;
        let report = match self {
            Self::Block(args) => args.report(),
            Self::Nbd(args) => args.report(),
            Self::Log(args) => args.report(),
            Self::Io(args) => return args.run(),
        };
        report?.publish(output)
    }
}

/// What all measurements share.
#[derive(Debug, Clone, Args)]
pub struct CommonArgs {
    /// Medium that the memory stands for: dram, optane, cxl, with ,KEY=NUMBER for other numbers
    #[arg(long, value_name = "MODEL", default_value = "dram")]
    pub media: MediaModel,
    /// Seconds of one run [default: 1, or 0.2 for the plots of the paper]
    #[arg(long, value_name = "S")]
    pub seconds: Option<f64>,
    /// Runs of each case, policies taking turns
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub repetitions: u32,
    /// Working set, and size of each device; at least twice the largest cache
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_bytes)]
    pub size: u64,
    /// Directory of the pools: a tmpfs, or a file system on persistent memory
    #[arg(long, default_value = "/dev/shm")]
    pub dir: PathBuf,
}

impl CommonArgs {
    /// What the measurement runs on.
    pub(crate) fn machine(&self) -> Machine {
        Machine::of(&self.dir, &self.media, self.seconds(), self.repetitions)
    }

    /// Length of a run.
    pub(crate) fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(DEFAULT_SECONDS)
    }

    /// Refuses numbers that measure nothing.
    ///
    /// # Errors
    /// [`BenchError::Usage`].
    pub fn check(&self) -> Result<()> {
        let seconds = self.seconds();
        if !(seconds > 0.0 && seconds < 86_400.0) {
            let message = format!("--seconds {seconds}: expected more than 0 and less than a day");
            return Err(BenchError::Usage(message));
        }
        if self.repetitions == 0 {
            return Err(BenchError::Usage("--repetitions 0: expected at least 1".to_owned()));
        }
        Ok(())
    }
}

/// Arguments of `bench block`.
#[derive(Debug, Clone, Args)]
pub struct BlockArgs {
    /// Policies to compare: raw, btt, transit, transit-no-eager, transit-no-bypass, pmbd, pmbd70, lru, coactive (DRAM
    /// tiers over btt), copy, peer:libpmemblk
    #[arg(
        long,
        value_name = "A,B,..",
        value_delimiter = ',',
        default_value = "copy,btt,peer:libpmemblk"
    )]
    pub policies: Vec<block::Policy>,
    /// Threads, one case for each number [default: 1]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub threads: Vec<usize>,
    /// Requests in flight of each thread (issued as a batch), one case for each number [default: 1]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub iodepth: Vec<u32>,
    /// Sizes of the DRAM tiers, one case for each [default: 64M]
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = parse_bytes)]
    pub cache: Vec<u64>,
    /// Reads among 100 requests, one case for each number [default: 0,100]
    #[arg(long, value_name = "PCT,..", value_delimiter = ',')]
    pub read_share: Vec<u8>,
    /// Which blocks: uniform, zipf, zipf:THETA, sequential [default: uniform]
    #[arg(long)]
    pub pattern: Option<Pattern>,
    /// Size of a request and of a block
    #[arg(long, value_name = "BYTES", default_value_t = 4096)]
    pub block_size: u32,
    /// A flush after every N writes of a thread; 0: never
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub fsync_every: u64,
    /// Busy time of a thread between requests
    #[arg(long, value_name = "US", default_value_t = 0)]
    pub think_us: u64,
    /// Requests of a thread between two rests; 0: no rests
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub burst: u64,
    /// With --burst: share of the time in which a thread requests, 1 to 100
    #[arg(long, value_name = "PCT", default_value_t = 20)]
    pub duty: u8,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// What all measurements share.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl BlockArgs {
    /// Measures; see [`BenchCommand::run`] for what happens to the running program.
    ///
    /// # Errors
    /// Those of measuring.
    pub fn report(&self) -> Result<Report> {
        if self.policies.contains(&block::Policy::Libpmemblk) {
            libpmemblk::prepare_process()?;
        }
        let args = self.with_room();
        let machine = Machine { seconds: args.run_time().as_secs_f64(), ..args.common.machine() };
        let mut progress = Progress::new(block::planned(&args));
        let (series, tiers) = block::measure(&args, &mut progress)?;
        Ok(Report { tiers, ..Report::of(machine, series) })
    }

    /// The plots of the Caiti paper are wanted: a report on DRAM tiers, and no other workload is asked for.
    pub(crate) fn is_paper(&self) -> bool {
        let unasked = self.threads.is_empty()
            && self.iodepth.is_empty()
            && self.cache.is_empty()
            && self.read_share.is_empty()
            && self.pattern.is_none()
            && (self.fsync_every, self.think_us, self.burst) == (0, 0, 0);
        let tiers = self.policies.iter().any(|policy| policy.has_tier());
        unasked && tiers && self.output.report.is_some()
    }

    /// What is to be measured, in order.
    pub(crate) fn cells(&self) -> Vec<Cell> {
        if self.is_paper() { plan::paper(self) } else { plan::by_options(self) }
    }

    /// The same with a working set that the largest cache does not hold half of.
    fn with_room(&self) -> Self {
        let mut args = self.clone();
        if args.policies.iter().any(|policy| policy.has_tier()) {
            let largest = args.cells().iter().map(|cell| cell.cache_bytes).max().unwrap_or(0);
            args.common.size = args.common.size.max(2 * largest);
        }
        args
    }

    /// Length of a run, where it is not given by a number of requests.
    pub(crate) fn run_time(&self) -> Duration {
        let default = if self.is_paper() { PAPER_SECONDS } else { DEFAULT_SECONDS };
        Duration::from_secs_f64(self.common.seconds.unwrap_or(default))
    }

    pub(crate) fn thread_counts(&self) -> Vec<usize> {
        or_default(&self.threads, &[1])
    }

    pub(crate) fn depths(&self) -> Vec<u32> {
        or_default(&self.iodepth, &[1])
    }

    pub(crate) fn caches(&self) -> Vec<u64> {
        or_default(&self.cache, &[64 << 20])
    }

    pub(crate) fn read_shares(&self) -> Vec<u8> {
        or_default(&self.read_share, &[0, 100])
    }

    pub(crate) fn pattern(&self) -> Pattern {
        self.pattern.unwrap_or(Pattern::Uniform)
    }

    /// Refuses combinations that make no sense.
    ///
    /// # Errors
    /// [`BenchError::Usage`].
    pub(crate) fn check(&self) -> Result<()> {
        self.common.check()?;
        let usage = |message: String| Err(BenchError::Usage(message));
        if self.threads.contains(&0) || self.iodepth.contains(&0) {
            return usage("--threads and --iodepth: expected at least 1".to_owned());
        }
        if let Some(pct) = self.read_share.iter().find(|&&pct| pct > 100) {
            return usage(format!("--read-share {pct}: expected 0 to 100"));
        }
        if !(1..=100).contains(&self.duty) {
            return usage(format!("--duty {}: expected 1 to 100", self.duty));
        }
        if self.block_size < 512 || u64::from(self.block_size) > self.common.size {
            return usage(format!("--block-size {}: expected 512 up to --size", self.block_size));
        }
        let media = &self.common.media;
        if *media != MediaModel::default() && self.policies.contains(&block::Policy::Libpmemblk) {
            return usage(format!(
                "--media {media}: libpmemblk runs on the memory as it is; leave it out"
            ));
        }
        Ok(())
    }
}

/// Seconds of a run, unless they are given.
const DEFAULT_SECONDS: f64 = 1.0;
/// The same for each of the hundreds of runs behind the paper's plots.
const PAPER_SECONDS: f64 = 0.2;

fn or_default<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

/// Arguments of `bench nbd`.
#[derive(Debug, Clone, Args)]
pub struct NbdArgs {
    /// Servers to compare: btt, peer:nbdkit-memory, peer:nbdkit-file, peer:qemu-nbd
    #[arg(
        long,
        value_name = "A,B,..",
        value_delimiter = ',',
        default_value = "btt,peer:nbdkit-memory,peer:nbdkit-file,peer:qemu-nbd"
    )]
    pub policies: Vec<nbd::Policy>,
    /// Jobs of fio, each a process with a connection, one case for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,2")]
    pub threads: Vec<usize>,
    /// Requests in flight of each job, one case for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,32")]
    pub iodepth: Vec<u32>,
    /// Command that serves the BTT; {pool} and {socket} stand for the paths [default: the tidegate beside this program]
    #[arg(long, value_name = "COMMAND")]
    pub server: Option<String>,
    /// What all measurements share.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl NbdArgs {
    /// Measures.
    ///
    /// # Errors
    /// Those of measuring.
    pub fn report(&self) -> Result<Report> {
        let machine = self.common.machine();
        let mut progress = Progress::new(nbd::planned(self));
        let series = nbd::measure(self, &mut progress)?;
        Ok(Report::of(machine, series))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(subcommand)]
        command: BenchCommand,
    }

    fn parse(line: &str) -> std::result::Result<BenchCommand, clap::Error> {
        Line::try_parse_from(line.split(' ')).map(|line| line.command)
    }

    #[test]
    fn the_contract_of_the_command_line_parses() {
        let line = "x block --policies btt,peer:libpmemblk,copy --media dram --threads 1,2 --iodepth 1 \
                    --seconds 0.5 --json a.json --report dir";
        let BenchCommand::Block(args) = parse(line).unwrap() else { panic!("block") };
        assert_eq!(args.policies.len(), 3);
        assert_eq!((args.threads.as_slice(), args.iodepth.as_slice()), (&[1, 2][..], &[1][..]));
        let line = "x nbd --policies btt --threads 2 --iodepth 32 --seconds 1 --json a --report b";
        assert!(matches!(parse(line), Ok(BenchCommand::Nbd(_))));
    }

    #[test]
    fn the_plots_of_the_paper_are_made_for_a_report_on_tiers_and_nothing_else() {
        let cells = |line: &str| {
            let Ok(BenchCommand::Block(args)) = parse(line) else { panic!("{line} parses") };
            args.check().unwrap();
            (args.is_paper(), args.cells().len())
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
            ("x cache", "cache"),
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
            let Ok(BenchCommand::Block(args)) = parse(line) else { panic!("{line} parses") };
            assert!(args.common.check().is_err_and(|error| error.is_usage()), "{line}");
        }
    }
}
