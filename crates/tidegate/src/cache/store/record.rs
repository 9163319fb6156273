//! Records: the lines of a page that a client wrote, without the rest of the page.
//!
//! A record lies in a slot, or in a part of a slot, with a header like that of a page. The header's
//! bitmap names the lines (64 bytes each) that the record has, and their bytes lie one behind the
//! other. The rest of the page is in the slot of the page under the record, or in the backing.

use std::ops::Range;

use super::layout::{ALL_LINES, LINE, PAGE};
use crate::cache::span::Part;

/// Some lines of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cache) struct Record {
    /// A bit for each line of the page, set if the record has the line.
    pub(in crate::cache) lines: u64,
    /// The bytes of these lines, one behind the other.
    pub(in crate::cache) bytes: Vec<u8>,
}

impl Record {
    /// Returns the lines of `data`, whole lines that begin at byte `from` of a page.
    pub(in crate::cache) fn of_part(from: usize, data: &[u8]) -> Self {
        Self { lines: lines_of(from, data.len()), bytes: data.into() }
    }

    /// Returns this record over `older`: its own lines, and the lines that only `older` has.
    pub(in crate::cache) fn over(&self, older: &Self) -> Self {
        let mut page = [0; PAGE];
        older.put_into(&mut page);
        self.put_into(&mut page);
        let lines = self.lines | older.lines;
        let bytes = runs(lines).flat_map(|run| &page[run]).copied().collect();
        Self { lines, bytes }
    }

    /// Returns a record of the lines that are also in `lines`.
    pub(in crate::cache) fn only(&self, lines: u64) -> Self {
        let mut page = [0; PAGE];
        self.put_into(&mut page);
        let lines = lines & self.lines;
        Self { lines, bytes: runs(lines).flat_map(|run| &page[run]).copied().collect() }
    }

    /// Copies the lines over `page`.
    pub(in crate::cache) fn put_into(&self, page: &mut [u8]) {
        let mut rest = &self.bytes[..];
        for run in runs(self.lines) {
            let (now, later) = rest.split_at(run.len());
            page[run].copy_from_slice(now);
            rest = later;
        }
    }

    /// Returns the whole page: `rest`, the page's bytes, with these lines over it.
    pub(in crate::cache) fn on_page(&self, mut rest: Vec<u8>) -> Self {
        self.put_into(&mut rest);
        Self { lines: ALL_LINES, bytes: rest }
    }

    /// Copies `part` of the page to `buf`. Returns `false` if the record lacks a line of the part.
    pub(in crate::cache) fn copy_part(&self, part: &Part, buf: &mut [u8]) -> bool {
        let wanted = lines_of(part.from, buf.len());
        if wanted & !self.lines != 0 {
            return false;
        }
        let mut page = [0; PAGE];
        self.put_into(&mut page);
        buf.copy_from_slice(&page[part.from..part.from + buf.len()]);
        true
    }
}

/// Returns the bits of the lines that hold `len` bytes from byte `from` of a page on.
pub(in crate::cache) fn lines_of(from: usize, len: usize) -> u64 {
    let (first, end) = (from / LINE, (from + len).div_ceil(LINE));
    (first..end).fold(0, |lines, line| lines | 1 << line)
}

/// Returns all lines of the blocks, of `block_bytes` each, that contain one of `lines`.
pub(in crate::cache) fn blocks_of(lines: u64, block_bytes: u32) -> u64 {
    let len = (block_bytes as usize).clamp(LINE, PAGE);
    let blocks = (0..PAGE / len).map(|block| lines_of(block * len, len));
    blocks.filter(|block| block & lines != 0).fold(0, |all, block| all | block)
}

/// Returns the byte ranges of `lines` in a page, with adjacent lines merged.
pub(in crate::cache) fn runs(lines: u64) -> impl Iterator<Item = Range<usize>> {
    let mut rest = lines;
    std::iter::from_fn(move || {
        let first = rest.trailing_zeros();
        let count = rest.checked_shr(first)?.trailing_ones();
        let end = first + count;
        rest &= ALL_LINES.checked_shl(end).unwrap_or(0);
        Some(first as usize * LINE..end as usize * LINE)
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cache::store::layout::stored_bytes;

    #[test]
    fn runs_are_neighbours_together() {
        let of = |lines| runs(lines).collect::<Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(0b1101), [0..64, 128..256]);
        assert!(runs(ALL_LINES).eq(std::iter::once(0..4096)));
        assert_eq!(of(1 << 63 | 1), [0..64, 4032..4096]);
    }

    #[test]
    fn blocks_are_whole_where_one_of_their_lines_is() {
        assert_eq!(blocks_of(0, 512), 0);
        assert_eq!(blocks_of(1 << 9 | 1 << 63, 512), 0xFF << 8 | 0xFF << 56);
        assert_eq!([4096, 8192].map(|bytes| blocks_of(2, bytes)), [ALL_LINES; 2]);
    }

    proptest! {
        /// Records laid over each other hold the last written bytes of each line.
        #[test]
        fn records_over_records_are_what_was_written(
            parts in prop::collection::vec((0_usize..64, 1_usize..64, any::<u8>()), 1..12),
        ) {
            let (mut page, mut lines) = ([0; PAGE], 0);
            let mut record: Option<Record> = None;
            for (first, count, byte) in parts {
                let run = first * LINE..(first + count).min(64) * LINE;
                let new = Record::of_part(run.start, &vec![byte; run.len()]);
                page[run.clone()].fill(byte);
                lines |= new.lines;
                record = Some(record.map_or(new.clone(), |older| new.over(&older)));
            }
            let record = record.unwrap();
            prop_assert_eq!(record.lines, lines);
            prop_assert_eq!(record.bytes.len(), stored_bytes(lines));
            let mut found = [0; PAGE];
            record.put_into(&mut found);
            prop_assert_eq!(&found[..], &page[..]);
            for first in 0..64 {
                let part = Part { page: 0, from: first * LINE, at: 0..LINE };
                let mut buf = [0; LINE];
                let has = record.copy_part(&part, &mut buf);
                prop_assert_eq!(has, lines & 1 << first != 0);
                if has {
                    prop_assert_eq!(&buf[..], &page[first * LINE..][..LINE]);
                }
            }
        }
    }
}
