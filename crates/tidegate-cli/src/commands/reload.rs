//! `tidegate reload`: has servers read their configuration file again, and prints what changed.

use std::path::Path;

use anyhow::{Context, Result, bail};
use tidegate_serve::control::{Reply, Request};

use crate::args::ReloadArgs;
use crate::control::{ask_servers, not_answered};
use crate::log::{Level, say};
use crate::output::{line, one_line};

/// Runs the command.
///
/// # Errors
/// No server has the file, or a part of what the file says could not be done.
pub(crate) fn run(args: &ReloadArgs) -> Result<()> {
    let config = args.config.as_ref().map(std::path::absolute).transpose();
    let config = config.context("the path of the file cannot be made absolute")?;
    let (mut has_reloaded, mut failed, mut unknown) = (false, 0, Vec::new());
    for (socket, reply) in ask_servers(&Request::Reload { config: config.clone() }) {
        match reply {
            Some(Reply::NotReloaded) => {}
            Some(Reply::Reloaded { config, changes, failures }) => {
                has_reloaded = true;
                failed += failures.len();
                print(&config, &changes, &failures)?;
            }
            // Of an older release.
            Some(Reply::Failed { message }) => {
                unknown.push(format!("{}: {message}", socket.display()));
            }
            _ => unknown.push(not_answered(&socket)),
        }
    }
    // If another server has the file, these have not.
    if config.is_none() || !has_reloaded {
        for line in &unknown {
            say(Level::Error, one_line(line));
        }
    }
    match config {
        Some(config) if !has_reloaded => {
            bail!("no server of this user was started by `serve --config {}`", config.display())
        }
        None if failed == 0 && !unknown.is_empty() => {
            bail!("not all servers of this user have answered: see above")
        }
        None if !has_reloaded => bail!("no server of this user was started by `serve --config`"),
        _ if failed > 0 => bail!("not all is as the file says: see above"),
        _ => Ok(()),
    }
}

fn print(config: &Path, changes: &[String], failures: &[String]) -> Result<()> {
    let config = config.display();
    for change in changes {
        line(format_args!("{config}: {}", one_line(change)))?;
    }
    for failure in failures {
        say(Level::Error, format_args!("{config}: {}", one_line(failure)));
    }
    Ok(())
}
