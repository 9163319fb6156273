//! Costs of AFCM's transactional copy-on-write (section 3.3.1), taken literally.
//!
//! For each page of a sync: a log entry is written and the head advances; the old version is marked
//! and the entry's state becomes 1; the data is written to new space and the state becomes 2. At
//! the end the old space is released and the tail advances. Each step is durable before the next.
//!
//! The literal form is not atomic. No entry contains the number of pages of a sync: a crash after
//! the first page has reached state 2, and before the second page's entry exists, commits the first
//! page alone. And a sync of more pages than the log of 4 KiB has entries commits in parts. The
//! scheme only counts, and does not show this. [`torn_crashes`] crashes a model at every step and
//! finds the first case; `slots` ends the log when it is full.

use super::devices::Devices;

/// The log is one page; an entry is a cache line, so that its first store is atomic.
pub const LOG_BYTES: u64 = 4096;
const ENTRY_BYTES: u64 = 64;
/// One entry stays free, to distinguish a full log from an empty one.
pub const ENTRIES: u64 = LOG_BYTES / ENTRY_BYTES - 1;
/// Number of lines, flash address, previous and present page.
const FIELDS_BYTES: u64 = 4 * WORD_BYTES;
const WORD_BYTES: u64 = 8;

/// Stores a word, and makes it durable before later stores.
fn store_word(devices: &mut dyn Devices) {
    devices.pmem_metadata(WORD_BYTES);
    devices.pmem_fence();
}

/// Performs steps 1 to 3 for a page; `has_old` if persistent memory has an older version.
pub fn begin_page(has_old: bool, devices: &mut dyn Devices) {
    devices.pmem_metadata(FIELDS_BYTES);
    devices.pmem_fence();
    store_word(devices);
    if has_old {
        store_word(devices);
        store_word(devices);
    }
}

/// Performs the end of step 4: stores the page's location, and marks the entry as complete.
pub fn end_page(devices: &mut dyn Devices) {
    store_word(devices);
    store_word(devices);
}

/// Performs the end of step 6: advances the tail.
pub fn end_sync(devices: &mut dyn Devices) {
    store_word(devices);
}

/// The log and two pages in persistent memory, after some of the ordered stores.
#[derive(Default)]
struct Memory {
    head: usize,
    tail: usize,
    /// States, by entry.
    states: [u8; 2],
    /// Whether the new version of a page exists, and whether the old one is released, by page.
    has_new: [bool; 2],
    has_released: [bool; 2],
}

type Store = fn(&mut Memory);

/// The paper's six steps for a sync of two pages, in order.
const STORES: [Store; 10] = [
    |memory| memory.head = 1,
    |memory| memory.states[0] = 1,
    |memory| memory.has_new[0] = true,
    |memory| memory.states[0] = 2,
    |memory| memory.head = 2,
    |memory| memory.states[1] = 1,
    |memory| memory.has_new[1] = true,
    |memory| memory.states[1] = 2,
    |memory| memory.has_released = [true; 2],
    |memory| memory.tail = 2,
];

/// Recovers from a crash after `stores` stores, by section 3.3.2; returns which pages are new.
fn recover(stores: usize) -> [bool; 2] {
    let mut memory = Memory::default();
    for store in STORES.iter().take(stores) {
        store(&mut memory);
    }
    let mut entries = memory.states.iter().take(memory.head).skip(memory.tail);
    let is_committed = entries.all(|state| *state == 2);
    [0, 1].map(|page| memory.has_new[page] && (is_committed || memory.has_released[page]))
}

/// Returns the number of crashes of a sync of two pages that leave one page new and the other old,
/// and the number of all crashes: one before each store and one behind the last.
pub fn torn_crashes() -> (usize, usize) {
    let is_torn = |stores: &usize| matches!(recover(*stores), [one, other] if one != other);
    let all = 0..=STORES.len();
    (all.clone().filter(is_torn).count(), all.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_literal_form_commits_a_part_of_a_sync() {
        let torn: Vec<_> = (0..=STORES.len()).filter(|at| recover(*at) == [true, false]).collect();
        // After the first page's state 2, and before the second page's entry.
        assert_eq!(torn, [4]);
        assert_eq!(torn_crashes(), (1, 11));
        assert_eq!((recover(0), recover(STORES.len())), ([false; 2], [true; 2]));
    }
}
