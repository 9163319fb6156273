//! Buffers of one connection: received bytes, bytes to send, and payloads in memory of their own.
//!
//! Invariants: a buffer is zeroed once, when it is made, and reused from then on; the buffers of
//! [`Input`] and [`Output`] never grow; a payload is made only for a length that was checked.

use std::collections::VecDeque;
use std::io::IoSlice;

use tidegate::device::{BUFFER_EXTRA_BYTES, IoBuffer};
use zerocopy::FromZeros as _;

use crate::payload::PayloadPool;

/// Returns `len` zero bytes, whose pages become resident as bytes are stored in them, or `None` if
/// the system has not enough memory.
fn zeroes(len: usize) -> Option<Box<[u8]>> {
    <[u8]>::new_box_zeroed_with_elems(len).ok()
}

/// Received bytes not used up yet.
pub(super) struct Input {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Input {
    /// Creates an input of `capacity_bytes`. Returns `None` if the system has no memory left.
    pub(super) fn try_new(capacity_bytes: usize) -> Option<Self> {
        Some(Self { bytes: zeroes(capacity_bytes)?, start: 0, end: 0 })
    }

    /// Returns the received bytes that are not used up.
    pub(super) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Uses up `len` bytes.
    pub(super) fn consume(&mut self, len: usize) {
        self.start += len;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Returns free space for more bytes. Moves the unread bytes to the front when less than half
    /// of the buffer is left behind them.
    pub(super) fn free_space(&mut self) -> &mut [u8] {
        if self.end > self.bytes.len() / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// Notes that `len` bytes were received into the free space.
    pub(super) fn received(&mut self, len: usize) {
        self.end += len;
    }
}

/// A message outside the buffer of [`Output`].
enum Owned {
    Bytes(Vec<u8>),
    Payload(IoBuffer),
}

impl Owned {
    fn message(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Payload(payload) => payload.message(),
        }
    }
}

/// Where an owned message stands among the buffered bytes.
struct Placed {
    /// Index of the buffered byte before which the message is sent.
    at: usize,
    owned: Owned,
}

/// Most pieces passed to one send.
const MAX_PIECES: usize = 32;

/// Bytes to send: small messages in one buffer, large ones as they are.
#[derive(Default)]
pub(super) struct Output {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    placed: VecDeque<Placed>,
    placed_sent: usize,
    placed_bytes: usize,
    /// The socket took no more bytes when they were last sent.
    is_stuck: bool,
}

impl Output {
    /// Creates an output with a buffer of `capacity_bytes`. Returns `None` if the system has no
    /// memory for the buffer. An output by [`Default`] has no buffer.
    pub(super) fn try_new(capacity_bytes: usize) -> Option<Self> {
        Some(Self { buffer: zeroes(capacity_bytes)?, ..Self::default() })
    }

    /// Returns the number of bytes that wait in the buffer.
    pub(super) fn buffered_bytes(&self) -> usize {
        self.end - self.start
    }

    /// Returns the memory of owned messages, in bytes.
    pub(super) fn owned_bytes(&self) -> usize {
        self.placed_bytes + self.placed.len() * BUFFER_EXTRA_BYTES
    }

    /// Returns the number of owned messages.
    pub(super) fn owned_messages(&self) -> usize {
        self.placed.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end && self.placed.is_empty()
    }

    /// Returns whether the socket takes no more bytes, as far as known.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_stuck
    }

    /// Notes that the socket takes no more bytes.
    pub(super) fn stick(&mut self) {
        self.is_stuck = true;
    }

    /// Makes free space for `len` bytes behind the buffered ones. Returns false if they do not fit.
    pub(super) fn reserve(&mut self, len: usize) -> bool {
        if self.buffer.len() - self.end >= len {
            return true;
        }
        if self.placed.is_empty() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        self.buffer.len() - self.end >= len
    }

    /// Returns the next `len` bytes of the buffer, which [`reserve`](Self::reserve) has made sure
    /// of. They are sent only once [`commit`](Self::commit)ted.
    pub(super) fn tail(&mut self, len: usize) -> &mut [u8] {
        &mut self.buffer[self.end..self.end + len]
    }

    /// Adds `len` bytes of the buffer to those to send.
    pub(super) fn commit(&mut self, len: usize) {
        self.end += len;
    }

    /// Adds `bytes` to send, through the buffer if they fit.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        if self.reserve(bytes.len()) {
            self.tail(bytes.len()).copy_from_slice(bytes);
            self.commit(bytes.len());
        } else {
            self.place(Owned::Bytes(bytes.to_vec()));
        }
    }

    /// Adds a payload with its header to send.
    pub(super) fn push_payload(&mut self, payload: IoBuffer) {
        self.place(Owned::Payload(payload));
    }

    fn place(&mut self, owned: Owned) {
        self.placed_bytes += owned.message().len();
        self.placed.push_back(Placed { at: self.end, owned });
    }

    /// Fills `pieces` with the next ones to send, in order. Returns their number.
    pub(super) fn pieces<'a>(&'a self, pieces: &mut [IoSlice<'a>; MAX_PIECES]) -> usize {
        let (mut at, mut count, mut sent) = (self.start, 0, self.placed_sent);
        for placed in self.placed.iter().take(MAX_PIECES / 2 - 1) {
            for piece in [&self.buffer[at..placed.at], &placed.owned.message()[sent..]] {
                if !piece.is_empty() {
                    pieces[count] = IoSlice::new(piece);
                    count += 1;
                }
            }
            (at, sent) = (placed.at, 0);
        }
        let last = self.placed.get(MAX_PIECES / 2 - 1).map_or(self.end, |next| next.at);
        if at < last {
            pieces[count] = IoSlice::new(&self.buffer[at..last]);
            count += 1;
        }
        count
    }

    /// Notes that `len` bytes of the pieces were sent. Whole payloads go back to `pool`.
    pub(super) fn sent(&mut self, mut len: usize, pool: &mut PayloadPool) {
        self.is_stuck = false;
        while len > 0 {
            let until = self.placed.front().map_or(self.end, |placed| placed.at);
            let buffered = len.min(until - self.start);
            self.start += buffered;
            len -= buffered;
            if self.start == until {
                len -= self.sent_placed(len, pool);
            }
        }
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Notes that up to `len` bytes of the first owned message were sent. Returns their number.
    fn sent_placed(&mut self, len: usize, pool: &mut PayloadPool) -> usize {
        let Some(first) = self.placed.front() else { return 0 };
        let left = first.owned.message().len() - self.placed_sent;
        let sent = len.min(left);
        self.placed_sent += sent;
        self.placed_bytes -= sent;
        if sent == left {
            self.placed_sent = 0;
            if let Some(Placed { owned: Owned::Payload(payload), .. }) = self.placed.pop_front() {
                pool.put(payload);
            }
        }
        sent
    }

    /// Returns an empty array for [`pieces`](Self::pieces).
    pub(super) fn no_pieces<'a>() -> [IoSlice<'a>; MAX_PIECES] {
        [IoSlice::new(&[]); MAX_PIECES]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gather(output: &Output) -> Vec<u8> {
        let mut pieces = Output::no_pieces();
        let count = output.pieces(&mut pieces);
        pieces[..count].iter().flat_map(|piece| piece.to_vec()).collect()
    }

    #[test]
    fn a_pool_gives_back_what_fits_and_keeps_little() {
        let mut pool = PayloadPool::new(2 << 20);
        let payload = pool.take(4096).expect("memory");
        let address = payload.data().as_ptr();
        pool.put(payload);
        assert!(std::ptr::eq(pool.take(100).expect("memory").data().as_ptr(), address));
        let large = pool.take(32 << 20).expect("memory");
        pool.put(large);
        assert_eq!(pool.kept(), 0);
    }

    proptest! {
        /// Bytes leave whole and in order for any mix of messages and partial sends.
        #[test]
        fn output_keeps_order(
            steps in prop::collection::vec((0_usize..3, 1_usize..40, 0_usize..100), 1..200)
        ) {
            let mut output = Output::try_new(256).expect("memory");
            let mut pool = PayloadPool::new(0);
            let (mut expected, mut received) = (Vec::new(), Vec::new());
            let mut next = 0_u8;
            for (kind, len, send) in steps {
                next = next.wrapping_add(1);
                let message = vec![next; len];
                match kind {
                    0 => output.push(&message),
                    1 => {
                        let mut payload = pool.take(len).expect("memory");
                        payload.data_mut().copy_from_slice(&message);
                        payload.set_header(&[0, 0]);
                        expected.extend([0, 0]);
                        output.push_payload(payload);
                    }
                    _ if output.reserve(len) => {
                        output.tail(len).copy_from_slice(&message);
                        output.commit(len);
                    }
                    _ => continue,
                }
                expected.extend(message);
                let waiting = gather(&output);
                let send = send.min(waiting.len());
                received.extend_from_slice(&waiting[..send]);
                output.sent(send, &mut pool);
            }
            while !output.is_empty() {
                let waiting = gather(&output);
                received.extend_from_slice(&waiting);
                output.sent(waiting.len(), &mut pool);
            }
            prop_assert_eq!(received, expected);
            prop_assert_eq!(output.owned_bytes(), 0);
        }
    }
}
