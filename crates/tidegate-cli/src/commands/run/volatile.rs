//! `tidegate run --volatile`: syncs are answered at once, without a pool.

use std::process::ExitCode;

use anyhow::{Context, Result};
use tidegate::log::cover::Cause;
use tidegate_run::{Filter, Library, Mounted, Plan, Program, Scope, preloaded};

use super::{exit_code, start};
use crate::args::{RunArgs, VolatileScope};
use crate::log::{Level, say};

/// Runs the program, and returns its exit status, or 1 if that is 0 and a sync at the end fails.
///
/// # Errors
/// The program cannot be run this way.
pub(super) fn run(args: &RunArgs, program: &Program, scope: VolatileScope) -> Result<ExitCode> {
    let library = Library::VOLATILE.find()?;
    let scope = match scope {
        VolatileScope::Possible => Scope::Possible,
        VolatileScope::All => Scope::All,
        VolatileScope::Library => Scope::Library,
    };
    let filter = Filter::choose(scope).context("cannot cover all programs (--volatile=all)")?;
    let mounted = args.sync_at_end.then(Mounted::hold).transpose();
    let mounted = mounted.context("cannot tell what is mounted")?;
    if !args.quiet {
        announce(filter.as_ref(), program, args.sync_at_end);
    }
    let is_filtered = filter.is_some();
    // Another C library cannot load the library, and the program would not start.
    let loads = program.unwatched != Some(Cause::OtherLibc);
    let environment = loads.then(|| preloaded(&library)).into_iter().collect();
    let adopts = is_filtered || args.sync_at_end;
    let launch = start(Plan { program, command: &args.command, environment, filter, adopts })?;
    let status = launch.wait().context("cannot wait for the program")?;
    if is_filtered && !args.quiet {
        name_left(&launch.left());
    }
    let failed = mounted.iter().flat_map(Mounted::sync);
    let failures = failed.inspect(|(path, error)| {
        say(Level::Error, format_args!("cannot sync {}: {error}", path.display()));
    });
    let failures = failures.count();
    Ok(if status == 0 && failures != 0 { ExitCode::FAILURE } else { exit_code(status) })
}

/// Prints the effect of a power cut, and the programs that are covered.
fn announce(filter: Option<&Filter>, program: &Program, is_synced_at_end: bool) {
    let others = match filter {
        Some(filter) if filter.no_new_privileges => {
            "all programs, none of which gains privileges (no sudo, su, newuidmap)"
        }
        Some(_) => "all programs",
        None => "programs that use the C library; static and Go ones too: --volatile=all",
    };
    let until = if is_synced_at_end { "until the end " } else { "" };
    let message = "volatile: syncs are answered at once";
    say(
        Level::Info,
        format_args!("{message}; {until}a power cut loses what programs synced; covered: {others}"),
    );
    if filter.is_none() && program.unwatched.is_some() {
        let file = program.file.display();
        say(
            Level::Warning,
            format_args!("the syncs of {file} are real: the library cannot reach them"),
        );
    }
}

/// Prints the names of the processes that keep the filter.
fn name_left(left: &[String]) {
    if !left.is_empty() {
        let names = left.join(", ");
        say(
            Level::Info,
            format_args!("still running, with syncs that do nothing for good: {names}"),
        );
    }
}
