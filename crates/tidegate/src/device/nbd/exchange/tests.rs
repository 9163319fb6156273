//! Tests of the exchange over a modelled server: its memory, and the durable part.

#![expect(clippy::disallowed_methods, reason = "requests have a time limit")]
#![expect(clippy::big_endian_bytes, reason = "NBD numbers are big-endian on the wire")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use proptest::prelude::*;

use super::super::export::NbdExport;
use super::super::protocol::export_flag::{SEND_FLUSH, SEND_TRIM};
use super::*;
use crate::device::{Context, IoBuffer, WriteFlags};

const SIZE_BYTES: usize = 64 << 10;
const TIMEOUT: Duration = Duration::from_secs(3600);
const ALL: u16 = SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES;

fn exchange(flags: u16) -> Exchange {
    let block_sizes = (512, 4096, 4096);
    let size_bytes = SIZE_BYTES as u64;
    let export = NbdExport { size_bytes, flags, block_sizes, ..NbdExport::named("x") };
    Exchange::new("nbd:", Rules::of(export, None).unwrap(), Watched::default(), TIMEOUT)
}

/// The requests that a test started, and their results.
#[derive(Clone, Default)]
struct Ends(Arc<Mutex<BTreeMap<u64, Result<()>>>>);

impl Ends {
    fn start(&self, exchange: &mut Exchange, tag: u64, operation: OwnedOperation) {
        self.start_after(exchange, tag, operation, exchange.clock().now());
    }

    fn start_after(&self, to: &mut Exchange, tag: u64, operation: OwnedOperation, moment: Moment) {
        let ends = Arc::clone(&self.0);
        let completion = move |_, result| {
            let before = ends.lock().insert(tag, result);
            assert!(before.is_none(), "request {tag} completes twice");
        };
        let request = AsyncRequest::new(operation, Context::default(), completion);
        to.add(Started { request, since: Instant::now(), moment });
    }

    /// Returns the result of request `tag`; `None` until it ends.
    fn result(&self, tag: u64) -> Option<std::result::Result<(), String>> {
        let ends = self.0.lock();
        let result = ends.get(&tag)?;
        Some(result.as_ref().copied().map_err(ToString::to_string))
    }

    fn is_ok(&self, tag: u64) -> bool {
        self.result(tag) == Some(Ok(()))
    }
}

fn write(offset: u64, byte: u8, len: usize, fua: bool) -> OwnedOperation {
    let mut buffer = IoBuffer::new(len);
    buffer.data_mut().fill(byte);
    OwnedOperation::Write { offset, buffer, flags: WriteFlags { fua } }
}

/// A server: the writes that it has taken, and those that are durable.
struct Model {
    memory: Vec<u8>,
    durable: Vec<u8>,
    requests: Vec<Request>,
}

impl Model {
    fn new() -> Self {
        let (memory, durable) = (vec![0; SIZE_BYTES], vec![0; SIZE_BYTES]);
        Self { memory, durable, requests: Vec::new() }
    }

    /// Takes in everything that `exchange` sends, and returns the replies.
    fn serve(&mut self, exchange: &mut Exchange) -> Vec<Vec<u8>> {
        let mut bytes = Vec::new();
        exchange.prepare();
        loop {
            let sent: Vec<u8> = exchange.to_send().iter().flat_map(|it| it.to_vec()).collect();
            if sent.is_empty() {
                break;
            }
            // Only a part, as a socket may take.
            let taken = sent.len().min(10_000);
            bytes.extend_from_slice(&sent[..taken]);
            exchange.sent(taken);
            exchange.prepare();
        }
        let mut replies = Vec::new();
        let mut rest = &bytes[..];
        while let Some(request) = Request::parse(rest).unwrap() {
            rest = &rest[REQUEST_BYTES..];
            let (data, after) = rest.split_at(request.payload_bytes() as usize);
            rest = after;
            replies.push(self.run(&request, data));
            self.requests.push(request);
        }
        assert!(rest.is_empty(), "half a request was sent");
        replies
    }

    fn run(&mut self, request: &Request, data: &[u8]) -> Vec<u8> {
        let start = usize::try_from(request.offset).unwrap();
        let range = start..start + request.len as usize;
        let mut reply = reply_to(request.cookie, 0);
        match request.command {
            cmd::READ => reply.extend_from_slice(&self.memory[range.clone()]),
            cmd::WRITE => self.memory[range.clone()].copy_from_slice(data),
            cmd::WRITE_ZEROES => self.memory[range.clone()].fill(0),
            cmd::FLUSH => self.durable.clone_from(&self.memory),
            _ => {}
        }
        if request.flags & cmd_flag::FUA != 0 {
            self.durable[range.clone()].copy_from_slice(&self.memory[range]);
        }
        reply
    }

    /// Loses the writes that are not durable.
    fn die(&mut self) {
        self.memory.clone_from(&self.durable);
    }
}

fn reply_to(cookie: u64, error: u32) -> Vec<u8> {
    let mut reply = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
    reply.extend(error.to_be_bytes());
    reply.extend(cookie.to_be_bytes());
    reply
}

fn answer_all(model: &mut Model, exchange: &mut Exchange) {
    loop {
        let replies = model.serve(exchange);
        if replies.is_empty() {
            return;
        }
        exchange.receive(&replies.concat(), Instant::now()).unwrap();
    }
}

#[test]
fn long_requests_are_cut_and_complete_once() {
    let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
    ends.start(&mut exchange, 1, write(512, 7, 20_480, true));
    answer_all(&mut model, &mut exchange);
    assert!(ends.is_ok(1));
    let lens: Vec<_> = model.requests.iter().map(|it| it.len).collect();
    assert_eq!(lens, [4096; 5]);
    assert!(model.requests.iter().all(|it| it.flags == cmd_flag::FUA));
    assert!(model.durable[512..20_992].iter().all(|byte| *byte == 7));
    assert!(exchange.is_idle());
}

/// The case of the module's documentation.
#[test]
fn a_server_that_dies_between_write_and_flush_fails_the_next_flush() {
    let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
    ends.start(&mut exchange, 1, write(0, 7, 4096, false));
    answer_all(&mut model, &mut exchange);
    assert!(ends.is_ok(1), "acknowledged");
    exchange.lose_connection();
    model.die();
    let early = exchange.clock().now();
    ends.start(&mut exchange, 2, OwnedOperation::Flush);
    ends.start(&mut exchange, 3, OwnedOperation::Flush);
    answer_all(&mut model, &mut exchange);
    for tag in [2, 3] {
        let error = ends.result(tag).unwrap().unwrap_err();
        assert!(error.contains("may be lost"), "{error}");
    }
    ends.start_after(&mut exchange, 4, OwnedOperation::Flush, early);
    assert!(!ends.is_ok(4), "it was asked for before the failure was told");
    ends.start(&mut exchange, 5, write(0, 7, 4096, false));
    answer_all(&mut model, &mut exchange);
    ends.start(&mut exchange, 6, OwnedOperation::Flush);
    answer_all(&mut model, &mut exchange);
    assert!(ends.is_ok(5) && ends.is_ok(6));
    assert_eq!(model.durable[..4096], [7; 4096]);
}

#[test]
fn what_was_in_flight_is_sent_again_and_loses_nothing() {
    let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
    ends.start(&mut exchange, 1, write(0, 7, 8192, false));
    ends.start(&mut exchange, 2, OwnedOperation::Flush);
    drop(model.serve(&mut exchange));
    exchange.lose_connection();
    model.die();
    answer_all(&mut model, &mut exchange);
    assert!(ends.is_ok(1), "it was not acknowledged before, so it is not lost");
    assert!(ends.is_ok(2), "it covered nothing when it was asked for");
    ends.start(&mut exchange, 3, OwnedOperation::Flush);
    answer_all(&mut model, &mut exchange);
    assert!(ends.is_ok(3));
    assert_eq!(model.durable[..8192], [7; 8192]);
}

#[test]
fn a_server_without_fua_and_zeroes_gets_flushes_and_data() {
    let (mut model, mut exchange, ends) = (Model::new(), exchange(SEND_FLUSH), Ends::default());
    model.memory.fill(9);
    ends.start(&mut exchange, 1, write(0, 7, 4096, true));
    let flags = ZeroFlags { fua: true, ..ZeroFlags::default() };
    let zeroes = OwnedOperation::WriteZeroes { offset: 4096, len: 12_288, flags };
    ends.start(&mut exchange, 2, zeroes);
    answer_all(&mut model, &mut exchange);
    assert!(ends.is_ok(1) && ends.is_ok(2));
    assert_eq!(model.durable[..4096], [7; 4096]);
    assert_eq!(model.durable[4096..16_384], [0; 12_288]);
    let known = |it: &Request| [cmd::WRITE, cmd::FLUSH].contains(&it.command) && it.flags == 0;
    assert!(model.requests.iter().all(known));
}

#[test]
fn errors_of_the_server_have_their_kinds() {
    for (number, kind) in [
        (errno::IO, DeviceErrorKind::Io),
        (errno::NOSPC, DeviceErrorKind::NoSpace),
        (errno::PERM, DeviceErrorKind::ReadOnly),
        (errno::NOTSUP, DeviceErrorKind::Unsupported),
        (12345, DeviceErrorKind::Io),
    ] {
        let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
        ends.start(&mut exchange, 1, write(0, 7, 4096, false));
        assert_eq!(model.serve(&mut exchange).len(), 1);
        exchange.receive(&reply_to(1, number), Instant::now()).unwrap();
        let ends = ends.0.lock();
        let error = ends[&1].as_ref().unwrap_err();
        assert_eq!(error.kind(), kind);
        assert!(error.to_string().contains("4096 bytes at offset 0 of nbd:"), "{error}");
    }
}

/// A server's failed flush fails all flushes requested so far; the next one counts again.
#[test]
fn a_failed_flush_is_told_to_all_that_wait() {
    let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
    ends.start(&mut exchange, 1, OwnedOperation::Flush);
    assert_eq!(model.serve(&mut exchange).len(), 1);
    ends.start(&mut exchange, 2, OwnedOperation::Flush);
    assert!(
        exchange.receive(&reply_to(1, errno::IO), Instant::now()).is_err(),
        "the connection is given up"
    );
    exchange.lose_connection();
    assert!(matches!((ends.result(1), ends.result(2)), (Some(Err(_)), Some(Err(_)))));
    ends.start(&mut exchange, 3, OwnedOperation::Flush);
    answer_all(&mut model, &mut exchange);
    assert!(ends.is_ok(3));
}

#[test]
fn replies_that_answer_nothing_are_faults() {
    let faults = [
        reply_to(2, 0),
        [&[0; 4][..], &reply_to(1, 0)[4..]].concat(),
        reply_to(1, errno::SHUTDOWN),
        [reply_to(1, 0), reply_to(1, 0)].concat(),
    ];
    for fault in faults {
        let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
        ends.start(&mut exchange, 1, write(0, 7, 4096, false));
        assert_eq!(model.serve(&mut exchange).len(), 1);
        assert!(exchange.receive(&fault, Instant::now()).is_err(), "{fault:?}");
        exchange.lose_connection();
        answer_all(&mut model, &mut exchange);
        assert!(ends.is_ok(1));
    }
    // Sent only in part.
    let (mut exchange, ends) = (exchange(ALL), Ends::default());
    ends.start(&mut exchange, 1, write(0, 7, 4096, false));
    exchange.prepare();
    exchange.sent(100);
    assert!(exchange.receive(&reply_to(1, 0), Instant::now()).is_err());
}

#[test]
fn a_request_fails_at_its_time_and_takes_the_connection_with_it_where_it_was_sent() {
    let late = Instant::now() + Duration::from_secs(7200);
    for is_sent in [false, true] {
        let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
        ends.start(&mut exchange, 1, write(0, 7, 4096, false));
        if is_sent {
            drop(model.serve(&mut exchange));
        }
        assert!(!exchange.expire(Instant::now(), "too early"));
        assert_eq!(exchange.expire(late, "no server at all"), is_sent);
        let error = ends.result(1).unwrap().unwrap_err();
        assert!(error.contains("time limit") && error.contains("no server at all"), "{error}");
        if is_sent {
            exchange.lose_connection();
        }
        assert!(exchange.is_idle());
        let requests = model.requests.len();
        answer_all(&mut model, &mut exchange);
        assert_eq!(model.requests.len(), requests, "what has failed is not sent again");
    }
}

#[test]
fn a_flush_that_is_never_answered_fails_and_the_loss_is_told_with_it() {
    let late = Instant::now() + Duration::from_secs(7200);
    let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
    ends.start(&mut exchange, 1, write(0, 7, 4096, false));
    answer_all(&mut model, &mut exchange);
    ends.start(&mut exchange, 2, OwnedOperation::Flush);
    drop(model.serve(&mut exchange));
    assert!(exchange.expire(late, "silent"));
    exchange.lose_connection();
    assert!(matches!(ends.result(2), Some(Err(_))));
    ends.start(&mut exchange, 3, OwnedOperation::Flush);
    answer_all(&mut model, &mut exchange);
    assert!(ends.is_ok(3));
}

/// Each answer shows that the server works, and a request that waits behind others has not begun.
#[test]
fn a_long_request_takes_its_time_while_the_server_answers() {
    let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
    let mut now = Instant::now();
    ends.start(&mut exchange, 1, write(0, 7, 40_960, false));
    ends.start(&mut exchange, 2, write(40_960, 7, 4096, false));
    ends.start(&mut exchange, 3, OwnedOperation::Flush);
    for reply in model.serve(&mut exchange) {
        now += TIMEOUT * 9 / 10;
        assert!(!exchange.expire(now, "too early"));
        exchange.receive(&reply, now).unwrap();
    }
    assert!(ends.is_ok(1) && ends.is_ok(2) && ends.is_ok(3));
    let since = now;
    ends.start(&mut exchange, 4, write(0, 7, 8192, false));
    let replies = model.serve(&mut exchange);
    exchange.receive(&replies[0], since).unwrap();
    assert!(!exchange.expire(since + TIMEOUT * 9 / 10, "too early"));
    assert!(exchange.expire(since + TIMEOUT * 11 / 10, "silent"));
    assert!(matches!(ends.result(4), Some(Err(_))));
}

#[test]
fn a_request_that_is_never_answered_fails_alone_while_others_are() {
    let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
    let start = Instant::now();
    ends.start(&mut exchange, 1, write(0, 7, 4096, false));
    ends.start(&mut exchange, 2, write(4096, 7, 40_960, false));
    let replies = model.serve(&mut exchange);
    for reply in &replies[1..5] {
        exchange.receive(reply, start + TIMEOUT * 9 / 10).unwrap();
    }
    assert!(exchange.expire(start + TIMEOUT * 11 / 10, "hung"));
    assert!(matches!((ends.result(1), ends.result(2)), (Some(Err(_)), None)));
    exchange.lose_connection();
    answer_all(&mut model, &mut exchange);
    assert!(ends.is_ok(2));
}

/// A server that ends at the same part of a request each time would keep the request for ever.
#[test]
fn a_request_that_ends_every_connection_fails() {
    let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
    let mut now = Instant::now();
    ends.start(&mut exchange, 1, write(0, 7, 8192, false));
    for _ in 0..10 {
        let Some(reply) = model.serve(&mut exchange).into_iter().next() else { break };
        exchange.receive(&reply, now).unwrap();
        exchange.lose_connection();
        now += TIMEOUT / 2;
        exchange.expire(now, "it dies");
    }
    assert!(matches!(ends.result(1), Some(Err(_))));
}

/// The next step of a test with one of eight blocks.
#[derive(Debug, Clone)]
enum Act {
    Write {
        block: u64,
        blocks: usize,
        fua: bool,
    },
    Read {
        block: u64,
        blocks: usize,
    },
    Flush,
    /// Some of the replies arrive, in any order and in parts of any length.
    Reply {
        order: u64,
        share: usize,
        part: usize,
    },
    /// The connection ends, and the server may end too.
    Lose {
        dies: bool,
    },
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0..8_u64, 1..4_usize, any::<bool>())
            .prop_map(|(block, blocks, fua)| Act::Write { block, blocks, fua }),
        2 => (0..8_u64, 1..4_usize).prop_map(|(block, blocks)| Act::Read { block, blocks }),
        2 => Just(Act::Flush),
        4 => (any::<u64>(), 0..10_usize, 1..5000_usize)
            .prop_map(|(order, share, part)| Act::Reply { order, share, part }),
        1 => any::<bool>().prop_map(|dies| Act::Lose { dies }),
    ]
}

/// The requests of a property test, over a server whose replies it holds back.
struct Play {
    model: Model,
    exchange: Exchange,
    ends: Ends,
    replies: Vec<Vec<u8>>,
    /// Requests so far: tag, first block, blocks, and for writes the byte.
    started: Vec<(u64, u64, usize, Option<u8>)>,
    flushes: Vec<u64>,
    /// The step at which each request was found complete.
    seen: BTreeMap<u64, u64>,
}

impl Play {
    fn new(flags: u16) -> Self {
        let (model, exchange, ends) = (Model::new(), exchange(flags), Ends::default());
        let (replies, started, flushes, seen) = Default::default();
        Self { model, exchange, ends, replies, started, flushes, seen }
    }

    /// Overlapping requests are not in flight together, because their order would be undefined.
    fn is_free(&self, block: u64, blocks: usize) -> bool {
        let overlaps = |first: u64, count: usize| {
            first < block + blocks as u64 && block < first + count as u64
        };
        let open = self.started.iter().filter(|it| self.ends.result(it.0).is_none());
        open.into_iter().all(|(_, first, count, _)| !overlaps(*first, *count))
    }

    fn act(&mut self, step: u64, act: &Act) {
        let tag = step;
        match *act {
            Act::Write { block, blocks, fua } if self.is_free(block, blocks) => {
                let byte = u8::try_from(tag).unwrap();
                let operation = write(block * 4096, byte, blocks * 4096, fua);
                self.started.push((tag, block, blocks, Some(byte)));
                self.ends.start(&mut self.exchange, tag, operation);
            }
            Act::Read { block, blocks } if self.is_free(block, blocks) => {
                let buffer = IoBuffer::new(blocks * 4096);
                let operation = OwnedOperation::Read { offset: block * 4096, buffer };
                self.started.push((tag, block, blocks, None));
                self.ends.start(&mut self.exchange, tag, operation);
            }
            Act::Flush => {
                self.flushes.push(tag);
                self.ends.start(&mut self.exchange, tag, OwnedOperation::Flush);
            }
            Act::Reply { order, share, part } => self.reply(order, share, part),
            Act::Lose { dies } => {
                self.replies.clear();
                self.exchange.lose_connection();
                if dies {
                    self.model.die();
                }
            }
            Act::Write { .. } | Act::Read { .. } => {}
        }
        let new = self.model.serve(&mut self.exchange);
        self.replies.extend(new);
        for tag in self.ends.0.lock().keys() {
            self.seen.entry(*tag).or_insert(step);
        }
    }

    fn reply(&mut self, order: u64, share: usize, part: usize) {
        let count = self.replies.len() * share / 9;
        let start = usize::try_from(order % 97).unwrap() % self.replies.len().max(1);
        self.replies.rotate_left(start);
        let bytes: Vec<u8> =
            self.replies.drain(..count.min(self.replies.len())).flatten().collect();
        for part in bytes.chunks(part) {
            self.exchange.receive(part, Instant::now()).unwrap();
        }
    }

    fn finish(&mut self) {
        while !self.exchange.is_idle() {
            self.reply(0, 9, 1 << 20);
            self.exchange.fail_doomed();
            let new = self.model.serve(&mut self.exchange);
            self.replies.extend(new);
        }
    }
}

proptest! {
    /// Checks for any order of replies: nothing fails while the oldest piece at the server is
    /// answered in time, and all requests fail when the server falls silent.
    #[test]
    fn requests_fail_by_silence_alone(
        blocks in prop::collection::vec(1..16_usize, 1..8),
        order in prop::collection::vec(any::<prop::sample::Index>(), 130),
    ) {
        let (mut model, mut exchange, ends) = (Model::new(), exchange(ALL), Ends::default());
        for (tag, blocks) in (1..).zip(&blocks) {
            ends.start(&mut exchange, tag, write(0, 7, blocks * 4096, false));
        }
        let mut now = Instant::now();
        let mut replies = model.serve(&mut exchange);
        for next in order.iter().take(replies.len() / 2) {
            let next = next.index(replies.len());
            // The others behind the oldest piece come at once.
            now += if next == 0 { TIMEOUT * 9 / 10 } else { Duration::ZERO };
            prop_assert!(!exchange.expire(now, "too early"));
            exchange.receive(&replies.remove(next), now).unwrap();
        }
        prop_assert!(ends.0.lock().values().all(Result::is_ok));
        let is_idle = exchange.is_idle();
        prop_assert_eq!(exchange.expire(now + TIMEOUT * 3, "silent"), !is_idle);
        prop_assert!(exchange.is_idle());
    }

    /// Checks for any losses: each request completes, and after a successful flush the last write
    /// of each block is durable, unless a flush requested after that write's acknowledgement has
    /// failed.
    #[test]
    fn flushes_keep_their_word_over_lost_connections(
        acts in prop::collection::vec(act(), 1..60),
        has_fua: bool,
    ) {
        const LAST: u64 = 250;
        let mut play = Play::new(if has_fua { ALL } else { SEND_FLUSH });
        for (step, act) in (1..).zip(&acts) {
            play.act(step, act);
        }
        play.finish();
        for (tag, ..) in &play.started {
            prop_assert!(play.ends.is_ok(*tag) || !has_fua, "{:?}", play.ends.result(*tag));
        }
        play.act(LAST, &Act::Flush);
        play.finish();
        if !play.ends.is_ok(LAST) {
            return Ok(());
        }
        for block in 0..11_u64 {
            let writes = play.started.iter().filter(|(_, first, count, byte)| {
                byte.is_some() && (*first..*first + *count as u64).contains(&block)
            });
            let Some((tag, .., byte)) = writes.max() else { continue };
            let seen = play.seen.get(tag).copied().unwrap_or(LAST);
            let is_told = |it: &u64| *it > seen && !play.ends.is_ok(*it);
            if play.ends.is_ok(*tag) && !play.flushes.iter().any(is_told) {
                let found = play.model.durable[usize::try_from(block * 4096).unwrap()];
                prop_assert_eq!(Some(found), *byte, "block {}", block);
            }
        }
    }
}
