//! Write-back, fences and copies by instruction set, chosen once when a region is opened.
//!
//! Invariants:
//! 1. All copies are inline assembly or atomics as far as the compiler can tell: it neither moves
//!    them over an atomic operation nor assumes that no other thread stores meanwhile.
//! 2. Copies *out of* memory use ordinary vector loads, never string instructions (`rep movsb`),
//!    whose loads x86 does not keep in order. So a reader may copy, pass an acquire fence and check
//!    a version: the copied bytes are not newer than the check.
//! 3. After [`Cpu::stream`], a [`fence`] makes every byte durable: whole lines bypass the cache,
//!    and the part lines at either end are stored through it and written back.
//! 4. Only a [`fence`] orders streaming stores: not even a release store publishes them.

use std::sync::LazyLock;

use super::LINE_BYTES;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(any(test, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[cfg_attr(test, allow(dead_code, reason = "only its copies are tested on other CPUs"))]
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
use aarch64 as arch;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use portable as arch;
#[cfg(target_arch = "x86_64")]
use x86_64 as arch;

pub(super) use arch::{WriteBack, fence};

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
const _: () = assert!(LINE as u64 == LINE_BYTES);

/// Copies between memory that does not overlap.
#[derive(Clone, Copy)]
pub(super) struct Copies {
    /// The name in messages: "AVX-512".
    pub(super) name: &'static str,
    /// Copies any number of bytes by ordinary loads and stores: to, from, bytes.
    pub(super) copy: unsafe fn(*mut u8, *const u8, usize),
    /// Stores whole lines around the cache: to (a line's start), from, bytes (a multiple of a
    /// line).
    pub(super) stream_lines: unsafe fn(*mut u8, *const u8, usize),
}

/// Streaming stores that compute the CRC-32C of the stored bytes.
#[derive(Clone, Copy)]
pub(super) struct StreamWithCrc {
    /// Stores one line at least, as [`Copies::stream_lines`] does. Returns the register of the CRC
    /// after all lines, which the caller inverts at the end. Loads each byte once.
    pub(super) lines: unsafe fn(*mut u8, *const u8, usize) -> u32,
    /// Returns the register of the CRC after some more bytes.
    pub(super) rest: unsafe fn(u32, &[u8]) -> u32,
}

/// The implementations in use.
#[derive(Clone, Copy)]
pub(super) struct Cpu {
    pub(super) write_back: WriteBack,
    pub(super) copies: Copies,
    /// `None` if the CPU has no such instructions.
    pub(super) stream_with_crc: Option<StreamWithCrc>,
}

impl Cpu {
    /// Returns the fastest implementations of this CPU. A process asks the CPU once: in a virtual
    /// machine each question goes to the host.
    pub(super) fn detect() -> Self {
        static FASTEST: LazyLock<Cpu> = LazyLock::new(|| Cpu {
            write_back: WriteBack::available().next().expect("each CPU has one"),
            copies: arch::available_copies().next().expect("each CPU has some"),
            stream_with_crc: arch::stream_with_crc(),
        });
        *FASTEST
    }

    /// Returns whether user space can make stores durable, so that the domain `adr` is possible.
    pub(super) fn can_write_back() -> bool {
        arch::CAN_WRITE_BACK
    }

    /// Copies `bytes` bytes by ordinary loads and stores.
    ///
    /// # Safety
    /// Both ranges are mapped, `to` for writing, and do not overlap.
    #[inline]
    pub(super) unsafe fn copy(self, to: *mut u8, from: *const u8, bytes: usize) {
        // SAFETY: the caller promises both ranges; the copies are this CPU's.
        unsafe { (self.copies.copy)(to, from, bytes) }
    }

    /// Copies `bytes` bytes so that the next [`fence`] makes them durable. `write_back_ends` is
    /// false if the caches are durable, or if no memory is.
    ///
    /// # Safety
    /// Both ranges are mapped, `to` for writing, and do not overlap.
    #[inline]
    pub(super) unsafe fn stream(
        self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        write_back_ends: bool,
    ) {
        let head = to.align_offset(LINE).min(bytes);
        let lines = (bytes - head) / LINE * LINE;
        // SAFETY: the three parts are adjacent and inside the caller's ranges. The middle one
        // starts at a line and is whole lines.
        #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one split, one argument")]
        unsafe {
            self.store_part(to, from, head, write_back_ends);
            if lines > 0 {
                (self.copies.stream_lines)(to.add(head), from.add(head), lines);
            }
            let done = head + lines;
            self.store_part(to.add(done), from.add(done), bytes - done, write_back_ends);
        }
    }

    /// Stores less than a line, within one line, through the cache.
    ///
    /// # Safety
    /// The same conditions as [`copy`](Self::copy).
    #[inline]
    unsafe fn store_part(self, to: *mut u8, from: *const u8, bytes: usize, write_back: bool) {
        if bytes == 0 {
            return;
        }
        // SAFETY: the caller promises that both ranges are mapped and do not overlap.
        unsafe { self.copy(to, from, bytes) };
        if write_back {
            // SAFETY: the line holds a mapped byte, so that it is mapped.
            unsafe { self.write_back.line(to) };
        }
    }

    /// Writes `lines` lines back to memory, from the line that holds `at` on.
    ///
    /// # Safety
    /// The lines are mapped.
    #[inline]
    pub(super) unsafe fn write_back_lines(self, at: *const u8, lines: u64) {
        let mut line = at;
        for _ in 0..lines {
            // SAFETY: the caller promises that the lines are mapped.
            unsafe { self.write_back.line(line) };
            line = line.wrapping_add(LINE);
        }
    }
}

#[cfg(test)]
mod tests;
