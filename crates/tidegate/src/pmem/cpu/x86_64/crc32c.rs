//! Streaming stores of lines that also compute the CRC-32C of the lines: each line is loaded once,
//! into a register that is both stored and folded. Carry-less products fold (V. Gopal and others,
//! "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel, 2009).
//!
//! A register of four 16-byte lanes, read as a message, stands for all lines before it: times
//! `x^n`, modulo the polynomial, it is added to the line that is `n` bits behind. The CRC
//! instruction takes the last register.
//!
//! Only registers 16 and up are used, as in [`avx512`](super::avx512).

use std::arch::asm;

use super::super::StreamWithCrc;
use super::LINE;
use crate::pmem::crc32c::times_x;

/// Computes `x^power` modulo the polynomial, reflected.
const fn power_of_x(power: u32) -> u32 {
    let (mut value, mut left) = (1 << 31, power);
    while left > 0 {
        value = times_x(value);
        left -= 1;
    }
    value
}

/// Returns the factors of the low and the high half of a lane whose products are added to the lane
/// that is `bits` behind. The product of reflected words is `x` times the polynomials' product.
const fn factors(bits: u32) -> [u64; 2] {
    [(power_of_x(bits + 63) as u64) << 32, (power_of_x(bits - 1) as u64) << 32]
}

const LINE_BITS: u32 = 512;
const _: () = assert!(LINE * 8 == LINE_BITS as usize);
/// The factors for the line that is four behind, and for the next one.
static FACTORS: [[u64; 2]; 2] = [factors(4 * LINE_BITS), factors(LINE_BITS)];

/// A register becomes its product with factors, added to another register. Register 24 is lost.
macro_rules! folded {
    ($register:literal, $factors:literal, $added:literal) => {
        concat!(
            "vpclmulqdq zmm24, zmm",
            $register,
            ", zmm",
            $factors,
            ", 0x00\n",
            "vpclmulqdq zmm",
            $register,
            ", zmm",
            $register,
            ", zmm",
            $factors,
            ", 0x11\n",
            "vpternlogq zmm",
            $register,
            ", zmm24, zmm",
            $added,
            ", 0x96",
        )
    };
}

/// Returns the implementation, if the CPU has its instructions.
pub(in crate::pmem) fn detect() -> Option<StreamWithCrc> {
    let has_it = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("sse4.2");
    has_it.then_some(StreamWithCrc { lines: stream_lines, rest: add_bytes })
}

/// Stores lines as [`StreamWithCrc::lines`] does.
unsafe fn stream_lines(to: *mut u8, from: *const u8, bytes: usize) -> u32 {
    let mut folded = [0_u64; LINE / 8];
    // SAFETY: each step stays inside the caller's ranges and starts at a line of the destination;
    // `factors` and `folded` are this function's, and the CPU has the instructions, as `detect`
    // checked.
    unsafe {
        asm!(
            "vbroadcasti32x4 zmm28, [{factors}]",
            "vbroadcasti32x4 zmm29, [{factors} + 16]",
            // A CRC starts as if the first 32 bits were inverted.
            "vmovd xmm30, {start:e}",
            "vpxorq zmm20, zmm20, zmm20",
            "vpxorq zmm21, zmm21, zmm21",
            "vpxorq zmm22, zmm22, zmm22",
            "vpxorq zmm23, zmm23, zmm23",
            "test {fours}, {fours}",
            "jz 3f",
            // Four lines, each folded into the register of the line that is four before it.
            "2:",
            "vmovdqu64 zmm16, [{from}]",
            "vmovdqu64 zmm17, [{from} + 64]",
            "vmovdqu64 zmm18, [{from} + 128]",
            "vmovdqu64 zmm19, [{from} + 192]",
            "vmovntdq [{to}], zmm16",
            "vmovntdq [{to} + 64], zmm17",
            "vmovntdq [{to} + 128], zmm18",
            "vmovntdq [{to} + 192], zmm19",
            "vpxorq zmm16, zmm16, zmm30",
            "vpxorq zmm30, zmm30, zmm30",
            folded!(20, 28, 16),
            folded!(21, 28, 17),
            folded!(22, 28, 18),
            folded!(23, 28, 19),
            "add {from}, 256",
            "add {to}, 256",
            "dec {fours}",
            "jnz 2b",
            // Each of the four registers into the next one.
            folded!(20, 29, 21),
            folded!(20, 29, 22),
            folded!(20, 29, 23),
            "3:",
            "test {ones}, {ones}",
            "jz 5f",
            // The lines that are left, one by one.
            "4:",
            "vmovdqu64 zmm16, [{from}]",
            "vmovntdq [{to}], zmm16",
            "vpxorq zmm16, zmm16, zmm30",
            "vpxorq zmm30, zmm30, zmm30",
            folded!(20, 29, 16),
            "add {from}, 64",
            "add {to}, 64",
            "dec {ones}",
            "jnz 4b",
            "5:",
            "vmovdqu64 [{folded}], zmm20",
            to = inout(reg) to => _, from = inout(reg) from => _,
            fours = inout(reg) bytes / (4 * LINE) => _, ones = inout(reg) bytes / LINE % 4 => _,
            factors = in(reg) FACTORS.as_ptr(), start = in(reg) !0_u32,
            folded = in(reg) folded.as_mut_ptr(),
            out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _,
            out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
            out("zmm24") _, out("zmm28") _, out("zmm29") _, out("zmm30") _,
            options(nostack)
        );
    }
    folded.into_iter().fold(0, add_word)
}

/// Adds bytes to a CRC as [`StreamWithCrc::rest`] does.
unsafe fn add_bytes(crc: u32, bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks();
    let crc = words.iter().fold(crc, |crc, word| add_word(crc, u64::from_le_bytes(*word)));
    rest.iter().fold(crc, |crc, byte| add_byte(crc, *byte))
}

/// Adds 8 bytes to a CRC.
#[inline]
fn add_word(crc: u32, word: u64) -> u32 {
    let mut crc = u64::from(crc);
    // SAFETY: touches registers only; `detect` has found the instruction.
    unsafe {
        asm!("crc32 {crc}, {word}", crc = inout(reg) crc, word = in(reg) word,
            options(pure, nomem, nostack, preserves_flags));
    }
    u32::try_from(crc).unwrap_or(u32::MAX)
}

/// Adds one byte to a CRC.
#[inline]
fn add_byte(mut crc: u32, byte: u8) -> u32 {
    // SAFETY: touches registers only; `detect` has found the instruction.
    unsafe {
        asm!("crc32 {crc:e}, {byte}", crc = inout(reg) crc, byte = in(reg_byte) byte,
            options(pure, nomem, nostack, preserves_flags));
    }
    crc
}
