//! Clients that break the rules: each gets an error or its end; other clients and the memory stay
//! unharmed.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use tidegate_serve::nbd::Limits;

use crate::client::*;
use crate::devices::Probe;
use crate::harness::TestServer;

const NEVER: Duration = Duration::from_secs(3600);

/// Memory of this process that is resident, in bytes.
fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc/self/status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS");
    let kib: usize = line.split_whitespace().nth(1).expect("a number").parse().expect("a number");
    kib << 10
}

/// Runs `body`, the test called `name`, in a process of its own, where memory can be measured.
fn alone(name: &str, body: fn()) {
    const MARK: &str = "TIDEGATE_TEST_ALONE";
    if std::env::var_os(MARK).is_some() {
        return body();
    }
    let test = std::env::current_exe().expect("the test's own path");
    let output = std::process::Command::new(test).args([name, "--exact"]).env(MARK, "1").output();
    let output = output.expect("runs itself");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("1 passed"), "{printed}");
}

/// A client that does everything right is served.
fn expect_unharmed(client: &mut Client) {
    client.write(4096, &[9; 4096]);
    assert_eq!(client.read_simple(4096, 4096), vec![9; 4096]);
}

#[test]
fn broken_handshakes_end_only_themselves() {
    let server = TestServer::memory();
    let mut neighbour = Client::simple(&server.path());
    let flags = 3_u32.to_be_bytes().to_vec();
    let cases: [Vec<u8>; 5] = [
        u32::MAX.to_be_bytes().to_vec(),
        [&flags[..], b"IHAVEOPS\0\0\0\0\0\0\0\0"].concat(),
        [&flags[..], &[0xff; 4096]].concat(),
        [&flags[..], &option_bytes(OPT_EXPORT_NAME, &[0xff; 4097])].concat(),
        [&flags[..], &option_bytes(OPT_GO, &info("", &[])), &[0; 28]].concat(),
    ];
    for (index, bytes) in cases.iter().enumerate() {
        let mut client = Client::connect(&server.path());
        client.send(bytes);
        if index == 4 {
            client.replies(OPT_GO);
        }
        client.expect_closed();
        expect_unharmed(&mut neighbour);
    }
    assert_eq!(server.log.lock().len(), cases.len());
    assert!(server.log.lock().iter().all(|line| line.starts_with("nbd: unix: connection")));
}

#[test]
fn an_option_flood_ends_at_the_limit() {
    let server = TestServer::memory();
    let mut client = Client::haggle(&server.path());
    for _ in 0..256 {
        client.option(99, b"data");
        assert_eq!(client.reply(99).0, ERR_UNSUP);
    }
    client.option(99, b"data");
    client.expect_closed();
}

#[test]
fn an_option_of_four_gigabytes_is_never_stored() {
    alone("hostile::an_option_of_four_gigabytes_is_never_stored", || {
        let server = TestServer::memory();
        let before = resident_bytes();
        let mut client = Client::haggle(&server.path());
        client.send(
            &[&b"IHAVEOPT"[..], &OPT_SET_META_CONTEXT.to_be_bytes(), &u32::MAX.to_be_bytes()]
                .concat(),
        );
        assert_eq!(client.reply(OPT_SET_META_CONTEXT).0, ERR_TOO_BIG);
        for _ in 0..64 {
            client.send(&vec![0xab; 1 << 20]);
        }
        assert!(resident_bytes() < before + (16 << 20), "the data was kept");
    });
}

#[test]
fn writes_of_hostile_lengths_are_drained_or_end_the_connection() {
    let server = TestServer::memory();
    for len in [u32::MAX, u32::MAX - 511, (64 << 20) + 1] {
        let mut client = Client::simple(&server.path());
        client.request(WRITE, 0, 1, 0, len);
        client.expect_closed();
    }
    let mut client = Client::simple(&server.path());
    client.request(WRITE, 0, 1, 0, 64 << 20);
    client.send(&vec![0; 64 << 20]);
    assert_eq!(client.simple_reply(), (EOVERFLOW, 1));
    expect_unharmed(&mut client);
}

#[test]
fn claimed_lengths_cost_no_memory() {
    alone("hostile::claimed_lengths_cost_no_memory", || {
        let server = TestServer::limited(Limits::default());
        let mut clients: Vec<_> = (0..32).map(|_| Client::simple(&server.path())).collect();
        let before = resident_bytes();
        for client in &mut clients {
            // A write of the largest size, of whose data only a little ever comes.
            client.request(WRITE, 0, 1, 0, 32 << 20);
            client.send(&[1; 100]);
        }
        let mut neighbour = Client::simple(&server.path());
        expect_unharmed(&mut neighbour);
        assert!(
            resident_bytes() < before + (128 << 20),
            "32 clients that sent 100 bytes each cost too much"
        );
    });
}

#[test]
fn a_client_that_reads_no_replies_is_held_back() {
    alone("hostile::a_client_that_reads_no_replies_is_held_back", || {
        let server = TestServer::limited(Limits { in_flight_bytes: 4 << 20, ..Limits::default() });
        let before = resident_bytes();
        let mut client = Client::simple(&server.path());
        client.stream.set_nonblocking(true).expect("nonblocking");
        let mut asked_bytes = 0_u64;
        // Large reads until the server takes no more of them.
        let request = request_bytes(READ, 0, 1, 0, 1 << 20);
        let mut refused = 0;
        while refused < 3 {
            if client.stream.write(&request).is_ok_and(|sent| sent == request.len()) {
                asked_bytes += 1 << 20;
            } else {
                // The server gets every chance to take more: a neighbour's request goes through it
                // first.
                expect_unharmed(&mut Client::simple(&server.path()));
                refused += 1;
            }
        }
        assert!(asked_bytes > 64 << 20, "the flood was no flood");
        assert!(resident_bytes() < before + (32 << 20), "{asked_bytes} bytes were asked for");
    });
}

/// A client that connects until it is let in.
fn accepted(server: &TestServer) -> Client {
    loop {
        let mut client = Client::connect_silently(&server.path());
        let mut first = [0];
        if matches!(client.stream.read(&mut first), Ok(1)) {
            client.read(17);
            client.send(&3_u32.to_be_bytes());
            client.go("");
            return client;
        }
    }
}

#[test]
fn connections_beyond_the_limit_are_refused_and_places_are_given_back() {
    let limits = Limits { connections: 8, silent_timeout: NEVER, ..Limits::default() };
    let server = TestServer::limited(limits);
    let mut clients: Vec<_> = (0..8).map(|_| Client::simple(&server.path())).collect();
    for _ in 0..10_000 {
        Client::connect_silently(&server.path()).expect_closed();
    }
    assert_eq!(server.statistics().connections_refused, 10_000);
    assert!(server.log.lock().len() < 1000, "the log has {} lines", server.log.lock().len());
    clients.iter_mut().for_each(expect_unharmed);
    let mut leaving = clients.pop().expect("a client");
    leaving.request(DISC, 0, 1, 0, 0);
    leaving.expect_closed();
    // The connection is counted until a moment after its socket is closed.
    let mut next = accepted(&server);
    expect_unharmed(&mut next);
}

#[test]
fn silent_connections_make_way_for_those_that_work() {
    let (connections, silent_timeout) = (8, Duration::ZERO);
    let limits = Limits { connections, silent_timeout, idle_timeout: NEVER, ..Limits::default() };
    let server = TestServer::limited(limits);
    let mut working = Client::simple(&server.path());
    expect_unharmed(&mut working);
    let silent: Vec<_> = (0..7).map(|_| Client::connect(&server.path())).collect();
    let mut clients: Vec<_> = (0..7).map(|_| accepted(&server)).collect();
    clients.iter_mut().for_each(expect_unharmed);
    for mut client in silent {
        client.expect_closed();
    }
    Client::connect_silently(&server.path()).expect_closed();
    clients.iter_mut().for_each(expect_unharmed);
    expect_unharmed(&mut working);
    assert!(server.log.lock().iter().any(|line| line.contains("gave its place up")));
}

#[test]
fn at_the_limit_idle_connections_make_way_too() {
    let (silent_timeout, idle_timeout) = (Duration::ZERO, Duration::ZERO);
    let limits = Limits { connections: 1, silent_timeout, idle_timeout, ..Limits::default() };
    let server = TestServer::limited(limits);
    let mut idle = Client::simple(&server.path());
    expect_unharmed(&mut idle);
    expect_unharmed(&mut accepted(&server));
    idle.expect_closed();
}

#[test]
fn all_clients_together_get_no_more_memory_than_there_is() {
    alone("hostile::all_clients_together_get_no_more_memory_than_there_is", || {
        let stall_timeout_under_pressure = Duration::from_millis(100);
        let limits =
            Limits { memory_bytes: 64 << 20, stall_timeout_under_pressure, ..Limits::default() };
        let server = TestServer::limited(limits);
        let before = resident_bytes();
        // Reads of whose answers no byte is taken: 6.4 GB of them.
        let flood = request_bytes(READ, 0, 1, 0, 32 << 20);
        let flooding: Vec<_> = (0..50)
            .map(|_| {
                let mut client = Client::simple(&server.path());
                client.send(&flood.repeat(4));
                client
            })
            .collect();
        let mut neighbour = Client::simple(&server.path());
        // What needs no memory is served at once; the rest when those that stall have been closed.
        expect_unharmed(&mut neighbour);
        assert_eq!(neighbour.read_simple(0, 32 << 20).len(), 32 << 20);
        let taken = resident_bytes().saturating_sub(before);
        // The requests, the buffers of the connections, what the neighbour has, and the device.
        let most = (64 << 20) + 51 * 700_000 + (32 << 20) + (64 << 20);
        assert!(taken < most, "{taken} bytes were taken");
        assert!(server.log.lock().iter().any(|line| line.contains("took no answer")));
        drop(flooding);
    });
}

/// What a client that is slow on purpose takes or sends at a time, and how often. The kernel's
/// buffers let the server see some of it every quarter of a second.
const LITTLE_BYTES: usize = 16 << 10;
const LITTLE_TIME: Duration = Duration::from_millis(20);

/// Has `step` take or send a little again and again, until it says that the server has closed the
/// connection, or until `stop` is dropped.
fn trickle(stop: &Receiver<()>, mut step: impl FnMut(&mut [u8]) -> bool) {
    let mut little = [0; LITTLE_BYTES];
    while let Err(RecvTimeoutError::Timeout) = stop.recv_timeout(LITTLE_TIME) {
        if !step(&mut little) {
            return;
        }
    }
}

/// A client takes a little of a large read, or sends a little of a large write, again and again: it
/// would keep the memory of all others for 40 s.
#[test]
fn clients_that_trickle_do_not_keep_memory_that_others_wait_for() {
    let stall_timeout_under_pressure = Duration::from_millis(500);
    let limits =
        Limits { memory_bytes: 64 << 20, stall_timeout_under_pressure, ..Limits::default() };
    for command in [READ, WRITE] {
        let server = TestServer::limited(limits.clone());
        let mut client = Client::simple(&server.path());
        client.request(command, 0, 1, 0, 32 << 20);
        // Either is over only when the client holds its memory.
        if command == READ {
            assert_eq!(client.simple_reply(), (0, 1));
        } else {
            client.send(&vec![1; 1 << 20]);
        }
        let (stop, stopped) = channel();
        let trickling = std::thread::spawn(move || {
            trickle(&stopped, |little| {
                let stream = &mut client.stream;
                let moved =
                    if command == READ { stream.read(little) } else { stream.write(little) };
                matches!(moved, Ok(1..))
            });
        });
        let start = Instant::now();
        let mut neighbour = Client::simple(&server.path());
        assert_eq!(neighbour.read_simple(0, 32 << 20).len(), 32 << 20);
        assert!(start.elapsed() < Duration::from_secs(20), "it took {:?}", start.elapsed());
        drop(stop);
        trickling.join().expect("it ends");
        let log = server.log.lock();
        let expected = "while others waited for its memory";
        assert!(log.len() == 1 && log[0].contains(expected), "{log:?}");
    }
}

/// Where nobody waits for memory, a client may be slow, but not stand still.
#[test]
fn without_pressure_only_clients_that_stand_still_are_given_up() {
    let (stall_timeout, pressed) = (Duration::from_secs(2), Duration::from_millis(50));
    let stall_timeout_under_pressure = pressed;
    let limits = Limits { stall_timeout, stall_timeout_under_pressure, ..Limits::default() };
    let server = TestServer::limited(limits);
    let mut still = Client::simple(&server.path());
    still.request(READ, 0, 1, 0, 8 << 20);
    let mut slow = Client::simple(&server.path());
    slow.request(READ, 0, 1, 0, 4 << 20);
    assert_eq!(slow.simple_reply(), (0, 1));
    let (_stop, stopped) = channel();
    let mut left_bytes = 4 << 20;
    trickle(&stopped, |little| {
        slow.stream.read_exact(little).expect("it is served, however slowly");
        left_bytes -= little.len();
        left_bytes > 0
    });
    expect_unharmed(&mut slow);
    // What the kernel took is there to read, and then the end.
    let mut taken = Vec::new();
    let _ = still.stream.read_to_end(&mut taken);
    assert!(taken.len() < 8 << 20, "it was served after it had stood still");
    let log = server.log.lock();
    assert!(log.len() == 1 && log[0].contains("took no answer, and sent no data"), "{log:?}");
}

#[test]
fn memory_that_was_used_can_be_used_again() {
    let server = TestServer::limited(Limits { memory_bytes: 64 << 20, ..Limits::default() });
    let mut client = Client::simple(&server.path());
    let large = vec![7; 32 << 20];
    for _ in 0..3 {
        client.write(0, &large);
        assert!(client.read_simple(0, 32 << 20) == large);
    }
    // Small requests have memory of their own, which is used up too where none comes back.
    for _ in 0..200 {
        client.write(0, &large[..1 << 20]);
    }
}

#[test]
fn a_write_whose_data_does_not_come_is_given_up() {
    let stall_timeout = Duration::from_secs(1);
    let server = TestServer::limited(Limits { stall_timeout, ..Limits::default() });
    let mut client = Client::simple(&server.path());
    client.request(WRITE, 0, 1, 0, 1 << 20);
    client.send(&vec![1; 300_000]);
    client.expect_closed();
    // One that says nothing at all has nothing to send.
    expect_unharmed(&mut Client::simple(&server.path()));
}

#[test]
fn a_handshake_that_stalls_is_ended() {
    let limits = Limits { handshake_timeout: Duration::from_secs(2), ..Limits::default() };
    let server = TestServer::limited(limits);
    let mut silent = Client::connect(&server.path());
    let mut half = Client::haggle(&server.path());
    half.send(b"IHAVE");
    silent.expect_closed();
    half.expect_closed();
    assert!(server.log.lock().iter().all(|line| line.contains("handshake in time")));
}

#[test]
fn a_client_may_stall_anywhere_without_harm_to_others() {
    let server = TestServer::memory();
    let mut stalled = Vec::new();
    let write = [request_bytes(WRITE, 0, 1, 0, 1 << 20), vec![1; 1 << 20]].concat();
    for cut in [1, 27, 28, 29, 4096, 70_000, 300_000, (1 << 20) + 27] {
        let mut client = Client::simple(&server.path());
        client.send(&write[..cut]);
        stalled.push((cut, client));
    }
    expect_unharmed(&mut Client::simple(&server.path()));
    for (cut, mut client) in stalled {
        client.send(&write[cut..]);
        assert_eq!(client.simple_reply(), (0, 1));
    }
}

#[test]
fn disconnects_with_requests_in_flight_leave_the_server_well() {
    let (probe, gate) = Probe::gated(2048);
    let server = TestServer::serve(Arc::clone(&probe) as _);
    for cookie in 0..3 {
        let mut client = Client::simple(&server.path());
        client.request(READ, 0, cookie, cookie * 512, 512);
        client.request(WRITE, 0, 9, 4096, 1 << 20);
        client.send(&[0; 1000]);
    }
    let held: Vec<_> = (0..3).map(|_| gate.recv().expect("arrives")).collect();
    expect_unharmed(&mut Client::simple(&server.path()));
    // The places of those that left are held until their requests are over.
    assert!(server.statistics().connections_open >= 3);
    for arrival in held {
        arrival.open();
    }
    expect_unharmed(&mut Client::simple(&server.path()));
}

#[test]
fn requests_beyond_the_limit_in_flight_wait_their_turn() {
    let (probe, gate) = Probe::gated(u64::MAX);
    let limits = Limits { in_flight_requests: 4, ..Limits::default() };
    let export = tidegate_serve::nbd::Export::new("", probe);
    let builder = tidegate_serve::nbd::ServerBuilder::new().export(export).limits(limits);
    let server = TestServer::start(builder);
    let mut client = Client::simple(&server.path());
    for cookie in 0..12 {
        client.request(READ, 0, cookie, 0, 512);
    }
    for _ in 0..12 {
        let arrival = gate.recv().expect("arrives");
        assert!(gate.len() < 4, "more at the device than allowed");
        arrival.open();
        let (error, _) = client.simple_reply();
        assert_eq!((error, client.read(512).len()), (0, 512));
    }
}

#[test]
fn garbage_after_the_handshake_ends_the_connection() {
    let server = TestServer::memory();
    let mut neighbour = Client::simple(&server.path());
    for seed in 1..50 {
        let mut client = Client::simple(&server.path());
        client.send(&pattern(4096, seed));
        client.expect_closed();
    }
    expect_unharmed(&mut neighbour);
    assert_eq!(server.statistics().client_faults, 49);
}
