//! The sets behind their locks, and the flags and waiters that go with each.

use crossbeam_utils::CachePadded;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::super::driven::Relax;
use super::flags::Flags;
use super::set::Set;

/// All sets of a tier.
pub(super) struct Sets {
    cells: Box<[CachePadded<Cell>]>,
    /// Sets in which an eviction may start.
    pub(super) ready: Flags,
    /// Sets that hold any slot.
    pub(super) occupied: Flags,
    /// Called in place of waiting for a change, where somebody else runs the threads.
    relax: Option<Relax>,
}

struct Cell {
    state: Mutex<Guarded>,
    changed: Condvar,
}

struct Guarded {
    set: Set,
    waiters: u32,
}

/// A set locked. Unlocking brings its flags up to date.
pub(super) struct SetGuard<'a> {
    sets: &'a Sets,
    number: usize,
    guard: MutexGuard<'a, Guarded>,
    was_ready: bool,
    was_empty: bool,
}

impl Sets {
    pub(super) fn new(sets: usize, relax: Option<Relax>) -> Self {
        let cell = || Cell {
            state: Mutex::new(Guarded { set: Set::new(), waiters: 0 }),
            changed: Condvar::new(),
        };
        Self {
            cells: (0..sets).map(|_| CachePadded::new(cell())).collect(),
            ready: Flags::new(sets),
            occupied: Flags::new(sets),
            relax,
        }
    }

    /// Number of sets.
    pub(super) fn count(&self) -> usize {
        self.cells.len()
    }

    /// Bytes of the sets themselves.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.cells)
    }

    /// Locks set `number`.
    pub(super) fn lock(&self, number: usize) -> SetGuard<'_> {
        let guard = self.cells[number].state.lock();
        let (was_ready, was_empty) = (guard.set.is_ready(), guard.set.is_empty());
        SetGuard { sets: self, number, guard, was_ready, was_empty }
    }
}

impl SetGuard<'_> {
    /// The state machine.
    pub(super) fn set(&mut self) -> &mut Set {
        &mut self.guard.set
    }

    /// Unlocks the set until it has changed, and locks it again.
    pub(super) fn wait(&mut self) {
        self.publish();
        if let Some(relax) = &self.sets.relax {
            MutexGuard::unlocked(&mut self.guard, &**relax);
        } else {
            self.guard.waiters += 1;
            self.sets.cells[self.number].changed.wait(&mut self.guard);
            self.guard.waiters -= 1;
        }
        self.was_ready = self.guard.set.is_ready();
        self.was_empty = self.guard.set.is_empty();
    }

    /// How many wait for this set to change.
    #[cfg(all(test, not(feature = "loom")))]
    pub(super) fn waiters(&self) -> u32 {
        self.guard.waiters
    }

    /// Wakes whoever waits for this set to change.
    pub(super) fn notify(&self) {
        if self.guard.waiters > 0 {
            self.sets.cells[self.number].changed.notify_all();
        }
    }

    fn publish(&mut self) {
        let (ready, empty) = (self.guard.set.is_ready(), self.guard.set.is_empty());
        if ready != self.was_ready {
            self.sets.ready.put(self.number, ready);
        }
        if empty != self.was_empty {
            self.sets.occupied.put(self.number, !empty);
        }
    }
}

impl Drop for SetGuard<'_> {
    fn drop(&mut self) {
        self.publish();
    }
}
