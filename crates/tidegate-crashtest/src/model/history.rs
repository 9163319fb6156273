//! The contents of one file: its changes, and the bytes and sizes that a crash may leave.
//!
//! A crash keeps the journalled changes up to some number, its *prefix*. A change of size by
//! truncation or allocation is journalled when it is made, so the prefix decides whether it
//! survives. A write is not journalled: its pages reach the disk at any later time, each 4 KiB
//! block by itself, or never. Three facts bound it:
//!
//! - A synced write survives.
//! - A write into a block that was not mapped needs a change of the journal at its write-back,
//!   which comes after all changes before the write. So it is visible only with a prefix that has
//!   those changes. The same holds for the growth of a file.
//! - A block that was mapped but not yet written reads as zeroes.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a file system's block.
pub const BLOCK_BYTES: u64 = 4096;

/// Whether a block is allocated on the disk, with written bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    /// Not allocated.
    Hole,
    /// Allocated since this many changes were made.
    Mapped(usize),
    /// Allocated since then; a punch to the end of the file may have freed it.
    Either(usize),
    /// Allocated since then, and shared with another file: a write allocates another block.
    Shared(usize),
}

#[derive(Debug, Clone)]
enum Event {
    /// Bytes of a write; `needs` has the least prefix that makes each of its blocks visible.
    Write { offset: u64, bytes: Arc<[u8]>, needs: Vec<usize>, made_at: usize, synced: bool },
    /// A size that is journalled as change `change`.
    Resize { size: u64, change: usize },
    /// A range that reads as zeroes from change `change` on.
    Clear { range: Range<u64>, change: usize, synced: bool },
    /// A range that is cut out; later bytes move down.
    Collapse { range: Range<u64>, change: usize, size: u64 },
    /// A hole that is put in; later bytes move up.
    Insert { range: Range<u64>, change: usize, size: u64 },
    /// The file on the disk is at least as long as this from change `change` on.
    Extend { size: u64, change: usize },
    /// All earlier writes are allocated by change `change`.
    Allocate { change: usize, size: u64 },
}

/// The commits that a write needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Allocation {
    /// No commit: the write overwrites.
    None,
    /// The write extends the file inside a mapped block.
    Size,
    /// The write perhaps allocates blocks.
    Perhaps,
    /// The write allocates blocks.
    Blocks,
}

/// One file's contents over time.
#[derive(Debug, Clone, Default)]
pub struct History {
    initial: Arc<[u8]>,
    events: Vec<Event>,
    blocks: Vec<Block>,
    contents: Vec<u8>,
}

/// Returns an offset of a test as an index.
pub(crate) fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("offsets of a test fit")
}

fn blocks_of(size: u64) -> usize {
    index(size.div_ceil(BLOCK_BYTES))
}

impl History {
    /// Creates a file with `initial` bytes on the disk.
    pub fn new(initial: Vec<u8>) -> Self {
        let blocks = vec![Block::Mapped(0); blocks_of(initial.len() as u64)];
        Self { initial: initial.as_slice().into(), contents: initial, events: Vec::new(), blocks }
    }

    /// Returns the bytes that a reader sees now.
    pub fn contents(&self) -> &[u8] {
        &self.contents
    }

    /// Returns the size that a reader sees now.
    pub fn size(&self) -> u64 {
        self.contents.len() as u64
    }

    /// Adds a write after `changes` changes.
    pub fn write(&mut self, offset: u64, bytes: &[u8], changes: usize) -> Allocation {
        let end = offset + bytes.len() as u64;
        let mut allocation = Allocation::None;
        if end > self.size() {
            self.contents.resize(index(end), 0);
            allocation = Allocation::Size;
        }
        self.contents[index(offset)..index(end)].copy_from_slice(bytes);
        let touched = index(offset / BLOCK_BYTES)..blocks_of(end);
        self.blocks.resize(self.blocks.len().max(touched.end), Block::Hole);
        let mut needs = Vec::new();
        for block in &mut self.blocks[touched] {
            let (need, taken) = match *block {
                Block::Hole => (changes, Allocation::Blocks),
                Block::Shared(since) => (since, Allocation::Blocks),
                Block::Either(since) => (since, Allocation::Perhaps),
                Block::Mapped(since) => (since, Allocation::None),
            };
            *block = Block::Mapped(need);
            needs.push(need);
            allocation = allocation.max(taken);
        }
        let bytes = bytes.into();
        self.events.push(Event::Write { offset, bytes, needs, made_at: changes, synced: false });
        allocation
    }

    /// Adds a new size, journalled as change `change`.
    pub fn resize(&mut self, size: u64, change: usize) {
        self.contents.resize(index(size), 0);
        self.blocks.resize(blocks_of(size), Block::Hole);
        self.events.push(Event::Resize { size, change });
    }

    /// Adds an allocation of a range inside the file up to `size`, journalled as change `change`.
    /// Ext4 makes the file on the disk that long, even if writes made it longer in memory.
    pub fn extend(&mut self, size: u64, change: usize) {
        self.events.push(Event::Extend { size, change });
    }

    /// Returns whether a range has a whole block that is surely allocated on the disk.
    pub fn has_whole_block(&self, range: &Range<u64>) -> bool {
        let whole = whole_blocks(range);
        let blocks = index(whole.start / BLOCK_BYTES)..index(whole.end / BLOCK_BYTES);
        let blocks = blocks.start.min(self.blocks.len())..blocks.end.min(self.blocks.len());
        self.blocks[blocks].iter().any(|block| matches!(block, Block::Mapped(_) | Block::Shared(_)))
    }

    /// Clears a range inside the file, journalled as change `change`.
    pub fn clear(&mut self, range: Range<u64>, change: usize) {
        let range = range.start..range.end.min(self.size()).max(range.start);
        for (number, block) in (0..).zip(&mut self.blocks) {
            let (start, end) = (number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES);
            if range.start <= start && range.end >= end {
                *block = Block::Hole;
            } else if range.start <= start
                && range.end > start
                && range.end >= self.contents.len() as u64
                && let Block::Mapped(since) = *block
            {
                *block = Block::Either(since);
            }
        }
        self.contents[index(range.start)..index(range.end)].fill(0);
        self.events.push(Event::Clear { range, change, synced: false });
    }

    /// Cuts a range of whole blocks out.
    pub fn collapse(&mut self, range: Range<u64>, change: usize) {
        self.contents.drain(index(range.start)..index(range.end));
        let blocks = index(range.start / BLOCK_BYTES)..index(range.end / BLOCK_BYTES);
        self.blocks.drain(blocks);
        self.events.push(Event::Collapse { range, change, size: self.size() });
    }

    /// Puts a hole of whole blocks in.
    pub fn insert(&mut self, range: Range<u64>, change: usize) {
        let (start, length) = (index(range.start), index(range.end - range.start));
        self.contents.splice(start..start, std::iter::repeat_n(0, length));
        let block = index(range.start / BLOCK_BYTES);
        let holes =
            std::iter::repeat_n(Block::Hole, index((range.end - range.start) / BLOCK_BYTES));
        self.blocks.splice(block..block, holes);
        self.events.push(Event::Insert { range, change, size: self.size() });
    }

    /// Shares all blocks with another file.
    pub fn share(&mut self) {
        for block in &mut self.blocks {
            if let Block::Mapped(since) | Block::Either(since) = *block {
                *block = Block::Shared(since);
            }
        }
    }

    /// Allocates earlier writes before change `change`, as ext4 does for a file that replaces
    /// another.
    pub fn allocate(&mut self, change: usize) {
        self.events.push(Event::Allocate { change, size: self.size() });
    }

    /// Notes that all written bytes are on the disk.
    pub fn sync(&mut self) {
        self.events.iter_mut().for_each(Event::sync);
    }

    /// Notes that the last write is on the disk.
    pub fn sync_last(&mut self) {
        self.events.last_mut().into_iter().for_each(Event::sync);
    }

    /// Returns the sizes and bytes that may be on the disk with a prefix of changes.
    pub fn possible(&self, prefix: usize) -> Possible {
        let mut possible = Possible::of(&self.initial);
        self.events.iter().for_each(|event| possible.apply(event, prefix));
        possible
    }
}

impl Event {
    fn sync(&mut self) {
        if let Self::Write { synced, .. } | Self::Clear { synced, .. } = self {
            *synced = true;
        }
    }
}

/// A small set of byte values.
#[derive(Debug, Clone, Copy, Default)]
struct Values {
    /// A count above the length of `values` means any value.
    count: u8,
    values: [u8; 7],
}

impl Values {
    fn only(value: u8) -> Self {
        let mut this = Self::default();
        this.add(value);
        this
    }

    fn add(&mut self, value: u8) {
        if self.has(value) {
            return;
        }
        if let Some(free) = self.values.get_mut(usize::from(self.count)) {
            *free = value;
        }
        self.count += 1;
    }

    fn has(self, value: u8) -> bool {
        match self.values.get(..usize::from(self.count)) {
            Some(values) => values.contains(&value),
            None => true,
        }
    }

    fn list(&self) -> &[u8] {
        &self.values[..usize::from(self.count).min(self.values.len())]
    }
}

/// The sizes and bytes that a file may have.
#[derive(Debug, Clone)]
pub struct Possible {
    sizes: BTreeSet<u64>,
    /// The allowed bytes by offset; a byte after the last cell is zero.
    cells: Vec<Values>,
    /// Ranges collapsed or inserted by changes after the prefix: they shift the offsets of later
    /// writes.
    skipped: Vec<(Range<u64>, bool)>,
}

impl Possible {
    fn of(initial: &[u8]) -> Self {
        let cells = initial.iter().map(|byte| Values::only(*byte)).collect();
        Self { sizes: BTreeSet::from([initial.len() as u64]), cells, skipped: Vec::new() }
    }

    fn apply(&mut self, event: &Event, prefix: usize) {
        match event {
            Event::Write { offset, bytes, needs, made_at, synced } => {
                self.write(*offset, bytes, |block| *synced || needs[block] <= prefix, *synced);
                self.grow(*offset + bytes.len() as u64, *made_at <= prefix, *synced);
            }
            Event::Resize { size, change } if *change <= prefix => {
                self.cells.truncate(index(*size));
                self.sizes = BTreeSet::from([*size]);
            }
            Event::Resize { size, .. } => {
                self.zero(*size..size.next_multiple_of(BLOCK_BYTES), false);
            }
            Event::Clear { range, change, synced } => {
                let whole = whole_blocks(range);
                if *change <= prefix {
                    self.zero(whole.clone(), true);
                }
                self.zero(range.start..whole.start.min(range.end), *synced);
                self.zero(whole.end.max(range.start)..range.end, *synced);
            }
            Event::Collapse { range, change, size } if *change <= prefix => {
                self.reach(range.end);
                self.cells.drain(index(range.start)..index(range.end));
                self.sizes = BTreeSet::from([*size]);
            }
            Event::Insert { range, change, size } if *change <= prefix => {
                self.reach(range.end);
                let start = index(range.start);
                let hole = std::iter::repeat_n(Values::only(0), index(range.end) - start);
                self.cells.splice(start..start, hole);
                self.sizes = BTreeSet::from([*size]);
            }
            Event::Collapse { range, .. } => self.skipped.push((range.clone(), true)),
            Event::Insert { range, .. } => self.skipped.push((range.clone(), false)),
            Event::Extend { size, change } if *change <= prefix => {
                self.sizes = self.sizes.iter().map(|known| *size.max(known)).collect();
            }
            Event::Allocate { change, size } if *change <= prefix => {
                self.sizes = BTreeSet::from([*size]);
            }
            Event::Extend { .. } | Event::Allocate { .. } => {}
        }
    }

    fn write(
        &mut self,
        offset: u64,
        bytes: &[u8],
        is_visible: impl Fn(usize) -> bool,
        synced: bool,
    ) {
        let first = offset / BLOCK_BYTES;
        for (at, byte) in (offset..).zip(bytes) {
            if is_visible(index(at / BLOCK_BYTES - first)) {
                self.put(at, *byte, synced);
            }
        }
    }

    fn zero(&mut self, range: Range<u64>, is_exact: bool) {
        let end = range.end.min(self.cells.len() as u64);
        (range.start..end).for_each(|at| self.put(at, 0, is_exact));
    }

    /// Allows a value at an offset, and no other value if it `is_exact`.
    fn put(&mut self, offset: u64, value: u8, is_exact: bool) {
        let Some(at) = self.unshifted(offset) else { return };
        self.reach(at + 1);
        let cell = &mut self.cells[index(at)];
        if is_exact && self.skipped.is_empty() {
            *cell = Values::only(value);
        } else {
            cell.add(value);
        }
    }

    /// Returns the offset of a byte before the skipped changes.
    fn unshifted(&self, mut offset: u64) -> Option<u64> {
        for (range, is_collapse) in self.skipped.iter().rev() {
            let length = range.end - range.start;
            match is_collapse {
                true if offset >= range.start => offset += length,
                false if range.contains(&offset) => return None,
                false if offset >= range.end => offset -= length,
                _ => {}
            }
        }
        Some(offset)
    }

    fn reach(&mut self, size: u64) {
        self.cells.resize(self.cells.len().max(index(size)), Values::only(0));
    }

    /// Allows one more value at an offset.
    pub(super) fn add(&mut self, offset: u64, value: u8) {
        self.reach(offset + 1);
        self.cells[index(offset)].add(value);
    }

    /// Allows one more size.
    pub(super) fn add_size(&mut self, size: u64) {
        self.sizes.insert(size);
    }

    fn grow(&mut self, end: u64, may_grow: bool, must_grow: bool) {
        if must_grow {
            self.sizes = self.sizes.iter().map(|size| end.max(*size)).collect();
        } else if may_grow && let Some(least) = self.sizes.first().copied() {
            let first = least.next_multiple_of(BLOCK_BYTES).max(BLOCK_BYTES);
            let partly = (first..end).step_by(index(BLOCK_BYTES));
            self.sizes.extend(partly.chain((end > least).then_some(end)));
        }
    }

    /// Explains why the file cannot have these bytes; `None` if it can.
    pub fn objection(&self, bytes: &[u8], describe: impl Fn(u8, u64) -> String) -> Option<String> {
        let size = bytes.len() as u64;
        if !self.sizes.contains(&size) {
            let sizes: Vec<String> = self.sizes.iter().map(u64::to_string).collect();
            return Some(format!("{size} bytes long, allowed: {}", sizes.join(", ")));
        }
        let zero = Values::only(0);
        let cell = |at: usize| self.cells.get(at).unwrap_or(&zero);
        let is_wrong = |at: &usize| !cell(*at).has(bytes[*at]);
        let start = (0..bytes.len()).find(is_wrong)?;
        let count = (start..bytes.len()).take_while(is_wrong).count();
        let (at, found) = (start as u64, bytes[start]);
        let allowed = cell(start).list().iter().map(|value| describe(*value, at));
        let allowed: Vec<String> = allowed.collect();
        Some(format!(
            "{count} bytes from {at}: found {}, allowed: {}",
            describe(found, at),
            allowed.join(", ")
        ))
    }
}

/// Returns the whole blocks inside a range; if there are none, the empty range at its end.
fn whole_blocks(range: &Range<u64>) -> Range<u64> {
    let start = range.start.next_multiple_of(BLOCK_BYTES);
    let end = range.end / BLOCK_BYTES * BLOCK_BYTES;
    if start < end { start..end } else { range.end..range.end }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contents::{INITIAL_A, bytes, writer};

    fn file() -> History {
        History::new(bytes(INITIAL_A, 0, 10_000))
    }

    fn allows(history: &History, prefix: usize, bytes: &[u8]) -> bool {
        history.possible(prefix).objection(bytes, writer).is_none()
    }

    #[test]
    fn an_overwrite_is_old_or_new_until_it_is_synced() {
        let mut file = file();
        let old = file.contents().to_vec();
        assert_eq!(file.write(1000, &bytes(1, 1000, 3000), 0), Allocation::None);
        let new = file.contents().to_vec();
        assert!(allows(&file, 0, &old) && allows(&file, 0, &new));
        file.sync();
        assert!(!allows(&file, 0, &old) && allows(&file, 0, &new));
    }

    #[test]
    fn growth_needs_the_changes_before_it() {
        let mut file = file();
        let old = file.contents().to_vec();
        assert_eq!(file.write(10_000, &bytes(2, 10_000, 3000), 1), Allocation::Blocks);
        let new = file.contents().to_vec();
        assert!(allows(&file, 0, &old) && !allows(&file, 0, &new));
        assert!(allows(&file, 1, &old) && allows(&file, 1, &new));
        let mut zeroes = old.clone();
        zeroes.resize(13_000, 0);
        assert!(allows(&file, 1, &zeroes));
        zeroes.truncate(12_500);
        assert!(!allows(&file, 1, &zeroes), "not at a block");
        file.sync();
        assert!(!allows(&file, 1, &old) && allows(&file, 1, &new));
    }

    #[test]
    fn old_bytes_do_not_come_back_behind_a_cut() {
        let mut file = file();
        let old = file.contents().to_vec();
        file.resize(0, 1);
        file.write(0, &bytes(2, 0, 10), 1);
        let mut mixture = old.clone();
        mixture[..10].copy_from_slice(&bytes(2, 0, 10));
        for prefix in 0..2 {
            assert!(!allows(&file, prefix, &mixture));
            assert_eq!(allows(&file, prefix, &old), prefix == 0);
            assert_eq!(allows(&file, prefix, &[]), prefix == 1);
        }
        assert!(allows(&file, 1, &bytes(2, 0, 10)) && allows(&file, 1, &[0; 10]));
    }

    #[test]
    fn ranges_move_with_their_bytes() {
        let mut file = file();
        let old = file.contents().to_vec();
        file.collapse(4096..8192, 1);
        let short = file.contents().to_vec();
        assert_eq!(short.len(), 5904);
        file.insert(0..4096, 2);
        let long = file.contents().to_vec();
        assert!(allows(&file, 0, &old) && allows(&file, 1, &short) && allows(&file, 2, &long));
        assert!(!allows(&file, 0, &short) && !allows(&file, 2, &short));
        // The write goes to the block at 8192 while the collapse is not journalled, and at 4096
        // before the insertion.
        file.write(8192, &bytes(3, 8192, 100), 2);
        let mut moved = old.clone();
        moved[8192..8292].copy_from_slice(&bytes(3, 8192, 100));
        assert!(allows(&file, 0, &moved));
    }

    #[test]
    fn a_punched_block_reads_as_zeroes_and_its_edges_as_either() {
        let mut file = file();
        let old = file.contents().to_vec();
        file.clear(2000..9000, 1);
        let new = file.contents().to_vec();
        assert!(allows(&file, 0, &old) && allows(&file, 1, &new) && !allows(&file, 0, &new));
        let mut edges = new.clone();
        edges[2000..4096].copy_from_slice(&old[2000..4096]);
        assert!(allows(&file, 1, &edges));
        file.sync();
        assert!(!allows(&file, 1, &edges) && allows(&file, 1, &new));
    }
}
