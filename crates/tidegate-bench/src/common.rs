//! The options that all measurements of devices share.

use std::path::PathBuf;

use clap::Args;
use tidegate::pmem::MediaModel;
use tidegate::size::parse_bytes;

use crate::error::{Result, require};
use crate::machine::Machine;

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
    /// Describes the machine of the measurement.
    pub(crate) fn machine(&self) -> Machine {
        Machine::of(&self.dir, &self.media, self.seconds(), self.repetitions)
    }

    /// Returns the length of a run in seconds.
    pub(crate) fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(DEFAULT_SECONDS)
    }

    /// Refuses numbers that measure nothing.
    ///
    /// # Errors
    /// [`BenchError::Usage`](crate::error::BenchError::Usage).
    pub fn check(&self) -> Result<()> {
        let seconds = self.seconds();
        let message = format!("--seconds {seconds}: expected more than 0 and less than a day");
        require(seconds > 0.0 && seconds < 86_400.0, &message)?;
        require(self.repetitions > 0, "--repetitions 0: expected at least 1")
    }
}

/// Seconds of a run by default.
pub(crate) const DEFAULT_SECONDS: f64 = 1.0;
