//! A served device: starts or takes it up, and stops it in good order.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tidegate::device::BlockDevice;

use super::abi::{DeviceInfo, Parameters, feature, state};
use super::driver::{Driver, block_path, is_dead};
use super::parameters::{difference, parameters};
use super::queue::{QueueParts, Switch, serve};
use super::users::has_users;
use crate::identity::mark_of;
use crate::request::Rules;
use crate::statistics::{RequestCounters, StatisticsSource};
use crate::{LogSink, ServeError, StopHandle};

/// Most queues of a device, each with a thread and 16 MiB for the data of its requests.
const QUEUES_MAX: usize = 32;
/// Longest wait for the end of the server before.
const END_TIMEOUT: Duration = Duration::from_secs(30);
/// The kernel has no event for the end of a server: interval of the questions whether it has ended.
const END_LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// How to serve a device.
pub struct Options {
    /// The number N of `/dev/ublkbN`; the kernel chooses one for a new device without it.
    pub number: Option<u32>,
    /// Describes the pool: a server takes up the device of an earlier one with an equal identity.
    pub identity: String,
    /// Keep the device without a server, for the next one. Only right if the end of the server
    /// loses no acknowledged write.
    pub recovers: bool,
    /// Refuse writes, whatever the device allows.
    pub read_only: bool,
    /// Gets lines for the operator.
    pub log: LogSink,
}

/// What is left of a device that was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// Nothing: the device is deleted.
    Deleted,
    /// The device is deleted although it is in use: its users get errors from now on.
    CutOff,
    /// The device is in use: requests wait for the next server.
    Kept,
}

/// A served device. Dropping it stops it.
pub struct Ublk {
    driver: Driver,
    number: u32,
    recovers: bool,
    is_taken_up: bool,
    queues: Vec<(Arc<Switch>, JoinHandle<()>)>,
    counters: Arc<RequestCounters>,
}

impl Ublk {
    /// Makes a block device of `device`, or takes up the one of the pool's last server. Users have
    /// it when this returns. Gives up once `stop` is signalled while the last server still ends.
    ///
    /// # Errors
    /// [`ServeError::NoUblk`] without a usable driver; [`ServeError::UblkDevice`] if the number is
    /// taken, or the device of the last server is another one than `device`; [`ServeError::Io`].
    pub fn start(
        device: &Arc<dyn BlockDevice>,
        options: &Options,
        stop: &StopHandle,
    ) -> Result<Self, ServeError> {
        let mut driver = Driver::open()?;
        let mark = mark_of(&options.identity);
        let geometry = device.geometry();
        let wanted = parameters(&geometry, options.read_only);
        let before = match driver.find(mark)? {
            Some(found) if is_dead(&found) || found.features & feature::RECOVERY == 0 => {
                delete_failed(&mut driver, &found, stop)?;
                None
            }
            found => found,
        };
        let is_taken_up = before.is_some();
        let info = match before {
            Some(found) => take_up(&mut driver, &found, options, &wanted, stop)?,
            None => add(&mut driver, options, mark, wanted)?,
        };
        let recovers = info.features & feature::RECOVERY != 0;
        let (number, counters) = (info.number, Arc::default());
        let queues = Vec::new();
        let mut served = Self { driver, number, recovers, is_taken_up, queues, counters };
        match served.begin(device, options, &info) {
            Ok(()) => Ok(served),
            Err(error) => {
                served.give_up();
                Err(error)
            }
        }
    }

    fn begin(
        &mut self,
        device: &Arc<dyn BlockDevice>,
        options: &Options,
        info: &DeviceInfo,
    ) -> Result<(), ServeError> {
        self.start_queues(device, options, info)?;
        if self.is_taken_up {
            self.driver.end_recovery(info.number)
        } else {
            self.driver.start(info.number)
        }
    }

    /// Ends a start that has failed: deletes a new device, and leaves the one of the last server.
    fn give_up(&mut self) {
        // Errors of these steps add nothing to the error of the start, which is returned.
        if self.is_taken_up {
            return self.leave();
        }
        let _ = self.driver.stop(self.number);
        self.leave();
        let _ = self.driver.delete(self.number);
    }

    /// Starts a thread for each queue. All of them ask for requests when this returns.
    fn start_queues(
        &mut self,
        device: &Arc<dyn BlockDevice>,
        options: &Options,
        info: &DeviceInfo,
    ) -> Result<(), ServeError> {
        let path = format!("/dev/ublkc{}", info.number);
        let failed = |error| ServeError::io(&format!("cannot open {path}"), error);
        let file = File::options().read(true).write(true).open(&path).map_err(failed)?;
        let rules = Rules {
            geometry: device.geometry(),
            read_only: options.read_only,
            request_bytes_max: info.buffer_bytes,
        };
        let (started, starts) = channel();
        for number in 0..info.queues {
            let switch = Switch::new()?;
            let parts = QueueParts {
                file: file.try_clone().map_err(failed)?,
                number,
                depth: info.depth,
                device: Arc::clone(device),
                rules,
                counters: Arc::clone(&self.counters),
                switch: Arc::clone(&switch),
            };
            let thread = start_thread(parts, started.clone(), &options.log, info.number)?;
            self.queues.push((switch, thread));
        }
        drop(started);
        await_starts(&starts, self.queues.len())
    }

    /// Returns the path of the block device.
    pub fn path(&self) -> PathBuf {
        block_path(self.number)
    }

    /// Returns whether this is the device of an earlier server.
    pub fn is_taken_up(&self) -> bool {
        self.is_taken_up
    }

    /// Returns a source of the device's statistics, which has no connections.
    pub fn statistics(&self) -> StatisticsSource {
        StatisticsSource::of(Arc::clone(&self.counters))
    }

    /// Stops the device. One that is in use, and [recovers](Options::recovers), is kept for the
    /// next server once the requests in progress are answered. Any other one is deleted: the kernel
    /// writes what is in its page cache first.
    ///
    /// # Errors
    /// [`ServeError::UblkDevice`].
    pub fn stop(mut self) -> Result<Rest, ServeError> {
        self.end()
    }

    fn end(&mut self) -> Result<Rest, ServeError> {
        let is_used = has_users(&self.path());
        if is_used && self.recovers {
            self.leave();
            return Ok(Rest::Kept);
        }
        self.driver.stop(self.number)?;
        self.join();
        self.driver.delete(self.number)?;
        Ok(if is_used { Rest::CutOff } else { Rest::Deleted })
    }

    /// Ends the queues, and leaves the device to the next server.
    fn leave(&mut self) {
        self.queues.iter().for_each(|(switch, _)| switch.leave());
        self.join();
    }

    fn join(&mut self) {
        for (_, thread) in self.queues.drain(..) {
            // The thread has printed its panic, if any.
            let _ = thread.join();
        }
    }
}

impl Drop for Ublk {
    fn drop(&mut self) {
        if self.queues.is_empty() {
            return;
        }
        // If the device cannot be stopped, it waits for the next server.
        let _ = self.end();
        self.leave();
    }
}

/// Checks that this process can make block devices.
///
/// # Errors
/// [`ServeError::NoUblk`].
pub fn expect_driver() -> Result<(), ServeError> {
    Driver::open().map(drop)
}

/// Prepares this thread, and the threads that it starts from now on, for serving block devices of
/// this machine: they get memory without waiting for pages to be written to such a device, which
/// would wait for them.
///
/// # Errors
/// The system refuses: without `CAP_SYS_RESOURCE`.
pub fn prepare_threads() -> Result<(), ServeError> {
    let what = "cannot have memory without waiting for block devices (PR_SET_IO_FLUSHER)";
    let set = rustix::process::configure_io_flusher_behavior(true);
    set.map_err(|error| ServeError::io(what, error))
}

/// Makes a device, which is not started yet.
fn add(
    driver: &mut Driver,
    options: &Options,
    mark: u64,
    wanted: Parameters,
) -> Result<DeviceInfo, ServeError> {
    let features = if options.recovers { feature::RECOVERY | feature::REISSUE } else { 0 };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let queues = u16::try_from(cpus.min(QUEUES_MAX)).unwrap_or(1);
    let added = driver.add(options.number, queues, features, mark)?;
    if let Err(error) = driver.set(added.number, wanted) {
        let _ = driver.delete(added.number);
        return Err(error);
    }
    Ok(added)
}

/// Begins to take up the device of the pool's last server.
fn take_up(
    driver: &mut Driver,
    found: &DeviceInfo,
    options: &Options,
    wanted: &Parameters,
    stop: &StopHandle,
) -> Result<DeviceInfo, ServeError> {
    let path = block_path(found.number).display().to_string();
    if options.number.is_some_and(|number| number != found.number) {
        return Err(ServeError::UblkDevice(format!(
            "{path} is this pool's device of its last server, and another number is asked for; \
             say --ublk={}, or delete it by `tidegate detach`",
            found.number
        )));
    }
    let difference = if options.recovers {
        difference(&driver.parameters(found.number)?, wanted)
    } else {
        Some("a kill of this server loses writes, one of the last server did not".into())
    };
    if let Some(difference) = difference {
        return Err(ServeError::UblkDevice(format!(
            "{path} is this pool's device of its last server, and its users would notice another \
             one ({difference}); serve the pool as before, or delete it by `tidegate detach`"
        )));
    }
    await_recovery(driver, found, stop)?;
    Ok(*found)
}

/// Waits until the kernel has noticed the end of the device's last server, and begins recovery.
fn await_recovery(
    driver: &mut Driver,
    found: &DeviceInfo,
    stop: &StopHandle,
) -> Result<(), ServeError> {
    await_end(found, stop, || match driver.start_recovery(found.number) {
        Ok(()) => Ok(true),
        Err(Errno::BUSY) => Ok(false),
        Err(error) => {
            let path = block_path(found.number);
            let what = format!("cannot take {} up: {error}", path.display());
            Err(ServeError::UblkDevice(what))
        }
    })
}

/// Deletes a device that fails with its server, once the kernel has noticed the server's end.
fn delete_failed(
    driver: &mut Driver,
    found: &DeviceInfo,
    stop: &StopHandle,
) -> Result<(), ServeError> {
    await_end(found, stop, || {
        // A device that cannot be asked for is gone.
        Ok(driver.info(found.number).map_or(true, |info| is_dead(&info)))
    })?;
    driver.delete(found.number)
}

/// Asks `has_ended` until it says so.
fn await_end(
    found: &DeviceInfo,
    stop: &StopHandle,
    mut has_ended: impl FnMut() -> Result<bool, ServeError>,
) -> Result<(), ServeError> {
    let began = Instant::now();
    while !has_ended()? {
        if is_stopped(stop) || began.elapsed() > END_TIMEOUT {
            let (path, pid) = (block_path(found.number), found.server_pid);
            return Err(ServeError::UblkDevice(format!(
                "{} is still served by process {pid}; stop that first, or wait for its end",
                path.display()
            )));
        }
    }
    Ok(())
}

/// Waits for a moment. Returns whether `stop` was signalled.
fn is_stopped(stop: &StopHandle) -> bool {
    let mut ready = [PollFd::new(stop, PollFlags::IN)];
    let _ = poll(&mut ready, Some(&END_LOOK));
    !ready[0].revents().is_empty()
}

fn start_thread(
    parts: QueueParts,
    started: Sender<Result<(), ServeError>>,
    log: &LogSink,
    device: u32,
) -> Result<JoinHandle<()>, ServeError> {
    let (number, log) = (parts.number, Arc::clone(log));
    let run = move || {
        if let Err(error) = serve(parts, &started) {
            let path = block_path(device);
            log(&format!("ublk: queue {number} of {} has ended: {error}", path.display()));
        }
    };
    let thread = std::thread::Builder::new().name(format!("ublk{device}-queue{number}"));
    thread.spawn(run).map_err(|error| ServeError::io("cannot start a thread for a queue", error))
}

fn await_starts(
    starts: &Receiver<Result<(), ServeError>>,
    queues: usize,
) -> Result<(), ServeError> {
    let panicked = || ServeError::UblkDevice("a thread of a ublk queue has ended".into());
    (0..queues).try_for_each(|_| starts.recv().map_err(|_| panicked())?)
}

/// Deletes the device that the last server of the pool with `identity` left. Returns its path, or
/// `None` if there is none.
///
/// # Errors
/// [`ServeError::NoUblk`], or [`ServeError::UblkDevice`] if a server still has the device.
pub fn delete_left(identity: &str) -> Result<Option<PathBuf>, ServeError> {
    let mut driver = Driver::open()?;
    let Some(found) = driver.find(mark_of(identity))? else { return Ok(None) };
    let path = block_path(found.number);
    if !is_dead(&found) {
        if found.state != state::QUIESCED {
            let (path, pid) = (path.display(), found.server_pid);
            let what = format!("{path} is served by process {pid}; stop that first");
            return Err(ServeError::UblkDevice(what));
        }
        driver.stop(found.number)?;
    }
    driver.delete(found.number)?;
    Ok(Some(path))
}
