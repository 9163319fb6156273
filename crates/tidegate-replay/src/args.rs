//! The command line of `tidegate-replay`.

use std::process::ExitCode;

use crate::error::Result;
use crate::measured::PapersArgs;
use crate::model::args::ModelArgs;
use crate::record::RecordArgs;
use crate::replay::ReplayArgs;

/// A command of `tidegate-replay`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Model a machine with many cores in virtual time
    #[command(
        after_help = "Examples:\n  tidegate model --cores 36 --policies btt,transit,pmbd --iodepth \
                      1,128\n  tidegate model --calibrate costs.json --disk /data\n  \
                      tidegate model --costs costs.json --cores 8,16\n  tidegate replay --costs \
                      costs.json app.csv.zst"
    )]
    Model(Box<ModelArgs>),
    /// Play traces through schemes of DRAM, persistent memory and storage, and compare them
    Replay(Box<ReplayArgs>),
    /// Make a trace of a running program, for `tidegate replay`
    #[command(
        after_help = "Examples:\n  tidegate record -- sqlite3 app.db < load.sql\n  tidegate record -o \
                      build.csv.zst --include '/home/*' -- make\n  tidegate replay build.csv.zst\n\n\
                      The program runs as it would without; its exit status is that of this \
                      command. docs/traces.md says what is in the trace and what is not."
    )]
    Record(RecordArgs),
    /// Write the figures of papers that `tidegate bench` measured into docs/papers.md
    #[command(hide = true)]
    Papers(PapersArgs),
}

impl Command {
    /// Runs the command; returns the exit status of a recorded program, or 0.
    ///
    /// # Errors
    /// The errors of the command.
    pub fn run(&mut self) -> Result<ExitCode> {
        match self {
            Self::Model(args) => args.run().map(|()| ExitCode::SUCCESS),
            Self::Replay(args) => args.run().map(|()| ExitCode::SUCCESS),
            Self::Record(args) => args.run(),
            Self::Papers(args) => args.run().map(|()| ExitCode::SUCCESS),
        }
    }
}
