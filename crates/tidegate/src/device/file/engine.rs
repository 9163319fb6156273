//! Started requests of a file device: one thread a device hands them to an `io_uring` and completes
//! them.
//!
//! Invariants:
//! 1. The thread starts with the first request and ends with the device, once all requests that
//!    were started are complete.
//! 2. The thread waits for the ring only. New requests, the end of the device, and flushes of other
//!    threads wake it by an eventfd.
//! 3. A flush goes through the device's gate (`gate`): flushes that wait together share one.
//! 4. A forced write is as in `direct` and `buffered`: around the page cache one command, through
//!    the page cache a write and a flush.

use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::fd::AsFd;
use rustix::io::Errno;

use super::gate::{Call, Turn};
use super::uring::{Flights, Force, Started, Stop};
use super::{Backing, Transfer};
use crate::device::wake::Inbox;
use crate::device::{AsyncRequest, Context, Operation, OwnedOperation};
use crate::durable;

/// The thread and the way to it.
pub(super) struct Engine {
    inbox: Arc<Inbox<Started>>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the thread.
    ///
    /// # Errors
    /// Fails if the system has no ring, no descriptor or no thread.
    pub(super) fn start(backing: &Arc<Backing>, transfer: Transfer) -> rustix::io::Result<Self> {
        let inbox = Arc::new(Inbox::new()?);
        let runner = Runner {
            backing: Arc::clone(backing),
            transfer,
            inbox: Arc::clone(&inbox),
            flights: Flights::new()?,
            waiting: Vec::new(),
            is_flushing: false,
        };
        let name = "device-ring".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(move || runner.run());
        let thread = spawned.map_err(|error| super::errno_of(&error))?;
        backing.gate.wake_after_flushes(Arc::clone(&inbox.wake));
        Ok(Self { inbox, thread: Some(thread) })
    }

    /// Gives `request`, which is checked and not empty, to the thread. Returns it if the thread has
    /// failed.
    pub(super) fn submit(&self, started: Started) -> Option<AsyncRequest> {
        self.inbox.add(started).map(|started| started.request)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.inbox.stop(self.thread.take());
    }
}

/// A flush, or a forced write whose data is written, that the gate knows by the number `job`.
struct Waiting {
    request: AsyncRequest,
    job: u64,
}

/// The thread.
struct Runner {
    backing: Arc<Backing>,
    transfer: Transfer,
    inbox: Arc<Inbox<Started>>,
    flights: Flights,
    /// Requests that wait at the gate.
    waiting: Vec<Waiting>,
    /// A flush of the gate is among the flights, as a request of its own.
    is_flushing: bool,
}

impl Runner {
    fn run(mut self) {
        let unit = self.backing.geometry.block_bytes as usize;
        let mut landed = Vec::new();
        loop {
            let is_stopping = self.take_new();
            self.pass_gate();
            if is_stopping && self.flights.is_empty() && self.waiting.is_empty() {
                return;
            }
            let wake = Arc::clone(&self.inbox.wake);
            let file = self.backing.file();
            if let Err(errno) = self.flights.turn(&file, unit, wake.as_fd(), &mut landed) {
                return self.give_up(errno);
            }
            for (started, end) in landed.drain(..) {
                self.finish(started, end);
            }
        }
    }

    /// Takes the new requests in. Returns whether the device has ended.
    fn take_new(&mut self) -> bool {
        let (requests, is_stopping) = self.inbox.take();
        for mut started in requests {
            match started.request.operation() {
                Operation::Flush => self.ask(started, Call::Flush),
                Operation::Write { flags, .. } => {
                    let is_direct = self.transfer == Transfer::Direct;
                    let force = if flags.fua && is_direct { Force::Yes } else { Force::No };
                    self.flights.add(started, force);
                }
                _ => self.flights.add(started, Force::No),
            }
        }
        is_stopping
    }

    fn ask(&mut self, Started { request, moment }: Started, call: Call) {
        let job = self.backing.gate.ask(call, moment);
        self.waiting.push(Waiting { request, job });
    }

    /// Completes the requests that the gate answers, and starts the next flush.
    fn pass_gate(&mut self) {
        for Waiting { request, job } in std::mem::take(&mut self.waiting) {
            match self.backing.gate.turn(job) {
                Turn::Answered(answer) => {
                    request.complete(answer.map_err(|failure| self.backing.flush_failed(failure)));
                }
                Turn::Wait => self.waiting.push(Waiting { request, job }),
                Turn::Run => {
                    self.make_flush();
                    self.waiting.push(Waiting { request, job });
                }
            }
        }
    }

    /// Flushes the file by a request of its own, whose end the gate gets.
    fn make_flush(&mut self) {
        self.is_flushing = true;
        let request = AsyncRequest::new(OwnedOperation::Flush, Context::default(), |_, _| {});
        let moment = self.backing.gate.now();
        self.flights.add(Started { request, moment }, Force::No);
    }

    /// Ends the transfer of a request. A forced write through the page cache still needs a flush.
    fn finish(&mut self, mut started: Started, end: Result<(), Stop>) {
        let (offset, len) = started.request.operation().range();
        let (what, is_write, fua) = match started.request.operation() {
            Operation::Read { .. } => ("read", false, false),
            Operation::Write { flags, .. } => ("write", true, flags.fua),
            _ => return self.finish_flush(end),
        };
        match end {
            Ok(()) if fua && self.transfer == Transfer::Buffered => {
                self.ask(started, Call::ForcedWrite);
            }
            Ok(()) => {
                if is_write && !fua {
                    self.backing.gate.wrote(started.moment);
                }
                started.request.complete(Ok(()));
            }
            Err(stop) => {
                let forced = fua && self.transfer == Transfer::Direct;
                let error = self.backing.transfer_failed(what, offset, len, stop, forced);
                started.request.complete(Err(error));
            }
        }
    }

    fn finish_flush(&mut self, end: Result<(), Stop>) {
        self.is_flushing = false;
        let outcome = end.map_err(|stop| match stop {
            Stop::Os(errno) => errno,
            Stop::Ended { .. } => Errno::IO,
        });
        // The ring's sync makes no such check.
        let checked = |()| durable::failure(&*self.backing.file()).map_or(Ok(()), Err);
        self.backing.gate.finish(outcome.and_then(checked));
    }

    /// Fails all requests, as the ring failed.
    fn give_up(mut self, errno: Errno) {
        if self.is_flushing {
            self.finish_flush(Err(Stop::Os(errno)));
        }
        // New requests run on the pool of threads.
        let new = self.inbox.close().into_iter().map(|started| started.request);
        let waiting = self.waiting.drain(..).map(|it| it.request);
        let requests: Vec<_> =
            self.flights.abandon().into_iter().chain(waiting).chain(new).collect();
        for request in requests {
            request.complete(Err(self.backing.failed("io_uring", 0, 0, errno)));
        }
    }
}
