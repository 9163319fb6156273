//! Cleaning: which dirty slots are written to the backing, and when.
//!
//! A policy hears of each slot that becomes dirty or clean. A cleaner asks it for slots with
//! [`Cleaning::next`], cleans them, and asks again after the time that `next` returned. Slots whose
//! cleaning failed are [put off](Cleaning::rewritten), so that others come first.
//!
//! A cache may have parts, each with a policy of its own.

pub mod acp;
pub mod alru;
pub mod nop;
pub mod watermark;

use super::settings::{Settings, Spec};

/// Nanoseconds of a second.
const SECOND_NS: u64 = 1_000_000_000;
/// Nanoseconds of a millisecond.
const MILLISECOND_NS: u64 = 1_000_000;
/// A time that never comes.
pub const NEVER_NS: u64 = u64::MAX;

/// Decides which slots are cleaned next. Times are from one clock that does not go back; an older
/// time counts as the newest one seen.
pub trait Cleaning: Send {
    /// Adds `slot`, which holds `page` and became dirty by a write at `now_ns`.
    fn dirtied(&mut self, slot: u32, page: u64, now_ns: u64) {
        let _ = (slot, page, now_ns);
    }

    /// Notes that the dirty `slot` was written again at `now_ns`, or that cleaning it failed.
    fn rewritten(&mut self, slot: u32, now_ns: u64) {
        let _ = (slot, now_ns);
    }

    /// Removes `slot`, which held `page`: it is clean, or no longer holds anything.
    fn cleaned(&mut self, slot: u32, page: u64) {
        let _ = (slot, page);
    }

    /// Appends the next slots to clean to `out`. Returns the nanoseconds until the next call,
    /// counted from when these slots are clean: 0 for at once, [`NEVER_NS`] for never.
    fn next(&mut self, load: &Load, dirty: &dyn DirtySlots, out: &mut Vec<u32>) -> u64;

    /// Returns whether to call [`next`](Self::next) at once, whatever time it returned, with
    /// `dirty_slots` of `slots` slots dirty.
    fn is_due(&self, dirty_slots: u64, slots: u64) -> bool {
        let _ = (dirty_slots, slots);
        false
    }

    /// Decides by `settings` from now on, which belong to the policy's own table.
    fn set_settings(&mut self, settings: &Settings) {
        let _ = settings;
    }
}

/// The dirty slots.
pub trait DirtySlots {
    /// Returns the slot of `page` if it is dirty.
    fn of_page(&self, page: u64) -> Option<u32>;

    /// Appends the dirty slots among the `n` that come first in the order of eviction to `out`.
    fn coldest(&self, n: usize, out: &mut Vec<u32>);

    /// Appends up to `n` dirty slots from slot number `from` on to `out`. Returns where to go on.
    fn from(&self, from: u32, n: usize, out: &mut Vec<u32>) -> u32;
}

/// A part of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Slots of the part.
    pub slots: u32,
    /// Pages of the backing.
    pub pages: u64,
    /// Number of parts of the cache.
    pub parts: u32,
}

/// The present load of a part of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Present time.
    pub now_ns: u64,
    /// Time of the last request of a client.
    pub last_request_ns: u64,
    /// Slots that are dirty.
    pub dirty_slots: u64,
    /// All slots.
    pub slots: u64,
}

/// A cleaning policy that users can choose.
pub struct CleaningEntry {
    /// The name on the command line.
    pub name: &'static str,
    /// Help in a few words.
    pub about: &'static str,
    /// The policy hears of slots that become dirty, are written again and are cleaned.
    pub hears: bool,
    /// Dirty neighbours of a page are cleaned with it.
    pub joins: bool,
    /// Settings of the policy.
    pub specs: &'static [Spec],
    /// Creates the policy for a part of a cache.
    pub create: fn(Part) -> Box<dyn Cleaning>,
}

/// All cleaning policies, the default first.
pub static CLEANINGS: [CleaningEntry; 4] = [
    CleaningEntry {
        name: "watermark",
        about: "cleans what is evicted next while more than a part of the cache is dirty",
        hears: false,
        joins: false,
        specs: watermark::SPECS,
        create: |_| Box::new(watermark::Watermark::default()),
    },
    CleaningEntry {
        name: "alru",
        about: "cleans what was not written for a while, when clients rest (Open CAS's default)",
        hears: true,
        joins: false,
        specs: alru::SPECS,
        create: |part| Box::new(alru::Alru::new(part.slots, part.parts)),
    },
    CleaningEntry {
        name: "acp",
        about: "cleans all the time, the part of the backing with most dirty pages first",
        hears: true,
        joins: true,
        specs: acp::SPECS,
        create: |part| Box::new(acp::Acp::new(part.pages)),
    },
    CleaningEntry {
        name: "nop",
        about: "cleans nothing before it is evicted or flushed",
        hears: false,
        joins: false,
        specs: &[],
        create: |_| Box::new(nop::Nop),
    },
];

/// The names of [`CLEANINGS`].
pub static CLEANING_NAMES: [&str; CLEANINGS.len()] =
    [CLEANINGS[0].name, CLEANINGS[1].name, CLEANINGS[2].name, CLEANINGS[3].name];

/// Returns the cleaning policy called `name`.
pub fn cleaning(name: &str) -> Option<&'static CleaningEntry> {
    CLEANINGS.iter().find(|entry| entry.name == name)
}

/// Dirty slots by page, for tests of policies.
#[cfg(all(test, not(loom)))]
struct ByPage<F>(F);

#[cfg(all(test, not(loom)))]
impl<F: Fn(u64) -> Option<u32>> DirtySlots for ByPage<F> {
    fn of_page(&self, page: u64) -> Option<u32> {
        (self.0)(page)
    }

    fn coldest(&self, _n: usize, _out: &mut Vec<u32>) {}

    fn from(&self, from: u32, _n: usize, _out: &mut Vec<u32>) -> u32 {
        from
    }
}
