//! The seam through which the crash simulator watches a region.

/// Sees each operation on a [`Region`](super::Region), in program order of the calling thread.
///
/// The crash simulator implements this to keep its own image of the medium, and to decide which
/// thread runs next. Production regions have no observer. Each call is made *before* the operation
/// takes effect, so that an implementation that blocks the caller delays the load or store itself.
pub trait Observer: Send + Sync {
    /// Sees a store of `data` at `offset`. `non_temporal` stores bypass the cache: they become
    /// durable at the same thread's next fence; other stores also need a
    /// [`write_back`](Self::write_back).
    fn store(&self, offset: u64, data: &[u8], non_temporal: bool);

    /// Sees that the cache lines of `len` bytes at `offset` are written back (ordered by the next
    /// fence).
    fn write_back(&self, offset: u64, len: u64);

    /// Sees a fence: all earlier non-temporal stores and write-backs of this thread are now
    /// durable.
    fn fence(&self);

    /// Sees a load of `len` bytes at `offset` before it happens: another thread may run here.
    fn load(&self, offset: u64, len: u64);

    /// Sees that the caller waits for another thread: a scheduler must let another one run.
    fn relax(&self);

    /// Returns the number of the calling thread, from 0. Engines spread threads over lanes by it,
    /// so a simulator that gives its threads fixed numbers makes runs repeatable.
    fn thread_ordinal(&self) -> usize {
        0
    }
}
