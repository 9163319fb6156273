//! Least recently used first: Open CAS's eviction policy.

use super::Replacement;

/// Slots in the order of their last use, as a list in an array: 8 bytes a slot.
pub struct Lru {
    /// For each slot the older and the newer one; the last entry is both ends of the list.
    links: Box<[[u32; 2]]>,
}

const OLDER: usize = 0;
const NEWER: usize = 1;
/// Link of a slot that is in no list.
const NOWHERE: u32 = u32::MAX;

impl Lru {
    /// For `slots` slots, none of which holds a page.
    pub fn new(slots: u32) -> Self {
        let mut links = vec![[NOWHERE; 2]; slots as usize + 1];
        links[slots as usize] = [slots; 2];
        Self { links: links.into() }
    }

    fn end(&self) -> u32 {
        u32::try_from(self.links.len() - 1).unwrap_or(NOWHERE)
    }
}

impl Replacement for Lru {
    fn insert(&mut self, slot: u32) {
        let end = self.end();
        let newest = self.links[end as usize][OLDER];
        self.links[slot as usize] = [newest, end];
        self.links[newest as usize][NEWER] = slot;
        self.links[end as usize][OLDER] = slot;
    }

    fn touch(&mut self, slot: u32, _write: bool) {
        self.remove(slot);
        self.insert(slot);
    }

    fn remove(&mut self, slot: u32) {
        let [older, newer] = std::mem::replace(&mut self.links[slot as usize], [NOWHERE; 2]);
        if older != NOWHERE {
            self.links[older as usize][NEWER] = newer;
            self.links[newer as usize][OLDER] = older;
        }
    }

    fn victims(&mut self, n: usize, out: &mut Vec<u32>) {
        let end = self.end();
        let oldest = self.links[end as usize][NEWER];
        let newer = |slot: &u32| Some(self.links[*slot as usize][NEWER]);
        let order = std::iter::successors(Some(oldest), newer);
        out.extend(order.take_while(|slot| *slot != end).take(n));
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_queue_in_which_what_is_touched_goes_to_the_end(
            steps in prop::collection::vec((0_u32..8, 0..3), 0..64),
        ) {
            let (mut lru, mut model) = (Lru::new(8), VecDeque::new());
            for (slot, step) in steps {
                let at = model.iter().position(|it| *it == slot);
                match (step, at) {
                    (0, None) => {
                        lru.insert(slot);
                        model.push_back(slot);
                    }
                    (1, Some(at)) => {
                        lru.touch(slot, true);
                        model.remove(at);
                        model.push_back(slot);
                    }
                    (2, at) => {
                        lru.remove(slot);
                        at.and_then(|at| model.remove(at));
                    }
                    _ => {}
                }
                let mut found = Vec::new();
                lru.victims(9, &mut found);
                prop_assert_eq!(&found, &Vec::from(model.clone()));
            }
        }
    }
}
