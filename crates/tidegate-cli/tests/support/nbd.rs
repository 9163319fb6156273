//! A minimal NBD client of our own (unix socket, simple replies), which keeps many requests in
//! flight and knows, for each, whether it was acknowledged. The wire format is the NBD project's
//! doc/proto.md.
#![allow(dead_code, reason = "each test binary uses its part of this module")]
#![expect(clippy::big_endian_bytes, reason = "NBD's wire format is big-endian")]

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const CMD_READ: u16 = 0;
const CMD_WRITE: u16 = 1;
const CMD_FLUSH: u16 = 3;

/// A connection in transmission.
pub(crate) struct Client {
    stream: UnixStream,
}

impl Client {
    /// Connects and asks for the default export.
    pub(crate) fn connect(socket: &Path) -> io::Result<Self> {
        Self::connect_to(socket, "")
    }

    /// Connects and asks for an export.
    pub(crate) fn connect_to(socket: &Path, export: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        assert_eq!(&greeting[..8], b"NBDMAGIC");
        let mut hello = Vec::new();
        hello.extend(3_u32.to_be_bytes()); // fixed newstyle, no zeroes
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend(OPT_GO.to_be_bytes());
        let name_bytes = u32::try_from(export.len()).expect("a short name");
        hello.extend((name_bytes + 6).to_be_bytes());
        hello.extend(name_bytes.to_be_bytes());
        hello.extend(export.as_bytes());
        hello.extend([0; 2]); // no information requests
        stream.write_all(&hello)?;
        while read_option_reply(&mut stream)? != REP_ACK {}
        Ok(Self { stream })
    }

    /// The connection itself, for a client that breaks the rules.
    pub(crate) fn into_stream(self) -> UnixStream {
        self.stream
    }

    /// Sends a write of `data` at `offset` without waiting for its answer.
    pub(crate) fn send_write(&mut self, cookie: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        self.send(CMD_WRITE, cookie, offset, data.len(), data)
    }

    /// Sends the head of a write of `len` bytes at `offset`, and only the first bytes of its data.
    pub(crate) fn begin_write(&mut self, offset: u64, len: usize, data: &[u8]) -> io::Result<()> {
        self.send(CMD_WRITE, 0, offset, len, data)
    }

    /// Sends a flush without waiting for its answer.
    pub(crate) fn send_flush(&mut self, cookie: u64) -> io::Result<()> {
        self.send(CMD_FLUSH, cookie, 0, 0, &[])
    }

    /// Waits for the next answer to a write or flush: its cookie and the server's error number, 0
    /// for success.
    pub(crate) fn receive(&mut self) -> io::Result<(u64, u32)> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        assert_eq!(be32(&reply[0..]), REPLY_MAGIC, "a simple reply");
        Ok((be64(&reply[8..]), be32(&reply[4..])))
    }

    /// Reads `len` bytes at `offset`, with nothing else in flight.
    pub(crate) fn read(&mut self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        self.send_read(0, offset, len)?;
        let (_, error) = self.receive()?;
        assert_eq!(error, 0, "reading {len} bytes at {offset}");
        self.receive_data(len)
    }

    /// Sends a read of `len` bytes at `offset` without waiting for its answer.
    pub(crate) fn send_read(&mut self, cookie: u64, offset: u64, len: usize) -> io::Result<()> {
        self.send(CMD_READ, cookie, offset, len, &[])
    }

    /// Receives the data behind the answer to a read that succeeded.
    pub(crate) fn receive_data(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let mut data = vec![0; len];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }

    fn send(
        &mut self,
        command: u16,
        cookie: u64,
        offset: u64,
        len: usize,
        data: &[u8],
    ) -> io::Result<()> {
        let mut request = Vec::with_capacity(28 + data.len());
        request.extend(REQUEST_MAGIC.to_be_bytes());
        request.extend([0, 0]);
        request.extend(command.to_be_bytes());
        request.extend(cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(u32::try_from(len).expect("a request fits 32 bits").to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request)
    }
}

/// What a server told of its export.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Told {
    pub(crate) size_bytes: u64,
    pub(crate) flags: u16,
    /// The minimum block size.
    pub(crate) block_bytes: u32,
}

pub(crate) const READ: u16 = CMD_READ;
pub(crate) const WRITE: u16 = CMD_WRITE;
pub(crate) const FLUSH: u16 = CMD_FLUSH;
pub(crate) const TRIM: u16 = 4;
pub(crate) const CACHE: u16 = 5;
pub(crate) const WRITE_ZEROES: u16 = 6;
pub(crate) const BLOCK_STATUS: u16 = 7;
pub(crate) const FUA: u16 = 1;
pub(crate) const NO_HOLE: u16 = 2;
pub(crate) const REQ_ONE: u16 = 8;
pub(crate) const FAST_ZERO: u16 = 16;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_SET_META_CONTEXT: u32 = 10;
const CHUNK_MAGIC: u32 = 0x668e_33ef;
const CHUNK_STATUS: u16 = 5;
const CHUNK_ERROR: u16 = 1 << 15;

/// A connection with structured replies and `base:allocation`, which carries one request at a time.
pub(crate) struct StatusClient {
    client: Client,
    pub(crate) told: Told,
}

impl StatusClient {
    /// Connects and asks for the default export.
    pub(crate) fn connect(socket: &Path) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.read_exact(&mut [0; 18])?;
        stream.write_all(&3_u32.to_be_bytes())?;
        let context = b"base:allocation";
        let length = u32::try_from(context.len()).expect("it is short").to_be_bytes();
        let query = [&[0; 4], &1_u32.to_be_bytes()[..], &length, context].concat();
        // The empty name, and one request: block sizes.
        let information = [0, 0, 0, 0, 0, 1, 0, 3];
        let mut told = Told::default();
        for (option, data) in [
            (OPT_STRUCTURED_REPLY, &[][..]),
            (OPT_SET_META_CONTEXT, &query),
            (OPT_GO, &information),
        ] {
            let length = u32::try_from(data.len()).expect("it is short");
            let head = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes()].concat();
            stream.write_all(&[&head[..], &length.to_be_bytes(), data].concat())?;
            told.read_replies(&mut stream)?;
        }
        Ok(Self { client: Client { stream }, told })
    }

    /// Sends a request and waits for its reply: the error number, or 0.
    pub(crate) fn ask(&mut self, command: u16, flags: u16, offset: u64, len: u32) -> u32 {
        self.exchange(command, flags, offset, len, &[]).0
    }

    /// Writes `data` at `offset`.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) {
        let len = u32::try_from(data.len()).expect("a request fits 32 bits");
        assert_eq!(self.exchange(WRITE, 0, offset, len, data).0, 0);
    }

    /// The extents of the answer to a question for the block status: lengths and states.
    pub(crate) fn status(&mut self, flags: u16, offset: u64, len: u32) -> Vec<(u32, u32)> {
        let (error, payload) = self.exchange(BLOCK_STATUS, flags, offset, len, &[]);
        assert_eq!(error, 0, "block status of {len} bytes at {offset}");
        // Behind the number of the context.
        payload[4..].chunks(8).map(|extent| (be32(extent), be32(&extent[4..]))).collect()
    }

    fn exchange(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> (u32, Vec<u8>) {
        let mut request = Vec::new();
        request.extend(REQUEST_MAGIC.to_be_bytes());
        request.extend([flags, command].map(u16::to_be_bytes).as_flattened());
        request.extend([7, offset].map(u64::to_be_bytes).as_flattened());
        request.extend(len.to_be_bytes());
        request.extend(data);
        self.client.stream.write_all(&request).expect("the server reads");
        let mut reply = [0; 16];
        self.client.stream.read_exact(&mut reply).expect("the server answers");
        if be32(&reply) == REPLY_MAGIC {
            return (be32(&reply[4..]), Vec::new());
        }
        assert_eq!(be32(&reply), CHUNK_MAGIC);
        let kind = u16::from_be_bytes([reply[6], reply[7]]);
        let mut rest = [0; 4];
        self.client.stream.read_exact(&mut rest).expect("the rest of the head");
        let payload = self.client.receive_data(be32(&rest) as usize).expect("the payload");
        match kind {
            CHUNK_STATUS => (0, payload),
            kind if kind & CHUNK_ERROR != 0 => (be32(&payload), Vec::new()),
            kind => panic!("a chunk of the kind {kind}"),
        }
    }
}

impl Told {
    /// Reads the replies to an option, up to the last one.
    fn read_replies(&mut self, stream: &mut UnixStream) -> io::Result<()> {
        loop {
            let mut head = [0; 20];
            stream.read_exact(&mut head)?;
            let kind = be32(&head[12..]);
            let mut payload = vec![0; be32(&head[16..]) as usize];
            stream.read_exact(&mut payload)?;
            match (kind, payload.get(1)) {
                (REP_ACK, _) => return Ok(()),
                (REP_INFO, Some(0)) => {
                    self.size_bytes = be64(&payload[2..]);
                    self.flags = u16::from_be_bytes([payload[10], payload[11]]);
                }
                (REP_INFO, Some(3)) => self.block_bytes = be32(&payload[2..]),
                (kind, _) => assert!(kind < 1 << 31, "the server refuses: {kind:#x}"),
            }
        }
    }
}

fn read_option_reply(stream: &mut UnixStream) -> io::Result<u32> {
    let mut head = [0; 20];
    stream.read_exact(&mut head)?;
    assert_eq!(be64(&head), OPTION_REPLY_MAGIC);
    let (kind, len) = (be32(&head[12..]), be32(&head[16..]));
    let mut payload = vec![0; len as usize];
    stream.read_exact(&mut payload)?;
    assert!(kind == REP_ACK || kind == REP_INFO, "the server answered {kind:#x}");
    Ok(kind)
}

fn be32(bytes: &[u8]) -> u32 {
    bytes[..4].iter().fold(0, |value, &byte| value << 8 | u32::from(byte))
}

fn be64(bytes: &[u8]) -> u64 {
    u64::from(be32(bytes)) << 32 | u64::from(be32(&bytes[4..]))
}
