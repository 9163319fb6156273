//! What AFCM's transactional copy-on-write costs (section 3.3.1), taken literally.
//!
//! For each page of a sync: a log entry is written and the head moved; the old version is marked
//! old and the entry's state becomes 1; the data goes to new space and the state becomes 2. At the
//! end the old space is released and the tail moved. Each of these is durable before the next.
//!
//! The literal form is not atomic, which this scheme cannot show for it only counts: no entry says
//! how many pages a sync has, so a crash after the first page reached state 2 and before the second
//! page's entry is there commits the first page alone; and a sync of more pages than the log of
//! 4 KiB has entries commits in parts. [`torn_crashes`] crashes a model of the steps at each of
//! them and finds the first; `slots` ends the log where it is full.

use super::devices::Devices;

/// The log is a page; an entry is a cache line, so that its first store is one.
pub const LOG_BYTES: u64 = 4096;
const ENTRY_BYTES: u64 = 64;
/// One entry stays free: a full log and an empty one must differ.
pub const ENTRIES: u64 = LOG_BYTES / ENTRY_BYTES - 1;
/// Number of lines, flash address, previous and present page.
const FIELDS_BYTES: u64 = 4 * WORD_BYTES;
const WORD_BYTES: u64 = 8;

/// Stores a word that is durable before what follows.
fn store_word(devices: &mut dyn Devices) {
    devices.pmem_metadata(WORD_BYTES);
    devices.pmem_fence();
}

/// Steps 1 to 3 for a page; `has_old`: persistent memory has an older version.
pub fn begin_page(has_old: bool, devices: &mut dyn Devices) {
    devices.pmem_metadata(FIELDS_BYTES);
    devices.pmem_fence();
    store_word(devices);
    if has_old {
        store_word(devices);
        store_word(devices);
    }
}

/// The end of step 4: the entry says where the page is now, and that it is complete.
pub fn end_page(devices: &mut dyn Devices) {
    store_word(devices);
    store_word(devices);
}

/// The end of step 6: the tail moves.
pub fn end_sync(devices: &mut dyn Devices) {
    store_word(devices);
}

/// What persistent memory says of the log and of two pages, after some of the ordered stores.
#[derive(Default)]
struct Memory {
    head: usize,
    tail: usize,
    /// By entry.
    states: [u8; 2],
    /// By page: the new version is there, and the old one is released.
    has_new: [bool; 2],
    has_released: [bool; 2],
}

type Store = fn(&mut Memory);

/// The paper's six steps for a sync of two pages, in their order.
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

/// Section 3.3.2: which pages are new after recovery from a crash behind `stores` stores.
fn recover(stores: usize) -> [bool; 2] {
    let mut memory = Memory::default();
    for store in STORES.iter().take(stores) {
        store(&mut memory);
    }
    let mut entries = memory.states.iter().take(memory.head).skip(memory.tail);
    let is_committed = entries.all(|state| *state == 2);
    [0, 1].map(|page| memory.has_new[page] && (is_committed || memory.has_released[page]))
}

/// Crashes of a sync of two pages after which recovery leaves one of them new and the other old,
/// and all crashes: one before each store and one behind the last.
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
        // Behind the first page's state 2 and before the second page's entry.
        assert_eq!(torn, [4]);
        assert_eq!(torn_crashes(), (1, 11));
        assert_eq!((recover(0), recover(STORES.len())), ([false; 2], [true; 2]));
    }
}
