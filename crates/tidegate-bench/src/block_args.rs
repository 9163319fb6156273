//! The options of `bench block`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tidegate::pmem::MediaModel;
use tidegate::size::parse_bytes;

use crate::common::{CommonArgs, DEFAULT_SECONDS};
use crate::error::{BenchError, Result, require};
use crate::output::OutputArgs;
use crate::pattern::Pattern;
use crate::policy::Policy;

/// Arguments of `bench block`.
#[derive(Debug, Clone, Args)]
pub struct BlockArgs {
    /// Policies to compare: raw, btt, transit, transit-no-eager, transit-no-bypass, pmbd, pmbd70,
    /// lru, coactive (DRAM tiers over btt), copy, peer:libpmemblk
    #[arg(
        long,
        value_name = "A,B,..",
        value_delimiter = ',',
        default_value = "copy,btt,peer:libpmemblk"
    )]
    pub policies: Vec<Policy>,
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
    /// Write the requests of the first run to FILE as CSV (which slows that run down)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// What all measurements share.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl BlockArgs {
    /// Returns whether to report the plots of the Caiti paper: the options name a DRAM tier, and no
    /// other workload.
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

    /// Returns the length of a run, unless a number of requests limits it.
    pub(crate) fn run_time(&self) -> Duration {
        let default = if self.is_paper() { PAPER_SECONDS } else { DEFAULT_SECONDS };
        Duration::from_secs_f64(self.common.seconds.unwrap_or(default))
    }

    /// Refuses combinations that make no sense.
    ///
    /// # Errors
    /// [`BenchError::Usage`].
    pub(crate) fn check(&self) -> Result<()> {
        self.common.check()?;
        let has_zero = self.threads.contains(&0) || self.iodepth.contains(&0);
        require(!has_zero, "--threads and --iodepth: expected at least 1")?;
        if let Some(pct) = self.read_share.iter().find(|&&pct| pct > 100) {
            return Err(BenchError::Usage(format!("--read-share {pct}: expected 0 to 100")));
        }
        let (duty, block_size, media) = (self.duty, self.block_size, &self.common.media);
        require((1..=100).contains(&duty), &format!("--duty {duty}: expected 1 to 100"))?;
        let is_block = block_size >= 512 && u64::from(block_size) <= self.common.size;
        require(is_block, &format!("--block-size {block_size}: expected 512 up to --size"))?;
        let has_peer = self.policies.contains(&Policy::Libpmemblk);
        let message = "libpmemblk runs on the memory as it is; leave it out";
        let is_possible = !has_peer || *media == MediaModel::default();
        require(is_possible, &format!("--media {media}: {message}"))
    }
}

/// Seconds of each of the hundreds of runs behind the paper's plots by default.
const PAPER_SECONDS: f64 = 0.2;
