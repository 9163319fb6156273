//! A Bloom filter that forgets: tells whether an lba was written recently.
//!
//! The filter has two generations. The young one remembers writes. Once it has seen as many writes
//! as the cache has slots, it becomes the old one, and the previous old one is cleared. So an lba
//! is remembered for one to two generations.

use super::table::mix;

/// Bits by slot in each of the two generations: 2 bytes in total, as in the Caiti paper.
const BITS_A_SLOT: usize = 8;
/// Bits that an lba sets. The optimum for 8 bits an entry is 5.5; 3 cost less, for 3 % false hits
/// instead of 2.
const HASHES: u64 = 3;

/// The filter.
pub(super) struct Bloom {
    young: Box<[u64]>,
    old: Box<[u64]>,
    /// Writes until the young generation is complete.
    left: u32,
    capacity: u32,
}

impl Bloom {
    /// Makes a filter with generations of `capacity` writes.
    pub(super) fn new(capacity: u32) -> Self {
        let words = (capacity as usize * BITS_A_SLOT).div_ceil(64);
        let empty = || vec![0; words].into();
        Self { young: empty(), old: empty(), left: capacity, capacity }
    }

    /// Remembers a write of `lba`. Returns whether it ended a generation.
    pub(super) fn remember(&mut self, lba: u64) -> bool {
        for bit in bits(lba, self.young.len()) {
            self.young[bit / 64] |= 1 << (bit % 64);
        }
        self.left -= 1;
        if self.left > 0 {
            return false;
        }
        std::mem::swap(&mut self.young, &mut self.old);
        self.young.fill(0);
        self.left = self.capacity;
        true
    }

    /// Returns whether `lba` was written recently, with false positives.
    pub(super) fn remembers(&self, lba: u64) -> bool {
        let is_in = |words: &[u64]| {
            bits(lba, words.len()).all(|bit| words[bit / 64] & (1 << (bit % 64)) != 0)
        };
        is_in(&self.young) || is_in(&self.old)
    }

    /// Returns the memory in bytes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.young) + size_of_val(&*self.old)
    }
}

/// Returns the bits of `lba` in a filter of `words` words, all derived from two hashes (Kirsch,
/// Mitzenmacher 2006).
fn bits(lba: u64, words: usize) -> impl Iterator<Item = usize> {
    let hash = mix(lba);
    let (first, step) = (hash & 0xFFFF_FFFF, hash >> 32 | 1);
    #[expect(clippy::cast_possible_truncation, reason = "below the number of bits")]
    (0..HASHES).map(move |index| ((first + index * step) % (words as u64 * 64)) as usize)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_remembered_for_one_to_two_generations() {
        let mut bloom = Bloom::new(1000);
        assert!(!bloom.remembers(7));
        assert!(!bloom.remember(7));
        let ended = (0..998).filter(|index| bloom.remember(10_000 + index)).count();
        assert_eq!(ended, 0);
        assert!(bloom.remember(20_000), "the thousandth write ends the generation");
        assert!(bloom.remembers(7), "the old generation counts");
        (0..999).for_each(|index| assert!(!bloom.remember(30_000 + index)));
        assert!(bloom.remembers(7));
        assert!(bloom.remember(40_000));
        assert!(!bloom.remembers(7));
        assert!(bloom.remembers(40_000));
    }

    #[test]
    fn it_seldom_remembers_what_never_was() {
        let mut bloom = Bloom::new(10_000);
        for lba in 0..19_999 {
            bloom.remember(lba);
        }
        let wrong = (1 << 40..(1 << 40) + 10_000).filter(|&lba| bloom.remembers(lba)).count();
        assert!(
            (100..1000).contains(&wrong),
            "{wrong} of 10000; 6 % expected of two full generations"
        );
        assert_eq!(bloom.bytes(), 2 * 10_000);
    }
}
