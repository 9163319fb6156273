//! A set of blocks, a bit each.

/// A set of numbers below a bound.
#[derive(Default)]
pub(super) struct Bitmap(Vec<u64>);

impl Bitmap {
    /// The empty set of numbers below `bits`.
    pub(super) fn new(bits: u32) -> Self {
        Self(vec![0; bits.div_ceil(64) as usize])
    }

    /// Adds `bit` and says whether it was there before.
    pub(super) fn set(&mut self, bit: u32) -> bool {
        let (word, mask) = (&mut self.0[bit as usize / 64], 1 << (bit % 64));
        let before = *word & mask != 0;
        *word |= mask;
        before
    }

    /// Whether `bit` is in the set; what is outside the bound is not.
    pub(super) fn get(&self, bit: u32) -> bool {
        self.0.get(bit as usize / 64).is_some_and(|word| word & 1 << (bit % 64) != 0)
    }
}
