//! `tidegate-bench`: all measurements of docs/benchmarks/, or a single one.

use std::process::ExitCode;

use clap::Parser;
use tidegate_bench::args::Command;
use tidegate_bench::program::{self, Failure};
use tidegate_bench::suite::SuiteArgs;

/// Measures Tidegate beside its peers; without a command, all of docs/benchmarks/ but the
/// part that `programs` measures
#[derive(Debug, Parser)]
#[command(name = "tidegate-bench", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    suite: SuiteArgs,
}

fn main() -> ExitCode {
    program::run("tidegate-bench", |cli: Cli| {
        let result = match &cli.command {
            Some(command) => command.run(),
            None => cli.suite.run(),
        };
        let done = result.map(|()| ExitCode::SUCCESS);
        done.map_err(|error| Failure { message: error.with_causes(), is_usage: error.is_usage() })
    })
}
