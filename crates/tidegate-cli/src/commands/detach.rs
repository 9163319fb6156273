//! `tidegate detach`: deletes the block device that a pool's last server left.

use std::sync::Arc;

use anyhow::Result;
use tidegate::dram::{Policy, TierSpec};
use tidegate::stack::REGISTRY;
use tidegate_run::open_pool_file;
use tidegate_serve::ublk::delete_left;

use crate::args::DetachArgs;
use crate::output::line;
use crate::pool::map;
use crate::ublk::identity_of;

/// Runs the command.
///
/// # Errors
/// The pool cannot be opened or is in use, or the device cannot be deleted.
pub(crate) fn run(args: &DetachArgs) -> Result<()> {
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
