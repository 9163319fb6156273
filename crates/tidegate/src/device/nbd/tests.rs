//! Tests of the device over servers of a few lines, which answer as each test needs.

#![expect(clippy::disallowed_methods, reason = "time limits are looked at with a clock")]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Instant;

use super::*;
use crate::device::{BlockDeviceExt, WriteFlags};

const SIZE_BYTES: u64 = 1 << 20;

fn options(socket: &Path, timeout_ms: u64) -> NbdOptions {
    NbdOptions {
        address: NbdAddress::Unix(socket.to_path_buf()),
        export: "x".into(),
        name: "nbd+unix:///x".into(),
        timeout: Duration::from_millis(timeout_ms),
        block_bytes: None,
    }
}

/// A server's handling of a connection.
type Handler = fn(&mut UnixStream);

/// Starts a server that hands its connections, one after the other, to `handlers`, and then ends.
fn serve(handlers: Vec<Handler>) -> (tempfile::TempDir, PathBuf, JoinHandle<()>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        for handler in handlers {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            handler(&mut stream);
        }
    });
    (dir, path, thread)
}

/// Returns the end of the handshake for an export of `size_bytes`.
fn answers(size_bytes: u64) -> Vec<u8> {
    let mut told = protocol::be16(protocol::info::EXPORT).to_vec();
    told.extend(protocol::be64(size_bytes));
    told.extend(protocol::be16(5));
    [answer(protocol::rep::INFO, &told), answer(protocol::rep::ACK, &[])].concat()
}

fn answer(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = protocol::be64(protocol::OPTION_REPLY_MAGIC).to_vec();
    bytes.extend(protocol::be32(protocol::opt::GO));
    bytes.extend(protocol::be32(kind));
    bytes.extend(protocol::be32(protocol::wire_len(data.len())));
    bytes.extend(data);
    bytes
}

/// Greets the client and reads its option.
fn greet(stream: &mut UnixStream) {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
    let mut asked = [0; 4 + 16 + 4 + 1 + 2 + 6];
    stream.read_exact(&mut asked).unwrap();
    assert_eq!(asked[24..25], *b"x");
}

fn open_export(stream: &mut UnixStream) {
    greet(stream);
    stream.write_all(&answers(SIZE_BYTES)).unwrap();
}

/// Reads until the client closes the connection, and answers nothing.
fn be_silent(stream: &mut UnixStream) {
    drop(std::io::copy(stream, &mut std::io::sink()));
}

fn open_and_be_silent(stream: &mut UnixStream) {
    open_export(stream);
    be_silent(stream);
}

/// Answers writes and flushes until the client goes.
fn open_and_answer(stream: &mut UnixStream) {
    open_export(stream);
    let mut header = [0; protocol::REQUEST_BYTES];
    while stream.read_exact(&mut header).is_ok() {
        let request = protocol::Request::parse(&header).unwrap().unwrap();
        if request.command == protocol::cmd::DISC {
            return;
        }
        let mut data = vec![0; request.payload_bytes() as usize];
        stream.read_exact(&mut data).unwrap();
        let (magic, cookie) = (protocol::SIMPLE_REPLY_MAGIC, request.cookie);
        let reply = [&protocol::be32(magic)[..], &[0; 4], &protocol::be64(cookie)].concat();
        stream.write_all(&reply).unwrap();
    }
}

/// Returns the message of the error and its causes.
fn refusal(handler: Handler) -> String {
    let (_dir, path, server) = serve(vec![handler]);
    let error = NbdDevice::open(&options(&path, 1000)).map(|_| ()).unwrap_err();
    server.join().unwrap();
    error.with_causes()
}

#[test]
fn an_export_with_a_partial_block_is_refused_with_the_size_that_does() {
    let error = refusal(|it| {
        greet(it);
        it.write_all(&answers(SIZE_BYTES + 100)).unwrap();
    });
    for part in ["nbd+unix:///x", "1048676 bytes, expected a multiple of 512", "1049088"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_device_has_the_block_size_that_its_options_name() {
    let (_dir, path, server) = serve(vec![open_export, open_export]);
    for (block_bytes, expected) in [(Some(512), 512), (None, 4096)] {
        let options = NbdOptions { block_bytes, ..options(&path, 1000) };
        let geometry = NbdDevice::open(&options).unwrap().geometry();
        assert_eq!((geometry.block_bytes, geometry.size_bytes()), (expected, SIZE_BYTES));
    }
    server.join().unwrap();
}

#[test]
fn wrong_handshakes_are_refused_with_the_reason() {
    let cases: [(Handler, &str); 9] = [
        (|_| {}, "closed the connection"),
        (|it| it.write_all(b"SSH-2.0-OpenSSH_9.2p1\r\n").unwrap(), "NBDMAGIC"),
        (|it| it.write_all(b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53\0\0").unwrap(), "oldstyle"),
        (|it| it.write_all(b"NBDMAGICIHAVEOPT\0\0").unwrap(), "fixed newstyle"),
        (
            |it| {
                greet(it);
                it.write_all(&answer(protocol::rep::ERR_UNKNOWN, b"no\nsuch")).unwrap();
            },
            "no export of this name (nosuch)",
        ),
        (
            |it| {
                greet(it);
                it.write_all(&answer(protocol::rep::ERR_TLS_REQD, b"")).unwrap();
            },
            "requires TLS",
        ),
        (
            |it| {
                greet(it);
                it.write_all(&answer(protocol::rep::ACK, b"")).unwrap();
            },
            "does not tell the export's size",
        ),
        (
            |it| {
                greet(it);
                let mut endless = answer(protocol::rep::INFO, b"");
                endless.truncate(16);
                endless.extend([0xff; 4]);
                it.write_all(&endless).unwrap();
            },
            "an answer of 4294967295 bytes",
        ),
        (
            |it| {
                greet(it);
                it.write_all(&[answers(SIZE_BYTES), vec![0]].concat()).unwrap();
            },
            "bytes that answer no request",
        ),
    ];
    for (handler, expected) in cases {
        let error = refusal(handler);
        assert!(error.starts_with("cannot open nbd+unix:///x: "), "{error}");
        assert!(error.contains(expected), "{error}, expected: {expected}");
    }
    let nobody = NbdDevice::open(&options(Path::new("/nowhere/s"), 1000)).map(|_| ());
    assert!(nobody.unwrap_err().with_causes().contains("connect to the unix socket"));
}

#[test]
fn a_silent_server_fails_requests_at_their_time() {
    let (_dir, path, server) = serve(vec![open_and_be_silent]);
    let device = NbdDevice::open(&options(&path, 200)).unwrap();
    let since = Instant::now();
    let error = device.write(0, &[7; 4096], WriteFlags::default()).unwrap_err();
    assert!(error.to_string().contains("time limit"), "{error}");
    assert!(since.elapsed() >= Duration::from_millis(200));
    server.join().unwrap();
    let error = device.flush().unwrap_err();
    assert!(error.to_string().contains("cannot connect"), "the server is gone: {error}");
}

/// Each silent server takes an attempt to the end of a request's time, and the pauses grow.
#[test]
fn a_slow_server_is_reached_after_silent_ones_whatever_the_time_limit() {
    let slow = |it: &mut UnixStream| {
        std::thread::sleep(Duration::from_millis(100));
        open_and_answer(it);
    };
    let mut handlers: Vec<Handler> = vec![open_export];
    handlers.extend([be_silent as Handler; 7]);
    handlers.push(slow);
    let (_dir, path, server) = serve(handlers);
    let device = NbdDevice::open(&options(&path, 640)).unwrap();
    let write = || device.write(0, &[7; 4096], WriteFlags::default());
    for _ in 0..7 {
        let error = write().unwrap_err();
        assert!(error.to_string().contains("time limit"), "{error}");
    }
    write().unwrap();
    drop(device);
    server.join().unwrap();
}

/// The server of the first connection dies silently; a smaller and a faulty one replace it.
#[test]
fn requests_in_flight_find_the_next_server_that_is_right() {
    let smaller = |it: &mut UnixStream| {
        greet(it);
        it.write_all(&answers(SIZE_BYTES / 2)).unwrap();
    };
    let dying = |it: &mut UnixStream| {
        open_export(it);
        it.read_exact(&mut [0; 100]).unwrap();
    };
    let faulty = |it: &mut UnixStream| {
        open_export(it);
        it.write_all(&[9; 16]).unwrap();
        be_silent(it);
    };
    let (_dir, path, server) = serve(vec![dying, smaller, faulty, open_and_answer]);
    let device = NbdDevice::open(&options(&path, 20_000)).unwrap();
    device.write(0, &[7; 8192], WriteFlags::default()).unwrap();
    device.flush().unwrap();
    drop(device);
    server.join().unwrap();
}

#[test]
fn a_flush_after_a_loss_fails_once() {
    let one_write = |it: &mut UnixStream| {
        open_export(it);
        let mut request = [0; protocol::REQUEST_BYTES + 4096];
        it.read_exact(&mut request).unwrap();
        let mut reply = protocol::be32(protocol::SIMPLE_REPLY_MAGIC).to_vec();
        reply.extend([0; 4]);
        reply.extend(&request[8..16]);
        it.write_all(&reply).unwrap();
    };
    let (_dir, path, server) = serve(vec![one_write, open_and_answer]);
    let device = NbdDevice::open(&options(&path, 20_000)).unwrap();
    device.write(0, &[7; 4096], WriteFlags::default()).unwrap();
    let error = device.flush().unwrap_err();
    assert!(error.to_string().contains("may be lost"), "{error}");
    device.write(0, &[7; 4096], WriteFlags::default()).unwrap();
    device.flush().unwrap();
    drop(device);
    server.join().unwrap();
}

static WATCH: Watch =
    Watch { ranges: |size_bytes| vec![0..4096, size_bytes - 4096..size_bytes], describe };

fn describe(areas: &[Part]) -> String {
    format!("bytes {}", areas[0].1[0])
}

/// Serves an image with `byte` everywhere. Answers reads until a request of another kind comes.
/// Returns whether one came before the client went.
fn answer_reads(stream: &mut UnixStream, byte: u8) -> bool {
    open_export(stream);
    let mut header = [0; protocol::REQUEST_BYTES];
    while stream.read_exact(&mut header).is_ok() {
        let request = protocol::Request::parse(&header).unwrap().unwrap();
        if request.command != protocol::cmd::READ {
            return true;
        }
        let (magic, cookie) = (protocol::SIMPLE_REPLY_MAGIC, request.cookie);
        let reply = [&protocol::be32(magic)[..], &[0; 4], &protocol::be64(cookie)].concat();
        stream.write_all(&[reply, vec![byte; request.len as usize]].concat()).unwrap();
    }
    false
}

#[test]
fn another_image_is_not_written_after_a_reconnection() {
    let die_at_a_write = |it: &mut UnixStream| assert!(answer_reads(it, 1));
    let other_image = |it: &mut UnixStream| {
        assert!(!answer_reads(it, 2), "another image is written");
    };
    let first_image = |it: &mut UnixStream| {
        assert!(answer_reads(it, 1), "the image is written again");
        let mut data = [0; 4096];
        it.read_exact(&mut data).unwrap();
    };
    let handlers: Vec<Handler> = vec![die_at_a_write, other_image, first_image];
    let (_dir, path, server) = serve(handlers);
    let device = NbdDevice::open_watched(&options(&path, 2000), &WATCH).unwrap();
    let written = device.write(8192, &[7; 4096], WriteFlags::default());
    assert!(written.is_err(), "the last server answers nothing, and no other follows");
    server.join().unwrap();
}
