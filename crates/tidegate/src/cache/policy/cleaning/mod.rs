//! Cleaning: which dirty slots are written to the backing, and when.
//!
//! A policy hears of each slot that becomes dirty and of each that is dirty no more. A cleaner asks
//! it for slots with [`Cleaning::next`], cleans them, and asks again after the time that it was
//! told. Slots whose cleaning failed are [put off](Cleaning::rewritten), so that others come first.

pub mod acp;
pub mod alru;
pub mod nop;

use super::settings::Settings;

/// Nanoseconds of a second.
const SECOND_NS: u64 = 1_000_000_000;
/// Nanoseconds of a millisecond.
const MILLISECOND_NS: u64 = 1_000_000;
/// Stands for a time that never comes.
pub const NEVER_NS: u64 = u64::MAX;

/// Decides what is cleaned next. Times are those of one clock that does not go back; an older time
/// counts as the newest one seen.
pub trait Cleaning: Send {
    /// Adds `slot`, which holds `page` and became dirty by a write at `now_ns`.
    fn dirtied(&mut self, slot: u32, page: u64, now_ns: u64);

    /// Records that `slot`, which is dirty, was written again at `now_ns`, or that it could not be
    /// cleaned.
    fn rewritten(&mut self, slot: u32, now_ns: u64);

    /// Removes `slot`, which held `page`: it is clean, or holds nothing any more.
    fn cleaned(&mut self, slot: u32, page: u64);

    /// Appends the slots to clean next to `out`, and returns after how many nanoseconds to ask
    /// again, counted from when these are clean: 0 for at once, [`NEVER_NS`] for never.
    ///
    /// `dirty_slot` tells the slot of a page that is dirty.
    fn next(
        &mut self,
        load: &Load,
        dirty_slot: &mut dyn FnMut(u64) -> Option<u32>,
        out: &mut Vec<u32>,
    ) -> u64;

    /// The settings.
    fn settings(&self) -> &Settings;

    /// The settings, to be changed.
    fn settings_mut(&mut self) -> &mut Settings;
}

/// What a cache is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The time.
    pub now_ns: u64,
    /// When the last request of a client came.
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
    /// What it cleans, in a few words.
    pub about: &'static str,
    /// Makes the policy for a cache of a number of slots, over a backing of a number of pages.
    pub create: fn(u32, u64) -> Box<dyn Cleaning>,
}

/// All cleaning policies, the default first.
pub static CLEANINGS: [CleaningEntry; 3] = [
    CleaningEntry {
        name: "alru",
        about: "cleans what was not written for a while, when clients rest",
        create: |slots, _| Box::new(alru::Alru::new(slots)),
    },
    CleaningEntry {
        name: "acp",
        about: "cleans without rest, the part of the backing with most dirty pages first",
        create: |_, pages| Box::new(acp::Acp::new(pages)),
    },
    CleaningEntry {
        name: "nop",
        about: "cleans nothing before it is evicted or flushed",
        create: |_, _| Box::new(nop::Nop::new()),
    },
];

/// The cleaning policy called `name`.
pub fn cleaning(name: &str) -> Option<&'static CleaningEntry> {
    CLEANINGS.iter().find(|entry| entry.name == name)
}
