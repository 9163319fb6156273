//! `tidegate supervise`: what `run` starts; not for people.

use std::process::ExitCode;

use anyhow::Result;

use crate::args::SuperviseArgs;
use crate::run::supervise::supervise;

/// Runs the command until no process uses the pool.
///
/// # Errors
/// There is no launcher.
pub(crate) fn run(args: &SuperviseArgs) -> Result<ExitCode> {
    supervise(&args.pool)?;
    Ok(ExitCode::SUCCESS)
}
