//! Exports whose devices open while the server runs.

use std::io::{ErrorKind, Read as _};
use std::time::Duration;

use tidegate_serve::nbd::{Export, Limits, ServeError, ServerBuilder};

use crate::client::*;
use crate::harness::{TestServer, memory};

/// A server of `later`, which is not open yet, and of `first`, within a short time for handshakes.
fn server() -> TestServer {
    let limits = Limits { handshake_timeout: Duration::from_millis(200), ..Limits::default() };
    let first = Export::new("first", memory(1 << 20));
    TestServer::start(ServerBuilder::new().later("later").export(first).limits(limits))
}

fn offer(server: &TestServer) {
    server.exports.offer(Export::new("later", memory(2 << 20))).expect("it was announced");
}

/// Checks that no answer comes, for longer than a handshake may take.
fn assert_waits(client: &mut Client) {
    client.stream.set_read_timeout(Some(Duration::from_millis(600))).expect("timeout");
    let error = client.stream.read(&mut [0]).expect_err("no answer yet");
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    client.stream.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
}

#[test]
fn clients_of_a_device_that_is_being_opened_wait_for_it() {
    let server = server();
    // Each option that names an export waits; the last client asks for the default export.
    let asked = [
        (OPT_GO, info("later", &[])),
        (OPT_INFO, info("later", &[])),
        (OPT_EXPORT_NAME, b"later".to_vec()),
        (OPT_GO, info("", &[])),
    ];
    let mut clients = asked.map(|(option, data)| {
        let mut client = Client::haggle(&server.path());
        client.option(option, &data);
        (option, client)
    });
    let mut structured = Client::haggle(&server.path());
    structured.option(OPT_STRUCTURED_REPLY, &[]);
    assert_eq!(structured.reply(OPT_STRUCTURED_REPLY), (REP_ACK, vec![]));
    structured.option(OPT_SET_META_CONTEXT, &queries("later", &["base:allocation"]));
    for (_, client) in &mut clients {
        assert_waits(client);
    }
    assert_waits(&mut structured);
    // Clients of other exports do not wait, and find no name that they could not use.
    let mut other = Client::haggle(&server.path());
    other.option(OPT_LIST, &[]);
    assert_eq!(other.replies(OPT_LIST).len(), 2);
    other.go("first");
    offer(&server);
    for (option, mut client) in clients {
        if option == OPT_EXPORT_NAME {
            assert_eq!(client.read(8), (2_u64 << 20).to_be_bytes());
        } else {
            assert_eq!(client.replies(option).last(), Some(&(REP_ACK, vec![])));
        }
    }
    assert_eq!(structured.replies(OPT_SET_META_CONTEXT).len(), 2);
    structured.go("later");
}

#[test]
fn clients_of_a_device_that_cannot_be_opened_are_refused_until_it_is_open() {
    let server = server();
    let mut client = Client::haggle(&server.path());
    client.option(OPT_GO, &info("later", &[]));
    assert_waits(&mut client);
    server.exports.refuse("later").expect("it was announced");
    assert_eq!(client.reply(OPT_GO).0, ERR_UNKNOWN);
    // The default export is this one, not another device.
    client.option(OPT_INFO, &info("", &[]));
    assert_eq!(client.reply(OPT_INFO).0, ERR_UNKNOWN);
    offer(&server);
    client.go("later");
    client.write(1 << 20, &[5; 512]);
}

/// The time in which a client waits for a device does not count, and all the rest does.
#[test]
fn a_client_that_has_waited_has_the_time_of_a_handshake_and_no_more() {
    let server = server();
    let mut client = Client::haggle(&server.path());
    client.option(OPT_INFO, &info("later", &[]));
    assert_waits(&mut client);
    offer(&server);
    assert_eq!(client.replies(OPT_INFO).last(), Some(&(REP_ACK, vec![])));
    client.expect_closed();
}

#[test]
fn a_stop_does_not_wait_for_clients_that_wait_for_a_device() {
    let mut server = server();
    let mut client = Client::haggle(&server.path());
    // More than the server takes at once.
    client.option(OPT_GO, &info("later", &[]));
    client.send(&option_bytes(OPT_LIST, &[]).repeat(4096));
    assert_waits(&mut client);
    server.stop.stop();
    server.join();
    client.expect_closed();
}

#[test]
fn an_export_that_was_not_announced_is_refused() {
    let server = server();
    let unknown = Export::new("unknown", memory(1 << 20));
    let refused = [server.exports.offer(unknown), server.exports.refuse("unknown")];
    for result in refused {
        let error = result.expect_err("it is unknown");
        assert!(matches!(&error, ServeError::Export(what) if what.contains("unknown")), "{error}");
    }
}

/// A device may take long to open: clients that gave up take no place of others.
#[test]
fn clients_that_hang_up_while_they_wait_give_up_their_places() {
    let server = server();
    let open = || server.exports.statistics().snapshot().connections_open;
    let waiting = [(); 3].map(|()| {
        let mut client = Client::haggle(&server.path());
        client.option(OPT_GO, &info("later", &[]));
        assert_waits(&mut client);
        client
    });
    assert_eq!(open(), 3);
    drop(waiting);
    while open() > 0 {
        std::thread::yield_now();
    }
}

/// An export that is closed ends its connections once their requests are answered; others go on.
#[test]
fn a_closed_export_ends_its_connections_only() {
    let server = server();
    offer(&server);
    let [mut later, mut first] = ["later", "first"].map(|name| {
        let mut client = Client::haggle(&server.path());
        client.go(name);
        client
    });
    server.exports.close("later", true).expect("it was announced");
    assert_eq!(later.stream.read(&mut [0]).expect("the end"), 0);
    let mut again = Client::haggle(&server.path());
    again.option(OPT_GO, &info("later", &[]));
    assert_waits(&mut again);
    offer(&server);
    assert_eq!(again.reply(OPT_GO).0, REP_INFO);
    assert_waits(&mut first);
}
