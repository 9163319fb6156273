//! `tidegate bench`, `replay`, `record` and `model`: this process becomes the program beside this
//! one that does it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Replaces this process by `tidegate-bench ARGS`.
///
/// # Errors
/// As [`become_program`].
pub(crate) fn bench(args: &[OsString]) -> Result<()> {
    become_program("tidegate-bench", None, args)
}

/// Replaces this process by `tidegate-replay COMMAND ARGS`.
///
/// # Errors
/// As [`become_program`].
pub(crate) fn replay(command: &str, args: &[OsString]) -> Result<()> {
    become_program("tidegate-replay", Some(command), args)
}

/// Replaces this process by `name`, which lies beside it: output, signals and exit status are that
/// program's.
///
/// # Errors
/// The program is not beside this one, or cannot be executed.
fn become_program(name: &str, command: Option<&str>, args: &[OsString]) -> Result<()> {
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
