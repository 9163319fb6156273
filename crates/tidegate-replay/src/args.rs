//! The command line of `tidegate-replay`.

use crate::error::Error;
use crate::replay::ReplayArgs;

/// What is asked for.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Play traces through schemes of DRAM, persistent memory and storage, and compare them
    Replay(ReplayArgs),
}

impl Command {
    /// Does it.
    ///
    /// # Errors
    /// As the command's own.
    pub fn run(&self) -> Result<(), Error> {
        match self {
            Self::Replay(args) => args.run(),
        }
    }
}
