//! Computes the pages of 4 KiB and the cache lines that a request covers.

use std::ops::Range;

use crate::trace::FileId;

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes of a cache line, which a bit of a line mask stands for.
pub const LINE_BYTES: u64 = 64;
/// All lines of a page.
pub const ALL_LINES: u64 = u64::MAX;

/// A page of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId {
    /// The file.
    pub file: FileId,
    /// The page's number in the file, from 0.
    pub page: u64,
}

/// Returns the pages that hold `len` bytes at `offset`.
pub fn pages_of(offset: u64, len: u64) -> Range<u64> {
    let first = offset / PAGE_BYTES;
    if len == 0 { first..first } else { first..offset.saturating_add(len).div_ceil(PAGE_BYTES) }
}

/// Returns the part of `page` that `len` bytes at `offset` cover, relative to the page's start.
pub fn part_of(page: u64, offset: u64, len: u64) -> Range<u64> {
    let start = page.saturating_mul(PAGE_BYTES);
    let end = offset.saturating_add(len);
    offset.saturating_sub(start).min(PAGE_BYTES)..end.saturating_sub(start).min(PAGE_BYTES)
}

/// Returns the pages of `file` with `len` bytes at `offset`, and the covered part of each page.
pub fn parts_of(file: FileId, offset: u64, len: u64) -> impl Iterator<Item = (PageId, Range<u64>)> {
    pages_of(offset, len).map(move |page| (PageId { file, page }, part_of(page, offset, len)))
}

/// Returns a mask of the lines that hold any of `bytes` of a page.
pub fn lines_of(bytes: &Range<u64>) -> u64 {
    let (first, end) = (bytes.start / LINE_BYTES, bytes.end.div_ceil(LINE_BYTES));
    let below = |line: u64| if line >= 64 { ALL_LINES } else { (1 << line) - 1 };
    below(end) & !below(first)
}

/// Returns the bytes of the lines in the mask `lines`.
pub fn bytes_of(lines: u64) -> u64 {
    u64::from(lines.count_ones()) * LINE_BYTES
}

/// Returns the numbers of the bits that are set in `mask`.
pub fn bits(mask: u64) -> impl Iterator<Item = u32> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        (rest != 0).then(|| {
            let bit = rest.trailing_zeros();
            rest &= rest - 1;
            bit
        })
    })
}

/// Returns the runs of neighbouring lines in `lines`: the first line and the length of each run.
pub fn runs_of(lines: u64) -> impl Iterator<Item = (u32, u32)> {
    let mut rest = lines;
    std::iter::from_fn(move || {
        if rest == 0 {
            return None;
        }
        let first = rest.trailing_zeros();
        let count = (rest >> first).trailing_ones();
        rest &= ALL_LINES.checked_shl(first + count).unwrap_or(0);
        Some((first, count))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_covers_parts_of_its_first_and_last_page() {
        assert_eq!((pages_of(4095, 2), pages_of(8192, 0)), (0..2, 2..2));
        assert_eq!((part_of(0, 4095, 2), part_of(1, 4095, 2)), (4095..4096, 0..1));
        assert_eq!((lines_of(&(4095..4096)), lines_of(&(0..1))), (1 << 63, 1));
        assert_eq!(lines_of(&(0..4096)), ALL_LINES);
        assert_eq!(lines_of(&(63..129)), 0b111);
        assert_eq!(lines_of(&(128..128)), 0);
        assert_eq!((pages_of(u64::MAX, 9).start, bytes_of(0b1011)), (u64::MAX / 4096, 192));
    }

    #[test]
    fn neighbouring_lines_are_one_run() {
        assert_eq!(runs_of(0b1101).collect::<Vec<_>>(), [(0, 1), (2, 2)]);
        assert_eq!(runs_of(ALL_LINES).collect::<Vec<_>>(), [(0, 64)]);
        assert_eq!(runs_of(1 << 63).collect::<Vec<_>>(), [(63, 1)]);
        assert_eq!(runs_of(0).count(), 0);
    }
}
