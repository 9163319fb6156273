//! `tidegate set`: changes settings of a served pool, or of a cache pool that no server has open.

use std::path::Path;

use anyhow::Result;
use tidegate::tier::State;

use super::backed_pool;
use crate::args::SetArgs;
use crate::control::{Answer, is_socket, set_at, stat_of};
use crate::output::{UsageError, field};

/// Runs the command.
///
/// # Errors
/// A setting is given twice or cannot be changed, or no server has the pool open. Then no setting
/// has changed, except those that the error names.
pub(crate) fn run(args: &SetArgs) -> Result<()> {
    let target = &args.target;
    expect_each_key_once(&args.settings)?;
    let engine = if is_socket(target) { None } else { backed_pool::engine_at(target)? };
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

/// Refuses `settings` that have a key twice, since one of the values is wrong.
fn expect_each_key_once(settings: &[(String, String)]) -> Result<(), UsageError> {
    let twice = |at: &usize| settings[..*at].iter().any(|(key, _)| *key == settings[*at].0);
    let Some(at) = (0..settings.len()).find(twice) else { return Ok(()) };
    let key = &settings[at].0;
    Err(UsageError(format!("the setting `{key}` is given twice; give each setting once")))
}

/// Returns the states of the tiers at `target`, empty if its server has ended.
fn tiers_of(target: &Path) -> Result<Vec<State>> {
    Ok(match stat_of(target)? {
        Answer::Of(stat) => stat.tiers,
        Answer::Nobody | Answer::Supervisor => Vec::new(),
    })
}
