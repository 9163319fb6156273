//! `tidegate-replay`: `tidegate record`, `tidegate replay` and `tidegate model`.

use std::process::ExitCode;

use clap::Parser;
use tidegate_bench::program::{self, Failure};
use tidegate_replay::args::Command;

/// Records traces, replays them through Tidegate's tiers, and models machines with many cores
#[derive(Debug, Parser)]
#[command(name = "tidegate", bin_name = "tidegate", version, subcommand_required = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    program::run("tidegate", |mut cli: Cli| {
        cli.command
            .run()
            .map_err(|error| Failure { message: error.to_string(), is_usage: error.is_usage() })
    })
}
