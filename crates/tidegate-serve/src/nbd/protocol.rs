//! Layout and encoding of a server's messages in the NBD protocol.
//!
//! Invariants: this module re-exports the [words](tidegate::device::nbd::protocol) that clients
//! share, with their invariants.
//!
//! Entry points: [`greeting`], [`option_reply`], [`simple_reply`], [`chunk_header`],
//! [`push_error_chunk`], [`push_status_chunk`].

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

/// Returns the server's first message.
pub(super) fn greeting() -> [u8; 18] {
    let flags = be16(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
    joined([&be64(SERVER_MAGIC), &be64(OPTION_MAGIC), &flags])
}

/// Appends the answer `kind` to `option`; its data is the concatenation of `parts`.
pub(super) fn option_reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    out.extend(be64(OPTION_REPLY_MAGIC));
    out.extend_from_slice([option, kind, wire_len(len)].map(be32).as_flattened());
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// Returns the data of `EXPORT` information, which follows its kind.
pub(super) fn export_info(size_bytes: u64, flags: u16) -> [u8; 10] {
    joined([&be64(size_bytes), &be16(flags)])
}

/// Returns the data of `BLOCK_SIZE` information, which follows its kind.
pub(super) fn block_size_info(minimum: u32, preferred: u32, maximum: u32) -> [u8; 12] {
    joined([&be32(minimum), &be32(preferred), &be32(maximum)])
}

/// Returns a simple reply; `error` is 0 or one of [`errno`].
pub(super) fn simple_reply(error: u32, cookie: u64) -> [u8; SIMPLE_REPLY_BYTES] {
    joined([&be32(SIMPLE_REPLY_MAGIC), &be32(error), &be64(cookie)])
}

/// Returns the header of the only chunk of a structured reply, with `len` bytes of payload.
pub(super) fn chunk_header(kind: u16, cookie: u64, len: u32) -> [u8; CHUNK_HEADER_BYTES] {
    let (flags, kind) = (be16(chunk::FLAG_DONE), be16(kind));
    joined([&be32(CHUNK_MAGIC), &flags, &kind, &be64(cookie), &be32(len)])
}

/// Returns the headers of a data chunk: the chunk's, and the offset of its `len` bytes of data.
pub(super) fn data_chunk_header(
    cookie: u64,
    offset: u64,
    len: u32,
) -> [u8; CHUNK_HEADER_BYTES + CHUNK_OFFSET_BYTES] {
    let payload = len.saturating_add(wire_len(CHUNK_OFFSET_BYTES));
    joined([&chunk_header(chunk::OFFSET_DATA, cookie, payload), &be64(offset)])
}

/// Appends an error chunk, with the position of the error if there is an `offset`. The message is
/// cut at [`MAX_MESSAGE_BYTES`].
pub(super) fn push_error_chunk(
    out: &mut Vec<u8>,
    cookie: u64,
    error: u32,
    message: &str,
    offset: Option<u64>,
) {
    let message = clipped(message);
    let kind = if offset.is_some() { chunk::ERROR_OFFSET } else { chunk::ERROR };
    let tail = offset.map(be64);
    let tail = tail.as_slice().as_flattened();
    let payload = 6 + message.len() + tail.len();
    out.extend(chunk_header(kind, cookie, wire_len(payload)));
    out.extend(be32(error));
    out.extend(be16(u16::try_from(message.len()).unwrap_or(0)));
    out.extend_from_slice(message.as_bytes());
    out.extend_from_slice(tail);
}

/// Returns the longest start of `message` that an error chunk carries.
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
    out.extend(be32(BASE_ALLOCATION_ID));
    for extent in extents {
        let hole = if extent.hole { STATE_HOLE } else { 0 };
        let zero = if extent.zero { STATE_ZERO } else { 0 };
        let len = u32::try_from(extent.len).unwrap_or(u32::MAX);
        out.extend_from_slice([len, hole | zero].map(be32).as_flattened());
    }
}
