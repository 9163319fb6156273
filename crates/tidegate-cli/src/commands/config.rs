//! `tidegate config check`: lists the faults in the file of `serve --config`.

use std::process::ExitCode;

use anyhow::Result;

use crate::args::ConfigCommand;
use crate::config;
use crate::output::line;

/// Runs the command.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn run(command: &ConfigCommand) -> Result<ExitCode> {
    let ConfigCommand::Check { file } = command;
    let (devices, faults) = match config::check(file)? {
        Ok(plan) => (plan.devices.len(), config::wrong_files(&plan)),
        Err(faults) => (0, faults),
    };
    if faults.is_empty() {
        line(format_args!("{}: nothing wrong; devices: {devices}", file.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    faults.into_iter().try_for_each(line)?;
    Ok(ExitCode::FAILURE)
}
