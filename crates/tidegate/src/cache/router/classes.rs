//! IO classes in the engine: the class of a request, its mode, and slots for its misses.
//!
//! The table and its decisions are [`policy::classes`](crate::cache::policy::classes). A class may
//! use a share of each shard, for pages are spread evenly. A request that misses where its class has all
//! that it may use makes slots of its own class; where it cannot, it goes around the cache. A page
//! is of the class of the request that wrote or read it last; the medium does not keep that, so all
//! pages are of class 0 when a pool is opened.

use std::sync::Arc;

use parking_lot::RwLock;

use super::mode::{Behaviour, Mode};
use crate::cache::background::evict::batch_pages;
use crate::cache::background::fill::Fill;
use crate::cache::policy::Request;
use crate::cache::policy::classes::{Admission, Classes};
use crate::cache::tier::Counter;
use crate::cache::{Core, Origin};
use crate::device::Result;
use crate::sync::{AtomicBool, Ordering};

/// The classes of a cache.
#[derive(Default)]
pub(in crate::cache) struct IoClasses {
    /// There is more than class 0: requests are looked at.
    is_used: AtomicBool,
    table: RwLock<Arc<Classes>>,
}

impl IoClasses {
    /// The class of `request`, and the mode that the class has of its own.
    fn of(&self, request: &Request) -> (u8, Option<Mode>) {
        if !self.is_used.load(Ordering::Relaxed) {
            return (0, None);
        }
        let table = self.table.read();
        let id = table.classify(request);
        let mode = table.get(id).and_then(|class| class.mode);
        (id, mode.and_then(|name| name.parse().ok()))
    }

    /// The table; none where there is class 0 alone.
    pub(in crate::cache) fn table(&self) -> Option<Arc<Classes>> {
        self.is_used.load(Ordering::Relaxed).then(|| Arc::clone(&self.table.read()))
    }
}

/// The first mode of `classes` that does not write back: atomic flush has no use for it.
pub(in crate::cache) fn mode_against_groups(classes: &Classes) -> Option<Mode> {
    let modes = classes.iter().filter_map(|class| class.mode?.parse::<Mode>().ok());
    modes.into_iter().find(|mode| !mode.writes_back())
}

impl Core {
    /// Where the request of `len` bytes at `offset` comes from, with its class, and what it does.
    pub(in crate::cache) fn sort(
        &self,
        queue: u32,
        (offset_bytes, len_bytes): (u64, u64),
        is_write: bool,
    ) -> (Origin, &'static dyn Behaviour) {
        let queue = u16::try_from(queue).unwrap_or(u16::MAX);
        let (class, own) = self.classes.of(&Request { queue, offset_bytes, len_bytes, is_write });
        (Origin { queue, class }, self.behaviour(own))
    }

    /// Has `classes` decide from now on.
    pub(in crate::cache) fn set_classes(&self, classes: &Classes) {
        let table = (!classes.is_default()).then(|| Arc::new(classes.clone()));
        self.each_shard(|shard| shard.set_classes(table.clone()));
        self.counters.set_has_classes(table.is_some());
        self.admission.change(|it| it.has_classes = table.is_some());
        self.classes.is_used.store(table.is_some(), Ordering::Relaxed);
        *self.classes.table.write() = table.unwrap_or_default();
    }

    /// There are slots that a request of `class` may use for the pages `missing`, or it made some:
    /// a write waits for the backing for that.
    ///
    /// # Errors
    /// Pages of the class could not be cleaned.
    pub(in crate::cache) fn has_space_of_class(
        &self,
        missing: &[u64],
        class: u8,
        is_write: bool,
    ) -> Result<bool> {
        let mut pages = vec![0; self.shards.count()];
        for page in missing {
            pages[self.shard_of(*page)] += 1;
        }
        for (number, pages) in pages.into_iter().enumerate().filter(|(_, pages)| *pages > 0) {
            if !self.makes_space_of_class(number, pages, class, is_write)? {
                self.counters.add(Counter::ClassFull, 1);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Makes space for `pages` pages of the class in shard `number`; false: there is none.
    fn makes_space_of_class(
        &self,
        number: usize,
        pages: u32,
        class: u8,
        is_write: bool,
    ) -> Result<bool> {
        Ok(match self.class_admission(number, pages, class) {
            Admission::Insert => true,
            Admission::Bypass => false,
            Admission::ReplaceOwn => {
                self.evict_of_class(number, pages, class, is_write)?;
                self.class_admission(number, pages, class) == Admission::Insert
            }
        })
    }

    /// What a request of `class` that misses `pages` pages of shard `number` may do there.
    fn class_admission(&self, number: usize, pages: u32, class: u8) -> Admission {
        self.shards.lock(number).admission(class, pages, self.reserve())
    }

    /// Evicts the coldest pages of `class` in shard `number`, from at least `pages` slots where it
    /// has them, and cleans them before where it `cleans`.
    fn evict_of_class(&self, number: usize, pages: u32, class: u8, cleans: bool) -> Result<()> {
        let mut shard = self.shards.lock(number);
        let most = pages.max(batch_pages(shard.slot_count()).min(shard.orders.share(class) / 8));
        let coldest = shard.victims_of(class, most);
        drop(shard);
        let (dirty, clean): (Vec<_>, Vec<_>) = coldest.into_iter().partition(|found| found.dirty);
        self.evict(&clean)?;
        if cleans
            && self.class_admission(number, pages, class) == Admission::ReplaceOwn
            && let Some(mut scratch) = self.cleaners.try_lock()
        {
            self.clean(dirty.clone(), &mut scratch)?;
            drop(scratch);
            self.evict(&dirty)?;
        }
        Ok(())
    }

    /// A page that was read may be kept: its class has a slot for it.
    pub(in crate::cache) fn has_space_for(&self, fill: &Fill) -> bool {
        !self.classes.is_used.load(Ordering::Relaxed)
            || self.class_admission(self.shard_of(fill.missing.page), 1, fill.class)
                == Admission::Insert
    }
}
