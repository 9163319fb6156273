//! A process with one machine, which tests sequences from its input.
//!
//! The campaign writes a line "last SEQUENCE" or "all SEQUENCE" for each test. The worker answers
//! with a line "violation STEP TEXT" for each forbidden state, then "done" or "error TEXT".

use std::io::{BufRead, Write};
use std::path::Path;

use anyhow::{Context, Result};

use crate::file_system::FileSystem;
use crate::machine::program::Interpreter;
use crate::machine::{Cuts, Fault, Machine, Runner};
use crate::model::TimeRule;
use crate::sequence::Sequence;

/// Tests sequences until the input ends, in the empty `dir`. `programs` has the interpreter.
///
/// # Errors
/// The machine cannot be made, or the output is closed.
pub fn work(
    dir: &Path,
    programs: &Path,
    file_system: FileSystem,
    runner: Runner,
    fault: Option<Fault>,
    time_rule: Option<TimeRule>,
    mount_option: Option<String>,
) -> Result<()> {
    let interpreter = Interpreter::in_dir(programs);
    let mut machine =
        Machine::new(dir, interpreter, file_system, runner, fault, time_rule, mount_option)?;
    say("ready")?;
    for line in std::io::stdin().lock().lines() {
        match test(&mut machine, &line?) {
            Ok(()) => say("done")?,
            Err(error) => say(&format!("error {error:#}"))?,
        }
    }
    Ok(())
}

fn test(machine: &mut Machine, line: &str) -> Result<()> {
    let (cuts, sequence) = line.split_once(' ').context("a test has cuts and a sequence")?;
    let cuts = if cuts == "all" { Cuts::All } else { Cuts::Last };
    let sequence: Sequence = sequence.parse()?;
    for violation in machine.test(&sequence, cuts)? {
        say(&format!("violation {} {}", violation.step, violation.what))?;
    }
    Ok(())
}

fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", text.replace('\n', " "))?;
    Ok(out.flush()?)
}
