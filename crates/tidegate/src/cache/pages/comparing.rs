//! Whether writes are compared with the pages that they replace ([`content`](super::content)).

use parking_lot::Mutex;

use crate::cache::policy::by_content::{ByContent, Sample};
use crate::sync::{AtomicU32, Ordering};

/// The values of the setting, by its name: the measured benefit decides, always, never.
pub(in crate::cache) const CHOICES: [&str; 3] = ["auto", "on", "off"];

/// No write is compared.
pub(super) const NEVER: u32 = 0;
/// Some are, to see what that saves, and stored as a whole.
pub(super) const MEASURED: u32 = 1;
/// All are, and some are measured.
const WORTH_IT: u32 = 2;
/// All are.
pub(super) const ALWAYS: u32 = 3;

/// Which writes are compared: none until a choice is [`set`](Self::set).
#[derive(Default)]
pub(in crate::cache) struct Comparing {
    state: AtomicU32,
    policy: Mutex<ByContent>,
}

impl Comparing {
    /// Begins anew as the setting has it at position `choice` of [`CHOICES`].
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

    /// Takes a measured comparison into account.
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
