//! `watermark`: cleans slots without rest, in the order of slots, while the dirty part is too
//! large. Below that nothing is cleaned: a page that is written again soon is not written to the
//! backing each time, and the clean part takes a burst of writes.

use super::{Cleaning, DirtySlots, Load, NEVER_NS};
use crate::cache::policy::settings::{Settings, Spec, Unit};

const CLEAN_FROM: usize = 0;

/// The settings.
pub const SPECS: &[Spec] = &[Spec::number("clean-from-pct", Unit::Percent, 0..=100, 50)
    .about("which part of the cache may be dirty before it is cleaned by `watermark`")];

/// Slots cleaned at a time.
const SLOTS_AT_ONCE: usize = 512;

/// The policy.
pub struct Watermark {
    settings: Settings,
    /// Slot to look at next.
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
        self.hand = dirty.from(self.hand, SLOTS_AT_ONCE, out);
        if out.len() == before {
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

    /// Slots 0 to 999 are dirty.
    struct Thousand;

    impl DirtySlots for Thousand {
        fn of_page(&self, _page: u64) -> Option<u32> {
            None
        }

        fn from(&self, from: u32, n: usize, out: &mut Vec<u32>) -> u32 {
            out.extend((from..1000).take(n));
            from + u32::try_from(n).unwrap()
        }
    }

    #[test]
    fn it_goes_around_while_more_than_its_part_is_dirty() {
        let mut policy = Watermark::default();
        let mut next = |dirty_slots| {
            let mut out = Vec::new();
            let load = Load { now_ns: 0, last_request_ns: 0, dirty_slots, slots: 2000 };
            let rest_ns = policy.next(&load, &Thousand, &mut out);
            (out.first().copied(), out.len(), rest_ns)
        };
        assert_eq!(next(1000), (None, 0, NEVER_NS));
        assert_eq!(next(1001), (Some(0), 512, 0));
        assert_eq!(next(1001), (Some(512), 488, 0));
        assert_eq!(next(1001), (Some(0), 512, 0));
    }
}
