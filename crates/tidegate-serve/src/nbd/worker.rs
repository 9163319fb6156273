//! The shared pool of threads that runs requests which would hold up a connection's own thread.
//!
//! Invariants: every submitted job leads to exactly one [`Done`] in its mailbox, also if the device
//! panics; a connection's thread is woken when its mailbox turns from empty to not empty.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use tidegate::device::{self, BlockDevice, DeviceError, DeviceErrorKind, Extent};

use super::ServeError;
use super::buffer::Payload;
use super::transmission::{Action, Command, control};

/// An event that another thread can wait for with `poll`.
pub(super) struct Wake(OwnedFd);

impl Wake {
    /// # Errors
    /// The system has no more descriptors.
    pub(super) fn new() -> Result<Self, ServeError> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|error| ServeError::io("cannot make an eventfd", error))
    }

    /// Lets the waiting thread go on. The write fails only where the count is full: it is readable then.
    #[expect(clippy::host_endian_bytes, reason = "the kernel takes the number as it is in memory")]
    pub(super) fn wake(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Takes the event back, if it was there.
    pub(super) fn reset(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A finished job.
pub(super) struct Done {
    /// What was to be done.
    pub(super) command: Command,
    /// How it went; extents for block status.
    pub(super) result: device::Result<Vec<Extent>>,
    /// Its data: what was read, for a read.
    pub(super) payload: Option<Payload>,
}

/// Where a connection finds its finished jobs.
pub(super) struct Mailbox {
    done: Mutex<Vec<Done>>,
    has_mail: AtomicBool,
    wake: Wake,
}

impl Mailbox {
    /// # Errors
    /// The system has no more descriptors.
    pub(super) fn new() -> Result<Self, ServeError> {
        let (done, has_mail) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self { done, has_mail, wake: Wake::new()? })
    }

    /// The event that says that there is something to look at.
    pub(super) fn wake(&self) -> &Wake {
        &self.wake
    }

    /// Moves what is finished to `into`, which is empty.
    pub(super) fn collect(&self, into: &mut Vec<Done>) {
        if self.has_mail.load(Ordering::Acquire) {
            let mut done = self.done.lock();
            self.has_mail.store(false, Ordering::Relaxed);
            std::mem::swap(&mut *done, into);
        }
    }

    fn post(&self, done: Done) {
        let mut mail = self.done.lock();
        mail.push(done);
        if !self.has_mail.swap(true, Ordering::Release) {
            self.wake.wake();
        }
    }
}

/// A request for a worker.
pub(super) struct Job {
    /// The device to work on.
    pub(super) device: Arc<dyn BlockDevice>,
    /// What to do.
    pub(super) command: Command,
    /// The data of a write, or room for that of a read.
    pub(super) payload: Option<Payload>,
    /// Where the answer goes.
    pub(super) mailbox: Arc<Mailbox>,
}

impl Job {
    /// Does the job and posts how it went.
    pub(super) fn run(mut self) {
        let result = catch_unwind(AssertUnwindSafe(|| self.work()))
            .unwrap_or_else(|_| Err(DeviceError::new(DeviceErrorKind::Io, "the device panicked")));
        self.mailbox.post(Done { command: self.command, result, payload: self.payload });
    }

    fn work(&mut self) -> device::Result<Vec<Extent>> {
        let (device, command) = (&*self.device, &self.command);
        match (command.action, &mut self.payload) {
            (Action::Read, Some(payload)) => device.read(command.offset, payload.data_mut())?,
            (Action::Write(flags), Some(payload)) => {
                device.write(command.offset, payload.data(), flags)?;
            }
            (Action::Control(what), _) => return control(device, command, what),
            _ => {}
        }
        Ok(Vec::new())
    }
}

/// The threads. They end when this and all copies of the sender are gone.
pub(super) struct Workers {
    jobs: Sender<Job>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts `count` threads, at least one.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(super) fn start(count: usize) -> Result<Self, ServeError> {
        let (jobs, queue) = unbounded::<Job>();
        let threads = (0..count.max(1)).map(|_| spawn(queue.clone())).collect::<Result<_, _>>()?;
        Ok(Self { jobs, threads })
    }

    /// Where jobs go.
    pub(super) fn sender(&self) -> Sender<Job> {
        self.jobs.clone()
    }

    /// Waits until all jobs are done and all threads have ended; every other sender must be gone.
    pub(super) fn join(self) {
        drop(self.jobs);
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

fn spawn(queue: Receiver<Job>) -> Result<JoinHandle<()>, ServeError> {
    std::thread::Builder::new()
        .name("nbd-worker".into())
        .spawn(move || queue.iter().for_each(Job::run))
        .map_err(|error| ServeError::io("cannot start a worker thread", error))
}
