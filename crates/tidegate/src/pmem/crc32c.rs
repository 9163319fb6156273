//! Arithmetic of CRC-32C that the library of checksums lacks.

/// Multiplies a remainder of the polynomial, reflected (bit 31 is the coefficient of `x^0`), by
/// `x`.
pub(super) const fn times_x(remainder: u32) -> u32 {
    const POLYNOMIAL: u32 = 0x82F6_3B78;
    remainder >> 1 ^ if remainder & 1 == 1 { POLYNOMIAL } else { 0 }
}

/// Returns whether one changed bit in `bytes` bytes makes this `difference` between their CRC-32C
/// and the right one; a CRC is linear. One in (2^32 / bits) random differences passes by chance.
pub(crate) fn is_of_one_bit(difference: u32, bytes: u64) -> bool {
    let mut of_bit = times_x(1);
    (0..bytes * 8).any(|_| {
        let is_it = of_bit == difference;
        of_bit = times_x(of_bit);
        is_it
    })
}
