//! `always`: every page that misses is cached. The default, as in Open CAS.

use std::ops::Range;

use super::Promotion;
use crate::cache::policy::Occupancy;
use crate::cache::policy::settings::Settings;

/// The policy; it has no settings.
pub struct Always {
    settings: Settings,
}

impl Always {
    /// The policy.
    pub fn new() -> Self {
        Self { settings: Settings::new(&[]) }
    }
}

impl Default for Always {
    fn default() -> Self {
        Self::new()
    }
}

impl Promotion for Always {
    fn admits(&mut self, _: Range<u64>, _is_partly_cached: bool, _: Occupancy) -> bool {
        true
    }

    fn admits_all(&self) -> bool {
        true
    }

    fn cached(&mut self, _page: u64) {}

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn settings_mut(&mut self) -> &mut Settings {
        &mut self.settings
    }
}
