//! The words of the NBD protocol: constants, message layouts, and their encoding.
//!
//! Invariants: everything here is a pure function over bytes; every number on the wire is
//! big-endian; nothing is allocated by a length that a client names.
//!
//! Entry points: [`Request::parse`], [`OptionHeader::parse`], [`Cursor`] for the data of options;
//! [`greeting`], [`option_reply`], [`simple_reply`], [`chunk_header`], [`push_error_chunk`],
//! [`push_status_chunk`] for answers.
//!
//! Source: `doc/proto.md` of the reference implementation, github.com/NetworkBlockDevice/nbd.

#![expect(clippy::big_endian_bytes, reason = "NBD numbers are big-endian on the wire")]

use tidegate::device::Extent;

/// First eight bytes of the server: `NBDMAGIC`.
pub(super) const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Starts the newstyle greeting and every option of the client: `IHAVEOPT`.
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Starts every answer to an option.
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Starts every request of the transmission phase.
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Starts a simple reply.
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Starts a chunk of a structured reply.
pub(super) const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Handshake and client flag: both sides speak fixed newstyle.
pub(super) const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake and client flag: the answer to `EXPORT_NAME` has no 124 bytes of padding.
pub(super) const FLAG_NO_ZEROES: u16 = 1 << 1;

/// Options of the handshake.
pub(super) mod opt {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const LIST_META_CONTEXT: u32 = 9;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
}

/// Answers to options.
pub(super) mod rep {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    pub(crate) const ERR_UNSUP: u32 = (1 << 31) + 1;
    pub(crate) const ERR_POLICY: u32 = (1 << 31) + 2;
    pub(crate) const ERR_INVALID: u32 = (1 << 31) + 3;
    pub(crate) const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    pub(crate) const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    pub(crate) const ERR_TOO_BIG: u32 = (1 << 31) + 9;
}

/// Kinds of information about an export.
pub(super) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const NAME: u16 = 1;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export can do.
pub(super) mod export_flag {
    pub(crate) const HAS_FLAGS: u16 = 1 << 0;
    pub(crate) const READ_ONLY: u16 = 1 << 1;
    pub(crate) const SEND_FLUSH: u16 = 1 << 2;
    pub(crate) const SEND_FUA: u16 = 1 << 3;
    pub(crate) const SEND_TRIM: u16 = 1 << 5;
    pub(crate) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const SEND_DF: u16 = 1 << 7;
    pub(crate) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(crate) const SEND_CACHE: u16 = 1 << 10;
    pub(crate) const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Requests of the transmission phase.
pub(super) mod cmd {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISC: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const CACHE: u16 = 5;
    pub(crate) const WRITE_ZEROES: u16 = 6;
    pub(crate) const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub(super) mod cmd_flag {
    pub(crate) const FUA: u16 = 1 << 0;
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    pub(crate) const DF: u16 = 1 << 2;
    pub(crate) const REQ_ONE: u16 = 1 << 3;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
}

/// Chunks of a structured reply.
pub(super) mod chunk {
    pub(crate) const FLAG_DONE: u16 = 1 << 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const ERROR: u16 = (1 << 15) + 1;
    pub(crate) const ERROR_OFFSET: u16 = (1 << 15) + 2;
}

/// Error numbers on the wire.
pub(super) mod errno {
    pub(crate) const PERM: u32 = 1;
    pub(crate) const IO: u32 = 5;
    pub(crate) const INVAL: u32 = 22;
    pub(crate) const NOSPC: u32 = 28;
    pub(crate) const OVERFLOW: u32 = 75;
    pub(crate) const NOTSUP: u32 = 95;
}

/// State bits of `base:allocation`: no storage is held.
pub(super) const STATE_HOLE: u32 = 1 << 0;
/// State bits of `base:allocation`: reads as zeroes.
pub(super) const STATE_ZERO: u32 = 1 << 1;

/// The one metadata context of this server.
pub(super) const BASE_ALLOCATION: &str = "base:allocation";
/// Its number in block status replies.
pub(super) const BASE_ALLOCATION_ID: u32 = 1;

/// The protocol's limit on any string, in bytes.
pub(super) const MAX_STRING_BYTES: usize = 4096;
/// Size of the client's flags.
pub(super) const CLIENT_FLAGS_BYTES: usize = 4;
/// Size of an option's header.
pub(super) const OPTION_HEADER_BYTES: usize = 16;
/// Size of a request's header.
pub(super) const REQUEST_BYTES: usize = 28;
/// Size of a simple reply's header.
pub(super) const SIMPLE_REPLY_BYTES: usize = 16;
/// Size of a chunk's header.
pub(super) const CHUNK_HEADER_BYTES: usize = 20;
/// Size of the offset that starts a data chunk's payload.
pub(super) const CHUNK_OFFSET_BYTES: usize = 8;
/// The most bytes of an error message that an error chunk carries.
pub(super) const MAX_MESSAGE_BYTES: usize = 512;

/// Reads big-endian numbers and strings from the front of a byte slice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursor<'a>(pub(super) &'a [u8]);

impl<'a> Cursor<'a> {
    /// The next `len` bytes, if there are so many.
    pub(super) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    /// The next 16 bits.
    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next 32 bits.
    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next 64 bits.
    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string behind its 32-bit length: UTF-8 without NUL, at most [`MAX_STRING_BYTES`].
    pub(super) fn string(&mut self) -> Option<&'a str> {
        let len = usize::try_from(self.u32()?).ok()?;
        parse_string(self.take(len)?)
    }

    /// Nothing is left.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// `bytes` as a string of the protocol: UTF-8 without NUL, at most [`MAX_STRING_BYTES`].
pub(super) fn parse_string(bytes: &[u8]) -> Option<&str> {
    let fits = bytes.len() <= MAX_STRING_BYTES && !bytes.contains(&0);
    std::str::from_utf8(bytes).ok().filter(|_| fits)
}

/// The header of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OptionHeader {
    /// One of [`opt`], or unknown.
    pub(super) option: u32,
    /// Length of the data that follows.
    pub(super) len: u32,
}

impl OptionHeader {
    /// Reads the header at the front of `bytes`: `None` while it is not whole.
    ///
    /// # Errors
    /// The magic found, where it is not [`OPTION_MAGIC`].
    pub(super) fn parse(bytes: &[u8]) -> Result<Option<Self>, u64> {
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
pub(super) struct Request {
    /// Bits of [`cmd_flag`].
    pub(super) flags: u16,
    /// One of [`cmd`], or unknown.
    pub(super) command: u16,
    /// The client's name for the request, given back with the reply.
    pub(super) cookie: u64,
    /// First byte.
    pub(super) offset: u64,
    /// Length in bytes.
    pub(super) len: u32,
}

impl Request {
    /// Reads the header at the front of `bytes`: `None` while it is not whole.
    ///
    /// # Errors
    /// The magic found, where it is not [`REQUEST_MAGIC`].
    pub(super) fn parse(bytes: &[u8]) -> Result<Option<Self>, u32> {
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

    /// Bytes of data that follow the header.
    pub(super) fn payload_bytes(&self) -> u32 {
        if self.command == cmd::WRITE { self.len } else { 0 }
    }
}

/// What the server says first.
pub(super) fn greeting() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(18);
    bytes.extend(SERVER_MAGIC.to_be_bytes());
    bytes.extend(OPTION_MAGIC.to_be_bytes());
    bytes.extend((FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
    bytes
}

/// Appends the answer `kind` to `option`; its data is the concatenation of `parts`.
pub(super) fn option_reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(wire_len(len).to_be_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// The data of `EXPORT` information, behind its kind.
pub(super) fn export_info(size_bytes: u64, flags: u16) -> [u8; 10] {
    let mut bytes = [0; 10];
    bytes[..8].copy_from_slice(&size_bytes.to_be_bytes());
    bytes[8..].copy_from_slice(&flags.to_be_bytes());
    bytes
}

/// The data of `BLOCK_SIZE` information, behind its kind.
pub(super) fn block_size_info(minimum: u32, preferred: u32, maximum: u32) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&minimum.to_be_bytes());
    bytes[4..8].copy_from_slice(&preferred.to_be_bytes());
    bytes[8..].copy_from_slice(&maximum.to_be_bytes());
    bytes
}

/// A simple reply; `error` is 0 or one of [`errno`].
pub(super) fn simple_reply(error: u32, cookie: u64) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut bytes = [0; SIMPLE_REPLY_BYTES];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// The header of the only chunk of a structured reply, with `len` bytes of payload.
pub(super) fn chunk_header(kind: u16, cookie: u64, len: u32) -> [u8; CHUNK_HEADER_BYTES] {
    let mut bytes = [0; CHUNK_HEADER_BYTES];
    bytes[..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&chunk::FLAG_DONE.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// Headers of a data chunk: the chunk's and the offset of its `len` bytes of data.
pub(super) fn data_chunk_header(
    cookie: u64,
    offset: u64,
    len: u32,
) -> [u8; CHUNK_HEADER_BYTES + CHUNK_OFFSET_BYTES] {
    let mut bytes = [0; CHUNK_HEADER_BYTES + CHUNK_OFFSET_BYTES];
    let payload = len.saturating_add(wire_len(CHUNK_OFFSET_BYTES));
    bytes[..CHUNK_HEADER_BYTES].copy_from_slice(&chunk_header(chunk::OFFSET_DATA, cookie, payload));
    bytes[CHUNK_HEADER_BYTES..].copy_from_slice(&offset.to_be_bytes());
    bytes
}

/// Appends an error chunk; with `offset`, one that says where in the request it happened.
/// The message is cut at [`MAX_MESSAGE_BYTES`].
pub(super) fn push_error_chunk(
    out: &mut Vec<u8>,
    cookie: u64,
    error: u32,
    message: &str,
    offset: Option<u64>,
) {
    let message = clipped(message);
    let kind = if offset.is_some() { chunk::ERROR_OFFSET } else { chunk::ERROR };
    let tail = offset.map(u64::to_be_bytes);
    let tail: &[u8] = tail.as_ref().map_or(&[], |bytes| bytes);
    let payload = 6 + message.len() + tail.len();
    out.extend(chunk_header(kind, cookie, wire_len(payload)));
    out.extend(error.to_be_bytes());
    out.extend(u16::try_from(message.len()).unwrap_or(0).to_be_bytes());
    out.extend_from_slice(message.as_bytes());
    out.extend_from_slice(tail);
}

/// The longest start of `message` that an error chunk carries.
fn clipped(message: &str) -> &str {
    let mut end = message.len().min(MAX_MESSAGE_BYTES);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}

/// Appends the block status chunk of `base:allocation` for `extents`, each at most 4 GiB - 1 long.
pub(super) fn push_status_chunk(out: &mut Vec<u8>, cookie: u64, extents: &[Extent]) {
    out.extend(chunk_header(chunk::BLOCK_STATUS, cookie, wire_len(4 + 8 * extents.len())));
    out.extend(BASE_ALLOCATION_ID.to_be_bytes());
    for extent in extents {
        let hole = if extent.hole { STATE_HOLE } else { 0 };
        let zero = if extent.zero { STATE_ZERO } else { 0 };
        out.extend(u32::try_from(extent.len).unwrap_or(u32::MAX).to_be_bytes());
        out.extend((hole | zero).to_be_bytes());
    }
}

/// A 32-bit number as it goes on the wire.
pub(super) fn be32(value: u32) -> [u8; 4] {
    value.to_be_bytes()
}

/// A 16-bit number as it goes on the wire.
pub(super) fn be16(value: u16) -> [u8; 2] {
    value.to_be_bytes()
}

/// A length of something that this server built, and keeps far below 4 GiB.
pub(super) fn wire_len(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
