//! The connections that use an export, so that the export can end before its server does.
//!
//! Invariant: once [`Users::close`] has returned, no connection uses the export, or ever will. A
//! connection is counted, or finds the export closed, under one lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

/// The connections of an export.
#[derive(Default)]
pub(super) struct Users {
    count: Mutex<usize>,
    none: Condvar,
    is_closed: AtomicBool,
}

impl Users {
    /// Counts a connection. Returns `None` if the export is closed.
    pub(super) fn enter(self: &Arc<Self>) -> Option<User> {
        let mut count = self.count.lock();
        if self.is_closed.load(Ordering::Relaxed) {
            return None;
        }
        *count += 1;
        Some(User(Arc::clone(self)))
    }

    /// Closes the export, calls `tell` to wake its connections, and waits until all have ended.
    pub(super) fn close(&self, tell: impl FnOnce()) {
        let mut count = self.count.lock();
        self.is_closed.store(true, Ordering::Release);
        drop(count);
        tell();
        count = self.count.lock();
        while *count > 0 {
            self.none.wait(&mut count);
        }
    }
}

/// A connection that uses an export until this is dropped.
pub(super) struct User(Arc<Users>);

impl User {
    /// Returns whether the connection has to end.
    pub(super) fn must_end(&self) -> bool {
        self.0.is_closed.load(Ordering::Acquire)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        *self.0.count.lock() -= 1;
        self.0.none.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_export_has_no_user_and_gets_none() {
        let users = Arc::<Users>::default();
        let entered = [0, 1].map(|_| users.enter().expect("it is open"));
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut entered = Some(entered);
            users.close(|| {
                let entered = entered.take().expect("once");
                assert!(entered.iter().all(User::must_end) && users.enter().is_none());
                scope.spawn(|| {
                    has_ended.store(true, Ordering::Relaxed);
                    drop(entered);
                });
            });
            assert!(has_ended.load(Ordering::Relaxed));
        });
        assert!(users.enter().is_none());
    }
}
