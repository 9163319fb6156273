//! The eviction order of a shard's pages, and the share of the shard that each IO class uses.
//!
//! Each class has its own order, which is created for its first page. The table of classes decides
//! which class gives up slots first ([`classes`](crate::cache::policy::classes)).

use std::sync::Arc;

use crate::cache::policy::classes::{self, CLASSES, Classes};
use crate::cache::policy::{Replacement, ReplacementEntry};
use crate::cache::store::layout::UNITS;

/// The space of a class's pages and records, in units: [`UNITS`] for a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::cache) struct ClassUsage {
    pub(in crate::cache) live_units: u64,
    pub(in crate::cache) dirty_units: u64,
}

impl ClassUsage {
    /// Returns the number of slots in use.
    pub(in crate::cache) fn live(self) -> u64 {
        self.live_units.div_ceil(UNITS.into())
    }

    /// Returns the number of dirty slots.
    pub(in crate::cache) fn dirty(self) -> u64 {
        self.dirty_units.div_ceil(UNITS.into())
    }
}

/// The orders of one shard.
pub(in crate::cache) struct Orders {
    replacement: &'static ReplacementEntry,
    /// Number of slots of the shard.
    slots: u32,
    /// Number of entries of an order, including entries for parts of slots.
    capacity: u32,
    /// The classes; `None` while all pages are of class 0.
    classes: Option<Arc<Classes>>,
    /// The orders, by class.
    of: Vec<Option<Box<dyn Replacement>>>,
    pub(in crate::cache) usage: [ClassUsage; CLASSES],
}

impl Orders {
    /// Returns empty orders for `slots` slots, without classes.
    pub(in crate::cache) fn new(replacement: &'static ReplacementEntry, slots: u32) -> Self {
        let of = vec![Some((replacement.create)(slots, slots))];
        let usage = [ClassUsage::default(); CLASSES];
        Self { replacement, slots, capacity: slots, classes: None, of, usage }
    }

    /// Returns the order of `class`, which is created if there is none.
    pub(in crate::cache) fn of(&mut self, class: u8) -> &mut dyn Replacement {
        let class = usize::from(class);
        if self.of.len() <= class {
            self.of.resize_with(class + 1, || None);
        }
        let (create, entries, slots) = (self.replacement.create, self.capacity, self.slots);
        &mut **self.of[class].get_or_insert_with(|| create(entries, slots))
    }

    /// Sets the classes and empties all orders. With `None`, all pages are of class 0.
    pub(in crate::cache) fn set_classes(&mut self, classes: Option<Arc<Classes>>) {
        self.classes = classes;
        self.of.clear();
    }

    /// Sets the replacement policy and empties all orders.
    pub(in crate::cache) fn set_replacement(&mut self, replacement: &'static ReplacementEntry) {
        self.replacement = replacement;
        self.of.clear();
    }

    /// Sets the number of slots and the number of entries of an order, and empties all orders.
    pub(in crate::cache) fn resize(&mut self, slots: u32, capacity: u32) {
        (self.slots, self.capacity) = (slots, capacity);
        self.of.clear();
    }

    /// Returns `class` if it exists, and otherwise class 0.
    pub(in crate::cache) fn known(&self, class: u8) -> u8 {
        let is_known = self.classes.as_ref().is_some_and(|it| it.get(class).is_some());
        if is_known { class } else { 0 }
    }

    /// Appends up to `n` slots to `out`, in eviction order, of the class that gives up slots first.
    pub(in crate::cache) fn victims(&mut self, n: usize, out: &mut Vec<u32>) {
        let Some(classes) = &self.classes else { return self.of(0).victims(n, out) };
        let surplus = classes.surplus(classes.foremost(), &self.live(), self.slots.into());
        if let Some(classes::Surplus { id, slots }) = surplus.first() {
            let most = usize::try_from(*slots).unwrap_or(usize::MAX).min(n);
            self.of(*id).victims(most, out);
        }
    }

    /// Appends up to `n` slots of each class to `out`.
    pub(in crate::cache) fn victims_of_each(&mut self, n: usize, out: &mut Vec<u32>) {
        for order in self.of.iter_mut().flatten() {
            order.victims(n, out);
        }
    }

    /// Appends up to `n` slots of each class to `out`, those that leave next. The orders stay.
    pub(in crate::cache) fn coldest(&self, n: usize, out: &mut Vec<u32>) {
        for order in self.of.iter().flatten() {
            order.coldest(n, out);
        }
    }

    /// Decides whether a request of `class` that misses `pages` pages may insert them. With
    /// `is_short`, the only free slots are those that eviction keeps in reserve.
    pub(in crate::cache) fn admission(
        &self,
        class: u8,
        pages: u32,
        is_short: bool,
    ) -> classes::Admission {
        let Some(classes) = &self.classes else { return classes::Admission::Insert };
        let (class, slots) = (self.known(class), self.slots.into());
        let mut live = self.live();
        // The admission decides about one page, with the other pages already counted.
        live[usize::from(class)] += u64::from(pages.saturating_sub(1));
        match classes.admission(class, &live, slots) {
            // Leaves the remaining free slots to classes that other classes give up slots to.
            classes::Admission::Insert
                if is_short && classes.surplus(class, &live, slots).is_empty() =>
            {
                classes::Admission::Bypass
            }
            admission => admission,
        }
    }

    /// Returns the number of slots that `class` may use.
    pub(in crate::cache) fn share(&self, class: u8) -> u32 {
        let class = self.classes.as_ref().and_then(|classes| classes.get(class));
        let max_pct = class.map_or(100, |class| u64::from(class.max_pct));
        u32::try_from(u64::from(self.slots) * max_pct / 100).unwrap_or(u32::MAX)
    }

    fn live(&self) -> [u64; CLASSES] {
        self.usage.map(ClassUsage::live)
    }
}
