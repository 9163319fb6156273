//! The bits that tests flip: a variable sets their number, and each long run takes other bits.

use std::ops::Range;

/// Returns the numbers of a test's flips: `TIDEGATE_FLIPS` flips, by default `count`, from
/// `TIDEGATE_FLIPS_FROM` on, by default 0. Prints their count, for `scripts/abuse`.
pub(crate) fn numbers(count: u64) -> Range<u64> {
    let setting = |name, default| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number of flips"))
    };
    let (from, count) = (setting("TIDEGATE_FLIPS_FROM", 0), setting("TIDEGATE_FLIPS", count));
    println!("abuse: {count} flipped bits");
    from..from + count
}

/// Scrambles a number by the finalizer of `SplitMix64`: the result looks random.
pub(crate) fn scrambled(n: u64) -> u64 {
    let n = (n + 13).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let n = (n ^ n >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let n = (n ^ n >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    n ^ n >> 31
}
