//! SSE2, which every x86-64 CPU has: a line is four registers.

use std::arch::asm;

use super::Vector;

pub(super) struct Sse2;

impl Vector for Sse2 {
    const NAME: &'static str = "SSE2";

    #[inline]
    unsafe fn copy_line(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges.
        unsafe {
            asm!(
                "movdqu xmm0, [{from}]",
                "movdqu xmm1, [{from} + 16]",
                "movdqu xmm2, [{from} + 32]",
                "movdqu xmm3, [{from} + 48]",
                "movdqu [{to}], xmm0",
                "movdqu [{to} + 16], xmm1",
                "movdqu [{to} + 32], xmm2",
                "movdqu [{to} + 48], xmm3",
                to = in(reg) to, from = in(reg) from,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn copy_four_lines(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges.
        unsafe {
            asm!(
                "movdqu xmm0, [{from}]",
                "movdqu xmm1, [{from} + 16]",
                "movdqu xmm2, [{from} + 32]",
                "movdqu xmm3, [{from} + 48]",
                "movdqu xmm4, [{from} + 64]",
                "movdqu xmm5, [{from} + 80]",
                "movdqu xmm6, [{from} + 96]",
                "movdqu xmm7, [{from} + 112]",
                "movdqu [{to}], xmm0",
                "movdqu [{to} + 16], xmm1",
                "movdqu [{to} + 32], xmm2",
                "movdqu [{to} + 48], xmm3",
                "movdqu [{to} + 64], xmm4",
                "movdqu [{to} + 80], xmm5",
                "movdqu [{to} + 96], xmm6",
                "movdqu [{to} + 112], xmm7",
                "movdqu xmm0, [{from} + 128]",
                "movdqu xmm1, [{from} + 144]",
                "movdqu xmm2, [{from} + 160]",
                "movdqu xmm3, [{from} + 176]",
                "movdqu xmm4, [{from} + 192]",
                "movdqu xmm5, [{from} + 208]",
                "movdqu xmm6, [{from} + 224]",
                "movdqu xmm7, [{from} + 240]",
                "movdqu [{to} + 128], xmm0",
                "movdqu [{to} + 144], xmm1",
                "movdqu [{to} + 160], xmm2",
                "movdqu [{to} + 176], xmm3",
                "movdqu [{to} + 192], xmm4",
                "movdqu [{to} + 208], xmm5",
                "movdqu [{to} + 224], xmm6",
                "movdqu [{to} + 240], xmm7",
                to = in(reg) to, from = in(reg) from,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn stream_line(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges, and the destination is the start of a line.
        unsafe {
            asm!(
                "movdqu xmm0, [{from}]",
                "movdqu xmm1, [{from} + 16]",
                "movdqu xmm2, [{from} + 32]",
                "movdqu xmm3, [{from} + 48]",
                "movntdq [{to}], xmm0",
                "movntdq [{to} + 16], xmm1",
                "movntdq [{to} + 32], xmm2",
                "movntdq [{to} + 48], xmm3",
                to = in(reg) to, from = in(reg) from,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn stream_four_lines(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges, and the destination is the start of a line.
        unsafe {
            asm!(
                "movdqu xmm0, [{from}]",
                "movdqu xmm1, [{from} + 16]",
                "movdqu xmm2, [{from} + 32]",
                "movdqu xmm3, [{from} + 48]",
                "movdqu xmm4, [{from} + 64]",
                "movdqu xmm5, [{from} + 80]",
                "movdqu xmm6, [{from} + 96]",
                "movdqu xmm7, [{from} + 112]",
                "movntdq [{to}], xmm0",
                "movntdq [{to} + 16], xmm1",
                "movntdq [{to} + 32], xmm2",
                "movntdq [{to} + 48], xmm3",
                "movntdq [{to} + 64], xmm4",
                "movntdq [{to} + 80], xmm5",
                "movntdq [{to} + 96], xmm6",
                "movntdq [{to} + 112], xmm7",
                "movdqu xmm0, [{from} + 128]",
                "movdqu xmm1, [{from} + 144]",
                "movdqu xmm2, [{from} + 160]",
                "movdqu xmm3, [{from} + 176]",
                "movdqu xmm4, [{from} + 192]",
                "movdqu xmm5, [{from} + 208]",
                "movdqu xmm6, [{from} + 224]",
                "movdqu xmm7, [{from} + 240]",
                "movntdq [{to} + 128], xmm0",
                "movntdq [{to} + 144], xmm1",
                "movntdq [{to} + 160], xmm2",
                "movntdq [{to} + 176], xmm3",
                "movntdq [{to} + 192], xmm4",
                "movntdq [{to} + 208], xmm5",
                "movntdq [{to} + 224], xmm6",
                "movntdq [{to} + 240], xmm7",
                to = in(reg) to, from = in(reg) from,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn done() {}
}

/// Copies 32 bytes.
#[inline]
pub(super) unsafe fn copy_32(to: *mut u8, from: *const u8) {
    // SAFETY: the caller's ranges.
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
    // SAFETY: the caller's ranges.
    unsafe {
        asm!(
            "movdqu {a}, [{from}]", "movdqu {b}, [{from} + {last}]",
            "movdqu [{to}], {a}", "movdqu [{to} + {last}], {b}",
            to = in(reg) to, from = in(reg) from, last = in(reg) last,
            a = out(xmm_reg) _, b = out(xmm_reg) _, options(nostack, preserves_flags)
        );
    }
}
