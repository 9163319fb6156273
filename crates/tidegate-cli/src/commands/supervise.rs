//! `tidegate supervise`: what `run` starts; not for people.

use std::process::ExitCode;

use anyhow::Result;
use tidegate_run::supervise;

use crate::args::SuperviseArgs;

/// Runs the command until nobody uses the pool.
///
/// # Errors
/// There is no launcher.
pub(crate) fn run(args: &SuperviseArgs) -> Result<ExitCode> {
    supervise(&args.pool)?;
    Ok(ExitCode::SUCCESS)
}
