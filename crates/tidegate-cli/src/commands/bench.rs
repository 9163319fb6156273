//! `tidegate bench`: measures Tidegate beside its peers; the work is that of `tidegate-bench`.

use std::process::ExitCode;

use tidegate_bench::args::BenchCommand;

use crate::output::UsageError;

/// Runs the measurements that `command` names. May start the program again with another
/// environment.
///
/// # Errors
/// Those of measuring; numbers that measure nothing are wrong usage.
pub(crate) fn run(command: &BenchCommand) -> anyhow::Result<ExitCode> {
    match command.run() {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) if error.is_usage() => Err(UsageError(error.to_string()).into()),
        Err(error) => Err(error.into()),
    }
}
