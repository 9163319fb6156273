//! Decides whether the pages that a request misses are cached: only if it is not part of a long
//! stream, and the promotion policy wants them. The cache still serves the pages that it has.
//!
//! A decision counts the request in streams and misses, so it is made once: a request that an
//! attempt hands back was not counted.

use parking_lot::{Mutex, MutexGuard};

use super::{Route, Router};
use crate::cache::counters::Counter;
use crate::cache::pages::remove::batch_pages;
use crate::cache::policy::cutoff::{Cutoff, Streams};
use crate::cache::policy::promotion::{Promotion, PromotionEntry};
use crate::cache::policy::settings::Settings;
use crate::cache::policy::{Occupancy, Request};
use crate::sync::{AtomicBool, Ordering};

/// Queues with streams of their own; more queues share them.
const QUEUES: usize = 64;

/// The policies of promotion and of long streams.
pub(in crate::cache) struct Admission {
    /// All misses are cached: no request is looked at.
    is_open: AtomicBool,
    deciding: Mutex<Deciding>,
}

pub(in crate::cache) struct Deciding {
    pub(in crate::cache) promotion: Box<dyn Promotion>,
    pub(in crate::cache) cutoff: Cutoff,
    /// Streams by queue, for queues that had a request.
    streams: Vec<Option<Streams>>,
    long_streams: Streams,
    /// There is more than IO class 0.
    pub(in crate::cache) has_classes: bool,
}

impl Deciding {
    fn is_cut_off(&mut self, request: &Request, is_full: bool) -> bool {
        let Self { cutoff, streams, long_streams, .. } = self;
        if cutoff.is_off() {
            return false;
        }
        let queue = usize::from(request.queue) % QUEUES;
        if streams.len() <= queue {
            streams.resize_with(queue + 1, || None);
        }
        let own = streams[queue].get_or_insert_with(Streams::of_queue);
        cutoff.is_cut_off(request, is_full, own, || long_streams)
    }
}

impl Admission {
    /// Returns `promotion` with its `settings`, and the cutoff with its own, for `slots` slots.
    pub(in crate::cache) fn new(
        promotion: &PromotionEntry,
        settings: &Settings,
        cutoff: &Settings,
        slots: u32,
    ) -> Self {
        let deciding = Deciding {
            promotion: promotion_of(promotion, settings, slots),
            cutoff: Cutoff { settings: cutoff.clone() },
            streams: Vec::new(),
            long_streams: Streams::shared(),
            has_classes: false,
        };
        let is_open = is_open(&deciding);
        Self { is_open: AtomicBool::new(is_open), deciding: Mutex::new(deciding) }
    }

    /// Changes the policies.
    pub(in crate::cache) fn change(&self, change: impl FnOnce(&mut Deciding)) {
        let mut deciding = self.deciding.lock();
        change(&mut deciding);
        self.is_open.store(is_open(&deciding), Ordering::Relaxed);
    }

    /// Replaces the promotion policy by a new one of `entry`.
    pub(in crate::cache) fn set_promotion(
        &self,
        entry: &PromotionEntry,
        settings: &Settings,
        slots: u32,
    ) {
        self.change(|it| it.promotion = promotion_of(entry, settings, slots));
    }

    /// Returns whether requests are looked at before they are admitted.
    pub(in crate::cache) fn is_choosy(&self) -> bool {
        !self.is_open.load(Ordering::Relaxed)
    }

    /// Counts a request for pages that are all cached.
    pub(in crate::cache) fn note_hit(&self, request: &Request) {
        if let Some(mut deciding) = self.deciding() {
            deciding.is_cut_off(request, false);
        }
    }

    /// Tells promotion that `pages` were cached.
    pub(in crate::cache) fn note_cached(&self, pages: impl Iterator<Item = u64>) {
        if let Some(mut deciding) = self.deciding() {
            pages.for_each(|page| deciding.promotion.cached(page));
        }
    }

    /// Returns the policies, if they look at requests.
    fn deciding(&self) -> Option<MutexGuard<'_, Deciding>> {
        (!self.is_open.load(Ordering::Relaxed)).then(|| self.deciding.lock())
    }
}

fn promotion_of(entry: &PromotionEntry, settings: &Settings, slots: u32) -> Box<dyn Promotion> {
    let mut promotion = (entry.create)(slots);
    promotion.set_settings(settings);
    promotion
}

fn is_open(deciding: &Deciding) -> bool {
    !deciding.has_classes && deciding.promotion.admits_all() && deciding.cutoff.is_off()
}

impl Router {
    /// Counts the request, and returns whether the policies want its `missing` pages.
    pub(in crate::cache) fn is_wanted(&self, route: &Route, missing: u64) -> bool {
        let pages = route.pages();
        let (occupancy, is_full) = self.occupancy_about(pages.start);
        let Some(mut deciding) = self.admission.deciding() else { return true };
        let is_cut_off = deciding.is_cut_off(&route.request, is_full);
        if missing == 0 {
            return true;
        }
        if is_cut_off {
            self.pages.counters.add(Counter::CutOff, 1);
            return false;
        }
        let is_partly_cached = missing < pages.end - pages.start;
        let admits = deciding.promotion.admits(pages, is_partly_cached, occupancy);
        if !admits {
            self.pages.counters.add(Counter::NotPromoted, 1);
        }
        admits
    }

    /// Returns how full the shard of `page` is, which stands for the whole cache because pages are
    /// spread evenly, and whether it has no more free slots than eviction keeps.
    fn occupancy_about(&self, page: u64) -> (Occupancy, bool) {
        let shard = self.pages.shard(page);
        let (slots, free) = (shard.allocator.slot_count(), shard.allocator.available());
        let used_slots = slots.saturating_sub(free).into();
        let is_full = free <= self.pages.reserve() + batch_pages(slots);
        (Occupancy { used_slots, slots: slots.into() }, is_full)
    }
}
