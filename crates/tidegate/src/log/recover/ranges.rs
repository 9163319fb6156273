//! Sets of a file's bytes.

use std::ops::Range;

/// Ranges of bytes in order, which neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// Adds the bytes of `range`.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let from = self.0.partition_point(|it| it.end < range.start);
        let to = self.0.partition_point(|it| it.start <= range.end);
        let joined = self.0[from..to]
            .iter()
            .fold(range, |joined, it| joined.start.min(it.start)..joined.end.max(it.end));
        self.0.splice(from..to, [joined]);
    }

    /// Returns the parts of `range` that are in the set.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let from = self.0.partition_point(|it| it.end <= range.start);
        let overlapping = self.0[from..].iter().take_while(move |it| it.start < range.end);
        let parts = overlapping.map(move |it| it.start.max(range.start)..it.end.min(range.end));
        parts.filter(|part| !part.is_empty())
    }

    /// Returns whether all bytes of `range` are in the set.
    pub fn contain(&self, range: Range<u64>) -> bool {
        range.is_empty() || self.within(range.clone()).eq([range])
    }
}

impl From<Range<u64>> for Ranges {
    fn from(range: Range<u64>) -> Self {
        [range].into_iter().collect()
    }
}

impl FromIterator<Range<u64>> for Ranges {
    fn from_iter<I: IntoIterator<Item = Range<u64>>>(ranges: I) -> Self {
        let mut all = Self::default();
        ranges.into_iter().for_each(|range| all.insert(range));
        all
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_touches_is_joined() {
        let ranges: Ranges = [4..6, 0..2, 2..4, 8..9].into_iter().collect();
        assert_eq!(ranges, Ranges(vec![0..6, 8..9]));
        assert_eq!(ranges.within(1..1).count(), 0);
        assert!(ranges.contain(1..6) && !ranges.contain(5..7) && ranges.contain(7..7));
    }

    proptest! {
        #[test]
        fn a_set_has_the_bytes_that_were_added(
            added in prop::collection::vec((0_u64..40, 0_u64..10), 0..12),
            (start, len) in (0_u64..40, 0_u64..20),
        ) {
            let ranges: Ranges = added.iter().map(|(start, len)| *start..start + len).collect();
            let has = |byte| added.iter().any(|(start, len)| (*start..start + len).contains(&byte));
            let expected: Vec<_> = (start..start + len).filter(|byte| has(*byte)).collect();
            let found: Vec<_> = ranges.within(start..start + len).flatten().collect();
            prop_assert_eq!(&found, &expected);
            prop_assert_eq!(ranges.contain(start..start + len), found.len() as u64 == len);
            prop_assert!(ranges.0.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }
}
