//! 64-bit Arm: `dc cvap` (to the point of persistence) or `dc cvac` (to the point of coherency),
//! `dsb`, copies by pairs of 128-bit registers.
//!
//! No store around the cache becomes durable by a barrier, so "streaming" is a copy whose lines are
//! written back at once.

use std::arch::asm;

use super::{Copies, LINE};

/// Every CPU of this architecture can write lines back.
pub(super) const CAN_WRITE_BACK: bool = true;

/// How a cache line is written back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pmem) enum WriteBack {
    /// To the point of persistence (`FEAT_DPB`).
    Cvap,
    /// To the point of coherency, which is memory on machines without `dc cvap`.
    Cvac,
}

impl WriteBack {
    /// Returns the name in messages.
    pub(in crate::pmem) fn name(self) -> &'static str {
        match self {
            Self::Cvap => "dc cvap",
            Self::Cvac => "dc cvac",
        }
    }

    /// Writes the line that holds `at` back to memory, before the next [`fence`] ends.
    ///
    /// # Safety
    /// The line is mapped and the CPU has the instruction.
    #[inline]
    pub(super) unsafe fn line(self, at: *const u8) {
        match self {
            // SAFETY: changes no memory. `sys` is `dc cvap` for assemblers that do not know
            // FEAT_DPB.
            Self::Cvap => unsafe {
                asm!("sys #3, c7, c12, #1, {}", in(reg) at, options(nostack, preserves_flags));
            },
            // SAFETY: changes no memory.
            Self::Cvac => unsafe {
                asm!("dc cvac, {}", in(reg) at, options(nostack, preserves_flags));
            },
        }
    }

    /// Returns the write-backs of this CPU, best first.
    pub(super) fn available() -> impl Iterator<Item = Self> {
        let cvap = std::arch::is_aarch64_feature_detected!("dpb").then_some(Self::Cvap);
        cvap.into_iter().chain([Self::Cvac])
    }
}

/// Returns the copies of this CPU, best first.
pub(super) fn available_copies() -> impl Iterator<Item = Copies> {
    let cvap = Copies { name: "NEON and dc cvap", copy, stream_lines: stream_lines_cvap };
    let cvac = Copies { name: "NEON and dc cvac", copy, stream_lines: stream_lines_cvac };
    WriteBack::available().map(move |kind| if kind == WriteBack::Cvap { cvap } else { cvac })
}

/// Returns `None`: there are no instructions that fold lines of a CRC.
pub(super) fn stream_with_crc() -> Option<super::StreamWithCrc> {
    None
}

/// Waits until all earlier write-backs of this thread have reached the point of persistence.
#[inline]
pub(in crate::pmem) fn fence() {
    // SAFETY: orders memory accesses, and changes no memory.
    unsafe { asm!("dsb sy", options(nostack, preserves_flags)) };
}

unsafe fn stream_lines_cvap(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: the caller promises both ranges; this is chosen only for CPUs with `dc cvap`.
    unsafe { stream_lines(WriteBack::Cvap, to, from, bytes) };
}

unsafe fn stream_lines_cvac(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: the caller promises both ranges.
    unsafe { stream_lines(WriteBack::Cvac, to, from, bytes) };
}

unsafe fn stream_lines(write_back: WriteBack, to: *mut u8, from: *const u8, bytes: usize) {
    for at in (0..bytes).step_by(LINE) {
        // SAFETY: a whole line inside the caller's ranges.
        #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one line, one argument")]
        unsafe {
            copy_line(to.add(at), from.add(at));
            write_back.line(to.add(at));
        }
    }
}

/// Copies as [`Copies::copy`] does.
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    let lines_end = bytes / LINE * LINE;
    let words_end = bytes / 8 * 8;
    // SAFETY: the parts are adjacent and inside the caller's ranges.
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one split, one argument")]
    unsafe {
        for at in (0..lines_end).step_by(LINE) {
            copy_line(to.add(at), from.add(at));
        }
        for at in (lines_end..words_end).step_by(8) {
            copy_word(to.add(at), from.add(at));
        }
        for at in words_end..bytes {
            copy_byte(to.add(at), from.add(at));
        }
    }
}

#[inline]
unsafe fn copy_line(to: *mut u8, from: *const u8) {
    // SAFETY: the caller promises a mapped line on both sides.
    unsafe {
        asm!(
            "ldp {a:q}, {b:q}, [{from}]", "ldp {c:q}, {d:q}, [{from}, #32]",
            "stp {a:q}, {b:q}, [{to}]", "stp {c:q}, {d:q}, [{to}, #32]",
            to = in(reg) to, from = in(reg) from,
            a = out(vreg) _, b = out(vreg) _, c = out(vreg) _, d = out(vreg) _,
            options(nostack, preserves_flags)
        );
    }
}

#[inline]
unsafe fn copy_word(to: *mut u8, from: *const u8) {
    // SAFETY: the caller promises 8 mapped bytes on both sides.
    unsafe {
        asm!(
            "ldr {a}, [{from}]", "str {a}, [{to}]",
            to = in(reg) to, from = in(reg) from, a = out(reg) _,
            options(nostack, preserves_flags)
        );
    }
}

#[inline]
unsafe fn copy_byte(to: *mut u8, from: *const u8) {
    // SAFETY: the caller promises a mapped byte on both sides.
    unsafe {
        asm!(
            "ldrb {a:w}, [{from}]", "strb {a:w}, [{to}]",
            to = in(reg) to, from = in(reg) from, a = out(reg) _,
            options(nostack, preserves_flags)
        );
    }
}
