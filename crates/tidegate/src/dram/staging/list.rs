//! Doubly linked lists of slot numbers over one array of links: a slot is in at most one list of an
//! array.

use super::super::slots::NO_SLOT;

/// The links of the slots `0..count`, for any number of lists that share no slot.
pub(super) struct Links(Box<[Link]>);

#[derive(Clone, Copy)]
struct Link {
    previous: u32,
    next: u32,
}

/// A list: the first slot to the last one.
#[derive(Debug)]
pub(super) struct List {
    first: u32,
    last: u32,
    len: u32,
}

impl Links {
    pub(super) fn new(count: u32) -> Self {
        Self((0..count).map(|_| Link { previous: NO_SLOT, next: NO_SLOT }).collect())
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

impl List {
    pub(super) const EMPTY: Self = Self { first: NO_SLOT, last: NO_SLOT, len: 0 };

    /// Number of slots.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn first(&self) -> Option<u32> {
        some(self.first)
    }

    /// The slots from the first to the last.
    pub(super) fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = u32> + use<'a> {
        std::iter::successors(some(self.first), |&slot| some(links.0[slot as usize].next))
    }

    /// Adds `slot`, which is in no list, as the last one.
    pub(super) fn push_last(&mut self, links: &mut Links, slot: u32) {
        links.0[slot as usize] = Link { previous: self.last, next: NO_SLOT };
        match some(self.last) {
            Some(last) => links.0[last as usize].next = slot,
            None => self.first = slot,
        }
        self.last = slot;
        self.len += 1;
    }

    /// Takes `slot`, which is in this list, out.
    pub(super) fn remove(&mut self, links: &mut Links, slot: u32) {
        let Link { previous, next } = links.0[slot as usize];
        match some(previous) {
            Some(previous) => links.0[previous as usize].next = next,
            None => self.first = next,
        }
        match some(next) {
            Some(next) => links.0[next as usize].previous = previous,
            None => self.last = previous,
        }
        self.len -= 1;
    }
}

fn some(slot: u32) -> Option<u32> {
    (slot != NO_SLOT).then_some(slot)
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    fn all(list: &List, links: &Links) -> Vec<u32> {
        list.iter(links).collect()
    }

    #[test]
    fn slots_come_in_the_order_they_were_added_in() {
        let (mut links, mut list) = (Links::new(4), List::EMPTY);
        for slot in [2, 0, 3, 1] {
            list.push_last(&mut links, slot);
        }
        assert_eq!((all(&list, &links), list.len()), (vec![2, 0, 3, 1], 4));
        list.remove(&mut links, 0);
        assert_eq!(all(&list, &links), [2, 3, 1]);
        list.remove(&mut links, 2);
        list.remove(&mut links, 1);
        assert_eq!((all(&list, &links), list.first()), (vec![3], Some(3)));
        list.remove(&mut links, 3);
        assert!(list.is_empty() && list.first().is_none());
    }

    #[test]
    fn lists_over_the_same_links_keep_apart() {
        let (mut links, mut one, mut other) = (Links::new(4), List::EMPTY, List::EMPTY);
        for slot in 0..4 {
            let list = if slot % 2 == 0 { &mut one } else { &mut other };
            list.push_last(&mut links, slot);
        }
        one.remove(&mut links, 0);
        other.push_last(&mut links, 0);
        assert_eq!((all(&one, &links), all(&other, &links)), (vec![2], vec![1, 3, 0]));
        assert_eq!(links.bytes(), 4 * 8);
    }
}
