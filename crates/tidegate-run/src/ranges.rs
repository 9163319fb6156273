//! The pages of a file that were written, as ranges of bytes.

/// Ranges begin and end at multiples of this: the kernel writes back whole pages.
const PAGE_BYTES: u64 = 4096;
/// Ranges of one file in one segment; of more, one range from the first byte to the last is kept.
const RANGES_MAX: usize = 8192;

/// Byte ranges of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ranges {
    /// First byte and the byte behind the last one, in the order in which they were written.
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

    /// Sorts the ranges and joins those that touch: what is written again counts once.
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

    /// Offset and length in bytes of each range.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.ranges.iter().map(|(start, end)| (*start, end - start))
    }

    /// Bytes in all ranges; once they are [sorted](Self::sort), in the pages that they cover.
    pub(crate) fn bytes(&self) -> u64 {
        self.ranges.iter().map(|(start, end)| end - start).sum()
    }
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
