//! SSE2, which every x86-64 CPU has: a line is four registers.

use std::arch::asm;

use super::{Vector, moves};

pub(super) struct Sse2;

impl Vector for Sse2 {
    const NAME: &'static str = "SSE2";

    moves!(copy_line, stream_line, "movdqu", "movntdq",
        "xmm0" at 0, "xmm1" at 16, "xmm2" at 32, "xmm3" at 48);

    moves!(copy_four_lines, stream_four_lines, "movdqu", "movntdq",
        "xmm0" at 0, "xmm1" at 16, "xmm2" at 32, "xmm3" at 48,
        "xmm4" at 64, "xmm5" at 80, "xmm6" at 96, "xmm7" at 112;
        "xmm0" at 128, "xmm1" at 144, "xmm2" at 160, "xmm3" at 176,
        "xmm4" at 192, "xmm5" at 208, "xmm6" at 224, "xmm7" at 240);

    #[inline]
    unsafe fn done() {}
}

/// Copies 32 bytes.
#[inline]
pub(super) unsafe fn copy_32(to: *mut u8, from: *const u8) {
    // SAFETY: the caller promises 32 mapped bytes on both sides.
    unsafe {
        asm!(
            "movdqu {a}, [{from}]", "movdqu {b}, [{from} + 16]",
            "movdqu [{to}], {a}", "movdqu [{to} + 16], {b}",
            to = in(reg) to, from = in(reg) from,
            a = out(xmm_reg) _, b = out(xmm_reg) _, options(nostack, preserves_flags)
        );
    }
}

/// Copies 16 bytes at the start and 16 bytes at `last`.
#[inline]
pub(super) unsafe fn copy_ends_16(to: *mut u8, from: *const u8, last: usize) {
    // SAFETY: the caller promises `last + 16` mapped bytes on both sides.
    unsafe {
        asm!(
            "movdqu {a}, [{from}]", "movdqu {b}, [{from} + {last}]",
            "movdqu [{to}], {a}", "movdqu [{to} + {last}], {b}",
            to = in(reg) to, from = in(reg) from, last = in(reg) last,
            a = out(xmm_reg) _, b = out(xmm_reg) _, options(nostack, preserves_flags)
        );
    }
}
