//! `tidegate attach`: starts a server of a pool in the background, which is a block device then.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use tidegate::backing::BackingUrl;

use crate::args::AttachArgs;
use crate::control::device_of;
use crate::output::line;

/// Runs the command.
///
/// # Errors
/// The server does not start; it has said why.
pub(crate) fn run(args: &AttachArgs) -> Result<()> {
    let pool = args.pool.display();
    if let Some((_, device)) = device_of(&args.pool) {
        let Some(path) = device.block_device else {
            bail!("{pool} is served by process {} without a block device", device.process);
        };
        line(path.display())?;
        return Ok(());
    }
    let mut server = server(args)?.spawn().context("cannot start the server")?;
    let told = server.stdout.take().map(BufReader::new).context("the server has no output")?;
    let mut device = None;
    for told in told.lines() {
        let told = told.context("cannot read the server's output")?;
        if told == "ready" {
            line(device.unwrap_or_default())?;
            return Ok(());
        }
        if let Some(path) = told.strip_prefix("ublk ") {
            device = path.trim_start().split(',').next().map(str::to_owned);
        }
    }
    let status = server.wait().context("cannot wait for the server")?;
    bail!("{pool} is no block device: its server has ended, {status}")
}

/// Returns the command that starts the server. It keeps no directory from being unmounted, unless
/// an argument is a path in this one.
fn server(args: &AttachArgs) -> Result<Command> {
    let mut server = Command::new(std::env::current_exe().context("cannot find this program")?);
    let pool = std::path::absolute(&args.pool).context("the pool's path has no absolute form")?;
    let absolute = |given: OsString| if given == args.pool { pool.clone().into() } else { given };
    // The rest of the command line is options of `serve`.
    server.args(["serve", "--detached"]).args(args.device.ublk.is_none().then_some("--ublk"));
    server.args(std::env::args_os().skip(2).map(absolute));
    let backing = args.device.backing.as_ref().and_then(BackingUrl::path);
    if backing.iter().chain(&args.device.control).all(|path| path.is_absolute()) {
        server.current_dir("/");
    }
    server.stdin(Stdio::null()).stdout(Stdio::piped());
    Ok(server)
}
