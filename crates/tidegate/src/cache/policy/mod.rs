//! The decisions of a cache, without I/O, threads, locks or clocks. The engine reports events to a
//! policy, passes the time in nanoseconds, and asks for decisions.
//!
//! - [`Replacement`]: which slots to evict; [`REPLACEMENTS`] lists [`lru`], [`lrw`], [`sieve`] and
//!   [`s3fifo`];
//! - [`promotion`]: which pages that miss are cached;
//! - [`cutoff`]: which requests are part of a stream that is too long for a cache;
//! - [`cleaning`]: which dirty slots are written to the backing, and when;
//! - [`batch`]: how many pages are cleaned at once;
//! - [`by_content`]: whether writes are compared with cached bytes;
//! - [`cost`]: which share of requests the backing takes because it is quicker;
//! - [`classes`]: which requests form an IO class, and how much of the cache a class may use;
//! - [`settings`]: the table of a policy's settings.
//!
//! Names, ranges and defaults of settings are from Open CAS where it has them.

pub mod batch;
pub mod by_content;
pub mod classes;
pub mod cleaning;
pub mod cost;
pub mod cutoff;
pub mod lru;
pub mod lrw;
pub mod promotion;
mod recent;
pub mod s3fifo;
pub mod settings;
pub mod sieve;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::tier::list;

/// Most slots that one policy orders.
pub const MAX_SLOTS: u32 = list::MAX_SLOTS;

/// The order of eviction of slots.
///
/// `slot` is a number below the number of slots that the policy was created for. A policy accepts
/// every sequence of calls: inserting a slot twice uses it, and touching or removing a slot that is
/// not there does nothing.
pub trait Replacement: Send {
    /// Adds `slot`, which holds `page` from now on.
    fn insert(&mut self, slot: u32, page: u64);

    /// Notes a use of `slot`, by a write or by a read.
    fn touch(&mut self, slot: u32, write: bool);

    /// Removes `slot`: `page`, which it held, was evicted or discarded.
    fn remove(&mut self, slot: u32, page: u64);

    /// Notes that a write of `page`, which was in `from`, put it into `to`, which held nothing.
    ///
    /// The page keeps its history of uses. Removing and inserting it would make it a new page,
    /// which costs the policies that count uses their advantage over LRU (docs/policies/cache.md).
    fn moved(&mut self, from: u32, to: u32, page: u64) {
        self.remove(from, page);
        self.insert(to, page);
    }

    /// Appends up to `n` slots to `out`, each once, in the order of eviction.
    ///
    /// The slots stay in the policy until [`remove`](Self::remove). A victim that the caller keeps,
    /// because it is dirty or in use, is returned again only after the other slots, so that
    /// repeated calls always make progress.
    fn victims(&mut self, n: usize, out: &mut Vec<u32>);

    /// Appends up to `n` slots to `out`, each once, roughly those that [`victims`](Self::victims)
    /// would return. The order stays.
    fn coldest(&self, n: usize, out: &mut Vec<u32>);
}

/// A replacement policy that users can choose.
pub struct ReplacementEntry {
    /// The name on the command line.
    pub name: &'static str,
    /// Help in a few words.
    pub about: &'static str,
    /// Bytes of memory for a slot, rounded up.
    pub slot_bytes: usize,
    /// Creates the policy for `slots` slots with `entries` entries, at most [`MAX_SLOTS`]. There
    /// are more entries than slots where slots hold several pages.
    pub create: fn(entries: u32, slots: u32) -> Box<dyn Replacement>,
}

/// All replacement policies, the default first.
pub static REPLACEMENTS: [ReplacementEntry; 4] = [
    ReplacementEntry {
        name: "s3fifo",
        about: "keeps new pages in a small queue until they are used again",
        slot_bytes: 10,
        create: |entries, slots| Box::new(s3fifo::S3Fifo::new(entries, slots)),
    },
    ReplacementEntry {
        name: "lru",
        about: "evicts what was used least recently",
        slot_bytes: 8,
        create: |entries, _| Box::new(lru::Lru::new(entries)),
    },
    ReplacementEntry {
        name: "lrw",
        about: "evicts what was written least recently; reads do not count (AFCM)",
        slot_bytes: 8,
        create: |entries, _| Box::new(lrw::Lrw::new(entries)),
    },
    ReplacementEntry {
        name: "sieve",
        about: "evicts in the order of insertion, and passes over what was used since the last time",
        slot_bytes: 8,
        create: |entries, _| Box::new(sieve::Sieve::new(entries)),
    },
];

/// The names of [`REPLACEMENTS`].
pub static REPLACEMENT_NAMES: [&str; REPLACEMENTS.len()] =
    [REPLACEMENTS[0].name, REPLACEMENTS[1].name, REPLACEMENTS[2].name, REPLACEMENTS[3].name];

/// Returns the replacement policy called `name`.
pub fn replacement(name: &str) -> Option<&'static ReplacementEntry> {
    REPLACEMENTS.iter().find(|entry| entry.name == name)
}

/// A request, as policies see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Number of the queue of the request.
    pub queue: u16,
    /// First byte on the device.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// A write; otherwise a read.
    pub is_write: bool,
}

/// How much of a cache is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Occupancy {
    /// Slots that hold a page.
    pub used_slots: u64,
    /// All slots.
    pub slots: u64,
}

impl Occupancy {
    /// Returns the number of slots that hold nothing.
    pub fn free_slots(self) -> u64 {
        self.slots.saturating_sub(self.used_slots)
    }

    /// Returns whether at least `pct` percent of the slots are used.
    pub fn is_at_least_pct(self, pct: u64) -> bool {
        u128::from(self.used_slots) * 100 >= u128::from(self.slots) * u128::from(pct)
    }
}
