//! The contents of a file that the log knows: the newest one of each byte.

use std::collections::BTreeMap;
use std::ops::Range;

/// The source of an extent's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// The log, from this position on.
    Log(u64),
    /// Zeroes.
    Zero,
}

impl Content {
    /// Returns the content `bytes` further on.
    fn skip(self, bytes: u64) -> Self {
        match self {
            Self::Log(position) => Self::Log(position.saturating_add(bytes)),
            Self::Zero => Self::Zero,
        }
    }
}

/// A range of a file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte of the file.
    pub start: u64,
    /// First byte after the extent.
    pub end: u64,
    /// Source of the bytes.
    pub content: Content,
}

impl Extent {
    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Returns the part of the extent at `range`, which must lie inside.
    pub(super) fn part(&self, range: Range<u64>) -> Self {
        let content = self.content.skip(range.start - self.start);
        Self { start: range.start, end: range.end, content }
    }
}

/// Extents that do not overlap, by their starts.
#[derive(Debug, Default)]
pub(super) struct ExtentMap {
    extents: BTreeMap<u64, (u64, Content)>,
}

impl ExtentMap {
    /// Inserts an extent over earlier ones.
    pub(super) fn insert(&mut self, extent: Extent) {
        if extent.start >= extent.end {
            return;
        }
        // Extents do not overlap: only the last one that starts before the new end needs a check.
        let before = self.extents.range(..extent.end).next_back();
        if before.is_some_and(|(_, (end, _))| *end > extent.start) {
            self.clear(extent.start, extent.end);
        }
        self.extents.insert(extent.start, (extent.end, extent.content));
    }

    fn clear(&mut self, from: u64, to: u64) {
        self.split(from);
        self.split(to);
        while let Some((&start, _)) = self.extents.range(from..to).next() {
            self.extents.remove(&start);
        }
    }

    /// Drops all bytes from `size` on.
    pub(super) fn cut(&mut self, size: u64) {
        self.split(size);
        self.extents.split_off(&size);
    }

    /// Splits the extent that contains `at`.
    fn split(&mut self, at: u64) {
        let Some((&start, &(end, content))) = self.extents.range(..at).next_back() else { return };
        if end > at {
            self.extents.insert(start, (at, content));
            self.extents.insert(at, (end, content.skip(at - start)));
        }
    }

    /// Returns all extents in order.
    pub(super) fn into_vec(self) -> Vec<Extent> {
        let extents = self.extents.into_iter();
        extents.map(|(start, (end, content))| Extent { start, end, content }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(extents: &[(u64, u64, Content)]) -> ExtentMap {
        let mut map = ExtentMap::default();
        for &(start, end, content) in extents {
            map.insert(Extent { start, end, content });
        }
        map
    }

    fn list(map: ExtentMap) -> Vec<(u64, u64, Content)> {
        map.into_vec().into_iter().map(|it| (it.start, it.end, it.content)).collect()
    }

    #[test]
    fn the_newest_wins_and_the_rest_stays() {
        let map = map(&[(0, 100, Content::Log(1000)), (40, 60, Content::Log(5000))]);
        let expected = vec![
            (0, 40, Content::Log(1000)),
            (40, 60, Content::Log(5000)),
            (60, 100, Content::Log(1060)),
        ];
        assert_eq!(list(map), expected);
    }

    #[test]
    fn one_over_many_leaves_one() {
        let mut map =
            map(&[(0, 8, Content::Log(0)), (8, 16, Content::Log(64)), (20, 24, Content::Zero)]);
        map.insert(Extent { start: 0, end: 24, content: Content::Zero });
        assert_eq!(list(map), vec![(0, 24, Content::Zero)]);
    }

    #[test]
    fn a_cut_drops_what_is_behind_it() {
        let mut map = map(&[(0, 100, Content::Log(0)), (200, 300, Content::Zero)]);
        map.cut(50);
        assert_eq!(list(map), vec![(0, 50, Content::Log(0))]);
    }

    #[test]
    fn what_only_touches_stays_whole_and_what_overlaps_at_one_end_is_cut() {
        let left = map(&[(0, 8, Content::Log(0)), (8, 16, Content::Log(64))]);
        assert_eq!(list(left), vec![(0, 8, Content::Log(0)), (8, 16, Content::Log(64))]);
        let left = map(&[(8, 16, Content::Log(64)), (0, 9, Content::Log(0))]);
        assert_eq!(list(left), vec![(0, 9, Content::Log(0)), (9, 16, Content::Log(65))]);
        let left = map(&[(8, 16, Content::Log(64)), (10, 12, Content::Zero)]);
        let parts =
            vec![(8, 10, Content::Log(64)), (10, 12, Content::Zero), (12, 16, Content::Log(68))];
        assert_eq!(list(left), parts);
        let left = map(&[(8, 16, Content::Log(64)), (15, 20, Content::Zero)]);
        assert_eq!(list(left), vec![(8, 15, Content::Log(64)), (15, 20, Content::Zero)]);
    }

    #[test]
    fn nothing_takes_no_place() {
        assert_eq!(list(map(&[(5, 5, Content::Zero)])), vec![]);
    }
}
