//! The choice of the next block: uniform, Zipf and sequential patterns from a seed.
//!
//! Invariant: the sequence of blocks is a function of pattern, seed and thread alone, on every
//! machine.

use std::fmt;
use std::str::FromStr;

/// The choice of blocks in the working set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pattern {
    /// Every block equally often, in random order.
    Uniform,
    /// Block of rank k in proportion to 1/k^theta; ranks are scattered over the working set.
    Zipf {
        /// The exponent, above 0.
        theta: f64,
    },
    /// One after the other, each thread in its own part of the working set, cyclically.
    Sequential,
    /// Every block once before any comes again, in scattered order; each thread begins in its own
    /// part of that order.
    Scattered {
        /// Number of blocks in that order to skip.
        skipped: u64,
    },
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "uniform" => Ok(Self::Uniform),
            None if text == "sequential" => Ok(Self::Sequential),
            None if text == "zipf" => Ok(Self::Zipf { theta: 0.99 }),
            Some(("zipf", theta)) => match theta.parse() {
                Ok(theta) if theta > 0.0 && theta < 10.0 => Ok(Self::Zipf { theta }),
                _ => Err(format!("zipf exponent {theta} is not a number above 0 and below 10")),
            },
            _ => Err(format!("pattern {text} is not uniform, zipf, zipf:THETA or sequential")),
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Zipf { theta } => write!(f, "zipf-{theta}"),
            Self::Sequential => f.write_str("sequential"),
            Self::Scattered { .. } => f.write_str("scattered"),
        }
    }
}

/// A small random number generator: `SplitMix64` (Steele, Lea, Flood, OOPSLA 2014), with one
/// multiplication chain for each number.
#[derive(Debug, Clone)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// Makes the generator of `stream` (such as a thread) under `seed`.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut rng = Self { state: seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95) };
        rng.state = rng.next_u64();
        rng
    }

    /// Returns the next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `bound`; the bias is below `bound` / 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        let product = u128::from(self.next_u64()) * u128::from(bound);
        u64::try_from(product >> 64).unwrap_or(0)
    }

    /// Returns a number in [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Chooses blocks for one thread.
#[derive(Debug, Clone)]
pub struct Picker {
    rng: Rng,
    blocks: u64,
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    Uniform,
    Zipf { zipf: Zipf, stride: u64 },
    Sequential { next: u64 },
    Scattered { next: u64, stride: u64 },
}

impl Picker {
    /// Makes the picker of thread `thread` of `threads` over `blocks` blocks (at least 1).
    pub fn new(pattern: Pattern, blocks: u64, seed: u64, thread: u64, threads: u64) -> Self {
        let kind = match pattern {
            Pattern::Uniform => Kind::Uniform,
            Pattern::Zipf { theta } => {
                Kind::Zipf { zipf: Zipf::new(blocks, theta), stride: scatter_stride(blocks) }
            }
            Pattern::Sequential => Kind::Sequential { next: blocks / threads * thread },
            Pattern::Scattered { skipped } => Kind::Scattered {
                next: sum_below(skipped % blocks, blocks / threads * thread, blocks),
                stride: scatter_stride(blocks),
            },
        };
        Self { rng: Rng::new(seed, thread), blocks, kind }
    }

    /// Returns the next block: a number below the number of blocks.
    pub fn next_block(&mut self) -> u64 {
        match &mut self.kind {
            Kind::Uniform => self.rng.below(self.blocks),
            Kind::Zipf { zipf, stride } => {
                scattered(zipf.sample(&mut self.rng) - 1, *stride, self.blocks)
            }
            Kind::Scattered { next, stride } => {
                let rank = std::mem::replace(next, (*next + 1) % self.blocks);
                scattered(rank, *stride, self.blocks)
            }
            Kind::Sequential { next } => {
                let block = *next;
                *next = if block + 1 == self.blocks { 0 } else { block + 1 };
                block
            }
        }
    }

    /// Returns true in `percent` of 100 calls.
    pub fn chance(&mut self, percent: u8) -> bool {
        match percent {
            0 => false,
            100.. => true,
            _ => self.rng.below(100) < u64::from(percent),
        }
    }
}

/// Adds two numbers below `bound`, modulo `bound`, without overflow.
fn sum_below(one: u64, other: u64, bound: u64) -> u64 {
    one.checked_sub(bound - other).unwrap_or_else(|| one + other)
}

/// Returns the block of `rank`, below `blocks`, in the order that `stride` makes.
fn scattered(rank: u64, stride: u64, blocks: u64) -> u64 {
    let block = u128::from(rank) * u128::from(stride) % u128::from(blocks);
    u64::try_from(block).unwrap_or(0)
}

/// Returns a stride near the golden section of `blocks` that shares no factor with `blocks`:
/// multiplying by the stride permutes the blocks.
fn scatter_stride(blocks: u64) -> u64 {
    let golden = blocks / 1000 * 618 + blocks % 1000 * 618 / 1000;
    (golden.max(1)..=blocks).find(|&stride| gcd(stride, blocks) == 1).unwrap_or(1)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Zipf ranks by rejection-inversion (Hörmann and Derflinger, 1996): no table, so set-up is free
/// for any size.
#[derive(Debug, Clone)]
struct Zipf {
    ranks: u64,
    theta: f64,
    area_first: f64,
    area_all: f64,
    accept_within: f64,
}

impl Zipf {
    fn new(ranks: u64, theta: f64) -> Self {
        let mut zipf = Self { ranks, theta, area_first: 0.0, area_all: 0.0, accept_within: 0.0 };
        zipf.area_first = zipf.area(1.5) - 1.0;
        zipf.area_all = zipf.area(ranks as f64 + 0.5);
        zipf.accept_within = 2.0 - zipf.area_inverse(zipf.area(2.5) - zipf.density(2.0));
        zipf
    }

    /// Returns a rank from 1 to `ranks`.
    fn sample(&self, rng: &mut Rng) -> u64 {
        loop {
            let area = self.area_all + rng.unit() * (self.area_first - self.area_all);
            let x = self.area_inverse(area);
            let rank = x.round().clamp(1.0, self.ranks as f64);
            if rank - x <= self.accept_within || area >= self.area(rank + 0.5) - self.density(rank)
            {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a whole number from 1 to `ranks`"
                )]
                return rank as u64;
            }
        }
    }

    /// Returns x^-theta.
    fn density(&self, x: f64) -> f64 {
        (-self.theta * x.ln()).exp()
    }

    /// Returns the integral of the density from 1 to x, exact at theta = 1 too.
    fn area(&self, x: f64) -> f64 {
        let log = x.ln();
        let t = (1.0 - self.theta) * log;
        if t.abs() < 1e-8 { log * (1.0 + t / 2.0) } else { log * t.exp_m1() / t }
    }

    fn area_inverse(&self, area: f64) -> f64 {
        let t = (area * (1.0 - self.theta)).max(-1.0);
        let slope = if t.abs() < 1e-8 { 1.0 - t / 2.0 } else { t.ln_1p() / t };
        (slope * area).exp()
    }
}

#[cfg(test)]
mod tests {
    use proptest::{prop_assert, proptest};

    use super::*;

    fn take(pattern: Pattern, blocks: u64, seed: u64, thread: u64, count: usize) -> Vec<u64> {
        let mut picker = Picker::new(pattern, blocks, seed, thread, 2);
        (0..count).map(|_| picker.next_block()).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_blocks_and_another_does_not() {
        for pattern in [Pattern::Uniform, Pattern::Zipf { theta: 0.99 }] {
            let first = take(pattern, 1 << 20, 7, 0, 100);
            assert_eq!(first, take(pattern, 1 << 20, 7, 0, 100));
            assert_ne!(first, take(pattern, 1 << 20, 8, 0, 100), "another seed");
            assert_ne!(first, take(pattern, 1 << 20, 7, 1, 100), "another thread");
        }
    }

    #[test]
    fn the_sequence_never_changes_between_versions() {
        assert_eq!(take(Pattern::Uniform, 1000, 1, 0, 4), [368, 943, 45, 777]);
    }

    #[test]
    fn sequential_threads_start_in_their_own_part_and_wrap() {
        assert_eq!(take(Pattern::Sequential, 4, 0, 0, 5), [0, 1, 2, 3, 0]);
        assert_eq!(take(Pattern::Sequential, 4, 0, 1, 5), [2, 3, 0, 1, 2]);
    }

    #[test]
    fn scattered_threads_share_an_order_in_which_every_block_comes_once() {
        let scattered =
            |skipped, thread, count| take(Pattern::Scattered { skipped }, 100, 7, thread, count);
        let order = scattered(0, 0, 100);
        assert_eq!(order[50..], scattered(0, 1, 50), "the second of two threads");
        assert_eq!(order[10..20], scattered(10, 0, 10));
        let mut blocks = order.clone();
        blocks.sort_unstable();
        assert_eq!(blocks, (0..100).collect::<Vec<_>>());
        assert_ne!(order, blocks);
        assert_eq!(scattered(99, 0, 2), [order[99], order[0]]);
    }

    #[test]
    fn zipf_frequencies_follow_the_exponent() {
        const SAMPLES: u32 = 200_000;
        for theta in [0.5, 0.99, 1.0, 1.3] {
            let zipf = Zipf::new(1000, theta);
            let mut rng = Rng::new(3, 0);
            let mut counts = vec![0u32; 1001];
            for _ in 0..SAMPLES {
                counts[usize::try_from(zipf.sample(&mut rng)).unwrap()] += 1;
            }
            assert_eq!(counts[0], 0, "ranks start at 1");
            let total: f64 = (1..=1000).map(|k| f64::from(k).powf(-theta)).sum();
            for rank in [1u32, 2, 3, 10, 100] {
                let expected = f64::from(SAMPLES) * f64::from(rank).powf(-theta) / total;
                let found = f64::from(counts[rank as usize]);
                let tolerance = 5.0 * expected.sqrt();
                assert!((found - expected).abs() < tolerance, "{theta} {rank}: {found} {expected}");
            }
        }
    }

    #[test]
    fn patterns_parse_and_refuse() {
        assert_eq!("zipf:1.2".parse(), Ok(Pattern::Zipf { theta: 1.2 }));
        assert_eq!("uniform".parse(), Ok(Pattern::Uniform));
        for wrong in ["", "zipf:", "zipf:-1", "zipf:nan", "random", "uniform:1"] {
            assert!(wrong.parse::<Pattern>().is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn every_pattern_stays_inside_any_working_set(blocks in 1u64.., seed: u64, theta in 0.01f64..9.0) {
            let scattered = Pattern::Scattered { skipped: seed };
            for pattern in [Pattern::Uniform, Pattern::Zipf { theta }, Pattern::Sequential, scattered] {
                prop_assert!(take(pattern, blocks, seed, 1, 20).iter().all(|&block| block < blocks));
            }
        }

        #[test]
        fn scattering_is_a_permutation(blocks in 1u64..2000) {
            let stride = scatter_stride(blocks);
            let mut seen = vec![false; usize::try_from(blocks).unwrap()];
            for rank in 0..blocks {
                seen[usize::try_from(rank * stride % blocks).unwrap()] = true;
            }
            prop_assert!(seen.into_iter().all(|hit| hit));
        }
    }
}
