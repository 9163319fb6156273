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
        let mut stream = UnixStream::connect(socket)?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        assert_eq!(&greeting[..8], b"NBDMAGIC");
        let mut hello = Vec::new();
        hello.extend(3_u32.to_be_bytes()); // fixed newstyle, no zeroes
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend(OPT_GO.to_be_bytes());
        hello.extend(6_u32.to_be_bytes());
        hello.extend([0; 6]); // the empty name, no information requests
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
