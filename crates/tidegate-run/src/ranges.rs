//! Ranges of bytes: the pages of a file that were written.

/// Ranges begin and end at multiples of this: the kernel writes back whole pages.
const PAGE_BYTES: u64 = 4096;
/// The most ranges of one file in one segment. More are replaced by one range over all.
const RANGES_MAX: usize = 8192;
/// The pages of longer ranges are not examined one by one.
const DIVISIBLE_BYTES_MAX: u64 = 1 << 20;

/// Byte ranges of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ranges {
    /// First byte and the byte behind the last one, in the order of the writes.
    ranges: Vec<(u64, u64)>,
}

impl Ranges {
    /// Adds the pages of `len` bytes at `offset`.
    pub(crate) fn add(&mut self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        let start = offset - offset % PAGE_BYTES;
        let end = offset.saturating_add(len);
        let end = end.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
        match self.ranges.last_mut() {
            Some(last) if start <= last.1 && end >= last.0 => {
                *last = (last.0.min(start), last.1.max(end));
            }
            _ => self.ranges.push((start, end)),
        }
        if self.ranges.len() > RANGES_MAX {
            self.sort();
            if self.ranges.len() > RANGES_MAX / 2 {
                let end = self.ranges.iter().map(|range| range.1).max().unwrap_or(0);
                self.ranges = vec![(self.ranges[0].0, end)];
            }
        }
    }

    /// Adds the ranges of `other`.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.ranges.extend_from_slice(&other.ranges);
    }

    /// Returns the pages of all ranges that are short enough to divide, by their first bytes.
    pub(crate) fn pages(&self) -> impl Iterator<Item = u64> {
        let divisible = self.ranges.iter().filter(|range| is_divisible(range));
        divisible.flat_map(|(start, end)| pages_between(*start, *end))
    }

    /// Returns whether some range is too long to be divided into pages.
    pub(crate) fn has_indivisible(&self) -> bool {
        !self.ranges.iter().all(is_divisible)
    }

    /// Returns these ranges without the pages that `is_left_out` accepts. Ranges that are too long
    /// stay whole.
    pub(crate) fn without(&self, is_left_out: impl Fn(u64) -> bool) -> Self {
        let ranges = self.ranges.iter().filter(|range| !is_divisible(range)).copied().collect();
        let mut left = Self { ranges };
        for page in self.pages().filter(|page| !is_left_out(*page)) {
            left.add(page, PAGE_BYTES);
        }
        left
    }

    /// Sorts the ranges and joins those that touch: a page that is written again counts once.
    pub(crate) fn sort(&mut self) {
        self.ranges.sort_unstable();
        self.ranges.dedup_by(|next, last| {
            let touches = next.0 <= last.1;
            if touches {
                last.1 = last.1.max(next.1);
            }
            touches
        });
    }

    /// Returns offset and length in bytes of each range.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.ranges.iter().map(|(start, end)| (*start, end - start))
    }

    /// Returns the bytes in all ranges; once they are [sorted](Self::sort), each page counts once.
    pub(crate) fn bytes(&self) -> u64 {
        self.ranges.iter().map(|(start, end)| end - start).sum()
    }
}

fn is_divisible((start, end): &(u64, u64)) -> bool {
    end - start <= DIVISIBLE_BYTES_MAX
}

/// Returns the pages that lie as a whole in `len` bytes at `offset`, by their first bytes.
pub(crate) fn whole_pages(offset: u64, len: u64) -> impl Iterator<Item = u64> {
    let end = offset.saturating_add(len);
    let start = offset.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
    pages_between(start, end - end % PAGE_BYTES)
}

/// Returns the pages that begin between `start`, the first byte of a page, and `end`.
fn pages_between(start: u64, end: u64) -> impl Iterator<Item = u64> {
    (start / PAGE_BYTES..end.div_ceil(PAGE_BYTES)).map(|number| number * PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appends_are_one_range_and_rewrites_count_once() {
        let mut ranges = Ranges::default();
        for number in 0..100 {
            ranges.add(number * 1000, 1000);
        }
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [(0, 102_400)]);
        ranges.add(1 << 20, 1);
        ranges.add(0, 4096);
        ranges.sort();
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [(0, 102_400), (1 << 20, 4096)]);
        assert_eq!(ranges.bytes(), 102_400 + 4096);
    }

    #[test]
    fn pages_can_be_left_out_of_ranges_that_are_not_too_long() {
        let mut ranges = Ranges::default();
        ranges.add(4096, 3 * 4096);
        ranges.add(1 << 30, DIVISIBLE_BYTES_MAX + 1);
        assert_eq!(ranges.pages().collect::<Vec<_>>(), [4096, 8192, 12_288]);
        assert!(ranges.has_indivisible());
        let mut left = ranges.without(|page| page == 8192 || page >= 1 << 30);
        left.sort();
        let rest = (1 << 30, DIVISIBLE_BYTES_MAX + 4096);
        assert_eq!(left.iter().collect::<Vec<_>>(), [(4096, 4096), (12_288, 4096), rest]);
    }

    #[test]
    fn a_page_is_whole_where_all_of_its_bytes_are() {
        let pages = |offset, len| whole_pages(offset, len).collect::<Vec<_>>();
        assert_eq!(pages(0, 4096), [0]);
        assert_eq!(pages(1, 8191), [4096]);
        assert_eq!(pages(4095, 4097), [4096]);
        assert!(pages(4096, 4095).is_empty());
        assert!(pages(1, 4096).is_empty());
        assert!(pages(u64::MAX - 1, 1).is_empty());
    }

    #[test]
    fn too_many_ranges_become_one() {
        let mut ranges = Ranges::default();
        for number in 0..=RANGES_MAX as u64 {
            ranges.add((RANGES_MAX as u64 - number) * 8192, 1);
        }
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [(0, RANGES_MAX as u64 * 8192 + 4096)]);
        ranges.add(u64::MAX - 1, 1);
        assert!(ranges.bytes() > 0, "an offset at the end of all numbers");
    }
}
