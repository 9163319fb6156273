//! The shares of the classes in the cache, and the order of giving up slots.

use std::cmp::Reverse;

use super::{CLASSES, Class, Classes, Priority};

/// Rights of a request of a class that misses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Take free slots, or slots of the classes in [`Classes::surplus`].
    Insert,
    /// Take slots of its own class only, which uses its whole share.
    ReplaceOwn,
    /// Go around the cache: the class has no share.
    Bypass,
}

/// Slots that a class gives up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Surplus {
    /// The id of the class.
    pub id: u8,
    /// Most slots to take.
    pub slots: u64,
}

impl Classes {
    /// Returns the rights of a request of class `id` that misses, in a cache of `slots` slots.
    /// `used` counts the slots of each class.
    pub fn admission(&self, id: u8, used: &[u64; CLASSES], slots: u64) -> Admission {
        let Some(class) = self.get(id) else { return Admission::Bypass };
        match share(slots, class.max_pct) {
            0 => Admission::Bypass,
            max if used_by(class, used) >= max => Admission::ReplaceOwn,
            _ => Admission::Insert,
        }
    }

    /// Returns the classes that give up slots for class `id`, in this order.
    ///
    /// Slots that a class uses beyond its allocation come first. Then come, down to their minimums,
    /// the classes that are not more important than `id`, the least important first. Pinned classes
    /// give up slots for pinned ones only.
    pub fn surplus(&self, id: u8, used: &[u64; CLASSES], slots: u64) -> Vec<Surplus> {
        let mut order: Vec<_> = self.iter().collect();
        order.sort_by_key(|class| (Reverse(class.priority), class.id));
        let own = self.get(id).map_or(Priority::Level(u8::MAX), |class| class.priority);
        let over =
            |class: &&Class| used_by(class, used).saturating_sub(share(slots, class.max_pct));
        let rest = |class: &&Class| {
            let keeps = if class.id == id { 0 } else { share(slots, class.min_pct) };
            let rest = used_by(class, used) - over(class);
            if class.priority < own { 0 } else { rest.saturating_sub(keeps) }
        };
        let found = order.iter().map(|class| (class.id, over(class)));
        let found = found.chain(order.iter().map(|class| (class.id, rest(class))));
        found.filter(|it| it.1 > 0).map(|(id, slots)| Surplus { id, slots }).collect()
    }
}

fn used_by(class: &Class, used: &[u64; CLASSES]) -> u64 {
    used.get(usize::from(class.id)).copied().unwrap_or_default()
}

/// Returns `pct` percent of `slots`.
fn share(slots: u64, pct: u8) -> u64 {
    let share = u128::from(slots) * u128::from(pct) / 100;
    u64::try_from(share).unwrap_or(u64::MAX)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::{prop_assert, prop_assert_eq, proptest};

    use super::*;

    const TABLE: &str = "IO class id,IO class name,Eviction priority,Allocation,Cache mode,Minimum\n\
        0,unclassified,200,1.00,,\n\
        1,lba:eq:1,10,0.50,,0.10\n\
        2,lba:eq:2,100,0.30,,\n\
        3,lba:eq:3,pinned,0.20,,\n\
        4,lba:eq:4,50,0.00,,\n";

    fn classes() -> Classes {
        Classes::parse(TABLE, &[]).unwrap()
    }

    fn used(slots: [u64; 5]) -> [u64; CLASSES] {
        let mut used = [0; CLASSES];
        used[..5].copy_from_slice(&slots);
        used
    }

    #[test]
    fn a_class_is_admitted_up_to_its_allocation() {
        let admission = |id, slots| classes().admission(id, &used(slots), 1000);
        assert_eq!(admission(2, [0, 0, 299, 0, 0]), Admission::Insert);
        assert_eq!(admission(2, [0, 0, 300, 0, 0]), Admission::ReplaceOwn);
        assert_eq!(admission(4, [0; 5]), Admission::Bypass);
        assert_eq!(admission(5, [0; 5]), Admission::Bypass, "there is no class 5");
    }

    #[test]
    fn the_least_important_give_up_first_and_never_for_less_important_ones() {
        let surplus = |id| {
            let found = classes().surplus(id, &used([400, 300, 200, 100, 0]), 1000);
            found.iter().map(|it| (it.id, it.slots)).collect::<Vec<_>>()
        };
        assert_eq!(surplus(0), [(0, 400)]);
        assert_eq!(surplus(2), [(0, 400), (2, 200)]);
        assert_eq!(surplus(1), [(0, 400), (2, 200), (1, 300)]);
        assert_eq!(surplus(3), [(0, 400), (2, 200), (1, 200), (3, 100)]);
    }

    #[test]
    fn what_is_beyond_the_allocation_goes_first_even_if_pinned() {
        let found = classes().surplus(0, &used([100, 0, 350, 250, 0]), 1000);
        let found: Vec<_> = found.iter().map(|it| (it.id, it.slots)).collect();
        assert_eq!(found, [(2, 50), (3, 50), (0, 100)]);
    }

    proptest! {
        #[test]
        fn no_class_gives_up_more_than_it_has(id in 0..8_u8, slots: [u64; 5], all: u64) {
            let found = classes().surplus(id, &used(slots), all);
            for at in 0..5_u8 {
                let total: u64 = found.iter().filter(|it| it.id == at).map(|it| it.slots).sum();
                prop_assert!(total <= slots[usize::from(at)]);
            }
            let pinned: u64 = found.iter().filter(|it| it.id == 3).map(|it| it.slots).sum();
            if id != 3 {
                prop_assert_eq!(pinned, slots[3].saturating_sub(share(all, 20)));
            }
        }
    }

    #[test]
    fn shares_do_not_overflow() {
        assert_eq!(share(u64::MAX, 100), u64::MAX);
        assert_eq!(share(99, 1), 0);
    }
}
