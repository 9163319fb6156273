//! `tidegate convert`: makes a pool of another program a pool of Tidegate, in place.

use std::sync::Arc;

use anyhow::Result;
use tidegate::dram::{Policy, TierSpec};
use tidegate::stack::REGISTRY;

use crate::args::ConvertArgs;
use crate::output::print_lines;
use crate::pool;

/// Runs the command.
///
/// # Errors
/// The file cannot be mapped, holds no pool that can be converted, or a damaged one.
pub(crate) fn run(args: &ConvertArgs) -> Result<()> {
    let region = Arc::new(pool::map(&args.pool, &args.memory, false)?);
    REGISTRY.convert(&region)?;
    let none = TierSpec { policy: Policy::None, bytes: 0 };
    Ok(print_lines(&REGISTRY.describe(&region, none)?.lines())?)
}
