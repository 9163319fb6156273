//! Reads the configuration file of a server again: closes devices, and opens others, while the rest
//! is served.
//!
//! A device is known by the name of its export. A device whose table has changed is closed, and
//! opened by the new table; clients that ask for it wait meanwhile.
//!
//! Invariants:
//! 1. A file with a fault changes nothing.
//! 2. A device whose table is as before is not touched.
//! 3. A device has its old table or its new one: where a device was served, and cannot be opened by
//!    the new table, the old one opens it again.
//! 4. All devices that are to be closed are closed before one is opened: a pool may go from one
//!    export to another.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use rustix::process::{Signal, getpid, kill_process};
use tidegate::device::BlockDeviceExt;
use tidegate::dram::Policy;
use tidegate::opening::is_one_file;
use tidegate::stack::Stack;
use tidegate_serve::control::{Reply, Request};
use tidegate_serve::nbd::{ExportTable, StopHandle, Tls};

use crate::at_once::at_once;
use crate::config;
use crate::control;
use crate::devices::{Device, Devices};
use crate::front_ends::{self, ublk};
use crate::log::{Level, say};
use crate::opening::Opener;
use crate::output::one_line;
use crate::plan::{DevicePlan, ServePlan};
use crate::served::{Reached, Served, UBLK};
use crate::tls::warn_of_readers;

/// Time in which each device is opened, or fails, before its state is told.
pub(crate) const FIRST_ATTEMPTS: Duration = Duration::from_secs(10);

/// The outcome of a reload.
#[derive(Default)]
pub(crate) struct Reloaded {
    /// A line for each change.
    pub(crate) changes: Vec<String>,
    /// A line for each failure, which left all as it was before.
    pub(crate) failures: Vec<String>,
}

/// Reads the files of a server again.
pub(crate) struct Reloader {
    /// The configuration file, absolute; `None` for a server of the command line.
    config: Option<PathBuf>,
    /// The plan of the start, without its devices.
    pub(crate) plan: ServePlan,
    tls: Option<Tls>,
    exports: ExportTable,
    devices: Arc<Devices>,
    opener: Opener,
    stop: StopHandle,
    /// Held while devices are opened and closed.
    phase: Mutex<Phase>,
}

/// The phase of a server.
#[derive(Default, PartialEq)]
enum Phase {
    #[default]
    Starts,
    Serves,
    Ends,
}

/// A device that a reload opens.
struct Opening {
    device: Arc<Device>,
    /// The device that was served under this name.
    before: Option<Arc<Device>>,
}

impl Reloader {
    /// Returns the reloader of a server that was started by `plan`.
    pub(crate) fn new(
        config: Option<PathBuf>,
        plan: ServePlan,
        tls: Option<Tls>,
        exports: &ExportTable,
        opener: &Opener,
        stop: &StopHandle,
    ) -> Self {
        let (exports, opener, stop) = (exports.clone(), opener.clone(), stop.clone());
        let devices = Arc::clone(&opener.devices);
        Self { config, plan, tls, exports, devices, opener, stop, phase: Mutex::default() }
    }

    /// Allows reloads from now on.
    pub(crate) fn begin(&self) {
        *self.phase.lock() = Phase::Serves;
    }

    /// Reloads for a SIGHUP, on a thread of its own.
    pub(crate) fn by_signal(self: &Arc<Self>) {
        let reloader = Arc::clone(self);
        let reload = move || drop(reloader.reload("SIGHUP"));
        if let Err(error) = std::thread::Builder::new().name("reload".into()).spawn(reload) {
            say(Level::Error, format_args!("SIGHUP: nothing is read again: {error}"));
        }
    }

    /// Answers a request to the server as a whole.
    pub(crate) fn answer(&self, request: &Request) -> Reply {
        match request {
            Request::Reload { config } => self.reload_for(config.as_deref()),
            Request::End { pool } => self.end_server(pool),
            _ => Reply::Failed { message: "this socket is of no single pool".into() },
        }
    }

    /// Ends the server as a signal does, unless it has other devices, users of its block device, or
    /// clients of another front end.
    fn end_server(&self, pool: &Path) -> Reply {
        let devices = self.devices.all();
        let ended = match (&self.config, &devices[..]) {
            (Some(config), _) => Err(format!(
                "{} is a device of {}: take it out of that file, then `tidegate reload`",
                pool.display(),
                config.display()
            )),
            (None, [device]) if is_one_file(&device.plan.pool, pool) => match device.served() {
                Some(served) if self.has_other_clients(&served) => Err(format!(
                    "it has clients of another front end: stop process {}",
                    std::process::id()
                )),
                Some(_) if device.is_used() => {
                    Err("its block device is in use: unmount or close it first".into())
                }
                Some(_) => kill_process(getpid(), Signal::TERM).map_err(|error| error.to_string()),
                None => Err("it is being opened".into()),
            },
            _ => Err("the server has another pool".into()),
        };
        ended.map_or_else(|message| Reply::Failed { message }, |()| Reply::Ending)
    }

    /// Returns whether `served` may have clients beside the users of its block device.
    fn has_other_clients(&self, served: &Served) -> bool {
        let is_other = |reached: &Reached| reached.front_end != UBLK;
        !self.plan.nbd.is_empty() || served.reached.iter().any(is_other)
    }

    /// Reloads if the server has the configuration file `wanted`, or any if no file is named.
    fn reload_for(&self, wanted: Option<&Path>) -> Reply {
        let is_wanted = |config: &&PathBuf| wanted.is_none_or(|wanted| is_one_file(wanted, config));
        let Some(config) = self.config.as_ref().filter(is_wanted) else {
            return Reply::NotReloaded;
        };
        let Reloaded { changes, failures } = self.reload("reload");
        Reply::Reloaded { config: config.clone(), changes, failures }
    }

    /// Keeps later reloads from their work, and waits for one under way. The backing of a device
    /// that closes may hold it up until the deadline of the stop.
    pub(crate) fn end(&self) {
        *self.phase.lock() = Phase::Ends;
    }

    /// Reloads, and logs the outcome. Each line begins with `way`.
    fn reload(&self, way: &str) -> Reloaded {
        let mut done = Reloaded::default();
        let phase = self.phase.lock();
        match *phase {
            Phase::Starts => done.failures.push("the server starts: try again later".into()),
            Phase::Ends => done.failures.push("the server stops: nothing is read again".into()),
            Phase::Serves => self.read_again(&mut done),
        }
        done.changes.iter().for_each(|line| say(Level::Info, format_args!("{way}: {line}")));
        done.failures.iter().for_each(|line| say(Level::Error, format_args!("{way}: {line}")));
        done
    }

    fn read_again(&self, done: &mut Reloaded) {
        self.reload_certificate(done);
        match self.config.as_deref().map(config::read) {
            Some(Ok(plan)) => self.apply(plan, done),
            Some(Err(error)) => done.fail("no device has changed", &error),
            None => {}
        }
        if self.config.is_none() && self.tls.is_none() {
            let nothing = "nothing is read again, for the server has neither a configuration file \
                           nor a TLS certificate";
            done.changes.push(nothing.into());
        }
    }

    fn reload_certificate(&self, done: &mut Reloaded) {
        let (Some(tls), Some(files)) = (&self.tls, &self.plan.tls) else { return };
        let certificate = files.certificate.display();
        match tls.reload() {
            Ok(()) => {
                warn_of_readers(&files.key);
                let line = format!("connections get the TLS certificate in {certificate} now");
                done.changes.push(line);
            }
            Err(error) => {
                done.fail("the TLS certificate of before stays in use", &error.into());
            }
        }
    }

    /// Opens and closes devices as `plan` has them.
    fn apply(&self, plan: ServePlan, done: &mut Reloaded) {
        for key in self.plan.settings_that_differ(&plan) {
            done.failures.push(format!("`{key}` has changed: that takes a restart of the server"));
        }
        front_ends::prepare(&plan.devices);
        let before = self.devices.all();
        let mut plans: Vec<_> = plan.devices.into_iter().map(Arc::new).collect();
        for device in &before {
            keep_where_due(device, &mut plans, done);
        }
        let all = plans.into_iter().map(|plan| self.planned(plan, &before));
        let all = match all.collect::<Result<Vec<_>>>() {
            Ok(all) => all,
            Err(error) => return done.fail("no device has changed", &error),
        };
        let (closing, added) = (without(&before, &all), without(&all, &before));
        let is_open = |device: &Arc<Device>| device.is_open();
        let before_of = |device: &Arc<Device>| named(&closing, device).filter(is_open);
        let opening = added.into_iter().map(|device| {
            let before = before_of(&device);
            Opening { device, before }
        });
        let opening: Vec<_> = opening.collect();
        self.close_all(&closing, &all, done);
        let removed = closing.iter().filter(|device| named(&all, device).is_none());
        done.changes.extend(removed.map(|device| format!("{} is closed", name_of(&device.plan))));
        self.set_all(all, done);
        if self.stop.is_stopped() {
            return;
        }
        self.open_all(&opening, done);
        if closing.is_empty() && opening.is_empty() {
            done.changes.push("no device has changed".into());
        }
    }

    /// Returns the device of `plan`: the one of before if its table is the same, or a new one.
    fn planned(&self, plan: Arc<DevicePlan>, before: &[Arc<Device>]) -> Result<Arc<Device>> {
        let same = before.iter().find(|device| device.plan.is_as(&plan));
        same.map_or_else(|| Device::new(plan, &self.stop), |same| Ok(Arc::clone(same)))
    }

    /// Replaces the list of devices, and announces their names to clients.
    fn set_all(&self, all: Vec<Arc<Device>>, done: &mut Reloaded) {
        let names: Vec<_> = all.iter().map(|device| device.plan.args.export.as_str()).collect();
        if let Err(error) = self.exports.announce(&names) {
            done.fail("clients do not find each device", &error.into());
        }
        drop(names);
        self.devices.set_all(all);
    }

    /// Opens devices. Where that fails, opens the device of before again.
    fn open_all(&self, opening: &[Opening], done: &mut Reloaded) {
        let mut reopened = Vec::new();
        self.start_all(opening.iter().map(|opening| &opening.device));
        for Opening { device, before } in opening {
            let name = name_of(&device.plan);
            match (device.cause(), before) {
                (Some(cause), Some(before)) => match self.take_back(device, before) {
                    Ok(device) => {
                        let what = "is as before, since its new table cannot be opened";
                        done.failures.push(format!("{name} {what}: {cause}"));
                        reopened.push(device);
                    }
                    Err(error) => done.fail(&format!("{name} is down"), &error),
                },
                (Some(cause), None) => {
                    done.failures.push(format!("{name} is down, and is tried again: {cause}"));
                }
                (None, _) if !device.is_open() => {
                    done.changes.push(format!("{name} is being opened"));
                }
                (None, Some(_)) => done.changes.push(format!("{name} is served by its new table")),
                (None, None) => done.changes.push(format!("{name} is served")),
            }
        }
        self.start_all(reopened.iter());
        for device in reopened {
            if let Some(cause) = device.cause() {
                let name = name_of(&device.plan);
                done.failures.push(format!("{name} is down, and is tried again: {cause}"));
            }
        }
    }

    /// Starts to open `devices`, and waits a while for the outcomes.
    fn start_all<'d>(&self, devices: impl Iterator<Item = &'d Arc<Device>>) {
        let mut is_any = false;
        for device in devices {
            is_any = true;
            let listened = control::listen(device).map(|control| device.set_control(control));
            if let Err(error) = listened.and_then(|()| self.opener.start(device)) {
                self.opener.give_up(device, &error);
            }
        }
        if is_any {
            self.devices.await_attempts(FIRST_ATTEMPTS, Some(&self.stop));
        }
    }

    /// Puts a device with the table of `before` in the place of `device`, which cannot be opened.
    fn take_back(&self, device: &Arc<Device>, before: &Device) -> Result<Arc<Device>> {
        close(device, &self.exports, true)?;
        let again = Device::new(Arc::clone(&before.plan), &self.stop)?;
        let put = |old: Arc<Device>| {
            if Arc::ptr_eq(&old, device) { Arc::clone(&again) } else { old }
        };
        self.devices.set_all(self.devices.all().into_iter().map(put).collect());
        Ok(again)
    }

    /// Closes `devices`. Those whose names are among `all` reopen.
    fn close_all(&self, devices: &[Arc<Device>], all: &[Arc<Device>], done: &mut Reloaded) {
        let closed = at_once(devices, |device| {
            let reopens = named(all, device).is_some();
            close(device, &self.exports, reopens)
        });
        for (device, closed) in devices.iter().zip(closed) {
            if let Err(error) = closed {
                done.fail(&format!("{} is closed", name_of(&device.plan)), &error);
            }
        }
    }
}

impl Reloaded {
    fn fail(&mut self, what: &str, error: &anyhow::Error) {
        self.failures.push(one_line(&format!("{what}: {error:#}")));
    }
}

/// Closes a device: ends its clients once their requests are answered, writes back all data of its
/// tiers, and waits until its pool is free. Clients that ask for it wait if it `reopens`.
///
/// # Errors
/// The tiers cannot be drained, or the block device cannot be stopped. The device is closed all the
/// same.
fn close(device: &Device, exports: &ExportTable, reopens: bool) -> Result<()> {
    drop(device.take_opener());
    device.stop.stop();
    // The name is announced, so this cannot fail.
    let _ = exports.close(&device.plan.args.export, reopens);
    device.begin_close();
    drop(device.take_control());
    let Some(served) = device.served() else { return Ok(()) };
    let ends = device.take_ends();
    let detached = front_ends::stop_all(ends.attached);
    drop((ends.control, ends.removals));
    // The end of `keep-dirty` keeps the lock of the backing until the end of the process.
    let drained = served.end(Stack::drain);
    drop(served);
    if let Some(opened) = device.take_open() {
        drop(opened.served);
        // The receiver gets nothing: this waits for its senders to hang up.
        let _ = opened.released.recv();
    }
    drained.and(detached)
}

/// Puts the table of `device` back into `plans` if the device must not be closed.
fn keep_where_due(device: &Device, plans: &mut Vec<Arc<DevicePlan>>, done: &mut Reloaded) {
    let old = &device.plan;
    let new = plans.iter_mut().find(|plan| plan.args.export == old.args.export);
    if new.as_ref().is_some_and(|new| new.is_as(old)) {
        return;
    }
    let Err(error) = may_close(device, new.as_deref().map(|new| &**new)) else { return };
    match new {
        Some(new) => *new = Arc::clone(old),
        None => plans.push(Arc::clone(old)),
    }
    done.fail(&format!("{} is as before", name_of(old)), &error);
}

/// Checks that a device can be closed without harm to its users, and writes back its DRAM tier.
///
/// # Errors
/// The device must stay open.
fn may_close(device: &Device, new: Option<&DevicePlan>) -> Result<()> {
    let takes_up = new.is_some_and(|new| ublk::can_take_up(&device.plan, new));
    // The users would wait for requests that nothing answers.
    ensure!(takes_up || !device.is_used(), "its block device is in use");
    match device.served() {
        Some(served) if device.plan.args.dram.policy != Policy::None => {
            served.stack.top().flush().context("its DRAM tier cannot be written back")
        }
        _ => Ok(()),
    }
}

/// Returns the `devices` that are not among `others`.
fn without(devices: &[Arc<Device>], others: &[Arc<Device>]) -> Vec<Arc<Device>> {
    let is_other = |device: &Arc<Device>| others.iter().any(|other| Arc::ptr_eq(other, device));
    devices.iter().filter(|device| !is_other(device)).cloned().collect()
}

/// Returns the device with the name of `device`.
fn named(devices: &[Arc<Device>], device: &Device) -> Option<Arc<Device>> {
    let has_name = |other: &&Arc<Device>| other.plan.args.export == device.plan.args.export;
    devices.iter().find(has_name).cloned()
}

/// Returns the name of a device for people.
fn name_of(plan: &DevicePlan) -> String {
    match plan.args.export.as_str() {
        "" => plan.pool.display().to_string(),
        name => name.to_owned(),
    }
}
