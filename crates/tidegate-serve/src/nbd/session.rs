//! The transmission phase of one connection over buffers: requests in, replies out, no sockets.
//!
//! Invariants:
//! 1. A request's data is buffered only after its header was checked. Of one connection at most
//!    `in_flight_bytes` of data wait in payloads, and `in_flight_requests` requests are in
//!    progress or have their replies there.
//! 2. [`Session::run`] stops while more than [`Share::high_water_bytes`] of replies wait, until the
//!    socket takes no more. Then it goes on with leased memory for the replies, so that a client
//!    may send requests up to the limits of 1 before it reads a reply.
//! 3. Every sound request gets exactly one reply; started requests are answered as they finish.
//! 4. A change waits for those of other connections that overlap it: see [`Changes`].
//! 5. The device first gets each request to run at once. Requests that it hands back, or that the
//!    connection's buffers are too small for, take leased memory.
//!
//! Entry points: [`Session::run`] for received bytes, [`Session::collect`] for complete requests.

use std::sync::Arc;

use tidegate::device::{
    BUFFER_EXTRA_BYTES, Context, DeviceError, Extent, IoBuffer, Operation, OwnedOperation, Result,
    WriteFlags,
};

use super::Limits;
use super::buffer::{Input, Output};
use super::handshake::Negotiated;
use super::protocol::{
    CHUNK_HEADER_BYTES, CHUNK_OFFSET_BYTES, REQUEST_BYTES, Request, SIMPLE_REPLY_BYTES,
    data_chunk_header, errno, joined, push_error_chunk, push_status_chunk, simple_reply,
};
use super::share::{ATTEMPT_BYTES, HEADERS_BYTES, Share};
use super::transmission::{
    Action, Command, Control, Refusal, Rules, check, errno_of, fit, kind_of, operation_of,
};
use crate::budget::{Lease, Wakes};
use crate::changes::Changes;
use crate::headroom;
use crate::mailbox::Mailbox;
use crate::payload::PayloadPool;
use crate::queue::{DeviceQueue, Done, Then};
use crate::statistics::{RequestCounters, Tally};

/// Memory of a started request without its data.
const STARTED_BYTES: usize = 1024;
/// Completions whose space is kept.
const DONE_KEPT: usize = 64;
/// Memory that is kept for assembling the next reply.
const SCRATCH_KEPT_BYTES: usize = 1024;
/// Largest data of a refused write that is skipped; a client that sends more is disconnected.
const MAX_SKIP_BYTES: u32 = 64 << 20;

/// Why [`Session::run`] stopped.
pub(super) enum Progress {
    /// More bytes are needed.
    NeedInput,
    /// Replies must be sent, or requests must finish, first.
    Blocked,
    /// The client said goodbye.
    Disconnect,
    /// The client broke the protocol, as told.
    Fault(String),
}

/// A write whose data is on its way.
struct Incoming {
    command: Command,
    flags: WriteFlags,
    payload: IoBuffer,
    received: usize,
}

/// A refused request. It is answered once its data has been read and dropped: a client that is
/// still sending does not expect an answer.
struct Refused {
    cookie: u64,
    refusal: Refusal,
    skip_bytes: u32,
}

/// Returns the memory of a started request and of its reply, in bytes.
fn memory_of(command: &Command) -> usize {
    STARTED_BYTES
        + match command.action {
            Action::Read | Action::Write(_) => command.data_bytes() + BUFFER_EXTRA_BYTES,
            // The device's extents, those that fit the reply, and the reply.
            Action::Control(Control::BlockStatus { most }) => 3 * most * size_of::<Extent>(),
            Action::Control(_) | Action::Disconnect => 0,
        }
}

/// How the system answered when a request needed memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryResult {
    Had,
    Lacked,
}

/// The mailbox of a connection's complete requests.
pub(super) type Mail = Mailbox<Done<Command>>;

/// One client in the transmission phase.
pub(super) struct Session {
    rules: Rules,
    limits: Limits,
    share: Share,
    queue: DeviceQueue<Command>,
    /// The number of the connection.
    id: u64,
    /// Wakes the connection.
    wakes: Arc<dyn Wakes>,
    /// The started changes of all connections to the export.
    changes: Arc<Changes>,
    /// How many of them are of this connection.
    own_changes: usize,
    done: Vec<Done<Command>>,
    incoming: Option<Incoming>,
    refused: Option<Refused>,
    /// Memory of payloads that are being received, or at the device.
    payload_bytes: usize,
    lease: Lease,
    /// The next request waits for the server's memory.
    wants_memory: bool,
    /// Whether the system had memory for a request, since [`Self::take_memory_result`].
    memory_result: Option<MemoryResult>,
    pool: PayloadPool,
    scratch: Vec<u8>,
    tally: Tally,
    counters: Arc<RequestCounters>,
}

impl Session {
    /// Starts the transmission phase of connection `id` as `negotiated`; completions go to
    /// `mailbox`.
    pub(super) fn new(
        negotiated: &Negotiated,
        limits: &Limits,
        share: &Share,
        id: u64,
        mailbox: Arc<Mail>,
        lease: Lease,
    ) -> Self {
        let device = Arc::clone(&negotiated.export.device);
        // The queue number chooses locality and IO classes: numbers of connections may repeat.
        let queue = u32::try_from(id % (1 << 32)).unwrap_or(0);
        Self {
            rules: Rules::new(negotiated, limits.max_request_bytes),
            limits: limits.clone(),
            share: *share,
            wakes: Arc::clone(&mailbox) as Arc<dyn Wakes>,
            queue: DeviceQueue::new(device, Context { queue, class: 0 }, mailbox),
            id,
            changes: Arc::clone(&negotiated.export.changes),
            own_changes: 0,
            done: Vec::new(),
            incoming: None,
            refused: None,
            payload_bytes: 0,
            lease,
            wants_memory: false,
            memory_result: None,
            pool: PayloadPool::new(share.kept_bytes),
            scratch: Vec::new(),
            tally: Tally::default(),
            counters: Arc::clone(&negotiated.export.counters),
        }
    }

    /// Returns whether every started request is answered.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.in_flight() == 0
    }

    /// Adds the counts since the last call to the export's counters.
    pub(super) fn publish_counts(&mut self) {
        self.counters.add(&mut self.tally);
    }

    /// Returns the pool that takes payloads back once they are sent.
    pub(super) fn pool(&mut self) -> &mut PayloadPool {
        &mut self.pool
    }

    /// Returns free space for the data of the incoming write, empty if there is no such write.
    pub(super) fn payload_space(&mut self) -> &mut [u8] {
        match &mut self.incoming {
            Some(incoming) => &mut incoming.payload.data_mut()[incoming.received..],
            None => &mut [],
        }
    }

    /// Notes that `len` bytes were received into [`payload_space`](Self::payload_space).
    pub(super) fn payload_received(&mut self, len: usize) {
        if let Some(incoming) = &mut self.incoming {
            incoming.received += len;
        }
    }

    /// Handles the received bytes as far as possible.
    pub(super) fn run(&mut self, input: &mut Input, output: &mut Output) -> Progress {
        let progress = loop {
            self.wants_memory = false;
            if let Some(progress) = self.step(input, output) {
                break progress;
            }
        };
        if !self.wants_memory {
            // The request that waited for memory has run without, or waits for something else.
            self.lease.stop_waiting();
        }
        progress
    }

    /// Handles one request, or returns why it cannot.
    fn step(&mut self, input: &mut Input, output: &mut Output) -> Option<Progress> {
        // The client first gets the chance to take the replies that wait.
        let is_held = output.is_stuck() && output.reserve(HEADERS_BYTES);
        if !self.has_space(output) && !is_held {
            return Some(Progress::Blocked);
        }
        if self.incoming.is_some() {
            return self.finish_incoming(input, output);
        }
        if let Some(refused) = self.refused.take() {
            return self.finish_refused(refused, input, output);
        }
        match Request::parse(input.unread()) {
            Ok(None) => Some(Progress::NeedInput),
            Err(magic) => Some(Progress::Fault(format!("request with the wrong magic {magic:#x}"))),
            Ok(Some(request)) => match check(&request, &self.rules) {
                Ok(command) => self.start(&command, input, output),
                Err(refusal) => self.refuse(&request, refusal, input),
            },
        }
    }

    /// Returns whether the longest reply fits the connection's own buffer.
    fn has_space(&self, output: &mut Output) -> bool {
        output.buffered_bytes() <= self.share.high_water_bytes
            && output.reserve(self.share.reply_bytes())
    }

    fn refuse(
        &mut self,
        request: &Request,
        refusal: Refusal,
        input: &mut Input,
    ) -> Option<Progress> {
        let skip_bytes = request.payload_bytes();
        if skip_bytes > MAX_SKIP_BYTES {
            return Some(Progress::Fault(format!("a write of {skip_bytes} bytes")));
        }
        input.consume(REQUEST_BYTES);
        self.tally.refused(kind_of(request.command));
        self.refused = Some(Refused { cookie: request.cookie, refusal, skip_bytes });
        None
    }

    /// Drops data of a refused request, and answers once all data is dropped.
    fn finish_refused(
        &mut self,
        mut refused: Refused,
        input: &mut Input,
        output: &mut Output,
    ) -> Option<Progress> {
        let skipped = input.unread().len().min(refused.skip_bytes as usize);
        input.consume(skipped);
        refused.skip_bytes -= u32::try_from(skipped).unwrap_or(refused.skip_bytes);
        if refused.skip_bytes > 0 {
            self.refused = Some(refused);
            return Some(Progress::NeedInput);
        }
        let Refusal { error, message } = refused.refusal;
        self.push_error(output, refused.cookie, error, message, None);
        None
    }

    fn start(
        &mut self,
        command: &Command,
        input: &mut Input,
        output: &mut Output,
    ) -> Option<Progress> {
        if self.must_wait(command) {
            return Some(Progress::Blocked);
        }
        let is_taken = match command.action {
            Action::Disconnect => {
                input.consume(REQUEST_BYTES);
                return Some(Progress::Disconnect);
            }
            Action::Write(flags) => return self.start_write(command, flags, input, output),
            Action::Read => self.attempt_read(command, output) || self.start_read(command, output),
            Action::Control(what) => self.control(command, what, output),
        };
        if !is_taken {
            return Some(Progress::Blocked);
        }
        input.consume(REQUEST_BYTES);
        None
    }

    /// Reads into the output, if that has the space and the read has to wait for nothing. Returns
    /// whether the request is answered.
    fn attempt_read(&mut self, command: &Command, output: &mut Output) -> bool {
        if command.data_bytes() > self.share.attempt_bytes || !self.has_space(output) {
            return false;
        }
        let (header, header_len) = self.read_header(command);
        let header = &header[..header_len];
        let reply = output.tail(header.len() + command.data_bytes());
        let (front, data) = reply.split_at_mut(header.len());
        let mut read = Operation::Read { offset: command.offset, buf: data };
        match self.queue.attempt(&mut read) {
            None => return false,
            Some(Ok(())) => {
                front.copy_from_slice(header);
                let len = reply.len();
                output.commit(len);
                self.tally.done(command.kind, command.len);
            }
            Some(Err(error)) => self.fail(command, &error, output),
        }
        true
    }

    /// Reads into a payload. A read that the output had no space for is attempted first. Returns
    /// false if too much is in flight.
    fn start_read(&mut self, command: &Command, output: &mut Output) -> bool {
        let may_attempt =
            command.data_bytes() > self.share.attempt_bytes || !self.has_space(output);
        if !self.may_start(command, output) {
            return false;
        }
        let Some(buffer) = self.take_payload(command, 0) else { return true };
        let read = OwnedOperation::Read { offset: command.offset, buffer };
        self.attempt_or_start(command, read, may_attempt, output);
        true
    }

    /// Runs an operation with data at once if it is short, has to wait for nothing, and
    /// `may_attempt`. Starts it otherwise.
    fn attempt_or_start(
        &mut self,
        command: &Command,
        mut operation: OwnedOperation,
        may_attempt: bool,
        output: &mut Output,
    ) {
        if may_attempt
            && command.data_bytes() <= ATTEMPT_BYTES
            && let Some(result) = self.queue.attempt(&mut operation.borrow())
        {
            return self.answer(command, operation, result, output);
        }
        self.submit(command, operation, Then::Complete);
    }

    /// Returns a payload for the request. If the system has no memory, returns `None` and refuses
    /// the request, which `skip_bytes` of data follow.
    fn take_payload(&mut self, command: &Command, skip_bytes: u32) -> Option<IoBuffer> {
        let has_memory = headroom::for_request(command.data_bytes());
        let payload = has_memory.then(|| self.pool.take(command.data_bytes())).flatten();
        if payload.is_some() {
            self.memory_result = self.memory_result.or(Some(MemoryResult::Had));
            return payload;
        }
        self.refuse_without_memory(command, skip_bytes);
        None
    }

    /// Refuses a request, which `skip_bytes` of data follow, because the system has no memory.
    fn refuse_without_memory(&mut self, command: &Command, skip_bytes: u32) {
        self.memory_result = Some(MemoryResult::Lacked);
        self.tally.failed(command.kind);
        let message = "the server has no memory for the request";
        let refusal = Refusal { error: errno::NOMEM, message };
        self.refused = Some(Refused { cookie: command.cookie, refusal, skip_bytes });
    }

    /// Runs a command without data at once, or starts it if it has to wait. A trim that is done
    /// while its flush has to wait is repeated with it. Returns false if too much is in flight.
    fn control(&mut self, command: &Command, what: Control, output: &mut Output) -> bool {
        let Some((mut operation, then)) = operation_of(command, what) else {
            self.finish_write(command, Ok(()), output);
            return true;
        };
        // An answer that finds no space takes memory, which a started command leases.
        let attempts = self.has_space(output);
        let mut result = attempts.then(|| self.queue.attempt(&mut operation.borrow())).flatten();
        if let (Some(Ok(())), Then::Flush) = (&result, then) {
            result = self.queue.attempt(&mut Operation::Flush);
        }
        if let Some(result) = result {
            self.answer(command, operation, result, output);
            return true;
        }
        let is_allowed = self.may_start(command, output);
        if is_allowed && headroom::for_request(memory_of(command)) {
            self.submit(command, operation, then);
        } else if is_allowed {
            self.refuse_without_memory(command, 0);
        }
        is_allowed
    }

    /// Returns the bytes before the data of a successful read, and their number.
    fn read_header(
        &self,
        command: &Command,
    ) -> ([u8; CHUNK_HEADER_BYTES + CHUNK_OFFSET_BYTES], usize) {
        if self.rules.structured {
            let header = data_chunk_header(command.cookie, command.offset, command.len);
            return (header, header.len());
        }
        (joined([&simple_reply(0, command.cookie)]), SIMPLE_REPLY_BYTES)
    }

    /// Writes from the input if the data is there or soon will be, or begins to receive a payload.
    fn start_write(
        &mut self,
        command: &Command,
        flags: WriteFlags,
        input: &mut Input,
        output: &mut Output,
    ) -> Option<Progress> {
        let len = command.data_bytes();
        let data = &input.unread()[REQUEST_BYTES..];
        if let Some(data) = data.get(..len).filter(|_| len <= ATTEMPT_BYTES) {
            let mut write = Operation::Write { offset: command.offset, data, flags };
            if let Some(result) = self.queue.attempt(&mut write) {
                input.consume(REQUEST_BYTES + len);
                self.finish_write(command, result, output);
                return None;
            }
        } else if len <= self.share.buffered_write_bytes {
            return Some(Progress::NeedInput);
        }
        if !self.may_start(command, output) {
            return Some(Progress::Blocked);
        }
        input.consume(REQUEST_BYTES);
        if let Some(payload) = self.take_payload(command, command.len) {
            self.payload_bytes += memory_of(command);
            self.incoming = Some(Incoming { command: *command, flags, payload, received: 0 });
        }
        None
    }

    /// Moves data from the input to the payload. Starts the write when the data is whole.
    fn finish_incoming(&mut self, input: &mut Input, output: &mut Output) -> Option<Progress> {
        let space = self.payload_space();
        let len = space.len().min(input.unread().len());
        space[..len].copy_from_slice(&input.unread()[..len]);
        let whole = space.len() == len;
        input.consume(len);
        self.payload_received(len);
        if !whole {
            return Some(Progress::NeedInput);
        }
        // Others may have begun while the data came.
        let command = self.incoming.as_ref().map(|incoming| incoming.command);
        if command.is_some_and(|command| self.must_wait(&command)) {
            return Some(Progress::Blocked);
        }
        if let Some(Incoming { command, flags, payload: buffer, .. }) = self.incoming.take() {
            self.payload_bytes -= memory_of(&command);
            let write = OwnedOperation::Write { offset: command.offset, buffer, flags };
            self.attempt_or_start(&command, write, true, output);
        }
        None
    }

    /// Returns whether the request may start beside others. One always may, even the longest.
    fn may_start(&mut self, command: &Command, output: &Output) -> bool {
        let waiting = self.payload_bytes + output.owned_bytes();
        let fits = waiting == 0 || waiting + command.data_bytes() <= self.limits.in_flight_bytes;
        let requests = self.queue.in_flight() + output.owned_messages();
        if !fits || requests >= self.limits.in_flight_requests {
            return false;
        }
        self.wants_memory = !self.lease.grow(memory_of(command));
        !self.wants_memory
    }

    /// Gives back the memory that no request and no reply in `output` needs any more.
    pub(super) fn give_memory_back(&mut self, output: &Output) {
        self.lease.shrink_to(self.payload_bytes + output.owned_bytes());
    }

    /// Returns whether other clients wait for memory that this one holds.
    pub(super) fn holds_wanted_memory(&self) -> bool {
        self.lease.is_wanted()
    }

    /// Returns whether the system had memory for requests since the last call, if any needed
    /// memory.
    pub(super) fn take_memory_result(&mut self) -> Option<MemoryResult> {
        self.memory_result.take()
    }

    /// Returns the bytes that the client has still to send of a write that takes memory, or `None`
    /// if no such write has begun.
    pub(super) fn missing_bytes(&self) -> Option<usize> {
        let incoming = self.incoming.as_ref()?;
        Some(incoming.command.data_bytes() - incoming.received)
    }

    /// Returns whether the request must wait for the end of another connection's change. The
    /// mailbox is woken then.
    fn must_wait(&self, command: &Command) -> bool {
        let own = (self.id, self.own_changes);
        let changed = command.changed_bytes();
        changed.is_some_and(|bytes| self.changes.must_wait(own, &bytes, &self.wakes))
    }

    fn submit(&mut self, command: &Command, operation: OwnedOperation, then: Then) {
        self.payload_bytes += memory_of(command);
        if let Some(bytes) = command.changed_bytes() {
            self.changes.begin(self.id, bytes);
            self.own_changes += 1;
        }
        self.queue.start(*command, operation, then);
    }

    /// Answers the complete requests. Returns whether there were any.
    pub(super) fn collect(&mut self, output: &mut Output) -> bool {
        let mut complete = std::mem::take(&mut self.done);
        self.queue.collect(&mut complete);
        let any = !complete.is_empty();
        for Done { tag: command, result, operation } in complete.drain(..) {
            self.payload_bytes -= memory_of(&command);
            if let Some(bytes) = command.changed_bytes() {
                self.changes.end(self.id, &bytes);
                self.own_changes -= 1;
            }
            self.answer(&command, operation, result, output);
        }
        complete.shrink_to(DONE_KEPT);
        self.done = complete;
        self.give_memory_back(output);
        any
    }

    /// Answers a request that is complete.
    fn answer(
        &mut self,
        command: &Command,
        operation: OwnedOperation,
        result: Result<()>,
        output: &mut Output,
    ) {
        match (operation, result) {
            (OwnedOperation::Read { buffer, .. }, Ok(())) => {
                self.push_read(command, buffer, output);
            }
            (OwnedOperation::Status { offset, len, most, extents }, Ok(())) => {
                self.tally.done(command.kind, command.len);
                self.scratch.clear();
                let extents = fit(extents, offset, len, most);
                push_status_chunk(&mut self.scratch, command.cookie, &extents);
                output.push(&self.scratch);
                self.scratch.clear();
                self.scratch.shrink_to(SCRATCH_KEPT_BYTES);
            }
            (operation, result) => {
                if let Some(buffer) = operation.into_buffer() {
                    self.pool.put(buffer);
                }
                self.finish_write(command, result, output);
            }
        }
    }

    /// Sends a read's data: short data is copied next to other replies, long data is not.
    fn push_read(&mut self, command: &Command, mut payload: IoBuffer, output: &mut Output) {
        let (header, header_len) = self.read_header(command);
        let header = &header[..header_len];
        self.tally.done(command.kind, command.len);
        let len = header_len + command.data_bytes();
        if command.data_bytes() <= self.share.buffered_write_bytes && self.has_space(output) {
            let reply = output.tail(len);
            reply[..header_len].copy_from_slice(header);
            reply[header_len..].copy_from_slice(payload.data());
            output.commit(len);
            self.pool.put(payload);
        } else {
            payload.set_header(header);
            output.push_payload(payload);
        }
    }

    fn finish_write(&mut self, command: &Command, result: Result<()>, output: &mut Output) {
        match result {
            Ok(()) => {
                self.tally.done(command.kind, command.len);
                output.push(&simple_reply(0, command.cookie));
            }
            Err(error) => self.fail(command, &error, output),
        }
    }

    fn fail(&mut self, command: &Command, error: &DeviceError, output: &mut Output) {
        self.tally.ended_with(command.kind, error);
        let offset = (command.data_bytes() > 0).then_some(command.offset);
        self.push_error(output, command.cookie, errno_of(error), &error.to_string(), offset);
    }

    fn push_error(
        &mut self,
        output: &mut Output,
        cookie: u64,
        error: u32,
        message: &str,
        offset: Option<u64>,
    ) {
        if !self.rules.structured {
            return output.push(&simple_reply(error, cookie));
        }
        self.scratch.clear();
        push_error_chunk(&mut self.scratch, cookie, error, message, offset);
        output.push(&self.scratch);
    }
}

#[cfg(test)]
mod tests {
    use tidegate::device::BlockDeviceExt;
    use tidegate::device::memory::MemoryDevice;

    use super::super::Export;
    use super::super::protocol::{Cursor, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, be16, be32, cmd};
    use super::*;
    use crate::budget::{Budget, Wakes};

    const DEVICE_BYTES: usize = 1 << 20;

    /// A client of a device filled with ones.
    struct Scene {
        session: Session,
        input: Input,
        output: Output,
    }

    impl Scene {
        fn new(connections: usize) -> Self {
            let device = MemoryDevice::new(512, (DEVICE_BYTES / 512) as u64).expect("a device");
            device.write(0, &vec![1; DEVICE_BYTES], WriteFlags::default()).expect("written");
            let export = Export::new("", Arc::new(device));
            let negotiated = Negotiated { export, structured: false, base_allocation: false };
            let limits = Limits { connections, ..Limits::default() };
            let share = Share::new(&limits, false);
            let mailbox = Arc::new(Mail::new().expect("a mailbox"));
            let client = Arc::clone(&mailbox) as Arc<dyn Wakes>;
            let lease = Lease::new(Arc::new(Budget::new(64 << 20)), client);
            Self {
                session: Session::new(&negotiated, &limits, &share, 0, mailbox, lease),
                input: Input::try_new(share.input_bytes).expect("memory"),
                output: Output::try_new(share.output_bytes()).expect("memory"),
            }
        }

        /// Receives `bytes` in pieces as a connection does. Returns all bytes to send.
        fn exchange(&mut self, mut bytes: &[u8]) -> Vec<u8> {
            let mut sent = Vec::new();
            while !bytes.is_empty() {
                let space = self.session.payload_space();
                let is_payload = !space.is_empty();
                let space = if is_payload { space } else { self.input.free_space() };
                let len = space.len().min(bytes.len()).min(1000);
                space[..len].copy_from_slice(&bytes[..len]);
                bytes = &bytes[len..];
                if is_payload {
                    self.session.payload_received(len);
                } else {
                    self.input.received(len);
                }
                let progress = self.session.run(&mut self.input, &mut self.output);
                assert!(matches!(progress, Progress::NeedInput), "all was handled");
                sent.extend(self.take());
            }
            sent
        }

        fn take(&mut self) -> Vec<u8> {
            let mut taken = Vec::new();
            while !self.output.is_empty() {
                let mut pieces = Output::no_pieces();
                let count = self.output.pieces(&mut pieces);
                let message: Vec<u8> =
                    pieces[..count].iter().flat_map(|piece| piece.to_vec()).collect();
                self.output.sent(message.len(), self.session.pool());
                taken.extend(message);
            }
            self.session.give_memory_back(&self.output);
            taken
        }
    }

    fn request(command: u16, cookie: u64, len: usize) -> Vec<u8> {
        let len = u32::try_from(len).expect("a length of a request");
        let (high, low) = (cookie >> 32, cookie & 0xffff_ffff);
        let [high, low] = [high, low].map(|half| be32(u32::try_from(half).expect("a half")));
        let parts: [&[u8]; 6] =
            [&be32(REQUEST_MAGIC), &be16(0), &be16(command), &high, &low, &[0; 8]];
        [&parts.concat()[..], &be32(len)].concat()
    }

    fn error_of(reply: &[u8]) -> u32 {
        let mut reply = Cursor(reply);
        assert_eq!(reply.u32(), Some(SIMPLE_REPLY_MAGIC));
        reply.u32().expect("an error number")
    }

    #[test]
    fn a_write_without_memory_is_refused_and_the_next_request_is_understood() {
        let mut scene = Scene::new(256);
        scene.session.pool = PayloadPool::without_memory();
        let long = ATTEMPT_BYTES + 512;
        let write = [request(cmd::WRITE, 5, long), vec![9; long]].concat();
        let reply = scene.exchange(&write);
        assert_eq!((reply.len(), error_of(&reply)), (SIMPLE_REPLY_BYTES, errno::NOMEM));
        assert_eq!(reply[8..], simple_reply(0, 5)[8..], "the answer is that of the write");
        assert_eq!(scene.session.take_memory_result(), Some(MemoryResult::Lacked));
        assert_eq!(scene.session.payload_bytes, 0);
        let short = scene.exchange(&[request(cmd::WRITE, 6, 512), vec![7; 512]].concat());
        assert_eq!(short, simple_reply(0, 6));
        let read = scene.exchange(&request(cmd::READ, 7, 1024));
        assert_eq!(read[..SIMPLE_REPLY_BYTES], simple_reply(0, 7));
        assert_eq!(read[SIMPLE_REPLY_BYTES..], [[7; 512], [1; 512]].concat());
    }

    #[test]
    fn a_client_that_takes_nothing_makes_the_session_hold_replies_up_to_the_limit() {
        const READS: u64 = 1000;
        let mut scene = Scene::new(256);
        let reads: Vec<_> = (0..READS).flat_map(|cookie| request(cmd::READ, cookie, 512)).collect();
        scene.input.free_space()[..reads.len()].copy_from_slice(&reads);
        scene.input.received(reads.len());
        let run = |scene: &mut Scene| scene.session.run(&mut scene.input, &mut scene.output);
        assert!(matches!(run(&mut scene), Progress::Blocked));
        assert_eq!(scene.output.owned_messages(), 0, "the client may still take replies");
        scene.output.stick();
        assert!(matches!(run(&mut scene), Progress::Blocked));
        assert_eq!(scene.output.owned_messages(), Limits::default().in_flight_requests);
        assert!(!scene.input.unread().is_empty());
        let mut sent = scene.take();
        while !scene.input.unread().is_empty() {
            run(&mut scene);
            sent.extend(scene.take());
        }
        assert_eq!(sent.len() as u64, READS * (SIMPLE_REPLY_BYTES as u64 + 512));
    }

    #[test]
    fn a_read_that_small_buffers_do_not_hold_takes_leased_memory() {
        let mut scene = Scene::new(usize::MAX);
        assert!(scene.session.share.attempt_bytes < 16 << 10);
        for (cookie, len) in [(1, 4096), (2, 16 << 10), (3, ATTEMPT_BYTES)] {
            let read = request(cmd::READ, cookie, len);
            scene.input.free_space()[..read.len()].copy_from_slice(&read);
            scene.input.received(read.len());
            scene.session.run(&mut scene.input, &mut scene.output);
            let leased = len > scene.session.share.attempt_bytes;
            assert_eq!(scene.output.owned_bytes() >= len, leased, "{len}");
            let had = leased.then_some(MemoryResult::Had);
            assert_eq!(scene.session.take_memory_result(), had, "{len}");
            let reply = scene.take();
            assert_eq!(reply[..SIMPLE_REPLY_BYTES], simple_reply(0, cookie));
            assert_eq!(reply[SIMPLE_REPLY_BYTES..], vec![1; len]);
        }
        let long = 32 << 10;
        let write = [request(cmd::WRITE, 4, long), vec![9; long]].concat();
        assert_eq!(scene.exchange(&write), simple_reply(0, 4));
        let read = scene.exchange(&request(cmd::READ, 5, long));
        assert_eq!(read[SIMPLE_REPLY_BYTES..], vec![9; long]);
    }
}
