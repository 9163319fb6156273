//! Dirty by content: whether a write is compared with the cached bytes of its pages, so that only
//! changed lines are stored. (In AFCM the lines that a program wrote are dirty, changed or not.)
//!
//! A comparison takes time at each write of a cached page, and saves stores of lines that do not
//! change. Samples measure both; the cheaper way is chosen.

/// Measurements of one sampled write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sample {
    /// Time of the comparison.
    pub compare_ns: u64,
    /// Bytes of memory, data and headers, that need not be stored.
    pub saved_bytes: u64,
    /// Bytes of memory, data and headers, that were stored.
    pub stored_bytes: u64,
    /// Time of these stores, with their fence.
    pub store_ns: u64,
}

/// Samples after which the policy decides anew.
pub const SAMPLES: u32 = 32;
/// Stores of fewer bytes measure the cost of a fence, not of a byte.
const STORED_BYTES_MIN: u64 = 4096;
/// Comparing begins if it saves more than this percentage of its time, and ends at 100.
const BEGIN_PCT: u128 = 125;

/// The decision, from samples.
#[derive(Debug, Default)]
pub struct ByContent {
    samples: u32,
    compare_ns: u64,
    saved_bytes: u64,
    stored_bytes: u64,
    store_ns: u64,
    is_worth_it: bool,
}

impl ByContent {
    /// Takes `sample` in. Returns whether writes have to be compared from now on.
    pub fn see(&mut self, sample: &Sample) -> bool {
        self.samples += 1;
        self.compare_ns = self.compare_ns.saturating_add(sample.compare_ns);
        self.saved_bytes = self.saved_bytes.saturating_add(sample.saved_bytes);
        if sample.stored_bytes >= STORED_BYTES_MIN {
            // Earlier samples count half.
            self.stored_bytes = (self.stored_bytes / 2).saturating_add(sample.stored_bytes);
            self.store_ns = (self.store_ns / 2).saturating_add(sample.store_ns);
        }
        if self.samples == SAMPLES {
            self.decide();
        }
        self.is_worth_it
    }

    fn decide(&mut self) {
        let saved = u128::from(self.saved_bytes) * u128::from(self.store_ns);
        let saved_ns = saved.checked_div(self.stored_bytes.into()).unwrap_or(0);
        let least_pct = if self.is_worth_it { 100 } else { BEGIN_PCT };
        self.is_worth_it = saved_ns * 100 > u128::from(self.compare_ns) * least_pct;
        (self.samples, self.compare_ns, self.saved_bytes) = (0, 0, 0);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A page with `saved_bytes`, which takes `compare_ns` to compare and 410 ns to store.
    fn page(saved_bytes: u64, compare_ns: u64) -> Sample {
        Sample { compare_ns, saved_bytes, stored_bytes: 4160 - saved_bytes, store_ns: 410 }
    }

    fn see(policy: &mut ByContent, sample: Sample) -> bool {
        (0..SAMPLES).fold(false, |_, _| policy.see(&sample))
    }

    #[test]
    fn comparing_begins_where_it_saves_more_than_it_costs_and_ends_where_it_does_not() {
        let mut policy = ByContent::default();
        assert!(!see(&mut policy, page(0, 100)), "nothing is saved");
        let half = |compare_ns| Sample { stored_bytes: 4160, ..page(2080, compare_ns) };
        assert!(!see(&mut policy, half(180)), "not by so little");
        assert!(see(&mut policy, half(150)));
        assert!(see(&mut policy, half(180)), "it does not end at once");
        assert!(!see(&mut policy, half(220)));
        assert!(see(&mut policy, half(100)));
        assert!(!see(&mut policy, page(0, 1)));
    }

    #[test]
    fn writes_that_store_nothing_keep_the_cost_of_a_byte() {
        let mut policy = ByContent::default();
        assert!(!see(&mut policy, page(4160, 1)), "what a store costs is not known");
        let whole = Sample { stored_bytes: 4160, ..page(4160, 100) };
        assert!(see(&mut policy, whole));
        let nothing = Sample { stored_bytes: 0, store_ns: 0, ..page(4160, 100) };
        (0..50).for_each(|_| assert!(see(&mut policy, nothing)));
    }

    #[test]
    fn it_decides_on_a_whole_window() {
        let mut policy = ByContent::default();
        let whole = Sample { stored_bytes: 4160, ..page(4160, 100) };
        (1..SAMPLES).for_each(|_| assert!(!policy.see(&whole)));
        assert!(policy.see(&whole));
        let huge = Sample { compare_ns: u64::MAX, ..whole };
        assert!(!see(&mut policy, Sample { store_ns: u64::MAX, saved_bytes: 0, ..huge }));
    }
}
