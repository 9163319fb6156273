//! Opens the pools of devices and offers them to clients, and tries again where that fails.
//!
//! Invariants:
//! 1. A device that is down keeps nothing open and holds no lock, nor does one that was closed.
//! 2. An attempt that fails has one line in the log if its cause differs from the last one.
//! 3. While the pool or its backing does not exist, no attempt is made before they appear. After
//!    other failures the pauses grow to [`PAUSE_MAX`].
//! 4. After a failure, a file that changes is not opened: it may be a copy that is not whole yet.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tidegate::backing::BackingUrl;
use tidegate::device::BlockDevice;
use tidegate::device::delay::Delays;
use tidegate::device::gate::Gate;
use tidegate::device::watch::{Notices, Watch};
use tidegate::pmem::RegionOptions;
use tidegate::stack::{REGISTRY, Stack, StackOptions};
use tidegate_run::open_pool_file;
use tidegate_serve::Worker;
use tidegate_serve::nbd::{Export, ExportTable, ListenAddress, StopHandle};

use crate::appearance::{self, first_absent};
use crate::devices::{Device, Devices, Ends, Opened};
use crate::log::{Level, say, say_of};
use crate::output::one_line;
use crate::plan::DevicePlan;
use crate::pool::map_to_resize;
use crate::removed::{self, Watched};
use crate::served::Served;
use crate::{control, front_ends};

/// First pause before another attempt.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest pause before another attempt.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Opens the devices of a server.
#[derive(Clone)]
pub(crate) struct Opener {
    exports: ExportTable,
    pub(crate) devices: Arc<Devices>,
    /// The addresses at which the server offers its exports, without names of hosts.
    nbd: Arc<[ListenAddress]>,
}

impl Opener {
    /// Returns an opener of `devices`, which clients find in `exports` at the addresses `nbd`.
    pub(crate) fn new(
        exports: &ExportTable,
        devices: &Arc<Devices>,
        nbd: Vec<ListenAddress>,
    ) -> Self {
        Self { exports: exports.clone(), devices: Arc::clone(devices), nbd: nbd.into() }
    }

    /// Opens each device.
    ///
    /// # Errors
    /// A device cannot be opened.
    pub(crate) fn open_all(&self) -> Result<()> {
        self.devices.all().iter().try_for_each(|device| self.attempt(device))
    }

    /// Starts a thread for each device.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(crate) fn start_all(&self) -> Result<()> {
        self.devices.all().iter().try_for_each(|device| self.start(device))
    }

    /// Starts a thread that opens the device and ends when that has succeeded, or when the device
    /// is to be closed.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(crate) fn start(&self, device: &Arc<Device>) -> Result<()> {
        let (opener, opened) = (self.clone(), Arc::clone(device));
        let run = move |stop: &StopHandle| opener.keep_trying(&opened, stop);
        // Before the thread: those that wait for the attempt find it under way.
        device.begin();
        device.set_opener(Worker::start("device-opener", device.stop.clone(), run)?);
        Ok(())
    }

    fn keep_trying(&self, device: &Device, stop: &StopHandle) {
        let (paths, mut pause, mut told) = (paths_of(&device.plan), PAUSE_MIN, None);
        while let Err(error) = self.attempt(device) {
            let cause = Some(one_line(&format!("{error:#}")));
            if told != cause {
                tell_down(device, &paths, cause.as_deref().unwrap_or_default());
                told = cause;
            }
            let is_stopped = if first_absent(&paths).is_some() {
                pause = PAUSE_MIN;
                appearance::await_paths(&paths, PAUSE_MAX, stop)
            } else {
                let present = pause;
                pause = PAUSE_MAX.min(2 * pause);
                appearance::pause(present, stop)
            };
            if is_stopped || appearance::await_rest(&paths, stop) {
                return;
            }
        }
        if told.is_some() {
            say_of(name_of(&device.plan), Level::Warning, "the device is served now");
        }
    }

    /// Opens `device` and offers it to clients, or refuses them.
    ///
    /// # Errors
    /// The pool, its tiers or its backing cannot be opened, or a front end cannot offer it.
    fn attempt(&self, device: &Device) -> Result<()> {
        device.begin();
        let opened = self.open(device).inspect_err(|_| {
            // The name is announced, so this cannot fail.
            let _ = self.exports.refuse(&device.plan.args.export);
        });
        let (outcome, result) = match opened {
            Ok(open) => (Ok(open), Ok(())),
            Err(error) => (Err(one_line(&format!("{error:#}"))), Err(error)),
        };
        self.devices.end_attempt(device, outcome);
        result
    }

    /// Refuses the clients of `device`, which no thread tries to open.
    pub(crate) fn give_up(&self, device: &Device, cause: &anyhow::Error) {
        // The name is announced, so this cannot fail.
        let _ = self.exports.refuse(&device.plan.args.export);
        self.devices.end_attempt(device, Err(one_line(&format!("{cause:#}"))));
    }

    fn open(&self, device: &Device) -> Result<Opened> {
        let Device { plan, stop, .. } = device;
        front_ends::expect(&plan.args)?;
        if let Some(fault) = plan.own_export_looked_up(&self.nbd) {
            bail!(fault);
        }
        let stack = open_stack(plan)?;
        let mut unused = Unused(Some(Arc::clone(&stack)));
        set_mode(plan, &stack)?;
        let gate = Arc::new(Gate::new(stack.top()));
        let device = watched(plan, &gate);
        let export = Export::new(plan.args.export.clone(), Arc::clone(&device));
        let export = export.read_only(plan.args.read_only);
        let (in_use, released) = channel();
        let mut served = Served {
            plan: Arc::clone(plan),
            file: Arc::new(open_pool_file(&plan.pool)?),
            stack,
            gate,
            stop: stop.clone(),
            statistics: self.exports.statistics_of(&export),
            reached: Vec::new(),
            durable_notes: Arc::default(),
            _in_use: in_use,
        };
        let memory = self.exports.request_memory();
        let attached = front_ends::attach_all(&mut served, &device, stop, &memory)?;
        let (control, removals) = (control::listen_by_pool(&served), watch_files(&served));
        self.exports.offer(export)?;
        unused.0 = None;
        Ok(Opened { served, ends: Ends { attached, control, removals }, released })
    }
}

/// Returns the paths that have to exist before the device can be opened.
fn paths_of(plan: &DevicePlan) -> Vec<PathBuf> {
    let backing = plan.args.backing.as_ref().and_then(BackingUrl::path);
    [Some(plan.pool.clone()), backing].into_iter().flatten().collect()
}

/// Logs why a device is down, and what the server will do.
fn tell_down(device: &Device, paths: &[PathBuf], cause: &str) {
    let plan = &device.plan;
    let next = match first_absent(paths) {
        Some(path) => format!("the server opens it once {} is there", path.display()),
        None => format!("the server tries again, at least every {} s", PAUSE_MAX.as_secs()),
    };
    let origin = plan.origin.as_deref().unwrap_or_default();
    say_of(name_of(plan), Level::Error, format_args!("{origin} is not served: {cause}; {next}"));
}

/// Returns the name of a device in the log.
fn name_of(plan: &DevicePlan) -> Option<&str> {
    Some(plan.args.export.as_str()).filter(|name| !name.is_empty())
}

/// A stack that no client has used yet. Dropping it releases its backing, so that a device that
/// fails to open keeps no other pool from the backing.
struct Unused(Option<Arc<Stack>>);

impl Drop for Unused {
    fn drop(&mut self) {
        // The mark of a backing that fails stays; the failure of the device is returned.
        self.0.iter().for_each(|stack| drop(stack.release_unused()));
    }
}

fn set_mode(device: &DevicePlan, stack: &Stack) -> Result<()> {
    let Some(mode) = &device.args.mode else { return Ok(()) };
    let pool = device.pool.display();
    stack.set(&[("mode", mode)]).with_context(|| format!("{pool} cannot be served with --mode"))
}

/// Opens the pool of `device`, with the tiers before it and the backing behind it.
fn open_stack(device: &DevicePlan) -> Result<Arc<Stack>> {
    let DevicePlan { pool, args, memory, .. } = device;
    let memory = RegionOptions { read_only: args.read_only, ..memory.region_options() };
    let region = Arc::new(map_to_resize(pool, memory)?);
    let stack = REGISTRY.open(StackOptions {
        backing: args.backing.clone(),
        force: args.force,
        atomic_flush: args.atomic_flush,
        keep_dirty: args.keep_dirty,
        needs_modes: args.mode.is_some(),
        dram: args.dram,
        delays: args.delay_us.map(|us| Delays::of_each(us.saturating_mul(1000))),
        notices: Some(notices(device)),
        ..StackOptions::alone(region, pool.clone())
    })?;
    Ok(Arc::new(stack))
}

/// Returns what clients of a device reach: its gate, which holds changes back while the device is
/// copied, with failures logged.
fn watched(device: &DevicePlan, gate: &Arc<Gate>) -> Arc<dyn BlockDevice> {
    let gate: Arc<dyn BlockDevice> = Arc::<Gate>::clone(gate);
    Arc::new(Watch::new(gate, "export", notices(device)))
}

/// Starts a thread that logs when the file of the pool or of its backing is removed. Returns `None`
/// if the files cannot be watched; the server runs all the same.
fn watch_files(one: &Served) -> Option<Worker> {
    let pool = format!("the pool {}", one.plan.pool.display());
    let pool = one.file.try_clone().ok().map(|file| (pool, file));
    let backing = &one.stack.description().backing;
    let backing = backing.as_ref().map(|url| format!("the backing {url}"));
    let backing = backing.zip(one.stack.backing_file().ok().flatten());
    let watched = |(name, file)| Watched::new(name, file, notices(&one.plan));
    let files = [pool, backing].into_iter().flatten().filter_map(watched);
    match removed::watch(files.collect()) {
        Ok(watch) => Some(watch),
        Err(error) => {
            say(Level::Warning, format_args!("nothing will tell if a pool is removed: {error:#}"));
            None
        }
    }
}

/// Returns a listener that logs a device's failures when they begin, not only in answers.
fn notices(device: &DevicePlan) -> Notices {
    let name = name_of(device).map(str::to_owned);
    Arc::new(move |line| say_of(name.as_deref(), Level::Warning, line))
}
