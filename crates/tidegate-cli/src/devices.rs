//! The devices of a server, whether or not their pools are open.
//!
//! A device is served, or down with the cause of its last failure to open. A thread of
//! [`opening`](crate::opening) changes that; other parts of the server ask for the present state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate::device::wake::Wake;
use tidegate_serve::Worker;
use tidegate_serve::control::{ControlServer, Listed};
use tidegate_serve::nbd::StopHandle;

use crate::notify::notify;
use crate::plan::DevicePlan;
use crate::served::Served;
use crate::ublk::Attached;

/// The parts of a served device that end before its pool is closed.
#[derive(Default)]
pub(crate) struct Ends {
    pub(crate) attached: Option<Attached>,
    /// The control socket that commands find by the pool.
    pub(crate) control: Option<ControlServer>,
    /// The thread that logs the removal of the pool or of its backing.
    pub(crate) removals: Option<Worker>,
}

/// A device of a server.
pub(crate) struct Device {
    pub(crate) plan: Arc<DevicePlan>,
    state: Mutex<State>,
}

/// The state of a device. Without a pool and a cause, it is being opened for the first time.
#[derive(Default)]
struct State {
    is_opening: bool,
    /// The cause of the last failure to open.
    cause: Option<String>,
    open: Option<(Served, Ends)>,
}

impl Device {
    fn new(plan: DevicePlan) -> Self {
        let state = State { is_opening: true, ..State::default() };
        Self { plan: Arc::new(plan), state: Mutex::new(state) }
    }

    /// Returns the pool if it is open.
    pub(crate) fn served(&self) -> Option<Served> {
        self.state.lock().open.as_ref().map(|(served, _)| served.clone())
    }

    /// Returns the cause if the device is down.
    pub(crate) fn cause(&self) -> Option<String> {
        let state = self.state.lock();
        state.cause.clone().filter(|_| state.open.is_none())
    }

    fn listed(&self, addresses: &[String]) -> Listed {
        let (served, cause) = (self.served(), self.cause());
        let state = match (&served, &cause) {
            (Some(_), _) => "up",
            (None, Some(_)) => "down",
            (None, None) => "opening",
        };
        let dirty_bytes = served.as_ref().map(|served| {
            let (volatile_bytes, kept_bytes) = served.stack.pending_bytes();
            volatile_bytes + kept_bytes
        });
        let args = &self.plan.args;
        Listed {
            export: args.export.clone(),
            block_device: served.and_then(|served| served.block_device).map(|device| device.path),
            state: state.into(),
            cause,
            dirty_bytes,
            pool: std::path::absolute(&self.plan.pool).unwrap_or_else(|_| self.plan.pool.clone()),
            backing: args.backing.as_ref().map(ToString::to_string),
            addresses: addresses.to_vec(),
            control: args.control.clone(),
            process: std::process::id(),
        }
    }

    /// Returns whether an attempt to open the pool is under way.
    pub(crate) fn is_opening(&self) -> bool {
        self.state.lock().is_opening
    }

    /// Notes that an attempt to open the pool begins.
    pub(crate) fn begin(&self) {
        self.state.lock().is_opening = true;
    }

    /// Takes the parts that end before the pool is closed.
    pub(crate) fn take_ends(&self) -> Ends {
        let mut state = self.state.lock();
        state.open.as_mut().map(|(_, ends)| std::mem::take(ends)).unwrap_or_default()
    }
}

/// The devices of a server, in the order of the configuration.
pub(crate) struct Devices {
    all: Vec<Arc<Device>>,
    attempt_ended: Wake,
    /// The state that the service manager knows, once the server is ready.
    told: Mutex<Option<String>>,
}

impl Devices {
    /// Returns the devices that `plans` describe, none of them open.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub(crate) fn new(plans: Vec<DevicePlan>) -> Result<Arc<Self>> {
        let all = plans.into_iter().map(|plan| Arc::new(Device::new(plan))).collect();
        let attempt_ended = Wake::new().context("cannot make an eventfd")?;
        Ok(Arc::new(Self { all, attempt_ended, told: Mutex::default() }))
    }

    /// Returns all devices.
    pub(crate) fn all(&self) -> &[Arc<Device>] {
        &self.all
    }

    /// Returns the pools that are open.
    pub(crate) fn served(&self) -> Vec<Served> {
        self.all.iter().filter_map(|device| device.served()).collect()
    }

    /// Describes all devices, which clients reach at `addresses`.
    pub(crate) fn listed(&self, addresses: &[String]) -> Vec<Listed> {
        self.all.iter().map(|device| device.listed(addresses)).collect()
    }

    /// Notes the outcome of an attempt to open `device`: the open pool, or the cause of a failure.
    pub(crate) fn end_attempt(&self, device: &Device, outcome: Result<(Served, Ends), String>) {
        let mut state = device.state.lock();
        state.is_opening = false;
        match outcome {
            Ok(open) => state.open = Some(open),
            Err(cause) => state.cause = Some(cause),
        }
        drop(state);
        self.attempt_ended.wake();
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
        status_of(self.served().len(), self.all.len())
    }

    /// Waits until no attempt to open a device is under way, at most `limit`, or until `stop` is
    /// signalled.
    pub(crate) fn await_attempts(&self, limit: Duration, stop: Option<&StopHandle>) {
        let until = Instant::now() + limit;
        while self.all.iter().any(|device| device.is_opening()) {
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
