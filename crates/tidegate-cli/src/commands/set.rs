//! `tidegate set`: changes settings of a served pool, or of a cache pool that no server has open.

use std::path::Path;

use anyhow::Result;
use tidegate::tier::State;

use super::backed_pool;
use crate::args::SetArgs;
use crate::control::{Answer, is_socket, set_at, stat_of};
use crate::output::field;

/// Runs the command.
///
/// # Errors
/// No server has the pool open, or a setting cannot be changed; the error says why. Then no setting
/// has changed, but for those that the error names.
pub(crate) fn run(args: &SetArgs) -> Result<()> {
    let target = &args.target;
    let engine = if is_socket(target) { None } else { backed_pool::engine_at(target) };
    match (set_at(target, &args.settings)?, engine) {
        (Answer::Nobody, Some(engine)) => backed_pool::set(engine, target, &args.settings)?,
        (answer, _) => {
            answer.of_server(
                target,
                "settings are a server's; start `tidegate serve` first",
                "the socket of a supervisor of `tidegate run`, which has no settings",
            )?;
            backed_pool::follow_resize(target, &args.settings, || tiers_of(target))?;
        }
    }
    for (key, value) in &args.settings {
        field(key, value)?;
    }
    Ok(())
}

/// What the tiers at `target` hold; nothing where its server has ended.
fn tiers_of(target: &Path) -> Result<Vec<State>> {
    Ok(match stat_of(target)? {
        Answer::Of(stat) => stat.tiers,
        Answer::Nobody | Answer::Supervisor => Vec::new(),
    })
}
