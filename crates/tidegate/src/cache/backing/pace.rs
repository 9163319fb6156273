//! The pace of cleaning ahead of need, which yields to requests in two ways.
//!
//! Users may set a limit of bytes a second. And if requests were at the backing beside a batch,
//! cleaning rests for as long as the batch took, so that requests have at least half of the
//! backing's time. Neither limit holds if writers need free slots.

use std::sync::Arc;

use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::tier::clock::now_ns;

const SECOND_NS: u128 = 1_000_000_000;

/// How fast the cache is cleaned ahead of need.
#[derive(Default)]
pub(in crate::cache) struct Pace {
    /// Most bytes a second; 0 for no limit.
    rate_bytes: AtomicU64,
    /// Requests of clients at the backing.
    foreground: Arc<AtomicU32>,
    /// Cleaning yields to requests of clients.
    yields: bool,
    /// Time when the next batch may begin; 0 for at once.
    free_at_ns: AtomicU64,
    /// The cleaning policy needs the time of the last request.
    pub(in crate::cache) hears: AtomicBool,
    pub(in crate::cache) last_request_ns: AtomicU64,
}

/// A request of a client at the backing; dropping it ends it.
pub(in crate::cache) struct Foreground(Arc<AtomicU32>);

impl Drop for Foreground {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pace {
    /// Returns a pace without a limit.
    pub(in crate::cache) fn new(yields: bool) -> Self {
        Self { yields, ..Self::default() }
    }

    pub(in crate::cache) fn set_rate(&self, bytes: u64) {
        self.rate_bytes.store(bytes, Ordering::Relaxed);
        self.free_at_ns.store(0, Ordering::Relaxed);
    }

    /// Counts a client's request at the backing until the result is dropped.
    pub(in crate::cache) fn foreground(&self) -> Foreground {
        self.foreground.fetch_add(1, Ordering::Relaxed);
        Foreground(Arc::clone(&self.foreground))
    }

    /// Returns the number of clients' requests at the backing.
    pub(in crate::cache) fn foreground_requests(&self) -> u32 {
        self.foreground.load(Ordering::Relaxed)
    }

    pub(in crate::cache) fn is_busy(&self) -> bool {
        self.yields && self.foreground.load(Ordering::Relaxed) > 0
    }

    /// Notes the time of a client's request, if the cleaning policy needs it.
    pub(in crate::cache) fn note_request(&self) {
        if self.hears.load(Ordering::Relaxed) {
            self.last_request_ns.store(now_ns(), Ordering::Relaxed);
        }
    }

    /// Returns the time when the next batch may begin; 0 for at once.
    pub(in crate::cache) fn free_at_ns(&self) -> u64 {
        self.free_at_ns.load(Ordering::Relaxed)
    }

    /// Returns whether a batch may begin at `now_ns`.
    pub(in crate::cache) fn is_free(&self, now_ns: u64) -> bool {
        if self.free_at_ns() > now_ns {
            return false;
        }
        self.free_at_ns.store(0, Ordering::Relaxed);
        true
    }

    /// Sets when the next batch may begin, after a batch of `bytes` from `began_ns` to `now_ns`.
    pub(in crate::cache) fn batch_ended(
        &self,
        bytes: u64,
        began_ns: u64,
        now_ns: u64,
        is_busy: bool,
    ) {
        let rate_bytes = self.rate_bytes.load(Ordering::Relaxed);
        let at_rate = (u128::from(bytes) * SECOND_NS).checked_div(rate_bytes.into());
        let at_rate_ns = u64::try_from(at_rate.unwrap_or(0)).unwrap_or(u64::MAX);
        let yielding_ns = if is_busy { 2 * now_ns.saturating_sub(began_ns) } else { 0 };
        let free_at_ns = began_ns.saturating_add(at_rate_ns.max(yielding_ns));
        let free_at_ns = if free_at_ns > now_ns { free_at_ns } else { 0 };
        self.free_at_ns.store(free_at_ns, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_batch_beside_requests_at_the_backing_is_followed_by_as_long_a_rest() {
        let pace = Pace::new(true);
        assert!(!pace.is_busy());
        let request = pace.foreground();
        pace.batch_ended(4096, 1000, 1300, pace.is_busy());
        assert_eq!([1599, 1600].map(|now_ns| pace.is_free(now_ns)), [false, true]);
        drop(request);
        pace.batch_ended(4096, 1000, 1300, pace.is_busy());
        assert_eq!(pace.free_at_ns(), 0);
    }

    #[test]
    fn a_rate_counts_from_the_begin_of_a_batch() {
        let pace = Pace::new(true);
        pace.set_rate(4096);
        pace.batch_ended(2048, 1000, 1300, false);
        assert_eq!(pace.free_at_ns(), 500_001_000);
        pace.batch_ended(0, 1000, 1300, false);
        assert_eq!(pace.free_at_ns(), 0);
    }
}
