//! The supervisor's handle for the cleaner's thread: starts, asks and ends it, gets its events.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Pid;
use tidegate::log::Log;

use super::super::allocator::Allocator;
use super::super::stats::CleanerCounts;
use super::Worker;

/// How long the kernel may take to release the lock of a supervisor that died.
const SUPERVISION_TIMEOUT: Duration = Duration::from_secs(10);

/// A report of the thread.
#[derive(Debug)]
pub(crate) enum Event {
    /// A message for the user.
    Notice(String),
    /// A copy is mounted beside a file system of the log, whose stories must be ended.
    Copied,
    /// The log was retired as [`Cleaner::retire_all`] asked.
    Retired {
        /// The ticket of the request.
        ticket: u64,
        /// Bytes that became free, or the reason why the log cannot be retired now.
        result: Result<u64, String>,
    },
}

/// A request to the thread.
#[derive(Debug)]
pub(super) enum Job {
    /// Repair the interrupted operations of a process that has ended.
    Ended(Pid),
    /// Read the mounts again.
    Mounts,
    /// Retire all present records of the log.
    RetireAll {
        ticket: u64,
    },
    Stop,
}

/// The cleaner of a log.
pub(crate) struct Cleaner {
    log: Arc<Log>,
    jobs: Arc<Mutex<VecDeque<Job>>>,
    events: Receiver<Event>,
    ready: Arc<OwnedFd>,
    counts: Arc<CleanerCounts>,
    thread: JoinHandle<()>,
}

impl AsFd for Cleaner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

impl Cleaner {
    /// Starts the thread, which takes the right to clean `log`.
    ///
    /// # Errors
    /// Fails if no thread or descriptor is left, or another process cleans the log.
    pub(crate) fn start(log: Arc<Log>, allocator: Allocator) -> io::Result<Self> {
        let jobs = Arc::new(Mutex::new(VecDeque::new()));
        let (sender, events) = channel();
        let ready = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let counts = Arc::new(CleanerCounts::default());
        let (started, wait_started) = channel();
        let reports = Events { sender, ready: Arc::clone(&ready) };
        let mut worker = Worker::new(&log, &jobs, &counts, reports, allocator);
        let thread = std::thread::Builder::new().name("cleaner".into()).spawn(move || {
            let log = Arc::clone(&worker.log);
            let supervision = log.ring().supervise(SUPERVISION_TIMEOUT);
            // The starting thread waits for this.
            let _ = started.send(supervision.is_ok());
            if supervision.is_ok() {
                worker.take_over();
                worker.run();
            }
        })?;
        if wait_started.recv() != Ok(true) {
            return Err(io::Error::other("another process cleans the log"));
        }
        Ok(Self { log, jobs, events, ready, counts, thread })
    }

    /// Makes the thread repair the interrupted operations of a process that has ended.
    pub(crate) fn process_ended(&self, process: Pid) {
        self.post(Job::Ended(process));
    }

    /// Makes the thread read the mounts again.
    pub(crate) fn mounts_changed(&self) {
        self.post(Job::Mounts);
    }

    /// Makes the thread retire all present records of the log. [`Event::Retired`] reports the end.
    pub(crate) fn retire_all(&self, ticket: u64) {
        self.post(Job::RetireAll { ticket });
    }

    /// Returns the events since the last call.
    pub(crate) fn events(&self) -> Vec<Event> {
        // If there is nothing to read, it was read before.
        let _ = rustix::io::read(&*self.ready, &mut [0_u8; 8]);
        self.events.try_iter().collect()
    }

    /// Returns the log.
    pub(crate) fn log(&self) -> &Arc<Log> {
        &self.log
    }

    /// Returns the cleaner's counters.
    pub(crate) fn counts(&self) -> &CleanerCounts {
        &self.counts
    }

    /// Ends the thread, and returns the log.
    pub(crate) fn stop(self) -> Arc<Log> {
        self.post(Job::Stop);
        // A panic of the thread was printed; the log still has all records that were not destaged.
        let _ = self.thread.join();
        self.log
    }

    fn post(&self, job: Job) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).push_back(job);
        self.log.ring().wake_cleaner();
    }
}

/// The thread's way to report to the supervisor's loop.
pub(super) struct Events {
    pub(super) sender: Sender<Event>,
    pub(super) ready: Arc<OwnedFd>,
}

impl Events {
    pub(super) fn send(&self, event: Event) {
        // The receiver is gone only after the thread.
        let _ = self.sender.send(event);
        // Adds to the counter of the event: any number but 0 will do, in any byte order.
        let _ = rustix::io::write(&*self.ready, &[1_u8; 8]);
    }
}
