//! `tidegate snapshot`: a copy of a pool that is served.

use std::process::ExitCode;

use anyhow::Result;
use tidegate::size::Size;

use crate::args::SnapshotArgs;
use crate::control::snapshot_at;
use crate::output::line;

/// Runs the command.
///
/// # Errors
/// The pool is not served, or cannot be copied.
pub(crate) fn run(args: &SnapshotArgs) -> Result<ExitCode> {
    let (bytes, held) = snapshot_at(&args.target, &args.file)?;
    let (file, millis) = (args.file.display(), held.as_millis());
    line(format_args!("{file}: a copy of {}; writes waited {millis} ms", Size { bytes }))?;
    Ok(ExitCode::SUCCESS)
}
