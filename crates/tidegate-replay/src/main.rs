//! `tidegate-replay`: `tidegate replay` and `tidegate model`.

use std::process::ExitCode;

use clap::Parser;
use tidegate_replay::args::Command;

const FAILED: u8 = 1;
const WRONG_USAGE: u8 = 2;

/// Replays traces through Tidegate's tiers, and models them on machines with many cores
#[derive(Debug, Parser)]
#[command(name = "tidegate", bin_name = "tidegate", version, subcommand_required = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
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
    match cli.command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string(), if error.is_usage() { WRONG_USAGE } else { FAILED }),
    }
}

/// Prints `message` as one line on standard error.
fn fail(message: &str, status: u8) -> ExitCode {
    eprintln!("tidegate: {}", message.split_whitespace().collect::<Vec<_>>().join(" "));
    ExitCode::from(status)
}

/// The parser's message without its usage block.
fn first_part(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let message = text.split("\n\nUsage:").next().unwrap_or(&text);
    let message = message.split("\n\nFor more information").next().unwrap_or(message);
    message.trim_start_matches("error: ").to_owned()
}
