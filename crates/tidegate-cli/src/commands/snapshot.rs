//! `tidegate snapshot`: copies a served pool, or its backing.

use anyhow::Result;
use tidegate::size::Size;

use crate::args::SnapshotArgs;
use crate::control::snapshot_at;
use crate::output::line;
use crate::snapshot::Made;

/// Runs the command.
///
/// # Errors
/// The pool is not served, or cannot be copied.
pub(crate) fn run(args: &SnapshotArgs) -> Result<()> {
    let Made { bytes, held, backing } = snapshot_at(&args.target, &args.file)?;
    let (file, size, millis) = (args.file.display(), Size { bytes }, held.as_millis());
    let of = match backing {
        Some(backing) => format!("{size}, of {backing} with all that the pool held"),
        None => size.to_string(),
    };
    Ok(line(format_args!("{file}: a copy of {of}; writes waited {millis} ms"))?)
}
