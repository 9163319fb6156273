//! AVX2: a line is two registers.

use std::arch::asm;

use super::Vector;

pub(super) struct Avx2;

impl Vector for Avx2 {
    const NAME: &'static str = "AVX2";

    #[inline]
    unsafe fn copy_line(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges.
        unsafe {
            asm!(
                "vmovdqu ymm0, [{from}]",
                "vmovdqu ymm1, [{from} + 32]",
                "vmovdqu [{to}], ymm0",
                "vmovdqu [{to} + 32], ymm1",
                to = in(reg) to, from = in(reg) from,
                out("ymm0") _, out("ymm1") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn copy_four_lines(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges.
        unsafe {
            asm!(
                "vmovdqu ymm0, [{from}]",
                "vmovdqu ymm1, [{from} + 32]",
                "vmovdqu ymm2, [{from} + 64]",
                "vmovdqu ymm3, [{from} + 96]",
                "vmovdqu ymm4, [{from} + 128]",
                "vmovdqu ymm5, [{from} + 160]",
                "vmovdqu ymm6, [{from} + 192]",
                "vmovdqu ymm7, [{from} + 224]",
                "vmovdqu [{to}], ymm0",
                "vmovdqu [{to} + 32], ymm1",
                "vmovdqu [{to} + 64], ymm2",
                "vmovdqu [{to} + 96], ymm3",
                "vmovdqu [{to} + 128], ymm4",
                "vmovdqu [{to} + 160], ymm5",
                "vmovdqu [{to} + 192], ymm6",
                "vmovdqu [{to} + 224], ymm7",
                to = in(reg) to, from = in(reg) from,
                out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn stream_line(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges, and the destination is the start of a line.
        unsafe {
            asm!(
                "vmovdqu ymm0, [{from}]",
                "vmovdqu ymm1, [{from} + 32]",
                "vmovntdq [{to}], ymm0",
                "vmovntdq [{to} + 32], ymm1",
                to = in(reg) to, from = in(reg) from,
                out("ymm0") _, out("ymm1") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn stream_four_lines(to: *mut u8, from: *const u8) {
        // SAFETY: the caller's ranges, and the destination is the start of a line.
        unsafe {
            asm!(
                "vmovdqu ymm0, [{from}]",
                "vmovdqu ymm1, [{from} + 32]",
                "vmovdqu ymm2, [{from} + 64]",
                "vmovdqu ymm3, [{from} + 96]",
                "vmovdqu ymm4, [{from} + 128]",
                "vmovdqu ymm5, [{from} + 160]",
                "vmovdqu ymm6, [{from} + 192]",
                "vmovdqu ymm7, [{from} + 224]",
                "vmovntdq [{to}], ymm0",
                "vmovntdq [{to} + 32], ymm1",
                "vmovntdq [{to} + 64], ymm2",
                "vmovntdq [{to} + 96], ymm3",
                "vmovntdq [{to} + 128], ymm4",
                "vmovntdq [{to} + 160], ymm5",
                "vmovntdq [{to} + 192], ymm6",
                "vmovntdq [{to} + 224], ymm7",
                to = in(reg) to, from = in(reg) from,
                out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline]
    unsafe fn done() {
        // SAFETY: all vector registers are given up here: none is live across the assembly of this
        // module.
        unsafe {
            asm!("vzeroupper", clobber_abi("sysv64"), options(nomem, nostack, preserves_flags));
        };
    }
}
