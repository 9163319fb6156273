//! AVX-512: a line is one register.
//!
//! Only registers 16 and up are used: they have no SSE part, so that the code around needs no
//! `vzeroupper`.

use super::{Vector, moves};

pub(super) struct Avx512;

impl Vector for Avx512 {
    const NAME: &'static str = "AVX-512";

    moves!(copy_line, stream_line, "vmovdqu64", "vmovntdq", "zmm16" at 0);

    moves!(copy_four_lines, stream_four_lines, "vmovdqu64", "vmovntdq",
        "zmm16" at 0, "zmm17" at 64, "zmm18" at 128, "zmm19" at 192);

    #[inline]
    unsafe fn done() {}
}
