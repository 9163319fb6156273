//! `tidegate info`: describes a pool. Reads headers only and changes nothing.

use std::sync::Arc;

use anyhow::Result;
use tidegate::stack::REGISTRY;

use crate::args::InfoArgs;
use crate::output::{json, print_lines};
use crate::pool;

/// Runs the command.
///
/// # Errors
/// The file cannot be mapped, holds no pool, or its header is damaged.
pub(crate) fn run(args: &InfoArgs) -> Result<()> {
    let region = Arc::new(pool::map(&args.pool, &args.memory, true)?);
    let description = REGISTRY.describe(&region, args.dram)?;
    let printed = if args.json { json(&description) } else { print_lines(&description.lines()) };
    Ok(printed?)
}
