//! `nop`: slots are cleaned when they are evicted or flushed, and never before.

use super::{Cleaning, DirtySlots, Load, NEVER_NS};
use crate::cache::policy::settings::Settings;

/// The policy; it has no settings.
pub struct Nop {
    settings: Settings,
}

impl Nop {
    /// The policy.
    pub fn new() -> Self {
        Self { settings: Settings::new(&[]) }
    }
}

impl Default for Nop {
    fn default() -> Self {
        Self::new()
    }
}

impl Cleaning for Nop {
    fn dirtied(&mut self, _slot: u32, _page: u64, _now_ns: u64) {}

    fn rewritten(&mut self, _slot: u32, _now_ns: u64) {}

    fn cleaned(&mut self, _slot: u32, _page: u64) {}

    fn next(&mut self, _load: &Load, _dirty: &dyn DirtySlots, _out: &mut Vec<u32>) -> u64 {
        NEVER_NS
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn settings_mut(&mut self) -> &mut Settings {
        &mut self.settings
    }
}
