//! The command line of `tidegate-replay`.

use crate::error::Error;
use crate::measured::PapersArgs;
use crate::model::args::ModelArgs;
use crate::replay::ReplayArgs;

/// What is asked for.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Model a machine with many cores in virtual time
    #[command(
        after_help = "Examples:\n  tidegate model --cores 36 --policies btt,transit,pmbd --iodepth \
                      1,128\n  tidegate model --calibrate costs.json\n  tidegate model --costs \
                      costs.json --cores 8,16"
    )]
    Model(ModelArgs),
    /// Play traces through schemes of DRAM, persistent memory and storage, and compare them
    Replay(ReplayArgs),
    /// Write the figures of papers that `tidegate bench` measured into docs/papers.md
    #[command(hide = true)]
    Papers(PapersArgs),
}

impl Command {
    /// Does it.
    ///
    /// # Errors
    /// As the command's own.
    pub fn run(&self) -> Result<(), Error> {
        match self {
            Self::Model(args) => args.run(),
            Self::Replay(args) => args.run(),
            Self::Papers(args) => args.run(),
        }
    }
}
