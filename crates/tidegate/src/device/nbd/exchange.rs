//! Requests to a server and its replies, as a state machine over bytes, without I/O and clock.
//!
//! Invariants:
//! 1. A request is cut into pieces that the server accepts. They are sent in order, at most
//!    [`WINDOW`] at a time. A request completes once, when all its pieces are answered.
//! 2. A reply counts only for a piece that was sent completely on this connection; any other reply
//!    is a fault of the server and ends the connection.
//! 3. After the loss of a connection, incomplete requests are sent again on the next one, whole,
//!    because the server may have lost the pieces that it answered. Repeating is sound: a read
//!    changes nothing, and a write, a zeroing or a discard leaves the same bytes when done twice.
//!    `device::flushes` decides over flushes.
//! 4. A server that fails to flush may also have lost requests that it has not answered yet: the
//!    failure ends the connection, so that they are sent again.
//! 5. A time limit measures silence: the time without an answer to the oldest piece at the server.
//!    Requests behind that piece wait for it, however long they are. Answers to a request that was
//!    sent again [`RESTARTS_MAX`] times do not count, so that a server that ends at the same piece
//!    each time fails the request.
//! 6. Data from the server is copied into the buffer of the read that it answers, never beyond that
//!    buffer. Of all other input the exchange keeps one header at most.

use std::collections::{BTreeMap, VecDeque};
use std::io::IoSlice;
use std::time::{Duration, Instant};

use super::error::NbdError;
use super::export::Rules;
use super::protocol::export_flag::{SEND_FUA, SEND_WRITE_ZEROES};
use super::protocol::{
    Cursor, REQUEST_BYTES, Request, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC, cmd, cmd_flag, errno,
};
use super::watched::Watched;
use crate::device::flushes::{Clock, Ended, Flushes, Moment};
use crate::device::{AsyncRequest, DeviceError, DeviceErrorKind, Op, Operation, OwnedOperation};
use crate::device::{Result, ZeroFlags};

/// Most pieces in flight.
const WINDOW: usize = 128;
/// How often a request is sent again before answers to it stop to count as signs of life.
const RESTARTS_MAX: u32 = 3;
/// Most parts of messages that are sent by one system call.
const PARTS_MAX: usize = 64;

/// A started request.
pub(super) struct Started {
    /// Checked, not empty, and supported by the server.
    pub(super) request: AsyncRequest,
    /// When it was started.
    pub(super) since: Instant,
    /// The moment of the start, for a flush.
    pub(super) moment: Moment,
}

/// A request until it completes.
struct Job {
    request: AsyncRequest,
    /// When it was started.
    since: Instant,
    /// How often it was sent again.
    restarts: u32,
    /// Command and flags of its pieces.
    command: u16,
    flags: u16,
    /// A flush has to follow, because the server has no FUA.
    is_flushed: bool,
    /// First byte on the device, and length.
    offset: u64,
    len: u64,
    /// Bytes already cut into pieces.
    cut: u64,
    /// Pieces without an answer.
    open: u32,
    failure: Option<DeviceError>,
}

/// A part of a request that is one request of the protocol; a flush has no bytes and no job.
#[derive(Debug, Clone, Copy)]
struct Piece {
    job: u64,
    command: u16,
    flags: u16,
    offset: u64,
    /// Offset of its bytes in the job's memory.
    at: usize,
    len: u32,
}

const FLUSH: Piece = Piece { job: 0, command: cmd::FLUSH, flags: 0, offset: 0, at: 0, len: 0 };

/// A piece that is being sent.
struct Outgoing {
    cookie: u64,
    piece: Piece,
    header: [u8; REQUEST_BYTES],
}

/// The received part of the next reply.
enum Incoming {
    Header { bytes: [u8; SIMPLE_REPLY_BYTES], len: usize },
    Data { cookie: u64, len: usize },
}

const NOTHING: Incoming = Incoming::Header { bytes: [0; SIMPLE_REPLY_BYTES], len: 0 };

/// How long the server has been silent.
struct Silence {
    /// The longest silence.
    timeout: Duration,
    /// The time of the data that is being received.
    now: Option<Instant>,
    /// The last answer to the piece that was the oldest one at the server.
    heard: Option<Instant>,
    /// The last answer to any piece.
    answered: Option<Instant>,
}

impl Silence {
    fn new(timeout: Duration) -> Self {
        Self { timeout, now: None, heard: None, answered: None }
    }

    /// Returns when a request that was started at `since` fails.
    fn deadline(&self, since: Instant) -> Instant {
        self.heard.map_or(since, |heard| heard.max(since)) + self.timeout
    }

    fn hears(&mut self, is_oldest: bool) {
        self.answered = self.now;
        if is_oldest {
            self.heard = self.now;
        }
    }

    /// Gives the other requests time, after the oldest one has failed alone.
    fn gives_up_oldest(&mut self) {
        self.heard = self.heard.max(self.answered);
    }
}

/// The state of the exchange; see the module.
pub(super) struct Exchange {
    /// The URL, for errors.
    name: String,
    rules: Rules,
    /// By arrival, so that the first one was started first.
    jobs: BTreeMap<u64, Job>,
    last_job: u64,
    /// Jobs with bytes that are not cut yet.
    uncut: VecDeque<u64>,
    outgoing: VecDeque<Outgoing>,
    /// Sent bytes of the first outgoing message.
    sent_bytes: usize,
    /// Sent pieces by cookie.
    flying: BTreeMap<u64, Piece>,
    last_cookie: u64,
    incoming: Incoming,
    silence: Silence,
    flushes: Flushes,
    watched: Watched,
    /// Zeroes to write as data, for a server without `WRITE_ZEROES`.
    zeroes: Vec<u8>,
}

impl Exchange {
    /// Makes an exchange with the export of `rules`, which has the sectors `watched`. Errors call
    /// it `name`. Requests fail once the server has been silent for `timeout`.
    pub(super) fn new(name: &str, rules: Rules, watched: Watched, timeout: Duration) -> Self {
        let zeroes = if rules.export.has(SEND_WRITE_ZEROES) { 0 } else { rules.zeroes_bytes_max };
        Self {
            name: name.to_owned(),
            rules,
            jobs: BTreeMap::new(),
            last_job: 0,
            uncut: VecDeque::new(),
            outgoing: VecDeque::new(),
            sent_bytes: 0,
            flying: BTreeMap::new(),
            last_cookie: 0,
            incoming: NOTHING,
            silence: Silence::new(timeout),
            flushes: Flushes::default(),
            watched,
            zeroes: vec![0; zeroes as usize],
        }
    }

    pub(super) fn clock(&self) -> Clock {
        self.flushes.clock()
    }

    pub(super) fn watched(&mut self) -> &mut Watched {
        &mut self.watched
    }

    /// Returns whether no request is left.
    pub(super) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns when the first request fails, unless the server answers before.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.jobs.first_key_value().map(|(_, job)| self.silence.deadline(job.since))
    }

    /// Takes a request in.
    pub(super) fn add(&mut self, started: Started) {
        self.last_job += 1;
        let id = self.last_job;
        let moment = started.moment;
        let job = Job::new(started, &self.rules);
        if job.command != cmd::FLUSH {
            self.watched.begin(job.request.owned());
            self.uncut.push_back(id);
        } else if !self.flushes.ask(id, moment) {
            return job.request.complete(Err(self.lost()));
        }
        self.jobs.insert(id, job);
    }

    /// Fails the [doomed](Flushes::doomed) flushes, connected or not.
    pub(super) fn fail_doomed(&mut self) {
        let doomed = self.flushes.doomed();
        self.fail_lost(doomed);
    }

    /// Fails `jobs`, because writes that they cover may be lost.
    fn fail_lost(&mut self, jobs: Vec<u64>) {
        for job in jobs {
            let error = self.lost();
            self.finish(job, Err(error));
        }
    }

    /// Makes the next messages for the connection.
    pub(super) fn prepare(&mut self) {
        self.fail_doomed();
        if self.flushes.begin() {
            self.watched.flush_begins();
            self.queue(FLUSH);
        }
        while self.outgoing.len() + self.flying.len() < WINDOW
            && let Some(piece) = self.cut()
        {
            self.queue(piece);
        }
    }

    fn queue(&mut self, piece: Piece) {
        self.last_cookie += 1;
        let Piece { command, flags, offset, len, .. } = piece;
        let cookie = self.last_cookie;
        let header = Request { flags, command, cookie, offset, len }.encode();
        self.outgoing.push_back(Outgoing { cookie, piece, header });
    }

    /// Cuts the next piece off the oldest request.
    fn cut(&mut self) -> Option<Piece> {
        loop {
            let id = *self.uncut.front()?;
            let (rules, zeroes) = (&self.rules, self.zeroes.len() as u64);
            match self.jobs.get_mut(&id).and_then(|job| job.cut(id, rules, zeroes)) {
                Some(piece) => return Some(piece),
                None => drop(self.uncut.pop_front()),
            }
        }
    }

    /// Returns the next bytes to send, in at most [`PARTS_MAX`] parts; empty if there are none.
    pub(super) fn to_send(&self) -> Vec<IoSlice<'_>> {
        let mut skip = self.sent_bytes;
        let parts = self.outgoing.iter().flat_map(|it| [&it.header[..], self.payload(&it.piece)]);
        let rest = parts.map(|part| {
            let skipped = skip.min(part.len());
            skip -= skipped;
            &part[skipped..]
        });
        rest.filter(|part| !part.is_empty()).take(PARTS_MAX).map(IoSlice::new).collect()
    }

    /// Returns the bytes that follow the header of `piece`.
    fn payload(&self, piece: &Piece) -> &[u8] {
        if piece.command != cmd::WRITE {
            return &[];
        }
        let (at, len) = (piece.at, piece.len as usize);
        match self.jobs.get(&piece.job).map(|job| job.request.owned()) {
            Some(OwnedOperation::Write { buffer, .. }) => &buffer.data()[at..at + len],
            _ => &self.zeroes[..len],
        }
    }

    /// Marks `sent` of the bytes from [`to_send`](Self::to_send) as sent.
    pub(super) fn sent(&mut self, sent: usize) {
        self.sent_bytes += sent;
        while let Some(first) = self.outgoing.front() {
            let len = REQUEST_BYTES + self.payload(&first.piece).len();
            if self.sent_bytes < len {
                return;
            }
            self.sent_bytes -= len;
            if let Some(Outgoing { cookie, piece, .. }) = self.outgoing.pop_front() {
                self.flying.insert(cookie, piece);
            }
        }
    }

    /// Takes in data that came from the server at the time `now`.
    ///
    /// # Errors
    /// Fails if the server breaks the protocol, shuts down, or fails to flush: the connection is
    /// unusable then.
    pub(super) fn receive(
        &mut self,
        mut bytes: &[u8],
        now: Instant,
    ) -> std::result::Result<(), NbdError> {
        self.silence.now = Some(now);
        while !bytes.is_empty() {
            bytes = match &mut self.incoming {
                Incoming::Header { bytes: header, len } => {
                    let taken = bytes.len().min(SIMPLE_REPLY_BYTES - *len);
                    header[*len..*len + taken].copy_from_slice(&bytes[..taken]);
                    *len += taken;
                    if *len == SIMPLE_REPLY_BYTES {
                        let header = *header;
                        self.reply(&header)?;
                    }
                    &bytes[taken..]
                }
                Incoming::Data { cookie, len } => {
                    let (cookie, len) = (*cookie, *len);
                    self.data(cookie, len, bytes)?
                }
            };
        }
        Ok(())
    }

    fn reply(&mut self, header: &[u8]) -> std::result::Result<(), NbdError> {
        let mut cursor = Cursor(header);
        let (Some(magic), Some(error), Some(cookie)) = (cursor.u32(), cursor.u32(), cursor.u64())
        else {
            return Err(NbdError::Protocol("a reply that is not whole".into()));
        };
        if magic != SIMPLE_REPLY_MAGIC {
            return Err(NbdError::Protocol(format!("a reply with the magic {magic:#x}")));
        }
        let Some(piece) = self.flying.get(&cookie) else {
            return Err(NbdError::Protocol("a reply to a request that was not sent".into()));
        };
        if error == errno::SHUTDOWN {
            return Err(NbdError::ShuttingDown);
        }
        if piece.command == cmd::READ && error == 0 {
            self.incoming = Incoming::Data { cookie, len: 0 };
        } else {
            self.incoming = NOTHING;
            self.land(cookie, error)?;
        }
        Ok(())
    }

    /// Copies data of the read `cookie`, which has `len` bytes already. Returns the other bytes.
    fn data<'a>(
        &mut self,
        cookie: u64,
        len: usize,
        bytes: &'a [u8],
    ) -> std::result::Result<&'a [u8], NbdError> {
        let Some(Piece { job, at, len: whole, .. }) = self.flying.get(&cookie).copied() else {
            self.incoming = NOTHING;
            return Ok(bytes);
        };
        let taken = bytes.len().min(whole as usize - len);
        self.hear_of(cookie);
        if let Some(job) = self.jobs.get_mut(&job)
            && let Operation::Read { buf, .. } = job.request.operation()
        {
            buf[at + len..at + len + taken].copy_from_slice(&bytes[..taken]);
        }
        if len + taken == whole as usize {
            self.incoming = NOTHING;
            self.land(cookie, 0)?;
        } else {
            self.incoming = Incoming::Data { cookie, len: len + taken };
        }
        Ok(&bytes[taken..])
    }

    /// Notes that the server answers the piece `cookie`.
    fn hear_of(&mut self, cookie: u64) {
        let Some(piece) = self.flying.get(&cookie) else { return };
        let job = self.jobs.get(&piece.job);
        if job.is_none_or(|job| job.restarts < RESTARTS_MAX) {
            let oldest = self.flying.first_key_value();
            self.silence.hears(oldest.is_some_and(|(oldest, _)| *oldest == cookie));
        }
    }

    /// Handles the answer to a piece, `error` or 0.
    fn land(&mut self, cookie: u64, error: u32) -> std::result::Result<(), NbdError> {
        self.hear_of(cookie);
        let Some(piece) = self.flying.remove(&cookie) else { return Ok(()) };
        if piece.command == cmd::FLUSH {
            self.flush_answered(error);
        } else {
            self.piece_answered(&piece, error);
        }
        let is_forced = piece.command == cmd::FLUSH || piece.flags & cmd_flag::FUA != 0;
        if is_forced && error != 0 { Err(NbdError::NotDurable) } else { Ok(()) }
    }

    fn flush_answered(&mut self, error: u32) {
        if error == 0 {
            self.watched.flush_succeeds();
            let Ended { done, failed } = self.flushes.succeed();
            for job in done {
                self.finish(job, Ok(()));
            }
            self.fail_lost(failed);
            return;
        }
        for job in self.flushes.fail() {
            let error = refused(&self.name, &FLUSH, error);
            self.finish(job, Err(error));
        }
    }

    fn piece_answered(&mut self, piece: &Piece, error: u32) {
        let Some(job) = self.jobs.get_mut(&piece.job) else { return };
        job.open -= 1;
        if error != 0 {
            job.cut = job.len;
            job.failure.get_or_insert_with(|| refused(&self.name, piece, error));
        }
        if job.open > 0 || job.cut < job.len {
            return;
        }
        match job.failure.take() {
            Some(error) => self.finish(piece.job, Err(error)),
            None if job.is_flushed => self.flushes.ask_for_write(piece.job),
            None => {
                let is_forced = piece.flags & cmd_flag::FUA != 0;
                if !is_forced && matches!(piece.command, cmd::WRITE | cmd::WRITE_ZEROES) {
                    self.flushes.wrote();
                }
                self.finish(piece.job, Ok(()));
            }
        }
    }

    fn finish(&mut self, job: u64, result: Result<()>) {
        if let Some(job) = self.jobs.remove(&job) {
            self.watched.end(job.request.owned(), result.is_ok());
            job.request.complete(result);
        }
    }

    /// Resets the exchange after the loss of the connection: incomplete transfers are sent again.
    pub(super) fn lose_connection(&mut self) {
        self.flying.clear();
        self.outgoing.clear();
        (self.sent_bytes, self.incoming) = (0, NOTHING);
        let lost = self.flushes.lose_connection();
        self.fail_lost(lost);
        let transfers = self.jobs.iter_mut().filter(|(_, job)| job.command != cmd::FLUSH);
        self.uncut = transfers.map(|(id, job)| (job.restart(), *id).1).collect();
    }

    /// Fails requests, if the server has been silent for the time limit at `now`: first the request
    /// of the oldest piece at the server, then the others whose time has passed too. `reason` is
    /// the cause of their wait. Returns whether one is at the server. The caller must drop the
    /// connection then, because the server may still answer it.
    pub(super) fn expire(&mut self, now: Instant, reason: &str) -> bool {
        let mut is_at_server = false;
        let mut oldest = self.flying.first_key_value().map(|(_, piece)| piece.job);
        while self.deadline().is_some_and(|at| at <= now) {
            let first = self.jobs.first_key_value().map(|(id, _)| *id);
            match oldest.take() {
                // A flush of the server has no job of its own.
                Some(0) => {
                    is_at_server = true;
                    let flushes = self.flushes.fail();
                    self.fail_expired(flushes, reason);
                }
                oldest => is_at_server |= self.expire_job(oldest.or(first), reason),
            }
            self.silence.gives_up_oldest();
        }
        is_at_server
    }

    /// Fails the request `id`. Returns whether it is at the server.
    fn expire_job(&mut self, id: Option<u64>, reason: &str) -> bool {
        let Some((id, job)) = id.and_then(|id| Some((id, self.jobs.get(&id)?))) else {
            return false;
        };
        let mut pieces = self.flying.values().chain(self.outgoing.iter().map(|it| &it.piece));
        let is_flush = job.command == cmd::FLUSH || job.is_flushed;
        let is_at_server =
            pieces.any(|piece| piece.job == id || (is_flush && piece.command == cmd::FLUSH));
        let mut failed = if is_flush { self.flushes.fail() } else { Vec::new() };
        failed.push(id);
        self.fail_expired(failed, reason);
        is_at_server
    }

    fn fail_expired(&mut self, jobs: Vec<u64>, reason: &str) {
        for job in jobs {
            let error = self.expired(reason);
            self.finish(job, Err(error));
        }
    }

    fn expired(&self, reason: &str) -> DeviceError {
        let name = &self.name;
        let context = format!("{name} did not answer within its time limit (`timeout`): {reason}");
        DeviceError::new(DeviceErrorKind::Io, context)
    }

    fn lost(&self) -> DeviceError {
        let name = &self.name;
        let context = format!(
            "flush of {name}: writes that were acknowledged and not flushed may be lost, because \
             the connection was, or an earlier flush failed; write them again, and flush"
        );
        DeviceError::new(DeviceErrorKind::Io, context)
    }
}

impl Job {
    fn new(started: Started, rules: &Rules) -> Self {
        let Started { mut request, since, .. } = started;
        let has_fua = rules.export.has(SEND_FUA);
        let forced = |fua: bool| if fua && has_fua { cmd_flag::FUA } else { 0 };
        let operation = request.operation();
        let (offset, len) = operation.range();
        let (command, flags, fua) = match operation {
            Operation::Read { .. } | Operation::Status { .. } => (cmd::READ, 0, false),
            Operation::Write { flags, .. } => (cmd::WRITE, forced(flags.fua), flags.fua),
            Operation::Flush => (cmd::FLUSH, 0, false),
            Operation::Discard { .. } => (cmd::TRIM, 0, false),
            Operation::WriteZeroes { flags, .. } if rules.export.has(SEND_WRITE_ZEROES) => {
                (cmd::WRITE_ZEROES, forced(flags.fua) | zero_flags(flags), flags.fua)
            }
            Operation::WriteZeroes { flags, .. } => (cmd::WRITE, forced(flags.fua), flags.fua),
        };
        let is_flushed = fua && !has_fua;
        let (restarts, cut, open, failure) = (0, 0, 0, None);
        Self {
            request,
            since,
            restarts,
            command,
            flags,
            is_flushed,
            offset,
            len,
            cut,
            open,
            failure,
        }
    }

    fn restart(&mut self) {
        self.restarts += u32::from(self.cut > 0);
        (self.cut, self.open, self.failure) = (0, 0, None);
    }

    /// Cuts the next piece of this job, which has number `id`.
    fn cut(&mut self, id: u64, rules: &Rules, zeroes_bytes: u64) -> Option<Piece> {
        let is_zeroes = matches!(self.request.owned(), OwnedOperation::WriteZeroes { .. });
        let most = match self.command {
            cmd::WRITE if is_zeroes => zeroes_bytes,
            _ => u64::from(rules.request_bytes_max),
        };
        let len = u32::try_from((self.len - self.cut).min(most)).ok().filter(|len| *len > 0)?;
        let (offset, at) = (self.offset + self.cut, usize::try_from(self.cut).unwrap_or(0));
        self.cut += u64::from(len);
        self.open += 1;
        Some(Piece { job: id, command: self.command, flags: self.flags, offset, at, len })
    }
}

fn zero_flags(flags: ZeroFlags) -> u16 {
    let no_hole = if flags.may_unmap { 0 } else { cmd_flag::NO_HOLE };
    no_hole | if flags.fast_only { cmd_flag::FAST_ZERO } else { 0 }
}

/// Makes the error of the server's answer `error` to `piece`.
fn refused(name: &str, piece: &Piece, error: u32) -> DeviceError {
    let (kind, word) = match error {
        errno::PERM => (DeviceErrorKind::ReadOnly, "EPERM"),
        errno::IO => (DeviceErrorKind::Io, "EIO"),
        errno::INVAL => (DeviceErrorKind::Io, "EINVAL"),
        errno::NOSPC => (DeviceErrorKind::NoSpace, "ENOSPC"),
        errno::OVERFLOW => (DeviceErrorKind::Io, "EOVERFLOW"),
        errno::NOTSUP => (DeviceErrorKind::Unsupported, "ENOTSUP"),
        _ => (DeviceErrorKind::Io, "an unknown error"),
    };
    let what = match piece.command {
        cmd::READ => Op::Read,
        cmd::WRITE => Op::Write,
        cmd::TRIM => Op::Discard,
        cmd::WRITE_ZEROES => Op::WriteZeroes,
        _ => Op::Flush,
    };
    let (what, Piece { len, offset, .. }) = (what.name(), piece);
    let context =
        format!("{what} of {len} bytes at offset {offset} of {name}: the server answers {word}");
    DeviceError::new(kind, context)
}

#[cfg(all(test, not(loom)))]
mod tests;
