//! A copy of a served pool, or of its backing, as it is at one instant.
//!
//! Invariants:
//! 1. Changes of clients wait for at most [`HOLD`] until the instant has come, and later for at
//!    most [`WAIT`] until the old data is saved. A copy that cannot keep these limits ends.
//! 2. The thread that answers the client waits for no disk while it watches the copy.
//! 3. A file gets the requested name only once it holds the whole copy durably.

mod partial;

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use partial::Partial;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tidegate::device::moment::{Claim, Moment};
use tidegate::device::wake::Wake;
use tidegate::device::{BlockDevice, BlockDeviceExt};
use tidegate::stack::StackError;

use crate::served::Served;

/// Longest wait of changes for earlier ones to end before the instant of the copy.
const HOLD: Duration = Duration::from_secs(10);
/// Longest wait of a change until the old data is saved.
const WAIT: Duration = Duration::from_secs(20);
/// Threads that save the old data that changes wait for.
const SAVERS: usize = 4;
/// Interval of checks of the changes' waits.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A copy that was made.
pub(crate) struct Made {
    pub(crate) bytes: u64,
    /// Time that all writes of clients had to wait.
    pub(crate) held: Duration,
    /// The backing that was copied, or `None` if the pool was.
    pub(crate) backing: Option<String>,
}

impl Served {
    /// Copies the pool to `file`, or, if a backing has a part of the data, the whole device as one
    /// file. Changes of clients are held back for an instant, which the copy shows. Later, old data
    /// is saved before a change replaces it.
    ///
    /// # Errors
    /// The pool is no file; `file` exists already; a tier or a disk fails; a change waits too long;
    /// the client at `client` has disconnected, or the server stops.
    pub(crate) fn copy_to(&self, file: &Path, client: BorrowedFd<'_>) -> Result<Made> {
        let (pool, to) = (self.plan.pool.display(), file.display());
        if self.stack.description().backing.is_none() {
            self.check_pool_file()?;
        }
        let partial = Partial::create(file)?;
        let made = self.watch_copy(&partial.file, client);
        let made = made.with_context(|| format!("cannot copy {pool} to {to}"))?;
        partial.publish(file)?;
        Ok(made)
    }

    fn check_pool_file(&self) -> Result<()> {
        let pool = self.plan.pool.display();
        if !self.file.metadata().is_ok_and(|found| found.is_file()) {
            bail!("{pool} is a device, which cannot be read as a file: stop its server to copy it");
        }
        Ok(())
    }

    /// Starts threads that copy to `copy`, and ends the copy if the client has disconnected or a
    /// change waits too long. A thread may then still wait for a disk that does not answer.
    fn watch_copy(&self, copy: &File, client: BorrowedFd<'_>) -> Result<Made> {
        let moment = Arc::new(Moment::new(self.gate.geometry().size_bytes()));
        let (tell, told) = channel();
        let ends = Arc::new(Wake::new()?);
        let (served, copied) = (self.clone(), Arc::clone(&moment));
        let (copy, ended) = (copy.try_clone()?, WakeAtEnd(Arc::clone(&ends)));
        let run = move || {
            let _ended = ended;
            let made = served.copy_moment(&copied, &copy);
            served.gate.end(&copied);
            // The receiver may have given up.
            let _ = tell.send(made);
        };
        std::thread::Builder::new().name("snapshot".into()).spawn(run)?;
        let ended = self.await_end(&moment, &ends, client);
        self.gate.end(&moment);
        ended?;
        told.recv().unwrap_or_else(|_| bail!("the thread that copies has failed"))
    }

    /// Waits until `ends` signals the end of the copy.
    ///
    /// # Errors
    /// Returns the reason to end the copy early.
    fn await_end(&self, moment: &Moment, ends: &Wake, client: BorrowedFd<'_>) -> Result<()> {
        loop {
            let mut ready = [
                PollFd::new(ends, PollFlags::IN),
                PollFd::new(&self.stop, PollFlags::IN),
                // The client hangs up.
                PollFd::from_borrowed_fd(client, PollFlags::empty()),
            ];
            match poll(&mut ready, Some(&LOOK)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let [has_ended, stops, is_gone] = ready.map(|it| !it.revents().is_empty());
            if has_ended {
                return Ok(());
            }
            ensure!(!stops, "the server stops");
            ensure!(!is_gone, "the client is gone");
            let waited = moment.longest_wait().unwrap_or_default();
            ensure!(
                waited <= WAIT,
                "a write of a client has waited {} s for the copy: the disk of the copy or the \
                 device that is copied is too slow for it",
                WAIT.as_secs()
            );
        }
    }

    /// Holds changes back for the instant, and copies the device's content at that instant.
    fn copy_moment(&self, moment: &Arc<Moment>, copy: &File) -> Result<Made> {
        let Self { gate, stack, .. } = self;
        let backing = stack.description().backing.clone();
        if backing.is_none() {
            // Most of the data in the tiers above the pool is flushed while writes go on.
            gate.below().flush()?;
        }
        let began = Instant::now();
        let held = gate.hold(HOLD).with_context(|| {
            format!("requests that were begun have not ended in {} s", HOLD.as_secs())
        })?;
        if backing.is_none() {
            gate.below().flush()?;
        }
        let original = stack.original(self.file.metadata()?.len())?;
        held.keep(Arc::clone(moment));
        drop(held);
        let held = began.elapsed();
        let end_at_failure =
            |copied: std::result::Result<(), StackError>| copied.inspect_err(|_| gate.end(moment));
        let save = || end_at_failure(original.copy(gate, moment, Claim::Wanted, copy));
        std::thread::scope(|scope| {
            let savers: Vec<_> = (0..SAVERS).map(|_| scope.spawn(save)).collect();
            let rest = original.begin(copy).and_then(|()| {
                if backing.is_some() {
                    stack.destage()?;
                }
                original.copy(gate, moment, Claim::Any, copy)
            });
            let rest = end_at_failure(rest);
            let saved = savers.into_iter().map(|saver| saver.join().unwrap_or(Ok(())));
            saved.chain([rest]).collect::<std::result::Result<(), StackError>>()
        })?;
        ensure!(moment.is_whole(), "the copy was ended");
        copy.sync_all()?;
        Ok(Made { bytes: original.bytes(), held, backing })
    }
}

/// Wakes the waiting thread at the end of this one, also after a panic.
struct WakeAtEnd(Arc<Wake>);

impl Drop for WakeAtEnd {
    fn drop(&mut self) {
        self.0.wake();
    }
}
