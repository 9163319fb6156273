//! `tidegate set`: changes settings of a served pool.

use std::process::ExitCode;

use anyhow::Result;

use crate::args::SetArgs;
use crate::control::set_at;
use crate::output::field;

/// Runs the command.
///
/// # Errors
/// No server has the pool open, or a setting cannot be changed; the error says why.
pub(crate) fn run(args: &SetArgs) -> Result<ExitCode> {
    set_at(&args.target, args.settings.clone())?;
    for (key, value) in &args.settings {
        field(key, value)?;
    }
    Ok(ExitCode::SUCCESS)
}
