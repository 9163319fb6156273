//! The command line of measurements, shared by `tidegate bench` and `tidegate-bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use tidegate::pmem::MediaModel;

use crate::block;
use crate::error::{BenchError, Result};
use crate::machine::Machine;
use crate::nbd;
use crate::pattern::Pattern;
use crate::peers::libpmemblk;
use crate::progress::Progress;
use crate::report::{OutputArgs, Report};

/// What to measure.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    /// Block devices in this process: BTT, bare copies, libpmemblk
    Block(BlockArgs),
    /// NBD servers over unix sockets, driven by fio and nbdcopy
    Nbd(NbdArgs),
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
        let (report, output) = match self {
            Self::Block(args) => (args.report()?, &args.output),
            Self::Nbd(args) => (args.report()?, &args.output),
        };
        report.publish(output)
    }
}

/// What all measurements share.
#[derive(Debug, Clone, Args)]
pub struct CommonArgs {
    /// Medium that the memory stands for: dram, optane, cxl, with ,KEY=NUMBER for other numbers
    #[arg(long, value_name = "MODEL", default_value = "dram")]
    pub media: MediaModel,
    /// Seconds of one run
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    pub seconds: f64,
    /// Runs of each case, policies taking turns
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub repetitions: u32,
    /// Working set, and size of each device
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size)]
    pub size: u64,
    /// Directory of the pools: a tmpfs, or a file system on persistent memory
    #[arg(long, default_value = "/dev/shm")]
    pub dir: PathBuf,
}

impl CommonArgs {
    /// What the measurement runs on.
    pub(crate) fn machine(&self) -> Machine {
        Machine::of(&self.dir, &self.media, self.seconds, self.repetitions)
    }

    /// Refuses numbers that measure nothing.
    ///
    /// # Errors
    /// [`BenchError::Usage`].
    pub fn check(&self) -> Result<()> {
        if !(self.seconds > 0.0 && self.seconds < 86_400.0) {
            let message =
                format!("--seconds {}: expected more than 0 and less than a day", self.seconds);
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
    /// Policies to compare: btt, copy, peer:libpmemblk
    #[arg(
        long,
        value_name = "A,B,..",
        value_delimiter = ',',
        default_value = "copy,btt,peer:libpmemblk"
    )]
    pub policies: Vec<block::Policy>,
    /// Threads, one case for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1")]
    pub threads: Vec<usize>,
    /// Requests in flight of each thread (issued as a batch), one case for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1")]
    pub iodepth: Vec<u32>,
    /// Reads among 100 requests, one case for each number
    #[arg(long, value_name = "PCT,..", value_delimiter = ',', default_value = "0,100")]
    pub read_pct: Vec<u8>,
    /// Which blocks: uniform, zipf, zipf:THETA, sequential
    #[arg(long, default_value = "uniform")]
    pub pattern: Pattern,
    /// Size of a request and of a block
    #[arg(long, value_name = "BYTES", default_value_t = 4096)]
    pub block_size: u32,
    /// A flush after every N writes of a thread; 0: never
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub flush_every: u64,
    /// Busy time of a thread between requests
    #[arg(long, value_name = "NS", default_value_t = 0)]
    pub think_ns: u64,
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
        let machine = self.common.machine();
        let mut progress = Progress::new(block::planned(self));
        Ok(Report { machine, series: block::measure(self, &mut progress)?, open: None })
    }
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
        Ok(Report { machine, series: nbd::measure(self, &mut progress)?, open: None })
    }
}

/// Reads `SIZE`: a number of bytes, or a number and K, M, G or T (powers of 1024).
pub(crate) fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let expected = || format!("{text} is no size; expected a number and K, M, G or T, as in 512M");
    let unit = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match text[unit..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(expected()),
    };
    let number: u64 = text[..unit].parse().map_err(|_| expected())?;
    number.checked_mul(1 << shift).filter(|&bytes| bytes > 0).ok_or_else(expected)
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
    fn wrong_arguments_are_told() {
        for (line, named) in [
            ("x block --policies nonsense", "nonsense"),
            ("x block --policies transit", "transit"),
            ("x block --pattern zipf:x", "zipf"),
            ("x block --size 12Q", "12Q"),
            ("x block --size 0", "no size"),
            ("x nbd --policies peer:ceph", "peer:ceph"),
            ("x log", "log"),
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

    #[test]
    fn sizes_scale_by_1024_and_never_overflow() {
        assert_eq!(parse_size("512M"), Ok(512 << 20));
        assert_eq!(parse_size("4096"), Ok(4096));
        for wrong in ["", "M", "1X", "-1", "99999999999T", "18446744073709551616"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }
}
