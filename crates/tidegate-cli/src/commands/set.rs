//! `tidegate set`: changes settings of a served pool, or of a cache pool that no server has open.

use std::path::Path;

use anyhow::Result;
use tidegate::stack::Stat;

use super::backed_pool;
use crate::args::SetArgs;
use crate::control::{Answer, is_socket, set_at, stat_of};
use crate::output::field;

/// Runs the command.
///
/// # Errors
/// No server has the pool open, or a setting cannot be changed; the error says why.
pub(crate) fn run(args: &SetArgs) -> Result<()> {
    let target = &args.target;
    let engine = if is_socket(target) { None } else { backed_pool::engine_at(target) };
    match engine {
        Some(engine) if stat(target)?.is_none() => {
            backed_pool::set(engine, target, &args.settings)?;
        }
        _ => {
            set_at(target, args.settings.clone())?;
            let tiers = || Ok(stat(target)?.map_or_else(Vec::new, |stat| stat.tiers));
            backed_pool::follow_resize(target, &args.settings, tiers)?;
        }
    }
    for (key, value) in &args.settings {
        field(key, value)?;
    }
    Ok(())
}

/// What the server at `target` says, where there is one.
fn stat(target: &Path) -> Result<Option<Stat>> {
    Ok(match stat_of(target)? {
        Answer::Of(stat) => Some(stat),
        Answer::Nobody | Answer::Supervisor => None,
    })
}
