//! Bodies of the fuzz targets, as plain functions that a short property test also runs: input from
//! a server, cut into parts by the fuzzer, goes to the code that receives it.

#![expect(clippy::disallowed_methods, reason = "requests have a time limit, which no test reaches")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::exchange::{Exchange, Started};
use super::export::{NbdExport, Rules};
use super::handshake::{Handshake, Step};
use super::protocol::export_flag::SEND_FLUSH;
use super::watched::Watched;
use crate::device::flushes::Moment;
use crate::device::{AsyncRequest, Context, IoBuffer, OwnedOperation, WriteFlags, ZeroFlags};

/// More than one message of a handshake.
const INPUT_BYTES_MAX: usize = 64 << 10;

/// Takes the next part; its first byte is its length.
fn part<'a>(data: &mut &'a [u8]) -> &'a [u8] {
    let Some((&len, rest)) = data.split_first() else { return &[] };
    let (part, rest) = rest.split_at(rest.len().min(usize::from(len)));
    *data = rest;
    part
}

/// Runs a handshake with a server that sends `data`.
///
/// # Panics
/// Panics if an invariant does not hold.
pub fn handshake(mut data: &[u8]) {
    let mut handshake = Handshake::new("export");
    let (mut input, mut output) = (Vec::new(), Vec::new());
    loop {
        let Ok((used, step)) = handshake.advance(&input, &mut output) else { return };
        input.drain(..used);
        match step {
            Step::Again => {}
            Step::NeedInput if data.is_empty() => return,
            Step::NeedInput => input.extend_from_slice(part(&mut data)),
            Step::Done => break,
        }
        assert!(input.len() < INPUT_BYTES_MAX && output.len() < INPUT_BYTES_MAX);
    }
    if let Ok(rules) = Rules::of(handshake.into_export(), None) {
        let geometry = rules.geometry;
        assert!(crate::device::is_block_bytes(geometry.block_bytes), "{geometry:?}");
        assert!(geometry.size_bytes() == rules.export.size_bytes);
        assert!(rules.request_bytes_max >= geometry.block_bytes);
        rules.check_again(&rules.export).expect("an export is like itself");
    }
}

/// Runs requests of a client over a server that answers with `data` on one connection, and with the
/// rest on another after a fault.
///
/// # Panics
/// Panics if a request does not complete, or completes twice.
pub fn replies(mut data: &[u8]) {
    let first = part(&mut data).first().copied().unwrap_or(0);
    let flags = SEND_FLUSH | u16::from(first) << 3;
    let export = NbdExport { size_bytes: 1 << 20, flags, ..NbdExport::named("export") };
    let export = NbdExport { block_sizes: (512, 4096, 8192), ..export };
    let Ok(rules) = Rules::of(export, None) else { return };
    let ended = Arc::new(AtomicUsize::new(0));
    let mut exchange = Exchange::new("nbd:", rules, Watched::default(), Duration::from_secs(3600));
    let operations = operations();
    let started = operations.len();
    for operation in operations {
        let moment = exchange.clock().now();
        exchange.add(start(operation, moment, &ended));
    }
    while !data.is_empty() {
        send_all(&mut exchange);
        if exchange.receive(part(&mut data), Instant::now()).is_err() {
            exchange.lose_connection();
        }
        exchange.fail_doomed();
    }
    assert!(ended.load(Ordering::Relaxed) <= started);
    drop(exchange);
    assert_eq!(ended.load(Ordering::Relaxed), started);
}

fn operations() -> Vec<OwnedOperation> {
    let buffer = || IoBuffer::new(16 << 10);
    let zeroes = ZeroFlags { fua: true, ..ZeroFlags::default() };
    let write =
        |fua| OwnedOperation::Write { offset: 4096, buffer: buffer(), flags: WriteFlags { fua } };
    vec![
        OwnedOperation::Read { offset: 0, buffer: buffer() },
        write(false),
        OwnedOperation::Flush,
        write(true),
        OwnedOperation::WriteZeroes { offset: 0, len: 64 << 10, flags: zeroes },
        OwnedOperation::Discard { offset: 0, len: 1 << 20 },
        OwnedOperation::Flush,
    ]
}

fn start(operation: OwnedOperation, moment: Moment, ended: &Arc<AtomicUsize>) -> Started {
    let ended = Arc::clone(ended);
    let completion = move |_, _| {
        ended.fetch_add(1, Ordering::Relaxed);
    };
    let request = AsyncRequest::new(operation, Context::default(), completion);
    Started { request, since: Instant::now(), moment }
}

fn send_all(exchange: &mut Exchange) {
    exchange.prepare();
    loop {
        let sent = exchange.to_send().iter().map(|it| it.len()).sum();
        if sent == 0 {
            return;
        }
        exchange.sent(sent);
        exchange.prepare();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Replies with cookies and errors that may fit.
    fn any_reply() -> impl Strategy<Value = Vec<u8>> {
        let errors = prop_oneof![Just(0_u8), Just(0), Just(5), Just(108), any::<u8>()];
        (errors, 0..32_u8, 0..3_usize).prop_map(|(error, cookie, blocks)| {
            let magic = [0x67, 0x44, 0x66, 0x98];
            let header = [&magic[..], &[0, 0, 0, error], &[0, 0, 0, 0, 0, 0, 0, cookie]].concat();
            let mut bytes = vec![16];
            bytes.extend(header);
            (0..blocks * 33).for_each(|_| bytes.extend([vec![248], vec![7; 248]].concat()));
            bytes
        })
    }

    fn cut(bytes: &[u8], len: usize) -> Vec<u8> {
        let parts = bytes.chunks(len.clamp(1, 255));
        parts.flat_map(|it| [&[u8::try_from(it.len()).unwrap()], it].concat()).collect()
    }

    proptest! {
        #[test]
        fn handshakes_survive_any_bytes(
            data in prop::collection::vec(any::<u8>(), 0..300),
            kind in 0..4_u8,
            len: u8,
        ) {
            handshake(&data);
            let greeting = [&b"NBDMAGICIHAVEOPT"[..], &[0, 3]].concat();
            handshake(&cut(&[&greeting[..], &data].concat(), len.into()));
            let answer = [0, 3, 0xe8, 0x89, 4, 0x55, 0x65, 0xa9, 0, 0, 0, 7, 0, 0, 0, 3, 0, 0, 0];
            let body = &data[..data.len().min(100)];
            let told = [&[u8::try_from(body.len() + 2).unwrap(), 0, kind][..], body].concat();
            let end = [0, 3, 0xe8, 0x89, 4, 0x55, 0x65, 0xa9, 0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0, 0];
            let all = [&greeting[..], &answer, &told, &answer, &told, &end].concat();
            handshake(&cut(&all, len.into()));
        }

        #[test]
        fn exchanges_survive_any_bytes(data in prop::collection::vec(any::<u8>(), 0..300)) {
            replies(&data);
        }

        #[test]
        fn exchanges_survive_any_replies(
            bits: u8,
            data in prop::collection::vec(any_reply(), 0..30),
        ) {
            replies(&[&[1, bits][..], &data.concat()].concat());
        }
    }
}
