//! Requests of a history that are under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::device::{BlockDevice, Geometry, Operation, Result};

/// Numbers of requests begun and ended.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Requests {
    fn count<T>(&self, request: impl FnOnce() -> T) -> T {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let result = request();
        self.ended.fetch_add(1, Ordering::SeqCst);
        result
    }

    /// Returns the number of requests begun, or `None` while any is under way.
    pub(crate) fn quiet_after(&self) -> Option<u64> {
        let ended = self.ended.load(Ordering::SeqCst);
        let begun = self.begun.load(Ordering::SeqCst);
        (begun == ended).then_some(begun)
    }
}

/// The device below, whose requests are counted.
pub(crate) struct Counted {
    pub(crate) inner: Arc<dyn BlockDevice>,
    pub(crate) requests: Arc<Requests>,
}

impl BlockDevice for Counted {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        match operation {
            Operation::Status { .. } => self.inner.run(operation),
            _ => self.requests.count(|| self.inner.run(operation)),
        }
    }
}
