//! A set of blocks, a bit each.

/// A set of numbers below a bound.
#[derive(Default)]
pub(super) struct Bitmap(Vec<u64>);

impl Bitmap {
    /// Makes the empty set of numbers below `bits`.
    pub(super) fn new(bits: u32) -> Self {
        Self(vec![0; bits.div_ceil(64) as usize])
    }

    /// Adds `bit` and returns whether it was in the set before.
    pub(super) fn set(&mut self, bit: u32) -> bool {
        let (word, mask) = (&mut self.0[bit as usize / 64], 1 << (bit % 64));
        let before = *word & mask != 0;
        *word |= mask;
        before
    }

    /// Returns whether `bit` is in the set. Numbers beyond the bound are not.
    pub(super) fn get(&self, bit: u32) -> bool {
        self.0.get(bit as usize / 64).is_some_and(|word| word & 1 << (bit % 64) != 0)
    }
}
