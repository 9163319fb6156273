//! Served pools as block devices of this machine.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use serde_json::Value;
use tidegate::device::BlockDevice;
use tidegate::dram::Policy;
use tidegate::stack::PoolDescription;
use tidegate_run::pool_identity;
use tidegate_serve::nbd::StopHandle;
use tidegate_serve::ublk::{Options, Rest, Ublk, prepare_threads};

use crate::args::DeviceArgs;
use crate::log::{Level, say, say_of};
use crate::plan::DevicePlan;
use crate::served::{BlockDeviceOfPool, Served};

/// A block device, and the pool that it serves.
pub(crate) struct Attached {
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
    let header = description.header.get(description.engine);
    let uuid = header.and_then(|header| header.get("uuid")).and_then(Value::as_str);
    Ok(format!("{device:x}-{inode:x}-{}-{}", description.engine, uuid.unwrap_or_default()))
}

/// Prepares the threads that this one starts for serving those of `devices` that are to be block
/// devices.
pub(crate) fn prepare(devices: &[DevicePlan]) {
    if devices.iter().all(|device| device.args.ublk.is_none()) {
        return;
    }
    if let Err(error) = prepare_threads() {
        let error = anyhow::Error::from(error);
        say(Level::Warning, format_args!("the server may hang if memory is short: {error:#}"));
    }
}

/// Returns whether the end of a server by a kill loses no write that it has acknowledged.
fn survives_a_kill(args: &DeviceArgs) -> bool {
    args.dram.policy == Policy::None && !args.atomic_flush
}

/// Returns whether the server of `new` takes up the block device that the one of `old` leaves in
/// use.
pub(crate) fn can_take_up(old: &DevicePlan, new: &DevicePlan) -> bool {
    let recovers = survives_a_kill(&old.args) && survives_a_kill(&new.args);
    let is_same = old.pool == new.pool && old.args.read_only == new.args.read_only;
    recovers && is_same && new.args.ublk.is_some()
}

/// Checks that this process can make a block device, if the pool of `args` is to be one.
///
/// # Errors
/// The kernel has no usable ublk driver.
pub(crate) fn expect_driver(args: &DeviceArgs) -> Result<()> {
    if args.ublk.is_some() {
        tidegate_serve::ublk::expect_driver()?;
    }
    Ok(())
}

/// Makes a block device of `one`, if it is to have one, and notes the block device there. Its users
/// reach `device`.
///
/// # Errors
/// The kernel has no usable ublk driver, or the device cannot be made or taken up.
pub(crate) fn attach(
    one: &mut Served,
    device: &Arc<dyn BlockDevice>,
    stop: &StopHandle,
) -> Result<Option<Attached>> {
    let plan = Arc::clone(&one.plan);
    let Some(number) = plan.args.ublk else { return Ok(None) };
    let export = Some(plan.args.export.clone()).filter(|name| !name.is_empty());
    let options = Options {
        number,
        identity: identity_of(&one.file, one.stack.description())?,
        recovers: survives_a_kill(&plan.args),
        read_only: plan.args.read_only,
        log: Arc::new(move |line: &str| say_of(export.as_deref(), Level::Warning, line)),
    };
    let pool = plan.pool.display();
    let device = Ublk::start(device, &options, stop)
        .with_context(|| format!("{pool} cannot be a block device"))?;
    one.block_device = Some(BlockDeviceOfPool {
        path: device.path(),
        is_taken_up: device.is_taken_up(),
        statistics: device.statistics(),
    });
    Ok(Some(Attached { device, plan }))
}

/// Stops all block devices, and tells what is left of those that are in use.
///
/// # Errors
/// The first device that cannot be stopped; the others are stopped nevertheless.
pub(crate) fn stop_all(attached: impl Iterator<Item = Attached>) -> Result<()> {
    let mut first = Ok(());
    for Attached { device, plan } in attached {
        let path = device.path();
        match device.stop() {
            Ok(rest) => tell_rest(rest, &path, &plan.pool),
            Err(error) => first = first.and(Err(error)),
        }
    }
    Ok(first?)
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
