//! x86-64: `clwb`, `clflushopt` or `clflush`, and copies by AVX-512, AVX2 or SSE2.

mod avx2;
mod avx512;
mod crc32c;
mod sse2;

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;

pub(super) use crc32c::detect as stream_with_crc;

use super::{Copies, LINE};

/// Every CPU of this architecture can write lines back.
pub(super) const CAN_WRITE_BACK: bool = true;

/// How a cache line is written back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pmem) enum WriteBack {
    /// Writes back and may keep the line in the cache.
    Clwb,
    /// Writes back and evicts.
    Clflushopt,
    /// Writes back and evicts, one line after the other.
    Clflush,
}

impl WriteBack {
    /// Returns the name in messages.
    pub(in crate::pmem) fn name(self) -> &'static str {
        match self {
            Self::Clwb => "clwb",
            Self::Clflushopt => "clflushopt",
            Self::Clflush => "clflush",
        }
    }

    /// Writes the line that holds `at` back to memory, before the next [`fence`] ends.
    ///
    /// # Safety
    /// The line is mapped and the CPU has the instruction.
    #[inline]
    pub(super) unsafe fn line(self, at: *const u8) {
        match self {
            // SAFETY: changes no memory; the caller promises that the line is mapped and the CPU
            // has `clwb`.
            Self::Clwb => unsafe {
                asm!("clwb [{}]", in(reg) at, options(nostack, preserves_flags));
            },
            // SAFETY: changes no memory; the caller promises a mapped line and a CPU with
            // `clflushopt`.
            Self::Clflushopt => unsafe {
                asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags));
            },
            // SAFETY: changes no memory; the caller promises that the line is mapped. Every CPU has
            // `clflush`.
            Self::Clflush => unsafe {
                asm!("clflush [{}]", in(reg) at, options(nostack, preserves_flags));
            },
        }
    }

    /// Returns the write-backs of this CPU, fastest first.
    pub(super) fn available() -> impl Iterator<Item = Self> {
        const CLFLUSHOPT: u32 = 1 << 23;
        const CLWB: u32 = 1 << 24;
        let features = __cpuid_count(7, 0).ebx;
        let newer = [(CLWB, Self::Clwb), (CLFLUSHOPT, Self::Clflushopt)];
        let newer = newer.into_iter().filter(move |(bit, _)| features & bit != 0);
        newer.map(|(_, kind)| kind).chain([Self::Clflush])
    }
}

/// Returns the copies of this CPU, fastest first.
pub(super) fn available_copies() -> impl Iterator<Item = Copies> {
    let avx512 = is_x86_feature_detected!("avx512f").then(copies::<avx512::Avx512>);
    let avx2 = is_x86_feature_detected!("avx2").then(copies::<avx2::Avx2>);
    avx512.into_iter().chain(avx2).chain([copies::<sse2::Sse2>()])
}

/// Waits until all earlier streaming stores and write-backs of this thread have reached the memory
/// controller.
#[inline]
pub(in crate::pmem) fn fence() {
    // SAFETY: orders stores, and changes no memory.
    unsafe { asm!("sfence", options(nostack, preserves_flags)) };
}

/// From this length on a copy is faster with an aligned destination.
const ALIGN_FROM: usize = 512;

/// The moves of one instruction set. All pointers may be unaligned, except streaming destinations.
trait Vector {
    const NAME: &'static str;

    /// Copies a line by ordinary loads and stores.
    unsafe fn copy_line(to: *mut u8, from: *const u8);

    /// Copies four lines by ordinary loads and stores.
    unsafe fn copy_four_lines(to: *mut u8, from: *const u8);

    /// Copies a line by ordinary loads and streaming stores.
    unsafe fn stream_line(to: *mut u8, from: *const u8);

    /// Copies four lines by ordinary loads and streaming stores.
    unsafe fn stream_four_lines(to: *mut u8, from: *const u8);

    /// Leaves the vector unit as code without this instruction set expects it.
    unsafe fn done();
}

/// Two moves of a [`Vector`]: `$copy` and, by streaming stores, `$stream`. Each loads the registers
/// from their offsets and then stores them there, one group of registers after the other.
macro_rules! moves {
    ($copy:ident, $stream:ident, $plain:literal, $streaming:literal,
     $($($register:tt at $offset:literal),+);+) => {
        moves!(@one $copy, $plain, $plain, $($($register at $offset),+);+);
        moves!(@one $stream, $plain, $streaming, $($($register at $offset),+);+);
    };
    (@one $name:ident, $load:literal, $store:literal,
     $($($register:tt at $offset:literal),+);+) => {
        #[inline]
        unsafe fn $name(to: *mut u8, from: *const u8) {
            // SAFETY: the caller promises both ranges; for streaming `to` is the start of a line.
            $(unsafe {
                std::arch::asm!(
                    $(concat!($load, " ", $register, ", [{from} + ", $offset, "]"),)+
                    $(concat!($store, " [{to} + ", $offset, "], ", $register),)+
                    to = in(reg) to, from = in(reg) from, $(out($register) _,)+
                    options(nostack, preserves_flags)
                );
            })+
        }
    };
}
use moves;

fn copies<V: Vector>() -> Copies {
    Copies { name: V::NAME, copy: copy::<V>, stream_lines: stream_lines::<V> }
}

/// Copies as [`Copies::copy`] does.
unsafe fn copy<V: Vector>(mut to: *mut u8, mut from: *const u8, bytes: usize) {
    if bytes < LINE {
        // SAFETY: the caller promises that both ranges are mapped and do not overlap.
        return unsafe { copy_short(to, from, bytes) };
    }
    // Stores that cross lines cost double: first copy up to a line of the destination.
    let head = if bytes < ALIGN_FROM { 0 } else { to.align_offset(LINE) };
    let mut left = bytes - head;
    // SAFETY: each step stays inside the caller's ranges. The first and the last line may overlap
    // their neighbours: storing the same bytes twice is cheaper than branching on the rest.
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one walk, one argument")]
    unsafe {
        if head > 0 {
            V::copy_line(to, from);
            (to, from) = (to.add(head), from.add(head));
        }
        while left >= 4 * LINE {
            V::copy_four_lines(to, from);
            (to, from, left) = (to.add(4 * LINE), from.add(4 * LINE), left - 4 * LINE);
        }
        while left >= LINE {
            V::copy_line(to, from);
            (to, from, left) = (to.add(LINE), from.add(LINE), left - LINE);
        }
        if left > 0 {
            let back = LINE - left;
            V::copy_line(to.sub(back), from.sub(back));
        }
        V::done();
    }
}

/// Stores lines as [`Copies::stream_lines`] does.
unsafe fn stream_lines<V: Vector>(mut to: *mut u8, mut from: *const u8, bytes: usize) {
    let mut left = bytes;
    // SAFETY: each step stays inside the caller's ranges and starts at a line of the destination.
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one walk, one argument")]
    unsafe {
        while left >= 4 * LINE {
            V::stream_four_lines(to, from);
            (to, from, left) = (to.add(4 * LINE), from.add(4 * LINE), left - 4 * LINE);
        }
        while left >= LINE {
            V::stream_line(to, from);
            (to, from, left) = (to.add(LINE), from.add(LINE), left - LINE);
        }
        V::done();
    }
}

/// Copies less than a line: two moves of the largest power of two, which may overlap.
unsafe fn copy_short(to: *mut u8, from: *const u8, bytes: usize) {
    match bytes {
        // SAFETY: two halves or overlapping ends, inside the caller's ranges.
        #[expect(clippy::multiple_unsafe_ops_per_block, reason = "two ends, one argument")]
        32.. => unsafe {
            sse2::copy_32(to, from);
            sse2::copy_32(to.add(bytes - 32), from.add(bytes - 32));
        },
        // SAFETY: overlapping ends, inside the caller's ranges.
        16.. => unsafe { sse2::copy_ends_16(to, from, bytes - 16) },
        // SAFETY: overlapping ends, inside the caller's ranges.
        8.. => unsafe { copy_ends_8(to, from, bytes - 8) },
        // SAFETY: overlapping ends, inside the caller's ranges.
        4.. => unsafe { copy_ends_4(to, from, bytes - 4) },
        // SAFETY: the caller promises that both ranges are mapped and do not overlap.
        _ => unsafe { copy_bytes(to, from, bytes) },
    }
}

/// Copies 8 bytes at the start and 8 bytes at `last`.
#[inline]
unsafe fn copy_ends_8(to: *mut u8, from: *const u8, last: usize) {
    // SAFETY: the caller promises `last + 8` mapped bytes on both sides.
    unsafe {
        asm!(
            "mov {a}, [{from}]", "mov {b}, [{from} + {last}]",
            "mov [{to}], {a}", "mov [{to} + {last}], {b}",
            to = in(reg) to, from = in(reg) from, last = in(reg) last,
            a = out(reg) _, b = out(reg) _, options(nostack, preserves_flags)
        );
    }
}

/// Copies 4 bytes at the start and 4 bytes at `last`.
#[inline]
unsafe fn copy_ends_4(to: *mut u8, from: *const u8, last: usize) {
    // SAFETY: the caller promises `last + 4` mapped bytes on both sides.
    unsafe {
        asm!(
            "mov {a:e}, [{from}]", "mov {b:e}, [{from} + {last}]",
            "mov [{to}], {a:e}", "mov [{to} + {last}], {b:e}",
            to = in(reg) to, from = in(reg) from, last = in(reg) last,
            a = out(reg) _, b = out(reg) _, options(nostack, preserves_flags)
        );
    }
}

#[inline]
unsafe fn copy_bytes(to: *mut u8, from: *const u8, bytes: usize) {
    for at in 0..bytes {
        // SAFETY: `at` is inside the caller's ranges.
        unsafe {
            asm!(
                "mov {a}, [{from} + {at}]", "mov [{to} + {at}], {a}",
                to = in(reg) to, from = in(reg) from, at = in(reg) at,
                a = out(reg_byte) _, options(nostack, preserves_flags)
            );
        }
    }
}
