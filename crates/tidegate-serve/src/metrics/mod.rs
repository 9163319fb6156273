//! The page of metrics that Prometheus reads by HTTP.
//!
//! Invariants:
//! 1. A client gets a response or the end of its connection, whatever bytes it sends, and makes the
//!    server hold at most [`REQUEST_BYTES_MAX`] bytes.
//! 2. The page shows numbers and the names of tiers: no data, no paths, and no settings. Any user
//!    that reaches the address can read it.

mod page;

use std::io::{self, Write};

use tidegate::stats::Reading;

use crate::listen::Listener;
use crate::serial::{Peer, SerialServer};
use crate::{ListenAddress, ServeError};

/// Most bytes of a request.
pub const REQUEST_BYTES_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// The path of the page.
pub const PATH: &str = "/metrics";
const PAGE_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT_TYPE: &str = "text/plain; charset=utf-8";

/// A thread that shows the page until this is dropped.
pub struct MetricsServer {
    address: ListenAddress,
    is_open_to_network: bool,
    /// Dropped with this.
    _server: SerialServer,
}

impl MetricsServer {
    /// Listens at `address` and shows what `readings` returns to each client.
    ///
    /// # Errors
    /// Another server listens there already, or the system refuses.
    pub fn start(
        address: &ListenAddress,
        readings: impl Fn() -> Vec<Reading> + Send + 'static,
    ) -> Result<Self, ServeError> {
        let listener = Listener::bind(address)?;
        let (address, is_open_to_network) =
            (listener.address().clone(), listener.is_open_to_network());
        let converse = move |client| converse(client, &readings);
        let server = SerialServer::start("metrics", vec![listener], converse)?;
        Ok(Self { address, is_open_to_network, _server: server })
    }

    /// Returns the address, with the port that the system chose.
    pub fn address(&self) -> &ListenAddress {
        &self.address
    }

    /// Returns whether other machines may reach the address.
    pub fn is_open_to_network(&self) -> bool {
        self.is_open_to_network
    }
}

fn converse(mut client: Peer, readings: &dyn Fn() -> Vec<Reading>) -> io::Result<()> {
    let request = client.read_until(REQUEST_BYTES_MAX, |bytes| !is_partial(bytes))?;
    let response = response(&request, readings);
    match parse(&request) {
        Ok(_) => client.write_all(&response),
        // A body may follow.
        Err(_) => client.refuse(&response),
    }
}

/// Returns whether more bytes can make `request` a whole one. Its lines may end with a bare line
/// feed, and a body may follow.
fn is_partial(request: &[u8]) -> bool {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let parsed = httparse::Request::new(&mut headers).parse(request);
    parsed.is_ok_and(|status| status.is_partial())
}

/// Returns the response to `request`.
fn response(request: &[u8], readings: &dyn Fn() -> Vec<Reading>) -> Vec<u8> {
    let (status, content_type, body) = match parse(request) {
        Ok(Asked { is_head, path: PATH }) => {
            let page = page::page(readings());
            return with_header("200 OK", PAGE_TYPE, &page, is_head);
        }
        Ok(_) => ("404 Not Found", TEXT_TYPE, format!("the metrics are at {PATH}\n")),
        Err(refused) => (refused, TEXT_TYPE, format!("{refused}\n")),
    };
    with_header(status, content_type, &body, false)
}

fn with_header(status: &str, content_type: &str, body: &str, is_head: bool) -> Vec<u8> {
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    let body_bytes = body.len();
    let body = if is_head { "" } else { body };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {body_bytes}\r\n\
         {allow}Connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

#[derive(Debug, PartialEq)]
struct Asked<'a> {
    /// The header of the response is enough.
    is_head: bool,
    /// The path without the query.
    path: &'a str,
}

/// Parses a request.
///
/// # Errors
/// Returns the status of the refusal if the request is malformed or its method is not allowed.
fn parse(request: &[u8]) -> Result<Asked<'_>, &'static str> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    let complete = parsed.parse(request).map_err(|error| match error {
        httparse::Error::TooManyHeaders => "431 Request Header Fields Too Large",
        _ => "400 Bad Request",
    })?;
    let (true, Some(method), Some(target)) = (complete.is_complete(), parsed.method, parsed.path)
    else {
        return Err("400 Bad Request");
    };
    let is_head = match method {
        "GET" => false,
        "HEAD" => true,
        _ => return Err("405 Method Not Allowed"),
    };
    Ok(Asked { is_head, path: target.split('?').next().unwrap_or(target) })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use proptest::prelude::*;
    use tidegate::stats::{Collector, Metric, Unit};

    use super::*;

    const READS: Metric = Metric::counter("reads", Unit::Count, "Reads answered");

    fn readings() -> Vec<Reading> {
        let mut collector = Collector::default();
        collector.add(&READS, 3);
        collector.finish()
    }

    fn answer(server: &MetricsServer, request: &str) -> String {
        let ListenAddress::Tcp { host, port } = server.address() else { panic!("it is TCP") };
        let mut client = TcpStream::connect((host.as_str(), *port)).expect("it listens");
        client.write_all(request.as_bytes()).expect("it takes the request");
        client.shutdown(std::net::Shutdown::Write).expect("it ends");
        let mut answer = String::new();
        client.read_to_string(&mut answer).expect("it answers");
        answer
    }

    #[test]
    fn the_page_is_at_its_path_and_nowhere_else() {
        let address = "tcp:127.0.0.1:0".parse().expect("an address");
        let server = MetricsServer::start(&address, readings).expect("it starts");
        let get = |path| answer(&server, &format!("GET {path} HTTP/1.1\r\nHost: it\r\n\r\n"));
        let page = get("/metrics?debug=1");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
        assert!(page.contains("\ntidegate_reads_total 3\n") && page.ends_with("# EOF\n"), "{page}");
        let head = answer(&server, "HEAD /metrics HTTP/1.0\r\n\r\n");
        assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
        assert!(get("/").starts_with("HTTP/1.1 404"));
        // The server reads no more than the header of a body as long as this one.
        let body = "b".repeat(1 << 20);
        let post = answer(&server, &format!("POST /metrics HTTP/1.1\r\n\r\n{body}"));
        assert!(post.starts_with("HTTP/1.1 405") && post.contains("Allow: GET, HEAD\r\n"));
        assert!(answer(&server, "anything\r\n\r\n").starts_with("HTTP/1.1 400"));
    }

    /// No request is waited for that came whole, or that no bytes can make whole.
    #[test]
    fn a_request_is_answered_once_its_end_is_there() {
        let address = "tcp:127.0.0.1:0".parse().expect("an address");
        let server = MetricsServer::start(&address, readings).expect("it starts");
        for (request, status) in [
            ("GET /metrics HTTP/1.1\nHost: it\n\n", 200),
            ("GET /metrics HTTP/1.1\r\nHost: it\n\r\n", 200),
            ("POST /metrics HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody", 405),
            ("GET /metrics HTTP/1.1\n\nGET /metrics HTTP/1.1\n\n", 200),
            ("nonsense\n", 400),
        ] {
            let answer = answer(&server, request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request:?}: {answer:?}");
        }
    }

    #[test]
    fn a_client_that_sends_too_much_is_dropped_and_the_next_one_answered() {
        let address = "tcp:127.0.0.1:0".parse().expect("an address");
        let server = MetricsServer::start(&address, readings).expect("it starts");
        let ListenAddress::Tcp { host, port } = server.address() else { panic!("it is TCP") };
        let mut client = TcpStream::connect((host.as_str(), *port)).expect("it listens");
        // The server closes before it has read everything.
        let _ = client.write_all(&vec![b'x'; 16 * REQUEST_BYTES_MAX]);
        let mut rest = Vec::new();
        let _ = client.read_to_end(&mut rest);
        assert!(rest.is_empty());
        assert!(answer(&server, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
    }

    proptest! {
        #[test]
        fn any_bytes_have_a_response(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut request = b"GET /".to_vec();
            request.extend(bytes);
            request.extend(b" HTTP/1.1\r\n\r\n");
            let response = response(&request, &readings);
            prop_assert!(response.starts_with(b"HTTP/1.1 "));
        }
    }
}
