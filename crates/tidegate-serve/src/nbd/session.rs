//! The transmission phase of one connection over buffers: requests in, replies out, no sockets.
//!
//! Invariants:
//! 1. A request's data is buffered only after its header was checked; of one connection at most
//!    `in_flight_bytes` of data wait in payloads, and at most `in_flight_requests` requests at workers.
//! 2. [`Session::run`] stops while more than [`HIGH_WATER_BYTES`] of replies wait: a client that does not
//!    read its replies gets no more of them.
//! 3. Every sound request gets exactly one reply; requests at workers are answered as they finish.
//!
//! Entry points: [`Session::run`] for received bytes, [`Session::collect`] for finished jobs.

use std::sync::Arc;

use crossbeam_channel::Sender;
use tidegate::device::{BlockDevice, DeviceError, Extent, Result, WriteFlags};

use super::buffer::{Input, Output, Payload, PayloadPool};
use super::handshake::Negotiated;
use super::protocol::{
    CHUNK_HEADER_BYTES, CHUNK_OFFSET_BYTES, REQUEST_BYTES, Request, SIMPLE_REPLY_BYTES,
    data_chunk_header, push_error_chunk, push_status_chunk, simple_reply,
};
use super::server::Limits;
use super::statistics::Tally;
use super::transmission::{Action, Command, Control, Refusal, Rules, check, control, errno_of};
use super::worker::{Done, Job, Mailbox};

/// The longest request that is done on the connection's own thread, if the device allows it at all.
pub(super) const INLINE_BYTES: usize = 256 << 10;
/// The longest data of a write that waits in [`Input`]; longer data is received into a payload.
const BUFFERED_WRITE_BYTES: usize = 64 << 10;
/// Size of [`Input`]: half of it holds a request with buffered data, so there is always room to receive.
pub(super) const INPUT_BYTES: usize = 256 << 10;
/// Replies are sent before more than this waits.
const HIGH_WATER_BYTES: usize = 128 << 10;
/// Size of [`Output`]: below the high water there is room for the longest inline reply.
pub(super) const OUTPUT_BYTES: usize = HIGH_WATER_BYTES + INLINE_BYTES + 1024;
/// Data of refused writes is read and dropped up to this size; beyond it the client is.
const MAX_SKIP_BYTES: u32 = 64 << 20;

/// Why [`Session::run`] stopped.
pub(super) enum Progress {
    /// More bytes are needed.
    NeedInput,
    /// Replies must be sent, or jobs must finish, first.
    Blocked,
    /// The client said goodbye.
    Disconnect,
    /// The client broke the protocol, as told.
    Fault(String),
}

/// A write whose data is on its way.
struct Incoming {
    command: Command,
    payload: Payload,
    received: usize,
}

/// One client in the transmission phase.
pub(super) struct Session {
    device: Arc<dyn BlockDevice>,
    rules: Rules,
    inline: bool,
    limits: Limits,
    jobs: Sender<Job>,
    mailbox: Arc<Mailbox>,
    done: Vec<Done>,
    incoming: Option<Incoming>,
    skip_bytes: u32,
    jobs_in_flight: usize,
    payload_bytes: usize,
    pool: PayloadPool,
    scratch: Vec<u8>,
    tally: Tally,
}

impl Session {
    /// Starts the transmission phase as `negotiated`; `jobs` leads to workers, `mailbox` back from them.
    pub(super) fn new(
        negotiated: &Negotiated,
        limits: &Limits,
        jobs: Sender<Job>,
        mailbox: Arc<Mailbox>,
    ) -> Self {
        Self {
            device: Arc::clone(negotiated.export.device()),
            rules: Rules::new(negotiated, limits.max_request_bytes),
            inline: negotiated.export.geometry().inline,
            limits: limits.clone(),
            jobs,
            mailbox,
            done: Vec::new(),
            incoming: None,
            skip_bytes: 0,
            jobs_in_flight: 0,
            payload_bytes: 0,
            pool: PayloadPool::default(),
            scratch: Vec::new(),
            tally: Tally::default(),
        }
    }

    /// No request is at a worker.
    pub(super) fn is_idle(&self) -> bool {
        self.jobs_in_flight == 0
    }

    /// What was counted since the last call's caller reset it.
    pub(super) fn tally(&mut self) -> &mut Tally {
        &mut self.tally
    }

    /// Where payloads go that were sent.
    pub(super) fn pool(&mut self) -> &mut PayloadPool {
        &mut self.pool
    }

    /// Room for the data of the write that is on its way; empty if there is none.
    pub(super) fn payload_room(&mut self) -> &mut [u8] {
        match &mut self.incoming {
            Some(incoming) => &mut incoming.payload.data_mut()[incoming.received..],
            None => &mut [],
        }
    }

    /// `len` bytes were received into [`payload_room`](Self::payload_room).
    pub(super) fn payload_received(&mut self, len: usize) {
        if let Some(incoming) = &mut self.incoming {
            incoming.received += len;
        }
    }

    /// Handles what was received, as far as possible.
    pub(super) fn run(&mut self, input: &mut Input, output: &mut Output) -> Progress {
        loop {
            if let Some(progress) = self.step(input, output) {
                return progress;
            }
        }
    }

    /// Handles one request, or says why not.
    fn step(&mut self, input: &mut Input, output: &mut Output) -> Option<Progress> {
        if output.buffered_bytes() > HIGH_WATER_BYTES
            || !output.reserve(OUTPUT_BYTES - HIGH_WATER_BYTES)
        {
            return Some(Progress::Blocked);
        }
        if self.incoming.is_some() {
            return self.finish_incoming(input, output);
        }
        if self.skip_bytes > 0 {
            return self.skip(input);
        }
        match Request::parse(input.unread()) {
            Ok(None) => Some(Progress::NeedInput),
            Err(magic) => Some(Progress::Fault(format!("request with the wrong magic {magic:#x}"))),
            Ok(Some(request)) => match check(&request, &self.rules) {
                Ok(command) => self.start(&command, input, output),
                Err(refusal) => self.refuse(&request, refusal, input, output),
            },
        }
    }

    fn skip(&mut self, input: &mut Input) -> Option<Progress> {
        let skipped = input.unread().len().min(self.skip_bytes as usize);
        input.consume(skipped);
        self.skip_bytes -= u32::try_from(skipped).unwrap_or(self.skip_bytes);
        (self.skip_bytes > 0).then_some(Progress::NeedInput)
    }

    fn refuse(
        &mut self,
        request: &Request,
        refusal: Refusal,
        input: &mut Input,
        output: &mut Output,
    ) -> Option<Progress> {
        let skip_bytes = request.payload_bytes();
        if skip_bytes > MAX_SKIP_BYTES {
            return Some(Progress::Fault(format!("a write of {skip_bytes} bytes")));
        }
        input.consume(REQUEST_BYTES);
        self.skip_bytes = skip_bytes;
        self.tally.failed(request.command);
        self.push_error(output, request.cookie, refusal.error, refusal.message, None);
        None
    }

    fn start(
        &mut self,
        command: &Command,
        input: &mut Input,
        output: &mut Output,
    ) -> Option<Progress> {
        let inline = self.inline && command.len as usize <= INLINE_BYTES;
        match command.action {
            Action::Disconnect => {
                input.consume(REQUEST_BYTES);
                return Some(Progress::Disconnect);
            }
            Action::Write(flags) => return self.start_write(command, flags, inline, input, output),
            Action::Read if inline => self.read_inline(command, output),
            Action::Control(what) if inline => {
                let result = control(&*self.device, command, what);
                self.finish_control(command, what, result, output);
            }
            Action::Read | Action::Control(_) => {
                if !self.has_room(command.data_bytes(), output) {
                    return Some(Progress::Blocked);
                }
                let wanted = command.data_bytes();
                let payload = (wanted > 0).then(|| self.pool.take(wanted));
                self.submit(command, payload);
            }
        }
        input.consume(REQUEST_BYTES);
        None
    }

    fn read_inline(&mut self, command: &Command, output: &mut Output) {
        let (header, header_len) = self.read_header(command);
        let header = &header[..header_len];
        let reply = output.tail(header.len() + command.len as usize);
        let (front, data) = reply.split_at_mut(header.len());
        match self.device.read(command.offset, data) {
            Ok(()) => {
                front.copy_from_slice(header);
                let len = reply.len();
                output.commit(len);
                self.tally.done(command.kind, command.len);
            }
            Err(error) => self.fail(command, &error, output),
        }
    }

    /// The bytes before the data of a successful read.
    fn read_header(
        &self,
        command: &Command,
    ) -> ([u8; CHUNK_HEADER_BYTES + CHUNK_OFFSET_BYTES], usize) {
        if self.rules.structured {
            let header = data_chunk_header(command.cookie, command.offset, command.len);
            return (header, header.len());
        }
        let mut header = [0; CHUNK_HEADER_BYTES + CHUNK_OFFSET_BYTES];
        header[..SIMPLE_REPLY_BYTES].copy_from_slice(&simple_reply(0, command.cookie));
        (header, SIMPLE_REPLY_BYTES)
    }

    /// Writes from the input where the data is all there or will be soon; else starts to receive it into
    /// a payload.
    fn start_write(
        &mut self,
        command: &Command,
        flags: WriteFlags,
        inline: bool,
        input: &mut Input,
        output: &mut Output,
    ) -> Option<Progress> {
        let len = command.len as usize;
        let data = &input.unread()[REQUEST_BYTES..];
        if inline && data.len() >= len {
            let result = self.device.write(command.offset, &data[..len], flags);
            input.consume(REQUEST_BYTES + len);
            self.finish_write(command, result, output);
            return None;
        }
        if inline && len <= BUFFERED_WRITE_BYTES {
            return Some(Progress::NeedInput);
        }
        if !self.has_room(len, output) {
            return Some(Progress::Blocked);
        }
        input.consume(REQUEST_BYTES);
        self.payload_bytes += len;
        self.incoming =
            Some(Incoming { command: *command, payload: self.pool.take(len), received: 0 });
        None
    }

    /// Moves data that came with the header to the payload; starts the write when all of it is there.
    fn finish_incoming(&mut self, input: &mut Input, output: &mut Output) -> Option<Progress> {
        let room = self.payload_room();
        let len = room.len().min(input.unread().len());
        room[..len].copy_from_slice(&input.unread()[..len]);
        let whole = room.len() == len;
        input.consume(len);
        self.payload_received(len);
        if !whole {
            return Some(Progress::NeedInput);
        }
        if let Some(Incoming { command, payload, .. }) = self.incoming.take() {
            self.payload_bytes -= command.data_bytes();
            self.write_payload(&command, payload, output);
        }
        None
    }

    fn write_payload(&mut self, command: &Command, payload: Payload, output: &mut Output) {
        match command.action {
            Action::Write(flags) if self.inline && command.data_bytes() <= INLINE_BYTES => {
                let result = self.device.write(command.offset, payload.data(), flags);
                self.pool.put(payload);
                self.finish_write(command, result, output);
            }
            _ => self.submit(command, Some(payload)),
        }
    }

    /// One more request with `len` bytes may wait. One is always let in: the longest must be possible.
    fn has_room(&self, len: usize, output: &Output) -> bool {
        let waiting = self.payload_bytes + output.owned_bytes();
        let fits = waiting == 0 || waiting + len <= self.limits.in_flight_bytes;
        fits && self.jobs_in_flight < self.limits.in_flight_requests
    }

    fn submit(&mut self, command: &Command, payload: Option<Payload>) {
        self.jobs_in_flight += 1;
        self.payload_bytes += command.data_bytes();
        let (device, mailbox) = (Arc::clone(&self.device), Arc::clone(&self.mailbox));
        let job = Job { device, command: *command, payload, mailbox };
        if let Err(refused) = self.jobs.send(job) {
            // The workers are gone, which happens only after all connections have ended.
            drop(refused);
            self.jobs_in_flight -= 1;
        }
    }

    /// Answers the requests that workers have finished; true if there were any.
    pub(super) fn collect(&mut self, output: &mut Output) -> bool {
        let mut finished = std::mem::take(&mut self.done);
        self.mailbox.collect(&mut finished);
        let any = !finished.is_empty();
        for done in finished.drain(..) {
            self.finish(done, output);
        }
        self.done = finished;
        any
    }

    fn finish(&mut self, done: Done, output: &mut Output) {
        self.jobs_in_flight -= 1;
        let command = &done.command;
        self.payload_bytes -= command.data_bytes();
        match (command.action, done.result, done.payload) {
            (Action::Read, Ok(_), Some(payload)) => self.push_read(command, payload, output),
            (Action::Control(what), result, _) => {
                self.finish_control(command, what, result, output);
            }
            (_, result, payload) => {
                if let Some(payload) = payload {
                    self.pool.put(payload);
                }
                self.finish_write(command, result.map(|_| ()), output);
            }
        }
    }

    /// A short read is copied next to the others; a long one is sent from where it is.
    fn push_read(&mut self, command: &Command, mut payload: Payload, output: &mut Output) {
        let (header, header_len) = self.read_header(command);
        let header = &header[..header_len];
        self.tally.done(command.kind, command.len);
        let len = header_len + command.data_bytes();
        if command.data_bytes() <= BUFFERED_WRITE_BYTES && output.reserve(len) {
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

    fn finish_control(
        &mut self,
        command: &Command,
        what: Control,
        result: Result<Vec<Extent>>,
        output: &mut Output,
    ) {
        match (what, result) {
            (Control::BlockStatus { .. }, Ok(extents)) => {
                self.tally.done(command.kind, command.len);
                self.scratch.clear();
                push_status_chunk(&mut self.scratch, command.cookie, &extents);
                output.push(&self.scratch);
            }
            (_, result) => self.finish_write(command, result.map(|_| ()), output),
        }
    }

    fn fail(&mut self, command: &Command, error: &DeviceError, output: &mut Output) {
        self.tally.failed(command.kind);
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
