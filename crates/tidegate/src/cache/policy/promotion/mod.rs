//! Promotion: which pages that miss are cached.

use std::ops::Range;

pub mod always;
pub mod nhit;

use super::Occupancy;
use super::settings::{Settings, Spec};

/// Decides which requests that miss have their pages cached.
pub trait Promotion: Send {
    /// Returns whether to cache the pages of a request that misses at least one of its `pages`.
    /// `is_partly_cached`: another one is cached already.
    fn admits(&mut self, pages: Range<u64>, is_partly_cached: bool, occupancy: Occupancy) -> bool;

    /// Returns whether the policy admits every request.
    fn admits_all(&self) -> bool {
        false
    }

    /// Notes that `page` was cached.
    fn cached(&mut self, page: u64);

    /// Decides by `settings` from now on, which belong to the policy's own table.
    fn set_settings(&mut self, settings: &Settings) {
        let _ = settings;
    }
}

/// A promotion policy that users can choose.
pub struct PromotionEntry {
    /// The name on the command line.
    pub name: &'static str,
    /// Help in a few words.
    pub about: &'static str,
    /// Settings of the policy.
    pub specs: &'static [Spec],
    /// Creates the policy for a cache of so many slots.
    pub create: fn(u32) -> Box<dyn Promotion>,
}

/// All promotion policies, the default first.
pub static PROMOTIONS: [PromotionEntry; 2] = [
    PromotionEntry {
        name: "always",
        about: "caches every page that misses",
        specs: &[],
        create: |_| Box::new(always::Always),
    },
    PromotionEntry {
        name: "nhit",
        about: "caches a page that missed several times, once the cache is nearly full",
        specs: nhit::SPECS,
        create: |slots| Box::new(nhit::Nhit::new(slots)),
    },
];

/// The names of [`PROMOTIONS`].
pub static PROMOTION_NAMES: [&str; PROMOTIONS.len()] = [PROMOTIONS[0].name, PROMOTIONS[1].name];

/// Returns the promotion policy called `name`.
pub fn promotion(name: &str) -> Option<&'static PromotionEntry> {
    PROMOTIONS.iter().find(|entry| entry.name == name)
}
