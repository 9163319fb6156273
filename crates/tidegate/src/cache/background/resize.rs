//! Changes the size of a pool while requests go on.
//!
//! The superblock alone determines the length of a pool, and so its number of slots ([`Places`]).
//! Its update is the commit: a crash before it leaves the old size, a crash after it the new one.
//!
//! Growing: 1. extend the file and the mapping; 2. zero the new headers, FENCE, so that no previous
//! bytes there count as a header; 3. update the superblock; 4. use the new slots.
//!
//! Shrinking: 1. stop taking the slots that leave; 2. clean and evict their pages and void dead
//! ones, FENCE, so that no header there counts; 3. update the superblock; 4. cut the mapping and
//! the file.

use std::thread::JoinHandle;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::Background;
use crate::cache::counters::Counter;
use crate::cache::error::CacheError;
use crate::cache::pages::index::{Shard, slots_of};
use crate::cache::store::header::{CacheHeader, places_of, slots_least};
use crate::cache::store::layout::Places;
use crate::pool::Superblock;
use crate::sync::{AtomicBool, AtomicU64, Ordering};

pub(in crate::cache) type Result<T> = std::result::Result<T, CacheError>;

/// One slot in this many is kept free.
const FREE_ONE_IN: u32 = 100;
/// Maximum number of dead slots voided at once.
const BATCH_SLOTS: usize = 512;

/// The resize that is under way, or the last one.
#[derive(Default)]
pub(in crate::cache) struct Resizing {
    /// Slots to keep free in each shard, regardless of its size.
    keep_free: Option<u32>,
    pub(in crate::cache) is_under_way: AtomicBool,
    pub(in crate::cache) is_stopped: AtomicBool,
    /// Number of slots that leave, and how many of these have not left yet.
    slots: AtomicU64,
    slots_left: AtomicU64,
    /// The error of the last resize that failed in the background.
    pub(in crate::cache) failure: Mutex<Option<String>>,
    pub(in crate::cache) thread: Mutex<Option<JoinHandle<()>>>,
}

/// The planned size of a pool.
pub(in crate::cache) struct Plan {
    pub(in crate::cache) superblock: Superblock,
    pub(in crate::cache) places: Places,
}

impl Resizing {
    /// Returns the idle state. Each shard keeps `keep_free` slots free, or by its size if `None`.
    pub(in crate::cache) fn new(keep_free: Option<u32>) -> Self {
        Self { keep_free, ..Self::default() }
    }

    /// Returns how many slots of each shard are kept free for writers.
    pub(in crate::cache) fn reserve(&self, header: &CacheHeader) -> u32 {
        let shard_slots = header.places.slots() / header.shards;
        self.keep_free.unwrap_or((shard_slots / FREE_ONE_IN).clamp(1, 256))
    }

    /// Stops a resize, which leaves the old size, waits for its end, and prevents further ones.
    pub(in crate::cache) fn stop(&self) {
        self.is_stopped.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.lock().take() {
            // The thread has reported its failure itself.
            let _ = thread.join();
        }
    }

    /// Stops a resize, and prevents further ones. Does not wait: the resize ends after its batch,
    /// or with the process.
    pub(in crate::cache) fn abandon(&self) {
        self.is_stopped.store(true, Ordering::SeqCst);
        drop(self.thread.lock().take());
    }

    /// Returns the progress or failure of a resize as JSON for scripts; null if there is neither.
    pub(in crate::cache) fn details(&self) -> Value {
        let is_under_way = self.is_under_way.load(Ordering::SeqCst);
        let failure = self.failure.lock().clone();
        if !is_under_way && failure.is_none() {
            return Value::Null;
        }
        let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
        json!({
            "slots": load(&self.slots),
            "slots_left": load(&self.slots_left),
            "error": failure,
        })
    }
}

impl Background {
    pub(in crate::cache) fn plan_resize(&self, pool_bytes: u64) -> Result<Plan> {
        // The superblock has changed since the pool was opened: its backing is noted after that.
        let superblock =
            Superblock::read(&self.pages.store.region)?.superblock.resized(pool_bytes)?;
        let places = places_of(&superblock, self.pages.store.places.chunk_slots().into());
        let expected = slots_least(u32::try_from(self.pages.shards.count()).unwrap_or(1));
        let found = places.slots();
        if found < expected {
            return Err(CacheError::TooFewSlots { found, expected });
        }
        Ok(Plan { superblock, places })
    }

    /// Waits until all slots outside of `places` have left. After a failure all slots stay usable.
    pub(in crate::cache) fn shrink_to(&self, places: &Places) -> Result<()> {
        self.each_resized(places, |shard, count| shard.allocator.set_usable(count));
        let vacated = self.vacate();
        if vacated.is_err() {
            let before = self.pages.store.header.lock().places;
            self.each_resized(&before, |shard, count| shard.allocator.set_usable(count));
            self.pages.notify_all();
        }
        vacated
    }

    /// Commits the new size durably to the superblock, and uses it from now on.
    pub(in crate::cache) fn commit_size(&self, plan: &Plan) -> Result<()> {
        let Plan { superblock: Superblock { pool_bytes, .. }, places } = *plan;
        // The superblock has changed since the plan: the backing's state is noted all the time.
        let superblock = Superblock::update(&self.pages.store.region, |it| {
            *it = it.resized(pool_bytes)?;
            Ok(())
        })?;
        let mut header = self.pages.store.header.lock();
        (header.superblock, header.places) = (superblock, places);
        self.pages.reserve.store(self.resizing.reserve(&header), Ordering::Relaxed);
        Ok(())
    }

    /// Calls `change` with each shard and the number of slots that it has in `places`.
    pub(in crate::cache) fn each_resized(
        &self,
        places: &Places,
        mut change: impl FnMut(&mut Shard, u32),
    ) {
        let shards = u32::try_from(self.pages.shards.count()).unwrap_or(1);
        for number in 0..shards {
            let mut shard = self.pages.shards.lock(number as usize);
            change(&mut shard, slots_of(number, shards, places.slots()));
        }
    }

    /// Counts the slots that are still to leave.
    fn count_leaving(&self) -> u64 {
        let leaving = |number| self.pages.shards.lock(number).allocator.leaving() as u64;
        let left = (0..self.pages.shards.count()).map(leaving).sum();
        self.resizing.slots_left.store(left, Ordering::Relaxed);
        left
    }

    /// Waits until all slots that leave are void, durably.
    fn vacate(&self) -> Result<()> {
        self.resizing.slots.store(self.count_leaving(), Ordering::Relaxed);
        loop {
            for number in 0..self.pages.shards.count() {
                self.void_left_dead(number)?;
                self.vacate_shard(number)?;
                while self.pages.unite_spent(number)? > 0 {}
            }
            if self.count_leaving() == 0 {
                return Ok(());
            }
            if self.pages.store.has_lost_slots.load(Ordering::SeqCst) {
                return Err(CacheError::LostSlots);
            }
            if self.pages.groups.is_some() {
                // Pages may wait for a commit, and so may slots with their previous versions.
                self.pages.counters.add(Counter::GroupsCommittedEarly, 1);
                self.pages.commit_groups()?;
            }
            // A writer is filling a slot, or other writes to the backing keep a page busy.
            self.pages.store.region.relax();
        }
    }

    /// Removes the pages in leaving slots of shard `number`, cleaning the dirty ones first.
    fn vacate_shard(&self, number: usize) -> Result<()> {
        let mut from = 0;
        loop {
            if self.resizing.is_stopped.load(Ordering::SeqCst) {
                return Err(CacheError::ShutDown);
            }
            let (mut pages, most) = (Vec::new(), self.cleaners.batch_pages());
            from = self.pages.shards.lock(number).leaving_from(from, most, &mut pages);
            if pages.is_empty() {
                return Ok(());
            }
            // The slot of a record and the slot under it both name the page, which leaves once.
            pages.sort_unstable_by_key(|found| found.page);
            pages.dedup_by_key(|found| found.page);
            let dirty = pages.iter().filter(|found| found.dirty).copied().collect();
            self.cleaners.clean(dirty, &mut self.cleaners.lock_cleaning())?;
            self.pages.evict(&pages)?;
            self.count_leaving();
        }
    }

    /// Voids the headers of the leaving dead slots of shard `number`. The newer versions of their
    /// pages are durable, and stay in the cache meanwhile because the pages are held.
    fn void_left_dead(&self, number: usize) -> Result<()> {
        loop {
            let dead = self.pages.shards.lock(number).allocator.take_left_dead(BATCH_SLOTS);
            if self.pages.void_spent(number, &dead)? == 0 {
                return Ok(());
            }
        }
    }
}
