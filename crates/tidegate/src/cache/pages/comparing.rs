//! Decides which writes are compared with the pages they replace ([`content`](super::content)).

use parking_lot::Mutex;

use crate::cache::policy::by_content::{ByContent, Sample};
use crate::sync::{AtomicU32, Ordering};

/// The values of the setting: compare by measured benefit, always, or never.
pub(in crate::cache) const CHOICES: [&str; 3] = ["auto", "on", "off"];

/// No write is compared.
pub(super) const NEVER: u32 = 0;
/// Some writes are compared to measure the benefit, and are stored as a whole.
pub(super) const MEASURED: u32 = 1;
/// All writes are compared, and some are measured.
const WORTH_IT: u32 = 2;
/// All writes are compared.
pub(super) const ALWAYS: u32 = 3;

/// Decides which writes are compared: none until a choice is [`set`](Self::set).
#[derive(Default)]
pub(in crate::cache) struct Comparing {
    state: AtomicU32,
    policy: Mutex<ByContent>,
}

impl Comparing {
    /// Resets the policy and applies the choice at index `choice` of [`CHOICES`].
    pub(in crate::cache) fn set(&self, choice: u64) {
        let mut policy = self.policy.lock();
        *policy = ByContent::default();
        let states = [MEASURED, ALWAYS, NEVER];
        let at = usize::try_from(choice).unwrap_or_default().min(states.len() - 1);
        self.state.store(states[at], Ordering::Relaxed);
    }

    /// Returns which writes are compared.
    pub(super) fn state(&self) -> u32 {
        self.state.load(Ordering::Relaxed)
    }

    /// Updates the state by a measured comparison.
    pub(super) fn see(&self, sample: &Sample) {
        let mut policy = self.policy.lock();
        let is_worth_it = policy.see(sample);
        let state = self.state();
        if state == MEASURED || state == WORTH_IT {
            let state = if is_worth_it { WORTH_IT } else { MEASURED };
            self.state.store(state, Ordering::Relaxed);
        }
    }
}
