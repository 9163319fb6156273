//! `tidegate supervise`: the supervisor that `run` starts; not for people.

use anyhow::Result;
use tidegate_run::{RecoverOptions, supervise};

use crate::args::SuperviseArgs;

/// Runs the command until no process uses the pool.
///
/// # Errors
/// The process has no launcher.
pub(crate) fn run(args: &SuperviseArgs) -> Result<()> {
    let options = RecoverOptions { replay: args.replay, salvage: args.salvage };
    supervise(&args.pool, options)
}
