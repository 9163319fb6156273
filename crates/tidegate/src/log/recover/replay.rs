//! Computes the target of a file from its story and its state on the disk. Pure: changes no file.
//!
//! Three kinds of steps:
//! - A write that only overwrites durable bytes, and growth that a sync has promised, are applied.
//! - A change of the size is applied. It was logged only while nothing was pending in the file
//!   system: a commit at that moment would have made it durable, and nothing that the log lacks.
//! - Growth that no sync has promised is applied only to bytes within the file's size that the
//!   disk, or an earlier step, has written and allocated: the kernel could have written those at
//!   any time. It ends where such growth can end: with a block, or with the write. More would need
//!   a commit of the file system, which would have made names durable that the log lacks.
//!
//! Invariant: a replay over any state that an interrupted replay left has the result of the first
//! one, or that result with more of the unpromised growth. For this reason the file is never made
//! shorter than its target: bytes behind a cut are zeroed, not cut off and written again.

use super::extents::{Content, Extent, ExtentMap};
use super::plan::{FilePlan, Operation, Plan};
use super::ranges::Ranges;

/// The state of a file on the disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Disk {
    /// Size in bytes.
    pub size_bytes: u64,
    /// The bytes in allocated and written extents.
    pub written: Ranges,
    /// Block size of the file system's allocation, in bytes, at least 1.
    pub block_bytes: u64,
}

impl Disk {
    /// Returns a disk that has every byte of a file allocated and written.
    pub(super) fn that_has_all() -> Self {
        Self { size_bytes: u64::MAX, written: Ranges::from(0..u64::MAX), block_bytes: 1 }
    }
}

/// The target of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Target {
    /// Size in bytes.
    pub size_bytes: u64,
    /// The contents to set, in order. All other bytes are as on the disk, or a hole.
    pub extents: Vec<Extent>,
}

/// A replay in progress.
struct Replay {
    disk_bytes: u64,
    size_bytes: u64,
    /// The size that the file may have without another commit of its file system.
    free_bytes: u64,
    written: Ranges,
    block_bytes: u64,
    extents: ExtentMap,
}

/// Computes the target of the file after all its steps.
pub fn replay(file: &FilePlan, disk: &Disk) -> Target {
    let size_bytes = disk.size_bytes;
    let (written, extents) = (disk.written.clone(), ExtentMap::default());
    let (disk_bytes, free_bytes) = (size_bytes, size_bytes);
    let block_bytes = disk.block_bytes.max(1);
    let mut replay = Replay { disk_bytes, size_bytes, free_bytes, written, block_bytes, extents };
    let sizes_to_come = sizes_to_come(file);
    for (step, size_to_come) in file.steps.iter().zip(sizes_to_come) {
        match step.operation {
            Operation::SetSize(size_bytes) => replay.set_size(size_bytes),
            Operation::Write { offset, len, data, grows } => {
                let extent =
                    Extent { start: offset, end: offset + len, content: Content::Log(data) };
                let is_promised = !grows || step.position < file.marked_until;
                replay.write(extent, is_promised, size_to_come);
            }
        }
    }
    let Replay { size_bytes, mut extents, .. } = replay;
    extents.cut(size_bytes);
    Target { size_bytes, extents: extents.into_vec() }
}

impl FilePlan {
    /// Returns the largest number of bytes that the file needs from the log.
    pub fn data_bytes(&self) -> u64 {
        let target = replay(self, &Disk::that_has_all());
        let from_log = target.extents.iter().filter(|it| matches!(it.content, Content::Log(_)));
        from_log.map(Extent::bytes).sum()
    }
}

impl Plan {
    /// Returns the largest number of bytes that the files need from the log.
    pub fn data_bytes(&self) -> u64 {
        self.files.iter().map(FilePlan::data_bytes).sum()
    }
}

/// Returns for each step the largest size that it or a later step sets, 0 if none does.
fn sizes_to_come(file: &FilePlan) -> Vec<u64> {
    let mut largest = 0;
    let backwards = file.steps.iter().rev().map(|step| {
        if let Operation::SetSize(size_bytes) = step.operation {
            largest = largest.max(size_bytes);
        }
        largest
    });
    let mut sizes: Vec<u64> = backwards.collect();
    sizes.reverse();
    sizes
}

impl Replay {
    fn set_size(&mut self, size_bytes: u64) {
        if size_bytes < self.size_bytes {
            self.extents.cut(size_bytes);
            let (start, end) = (size_bytes, self.disk_bytes);
            self.extents.insert(Extent { start, end, content: Content::Zero });
            // Growth before the cut permits no growth behind it: the cut may be durable.
            self.free_bytes = self.disk_bytes;
        }
        self.size_bytes = size_bytes;
        self.free_bytes = self.free_bytes.max(size_bytes);
    }

    /// Returns the largest size after unpromised growth to `end`. The kernel extends a file to the
    /// end of a write, or of a block in it. A disk's size that is neither dates from before a cut,
    /// and no file of that size has bytes that were written since.
    fn growth_end(&self, end: u64) -> u64 {
        let allowed = self.free_bytes.min(end);
        let is_inside = allowed == end || allowed <= self.size_bytes;
        let whole_blocks = allowed - allowed % self.block_bytes;
        if is_inside { allowed } else { whole_blocks.max(self.size_bytes) }
    }

    fn write(&mut self, extent: Extent, is_promised: bool, size_to_come: u64) {
        if is_promised {
            // The file system allocates whole blocks: later writes overwrite the rest of a block.
            let start = extent.start - extent.start % self.block_bytes;
            self.written.insert(start..extent.end.next_multiple_of(self.block_bytes));
            self.free_bytes = self.free_bytes.max(extent.end);
        }
        let allowed = self.growth_end(extent.end);
        if allowed < self.free_bytes.min(extent.end) {
            // Growth that ends behind this one would expose a page without the rest of this write.
            self.free_bytes = allowed;
        }
        // A later size exposes the rest of a page, which the kernel writes whole or not at all.
        let end = extent.end.min(allowed.max(size_to_come));
        for part in self.written.within(extent.start..end.max(extent.start)) {
            self.size_bytes = self.size_bytes.max(part.end);
            self.extents.insert(extent.part(part));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::tests::file_of;
    use super::*;

    fn disk(size_bytes: u64) -> Disk {
        Disk { size_bytes, written: Ranges::from(0..size_bytes), block_bytes: 1 }
    }

    fn write(offset: u64, len: u64, data: u64, grows: bool) -> Operation {
        Operation::Write { offset, len, data, grows }
    }

    fn log(start: u64, end: u64, data: u64) -> Extent {
        Extent { start, end, content: Content::Log(data) }
    }

    fn zero(start: u64, end: u64) -> Extent {
        Extent { start, end, content: Content::Zero }
    }

    fn target(size_bytes: u64, extents: &[Extent]) -> Target {
        Target { size_bytes, extents: extents.to_vec() }
    }

    #[test]
    fn overwrites_are_done_without_a_mark() {
        let file = file_of(&[write(0, 10, 1000, false)], 0);
        assert_eq!(replay(&file, &disk(100)), target(100, &[log(0, 10, 1000)]));
    }

    #[test]
    fn growth_is_done_only_with_a_mark() {
        let steps = [write(90, 20, 1000, true), write(110, 10, 2000, true)];
        let all = target(120, &[log(90, 110, 1000), log(110, 120, 2000)]);
        assert_eq!(replay(&file_of(&steps, 2), &disk(100)), all);
        let first = target(110, &[log(90, 110, 1000)]);
        assert_eq!(replay(&file_of(&steps, 1), &disk(100)), first);
        let inside = target(100, &[log(90, 100, 1000)]);
        assert_eq!(replay(&file_of(&steps, 0), &disk(100)), inside);
    }

    #[test]
    fn growth_that_the_disk_has_is_done() {
        let steps = [write(100, 20, 1000, true), write(100, 10, 2000, true)];
        let expected = target(115, &[log(100, 110, 2000), log(110, 115, 1010)]);
        assert_eq!(replay(&file_of(&steps, 0), &disk(115)), expected);
    }

    #[test]
    fn holes_are_filled_only_with_a_mark() {
        let written = [0..10, 90..100].into_iter().collect();
        let holes = Disk { size_bytes: 100, written, block_bytes: 1 };
        let steps = [write(5, 90, 1000, true)];
        let parts = target(100, &[log(5, 10, 1000), log(90, 95, 1085)]);
        assert_eq!(replay(&file_of(&steps, 0), &holes), parts);
        assert_eq!(replay(&file_of(&steps, 1), &holes), target(100, &[log(5, 95, 1000)]));
    }

    #[test]
    fn an_overwrite_of_promised_growth_comes_with_all_writes_below_it() {
        // The second write grows the file, and is not promised; the third is an overwrite.
        let steps = [write(0, 10, 1000, true), write(0, 20, 2000, true), write(2, 2, 3000, false)];
        let expected = target(10, &[log(0, 2, 2000), log(2, 4, 3000), log(4, 10, 2004)]);
        assert_eq!(replay(&file_of(&steps, 1), &disk(0)), expected);
    }

    #[test]
    fn what_lies_behind_a_cut_is_zero_unless_it_was_written_again() {
        let steps = [Operation::SetSize(10), Operation::SetSize(50), write(20, 5, 1000, true)];
        let expected = target(50, &[zero(10, 20), log(20, 25, 1000), zero(25, 50)]);
        assert_eq!(replay(&file_of(&steps, 3), &disk(100)), expected);
    }

    #[test]
    fn changes_of_the_size_need_no_mark() {
        let longer = file_of(&[Operation::SetSize(200)], 0);
        assert_eq!(replay(&longer, &disk(100)), target(200, &[]));
        let shorter = file_of(&[write(0, 100, 1000, false), Operation::SetSize(30)], 0);
        assert_eq!(replay(&shorter, &disk(100)), target(30, &[log(0, 30, 1000)]));
    }

    #[test]
    fn growth_behind_a_durable_cut_is_not_promised_by_growth_before_it() {
        let steps =
            [write(100, 36, 1000, true), Operation::SetSize(102), write(102, 44, 2000, true)];
        let expected = target(102, &[log(100, 102, 1000)]);
        assert_eq!(replay(&file_of(&steps, 2), &disk(102)), expected);
    }

    #[test]
    fn a_size_of_before_a_cut_is_none_that_growth_ends_with() {
        let disk = Disk { block_bytes: 64, ..disk(100) };
        let cut = Operation::SetSize(0);
        let grown = |steps: &[Operation]| replay(&file_of(&[&[cut], steps].concat(), 0), &disk);
        let block = target(64, &[log(0, 64, 1000), zero(64, 100)]);
        let cut_to = |target: Target| Target {
            extents: target.extents.into_iter().filter(|it| it.start < target.size_bytes).collect(),
            ..target
        };
        assert_eq!(grown(&[write(0, 120, 1000, true)]), cut_to(block));
        let whole = target(100, &[log(0, 100, 1000)]);
        assert_eq!(grown(&[write(0, 100, 1000, true)]), whole, "the kernel may have grown it so");
        let short = target(30, &[log(0, 30, 1000)]);
        assert_eq!(grown(&[write(0, 30, 1000, true)]), short);
        let both = target(64, &[log(0, 30, 1000), log(30, 64, 2000)]);
        assert_eq!(grown(&[write(0, 30, 1000, true), write(30, 90, 2000, true)]), both);
        // The kernel's page had the rest of the first write when the second one was made.
        let steps = [write(0, 120, 1000, true), write(80, 10, 2000, true)];
        assert_eq!(grown(&steps), target(64, &[log(0, 64, 1000)]));
    }

    #[test]
    fn a_page_that_a_later_size_shows_is_written_whole_or_not_at_all() {
        let page = Disk { size_bytes: 185, written: Ranges::from(0..192), block_bytes: 1 };
        let file = file_of(&[write(175, 42, 1000, true), Operation::SetSize(228)], 0);
        assert_eq!(replay(&file, &page), target(228, &[log(175, 192, 1000)]));
    }

    #[test]
    fn the_rest_of_a_promised_block_is_written_as_the_block_is() {
        let disk = Disk { block_bytes: 64, ..disk(0) };
        let steps = [write(0, 10, 1000, true), write(5, 30, 2000, true)];
        let expected = target(10, &[log(0, 5, 1000), log(5, 10, 2000)]);
        assert_eq!(replay(&file_of(&steps, 1), &disk), expected);
        let steps = [&steps[..], &[write(90, 10, 3000, true)]].concat();
        let all = replay(&file_of(&steps, 3), &disk);
        assert_eq!(all.extents, [log(0, 5, 1000), log(5, 35, 2000), log(90, 100, 3000)]);
    }

    #[test]
    fn an_empty_write_does_nothing() {
        let file = file_of(&[write(500, 0, 1000, false), write(500, 0, 1000, true)], 9);
        assert_eq!(replay(&file, &disk(100)), target(100, &[]));
    }
}
