//! Doubly linked lists of slot numbers over one array of links. A slot is in at most one list of an
//! array, and carries a mark of four bits for its owner.
//!
//! A slot takes 8 bytes: two numbers of 30 bits and two pairs of bits.

/// Maximum number of slots of an array of links.
pub const MAX_SLOTS: u32 = UNLISTED;

/// Mask of the bits of a number. As a number, it marks the end of a list.
const NO_SLOT: u32 = (1 << 30) - 1;

/// As the previous slot, marks a slot that is in no list.
const UNLISTED: u32 = NO_SLOT - 1;

/// The links of the slots `0..count`, for any number of lists that share no slot.
pub struct Links(Vec<Link>);

/// The slots before and after a slot, each with two bits of the mark above.
#[derive(Clone, Copy)]
struct Link {
    previous: u32,
    next: u32,
}

const UNLINKED: Link = Link { previous: UNLISTED, next: NO_SLOT };

/// A list of slots.
#[derive(Debug)]
pub struct List {
    first: u32,
    last: u32,
    len: u32,
}

impl Links {
    /// Returns links of `count` slots, which are in no list.
    ///
    /// # Panics
    /// Panics if `count` is greater than [`MAX_SLOTS`].
    pub fn new(count: u32) -> Self {
        assert!(count <= MAX_SLOTS, "{count} slots; links number at most {MAX_SLOTS}");
        Self(vec![UNLINKED; count as usize])
    }

    /// Adds a slot, which is in no list. Its number is the next one.
    ///
    /// # Panics
    /// Panics if there are [`MAX_SLOTS`].
    pub fn add(&mut self) {
        assert!(self.0.len() < MAX_SLOTS as usize, "links number at most {MAX_SLOTS} slots");
        self.0.push(UNLINKED);
    }

    /// Returns the size of the links in bytes.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// Returns whether `slot` is in a list.
    pub fn is_listed(&self, slot: u32) -> bool {
        self.0[slot as usize].previous & NO_SLOT != UNLISTED
    }

    /// Returns the mark of `slot` that [`set_mark`](Self::set_mark) stored last, or 0.
    pub fn mark(&self, slot: u32) -> u32 {
        let Link { previous, next } = self.0[slot as usize];
        (previous >> 30) << 2 | next >> 30
    }

    /// Stores the low four bits of `mark` with `slot`. Lists do not change them.
    pub fn set_mark(&mut self, slot: u32, mark: u32) {
        let link = &mut self.0[slot as usize];
        link.previous = link.previous & NO_SLOT | (mark >> 2) << 30;
        link.next = link.next & NO_SLOT | mark << 30;
    }

    /// Returns the slot after `slot` in its list.
    pub fn next(&self, slot: u32) -> Option<u32> {
        some(self.0[slot as usize].next & NO_SLOT)
    }

    /// Returns the slot before `slot`, which is in a list.
    pub fn previous(&self, slot: u32) -> Option<u32> {
        some(self.0[slot as usize].previous & NO_SLOT)
    }

    fn set_next(&mut self, slot: u32, next: u32) {
        let link = &mut self.0[slot as usize];
        link.next = link.next & !NO_SLOT | next;
    }

    fn set_previous(&mut self, slot: u32, previous: u32) {
        let link = &mut self.0[slot as usize];
        link.previous = link.previous & !NO_SLOT | previous;
    }
}

impl List {
    /// A list without slots.
    pub const EMPTY: Self = Self { first: NO_SLOT, last: NO_SLOT, len: 0 };

    /// Returns the number of slots.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Returns whether the list has no slots.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the first slot.
    pub fn first(&self) -> Option<u32> {
        some(self.first)
    }

    /// Returns the last slot.
    pub fn last(&self) -> Option<u32> {
        some(self.last)
    }

    /// Returns the slots from the first to the last.
    pub fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = u32> + use<'a> {
        std::iter::successors(self.first(), |&slot| links.next(slot))
    }

    /// Appends `slot`, which is in no list.
    pub fn push_last(&mut self, links: &mut Links, slot: u32) {
        links.set_previous(slot, self.last);
        links.set_next(slot, NO_SLOT);
        match self.last() {
            Some(last) => links.set_next(last, slot),
            None => self.first = slot,
        }
        self.last = slot;
        self.len += 1;
    }

    /// Removes `slot`, which is in this list.
    pub fn remove(&mut self, links: &mut Links, slot: u32) {
        let (previous, next) = (links.previous(slot), links.next(slot));
        match previous {
            Some(previous) => links.set_next(previous, next.unwrap_or(NO_SLOT)),
            None => self.first = next.unwrap_or(NO_SLOT),
        }
        match next {
            Some(next) => links.set_previous(next, previous.unwrap_or(NO_SLOT)),
            None => self.last = previous.unwrap_or(NO_SLOT),
        }
        links.set_previous(slot, UNLISTED);
        self.len -= 1;
    }

    /// Replaces `old` of this list by `new`, which is in no list and gets the mark of `old`.
    pub fn replace(&mut self, links: &mut Links, old: u32, new: u32) {
        links.0[new as usize] = links.0[old as usize];
        match links.previous(old) {
            Some(previous) => links.set_next(previous, new),
            None => self.first = new,
        }
        match links.next(old) {
            Some(next) => links.set_previous(next, new),
            None => self.last = new,
        }
        links.set_previous(old, UNLISTED);
    }

    /// Makes `slot`, which is in this list, the last one.
    pub fn move_last(&mut self, links: &mut Links, slot: u32) {
        if self.last != slot {
            self.remove(links, slot);
            self.push_last(links, slot);
        }
    }
}

fn some(slot: u32) -> Option<u32> {
    (slot != NO_SLOT).then_some(slot)
}

#[cfg(all(test, not(loom)))]
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

    #[test]
    fn a_slot_takes_the_position_and_the_mark_of_another() {
        let (mut links, mut list) = (Links::new(6), List::EMPTY);
        for slot in 0..3 {
            links.set_mark(slot, 5 + slot);
            list.push_last(&mut links, slot);
        }
        for slot in 0..3 {
            list.replace(&mut links, slot, slot + 3);
            assert_eq!((links.is_listed(slot), links.mark(slot + 3)), (false, 5 + slot));
        }
        assert_eq!((all(&list, &links), list.len(), list.last()), (vec![3, 4, 5], 3, Some(5)));
        assert_eq!([3, 4, 5].map(|slot| links.previous(slot)), [None, Some(3), Some(4)]);
    }

    #[test]
    fn marks_and_lists_leave_each_other_alone() {
        let (mut links, mut list) = (Links::new(3), List::EMPTY);
        for slot in 0..3 {
            links.set_mark(slot, 13 + slot);
            assert!(!links.is_listed(slot));
            list.push_last(&mut links, slot);
        }
        list.move_last(&mut links, 0);
        links.set_mark(2, 6);
        assert_eq!(all(&list, &links), [1, 2, 0]);
        list.remove(&mut links, 1);
        assert_eq!([0, 1, 2].map(|slot| links.mark(slot)), [13, 14, 6]);
        assert_eq!([0, 1, 2].map(|slot| links.is_listed(slot)), [true, false, true]);
        assert_eq!((list.last(), links.previous(0), links.previous(2)), (Some(0), Some(2), None));
    }
}
