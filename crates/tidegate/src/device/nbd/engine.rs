//! The thread of a device: it sends requests, receives replies, completes requests, and reconnects.
//!
//! Invariants:
//! 1. The thread ends with the device, once all started requests are complete. A request fails
//!    when the server has been silent or gone for the time limit.
//! 2. The thread waits for the socket, for new requests, for the earliest deadline of a request,
//!    and for the next attempt to connect. Without requests, its wait has no time limit.
//! 3. The thread reconnects when a request needs it: at once after a loss, then after
//!    [`PAUSE_FIRST`], and after twice as long each time up to the [longest](Server::pause_max).
//!    Received data resets the pause.

#![expect(clippy::disallowed_methods, reason = "time limits and pauses are made of time")]

use std::io::IoSlice;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use rustix::time::Timespec;

use super::dial::{Endpoints, read_ranges};
use super::error::NbdError;
use super::exchange::{Exchange, Started};
use super::export::Rules;
use super::protocol::{Request, cmd};
use super::watched::{Part, Watch, Watched};
use crate::device::AsyncRequest;
use crate::device::error::with_causes;
use crate::device::flushes::Clock;
use crate::device::wake::Inbox;

/// The pause before the second attempt to connect.
const PAUSE_FIRST: Duration = Duration::from_millis(10);
/// The longest pause between two attempts, whatever the time limit.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Most bytes received by one call.
const INPUT_BYTES: usize = 256 << 10;

/// The server of a device, and how to reach it.
pub(super) struct Server {
    pub(super) endpoints: Endpoints,
    /// The requested name of the export.
    pub(super) export: String,
    /// The rules that every connection must fulfil.
    pub(super) rules: Rules,
    /// What shows that it is the same export.
    pub(super) watch: Option<&'static Watch>,
    /// The longest silence of the server.
    pub(super) timeout: Duration,
}

impl Server {
    /// Returns TCP's time limit, which leaves time for another connection within a request's time.
    pub(super) fn give_up_after(timeout: Duration) -> Duration {
        timeout / 2
    }

    /// Returns the longest pause between two attempts to connect.
    ///
    /// An attempt ends with the time of the request that needs it. Pauses as long as the time limit
    /// could begin each attempt at the end of a request's time, and so no attempt would succeed.
    fn pause_max(&self) -> Duration {
        PAUSE_MAX.min(self.timeout / 4)
    }

    /// Reads the watched ranges of the export over a new connection, until `until`.
    pub(super) fn read_watched(
        &self,
        socket: &OwnedFd,
        until: Option<Instant>,
    ) -> Result<Vec<Part>, NbdError> {
        let Some(watch) = self.watch else { return Ok(Vec::new()) };
        let ranges = (watch.ranges)(self.rules.export.size_bytes);
        read_ranges(socket, ranges, self.rules.request_bytes_max, until)
    }
}

/// The thread and the way to it.
pub(super) struct Engine {
    inbox: Arc<Inbox<Started>>,
    clock: Clock,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the thread with the first connection to `server`, whose export has the sectors
    /// `watched`. Errors call the device `name`.
    ///
    /// # Errors
    /// Fails if the system has no descriptor or no thread.
    pub(super) fn start(
        name: &str,
        server: Server,
        socket: OwnedFd,
        watched: Watched,
    ) -> Result<Self, NbdError> {
        let inbox = Arc::new(Inbox::new().map_err(NbdError::os("make an event"))?);
        let exchange = Exchange::new(name, server.rules.clone(), watched, server.timeout);
        let clock = exchange.clock();
        let runner = Runner {
            server,
            exchange,
            inbox: Arc::clone(&inbox),
            link: Link::Up(socket),
            reason: "the server is connected, and silent".into(),
            pause: Duration::ZERO,
            input: vec![0; INPUT_BYTES],
        };
        let spawned = std::thread::Builder::new().name("device-nbd".into()).spawn(|| runner.run());
        let failed = |source| NbdError::Io { action: "start a thread", source };
        Ok(Self { inbox, clock, thread: Some(spawned.map_err(failed)?) })
    }

    /// Gives `request`, which is checked and not empty, to the thread.
    pub(super) fn submit(&self, request: AsyncRequest) {
        let moment = self.clock.now();
        let since = Instant::now();
        // This inbox is never closed.
        let _ = self.inbox.add(Started { request, since, moment });
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.inbox.stop(self.thread.take());
    }
}

/// The connection to the server.
enum Link {
    Up(OwnedFd),
    /// No attempt to connect before this time.
    Down(Instant),
}

/// The thread.
struct Runner {
    server: Server,
    exchange: Exchange,
    inbox: Arc<Inbox<Started>>,
    link: Link,
    /// What requests currently wait for; errors quote it.
    reason: String,
    /// The pause before the next attempt to connect.
    pause: Duration,
    input: Vec<u8>,
}

impl Runner {
    fn run(mut self) {
        loop {
            let is_stopping = self.take_new();
            self.exchange.fail_doomed();
            self.expire();
            if is_stopping && self.exchange.is_idle() {
                return self.say_goodbye();
            }
            match self.turn() {
                Ok(()) => {}
                Err(error) => self.lose(&error),
            }
        }
    }

    /// Takes the new requests in. Returns whether the device has ended.
    fn take_new(&mut self) -> bool {
        let (requests, is_stopping) = self.inbox.take();
        for started in requests {
            self.exchange.add(started);
        }
        is_stopping
    }

    /// Fails requests when the server has been silent for the time limit.
    fn expire(&mut self) {
        let is_due = self.exchange.deadline().is_some_and(|at| at <= Instant::now());
        if is_due && self.exchange.expire(Instant::now(), &self.reason) {
            self.lose(&NbdError::Silent(self.server.timeout));
        }
    }

    /// Sends and receives, or connects, then waits for the next event.
    fn turn(&mut self) -> Result<(), NbdError> {
        match self.link {
            Link::Up(_) => {
                let is_sent = self.send()?;
                let events = if is_sent { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
                if self.wait(events, None)? {
                    self.receive()?;
                }
            }
            Link::Down(_) if self.exchange.is_idle() => drop(self.wait(PollFlags::empty(), None)?),
            Link::Down(until) if until > Instant::now() => {
                self.wait(PollFlags::empty(), Some(until))?;
            }
            Link::Down(_) => self.connect()?,
        }
        Ok(())
    }

    /// Sends as much as the socket takes. Returns whether nothing is left.
    fn send(&mut self) -> Result<bool, NbdError> {
        let Link::Up(socket) = &self.link else { return Ok(true) };
        loop {
            self.exchange.prepare();
            let parts = self.exchange.to_send();
            if parts.is_empty() {
                return Ok(true);
            }
            match send_parts(socket, &parts) {
                Ok(sent) => self.exchange.sent(sent),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(NbdError::os("send to the server")(errno)),
            }
        }
    }

    /// Receives available data.
    fn receive(&mut self) -> Result<(), NbdError> {
        let Link::Up(socket) = &self.link else { return Ok(()) };
        match rustix::net::recv(socket, &mut self.input[..], RecvFlags::empty()) {
            Ok((0, _)) => Err(NbdError::Closed),
            Ok((received, _)) => {
                self.pause = Duration::ZERO;
                self.exchange.receive(&self.input[..received], Instant::now())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => Err(NbdError::os("receive from the server")(errno)),
        }
    }

    /// Waits for `events` of the socket, a new request, the earliest deadline of a request, or
    /// `until`. Returns whether the socket has data or an error.
    fn wait(&self, events: PollFlags, until: Option<Instant>) -> Result<bool, NbdError> {
        let until = [self.exchange.deadline(), until].into_iter().flatten().min();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let wake = PollFd::new(&*self.inbox.wake, PollFlags::IN);
        let polled = match &self.link {
            Link::Up(socket) => {
                let mut fds = [wake, PollFd::new(socket, events)];
                let polled = poll(&mut fds, left.as_ref());
                polled.map(|_| !fds[1].revents().difference(PollFlags::OUT).is_empty())
            }
            Link::Down(_) => poll(&mut [wake], left.as_ref()).map(|_| false),
        };
        match polled {
            Ok(is_readable) => Ok(is_readable),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(NbdError::os("wait for the server")(errno)),
        }
    }

    fn connect(&mut self) -> Result<(), NbdError> {
        let Server { endpoints, export, rules, watch, timeout } = &self.server;
        let (until, give_up_after) = (self.exchange.deadline(), Server::give_up_after(*timeout));
        let (socket, now) = endpoints.dial(export, until, give_up_after)?;
        rules.check_again(&now)?;
        if let Some(watch) = watch {
            let found = self.server.read_watched(&socket, until)?;
            self.exchange.watched().reconnect(&found, watch.describe)?;
        }
        self.link = Link::Up(socket);
        self.reason = "the server is connected again, and silent".into();
        Ok(())
    }

    /// Handles the loss of the connection, or a failed attempt; `error` is the reason.
    fn lose(&mut self, error: &NbdError) {
        self.exchange.lose_connection();
        self.reason = with_causes(error);
        self.link = Link::Down(Instant::now() + self.pause);
        self.pause = (self.pause * 2).max(PAUSE_FIRST).min(self.server.pause_max());
    }

    /// Tells the server that no more requests come; no request is in flight.
    fn say_goodbye(&self) {
        if let Link::Up(socket) = &self.link {
            let (flags, cookie, offset, len) = (0, 0, 0, 0);
            let goodbye = Request { flags, command: cmd::DISC, cookie, offset, len }.encode();
            // A server that does not get the message sees the end of the connection.
            let _ = rustix::net::send(socket, &goodbye, SendFlags::NOSIGNAL);
        }
    }
}

fn send_parts(socket: &OwnedFd, parts: &[IoSlice<'_>]) -> rustix::io::Result<usize> {
    let mut control = SendAncillaryBuffer::default();
    rustix::net::sendmsg(socket, parts, &mut control, SendFlags::NOSIGNAL)
}
