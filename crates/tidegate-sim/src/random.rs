//! Seeds and the generator they feed: where seeds come from, and how they are printed.
//!
//! Invariant: everything the simulator chooses at random comes from one [`Random`], so that the
//! seed printed with a failure replays it.

use std::hash::{BuildHasher, Hasher};

/// `SplitMix64`: small, fast, and identical on every machine.
#[derive(Debug, Clone)]
pub struct Random(u64);

/// Returns the `SplitMix64` output for `word`: a bijection of 64-bit words that mixes every bit.
pub(crate) fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Random {
    /// Makes a generator whose numbers all follow from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    pub fn word(&mut self) -> u64 {
        let word = mix(self.0);
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        word
    }

    /// Returns a number in `0..bound`.
    ///
    /// # Panics
    /// If `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let bound = bound as u64;
        usize::try_from(self.word() % bound).unwrap_or(0)
    }

    /// Returns true once in `period` times on average.
    pub fn one_in(&mut self, period: usize) -> bool {
        self.below(period) == 0
    }

    /// Returns one element of `from`, which must not be empty.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// Returns the seeds of a test.
///
/// If `TIDEGATE_SIM_SEED` (decimal or 0x hexadecimal) is set, it is the only seed. Otherwise there
/// are `count` seeds, multiplied by `TIDEGATE_SIM_ROUNDS`, identical in each run; with
/// `TIDEGATE_SIM_FRESH=1` half of the seeds come from the operating system instead.
///
/// # Panics
/// If a variable is not a number: a replay of the wrong seed would mislead.
pub fn seeds(name: &str, count: usize) -> Vec<u64> {
    if let Some(seed) = variable("TIDEGATE_SIM_SEED") {
        return vec![seed];
    }
    let rounds = usize::try_from(variable("TIDEGATE_SIM_ROUNDS").unwrap_or(1)).unwrap_or(1);
    let count = count * rounds;
    let fresh = if variable("TIDEGATE_SIM_FRESH") == Some(1) { count / 2 } else { 0 };
    let base = mix(name.bytes().fold(0, |sum, byte| mix(sum ^ u64::from(byte))));
    let fresh_base = std::collections::hash_map::RandomState::new().build_hasher().finish();
    if fresh > 0 {
        println!("{name}: fresh seeds start at {fresh_base:#x}");
    }
    let stream = |base: u64, count| (0..count as u64).map(move |at| mix(base.wrapping_add(at)));
    stream(base, count - fresh).chain(stream(fresh_base, fresh)).collect()
}

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    Some(parsed.unwrap_or_else(|_| panic!("{name}={text} is not a number: use decimal or 0x hex")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_future() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            (0..8).map(|_| random.word()).collect::<Vec<_>>()
        };
        assert_eq!(draw(5), draw(5));
        assert_ne!(draw(5), draw(6));
    }

    #[test]
    fn every_number_below_the_bound_is_drawn() {
        let mut random = Random::new(1);
        let drawn: std::collections::BTreeSet<_> = (0..200).map(|_| random.below(7)).collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), (0..7).collect::<Vec<_>>());
    }
}
