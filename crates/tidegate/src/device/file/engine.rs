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

use super::gate::{Failure, Turn};
use super::uring::{Flights, Force, Stop};
use super::{Backing, Transfer};
use crate::device::wake::Inbox;
use crate::device::{AsyncRequest, Operation, OwnedOperation};

/// The thread and the way to it.
pub(super) struct Engine {
    inbox: Arc<Inbox<AsyncRequest>>,
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
            flushes: Vec::new(),
        };
        let name = "device-ring".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(move || runner.run());
        let thread = spawned.map_err(|error| super::errno_of(&error))?;
        backing.gate.wake_after_flushes(Arc::clone(&inbox.wake));
        Ok(Self { inbox, thread: Some(thread) })
    }

    /// Gives `request`, which is checked and not empty, to the thread. Returns it if the thread has
    /// failed.
    pub(super) fn submit(&self, request: AsyncRequest) -> Option<AsyncRequest> {
        self.inbox.add(request)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.inbox.stop(self.thread.take());
    }
}

/// A flush, or a forced write whose data is written, that needs the gate.
struct Flush {
    request: AsyncRequest,
    needed: u64,
}

/// The thread.
struct Runner {
    backing: Arc<Backing>,
    transfer: Transfer,
    inbox: Arc<Inbox<AsyncRequest>>,
    flights: Flights,
    /// Requests that wait at the gate.
    flushes: Vec<Flush>,
}

impl Runner {
    fn run(mut self) {
        let unit = self.backing.geometry.block_bytes as usize;
        let mut landed = Vec::new();
        loop {
            let is_stopping = self.take_new();
            self.pass_gate();
            if is_stopping && self.flights.is_empty() && self.flushes.is_empty() {
                return;
            }
            let wake = Arc::clone(&self.inbox.wake);
            let file = self.backing.file();
            if let Err(errno) = self.flights.turn(&file, unit, wake.as_fd(), &mut landed) {
                return self.give_up(errno);
            }
            for (request, end) in landed.drain(..) {
                self.finish(request, end);
            }
        }
    }

    /// Takes the new requests in. Returns whether the device has ended.
    fn take_new(&mut self) -> bool {
        let (requests, is_stopping) = self.inbox.take();
        for mut request in requests {
            match request.operation() {
                Operation::Flush => self.queue_flush(request),
                Operation::Write { flags, .. } => {
                    let is_direct = self.transfer == Transfer::Direct;
                    let force = if flags.fua && is_direct { Force::Yes } else { Force::No };
                    self.flights.add(request, force);
                }
                _ => self.flights.add(request, Force::No),
            }
        }
        is_stopping
    }

    fn queue_flush(&mut self, request: AsyncRequest) {
        self.flushes.push(Flush { request, needed: self.backing.gate.needed() });
    }

    /// Completes the flushes that the gate answers, and starts the next flush.
    fn pass_gate(&mut self) {
        for flush in std::mem::take(&mut self.flushes) {
            match self.backing.gate.begin(flush.needed) {
                Turn::Covered => flush.request.complete(Ok(())),
                Turn::Refused(errno) => {
                    let error = self.backing.flush_failed(Failure::Earlier(errno));
                    flush.request.complete(Err(error));
                }
                Turn::Wait => self.flushes.push(flush),
                Turn::Run => self.make_flush(flush.request),
            }
        }
    }

    /// Flushes the file for `request`, which may be a forced write, by a request of its own.
    fn make_flush(&mut self, request: AsyncRequest) {
        let context = request.context();
        let completion = move |_, result| request.complete(result);
        let sync = AsyncRequest::new(OwnedOperation::Flush, context, completion);
        self.flights.add(sync, Force::No);
    }

    /// Ends the transfer of `request`. A forced write through the page cache still needs a flush.
    fn finish(&mut self, mut request: AsyncRequest, end: Result<(), Stop>) {
        let (offset, len) = request.operation().range();
        let (what, fua) = match request.operation() {
            Operation::Read { .. } => ("read", false),
            Operation::Write { flags, .. } => ("write", flags.fua),
            _ => return self.finish_flush(request, end),
        };
        match end {
            Ok(()) if fua && self.transfer == Transfer::Buffered => self.queue_flush(request),
            Ok(()) => request.complete(Ok(())),
            Err(stop) => {
                let forced = fua && self.transfer == Transfer::Direct;
                let error = self.backing.transfer_failed(what, offset, len, stop, forced);
                request.complete(Err(error));
            }
        }
    }

    fn finish_flush(&mut self, request: AsyncRequest, end: Result<(), Stop>) {
        let outcome = end.map_err(|stop| match stop {
            Stop::Os(errno) => errno,
            Stop::Ended { .. } => Errno::IO,
        });
        let passed = self.backing.gate.finish(outcome);
        request.complete(passed.map_err(|failure| self.backing.flush_failed(failure)));
    }

    /// Fails all requests, as the ring failed.
    fn give_up(mut self, errno: Errno) {
        // New requests run on the pool of threads.
        let new = self.inbox.close();
        let waiting = self.flushes.drain(..).map(|flush| flush.request);
        let requests: Vec<_> =
            self.flights.abandon().into_iter().chain(waiting).chain(new).collect();
        for request in requests {
            request.complete(Err(self.backing.failed("io_uring", 0, 0, errno)));
        }
    }
}
