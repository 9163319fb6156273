//! Decides by measured cost, with the policy [`cost`](crate::cache::policy::cost): the backing
//! serves a request if the memory would take longer.
//!
//! - A read of pages that are all cached, whole and clean: the backing has flushed these bytes, and
//!   a page that was changed meanwhile has another version in its lock. Such a read is made again,
//!   from the cache; so is one that the backing failed.
//! - A large write that misses, in a mode that writes back. It goes around the cache by forced unit
//!   access, so that it is durable when it is acknowledged, like a write into the cache. A crash
//!   may tear its blocks, as far as the backing tears them, and readers may see it before it is
//!   durable. Its cached pages, clean or dirty, leave the cache first, as in all writes around it.
//!   Never with atomic flush.
//!
//! Requests share only data that seldom changes: each thread counts for itself, and one in 64 of
//! the requests that only read memory is measured.

use std::sync::atomic::AtomicU64 as StdAtomicU64;

use parking_lot::Mutex;

use super::{Route, Router};
use crate::cache::Few;
use crate::cache::policy::cost::{
    Costs, Decision, Kind, Place, SIZES, Sample, WHOLE, size_class, size_of_class,
};
use crate::cache::span::is_whole;
use crate::size::Size;
use crate::stats::{Running, SAMPLE_ONE_IN};
use crate::sync::shard::{self, Shards};
use crate::sync::{AtomicBool, AtomicU32, Ordering};
use crate::tier::clock::now_ns;
use crate::tier::version_locks::Version;

/// The values of the setting `cost`.
pub(in crate::cache) const CHOICES: [&str; 2] = ["off", "auto"];
const AUTO: u64 = 1;

/// Smaller writes are always cached.
const LARGE: u64 = 64 << 10;
/// Bit of a share: one request more goes to the backing.
const PROBE: u32 = 1 << 31;

/// Decides which requests go to the backing.
#[derive(Default)]
pub(in crate::cache) struct ByCost {
    is_on: AtomicBool,
    /// The share of the backing, whatever is measured; `None` if measurements decide.
    fixed: Option<u32>,
    policy: Mutex<Costs>,
    /// Shares of [`WHOLE`], each with [`PROBE`], by kind and size class.
    shares: [[AtomicU32; SIZES]; 2],
    /// Requests of a thread that were served while the share was not 0.
    turns: Shards<StdAtomicU64>,
    /// Requests of a thread that are under way.
    under_way: Shards<StdAtomicU64>,
}

/// A request under way; dropping it ends it.
pub(in crate::cache) struct UnderWay<'a>(Option<&'a ByCost>);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if let Some(by_cost) = self.0 {
            by_cost.end();
        }
    }
}

impl UnderWay<'_> {
    /// Returns whether the request is counted, and so has to end by [`ByCost::end`], on any thread.
    pub(in crate::cache) fn detach(self) -> bool {
        let is_counted = self.0.is_some();
        std::mem::forget(self);
        is_counted
    }
}

impl ByCost {
    /// Returns the state before [`set`](Self::set): off. `fixed_pct` fixes the backing's share.
    pub(in crate::cache) fn new(fixed_pct: Option<u32>) -> Self {
        let fixed = fixed_pct.map(|pct| pct.min(100) * WHOLE / 100);
        Self { fixed, ..Self::default() }
    }

    /// Begins anew with the value at position `choice` of [`CHOICES`]; a fixed share is always on.
    pub(in crate::cache) fn set(&self, choice: u64) {
        let mut policy = self.policy.lock();
        *policy = Costs::default();
        let share = self.fixed.unwrap_or(0);
        for word in self.shares.as_flattened() {
            word.store(share, Ordering::Relaxed);
        }
        self.is_on.store(choice == AUTO || self.fixed.is_some(), Ordering::Relaxed);
    }

    pub(in crate::cache) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn share(&self, kind: Kind, len: u64) -> &AtomicU32 {
        &self.shares[kind as usize][size_class(len)]
    }

    /// Counts a request that begins, if cost decides, until the result is dropped.
    pub(in crate::cache) fn begin(&self) -> UnderWay<'_> {
        if !self.is_on() {
            return UnderWay(None);
        }
        let (mine, is_exclusive) = self.under_way.mine();
        shard::add(mine, 1, is_exclusive);
        UnderWay(Some(self))
    }

    /// Ends a request that was counted at its beginning.
    pub(in crate::cache) fn end(&self) {
        let (mine, is_exclusive) = self.under_way.mine();
        shard::add(mine, u64::MAX, is_exclusive);
    }

    fn count_under_way(&self) -> u64 {
        let counts = self.under_way.iter().map(|it| it.load(Ordering::Relaxed));
        counts.fold(0, u64::wrapping_add)
    }

    /// Returns whether this thread's next request of this kind and size is the backing's.
    fn picks(&self, kind: Kind, len: u64) -> bool {
        let share = self.share(kind, len).load(Ordering::Relaxed);
        if share == 0 || share & PROBE != 0 {
            return share != 0;
        }
        let turn = self.turns.mine().0.load(Ordering::Relaxed);
        turn * u64::from(share) % u64::from(WHOLE) + u64::from(share) >= u64::from(WHOLE)
    }

    /// Counts a request of this kind and size: the next one may be the backing's.
    fn take_turn(&self, kind: Kind, len: u64) {
        let word = self.share(kind, len);
        let share = word.load(Ordering::Relaxed);
        if share & PROBE != 0 && word.fetch_and(!PROBE, Ordering::Relaxed) & PROBE != 0 {
            return;
        }
        if share != 0 {
            let (mine, is_exclusive) = self.turns.mine();
            shard::add(mine, 1, is_exclusive);
        }
    }

    fn see(&self, sample: &Sample) {
        // Another thread decides at the moment; this sample is one of many.
        let Some(mut policy) = self.policy.try_lock() else { return };
        let Decision { share, probes } = policy.see(sample);
        if self.fixed.is_none() && self.is_on() {
            let word = self.share(sample.kind, sample.len_bytes);
            let probe = word.load(Ordering::Relaxed) & PROBE;
            word.store(share | probe | if probes { PROBE } else { 0 }, Ordering::Relaxed);
        }
    }

    /// Returns the shares of the backing that are not 0, in words; `None` if cost does not decide.
    pub(in crate::cache) fn in_words(&self) -> Option<String> {
        let share_of = |(kind, class): (Kind, usize)| {
            let share = self.shares[kind as usize][class].load(Ordering::Relaxed) & !PROBE;
            let size = Size { bytes: size_of_class(class) };
            (share > 0).then(|| format!("{} % of {kind} from {size}", share * 100 / WHOLE))
        };
        let all = Kind::ALL.into_iter().flat_map(|kind| (0..SIZES).map(move |it| (kind, it)));
        let shares: Vec<String> = all.filter_map(share_of).collect();
        self.is_on().then(|| if shares.is_empty() { "nothing".into() } else { shares.join(", ") })
    }
}

impl Router {
    /// Returns the quicker place for a request; `None` if cost does not decide.
    pub(super) fn place_by_cost(&self, route: &Route) -> Option<Place> {
        let may_choose = self.by_cost.is_on()
            && is_whole(&route.bytes())
            && (!route.request.is_write || self.may_go_around(route));
        let picks = || self.by_cost.picks(route.kind(), route.request.len_bytes);
        may_choose.then(|| if picks() { Place::Backing } else { Place::Memory })
    }

    /// Counts a request for the share of the backing.
    pub(in crate::cache) fn take_turn(&self, route: &Route) {
        if route.place.is_some() {
            self.by_cost.take_turn(route.kind(), route.request.len_bytes);
        }
    }

    /// Takes in a request that took `took_ns` at `place`, for `weight` requests like it.
    fn see_cost(&self, place: Place, kind: Kind, len_bytes: u64, took_ns: u64, weight: u32) {
        let at_backing = self.pages.backing.pace.foreground_requests();
        let all = u32::try_from(self.by_cost.count_under_way()).unwrap_or(u32::MAX);
        let depths = [all.saturating_sub(at_backing), at_backing];
        self.by_cost.see(&Sample { place, kind, len_bytes, took_ns, depths, weight });
    }

    /// Measures a write that began at `began_ns` and has ended, if cost decided about it.
    pub(in crate::cache) fn note_write_cost(&self, route: &Route, began_ns: Option<u64>) {
        if let (Some(place), Some(began_ns)) = (route.place, began_ns) {
            let took_ns = now_ns().saturating_sub(began_ns);
            self.see_cost(place, Kind::Write, route.request.len_bytes, took_ns, 1);
        }
    }

    /// Measures a read of `len` cached bytes that has ended, if `running` has its time.
    pub(in crate::cache) fn note_read_cost(&self, len: usize, running: &Running<'_>) {
        if self.by_cost.is_on()
            && let Some(took_ns) = running.sampled_ns()
        {
            let weight = u32::try_from(SAMPLE_ONE_IN).unwrap_or(u32::MAX);
            self.see_cost(Place::Memory, Kind::Read, len as u64, took_ns, weight);
        }
    }

    /// Measures a read of `len` bytes from the backing that began at `began_ns` and has ended.
    pub(in crate::cache) fn note_backing_read(&self, len: usize, began_ns: u64) {
        if self.by_cost.is_on() {
            let took_ns = now_ns().saturating_sub(began_ns);
            self.see_cost(Place::Backing, Kind::Read, len as u64, took_ns, 1);
        }
    }

    /// Returns the versions of the request's pages if all pages are cached, clean and whole, and
    /// counts a use of each; `None` otherwise.
    pub(in crate::cache) fn see_clean(&self, route: &Route) -> Option<Few<(u64, Version)>> {
        let see = |page| {
            // The version is read before the look, so that it shows a later change.
            let version = self.pages.locks.version(page);
            let mut shard = self.pages.shard(page);
            let found = shard.find(page).filter(|found| !found.dirty && !found.record)?;
            shard.touch(&found, route.class, false);
            Some((page, version))
        };
        route.pages().map(see).collect()
    }

    /// Returns whether a write may bypass the cache: it is large, and its first and last page miss.
    fn may_go_around(&self, route: &Route) -> bool {
        let ends = || [route.pages().start, route.pages().end - 1];
        route.request.len_bytes >= LARGE
            && self.pages.groups.is_none()
            && ends().iter().all(|page| self.pages.find(*page).is_none())
    }
}
