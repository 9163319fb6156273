//! `tidegate check`: prints a pool's faults. `--repair` restores all that the pool itself proves.

use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;
use tidegate::stack::REGISTRY;
use tidegate::tier::{Checked, Progress};

use crate::args::CheckArgs;
use crate::output::{json, line, progress};
use crate::pool;

/// The output of `--json`; the keys are a contract with scripts.
#[derive(Serialize)]
struct Outcome<'a> {
    pool: String,
    clean: bool,
    engine: &'a str,
    #[serde(flatten)]
    report: Value,
}

/// Runs the command. Damage that remains is exit status 1.
///
/// # Errors
/// The file cannot be mapped, or holds no pool.
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
        let pool = args.pool.display().to_string();
        json(&Outcome { pool, clean, engine: engine.name(), report: checked.report })?;
    } else {
        checked.lines.iter().try_for_each(line)?;
        line(verdict(&checked, args))?;
    }
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn verdict(checked: &Checked, args: &CheckArgs) -> String {
    let pool = args.pool.display();
    let faults = match checked.faults {
        0 => return format!("{pool}: no damage"),
        1 => "1 fault".to_owned(),
        faults => format!("{faults} faults"),
    };
    let (left, advice) = if args.repair {
        (
            " that cannot be repaired",
            "copy off what can still be read: `tidegate serve --read-only`",
        )
    } else {
        ("", "`tidegate check --repair` restores what the pool itself proves")
    };
    let advice = checked.report["advice"].as_str().unwrap_or(advice);
    format!("{pool}: {faults}{left}; {advice}")
}
