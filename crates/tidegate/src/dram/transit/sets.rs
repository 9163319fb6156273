//! The sets of a transit tier behind their locks, and the flags that go with each.

use super::flags::Flags;
use super::set::Set;
use crate::tier::set_locks::{Relax, SetLock, SetLocks};

/// All sets of a tier.
pub(super) struct Sets {
    locks: SetLocks<Set>,
    /// Sets with a block ready for eviction.
    pub(super) ready: Flags,
    /// Sets with at least one slot.
    pub(super) occupied: Flags,
}

/// A locked set. Unlocking it updates its flags.
pub(super) struct SetGuard<'a> {
    sets: &'a Sets,
    number: usize,
    lock: SetLock<'a, Set>,
    was_ready: bool,
    was_empty: bool,
}

impl Sets {
    /// Makes `sets` empty sets.
    pub(super) fn new(sets: usize, relax: Option<Relax>) -> Self {
        Self {
            locks: SetLocks::new((0..sets).map(|_| Set::new()), relax),
            ready: Flags::new(sets),
            occupied: Flags::new(sets),
        }
    }

    /// Returns the number of sets.
    pub(super) fn count(&self) -> usize {
        self.locks.count()
    }

    /// Returns the bytes of the sets, without their slots.
    pub(super) fn bytes(&self) -> usize {
        self.locks.bytes()
    }

    /// Locks set `number`.
    pub(super) fn lock(&self, number: usize) -> SetGuard<'_> {
        let lock = self.locks.lock(number);
        let (was_ready, was_empty) = (lock.is_ready(), lock.is_empty());
        SetGuard { sets: self, number, lock, was_ready, was_empty }
    }
}

impl SetGuard<'_> {
    /// Returns the state machine.
    pub(super) fn set(&mut self) -> &mut Set {
        &mut self.lock
    }

    /// Unlocks the set until it has changed, and locks it again.
    pub(super) fn wait(&mut self) {
        self.publish();
        self.lock.wait();
        self.was_ready = self.lock.is_ready();
        self.was_empty = self.lock.is_empty();
    }

    /// Returns the number of threads that wait for this set to change.
    #[cfg(all(test, not(loom)))]
    pub(super) fn waiters(&self) -> u32 {
        self.lock.waiters()
    }

    /// Wakes the threads that wait for this set to change.
    pub(super) fn notify(&self) {
        self.lock.notify();
    }

    fn publish(&mut self) {
        let (ready, empty) = (self.lock.is_ready(), self.lock.is_empty());
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
