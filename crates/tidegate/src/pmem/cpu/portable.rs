//! Any other CPU: ordinary copies, no write-back. The `adr` domain is impossible here.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::Copies;

/// User space cannot write lines back here, as far as this program knows.
pub(super) const CAN_WRITE_BACK: bool = false;

/// How a cache line is written back: it cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pmem) struct WriteBack;

#[expect(clippy::unused_self, reason = "the signatures are those of the other CPUs")]
impl WriteBack {
    /// Returns the name in messages.
    pub(in crate::pmem) fn name(self) -> &'static str {
        "no write-back (so not durable without msync)"
    }

    /// Does nothing.
    ///
    /// # Safety
    /// None needed.
    #[inline]
    pub(super) unsafe fn line(self, _at: *const u8) {}

    pub(super) fn available() -> impl Iterator<Item = Self> {
        std::iter::once(Self)
    }
}

/// Returns the only copies.
pub(super) fn available_copies() -> impl Iterator<Item = Copies> {
    std::iter::once(Copies { name: "portable", copy, stream_lines: copy })
}

/// Returns `None`: there are no instructions that fold lines of a CRC.
pub(super) fn stream_with_crc() -> Option<super::StreamWithCrc> {
    None
}

/// Orders this thread's stores before its later ones.
#[inline]
pub(in crate::pmem) fn fence() {
    std::sync::atomic::fence(Ordering::SeqCst);
}

/// Copies as [`Copies::copy`]: words if both sides have one alignment, else bytes.
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    let same_offset = (to.addr() ^ from.addr()).is_multiple_of(8);
    let head = if same_offset { to.align_offset(8).min(bytes) } else { bytes };
    let words_end = head + (bytes - head) / 8 * 8;
    // SAFETY: the three parts are adjacent and inside the caller's ranges. The middle one is
    // aligned words on both sides.
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one split, one argument")]
    unsafe {
        copy_bytes(to, from, 0, head);
        for at in (head..words_end).step_by(8) {
            copy_word(to.add(at), from.add(at));
        }
        copy_bytes(to, from, words_end, bytes);
    }
}

#[expect(clippy::cast_ptr_alignment, reason = "the caller aligned both")]
unsafe fn copy_word(to: *mut u8, from: *const u8) {
    // SAFETY: the caller passes aligned words inside its ranges; no thread holds references to
    // either.
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one word, one argument")]
    unsafe {
        let word = (*from.cast::<AtomicU64>()).load(Ordering::Relaxed);
        (*to.cast::<AtomicU64>()).store(word, Ordering::Relaxed);
    }
}

unsafe fn copy_bytes(to: *mut u8, from: *const u8, start: usize, end: usize) {
    for at in start..end {
        // SAFETY: the bytes are inside the caller's ranges; no thread holds references to either.
        #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one byte, one argument")]
        unsafe {
            let byte = (*from.add(at).cast::<AtomicU8>()).load(Ordering::Relaxed);
            (*to.add(at).cast::<AtomicU8>()).store(byte, Ordering::Relaxed);
        }
    }
}
