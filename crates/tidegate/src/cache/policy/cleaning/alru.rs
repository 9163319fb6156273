//! `alru`: cleans slots that were not written for a while, the oldest first, while no client has
//! sent a request for a while (Open CAS's default).
//!
//! Above a ratio of dirty slots it cleans whatever the clients do, even slots that were written
//! just now, until the ratio is lower by the inertia.
//!
//! A slot costs 8 bytes: its links in one list of all dirty slots by their last write, without a
//! time. Instead, a few checkpoints each say that all slots up to one were written by some time.
//! There are at most two checkpoints in a sixteenth of the staleness time, and a slot counts as
//! stale at most that sixteenth too late, and never too early.

use std::collections::VecDeque;

use super::{Cleaning, DirtySlots, Load, MILLISECOND_NS, SECOND_NS};
use crate::cache::policy::settings::{Settings, Spec, Unit};
use crate::tier::list::{Links, List};

const WAKE_UP: usize = 0;
const STALENESS: usize = 1;
const MAX_BUFFERS: usize = 2;
const ACTIVITY: usize = 3;
const DIRTY_RATIO: usize = 4;
const INERTIA: usize = 5;

/// The settings; ranges and defaults are from Open CAS.
pub const SPECS: &[Spec] = &[
    Spec::number("alru.wake-up-s", Unit::Seconds, 0..=3600, 20)
        .about("rest between two looks for stale slots"),
    Spec::number("alru.staleness-time-s", Unit::Seconds, 1..=3600, 120)
        .about("time since the last write from which a slot is stale"),
    Spec::number("alru.flush-max-buffers", Unit::Count, 1..=10_000, 100)
        .about("slots cleaned at a time"),
    Spec::number("alru.activity-threshold-ms", Unit::Milliseconds, 0..=1_000_000, 10_000)
        .about("time without requests from which the cache is idle"),
    Spec::number("alru.dirty-ratio-threshold-pct", Unit::Percent, 0..=100, 100)
        .about("share of dirty slots above which they are cleaned at any time"),
    Spec::number("alru.dirty-ratio-inertia", Unit::Bytes, 0..=4 << 40, 128 << 20)
        .about("dirty bytes below that share at which this ends"),
];

/// Bytes of a slot.
const SLOT_BYTES: u64 = 4096;
/// The mark of a slot that has a checkpoint.
const CHECKPOINT: u32 = 1;
/// Checkpoints in a staleness time.
const CHECKPOINTS: u64 = 16;

/// The dirty slots, the one with the oldest last write first.
pub struct Alru {
    settings: Settings,
    links: Links,
    dirty: List,
    /// Oldest first, each for another slot, in the order of the list.
    checkpoints: VecDeque<Checkpoint>,
    /// The newest time seen with a write: no slot was written later.
    last_write_ns: u64,
    /// The dirty ratio was above its threshold, and is not yet lower by the inertia.
    is_over_ratio: bool,
    parts: u32,
}

/// All slots up to this one, and this one, were last written at `written_ns` or before.
struct Checkpoint {
    written_ns: u64,
    slot: u32,
}

impl Alru {
    /// Returns the policy for `slots` slots, at most
    /// [`MAX_SLOTS`](crate::cache::policy::MAX_SLOTS). `parts` parts of the cache share the
    /// inertia.
    pub fn new(slots: u32, parts: u32) -> Self {
        Self {
            settings: Settings::new(SPECS),
            links: Links::new(slots),
            dirty: List::EMPTY,
            checkpoints: VecDeque::new(),
            last_write_ns: 0,
            is_over_ratio: false,
            parts: parts.max(1),
        }
    }

    fn staleness_ns(&self) -> u64 {
        self.settings.get(STALENESS) * SECOND_NS
    }

    /// Adds `slot` as the newest.
    fn push(&mut self, slot: u32, now_ns: u64) {
        self.add_checkpoint(now_ns);
        self.last_write_ns = self.last_write_ns.max(now_ns);
        self.drop_stale_checkpoints(self.last_write_ns);
        self.links.set_mark(slot, 0);
        self.dirty.push_last(&mut self.links, slot);
    }

    /// Adds a checkpoint for the newest slot, unless the newest checkpoint is about as new as
    /// `now_ns`.
    fn add_checkpoint(&mut self, now_ns: u64) {
        let Some(slot) = self.dirty.last() else { return };
        let newest_ns = self.checkpoints.back().map(|it| it.written_ns);
        let gap_ns = self.staleness_ns() / CHECKPOINTS;
        let is_due = newest_ns.is_none_or(|newest_ns| now_ns.saturating_sub(newest_ns) >= gap_ns);
        if is_due && self.links.mark(slot) != CHECKPOINT {
            self.links.set_mark(slot, CHECKPOINT);
            self.checkpoints.push_back(Checkpoint { written_ns: self.last_write_ns, slot });
        }
    }

    /// Drops all checkpoints with stale slots except the newest.
    fn drop_stale_checkpoints(&mut self, now_ns: u64) {
        while self.checkpoints.get(1).is_some_and(|it| self.is_stale(it, now_ns)) {
            if let Some(dropped) = self.checkpoints.pop_front() {
                self.links.set_mark(dropped.slot, 0);
            }
        }
    }

    fn is_stale(&self, checkpoint: &Checkpoint, now_ns: u64) -> bool {
        checkpoint.written_ns.saturating_add(self.staleness_ns()) <= now_ns
    }

    /// Takes `slot` out. Its checkpoint moves to the slot before, unless that has an earlier one.
    fn take(&mut self, slot: u32) {
        if self.links.mark(slot) == CHECKPOINT {
            let before = self.links.previous(slot);
            let before = before.filter(|&before| self.links.mark(before) != CHECKPOINT);
            let at = self.checkpoints.iter().position(|it| it.slot == slot);
            match (before, at) {
                (Some(before), Some(at)) => {
                    self.checkpoints[at].slot = before;
                    self.links.set_mark(before, CHECKPOINT);
                }
                (None, Some(at)) => drop(self.checkpoints.remove(at)),
                (_, None) => {}
            }
        }
        self.dirty.remove(&mut self.links, slot);
    }

    /// Returns the newest slot that is stale.
    fn last_stale(&mut self, now_ns: u64) -> Option<u32> {
        self.add_checkpoint(now_ns);
        self.drop_stale_checkpoints(now_ns);
        let oldest = self.checkpoints.front()?;
        self.is_stale(oldest, now_ns).then_some(oldest.slot)
    }

    /// Returns the newest slot that may be cleaned now.
    fn last_due(&mut self, load: &Load) -> Option<u32> {
        self.update_ratio(load);
        if self.is_over_ratio {
            return self.dirty.last();
        }
        let idle_ns = load.now_ns.saturating_sub(load.last_request_ns);
        let is_idle = idle_ns >= self.settings.get(ACTIVITY) * MILLISECOND_NS;
        if is_idle { self.last_stale(load.now_ns) } else { None }
    }

    fn update_ratio(&mut self, load: &Load) {
        let threshold = u128::from(load.slots) * u128::from(self.settings.get(DIRTY_RATIO)) / 100;
        let inertia = u128::from(self.settings.get(INERTIA) / SLOT_BYTES / u64::from(self.parts));
        let dirty = u128::from(load.dirty_slots);
        if dirty > threshold {
            self.is_over_ratio = true;
        } else if dirty <= threshold.saturating_sub(inertia) {
            self.is_over_ratio = false;
        }
    }
}

impl Cleaning for Alru {
    fn dirtied(&mut self, slot: u32, _page: u64, now_ns: u64) {
        if self.links.is_listed(slot) {
            self.take(slot);
        }
        self.push(slot, now_ns);
    }

    fn rewritten(&mut self, slot: u32, now_ns: u64) {
        if self.links.is_listed(slot) {
            self.take(slot);
            self.push(slot, now_ns);
        }
    }

    fn cleaned(&mut self, slot: u32, _page: u64) {
        if self.links.is_listed(slot) {
            self.take(slot);
        }
    }

    fn next(&mut self, load: &Load, _dirty: &dyn DirtySlots, out: &mut Vec<u32>) -> u64 {
        let rest_ns = self.settings.get(WAKE_UP) * SECOND_NS;
        let Some(last) = self.last_due(load) else { return rest_ns };
        let mut left = self.settings.get(MAX_BUFFERS);
        for slot in self.dirty.iter(&self.links) {
            out.push(slot);
            left -= 1;
            if left == 0 {
                return 0;
            }
            if slot == last {
                break;
            }
        }
        rest_ns
    }

    fn set_settings(&mut self, settings: &Settings) {
        self.settings.clone_from(settings);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;

    use proptest::collection::vec;
    use proptest::prelude::{Just, Strategy, any, prop_oneof};
    use proptest::{prop_assert, proptest};

    use super::super::ByPage;
    use super::*;

    const SECONDS: [u64; 4] = [0, 130 * SECOND_NS, 140 * SECOND_NS, 300 * SECOND_NS];

    fn next(alru: &mut Alru, load: Load) -> (Vec<u32>, u64) {
        let mut out = Vec::new();
        let rest_ns = alru.next(&load, &ByPage(|_| None), &mut out);
        (out, rest_ns)
    }

    fn idle(now_ns: u64) -> Load {
        Load { now_ns, last_request_ns: 0, dirty_slots: 0, slots: 1000 }
    }

    #[test]
    fn stale_slots_are_cleaned_oldest_first_when_idle() {
        let mut alru = Alru::new(10, 1);
        for (slot, now_ns) in [(7, SECONDS[0]), (2, SECOND_NS), (5, SECONDS[1])] {
            alru.dirtied(slot, 0, now_ns);
        }
        let rest_ns = 20 * SECOND_NS;
        assert_eq!(next(&mut alru, idle(SECONDS[2])), (vec![7, 2], rest_ns));
        alru.rewritten(7, SECONDS[2]);
        assert_eq!(next(&mut alru, idle(SECONDS[2])), (vec![2], rest_ns));
        alru.cleaned(2, 0);
        assert_eq!(next(&mut alru, idle(SECONDS[2])), (vec![], rest_ns));
        assert_eq!(next(&mut alru, idle(SECONDS[3])).0, [5, 7]);
        let busy = Load { last_request_ns: SECONDS[3] - 9_999_999_999, ..idle(SECONDS[3]) };
        assert_eq!(next(&mut alru, busy), (vec![], rest_ns));
    }

    #[test]
    fn a_full_batch_is_followed_by_the_next_at_once() {
        let mut alru = Alru::new(300, 1);
        (0..250).for_each(|slot| alru.dirtied(slot, 0, 0));
        let mut batches = Vec::new();
        loop {
            let (slots, rest_ns) = next(&mut alru, idle(SECONDS[3]));
            for &slot in &slots {
                alru.cleaned(slot, 0);
            }
            batches.push(slots.len());
            if rest_ns > 0 {
                break;
            }
        }
        assert_eq!(batches, [100, 100, 50]);
    }

    #[test]
    fn above_the_dirty_ratio_all_is_cleaned_until_the_inertia_is_reached() {
        let mut alru = Alru::new(10, 1);
        for (key, value) in
            [("alru.dirty-ratio-threshold-pct", "50"), ("alru.dirty-ratio-inertia", "400K")]
        {
            alru.settings.set(key, value).unwrap();
        }
        alru.dirtied(3, 0, SECONDS[3]);
        let busy =
            |dirty_slots| Load { last_request_ns: SECONDS[3], dirty_slots, ..idle(SECONDS[3]) };
        for (dirty_slots, cleans) in
            [(500, false), (501, true), (401, true), (400, false), (500, false)]
        {
            assert_eq!(next(&mut alru, busy(dirty_slots)).0.len() == 1, cleans, "{dirty_slots}");
        }
    }

    #[derive(Debug, Clone, Copy)]
    enum Call {
        Dirtied(u32),
        Rewritten(u32),
        Cleaned(u32),
        Wait(u64),
    }

    fn calls() -> impl Strategy<Value = Vec<Call>> {
        let slot = || 0..20_u32;
        vec(
            prop_oneof![
                slot().prop_map(Call::Dirtied),
                slot().prop_map(Call::Rewritten),
                slot().prop_map(Call::Cleaned),
                prop_oneof![0..SECOND_NS, 0..30 * SECOND_NS, Just(SECONDS[3])].prop_map(Call::Wait),
            ],
            0..300,
        )
    }

    proptest! {
        /// Compares with a list of times. The found slots are a prefix of that list, none too
        /// early, all at most a sixteenth of the staleness time too late, and there are few
        /// checkpoints.
        #[test]
        fn the_stale_are_found_in_order_and_in_time(calls in calls(), is_seen_often: bool) {
            let (mut alru, mut model) = (Alru::new(20, 1), VecDeque::<(u32, u64)>::new());
            let mut now_ns = 0;
            for call in calls {
                match call {
                    Call::Dirtied(slot) => {
                        model.retain(|it| it.0 != slot);
                        model.push_back((slot, now_ns));
                        alru.dirtied(slot, 0, now_ns);
                    }
                    Call::Rewritten(slot) => {
                        if model.iter().any(|it| it.0 == slot) {
                            model.retain(|it| it.0 != slot);
                            model.push_back((slot, now_ns));
                        }
                        alru.rewritten(slot, now_ns);
                    }
                    Call::Cleaned(slot) => {
                        model.retain(|it| it.0 != slot);
                        alru.cleaned(slot, 0);
                    }
                    Call::Wait(ns) => now_ns += ns,
                }
                if is_seen_often || matches!(call, Call::Wait(_)) {
                    let load = Load { last_request_ns: 0, now_ns: now_ns + SECONDS[1], ..idle(0) };
                    let (found, _) = next(&mut alru, load);
                    prop_assert!(found.iter().eq(model.iter().take(found.len()).map(|it| &it.0)));
                    let age_ns = |at: usize| load.now_ns - model[at].1;
                    prop_assert!((0..found.len()).all(|at| age_ns(at) >= 120 * SECOND_NS));
                    let late_ns = 120 * SECOND_NS / 16 + 120 * SECOND_NS;
                    prop_assert!((found.len()..model.len()).all(|at| age_ns(at) < late_ns));
                    prop_assert!(alru.checkpoints.len() <= 34, "{}", alru.checkpoints.len());
                }
            }
        }

        #[test]
        fn no_sequence_of_times_panics(times in vec((0..4_u32, any::<u64>()), 0..50)) {
            let mut alru = Alru::new(4, 1);
            for (slot, now_ns) in times {
                alru.dirtied(slot, 0, now_ns);
                next(&mut alru, Load { now_ns, last_request_ns: now_ns / 2, dirty_slots: now_ns, slots: u64::MAX });
            }
        }
    }
}
