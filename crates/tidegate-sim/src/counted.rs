//! Requests of a history that are under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::device::{BlockDevice, Extent, Geometry, Result, WriteFlags, ZeroFlags};

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

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.requests.count(|| self.inner.read(offset, buf))
    }

    fn write(&self, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        self.requests.count(|| self.inner.write(offset, data, flags))
    }

    fn flush(&self) -> Result<()> {
        self.requests.count(|| self.inner.flush())
    }

    fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.requests.count(|| self.inner.discard(offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.requests.count(|| self.inner.write_zeroes(offset, len, flags))
    }

    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        self.inner.status(offset, len, most)
    }
}
