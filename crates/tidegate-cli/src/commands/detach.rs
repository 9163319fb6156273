//! `tidegate detach`: ends the server of a pool that is a block device, or deletes the device that
//! the last server left.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tidegate::dram::{Policy, TierSpec};
use tidegate::stack::REGISTRY;
use tidegate_run::open_pool_file;
use tidegate_serve::control::{Asked, Listed, Reply, Request, ask};
use tidegate_serve::ublk::delete_left;

use crate::args::DetachArgs;
use crate::control::device_of;
use crate::front_ends::ublk::identity_of;
use crate::output::line;
use crate::pool::map;

/// Runs the command.
///
/// # Errors
/// The pool's server cannot end, the pool cannot be opened, or the device cannot be deleted.
pub(crate) fn run(args: &DetachArgs) -> Result<()> {
    if let Some((socket, device)) = device_of(&args.pool) {
        return end_server(&args.pool, &socket, &device);
    }
    let file = open_pool_file(&args.pool)?;
    let region = Arc::new(map(&args.pool, &args.memory, true)?);
    let none = TierSpec { policy: Policy::None, bytes: 0 };
    let description = REGISTRY.describe(&region, none)?;
    let deleted = delete_left(&identity_of(&file, &description)?)?;
    let pool = args.pool.display();
    match deleted {
        Some(device) => line(format_args!("{}: deleted; it was of {pool}", device.display()))?,
        None => line(format_args!("{pool}: no server left a block device"))?,
    }
    Ok(())
}

/// Has the server that listens at `socket` end, and waits for its end.
fn end_server(pool: &Path, socket: &Path, device: &Listed) -> Result<()> {
    let shown = pool.display();
    let server = i32::try_from(device.process).ok().and_then(Pid::from_raw);
    let server = server.context("the server has no process")?;
    // Before the request: the number may be another process's later.
    let server = pidfd_open(server, PidfdFlags::empty()).context("cannot watch the server")?;
    let request = Request::End { pool: std::path::absolute(pool)? };
    match ask(socket, &request).context("the server does not answer")? {
        Asked::Reply(Reply::Ending) => {}
        Asked::Reply(Reply::Failed { message }) => bail!("{shown} is not detached: {message}"),
        _ => bail!("{shown} is not detached: the server gave no answer to that"),
    }
    while let Err(error) = poll(&mut [PollFd::new(&server, PollFlags::IN)], None) {
        if error != Errno::INTR {
            return Err(error).context("cannot wait for the server");
        }
    }
    match &device.block_device {
        Some(path) if path.exists() => bail!(
            "{} is in use since, and waits for the next server of {shown}: `tidegate attach` it",
            path.display()
        ),
        Some(path) => line(format_args!("{}: deleted; {shown} has its data", path.display()))?,
        None => {}
    }
    Ok(())
}
