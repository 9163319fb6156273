//! AVX-512: a line is one register.
//!
//! Only registers 16 and up are used: they have no SSE part, so that the code around needs no
//! `vzeroupper`.

use std::arch::asm;

use super::Vector;

pub(super) struct Avx512;

impl Vector for Avx512 {
    const NAME: &'static str = "AVX-512";

    #[inline]
    unsafe fn copy_line(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges.
        unsafe {
            asm!(
                "vmovdqu64 zmm16, [{from}]",
                "vmovdqu64 [{to}], zmm16",
                to = in(reg) to, from = in(reg) from,
                out("zmm16") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn copy_four_lines(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges.
        unsafe {
            asm!(
                "vmovdqu64 zmm16, [{from}]",
                "vmovdqu64 zmm17, [{from} + 64]",
                "vmovdqu64 zmm18, [{from} + 128]",
                "vmovdqu64 zmm19, [{from} + 192]",
                "vmovdqu64 [{to}], zmm16",
                "vmovdqu64 [{to} + 64], zmm17",
                "vmovdqu64 [{to} + 128], zmm18",
                "vmovdqu64 [{to} + 192], zmm19",
                to = in(reg) to, from = in(reg) from,
                out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn stream_line(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges, and the destination is the start of a line.
        unsafe {
            asm!(
                "vmovdqu64 zmm16, [{from}]",
                "vmovntdq [{to}], zmm16",
                to = in(reg) to, from = in(reg) from,
                out("zmm16") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn stream_four_lines(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges, and the destination is the start of a line.
        unsafe {
            asm!(
                "vmovdqu64 zmm16, [{from}]",
                "vmovdqu64 zmm17, [{from} + 64]",
                "vmovdqu64 zmm18, [{from} + 128]",
                "vmovdqu64 zmm19, [{from} + 192]",
                "vmovntdq [{to}], zmm16",
                "vmovntdq [{to} + 64], zmm17",
                "vmovntdq [{to} + 128], zmm18",
                "vmovntdq [{to} + 192], zmm19",
                to = in(reg) to, from = in(reg) from,
                out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn done() {}
}
