//! The `tidegate` command: parses, dispatches to `commands`, and returns the exit status.
//!
//! Exit status: 0 done; 1 the command failed, or `check` found damage; 2 wrong usage. Every error
//! is one line on standard error.

mod appearance;
mod args;
mod at_once;
mod commands;
mod config;
mod control;
mod deadline;
mod descriptors;
mod detached;
mod devices;
mod front_ends;
mod log;
mod notify;
mod opening;
mod output;
mod plan;
mod pool;
mod reload;
mod removed;
mod served;
mod signals;
mod snapshot;
mod tls;
mod waits;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::args::Cli;
use crate::output::UsageError;

const FAILED: u8 = 1;
const WRONG_USAGE: u8 = 2;
/// Time that standard error has to take the last lines of a server.
const LAST_LINES: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    match Cli::try_parse() {
        Ok(cli) => {
            let status = commands::run(cli).unwrap_or_else(|error| report(&error));
            log::flush(LAST_LINES);
            status
        }
        Err(error) if !error.use_stderr() => {
            // Help or version was asked for.
            output::printed(error.print())
                .map_or_else(|error| report(&error.into()), |()| ExitCode::SUCCESS)
        }
        Err(error) => {
            // With standard error closed, the exit status tells.
            let _ = writeln!(std::io::stderr(), "{}", log::printable_lines(&usage_line(&error)));
            ExitCode::from(WRONG_USAGE)
        }
    }
}

/// Prints `error` with its causes as one line.
fn report(error: &anyhow::Error) -> ExitCode {
    log::say(log::Level::Error, output::one_line(&format!("{error:#}")));
    ExitCode::from(if error.is::<UsageError>() { WRONG_USAGE } else { FAILED })
}

/// Returns the parser's message as one line without usage. A bare `tidegate` gets the whole help.
fn usage_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return text;
    }
    let message = text.split("\n\nUsage:").next().unwrap_or(&text);
    let message = message.split("\n\nFor more information").next().unwrap_or(message);
    let message = message.strip_prefix("error: ").unwrap_or(message);
    let message = message.split("\n  tip:").map(str::trim_end).collect::<Vec<_>>().join("; tip:");
    format!("tidegate: {} (see --help)", output::one_line(&message))
}
