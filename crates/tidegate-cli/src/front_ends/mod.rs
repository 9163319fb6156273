//! The front ends beside NBD: how clients reach an open pool. A front end is one line of [`ALL`],
//! an option of `serve`, and a key of the configuration.

pub(crate) mod ublk;
pub(crate) mod vhost_user;

use std::sync::Arc;

use anyhow::Result;
use tidegate::device::BlockDevice;
use tidegate::dram::Policy;
use tidegate_serve::nbd::StopHandle;
use tidegate_serve::vhost_user::DurableNote;
use tidegate_serve::{LogSink, RequestMemory};

use crate::args::DeviceArgs;
use crate::log::{Level, say_of};
use crate::plan::DevicePlan;
use crate::served::{Reached, Served};

/// All front ends. A pool is attached to them in this order.
const ALL: [FrontEnd; 2] = [ublk::FRONT_END, vhost_user::FRONT_END];

/// A way for clients to reach an open pool.
pub(crate) struct FrontEnd {
    /// Returns whether a device is to have clients by it.
    is_wanted: fn(&DeviceArgs) -> bool,
    /// Prepares the threads that this one starts for devices that want it.
    prepare: fn(),
    /// Checks, before the pool is opened, whether this process can have it.
    expect: fn() -> Result<()>,
    /// Begins to offer a pool.
    attach: fn(&Offer<'_>) -> Result<Begun>,
}

/// A pool for clients of a front end.
pub(crate) struct Offer<'a> {
    pub(crate) served: &'a Served,
    /// The device that clients reach.
    pub(crate) device: &'a Arc<dyn BlockDevice>,
    /// Ends attempts to attach the pool.
    pub(crate) stop: &'a StopHandle,
    /// The memory for requests of the server's clients.
    pub(crate) memory: &'a RequestMemory,
}

impl Offer<'_> {
    /// Returns what logs lines about clients.
    fn log(&self) -> LogSink {
        let export = Some(self.served.plan.args.export.clone()).filter(|name| !name.is_empty());
        Arc::new(move |line: &str| say_of(export.as_deref(), Level::Warning, line))
    }
}

/// A pool whose clients a front end serves.
pub(crate) trait Attached: Send {
    /// Has the front end take no more requests, without waiting for those in progress.
    fn begin_stop(&self) {}

    /// Returns the note for the clients that their acknowledged writes are durable. It is given
    /// once the tiers are written back.
    fn durable_note(&self) -> Option<DurableNote> {
        None
    }

    /// Answers the requests in progress, and takes no more.
    ///
    /// # Errors
    /// The front end cannot be ended.
    fn stop(self: Box<Self>) -> Result<()>;
}

/// A pool that a front end has begun to offer.
type Begun = (Reached, Box<dyn Attached>);

/// Returns whether clients are to reach the device of `args` otherwise than over NBD.
pub(crate) fn is_any_wanted(args: &DeviceArgs) -> bool {
    ALL.iter().any(|front_end| (front_end.is_wanted)(args))
}

/// Prepares the threads that this one starts for serving `devices`.
pub(crate) fn prepare(devices: &[DevicePlan]) {
    for front_end in &ALL {
        if devices.iter().any(|device| (front_end.is_wanted)(&device.args)) {
            (front_end.prepare)();
        }
    }
}

/// Checks whether this process can have the front ends that `args` want.
///
/// # Errors
/// It cannot have one of them.
pub(crate) fn expect(args: &DeviceArgs) -> Result<()> {
    wanted(args).try_for_each(|front_end| (front_end.expect)())
}

fn wanted(args: &DeviceArgs) -> impl Iterator<Item = &'static FrontEnd> {
    ALL.iter().filter(|front_end| (front_end.is_wanted)(args))
}

/// Begins to offer `served` by the front ends that it wants, and notes them there. Clients reach
/// `device`.
///
/// # Errors
/// A front end cannot offer it; then none does.
pub(crate) fn attach_all(
    served: &mut Served,
    device: &Arc<dyn BlockDevice>,
    stop: &StopHandle,
    memory: &RequestMemory,
) -> Result<Vec<Box<dyn Attached>>> {
    let mut all = Vec::new();
    let plan = Arc::clone(&served.plan);
    for front_end in wanted(&plan.args) {
        let (reached, attached) = (front_end.attach)(&Offer { served, device, stop, memory })?;
        served.reached.push(reached);
        served.durable_notes.lock().extend(attached.durable_note());
        all.push(attached);
    }
    Ok(all)
}

/// Ends the front ends of pools.
///
/// # Errors
/// The first one that cannot be ended; the others are ended nevertheless.
pub(crate) fn stop_all(attached: impl IntoIterator<Item = Box<dyn Attached>>) -> Result<()> {
    let all: Vec<_> = attached.into_iter().map(Attached::stop).collect();
    all.into_iter().collect()
}

/// Returns whether the end of a server by a kill loses no write that it has acknowledged.
pub(crate) fn survives_a_kill(args: &DeviceArgs) -> bool {
    args.dram.policy == Policy::None && !args.atomic_flush
}
