//! `tidegate bench`: becomes `tidegate-bench`, the program beside this one.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

const PROGRAM: &str = "tidegate-bench";

/// Replaces this process by `tidegate-bench ARGS`: output, signals and exit status are that
/// program's.
///
/// # Errors
/// The program is not beside this one, or cannot be executed.
pub(crate) fn run(args: &[OsString]) -> Result<ExitCode> {
    let this = std::env::current_exe().context("cannot tell where this program is")?;
    let program = this.with_file_name(PROGRAM);
    if !program.is_file() {
        bail!(
            "{} is not there; build it with `cargo build --release -p {PROGRAM}` and install it \
             beside `tidegate`",
            program.display()
        );
    }
    let error = Command::new(&program).args(args).exec();
    Err(error).with_context(|| format!("cannot execute {}", program.display()))
}
