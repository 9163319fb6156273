//! Stopping: what was accepted is finished and answered, nothing else is begun.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tidegate_serve::nbd::{Export, Limits, ServerBuilder};

use crate::client::*;
use crate::devices::{Call, Probe};
use crate::harness::TestServer;

#[test]
fn accepted_requests_are_finished_and_answered() {
    let (probe, gate) = Probe::gated(u64::MAX);
    let mut server = TestServer::serve(std::sync::Arc::clone(&probe) as _);
    let mut client = Client::simple(&server.path());
    for cookie in 0..4 {
        client.request(WRITE, 0, cookie, cookie * 512, 512);
        client.send(&[7; 512]);
    }
    let held: Vec<_> = (0..4).map(|_| gate.recv().expect("arrives")).collect();
    server.stop.stop();
    // The socket goes first: no client can connect any more.
    while UnixStream::connect(server.path()).is_ok() {}
    for arrival in held {
        arrival.open();
    }
    let mut cookies: Vec<_> = (0..4).map(|_| client.simple_reply()).collect();
    cookies.sort_unstable();
    assert_eq!(cookies, [(0, 0), (0, 1), (0, 2), (0, 3)]);
    client.expect_closed();
    server.join();
    assert_eq!(probe.calls().iter().filter(|call| matches!(call, Call::Write(..))).count(), 4);
}

#[test]
fn requests_that_wait_behind_unread_replies_are_answered_too() {
    let limits = Limits { stop_grace: Duration::from_secs(3600), ..Limits::default() };
    let mut server = TestServer::limited(limits);
    let mut client = Client::simple(&server.path());
    client.stream.set_nonblocking(true).expect("nonblocking");
    let requests = request_bytes(READ, 0, 1, 0, 4096).repeat(1000);
    // The server is full when it takes no more while it serves other clients five hundred times.
    let (mut refused, mut sent_bytes) = (0, 0);
    while refused < 500 {
        match client.stream.write(&requests[sent_bytes % requests.len()..]) {
            Ok(sent) => (refused, sent_bytes) = (0, sent_bytes + sent),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock, "the server is there");
                Client::simple(&server.path()).write(0, &[1; 512]);
                refused += 1;
            }
        }
    }
    server.stop.stop();
    client.stream.set_nonblocking(false).expect("blocking");
    let mut replies = Vec::new();
    // The end of the connection may say that not all was received, but behind the last reply only.
    if let Err(error) = client.stream.read_to_end(&mut replies) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    server.join();
    assert_eq!(replies.len() % (16 + 4096), 0, "a reply was cut");
    // The first thousand came at once, and are far more than sockets hold replies of.
    assert!(replies.len() / (16 + 4096) >= 1000, "{} replies", replies.len() / (16 + 4096));
}

#[test]
fn idle_and_half_open_clients_do_not_hold_up_the_stop() {
    let limits = Limits { stop_grace: Duration::from_secs(3600), ..Limits::default() };
    let mut server = TestServer::limited(limits);
    let mut idle = Client::simple(&server.path());
    let mut greeted = Client::connect(&server.path());
    let mut half_written = Client::simple(&server.path());
    half_written.request(WRITE, 0, 1, 0, 1 << 20);
    half_written.send(&vec![0; 300_000]);
    server.stop.stop();
    server.join();
    idle.expect_closed();
    greeted.expect_closed();
    half_written.expect_closed();
    assert_eq!(server.statistics().connections_open, 0);
}

#[test]
fn a_client_that_does_not_read_cannot_hold_up_the_stop() {
    let limits = Limits { stop_grace: Duration::from_millis(100), ..Limits::default() };
    let mut server = TestServer::limited(limits);
    let mut client = Client::simple(&server.path());
    for cookie in 0..64 {
        client.request(READ, 0, cookie, 0, 1 << 20);
    }
    assert_eq!(client.simple_reply().0, 0);
    server.stop.stop();
    server.join();
    assert!(server.log.lock().iter().any(|line| line.contains("while the server stopped")));
}

/// The time for the last replies begins when there are any.
#[test]
fn a_request_that_takes_longer_than_the_time_for_replies_is_answered() {
    let (probe, gate) = Probe::gated(u64::MAX);
    let limits = Limits { stop_grace: Duration::from_millis(50), ..Limits::default() };
    let export = Export::new("", probe);
    let mut server = TestServer::start(ServerBuilder::new().export(export).limits(limits));
    let mut client = Client::simple(&server.path());
    client.request(READ, 0, 7, 0, 512);
    let arrival = gate.recv().expect("arrives");
    server.stop.stop();
    while UnixStream::connect(server.path()).is_ok() {}
    // Longer than the time for replies: nothing but time could end the connection.
    std::thread::sleep(Duration::from_millis(300));
    arrival.open();
    assert_eq!(client.simple_reply(), (0, 7));
    assert_eq!(client.read(512), [0; 512]);
    client.expect_closed();
    server.join();
    assert!(server.log.lock().is_empty(), "{:?}", server.log.lock());
}

#[test]
fn a_server_binds_again_right_after_it_stopped() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let address = tidegate_serve::nbd::ListenAddress::Unix(dir.path().join("s"));
    for _ in 0..3 {
        let device = crate::harness::memory(1 << 20);
        let server = ServerBuilder::new().export(Export::new("", device));
        let server = server.bind(std::slice::from_ref(&address)).expect("bind");
        let stop = tidegate_serve::nbd::StopHandle::new().expect("stop handle");
        stop.stop();
        server.run(&stop).expect("run");
    }
}
