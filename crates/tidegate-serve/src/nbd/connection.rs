//! One client from greeting to goodbye: the event loop between its socket and its session.
//!
//! Invariants:
//! 1. The loop waits only in `poll`, on the socket and on the mailbox of completed requests.
//! 2. The loop receives only when everything received before has been handled, and handles only
//!    while few bytes wait to be sent, or with leased memory. So a client makes the server hold
//!    bounded memory.
//! 3. The connection stays among the server's connections until its last request is complete.
//!
//! Entry point: [`Connection::serve`].

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::time::Timespec;
use rustls::ServerConnection;

use super::buffer::{Input, Output};
use super::handshake::{Handshake, Negotiated, Step};
use super::member::Member;
use super::pace::{Due, Pace, Work};
use super::protocol::greeting;
use super::service::Service;
use super::session::{MemoryResult, Progress, Session};
use super::tls::TlsMode;
use super::transport::Transport;
use super::users::User;
use crate::budget::{Lease, Wakes};
use crate::payload::PayloadPool;

/// Time to look for the next request before sleeping: about as long as two wake-ups of an idle CPU.
const SPIN: Duration = Duration::from_micros(100);
/// Time of one look above which another thread must have run: a look takes a microsecond.
const CONTENDED: Duration = Duration::from_micros(10);

/// The log message if the system has no memory for a request.
const NO_MEMORY: &str = "there is no memory for the data of a request, which fails";
const MEMORY_AGAIN: &str = "there is memory for the data of requests";
const NO_MEMORY_ADVICE: &str = "give the server more, or less to its clients (--request-memory)";

/// Why a connection ended before its time.
pub(super) enum Fault {
    /// The client has closed its side without a goodbye, or took too long to stop.
    Gone,
    /// The client broke the protocol, or its socket failed, as the text tells.
    Broken(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Self::Gone,
            _ => Self::Broken(error.to_string()),
        }
    }
}

/// One client.
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub(super) struct Connection<'a> {
    service: &'a Service,
    id: u64,
    transport: Transport,
    member: &'a Member,
    input: Input,
    output: Output,
    handshake: Handshake,
    /// The transmission phase; `None` before the handshake is over.
    session: Option<Box<Session>>,
    /// The connection as a user of its export. Dropped after the session, which uses the device.
    user: Option<User>,
    /// End of the time for the handshake; when stopping, for the client to take its last replies.
    deadline: Option<Instant>,
    /// The client's pace in taking its answers, or in sending data while no answer waits.
    pace: Pace,
    /// The client's last activity, which decides whether the connection keeps its place.
    work: Work,
    /// The server stops or the export ends: the connection receives nothing more.
    stopping: bool,
    /// The client waits for the device of its export to open.
    waits_for_device: bool,
    /// The connection handles nothing more, and only sends the bytes that wait.
    closing: bool,
    /// Requests followed each other closely: the loop looks for the next one before it sleeps.
    spins: bool,
}

impl<'a> Connection<'a> {
    /// Creates connection `id` for a client on the nonblocking `socket`.
    ///
    /// # Errors
    /// The system has no memory for the connection's buffers.
    pub(super) fn new(
        service: &'a Service,
        id: u64,
        socket: OwnedFd,
        member: &'a Member,
    ) -> Result<Self, Fault> {
        let share = &service.share;
        let buffers = (Input::try_new(share.input_bytes), Output::try_new(share.output_bytes()));
        let (Some(input), Some(output)) = buffers else {
            return Err(Fault::Broken("there is no memory for its buffers".into()));
        };
        let transport = Transport::new(socket);
        if let Some(bytes) = share.socket_bytes {
            transport.limit_send_buffer(bytes);
        }
        let mode = service.tls.as_ref().map_or(TlsMode::Off, |tls| tls.mode);
        let exports = Arc::clone(&service.exports);
        let handshake = Handshake::new(exports, service.limits.max_request_bytes, mode);
        let now = Instant::now();
        Ok(Self {
            service,
            id,
            transport,
            member,
            input,
            output,
            handshake,
            session: None,
            user: None,
            deadline: None,
            pace: Pace::default(),
            work: Work::new(now),
            stopping: false,
            waits_for_device: false,
            closing: false,
            spins: false,
        })
    }

    /// Serves the client until one side ends the connection. All requests have finished on return.
    /// The socket closes when the connection is dropped.
    ///
    /// # Errors
    /// Returns why the connection ended, unless the client said goodbye or the server stops.
    pub(super) fn serve(&mut self) -> Result<(), Fault> {
        self.output.push(&greeting());
        let result = self.run();
        self.finish_requests();
        if let Some(session) = &mut self.session {
            session.publish_counts();
        }
        result
    }

    fn run(&mut self) -> Result<(), Fault> {
        loop {
            self.notice_stop()?;
            self.notice_eviction()?;
            let session = self.session.as_mut();
            let collected = session.is_some_and(|session| session.collect(&mut self.output));
            let progress = self.advance()?;
            let wants_input = matches!(progress, Progress::NeedInput) && !self.closing;
            let was_stuck = self.output.is_stuck();
            let sent = self.send()?;
            // Once the socket takes no more, the session goes on in leased memory.
            let may_go_on = sent || (self.output.is_stuck() && !was_stuck);
            if self.is_over() {
                return Ok(self.transport.say_goodbye()?);
            }
            if wants_input && self.receive()? {
                continue;
            }
            if collected || (may_go_on && matches!(progress, Progress::Blocked)) {
                continue;
            }
            if !wants_input || !self.spin()? {
                self.wait(wants_input)?;
            }
        }
    }

    /// Fails if the connection gave its place to another client and no request is in progress.
    fn notice_eviction(&self) -> Result<(), Fault> {
        if self.member.is_evicted() && self.is_idle() {
            let what = "gave its place up: its client did nothing, and another one came";
            return Err(Fault::Broken(what.into()));
        }
        Ok(())
    }

    /// Receives once more when the server stops or the export ends, and nothing after that.
    fn notice_stop(&mut self) -> Result<(), Fault> {
        let must_end = || self.user.as_ref().is_some_and(User::must_end);
        if !self.stopping && (self.service.stopping.load(Ordering::Acquire) || must_end()) {
            if !self.closing {
                self.receive()?;
            }
            self.stopping = true;
            self.deadline = None;
        }
        Ok(())
    }

    /// Looks for the next request repeatedly for a moment. While requests follow each other
    /// closely, that costs both sides less than sleeping and waking. If other threads want the CPU
    /// or no request comes, the moment ends. The next one begins only when requests follow closely
    /// again.
    fn spin(&mut self) -> Result<bool, Fault> {
        if !self.spins || !self.is_idle() || !self.output.is_empty() {
            return Ok(false);
        }
        let start = Instant::now();
        let mut now = start;
        self.spins = false;
        while now - start < SPIN {
            rustix::thread::sched_yield();
            if self.receive()? {
                self.spins = true;
                return Ok(true);
            }
            let looked = Instant::now();
            if looked - now > CONTENDED {
                break;
            }
            now = looked;
        }
        Ok(false)
    }

    /// Handles the received bytes.
    fn advance(&mut self) -> Result<Progress, Fault> {
        if self.closing {
            return Ok(Progress::Blocked);
        }
        let progress = match &mut self.session {
            None => self.shake_hands()?,
            Some(session) => {
                let progress = session.run(&mut self.input, &mut self.output);
                let Service { log, memory, .. } = self.service;
                match session.take_memory_result() {
                    None => {}
                    Some(MemoryResult::Had) => memory.over(log, MEMORY_AGAIN),
                    Some(MemoryResult::Lacked) => memory.note(log, NO_MEMORY, NO_MEMORY_ADVICE),
                }
                progress
            }
        };
        match &progress {
            Progress::Fault(what) => return Err(Fault::Broken(what.clone())),
            Progress::Disconnect => self.closing = true,
            Progress::NeedInput => self.closing = self.stopping,
            Progress::Blocked => {}
        }
        Ok(progress)
    }

    /// Handles messages of the handshake up to the first one with an answer. The time in which a
    /// client waits for a device to open does not count.
    fn shake_hands(&mut self) -> Result<Progress, Fault> {
        if !self.stopping {
            let timeout = self.service.limits.handshake_timeout;
            self.deadline = self.deadline.or_else(|| Instant::now().checked_add(timeout));
        }
        while self.session.is_none() && self.output.is_empty() {
            let mut reply = Vec::new();
            let (used, step) = self.handshake.advance(self.input.unread(), &mut reply);
            self.input.consume(used);
            self.output.push(&reply);
            self.waits_for_device = matches!(step, Step::Wait);
            match step {
                Step::NeedInput => return Ok(Progress::NeedInput),
                Step::Again => {}
                Step::Wait if self.stopping => return Ok(Progress::Disconnect),
                Step::Wait => {
                    self.deadline = None;
                    return Ok(Progress::Blocked);
                }
                Step::StartTls => self.start_tls()?,
                Step::Transmit(negotiated, user) => {
                    self.user = Some(user);
                    self.start_transmission(&negotiated);
                }
                Step::Close => return Ok(Progress::Disconnect),
                Step::Fault(what) => return Ok(Progress::Fault(what)),
            }
        }
        Ok(Progress::Blocked)
    }

    fn start_transmission(&mut self, negotiated: &Negotiated) {
        self.deadline = None;
        let (limits, mailbox) = (&self.service.limits, Arc::clone(&self.member.mailbox));
        let client = Arc::clone(&mailbox) as Arc<dyn Wakes>;
        let lease = Lease::new(Arc::clone(&self.service.budget), client);
        let share = &self.service.share;
        let session = Session::new(negotiated, limits, share, self.id, mailbox, lease);
        self.session = Some(Box::new(session));
    }

    /// Sends the answer to `STARTTLS` in plain text, then starts TLS. Fails if the client has sent
    /// bytes before it has seen the answer: they could come from an attacker in between, and must
    /// not count as the client's own.
    fn start_tls(&mut self) -> Result<(), Fault> {
        if !self.input.unread().is_empty() {
            return Err(Fault::Broken("plain text after STARTTLS".into()));
        }
        let Some(tls) = &self.service.tls else {
            return Err(Fault::Broken("STARTTLS without TLS".into()));
        };
        let tls = ServerConnection::new(tls.config())
            .map_err(|error| Fault::Broken(format!("cannot start TLS: {error}")))?;
        while !self.output.is_empty() {
            self.notice_eviction()?;
            if !self.send()? {
                self.wait(false)?;
            }
        }
        self.transport.start_tls(tls, self.service.share.tls_buffer_bytes);
        self.handshake.tls_started();
        Ok(())
    }

    /// Receives once. Returns false if no bytes were there or no space is free.
    fn receive(&mut self) -> Result<bool, Fault> {
        let session = self.session.as_mut();
        let payload = session.map_or(&mut [][..], |session| session.payload_space());
        let (payload_bytes, space) = (payload.len(), self.input.free_space());
        if payload.is_empty() && space.is_empty() {
            return Ok(false);
        }
        let received = match self.transport.receive(payload, space) {
            Ok(0) => return Err(Fault::Gone),
            Ok(received) => received,
            Err(error) if is_transient(&error) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let to_payload = received.min(payload_bytes);
        if let Some(session) = &mut self.session {
            session.payload_received(to_payload);
        }
        if self.output.is_empty() {
            self.pace.moved(received);
        }
        self.work.moved(received);
        self.input.received(received - to_payload);
        Ok(true)
    }

    /// Sends the waiting bytes as far as the socket takes them. Returns whether it took any.
    fn send(&mut self) -> Result<bool, Fault> {
        if let (false, Some(session)) = (self.output.is_empty(), &mut self.session) {
            // Published before the replies leave: a client that has its reply finds it counted.
            session.publish_counts();
            self.member.note_work();
        }
        let mut any = false;
        let mut no_pool = PayloadPool::new(0);
        while !self.output.is_empty() {
            let mut pieces = Output::no_pieces();
            let count = self.output.pieces(&mut pieces);
            match self.transport.send(&pieces[..count]) {
                Ok(sent) => {
                    any = true;
                    self.pace.moved(sent);
                    self.work.moved(sent);
                    let session = self.session.as_mut();
                    let pool = session.map_or(&mut no_pool, |session| session.pool());
                    self.output.sent(sent, pool);
                }
                Err(error) if is_transient(&error) => {
                    self.output.stick();
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if let (true, Some(session)) = (any, &mut self.session) {
            session.give_memory_back(&self.output);
        }
        if any && self.output.is_empty() {
            self.pace.rest();
            self.work.done();
        }
        Ok(any)
    }

    fn is_over(&mut self) -> bool {
        self.closing
            && self.output.is_empty()
            && self.is_idle()
            && self.transport.flush().unwrap_or(true)
    }

    fn is_idle(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.is_idle())
    }

    /// Waits for the socket or the mailbox. Fails if the deadline has passed.
    fn wait(&mut self, wants_input: bool) -> Result<(), Fault> {
        let wants_output = !self.output.is_empty() || !self.transport.flush()?;
        let now = Instant::now();
        let timeout = self.time_left(now, wants_output)?;
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, wants_input);
        events.set(PollFlags::OUT, wants_output);
        events.set(PollFlags::RDHUP, self.waits_for_device);
        let mut fds = [
            PollFd::new(self.member.mailbox.wake(), PollFlags::IN),
            PollFd::new(&self.transport, events),
        ];
        // `poll` reports a hang-up of the client again and again, even without events.
        let watched = if events.is_empty() { 1 } else { 2 };
        if wants_output || (wants_input && self.is_idle()) {
            self.member.note_idle(self.work.last(now));
        } else {
            // It waits for the device or for memory, after which the client's idle time begins.
            self.work.done();
        }
        let polled = poll(&mut fds[..watched], timeout.as_ref());
        self.member.note_busy();
        self.spins = now.elapsed() < SPIN;
        match polled {
            Err(rustix::io::Errno::INTR) | Ok(_) => {}
            Err(error) => return Err(Fault::Broken(format!("poll: {error}"))),
        }
        if !fds[0].revents().is_empty() {
            self.member.mailbox.wake().reset();
        }
        let ends = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        if self.waits_for_device && fds[1].revents().intersects(ends) {
            return Err(Fault::Gone);
        }
        Ok(())
    }

    /// Starts the time for the last replies once the server stops, no request is in progress and
    /// the client has replies to take. A request of any length is answered.
    fn note_grace(&mut self, now: Instant, wants_output: bool) {
        if !self.stopping {
            return;
        }
        let grace = self.service.limits.stop_grace;
        let is_due = wants_output && self.is_idle();
        self.deadline = self.deadline.or_else(|| now.checked_add(grace)).filter(|_| is_due);
    }

    /// Returns the longest time to wait; fails if a deadline has passed.
    fn time_left(&mut self, now: Instant, wants_output: bool) -> Result<Option<Timespec>, Fault> {
        self.note_grace(now, wants_output);
        let due = self.due(wants_output);
        if due.is_none() {
            self.pace.rest();
        }
        // The client counts as stalled from this time on.
        let stalled = due.and_then(|due| self.pace.deadline(now, due, &self.service.limits));
        let left = |at: Instant| at.saturating_duration_since(now);
        let deadline = self.deadline.into_iter().chain(stalled).min().map(left);
        if deadline == Some(Duration::ZERO) {
            return Err(Fault::Broken(self.lateness(wants_output)));
        }
        // A client that stalls is soon checked again for memory that other clients wait for.
        let look = stalled.map(|_| self.service.limits.stall_timeout_under_pressure);
        let timeout = deadline.into_iter().chain(look).min();
        Ok(timeout.and_then(|left| Timespec::try_from(left).ok()))
    }

    /// Returns how much the client has to take or to send, or `None` if nothing is due.
    fn due(&self, wants_output: bool) -> Option<Due> {
        let session = self.session.as_ref();
        let missing_bytes = session.and_then(|session| session.missing_bytes());
        let waiting_bytes = self.output.buffered_bytes() + self.output.owned_bytes();
        let bytes = if wants_output { waiting_bytes } else { missing_bytes? };
        let is_pressed = session.is_some_and(|session| session.holds_wanted_memory());
        Some(Due { bytes, is_pressed })
    }

    fn lateness(&self, wants_output: bool) -> String {
        match (&self.session, self.stopping) {
            (_, true) => "did not read its replies while the server stopped".into(),
            (None, _) => "did not finish the handshake in time".into(),
            (Some(_), _) => {
                let due = self.due(wants_output).unwrap_or(Due { bytes: 0, is_pressed: false });
                self.pace.lateness(due, &self.service.limits)
            }
        }
    }

    /// Waits for the requests of a client that has disconnected.
    fn finish_requests(&mut self) {
        let Some(session) = &mut self.session else { return };
        while !session.is_idle() {
            let mut dropped = Output::default();
            if !session.collect(&mut dropped) {
                let mut fds = [PollFd::new(self.member.mailbox.wake(), PollFlags::IN)];
                let _ = poll(&mut fds, None);
                self.member.mailbox.wake().reset();
            }
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
