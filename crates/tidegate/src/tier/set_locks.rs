//! The sets of a tier, each behind a lock, and the event that a set has changed.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crossbeam_utils::CachePadded;

use crate::sync::lock::{Condvar, Mutex, MutexGuard};

/// Called instead of waiting for another thread, in a tier that a simulator's scheduler runs. It
/// may return at any time: the caller checks again.
pub type Relax = Arc<dyn Fn() + Send + Sync>;

#[cfg(all(test, not(loom)))]
thread_local! {
    static LOCKED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Returns how often this thread has locked a set.
#[cfg(all(test, not(loom)))]
pub(crate) fn locked_by_this_thread() -> u64 {
    LOCKED.get()
}

/// Sets of type `S`, each behind its own lock.
pub(crate) struct SetLocks<S> {
    cells: Box<[CachePadded<Cell<S>>]>,
    relax: Option<Relax>,
}

struct Cell<S> {
    guarded: Mutex<Guarded<S>>,
    changed: Condvar,
}

struct Guarded<S> {
    set: S,
    waiters: u32,
}

/// A locked set. Dropping it unlocks.
pub(crate) struct SetLock<'a, S> {
    cell: &'a Cell<S>,
    relax: Option<&'a Relax>,
    guard: MutexGuard<'a, Guarded<S>>,
}

impl<S> SetLocks<S> {
    /// Returns locks for `sets`. If given, `relax` is called instead of waiting for a change.
    pub(crate) fn new(sets: impl Iterator<Item = S>, relax: Option<Relax>) -> Self {
        let cell = |set| {
            let guarded = Mutex::new(Guarded { set, waiters: 0 });
            CachePadded::new(Cell { guarded, changed: Condvar::new() })
        };
        Self { cells: sets.map(cell).collect(), relax }
    }

    /// Returns whether a scheduler runs the tier, so that nothing may wait for another thread.
    pub(crate) fn is_driven(&self) -> bool {
        self.relax.is_some()
    }

    /// Returns the number of sets.
    pub(crate) fn count(&self) -> usize {
        self.cells.len()
    }

    /// Returns the size of the sets and locks in bytes.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.cells)
    }

    /// Locks set `number`.
    pub(crate) fn lock(&self, number: usize) -> SetLock<'_, S> {
        #[cfg(all(test, not(loom)))]
        LOCKED.set(LOCKED.get() + 1);
        let cell = &*self.cells[number];
        SetLock { cell, relax: self.relax.as_ref(), guard: cell.guarded.lock() }
    }
}

impl<S> SetLock<'_, S> {
    /// Unlocks the set until it has changed, and locks it again.
    pub(crate) fn wait(&mut self) {
        if let Some(relax) = self.relax {
            return self.guard.unlocked(&**relax);
        }
        self.guard.waiters += 1;
        self.cell.changed.wait(&mut self.guard);
        self.guard.waiters -= 1;
    }

    /// Wakes the threads that wait for this set to change.
    pub(crate) fn notify(&self) {
        if self.guard.waiters > 0 {
            self.cell.changed.notify_all();
        }
    }

    /// Unlocks the set while `run` runs.
    pub(crate) fn unlocked<T>(&mut self, run: impl FnOnce() -> T) -> T {
        self.guard.unlocked(run)
    }

    /// Returns the number of threads that wait for this set to change.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn waiters(&self) -> u32 {
        self.guard.waiters
    }
}

impl<S> Deref for SetLock<'_, S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.guard.set
    }
}

impl<S> DerefMut for SetLock<'_, S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.guard.set
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_sees_the_change_that_it_was_woken_for() {
        let sets = SetLocks::new([0, 0].into_iter(), None);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let mut set = sets.lock(1);
                while *set == 0 {
                    set.wait();
                }
                *set
            });
            while sets.lock(1).waiters() == 0 {
                std::thread::yield_now();
            }
            let mut set = sets.lock(1);
            *set = 7;
            set.notify();
            drop(set);
            assert_eq!(waiter.join().unwrap(), 7);
        });
        assert_eq!((sets.count(), *sets.lock(0)), (2, 0));
    }

    #[test]
    fn a_wait_under_a_scheduler_yields_with_the_set_unlocked() {
        let sets = Arc::new_cyclic(|sets: &std::sync::Weak<SetLocks<u32>>| {
            let sets = sets.clone();
            let relax: Relax = Arc::new(move || *sets.upgrade().unwrap().lock(0) += 1);
            SetLocks::new(std::iter::once(0), Some(relax))
        });
        let mut set = sets.lock(0);
        while *set < 3 {
            set.wait();
        }
        assert_eq!((*set, set.waiters()), (3, 0));
    }
}
