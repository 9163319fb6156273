//! Served pools as block devices of this machine.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use tidegate::stack::PoolDescription;
use tidegate_run::pool_identity;
use tidegate_serve::ublk::{Options, Rest, Ublk, prepare_threads};

use super::{Attached, Begun, FrontEnd, Offer, survives_a_kill};
use crate::log::{Level, say};
use crate::plan::DevicePlan;
use crate::served::{Reached, UBLK};

/// Block devices of this machine.
pub(super) const FRONT_END: FrontEnd = FrontEnd {
    is_wanted: |args| args.ublk.is_some(),
    prepare,
    expect: || Ok(tidegate_serve::ublk::expect_driver()?),
    attach,
};

/// A block device, and the pool that it serves.
struct BlockDeviceOfPool {
    device: Ublk,
    plan: Arc<DevicePlan>,
}

/// Returns a text that is equal for each server of the pool in `file`, and differs for other pools,
/// copies of this one too.
///
/// # Errors
/// The file cannot be inspected.
pub(crate) fn identity_of(file: &File, description: &PoolDescription) -> Result<String> {
    let (device, inode) = pool_identity(&file.metadata().context("cannot inspect the pool")?);
    let uuid = uuid_of(description).unwrap_or_default();
    Ok(format!("{device:x}-{inode:x}-{}-{uuid}", description.engine))
}

/// Returns the UUID in a pool's header.
pub(super) fn uuid_of(description: &PoolDescription) -> Option<&str> {
    description.header.get(description.engine)?.get("uuid")?.as_str()
}

fn prepare() {
    if let Err(error) = prepare_threads() {
        let error = anyhow::Error::from(error);
        say(Level::Warning, format_args!("the server may hang if memory is short: {error:#}"));
    }
}

/// Returns whether the server of `new` takes up the block device that the one of `old` leaves in
/// use.
pub(crate) fn can_take_up(old: &DevicePlan, new: &DevicePlan) -> bool {
    let recovers = survives_a_kill(&old.args) && survives_a_kill(&new.args);
    let is_same = old.pool == new.pool && old.args.read_only == new.args.read_only;
    recovers && is_same && new.args.ublk.is_some()
}

fn attach(offer: &Offer<'_>) -> Result<Begun> {
    let served = offer.served;
    let plan = Arc::clone(&served.plan);
    let options = Options {
        number: plan.args.ublk.flatten(),
        identity: identity_of(&served.file, served.stack.description())?,
        recovers: survives_a_kill(&plan.args),
        read_only: plan.args.read_only,
        log: offer.log(),
    };
    let pool = plan.pool.display();
    let device = Ublk::start(offer.device, &options, offer.stop)
        .with_context(|| format!("{pool} cannot be a block device"))?;
    let reached = Reached {
        front_end: UBLK,
        address: device.path(),
        note: device.is_taken_up().then_some("taken up from the last server"),
        statistics: device.statistics(),
    };
    Ok((reached, Box::new(BlockDeviceOfPool { device, plan })))
}

impl Attached for BlockDeviceOfPool {
    /// Stops the block device, and tells what is left of it if it is in use.
    fn stop(self: Box<Self>) -> Result<()> {
        let path = self.device.path();
        tell_rest(self.device.stop()?, &path, &self.plan.pool);
        Ok(())
    }
}

fn tell_rest(rest: Rest, device: &Path, pool: &Path) {
    let (device, pool) = (device.display(), pool.display());
    match rest {
        Rest::Deleted => {}
        Rest::Kept => say(
            Level::Warning,
            format_args!(
                "{device} is in use and stays: its requests wait for the next `tidegate serve \
                 {pool} --ublk`; `tidegate detach {pool}` deletes it"
            ),
        ),
        Rest::CutOff => say(
            Level::Warning,
            format_args!(
                "{device} was in use and is deleted: its users get I/O errors. It had a write \
                 cache (--dram, --atomic-flush), so that no other server can take it up"
            ),
        ),
    }
}
