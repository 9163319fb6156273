//! The handle by which the supervisor's loop starts, asks, hears and ends the cleaner's thread.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Pid;
use tidegate::log::{FileRef, Log};

use super::super::absorbed::AbsorbedFiles;
use super::super::allocator::Allocator;
use super::super::leases::Leases;
use super::super::stats::CleanerCounts;
use super::Worker;

/// How long a process may take to settle a file itself, when no supervisor lives.
const PATIENCE_WITH_SETTLING: Duration = Duration::from_secs(60);

/// What the thread has to say.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Something that people should know.
    Notice(String),
    /// The log was retired as [`Cleaner::retire_all`] asked.
    Retired {
        /// Who asked.
        ticket: u64,
        /// Bytes that became free, or why it cannot be done now.
        result: Result<u64, String>,
    },
    /// A file was settled as [`Cleaner::settle`] asked.
    Settled {
        /// Who asked.
        ticket: u64,
        /// Or why it cannot be done now.
        result: Result<(), String>,
    },
}

/// What the thread is told.
#[derive(Debug)]
pub(super) enum Job {
    Ended(Pid),
    Settle { file: FileRef, ticket: Option<u64> },
    RetireAll { ticket: u64 },
    Stop,
}

/// The cleaner of a log.
pub(crate) struct Cleaner {
    log: Arc<Log>,
    jobs: Arc<Mutex<VecDeque<Job>>>,
    outcomes: Receiver<Outcome>,
    ready: Arc<OwnedFd>,
    counts: Arc<CleanerCounts>,
    leases: Leases,
    thread: JoinHandle<()>,
}

impl AsFd for Cleaner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

impl Cleaner {
    /// Starts the thread, which takes the right to clean `log`. `leases` are those of a supervisor that died.
    ///
    /// # Errors
    /// No thread or descriptor is left, or somebody else cleans the log.
    pub(crate) fn start(log: Arc<Log>, allocator: Allocator, leases: Leases) -> io::Result<Self> {
        let jobs = Arc::new(Mutex::new(VecDeque::new()));
        let (sender, outcomes) = channel();
        let ready = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let counts = Arc::new(CleanerCounts::default());
        let voice = Voice { sender, ready: Arc::clone(&ready) };
        let (started, wait_started) = channel();
        let absorbed = AbsorbedFiles::new(&log, leases.clone());
        let mut worker = Worker::new(&log, &jobs, &counts, voice, (allocator, absorbed));
        let thread = std::thread::Builder::new().name("cleaner".into()).spawn(move || {
            let log = Arc::clone(&worker.log);
            let supervision = log.supervise(PATIENCE_WITH_SETTLING);
            // Whoever starts the thread waits for this.
            let _ = started.send(supervision.is_ok());
            if supervision.is_ok() {
                worker.absorbed.note_settled();
                worker.run();
            }
        })?;
        if wait_started.recv() != Ok(true) {
            return Err(io::Error::other("another process cleans the log"));
        }
        Ok(Self { log, jobs, outcomes, ready, counts, leases, thread })
    }

    /// The process ended: what it left half done is to be done.
    pub(crate) fn process_ended(&self, process: Pid) {
        self.post(Job::Ended(process));
    }

    /// Has the kernel told of all that was kept from it about a file.
    pub(crate) fn settle(&self, file: FileRef, ticket: Option<u64>) {
        self.post(Job::Settle { file, ticket });
    }

    /// The leases on absorbed files.
    pub(crate) fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Has all records retired that the log has by now.
    pub(crate) fn retire_all(&self, ticket: u64) {
        self.post(Job::RetireAll { ticket });
    }

    /// What the thread has said since this was called last.
    pub(crate) fn outcomes(&self) -> Vec<Outcome> {
        // Nothing to read means that it was read before.
        let _ = rustix::io::read(&*self.ready, &mut [0_u8; 8]);
        self.outcomes.try_iter().collect()
    }

    /// The log.
    pub(crate) fn log(&self) -> &Arc<Log> {
        &self.log
    }

    /// What was counted here.
    pub(crate) fn counts(&self) -> &CleanerCounts {
        &self.counts
    }

    /// Ends the thread.
    pub(crate) fn stop(self) -> Arc<Log> {
        self.post(Job::Stop);
        // A panic of the thread was printed; the log has all that it did not write back.
        let _ = self.thread.join();
        self.log
    }

    fn post(&self, job: Job) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).push_back(job);
        self.log.wake_cleaner();
    }
}

/// How the thread reaches the supervisor's loop.
pub(super) struct Voice {
    pub(super) sender: Sender<Outcome>,
    pub(super) ready: Arc<OwnedFd>,
}

impl Voice {
    pub(super) fn say(&self, outcome: Outcome) {
        // The receiver is gone only after the thread.
        let _ = self.sender.send(outcome);
        // Any number but 0 in any byte order will do.
        let _ = rustix::io::write(&*self.ready, &[1_u8; 8]);
    }
}
