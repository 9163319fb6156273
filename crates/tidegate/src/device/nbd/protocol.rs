//! The parts of the NBD protocol that a client and a server share: constants, the header of a
//! request, and numbers and strings on the wire.
//!
//! Invariants: everything here is a pure function over bytes; every number on the wire is
//! big-endian; no length from the other side causes an allocation.
//!
//! Source: `doc/proto.md` of the reference implementation, github.com/NetworkBlockDevice/nbd.

#![expect(clippy::big_endian_bytes, reason = "NBD numbers are big-endian on the wire")]
#![expect(missing_docs, reason = "the constants have the names of the specification")]

/// First eight bytes of the server: `NBDMAGIC`.
pub const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Starts the newstyle greeting and every option of the client: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Starts every answer to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Starts every request of the transmission phase.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Starts a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Starts a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Handshake and client flag: both sides speak fixed newstyle.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake and client flag: the answer to `EXPORT_NAME` has no 124 bytes of padding.
pub const FLAG_NO_ZEROES: u16 = 1 << 1;

/// Options of the handshake.
pub mod opt {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Answers to options.
pub mod rep {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = (1 << 31) + 1;
    pub const ERR_POLICY: u32 = (1 << 31) + 2;
    pub const ERR_INVALID: u32 = (1 << 31) + 3;
    pub const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    pub const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    pub const ERR_BLOCK_SIZE_REQD: u32 = (1 << 31) + 8;
    pub const ERR_TOO_BIG: u32 = (1 << 31) + 9;
}

/// Kinds of information about an export.
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: the abilities of an export.
pub mod export_flag {
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Requests of the transmission phase.
pub mod cmd {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub mod cmd_flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Chunks of a structured reply.
pub mod chunk {
    pub const FLAG_DONE: u16 = 1 << 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = (1 << 15) + 1;
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
}

/// Error numbers on the wire.
pub mod errno {
    pub const PERM: u32 = 1;
    pub const IO: u32 = 5;
    pub const NOMEM: u32 = 12;
    pub const INVAL: u32 = 22;
    pub const NOSPC: u32 = 28;
    pub const OVERFLOW: u32 = 75;
    pub const NOTSUP: u32 = 95;
    pub const SHUTDOWN: u32 = 108;
}

/// State bits of `base:allocation`: no storage is held.
pub const STATE_HOLE: u32 = 1 << 0;
/// State bits of `base:allocation`: reads as zeroes.
pub const STATE_ZERO: u32 = 1 << 1;

/// The protocol's limit on any string, in bytes.
pub const MAX_STRING_BYTES: usize = 4096;
/// Size of the client's flags.
pub const CLIENT_FLAGS_BYTES: usize = 4;
/// Size of an option's header.
pub const OPTION_HEADER_BYTES: usize = 16;
/// Size of a request's header.
pub const REQUEST_BYTES: usize = 28;
/// Size of a simple reply's header.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Size of a chunk's header.
pub const CHUNK_HEADER_BYTES: usize = 20;

/// Reads big-endian numbers and strings from the front of a byte slice.
#[derive(Debug, Clone, Copy)]
pub struct Cursor<'a>(pub &'a [u8]);

impl<'a> Cursor<'a> {
    /// Takes the next `len` bytes; `None` if fewer are left.
    pub fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    /// Takes the next 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// Takes the next 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// Takes the next 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Takes a string after its 32-bit length: UTF-8 without NUL, at most [`MAX_STRING_BYTES`].
    pub fn string(&mut self) -> Option<&'a str> {
        let len = usize::try_from(self.u32()?).ok()?;
        parse_string(self.take(len)?)
    }

    /// Returns whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Parses `bytes` as a string of the protocol: UTF-8 without NUL, at most [`MAX_STRING_BYTES`].
pub fn parse_string(bytes: &[u8]) -> Option<&str> {
    let fits = bytes.len() <= MAX_STRING_BYTES && !bytes.contains(&0);
    std::str::from_utf8(bytes).ok().filter(|_| fits)
}

/// The header of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// One of [`opt`], or unknown.
    pub option: u32,
    /// Length of the data that follows.
    pub len: u32,
}

impl OptionHeader {
    /// Reads the header at the front of `bytes`. Returns `None` if it is incomplete.
    ///
    /// # Errors
    /// Fails with the magic found if it is not [`OPTION_MAGIC`].
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, u64> {
        let mut cursor = Cursor(bytes);
        match cursor.u64() {
            None => return Ok(None),
            Some(OPTION_MAGIC) => {}
            Some(magic) => return Err(magic),
        }
        Ok(cursor.u32().zip(cursor.u32()).map(|(option, len)| Self { option, len }))
    }
}

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Bits of [`cmd_flag`].
    pub flags: u16,
    /// One of [`cmd`], or unknown.
    pub command: u16,
    /// The client's identifier of the request, returned with the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

impl Request {
    /// Reads the header at the front of `bytes`. Returns `None` if it is incomplete.
    ///
    /// # Errors
    /// Fails with the magic found if it is not [`REQUEST_MAGIC`].
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, u32> {
        let mut cursor = Cursor(bytes);
        match cursor.u32() {
            None => return Ok(None),
            Some(REQUEST_MAGIC) => {}
            Some(magic) => return Err(magic),
        }
        Ok(Self::parse_fields(cursor))
    }

    fn parse_fields(mut cursor: Cursor<'_>) -> Option<Self> {
        Some(Self {
            flags: cursor.u16()?,
            command: cursor.u16()?,
            cookie: cursor.u64()?,
            offset: cursor.u64()?,
            len: cursor.u32()?,
        })
    }

    /// Encodes the header for the wire.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let Self { flags, command, cookie, offset, len } = *self;
        let (magic, flags, command) = (be32(REQUEST_MAGIC), be16(flags), be16(command));
        joined([&magic, &flags, &command, &be64(cookie), &be64(offset), &be32(len)])
    }

    /// Returns the number of data bytes that follow the header.
    pub fn payload_bytes(&self) -> u32 {
        if self.command == cmd::WRITE { self.len } else { 0 }
    }
}

/// Encodes a 32-bit number for the wire.
pub fn be32(value: u32) -> [u8; 4] {
    value.to_be_bytes()
}

/// Encodes a 64-bit number for the wire.
pub fn be64(value: u64) -> [u8; 8] {
    value.to_be_bytes()
}

/// Encodes a 16-bit number for the wire.
pub fn be16(value: u16) -> [u8; 2] {
    value.to_be_bytes()
}

/// Joins the fields of a message; the rest of the message is 0.
#[inline]
pub fn joined<const N: usize, const FIELDS: usize>(fields: [&[u8]; FIELDS]) -> [u8; N] {
    let mut message = [0; N];
    let mut at = 0;
    for field in fields {
        message[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    }
    message
}

/// Converts the length of an own message, always far below 4 GiB.
pub fn wire_len(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
