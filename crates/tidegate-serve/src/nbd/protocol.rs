//! What a server says in the NBD protocol: the layout of its messages, and their encoding.
//!
//! Invariants: those of the [words](tidegate::device::nbd::protocol) that clients share, which this
//! module hands on.
//!
//! Entry points: [`greeting`], [`option_reply`], [`simple_reply`], [`chunk_header`],
//! [`push_error_chunk`], [`push_status_chunk`].

#![expect(clippy::big_endian_bytes, reason = "NBD numbers are big-endian on the wire")]

use tidegate::device::Extent;
pub(super) use tidegate::device::nbd::protocol::*;

/// The one metadata context of this server.
pub(super) const BASE_ALLOCATION: &str = "base:allocation";
/// Its number in block status replies.
pub(super) const BASE_ALLOCATION_ID: u32 = 1;
/// Size of the offset that starts a data chunk's payload.
pub(super) const CHUNK_OFFSET_BYTES: usize = 8;
/// The most bytes of an error message that an error chunk carries.
pub(super) const MAX_MESSAGE_BYTES: usize = 512;

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
