//! `tidegate bench`, `replay`, `record` and `model`: programs beside this one, which replace it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Replaces this process by `NAME COMMAND ARGS`, a program in the same directory. Output, signals
/// and exit status are that program's.
///
/// # Errors
/// The program is not in the directory, or cannot be executed.
pub(crate) fn become_program(name: &str, command: Option<&str>, args: &[OsString]) -> Result<()> {
    let this = std::env::current_exe().context("cannot tell where this program is")?;
    let program = this.with_file_name(name);
    if !program.is_file() {
        bail!(
            "{} is not there; build it with `cargo build --release -p {name}` and install it \
             beside `tidegate`",
            program.display()
        );
    }
    let error = Command::new(&program).args(command).args(args).exec();
    Err(error).with_context(|| format!("cannot execute {}", program.display()))
}
