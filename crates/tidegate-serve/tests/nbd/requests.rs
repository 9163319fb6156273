//! Every request with every flag, in simple and structured replies, and how errors are told.

use std::sync::Arc;

use tidegate::device::fault::{Effect, Fault, Rule, When};
use tidegate::device::{BlockDevice, DeviceErrorKind, Extent, Operation, WriteFlags, ZeroFlags};
use tidegate_serve::nbd::{Export, Limits, ServerBuilder};

use crate::client::*;
use crate::devices::{Arrival, Call, Probe};
use crate::harness::TestServer;
use crate::harness::memory;

const SIZE: u64 = 4 << 20;

fn probe() -> (Arc<Probe>, TestServer) {
    let probe = Arc::new(Probe::new());
    (Arc::clone(&probe), TestServer::serve(probe))
}

#[test]
fn written_data_is_read_back_in_every_size() {
    let server = TestServer::serve(memory(64 << 20));
    let (mut simple, mut structured) =
        (Client::simple(&server.path()), Client::structured(&server.path()));
    // Sizes on each side of every threshold: buffered, own payload, inline, worker, the largest.
    let sizes = [512, 4096, 65536, 66048, 256 << 10, (256 << 10) + 512, 1 << 20, 32 << 20];
    for (seed, len) in (1..).zip(sizes) {
        let data = pattern(len, seed);
        let offset = u64::from(seed) * 512;
        let wire_len = u32::try_from(len).expect("short");
        simple.write(offset, &data);
        assert!(structured.read_structured(0, offset, wire_len) == data, "{len} bytes, structured");
        assert!(structured.read_structured(DF, offset, wire_len) == data, "{len} bytes, whole");
        let other = pattern(len, seed ^ 0x55);
        structured.write(offset, &other);
        assert!(simple.read_simple(offset, wire_len) == other, "{len} bytes, simple");
    }
    let statistics = server.statistics();
    assert_eq!((statistics.writes, statistics.reads, statistics.errors), (16, 24, 0));
    assert_eq!(statistics.written_bytes * 3, statistics.read_bytes * 2);
}

#[test]
fn requests_reach_the_device_with_their_flags() {
    let (probe, server) = probe();
    let mut client = Client::structured(&server.path());
    let zero = |fua, may_unmap, fast_only| ZeroFlags { fua, may_unmap, fast_only };
    let cases = [
        (FLUSH, 0, 0, 0, vec![Call::Flush]),
        (FLUSH, FUA, 0, 0, vec![Call::Flush]),
        (TRIM, 0, 512, 1024, vec![Call::Discard(512, 1024)]),
        (TRIM, FUA, 512, 1024, vec![Call::Discard(512, 1024), Call::Flush]),
        (CACHE, FUA, 0, 512, vec![]),
        (WRITE_ZEROES, 0, 0, 512, vec![Call::WriteZeroes(0, 512, zero(false, true, false))]),
        (
            WRITE_ZEROES,
            FUA | NO_HOLE,
            0,
            512,
            vec![Call::WriteZeroes(0, 512, zero(true, false, false))],
        ),
        (WRITE_ZEROES, FAST_ZERO, 0, 512, vec![Call::WriteZeroes(0, 512, zero(false, true, true))]),
        // Longer than what is done inline, and as long as the device.
        (
            WRITE_ZEROES,
            0,
            0,
            4 << 20,
            vec![Call::WriteZeroes(0, 4 << 20, zero(false, true, false))],
        ),
    ];
    let mut expected = Vec::new();
    for (cookie, (command, flags, offset, len, calls)) in (100..).zip(cases) {
        client.request(command, flags, cookie, offset, len);
        assert_eq!(client.simple_reply(), (0, cookie), "command {command} flags {flags}");
        expected.extend(calls);
        assert_eq!(probe.calls(), expected, "command {command} flags {flags}");
    }
    client.request(WRITE, FUA, 1, 0, 512);
    client.send(&[1; 512]);
    assert_eq!(client.simple_reply(), (0, 1));
    assert_eq!(probe.calls().last(), Some(&Call::Write(0, 512, WriteFlags { fua: true })));
}

#[test]
fn flags_that_do_not_belong_to_a_command_are_refused() {
    let server = TestServer::memory();
    let (mut simple, mut structured) =
        (Client::simple(&server.path()), Client::structured(&server.path()));
    let own = [
        (READ, DF),
        (WRITE, 0),
        (FLUSH, 0),
        (TRIM, 0),
        (CACHE, 0),
        (WRITE_ZEROES, NO_HOLE | FAST_ZERO),
        (BLOCK_STATUS, REQ_ONE),
    ];
    for (command, own) in own {
        for flag in (1..16).map(|bit| 1 << bit).filter(|flag| own & flag == 0) {
            let len = if command == FLUSH { 0 } else { 512 };
            structured.request(command, flag, 9, 0, len);
            simple.request(command, flag, 9, 0, len);
            if command == WRITE {
                structured.send(&[0; 512]);
                simple.send(&[0; 512]);
            }
            let (error, message, offset) = structured.error_chunk(9);
            assert_eq!((error, offset), (EINVAL, None), "command {command} flag {flag}");
            assert!(message.contains("flag"), "{message}");
            assert_eq!(simple.simple_reply(), (EINVAL, 9));
        }
    }
    // Without structured replies there is no DF and no block status.
    simple.request(READ, DF, 1, 0, 512);
    assert_eq!(simple.simple_reply(), (EINVAL, 1));
    simple.request(BLOCK_STATUS, 0, 2, 0, 512);
    assert_eq!(simple.simple_reply(), (EINVAL, 2));
}

#[test]
fn ranges_are_checked() {
    let server = TestServer::memory();
    let mut client = Client::simple(&server.path());
    let cases = [
        (READ, SIZE, 512, EINVAL),
        (READ, SIZE - 512, 1024, EINVAL),
        (READ, u64::MAX - 511, 512, EINVAL),
        (READ, u64::MAX, u32::MAX, EOVERFLOW),
        (READ, 0, (32 << 20) + 512, EOVERFLOW),
        (READ, 0, 0, EINVAL),
        (READ, 1, 512, EINVAL),
        (READ, 0, 511, EINVAL),
        (WRITE, SIZE, 512, ENOSPC),
        (WRITE, 256, 512, EINVAL),
        (WRITE, 0, 1, EINVAL),
        (WRITE, 0, 0, EINVAL),
        (WRITE, 0, (32 << 20) + 512, EOVERFLOW),
        (TRIM, SIZE, 512, EINVAL),
        (TRIM, 0, u32::MAX, EINVAL),
        (CACHE, SIZE, 512, EINVAL),
        (WRITE_ZEROES, SIZE - 512, 1024, ENOSPC),
        (WRITE_ZEROES, 0, 100, EINVAL),
        (FLUSH, 0, 512, EINVAL),
        (FLUSH, 512, 0, EINVAL),
        (8, 0, 512, EINVAL),
        (u16::MAX, 0, 512, EINVAL),
    ];
    for (cookie, (command, offset, len, error)) in (0..).zip(cases) {
        client.request(command, 0, cookie, offset, len);
        if command == WRITE {
            client.send(&vec![0; len as usize]);
        }
        assert_eq!(client.simple_reply(), (error, cookie), "command {command} {offset}+{len}");
    }
    let counted = server.statistics();
    assert_eq!((counted.errors, counted.failures), (cases.len() as u64, 0), "the client is wrong");
    assert_eq!(client.read_simple(0, 512), vec![0; 512]);
}

#[test]
fn a_read_only_export_refuses_every_write() {
    let probe = Arc::new(Probe::new());
    let export = Export::new("", Arc::clone(&probe) as _).read_only(true);
    let server = TestServer::start(ServerBuilder::new().export(export));
    let mut client = Client::simple(&server.path());
    for command in [WRITE, TRIM, WRITE_ZEROES] {
        client.request(command, 0, 3, 0, 512);
        if command == WRITE {
            client.send(&[1; 512]);
        }
        assert_eq!(client.simple_reply(), (EPERM, 3));
    }
    client.request(FLUSH, 0, 4, 0, 0);
    assert_eq!(client.simple_reply(), (0, 4));
    assert_eq!(probe.calls(), [Call::Flush]);
}

#[test]
fn errors_of_the_device_have_the_protocols_numbers() {
    let cases = [
        (DeviceErrorKind::ReadOnly, EPERM),
        (DeviceErrorKind::NoSpace, ENOSPC),
        (DeviceErrorKind::OutOfRange, EINVAL),
        (DeviceErrorKind::Misaligned, EINVAL),
        (DeviceErrorKind::Unsupported, ENOTSUP),
        (DeviceErrorKind::Io, EIO),
        (DeviceErrorKind::Corrupt, EIO),
    ];
    for (kind, error) in cases {
        let server = TestServer::serve(Arc::new(Probe::failing(kind)));
        let mut structured = Client::structured(&server.path());
        let mut simple = Client::simple(&server.path());
        for (command, len, at) in [
            (READ, 512, Some(1024)),
            (READ, 1 << 20, Some(1024)),
            (WRITE, 512, Some(1024)),
            (TRIM, 512, None),
        ] {
            structured.request(command, 0, 7, 1024, len);
            simple.request(command, 0, 7, 1024, len);
            if command == WRITE {
                structured.send(&[0; 512]);
                simple.send(&[0; 512]);
            }
            assert_eq!(structured.error_chunk(7), (error, "told to fail at 1024".into(), at));
            assert_eq!(simple.simple_reply(), (error, 7));
        }
        let failures = if [EIO, ENOSPC].contains(&error) { 8 } else { 0 };
        let counted = server.statistics();
        assert_eq!((counted.errors, counted.failures), (8, failures), "{kind:?}");
    }
}

#[test]
fn a_device_that_panics_fails_only_its_request() {
    struct Panics(Arc<tidegate::device::memory::MemoryDevice>);
    impl BlockDevice for Panics {
        fn geometry(&self) -> tidegate::device::Geometry {
            self.0.geometry()
        }
        fn run(&self, operation: &mut Operation<'_>) -> tidegate::device::Result<()> {
            assert!(!matches!(operation, Operation::Read { offset: 0, .. }), "told to panic");
            self.0.run(operation)
        }
    }
    let server = TestServer::serve(Arc::new(Panics(memory(1 << 20))));
    let mut client = Client::simple(&server.path());
    for _ in 0..40 {
        client.request(READ, 0, 1, 0, 512);
        assert_eq!(client.simple_reply(), (EIO, 1));
    }
    assert_eq!(client.read_simple(512, 512), vec![0; 512]);
}

fn extent(offset: u64, len: u64, hole: bool, zero: bool) -> Extent {
    Extent { offset, len, hole, zero }
}

fn descriptors(chunk: &Chunk) -> Vec<(u32, u32)> {
    assert_eq!((chunk.done, chunk.kind), (true, 5));
    assert_eq!(&chunk.payload[..4], &1_u32.to_be_bytes());
    let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().expect("4 bytes"));
    chunk.payload[4..].chunks(8).map(|pair| (number(&pair[..4]), number(&pair[4..]))).collect()
}

#[test]
fn block_status_joins_and_clips_what_the_device_tells() {
    let extents = vec![
        extent(0, 512, false, false),
        extent(512, 512, false, false),
        extent(1024, 1024, true, true),
        extent(2048, 512, true, false),
        extent(2560, 8192, false, true),
    ];
    let probe = Arc::new(Probe::with_extents(extents));
    let server = TestServer::serve(Arc::clone(&probe) as _);
    let mut client = Client::structured(&server.path());
    client.request(BLOCK_STATUS, 0, 1, 0, 4096);
    assert_eq!(descriptors(&client.chunk()), [(1024, 0), (1024, 3), (512, 1), (1536, 2)]);
    client.request(BLOCK_STATUS, REQ_ONE, 2, 0, 4096);
    assert_eq!(descriptors(&client.chunk()), [(1024, 0)]);
    // Longer than what is tried at once.
    client.request(BLOCK_STATUS, 0, 3, 0, 4 << 20);
    assert_eq!(descriptors(&client.chunk())[3], (8192, 2));
    assert!(matches!(probe.calls()[1], Call::Status(0, 4096, 1)));
}

#[test]
fn block_status_of_a_device_that_knows_nothing_says_data() {
    let server = TestServer::serve(Arc::new(Probe::with_extents(vec![])));
    let mut client = Client::structured(&server.path());
    client.request(BLOCK_STATUS, 0, 1, 512, 1024);
    assert_eq!(descriptors(&client.chunk()), [(1024, 0)]);
}

#[test]
fn slow_requests_of_one_connection_run_in_parallel_and_are_answered_as_they_finish() {
    let (probe, gate) = Probe::gated(u64::MAX);
    let server = TestServer::serve(probe);
    let mut client = Client::simple(&server.path());
    for cookie in 0..8_u64 {
        client.request(WRITE, 0, cookie, cookie * 512, 512);
        client.send(&[1; 512]);
    }
    let mut waiting: Vec<_> =
        (0..8).map(|_| gate.recv().expect("all eight arrive at once")).collect();
    waiting.sort_by_key(|arrival| match arrival.call {
        Call::Write(offset, ..) => offset,
        _ => u64::MAX,
    });
    for cookie in (0..8).rev() {
        waiting.remove(cookie).open();
        assert_eq!(client.simple_reply(), (0, cookie as u64));
    }
}

#[test]
fn a_slow_request_does_not_hold_up_others() {
    let (probe, gate) = Probe::gated(512);
    let server = TestServer::serve(probe);
    let mut client = Client::structured(&server.path());
    client.request(READ, 0, 1, 0, 512);
    let held = gate.recv().expect("arrives");
    assert_eq!(client.read_structured(0, 512, 4096), vec![0; 4096]);
    client.request(DISC, 0, 2, 0, 0);
    held.open();
    // What was asked before the goodbye is answered after it.
    assert_eq!(client.chunk().payload.len(), 8 + 512);
    client.expect_closed();
}

#[test]
fn a_flush_covers_what_another_connection_was_answered() {
    let (probe, server) = probe();
    let mut writer = Client::simple(&server.path());
    let mut flusher = Client::simple(&server.path());
    writer.write(512, &[1; 512]);
    flusher.request(FLUSH, 0, 1, 0, 0);
    assert_eq!(flusher.simple_reply(), (0, 1));
    // The device saw the write finished, then the flush: its own promise does the rest.
    assert_eq!(probe.calls(), [Call::Write(512, 512, WriteFlags { fua: false }), Call::Flush]);
}

/// A device that hangs holds as many requests of one connection as the limit allows, and no thread
/// waits for them: the pool has fewer.
#[test]
fn a_connection_has_256_requests_in_flight() {
    let below = Arc::new(Fault::new(memory(4 << 20), 1));
    let server = TestServer::serve(Arc::clone(&below) as _);
    let mut client = Client::simple(&server.path());
    below.add(Rule::new(&[], When::Always, Effect::Hang));
    for cookie in 0..256_u64 {
        client.request(READ, 0, cookie, cookie * 512, 512);
    }
    below.wait_until_hung(256);
    below.heal();
    below.release();
    let mut cookies: Vec<_> = (0..256)
        .map(|_| {
            let (error, cookie) = client.simple_reply();
            assert_eq!((error, client.read(512)), (0, vec![0; 512]));
            cookie
        })
        .collect();
    cookies.sort_unstable();
    assert!(cookies.into_iter().eq(0..256));
}

/// A client may send as much as the limits allow before it reads an answer.
#[test]
fn a_client_that_reads_answers_late_may_send_up_to_the_limits() {
    const WRITE_BYTES: u32 = 64 << 10;
    let data = vec![1; WRITE_BYTES as usize];
    // With many connections, each has small buffers.
    let few = TestServer::limited(Limits::default());
    let memory_bytes = 64 << 20;
    let many = TestServer::limited(Limits { connections: 600, memory_bytes, ..Limits::default() });
    for server in [few, many] {
        for (reads, read_bytes) in
            [(16_u64, 64_u32 << 10), (16, 1 << 20), (192, 64 << 10), (240, 512), (64, 4096)]
        {
            let mut client = Client::simple(&server.path());
            for cookie in 0..reads {
                client.request(READ, 0, cookie, 0, read_bytes);
            }
            for cookie in reads..reads + 16 {
                client.request(WRITE, 0, cookie, 32 << 20, WRITE_BYTES);
                client.send(&data);
            }
            for _ in 0..reads + 16 {
                let (error, cookie) = client.simple_reply();
                assert_eq!(error, 0);
                if cookie < reads {
                    assert_eq!(client.read(read_bytes as usize), vec![0; read_bytes as usize]);
                }
            }
        }
    }
}

/// A client sends a write again whose connection broke, while the device still works on the first
/// one. Otherwise the older write could end last, over the newer one.
#[test]
fn a_change_waits_for_one_of_another_connection_that_it_overlaps() {
    let (probe, gate) = Probe::gated(2048);
    let server = TestServer::serve(std::sync::Arc::clone(&probe) as _);
    let mut first = Client::simple(&server.path());
    first.request(WRITE, 0, 1, 0, 1024);
    first.send(&[1; 1024]);
    let held = gate.recv().expect("arrives");
    drop(first);
    let mut second = Client::simple(&server.path());
    second.request(WRITE, 0, 2, 512, 512);
    second.send(&[2; 512]);
    let mut third = Client::simple(&server.path());
    third.request(WRITE_ZEROES, 0, 3, 0, 512);
    // Other changes go on, of new clients too.
    for _ in 0..100 {
        Client::simple(&server.path()).write(2048, &[3; 512]);
    }
    assert!(gate.is_empty(), "a change began over one that is under way");
    held.open();
    // These two do not overlap.
    let both = [gate.recv().expect("arrives"), gate.recv().expect("arrives")];
    both.into_iter().for_each(Arrival::open);
    assert_eq!((second.simple_reply(), third.simple_reply()), ((0, 2), (0, 3)));
    let mut block = [0; 512];
    let calls = probe.calls();
    assert!(matches!(calls.first(), Some(Call::Write(0, 1024, _))), "{calls:?}");
    probe.content(512, &mut block);
    assert_eq!(block, [2; 512]);
}
