//! The subcommands, a file each.

mod backed_pool;
pub(crate) mod backings;
mod beside;
mod check;
mod config;
mod create;
mod destage;
mod flush;
mod info;
mod pages;
mod recover;
mod run;
mod serve;
mod set;
mod snapshot;
mod stat;
mod supervise;
mod top;

use std::process::ExitCode;

use crate::args::{Cli, Command};

/// Runs the command that was asked for.
///
/// # Errors
/// It failed; the error says why in one line.
pub(crate) fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Backings => backings::run(),
        Command::Create(args) => create::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Config { command } => config::run(&command),
        Command::Serve(args) => serve::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Recover(args) => recover::run(&args),
        Command::Flush(args) => flush::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Snapshot(args) => snapshot::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Pages(args) => pages::run(&args),
        Command::Set(args) => set::run(&args),
        Command::Supervise(args) => supervise::run(&args),
        Command::Bench(handed) => beside::bench(&handed.args),
        Command::Replay(handed) => beside::replay("replay", &handed.args),
        Command::Record(handed) => beside::replay("record", &handed.args),
        Command::Model(handed) => beside::replay("model", &handed.args),
    }
}
