//! The policy that cleans a shard ahead of need.

use crate::cache::policy::cleaning::{CLEANINGS, Cleaning, CleaningEntry, Part};
use crate::cache::policy::settings::Settings;
use crate::tier::clock::now_ns;

/// The cleaning policy of a shard.
pub(in crate::cache) struct Cleaner {
    pub(in crate::cache) entry: &'static CleaningEntry,
    pub(in crate::cache) policy: Box<dyn Cleaning>,
    settings: Settings,
    part: Part,
    /// The time to ask the policy again.
    pub(in crate::cache) ask_at_ns: u64,
}

impl Cleaner {
    /// Returns a policy for `part` with `settings`, to be asked at once.
    pub(in crate::cache) fn new(
        entry: &'static CleaningEntry,
        part: Part,
        settings: &Settings,
    ) -> Self {
        let mut policy = (entry.create)(part);
        policy.set_settings(settings);
        Self { entry, policy, settings: settings.clone(), part, ask_at_ns: 0 }
    }

    /// Returns a policy that does nothing, used until the pool is open.
    pub(in crate::cache) fn none() -> Self {
        let entry = &CLEANINGS[CLEANINGS.len() - 1];
        let part = Part { slots: 0, pages: 0, parts: 1 };
        Self { ask_at_ns: u64::MAX, ..Self::new(entry, part, &Settings::new(&[])) }
    }

    /// Returns a new instance of this policy, with its settings, for a part with `slots` slots. It
    /// knows no dirty slots yet, and is to be asked at once.
    pub(in crate::cache) fn for_slots(&self, slots: u32) -> Self {
        Self::new(self.entry, Part { slots, ..self.part }, &self.settings)
    }

    /// Tells the policy that slot `own` with `page` became dirty.
    pub(in crate::cache) fn dirtied(&mut self, own: u32, page: u64) {
        if self.entry.hears {
            self.policy.dirtied(own, page, now_ns());
        }
    }

    /// Tells the policy that slot `own` could not be cleaned.
    pub(in crate::cache) fn put_off(&mut self, own: u32) {
        if self.entry.hears {
            self.policy.rewritten(own, now_ns());
        }
    }

    /// Tells the policy that slot `own` with `page` is no longer dirty.
    pub(in crate::cache) fn cleaned(&mut self, own: u32, page: u64) {
        if self.entry.hears {
            self.policy.cleaned(own, page);
        }
    }

    /// Returns whether to ask the policy at `now_ns`, with `dirty` of `slots` slots dirty.
    pub(in crate::cache) fn is_due(&self, now_ns: u64, dirty: u64, slots: u64) -> bool {
        self.ask_at_ns <= now_ns || self.policy.is_due(dirty, slots)
    }

    /// Gives the policy new settings, and has it asked at once.
    pub(in crate::cache) fn set_settings(&mut self, settings: &Settings) {
        self.policy.set_settings(settings);
        self.settings.clone_from(settings);
        self.ask_at_ns = 0;
    }
}
