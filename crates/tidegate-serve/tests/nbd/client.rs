//! A small NBD client that does what it is told, also what is wrong.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub(crate) const OPT_EXPORT_NAME: u32 = 1;
pub(crate) const OPT_ABORT: u32 = 2;
pub(crate) const OPT_LIST: u32 = 3;
pub(crate) const OPT_STARTTLS: u32 = 5;
pub(crate) const OPT_INFO: u32 = 6;
pub(crate) const OPT_GO: u32 = 7;
pub(crate) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(crate) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(crate) const OPT_SET_META_CONTEXT: u32 = 10;
pub(crate) const OPT_EXTENDED_HEADERS: u32 = 11;

pub(crate) const REP_ACK: u32 = 1;
pub(crate) const REP_SERVER: u32 = 2;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const REP_META_CONTEXT: u32 = 4;
pub(crate) const ERR_UNSUP: u32 = (1 << 31) + 1;
pub(crate) const ERR_POLICY: u32 = (1 << 31) + 2;
pub(crate) const ERR_INVALID: u32 = (1 << 31) + 3;
pub(crate) const ERR_TLS_REQD: u32 = (1 << 31) + 5;
pub(crate) const ERR_UNKNOWN: u32 = (1 << 31) + 6;
pub(crate) const ERR_TOO_BIG: u32 = (1 << 31) + 9;

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISC: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const CACHE: u16 = 5;
pub(crate) const WRITE_ZEROES: u16 = 6;
pub(crate) const BLOCK_STATUS: u16 = 7;

pub(crate) const FUA: u16 = 1;
pub(crate) const NO_HOLE: u16 = 2;
pub(crate) const DF: u16 = 4;
pub(crate) const REQ_ONE: u16 = 8;
pub(crate) const FAST_ZERO: u16 = 16;

pub(crate) const EPERM: u32 = 1;
pub(crate) const EIO: u32 = 5;
pub(crate) const EINVAL: u32 = 22;
pub(crate) const ENOSPC: u32 = 28;
pub(crate) const EOVERFLOW: u32 = 75;
pub(crate) const ENOTSUP: u32 = 95;

/// One chunk of a structured reply.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) done: bool,
    pub(crate) kind: u16,
    pub(crate) cookie: u64,
    pub(crate) payload: Vec<u8>,
}

/// One connection.
pub(crate) struct Client {
    pub(crate) stream: UnixStream,
}

impl Client {
    /// Connects and reads the greeting.
    pub(crate) fn connect(path: &Path) -> Self {
        let mut client = Self::connect_silently(path);
        assert_eq!(&client.read(16), b"NBDMAGICIHAVEOPT");
        assert_eq!(client.u16(), 3, "fixed newstyle, no zeroes");
        client
    }

    /// Connects and reads nothing.
    pub(crate) fn connect_silently(path: &Path) -> Self {
        let stream = UnixStream::connect(path).expect("connect");
        // A reply that never comes must fail the test, not hang it.
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
        Self { stream }
    }

    /// Connects and sends the flags of a modern client.
    pub(crate) fn haggle(path: &Path) -> Self {
        let mut client = Self::connect(path);
        client.send(&3_u32.to_be_bytes());
        client
    }

    /// Connects and enters the transmission phase of the default export with simple replies.
    pub(crate) fn simple(path: &Path) -> Self {
        let mut client = Self::haggle(path);
        client.go("");
        client
    }

    /// A client in the transmission phase with structured replies and `base:allocation`.
    pub(crate) fn structured(path: &Path) -> Self {
        let mut client = Self::haggle(path);
        client.negotiate_structured();
        client.go("");
        client
    }

    pub(crate) fn negotiate_structured(&mut self) {
        self.option(OPT_STRUCTURED_REPLY, &[]);
        assert_eq!(self.reply(OPT_STRUCTURED_REPLY), (REP_ACK, vec![]));
        self.option(OPT_SET_META_CONTEXT, &queries("", &["base:allocation"]));
        assert_eq!(self.replies(OPT_SET_META_CONTEXT).len(), 2);
    }

    pub(crate) fn go(&mut self, name: &str) {
        self.option(OPT_GO, &info(name, &[]));
        let replies = self.replies(OPT_GO);
        assert_eq!(replies.last(), Some(&(REP_ACK, vec![])));
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("send");
    }

    pub(crate) fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("receive");
        bytes
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.read(2).try_into().expect("2 bytes"))
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.read(4).try_into().expect("4 bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.read(8).try_into().expect("8 bytes"))
    }

    /// The server closes the connection without another byte.
    pub(crate) fn expect_closed(&mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => assert_eq!(rest, b"", "the server said more before it closed"),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }

    /// Sends an option.
    pub(crate) fn option(&mut self, option: u32, data: &[u8]) {
        self.send(&option_bytes(option, data));
    }

    /// One reply to an option.
    pub(crate) fn reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        assert_eq!(self.u64(), 0x0003_e889_0455_65a9);
        assert_eq!(self.u32(), option);
        let kind = self.u32();
        let len = self.u32() as usize;
        (kind, self.read(len))
    }

    /// All replies to an option, up to the last.
    pub(crate) fn replies(&mut self, option: u32) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        loop {
            let (kind, data) = self.reply(option);
            replies.push((kind, data));
            if kind == REP_ACK || kind >= 1 << 31 {
                return replies;
            }
        }
    }

    /// Sends a request whose cookie is a function of its fields.
    pub(crate) fn request(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, len: u32) {
        self.send(&request_bytes(command, flags, cookie, offset, len));
    }

    /// Reads the header of a simple reply: error and cookie.
    pub(crate) fn simple_reply(&mut self) -> (u32, u64) {
        assert_eq!(self.u32(), 0x6744_6698);
        (self.u32(), self.u64())
    }

    /// Reads a chunk.
    pub(crate) fn chunk(&mut self) -> Chunk {
        assert_eq!(self.u32(), 0x668e_33ef);
        let (flags, kind, cookie) = (self.u16(), self.u16(), self.u64());
        let len = self.u32() as usize;
        Chunk { done: flags & 1 != 0, kind, cookie, payload: self.read(len) }
    }

    /// Reads an error chunk: its error, its message, and the offset if it has one.
    pub(crate) fn error_chunk(&mut self, cookie: u64) -> (u32, String, Option<u64>) {
        let chunk = self.chunk();
        assert!(chunk.done && chunk.kind >= 1 << 15, "{chunk:?}");
        assert_eq!(chunk.cookie, cookie);
        let error = u32::from_be_bytes(chunk.payload[..4].try_into().expect("4 bytes"));
        let len = usize::from(u16::from_be_bytes(chunk.payload[4..6].try_into().expect("2 bytes")));
        let message = String::from_utf8(chunk.payload[6..6 + len].to_vec()).expect("UTF-8");
        let rest = &chunk.payload[6 + len..];
        let offset =
            (!rest.is_empty()).then(|| u64::from_be_bytes(rest.try_into().expect("8 bytes")));
        (error, message, offset)
    }

    /// Writes with a simple reply (allowed also when replies are structured).
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) {
        self.request(WRITE, 0, offset, offset, u32::try_from(data.len()).expect("short"));
        self.send(data);
        assert_eq!(self.simple_reply(), (0, offset));
    }

    /// Reads with simple replies.
    pub(crate) fn read_simple(&mut self, offset: u64, len: u32) -> Vec<u8> {
        self.request(READ, 0, offset, offset, len);
        assert_eq!(self.simple_reply(), (0, offset));
        self.read(len as usize)
    }

    /// Reads with a structured reply.
    pub(crate) fn read_structured(&mut self, flags: u16, offset: u64, len: u32) -> Vec<u8> {
        self.request(READ, flags, offset, offset, len);
        let chunk = self.chunk();
        assert_eq!((chunk.done, chunk.kind, chunk.cookie), (true, 1, offset));
        assert_eq!(&chunk.payload[..8], &offset.to_be_bytes());
        chunk.payload[8..].to_vec()
    }
}

pub(crate) fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).expect("short");
    [&b"IHAVEOPT"[..], &option.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

pub(crate) fn request_bytes(
    command: u16,
    flags: u16,
    cookie: u64,
    offset: u64,
    len: u32,
) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

fn string(text: &str) -> Vec<u8> {
    [&u32::try_from(text.len()).expect("short").to_be_bytes()[..], text.as_bytes()].concat()
}

/// The data of `INFO` and `GO`.
pub(crate) fn info(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend(u16::try_from(wanted.len()).expect("few").to_be_bytes());
    bytes.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    bytes
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
pub(crate) fn queries(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend(u32::try_from(queries.len()).expect("few").to_be_bytes());
    bytes.extend(queries.iter().flat_map(|query| string(query)));
    bytes
}

/// Bytes that differ by offset.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at * 31 + at / 251) % 251).expect("below 251") ^ seed).collect()
}
