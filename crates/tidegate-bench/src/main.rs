//! `tidegate-bench`: all measurements of docs/benchmarks.md, or one of them.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tidegate_bench::args::BenchCommand;
use tidegate_bench::open::{ChildCommand, OpenArgs};
use tidegate_bench::programs::ProgramsArgs;
use tidegate_bench::suite::SuiteArgs;

/// Measures Tidegate beside its peers; without a command, all of docs/benchmarks.md but its last part, which `programs` measures
#[derive(Debug, Parser)]
#[command(name = "tidegate-bench", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    suite: SuiteArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Bench(BenchCommand),
    /// Opening a BTT after a crash: time and memory
    Open(OpenArgs),
    /// Databases and fio on ext4 over NBD, with and without DRAM tiers (needs root)
    Programs(ProgramsArgs),
    #[command(flatten)]
    Child(ChildCommand),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match &cli.command {
        Some(Command::Bench(command)) => command.run(),
        Some(Command::Open(args)) => args.report().and_then(|report| report.publish(&args.output)),
        Some(Command::Programs(args)) => args.run(),
        Some(Command::Child(command)) => command.run(),
        None => cli.suite.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tidegate-bench: {}", error.with_causes());
            ExitCode::from(if error.is_usage() { 2 } else { 1 })
        }
    }
}
