//! `tidegate stat`: what the supervisor of a log pool counted.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};
use tidegate_run::{
    Asked, PoolPaths, Reply, Request, Statistics, ask, ask_at, existing_log, log_in_use,
};

use crate::args::StatArgs;
use crate::output::{Terminal, field, json};

/// Runs the command.
///
/// # Errors
/// There is no such pool, or its supervisor does not answer.
pub(crate) fn run(args: &StatArgs) -> Result<ExitCode> {
    let is_socket = args.target.metadata().is_ok_and(|found| found.file_type().is_socket());
    let statistics = if is_socket { of_socket(&args.target)? } else { of_pool(&args.target)? };
    if args.json {
        json(&statistics)?;
    } else {
        statistics.status_lines().into_iter().try_for_each(|(label, value)| field(label, value))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn of_socket(socket: &Path) -> Result<Statistics> {
    match ask(socket, &Request::Stat, &Terminal::new(false))? {
        Some(Reply::Statistics(statistics)) => Ok(*statistics),
        Some(_) => bail!("{}: no supervisor of a log pool listens there", socket.display()),
        None => bail!("{}: nobody listens there", socket.display()),
    }
}

fn of_pool(path: &Path) -> Result<Statistics> {
    let pool = existing_log(path)?;
    let paths = PoolPaths::of_pool(&pool)?;
    match ask_at(&paths, &Request::Stat, &Terminal::new(false))? {
        Asked::Reply(Reply::Statistics(statistics)) => Ok(*statistics),
        Asked::Reply(_) => {
            bail!("{}: its supervisor gave an answer of another kind", path.display())
        }
        Asked::Unsupervised(_lock) => {
            let (log_bytes, log_used_bytes) = log_in_use(&pool)?;
            Ok(Statistics { pool, log_bytes, log_used_bytes, ..Statistics::default() })
        }
    }
}
