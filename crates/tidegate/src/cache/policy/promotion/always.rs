//! `always`: every page that misses is cached. The default, as in Open CAS.

use std::ops::Range;

use super::Promotion;
use crate::cache::policy::Occupancy;

/// The policy; it has no settings.
pub struct Always;

impl Promotion for Always {
    fn admits(&mut self, _: Range<u64>, _is_partly_cached: bool, _: Occupancy) -> bool {
        true
    }

    fn admits_all(&self) -> bool {
        true
    }

    fn cached(&mut self, _page: u64) {}
}
