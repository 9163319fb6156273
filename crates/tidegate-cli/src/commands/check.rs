//! `tidegate check`: every fault of a pool, a line each; `--repair` restores what the pool itself
//! proves.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;
use tidegate::stack::REGISTRY;
use tidegate::tier::{Checked, Progress};

use crate::args::CheckArgs;
use crate::output::{json, line, progress};
use crate::pool;

/// What `--json` prints; the keys are a contract with scripts.
#[derive(Serialize)]
struct Outcome<'a> {
    pool: &'a Path,
    clean: bool,
    engine: &'a str,
    #[serde(flatten)]
    report: Value,
}

/// Runs the command. Damage that is left is exit status 1.
///
/// # Errors
/// The pool cannot be mapped, or there is none.
pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode> {
    let region = pool::map(&args.pool, &args.memory, !args.repair)?;
    let bar = progress("checking");
    let checked = REGISTRY.check(region, args.repair, &mut |Progress { done, total }| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let (engine, checked) = checked?;
    let clean = checked.faults == 0;
    if args.json {
        json(&Outcome { pool: &args.pool, clean, engine: engine.name(), report: checked.report })?;
    } else {
        checked.lines.iter().try_for_each(line)?;
        line(verdict(engine.name(), &checked, args))?;
    }
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn verdict(engine: &str, checked: &Checked, args: &CheckArgs) -> String {
    let pool = args.pool.display();
    let faults = match checked.faults {
        0 => return format!("{pool}: no damage"),
        1 => "1 fault".to_owned(),
        faults => format!("{faults} faults"),
    };
    let left = if args.repair { " that cannot be repaired" } else { "" };
    let advice = checked.report["advice"].as_str();
    let advice = advice.unwrap_or_else(|| advice_for(engine, args.repair));
    format!("{pool}: {faults}{left}; {advice}")
}

/// What to do about damage of which the report itself does not say so.
fn advice_for(engine: &str, is_repaired: bool) -> &'static str {
    match (engine, is_repaired) {
        ("log", false) => {
            "`tidegate check --repair` restores what the pool itself proves; for the rest restore a \
             backup, or go on without it: `tidegate recover --salvage`"
        }
        ("log", true) => {
            "restore a backup, or go on without what is damaged: `tidegate recover --salvage`"
        }
        (_, false) => "`tidegate check --repair` restores what the pool itself proves",
        (_, true) => "copy off what can still be read: `tidegate serve --read-only`",
    }
}
