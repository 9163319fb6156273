//! The subcommands, a file each.

mod attach;
mod backed_pool;
pub(crate) mod backings;
mod beside;
mod check;
mod config;
mod convert;
mod create;
mod destage;
mod detach;
mod doctor;
mod flush;
mod info;
mod list;
mod pages;
mod recover;
mod reload;
mod run;
mod serve;
mod set;
mod snapshot;
mod stat;
mod supervise;
mod top;

use std::process::ExitCode;

use self::beside::become_program;
use crate::args::{Cli, Command};

/// Runs the command of the command line, and returns the exit status of the process.
///
/// # Errors
/// The command failed; the error gives the reason in one line.
pub(crate) fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Check(args) => return check::run(&args),
        Command::Config { command } => return config::run(&command),
        Command::Run(args) => return run::run(&args),
        Command::Backings => backings::run(),
        Command::Convert(args) => convert::run(&args),
        Command::Create(args) => create::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Recover(args) => recover::run(&args),
        Command::Attach(args) => attach::run(&args),
        Command::Detach(args) => detach::run(&args),
        Command::Flush(args) => flush::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::List(args) => list::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Reload(args) => reload::run(&args),
        Command::Snapshot(args) => snapshot::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Pages(args) => pages::run(&args),
        Command::Set(args) => set::run(&args),
        Command::Supervise(args) => supervise::run(&args),
        Command::Bench(handed) => become_program("tidegate-bench", None, &handed.args),
        Command::Replay(handed) => become_program("tidegate-replay", Some("replay"), &handed.args),
        Command::Record(handed) => become_program("tidegate-replay", Some("record"), &handed.args),
        Command::Model(handed) => become_program("tidegate-replay", Some("model"), &handed.args),
    }?;
    Ok(ExitCode::SUCCESS)
}
