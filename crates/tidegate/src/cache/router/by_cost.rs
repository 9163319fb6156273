//! By measured cost: requests that the backing serves because the memory would take longer, as the
//! policy [`cost`](crate::cache::policy::cost) says.
//!
//! - A read of pages that are all cached, whole and clean: the backing has flushed these bytes, and
//!   a page that was changed meanwhile has another version in its lock. Such a read is made again,
//!   from the cache; so is one that the backing failed.
//! - A large write that misses, in a mode that writes back: around the cache by forced unit access,
//!   so that it is as durable when it is acknowledged as one into the cache. A crash may tear its
//!   blocks, as far as the backing tears them, and readers may see it before it is durable. Pages
//!   of it that are cached, clean or dirty, leave the cache first, as in all writes around it. Not
//!   with atomic flush.
//!
//! Nothing is shared between requests but what is seldom changed: each thread counts for itself,
//! and of the requests that only read memory one in 64 is measured.

use std::ops::Range;
use std::sync::atomic::AtomicU64 as StdAtomicU64;

use parking_lot::Mutex;

use super::Router;
use crate::cache::Few;
use crate::cache::policy::cost::{
    Costs, Decision, Kind, Place, SIZES, Sample, WHOLE, size_class, size_of_class,
};
use crate::cache::span::{bytes_at, is_whole, pages_in};
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
/// In a share: one request more goes to the backing.
const PROBE: u32 = 1 << 31;

/// What goes to the backing.
#[derive(Default)]
pub(in crate::cache) struct ByCost {
    is_on: AtomicBool,
    /// The share of the backing is this one, whatever is measured.
    fixed: Option<u32>,
    policy: Mutex<Costs>,
    /// By kind and size class.
    classes: [[Class; SIZES]; 2],
    /// Requests of a thread for which there was a share.
    turns: Shards<StdAtomicU64>,
    /// Requests of a thread that are under way.
    under_way: Shards<StdAtomicU64>,
}

#[derive(Default)]
struct Class {
    /// Of [`WHOLE`], and [`PROBE`].
    share: AtomicU32,
    /// Requests that an attempt handed back because they are the backing's.
    handed_back: AtomicU32,
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
    /// The request ends by [`ByCost::end`] instead, on any thread, if this is true.
    pub(in crate::cache) fn detach(self) -> bool {
        let is_counted = self.0.is_some();
        std::mem::forget(self);
        is_counted
    }
}

impl ByCost {
    /// Off until [`set`](Self::set); then with a share of `fixed_pct` percent for the backing.
    pub(in crate::cache) fn new(fixed_pct: Option<u32>) -> Self {
        let fixed = fixed_pct.map(|pct| pct.min(100) * WHOLE / 100);
        Self { fixed, ..Self::default() }
    }

    /// Begins anew as the setting has it at position `choice` of [`CHOICES`]; or on, where the
    /// share is fixed.
    pub(in crate::cache) fn set(&self, choice: u64) {
        let mut policy = self.policy.lock();
        *policy = Costs::default();
        let share = self.fixed.unwrap_or(0);
        for class in self.classes.as_flattened() {
            class.share.store(share, Ordering::Relaxed);
            class.handed_back.store(0, Ordering::Relaxed);
        }
        self.is_on.store(choice == AUTO || self.fixed.is_some(), Ordering::Relaxed);
    }

    pub(in crate::cache) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn class(&self, kind: Kind, len: u64) -> &Class {
        &self.classes[kind as usize][size_class(len)]
    }

    /// A request begins.
    pub(in crate::cache) fn begin(&self) -> UnderWay<'_> {
        if !self.is_on() {
            return UnderWay(None);
        }
        let (mine, is_exclusive) = self.under_way.mine();
        shard::add(mine, 1, is_exclusive);
        UnderWay(Some(self))
    }

    /// A request that was counted at its beginning ends.
    pub(in crate::cache) fn end(&self) {
        let (mine, is_exclusive) = self.under_way.mine();
        shard::add(mine, u64::MAX, is_exclusive);
    }

    /// A read of `len` bytes misses, so it is no part of a share: what an attempt may have picked
    /// is taken back.
    pub(in crate::cache) fn give_back_read(&self, len: u64) {
        if self.is_on() {
            let _ = self.picks_or_was_picked(Kind::Read, len);
        }
    }

    fn count_under_way(&self) -> u64 {
        let counts = self.under_way.iter().map(|it| it.load(Ordering::Relaxed));
        counts.fold(0, u64::wrapping_add)
    }

    /// A request of this kind and size is the backing's.
    fn picks(&self, kind: Kind, len: u64) -> bool {
        let class = self.class(kind, len);
        let share = class.share.load(Ordering::Relaxed);
        if share == 0 {
            return false;
        }
        if share & PROBE != 0 && class.share.fetch_and(!PROBE, Ordering::Relaxed) & PROBE != 0 {
            return true;
        }
        let share = u64::from(share & !PROBE);
        let (mine, is_exclusive) = self.turns.mine();
        let turn = mine.load(Ordering::Relaxed);
        shard::add(mine, 1, is_exclusive);
        turn * share % u64::from(WHOLE) + share >= u64::from(WHOLE)
    }

    /// Whether the cache serves a request that an attempt may have picked already and handed back.
    pub(in crate::cache) fn picks_or_was_picked(&self, kind: Kind, len: u64) -> bool {
        let handed_back = &self.class(kind, len).handed_back;
        let take = |count: u32| count.checked_sub(1);
        let was_picked = handed_back.load(Ordering::Relaxed) > 0
            && handed_back.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        was_picked || self.picks(kind, len)
    }

    fn see(&self, sample: &Sample) {
        // Another thread is at it: samples are many.
        let Some(mut policy) = self.policy.try_lock() else { return };
        let Decision { share, probes } = policy.see(sample);
        if self.fixed.is_none() && self.is_on() {
            let class = &self.classes[sample.kind as usize][size_class(sample.len_bytes)];
            let probe = class.share.load(Ordering::Relaxed) & PROBE;
            let word = share | probe | if probes { PROBE } else { 0 };
            class.share.store(word, Ordering::Relaxed);
        }
    }

    /// The shares of the backing that are not 0, in words.
    pub(in crate::cache) fn in_words(&self) -> Option<String> {
        let share_of = |(kind, class): (Kind, usize)| {
            let share = self.classes[kind as usize][class].share.load(Ordering::Relaxed) & !PROBE;
            let size = Size { bytes: size_of_class(class) };
            (share > 0).then(|| format!("{} % of {kind} from {size}", share * 100 / WHOLE))
        };
        let all = Kind::ALL.into_iter().flat_map(|kind| (0..SIZES).map(move |it| (kind, it)));
        let shares: Vec<String> = all.filter_map(share_of).collect();
        self.is_on().then(|| if shares.is_empty() { "nothing".into() } else { shares.join(", ") })
    }
}

/// A read of `len` bytes at `offset` is of whole pages.
pub(in crate::cache) fn may_read_around(offset: u64, len: usize) -> bool {
    len > 0 && is_whole(&bytes_at(offset, len))
}

impl Router {
    pub(in crate::cache) fn hands_back(&self, kind: Kind, len: u64) -> bool {
        let picks = self.by_cost.picks(kind, len);
        if picks {
            self.by_cost.class(kind, len).handed_back.fetch_add(1, Ordering::Relaxed);
        }
        picks
    }

    /// A request took `took_ns` at `place`, and stands for `weight` of its kind and size.
    pub(in crate::cache) fn see_cost(
        &self,
        place: Place,
        kind: Kind,
        len_bytes: u64,
        took_ns: u64,
        weight: u32,
    ) {
        let at_backing = self.pages.backing.pace.foreground_requests();
        let all = u32::try_from(self.by_cost.count_under_way()).unwrap_or(u32::MAX);
        let depths = [all.saturating_sub(at_backing), at_backing];
        self.by_cost.see(&Sample { place, kind, len_bytes, took_ns, depths, weight });
    }

    /// A read of `len` bytes that were all cached has ended, and `running` may have measured it.
    pub(in crate::cache) fn note_read_cost(&self, len: usize, running: &Running<'_>) {
        if self.by_cost.is_on()
            && let Some(took_ns) = running.sampled_ns()
        {
            let weight = u32::try_from(SAMPLE_ONE_IN).unwrap_or(u32::MAX);
            self.see_cost(Place::Memory, Kind::Read, len as u64, took_ns, weight);
        }
    }

    /// A read of `len` bytes that began at `began_ns` was answered by the backing.
    pub(in crate::cache) fn note_backing_read(&self, len: usize, began_ns: u64) {
        if self.by_cost.is_on() {
            let took_ns = now_ns().saturating_sub(began_ns);
            self.see_cost(Place::Backing, Kind::Read, len as u64, took_ns, 1);
        }
    }

    /// The versions of `pages`, where all of them are cached, clean and whole, for a request of
    /// `class` that uses them.
    pub(in crate::cache) fn see_clean(
        &self,
        pages: Range<u64>,
        class: u8,
    ) -> Option<Few<(u64, Version)>> {
        let see = |page| {
            // Before the look: a change after it is seen by the version.
            let version = self.pages.locks.version(page);
            let mut shard = self.pages.shard(page);
            let found = shard.find(page).filter(|found| !found.dirty && !found.record)?;
            shard.touch(&found, class, false);
            Some((page, version))
        };
        pages.map(see).collect()
    }

    /// A write of `bytes` may go around the cache by cost: by its ends, it misses.
    pub(in crate::cache) fn may_go_around(&self, bytes: &Range<u64>) -> bool {
        let is_large = self.by_cost.is_on() && bytes.end - bytes.start >= LARGE;
        if !is_large || self.pages.groups.is_some() || !is_whole(bytes) {
            return false;
        }
        let pages = pages_in(bytes);
        [pages.start, pages.end - 1].iter().all(|page| self.pages.find(*page).is_none())
    }
}
