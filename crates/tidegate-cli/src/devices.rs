//! The devices of a server, whether or not their pools are open.
//!
//! A device is served, or down with the cause of its last failure to open. A thread of
//! [`opening`](crate::opening) changes that; other parts of the server ask for the present state.
//! [`reload`](crate::reload) closes devices, and adds others.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use parking_lot::{Mutex, RwLock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate::device::wake::Wake;
use tidegate_serve::Worker;
use tidegate_serve::control::{ControlServer, Listed};
use tidegate_serve::nbd::StopHandle;
use tidegate_serve::ublk::has_users;

use crate::front_ends::Attached;
use crate::notify::notify;
use crate::output::absolute;
use crate::plan::DevicePlan;
use crate::served::{Served, UBLK};

/// The parts of a served device that end before its pool is closed.
#[derive(Default)]
pub(crate) struct Ends {
    pub(crate) attached: Vec<Box<dyn Attached>>,
    /// The control socket that commands find by the pool.
    pub(crate) control: Option<ControlServer>,
    /// The thread that logs the removal of the pool or of its backing.
    pub(crate) removals: Option<Worker>,
}

/// A device that is open.
pub(crate) struct Opened {
    pub(crate) served: Served,
    pub(crate) ends: Ends,
    /// Hangs up once the pool is free for another process.
    pub(crate) released: Receiver<Infallible>,
}

/// A device of a server.
pub(crate) struct Device {
    pub(crate) plan: Arc<DevicePlan>,
    /// Ends attempts to open the device, and its snapshots; the server's stop does so too.
    pub(crate) stop: StopHandle,
    state: Mutex<State>,
}

/// The state of a device. Without a pool and a cause, it is being opened for the first time.
#[derive(Default)]
struct State {
    is_opening: bool,
    is_closing: bool,
    /// The cause of the last failure to open.
    cause: Option<String>,
    open: Option<Opened>,
    /// The thread that opens the device.
    opener: Option<Worker>,
    /// The control socket that the configuration names.
    control: Option<ControlServer>,
}

impl Device {
    /// Returns a device that is not open.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub(crate) fn new(plan: Arc<DevicePlan>, stop: &StopHandle) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { plan, stop: stop.part()?, state: Mutex::default() }))
    }

    /// Returns the pool if it is open.
    pub(crate) fn served(&self) -> Option<Served> {
        self.state.lock().open.as_ref().map(|opened| opened.served.clone())
    }

    /// Notes the thread that opens the device.
    pub(crate) fn set_opener(&self, opener: Worker) {
        self.state.lock().opener = Some(opener);
    }

    /// Notes the control socket that the configuration names.
    pub(crate) fn set_control(&self, control: Option<ControlServer>) {
        self.state.lock().control = control;
    }

    /// Takes the thread that opens the device. Dropping it ends the attempts, and waits for the
    /// one under way.
    pub(crate) fn take_opener(&self) -> Option<Worker> {
        self.state.lock().opener.take()
    }

    /// Takes the control socket that the configuration names.
    pub(crate) fn take_control(&self) -> Option<ControlServer> {
        self.state.lock().control.take()
    }

    /// Notes that the device is being closed. A stop of the server still finds the pool until it is
    /// [taken](Self::take_open).
    pub(crate) fn begin_close(&self) {
        self.state.lock().is_closing = true;
    }

    /// Takes the pool, whose tiers have ended.
    pub(crate) fn take_open(&self) -> Option<Opened> {
        self.state.lock().open.take()
    }

    /// Returns the cause if the device is down.
    pub(crate) fn cause(&self) -> Option<String> {
        let state = self.state.lock();
        state.cause.clone().filter(|_| state.open.is_none())
    }

    fn listed(&self, addresses: &[String]) -> Listed {
        let (served, cause) = (self.served(), self.cause());
        let is_closing = self.state.lock().is_closing;
        let state = match (&served, &cause) {
            _ if is_closing => "closing",
            (Some(_), _) => "up",
            (None, Some(_)) => "down",
            (None, None) => "opening",
        };
        let dirty_bytes = served.as_ref().map(|served| {
            let (volatile_bytes, kept_bytes) = served.stack.pending_bytes();
            volatile_bytes + kept_bytes
        });
        let args = &self.plan.args;
        let reached = served.iter().flat_map(|served| &served.reached);
        let sockets = reached.filter(|reached| reached.front_end != UBLK);
        let sockets = sockets.map(|reached| {
            format!("{}:{}", reached.front_end, absolute(&reached.address).display())
        });
        Listed {
            export: args.export.clone(),
            block_device: served.as_ref().and_then(Served::block_device).map(Path::to_path_buf),
            state: state.into(),
            cause,
            dirty_bytes,
            pool: absolute(&self.plan.pool),
            backing: args.backing.as_ref().map(ToString::to_string),
            addresses: addresses.iter().cloned().chain(sockets).collect(),
            control: args.control.as_deref().map(absolute),
            process: std::process::id(),
        }
    }

    /// Returns whether the pool is open.
    pub(crate) fn is_open(&self) -> bool {
        self.state.lock().open.is_some()
    }

    /// Returns whether the device is a block device that is in use.
    pub(crate) fn is_used(&self) -> bool {
        self.served().is_some_and(|served| served.block_device().is_some_and(has_users))
    }

    /// Returns whether an attempt to open the pool is under way.
    pub(crate) fn is_opening(&self) -> bool {
        self.state.lock().is_opening
    }

    /// Notes that an attempt to open the pool begins.
    pub(crate) fn begin(&self) {
        self.state.lock().is_opening = true;
    }

    /// Has the front ends take no more requests.
    pub(crate) fn begin_stop(&self) {
        let state = self.state.lock();
        let attached = state.open.iter().flat_map(|opened| &opened.ends.attached);
        attached.for_each(|attached| attached.begin_stop());
    }

    /// Takes the parts that end before the pool is closed.
    pub(crate) fn take_ends(&self) -> Ends {
        let mut state = self.state.lock();
        state.open.as_mut().map(|opened| std::mem::take(&mut opened.ends)).unwrap_or_default()
    }
}

/// The devices of a server, in the order of the configuration.
pub(crate) struct Devices {
    all: RwLock<Vec<Arc<Device>>>,
    attempt_ended: Wake,
    /// The state that the service manager knows, once the server is ready.
    told: Mutex<Option<String>>,
}

impl Devices {
    /// Returns the devices that `plans` describe, all closed.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub(crate) fn new(plans: Vec<DevicePlan>, stop: &StopHandle) -> Result<Arc<Self>> {
        let all = plans.into_iter().map(|plan| Device::new(Arc::new(plan), stop));
        let all = RwLock::new(all.collect::<Result<_>>()?);
        let attempt_ended = Wake::new().context("cannot make an eventfd")?;
        Ok(Arc::new(Self { all, attempt_ended, told: Mutex::default() }))
    }

    /// Returns all devices.
    pub(crate) fn all(&self) -> Vec<Arc<Device>> {
        self.all.read().clone()
    }

    /// Replaces the list of devices.
    pub(crate) fn set_all(&self, all: Vec<Arc<Device>>) {
        *self.all.write() = all;
        self.tell_status();
    }

    /// Returns the pools that are open.
    pub(crate) fn served(&self) -> Vec<Served> {
        self.all().iter().filter_map(|device| device.served()).collect()
    }

    /// Describes all devices, which clients reach at `addresses`.
    pub(crate) fn listed(&self, addresses: &[String]) -> Vec<Listed> {
        self.all().iter().map(|device| device.listed(addresses)).collect()
    }

    /// Notes the outcome of an attempt to open `device`: the open pool, or the cause of a failure.
    pub(crate) fn end_attempt(&self, device: &Device, outcome: Result<Opened, String>) {
        let mut state = device.state.lock();
        state.is_opening = false;
        match outcome {
            Ok(opened) => state.open = Some(opened),
            Err(cause) => state.cause = Some(cause),
        }
        drop(state);
        self.attempt_ended.wake();
        self.tell_status();
    }

    /// Tells the service manager the state if it has changed since the server was ready.
    fn tell_status(&self) {
        let mut told = self.told.lock();
        let status = self.status();
        if told.as_ref().is_some_and(|told| *told != status) {
            notify(&status);
            *told = Some(status);
        }
    }

    /// Tells the service manager that the server is ready, and from then on each change.
    pub(crate) fn announce(&self) {
        let mut told = self.told.lock();
        let status = self.status();
        notify(&format!("READY=1\n{status}"));
        *told = Some(status);
    }

    fn status(&self) -> String {
        let all = self.all();
        let served = all.iter().filter(|device| device.is_open()).count();
        status_of(served, all.len())
    }

    /// Waits until no attempt to open a device is under way, at most `limit`, or until `stop` is
    /// signalled.
    pub(crate) fn await_attempts(&self, limit: Duration, stop: Option<&StopHandle>) {
        let until = Instant::now() + limit;
        while self.all().iter().any(|device| device.is_opening()) {
            let left = until.saturating_duration_since(Instant::now());
            let mut ready = vec![PollFd::new(&self.attempt_ended, PollFlags::IN)];
            ready.extend(stop.map(|stop| PollFd::new(stop, PollFlags::IN)));
            let _ = poll(&mut ready, Timespec::try_from(left).ok().as_ref());
            let is_stopped = ready.get(1).is_some_and(|stop| !stop.revents().is_empty());
            if left.is_zero() || is_stopped {
                return;
            }
            self.attempt_ended.reset();
        }
    }
}

/// Returns the state of a server for the service manager.
fn status_of(served: usize, all: usize) -> String {
    let plural = |number| if number == 1 { "" } else { "s" };
    match all - served {
        0 => format!("STATUS=serving {served} device{}", plural(served)),
        down => format!("STATUS=serving {served} of {all} device{}, {down} down", plural(all)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_manager_is_told_how_many_devices_are_down() {
        assert_eq!(status_of(1, 1), "STATUS=serving 1 device");
        assert_eq!(status_of(8, 8), "STATUS=serving 8 devices");
        assert_eq!(status_of(7, 8), "STATUS=serving 7 of 8 devices, 1 down");
        assert_eq!(status_of(0, 1), "STATUS=serving 0 of 1 device, 1 down");
    }
}
