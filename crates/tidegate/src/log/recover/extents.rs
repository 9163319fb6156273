//! What of a file's bytes the log knows: the newest of each byte.

use std::collections::BTreeMap;

/// Where the bytes of an extent come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// From this position of the log on.
    Log(u64),
    /// They are zero.
    Zero,
}

impl Content {
    /// Where in the log they are.
    fn position(self) -> Option<u64> {
        match self {
            Self::Log(position) => Some(position),
            Self::Zero => None,
        }
    }

    /// The content `bytes` further on.
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
    /// First byte after it.
    pub end: u64,
    /// What its bytes are.
    pub content: Content,
}

impl Extent {
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }
}

/// Extents that do not overlap, by their starts.
#[derive(Debug, Default)]
pub(in crate::log) struct ExtentMap {
    extents: BTreeMap<u64, (u64, Content)>,
}

impl ExtentMap {
    /// Puts an extent over what is there.
    pub(in crate::log) fn insert(&mut self, extent: Extent) {
        self.insert_noting(extent, &mut Vec::new());
    }

    /// The same; `parted` gets the positions of the log's extents of which a part stays.
    pub(super) fn insert_noting(&mut self, extent: Extent, parted: &mut Vec<u64>) {
        if extent.start >= extent.end {
            return;
        }
        // They are apart, so the last one that begins before its end tells whether any is under it; mostly none is.
        let before = self.extents.range(..extent.end).next_back();
        if before.is_some_and(|(_, (end, _))| *end > extent.start) {
            self.make_room(extent.start, extent.end, parted);
        }
        self.extents.insert(extent.start, (extent.end, extent.content));
    }

    /// Puts extents over each other, in their order, into an empty map; `parted` as of [`insert_noting`](Self::insert_noting).
    pub(super) fn of(extents: &[Extent], parted: &mut Vec<u64>) -> Self {
        let mut this = Self::default();
        match newest_of_same(extents) {
            // What is sorted makes a tree at once.
            Some(apart) => {
                let apart = apart.iter().map(|it| (it.start, (it.end, it.content)));
                this.extents = apart.collect();
            }
            None => extents.iter().for_each(|extent| this.insert_noting(*extent, parted)),
        }
        this
    }

    fn make_room(&mut self, from: u64, to: u64, parted: &mut Vec<u64>) {
        self.split(from, parted);
        self.split(to, parted);
        while let Some((&start, _)) = self.extents.range(from..to).next() {
            self.extents.remove(&start);
        }
    }

    /// Drops all from `size` on; `parted` as of [`insert_noting`](Self::insert_noting).
    pub(super) fn cut(&mut self, size: u64, parted: &mut Vec<u64>) {
        self.split(size, parted);
        self.extents.split_off(&size);
    }

    /// Makes an extent that goes across `at` two.
    fn split(&mut self, at: u64, parted: &mut Vec<u64>) {
        let Some((&start, &(end, content))) = self.extents.range(..at).next_back() else { return };
        if end > at {
            parted.extend(content.position());
            self.extents.insert(start, (at, content));
            self.extents.insert(at, (end, content.skip(at - start)));
        }
    }

    /// Drops the extents that `keep` does not want.
    pub(in crate::log) fn retain(&mut self, keep: impl Fn(Content) -> bool) {
        self.extents.retain(|_, (_, content)| keep(*content));
    }

    /// There are none.
    pub(in crate::log) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// All extents in order.
    pub(in crate::log) fn iter(&self) -> impl Iterator<Item = Extent> {
        self.extents.iter().map(|(&start, &(end, content))| Extent { start, end, content })
    }

    /// All extents in order.
    pub(super) fn into_vec(self) -> Vec<Extent> {
        let extents = self.extents.into_iter();
        extents.map(|(start, (end, content))| Extent { start, end, content }).collect()
    }
}

/// Of each range the last extent, sorted; none, where ranges overlap that are not the same. Blocks of a file never do.
fn newest_of_same(extents: &[Extent]) -> Option<Vec<Extent>> {
    let mut sorted: Vec<_> = extents.iter().filter(|it| it.start < it.end).copied().collect();
    // Stable: of one place the last one stays the last.
    sorted.sort_by_key(|extent| extent.start);
    let mut apart: Vec<Extent> = Vec::with_capacity(sorted.len());
    for extent in sorted {
        match apart.last_mut() {
            Some(last) if (last.start, last.end) == (extent.start, extent.end) => *last = extent,
            Some(last) if last.end > extent.start => return None,
            _ => apart.push(extent),
        }
    }
    Some(apart)
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
        let mut parted = Vec::new();
        map.cut(50, &mut parted);
        assert_eq!((list(map), parted), (vec![(0, 50, Content::Log(0))], vec![0]));
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
    fn what_stays_in_part_is_noted_and_what_goes_or_stays_whole_is_not() {
        let mut map = map(&[
            (0, 8, Content::Log(640)),
            (8, 16, Content::Log(1280)),
            (16, 24, Content::Zero),
            (24, 32, Content::Log(1920)),
        ]);
        let mut put = |start, end| {
            let mut parted = Vec::new();
            map.insert_noting(Extent { start, end, content: Content::Zero }, &mut parted);
            parted
        };
        assert!(put(8, 16).is_empty());
        assert_eq!(put(4, 20), [640]);
        assert_eq!(put(26, 28), [1920, 1922]);
    }

    #[test]
    fn many_at_once_are_as_one_by_one() {
        let (a, b) = (Content::Log(640), Content::Log(6400));
        let blocks = [(8, 16, a), (0, 8, a), (16, 16, b), (8, 16, b), (20, 24, Content::Zero)];
        let crossing = [(8, 16, a), (0, 8, a), (4, 12, b)];
        let inside = [(0, 16, a), (0, 8, b)];
        for extents in [&blocks[..], &crossing, &inside, &[]] {
            let as_extent = |&(start, end, content)| Extent { start, end, content };
            let given: Vec<_> = extents.iter().map(as_extent).collect();
            let mut parted = Vec::new();
            let at_once = ExtentMap::of(&given, &mut parted);
            assert_eq!(list(at_once), list(map(extents)));
            assert_eq!(
                parted.is_empty(),
                extents.len() != crossing.len() && extents.len() != inside.len()
            );
        }
    }

    #[test]
    fn nothing_takes_no_place() {
        assert_eq!(list(map(&[(5, 5, Content::Zero)])), vec![]);
    }
}
