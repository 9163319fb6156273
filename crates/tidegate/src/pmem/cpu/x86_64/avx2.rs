//! AVX2: a line is two registers.

use std::arch::asm;

use super::{Vector, moves};

pub(super) struct Avx2;

impl Vector for Avx2 {
    const NAME: &'static str = "AVX2";

    moves!(copy_line, stream_line, "vmovdqu", "vmovntdq", "ymm0" at 0, "ymm1" at 32);

    moves!(copy_four_lines, stream_four_lines, "vmovdqu", "vmovntdq",
        "ymm0" at 0, "ymm1" at 32, "ymm2" at 64, "ymm3" at 96,
        "ymm4" at 128, "ymm5" at 160, "ymm6" at 192, "ymm7" at 224);

    #[inline]
    unsafe fn done() {
        // SAFETY: `vzeroupper` clears all vector registers, which are declared as clobbered. No
        // vector register is live across the assembly of this module.
        unsafe {
            asm!("vzeroupper", clobber_abi("sysv64"), options(nomem, nostack, preserves_flags));
        };
    }
}
