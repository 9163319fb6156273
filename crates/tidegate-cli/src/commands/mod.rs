//! The subcommands, a file each.

mod bench;
mod check;
mod create;
mod info;
mod serve;

use std::process::ExitCode;

use crate::args::{Cli, Command};

/// Runs the command that was asked for.
///
/// # Errors
/// It failed; the error says why in one line.
pub(crate) fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Create(args) => create::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Bench { command } => bench::run(&command),
    }
}
