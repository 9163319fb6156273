//! `tidegate-bench`: all measurements of docs/benchmarks.md, or one of them.

use std::process::ExitCode;

use clap::Parser;
use tidegate_bench::args::Command;
use tidegate_bench::suite::SuiteArgs;

const FAILED: u8 = 1;
const WRONG_USAGE: u8 = 2;

/// Measures Tidegate beside its peers; without a command, all of docs/benchmarks.md but its last
/// part, which `programs` measures
#[derive(Debug, Parser)]
#[command(name = "tidegate-bench", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    suite: SuiteArgs,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            // Help or version, asked for: a closed pipe is no failure.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => return fail(&format!("{} (see --help)", first_part(&error)), WRONG_USAGE),
    };
    let result = match &cli.command {
        Some(command) => command.run(),
        None => cli.suite.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            fail(&error.with_causes(), if error.is_usage() { WRONG_USAGE } else { FAILED })
        }
    }
}

/// Prints `message` as one line on standard error.
fn fail(message: &str, status: u8) -> ExitCode {
    eprintln!("tidegate-bench: {}", message.split_whitespace().collect::<Vec<_>>().join(" "));
    ExitCode::from(status)
}

/// The parser's message without its usage block.
fn first_part(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let message = text.split("\n\nUsage:").next().unwrap_or(&text);
    let message = message.split("\n\nFor more information").next().unwrap_or(message);
    message.trim_start_matches("error: ").to_owned()
}
