//! `watermark`: cleans without rest while the dirty part is too large, what is evicted next first.
//! Below that nothing is cleaned. So a page that is written again is written to the backing once,
//! when it leaves, and the clean part, which leaves first, takes a burst of writes.

use super::{Cleaning, DirtySlots, Load, NEVER_NS};
use crate::cache::policy::settings::{Settings, Spec, Unit};

const CLEAN_FROM: usize = 0;

/// The settings.
pub const SPECS: &[Spec] = &[Spec::number("clean-from-pct", Unit::Percent, 0..=100, 97)
    .about("which part of the cache may be dirty before it is cleaned by `watermark`")];

/// Slots cleaned at a time.
const SLOTS_AT_ONCE: usize = 512;

/// The policy.
pub struct Watermark {
    settings: Settings,
    /// Slot to look at next where the order of eviction begins with slots that cannot be cleaned.
    hand: u32,
}

impl Default for Watermark {
    fn default() -> Self {
        Self { settings: Settings::new(SPECS), hand: 0 }
    }
}

impl Cleaning for Watermark {
    fn next(&mut self, load: &Load, dirty: &dyn DirtySlots, out: &mut Vec<u32>) -> u64 {
        if !self.is_due(load.dirty_slots, load.slots) {
            return NEVER_NS;
        }
        let before = out.len();
        let clean_slots = load.slots - load.slots * self.settings.get(CLEAN_FROM) / 100;
        // Twice as many as must be clean, so that the next batch is worth its flush.
        dirty.coldest(usize::try_from(2 * clean_slots).unwrap_or(usize::MAX), out);
        out.truncate(before + SLOTS_AT_ONCE);
        if out.len() > before {
            return 0;
        }
        self.hand = dirty.from(self.hand, SLOTS_AT_ONCE, out);
        if out.is_empty() {
            self.hand = dirty.from(0, SLOTS_AT_ONCE, out);
        }
        0
    }

    fn is_due(&self, dirty_slots: u64, slots: u64) -> bool {
        dirty_slots * 100 > slots * self.settings.get(CLEAN_FROM)
    }

    fn set_settings(&mut self, settings: &Settings) {
        self.settings.clone_from(settings);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Slots 0 to 999 are dirty, and the first of these are evicted next, as many as this says.
    struct Thousand(u32);

    impl DirtySlots for Thousand {
        fn of_page(&self, _page: u64) -> Option<u32> {
            None
        }

        fn coldest(&self, n: usize, out: &mut Vec<u32>) {
            out.extend((0..self.0).take(n));
        }

        fn from(&self, from: u32, n: usize, out: &mut Vec<u32>) -> u32 {
            out.extend((from..1000).take(n));
            from + u32::try_from(n).unwrap()
        }
    }

    #[test]
    fn it_cleans_what_is_evicted_next_or_goes_around_while_more_than_its_part_is_dirty() {
        let mut policy = Watermark::default();
        let mut settings = Settings::new(SPECS);
        settings.set("clean-from-pct", "50").unwrap();
        policy.set_settings(&settings);
        let mut next = |dirty_slots, cold| {
            let mut out = Vec::new();
            let load = Load { now_ns: 0, last_request_ns: 0, dirty_slots, slots: 2000 };
            let rest_ns = policy.next(&load, &Thousand(cold), &mut out);
            (out.first().copied(), out.len(), rest_ns)
        };
        assert_eq!(next(1000, 1000), (None, 0, NEVER_NS));
        assert_eq!(next(1001, 1000), (Some(0), 512, 0));
        assert_eq!(next(1001, 3), (Some(0), 3, 0));
        assert_eq!(next(1001, 0), (Some(0), 512, 0));
        assert_eq!(next(1001, 0), (Some(512), 488, 0));
        assert_eq!(next(1001, 0), (Some(0), 512, 0));
    }
}
