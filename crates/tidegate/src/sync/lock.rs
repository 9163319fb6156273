//! Mutexes and condition variables that a modelled machine (see `machine`) can take part in.
//!
//! They wrap the types of `parking_lot`. On a modelled machine, a thread that would block calls the
//! model, which runs another thread. All threads of a model run on one thread of the system, so a
//! lock is never taken there before it is free.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::machine::{Machine, modelled};

/// A mutex.
#[derive(Default)]
pub(crate) struct Mutex<T> {
    inner: parking_lot::Mutex<T>,
}

/// A locked mutex. Dropping it unlocks.
pub(crate) struct MutexGuard<'a, T> {
    inner: parking_lot::MutexGuard<'a, T>,
}

/// A condition variable.
#[derive(Default)]
pub(crate) struct Condvar {
    inner: parking_lot::Condvar,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { inner: parking_lot::Mutex::new(value) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        match modelled() {
            None => MutexGuard { inner: self.inner.lock() },
            Some(machine) => {
                await_unlock(&self.inner, &*machine);
                let inner = self.inner.lock();
                machine.locked(address(&self.inner));
                MutexGuard { inner }
            }
        }
    }
}

impl<T> MutexGuard<'_, T> {
    /// Unlocks the mutex while `run` runs.
    pub(crate) fn unlocked<R>(&mut self, run: impl FnOnce() -> R) -> R {
        let Some(machine) = modelled() else {
            return parking_lot::MutexGuard::unlocked(&mut self.inner, run);
        };
        let mutex = parking_lot::MutexGuard::mutex(&self.inner);
        let result = parking_lot::MutexGuard::unlocked(&mut self.inner, || {
            machine.unlocked(address(mutex));
            let result = run();
            await_unlock(mutex, &*machine);
            result
        });
        machine.locked(address(mutex));
        result
    }
}

impl<T> MutexGuard<'_, T> {
    fn address(&self) -> usize {
        address(parking_lot::MutexGuard::mutex(&self.inner))
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if let Some(machine) = modelled() {
            machine.unlocked(self.address());
        }
    }
}

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Unlocks the mutex of `guard` until there is a notification, and locks it again.
    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        match modelled() {
            None => self.inner.wait(&mut guard.inner),
            Some(machine) => {
                let lock = guard.address();
                guard.unlocked(|| machine.wait(address(self), lock, None));
            }
        }
    }

    /// Waits for a notification, at most for `time`. Returns `false` if none came by then.
    pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) -> bool {
        let Some(machine) = modelled() else {
            return !self.inner.wait_for(&mut guard.inner, time).timed_out();
        };
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let until_ns = machine.now_ns().saturating_add(time_ns);
        let lock = guard.address();
        guard.unlocked(|| machine.wait(address(self), lock, Some(until_ns)))
    }

    pub(crate) fn notify_one(&self) {
        match modelled() {
            None => drop(self.inner.notify_one()),
            Some(machine) => machine.notify(address(self), false),
        }
    }

    pub(crate) fn notify_all(&self) {
        match modelled() {
            None => drop(self.inner.notify_all()),
            Some(machine) => machine.notify(address(self), true),
        }
    }
}

/// Waits until `mutex` is free. It stays free until the calling thread switches.
fn await_unlock<T>(mutex: &parking_lot::Mutex<T>, machine: &dyn Machine) {
    while mutex.is_locked() {
        machine.await_unlock(address(mutex));
    }
}

fn address<T>(of: &T) -> usize {
    std::ptr::from_ref(of).addr()
}
