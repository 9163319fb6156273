//! Requests to resize a pool, one at a time. The steps are in
//! [`background::resize`](super::background::resize).

use std::sync::Arc;

use super::background::resize::Result;
use super::error::CacheError;
use super::pages::index::Shard;
use super::store::header::free_headers;
use super::{CacheDevice, Core};
use crate::sync::Ordering;

/// A resize that is under way; dropping it ends it.
struct UnderWay(Arc<Core>);

impl UnderWay {
    /// Begins a resize.
    ///
    /// # Errors
    /// Another resize is under way, or the cache was shut down.
    fn begin(core: &Arc<Core>) -> Result<Self> {
        if core.background.resizing.is_under_way.swap(true, Ordering::SeqCst) {
            return Err(CacheError::Resizing);
        }
        *core.background.resizing.failure.lock() = None;
        let begun = Self(Arc::clone(core));
        if core.background.resizing.is_stopped.load(Ordering::SeqCst) {
            return Err(CacheError::ShutDown);
        }
        Ok(begun)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.background.resizing.is_under_way.store(false, Ordering::SeqCst);
    }
}

impl CacheDevice {
    /// Makes the pool `pool_bytes` bytes long, rounded down to a multiple of 4096, while requests
    /// go on. Cleans the dirty pages in the slots that leave, and evicts all pages there. The new
    /// size is durable on return; a crash before leaves the old size.
    ///
    /// # Errors
    /// The size is not possible; another thread changes it; the backing or the memory failed; or
    /// the device is shut down meanwhile: the pool has its old size. If storing the new size fails,
    /// it may have either. If only truncating the file fails, it has the new one.
    pub fn resize(&self, pool_bytes: u64) -> Result<()> {
        let _under_way = UnderWay::begin(&self.core)?;
        resize(&self.core, pool_bytes)
    }

    /// Resizes the pool like [`resize`](Self::resize), on a thread of its own if slots have to
    /// leave first. `Resizing::details` reports the result of that thread.
    pub(in crate::cache) fn begin_resize(&self, pool_bytes: u64) -> Result<()> {
        let core = Arc::clone(&self.core);
        let under_way = UnderWay::begin(&core)?;
        if core.background.plan_resize(pool_bytes)?.places.slots() >= core.store.slots() {
            return resize(&core, pool_bytes);
        }
        let run = move || {
            let failure = resize(&core, pool_bytes).err().map(|error| error.in_words());
            *core.background.resizing.failure.lock() = failure;
            drop(under_way);
        };
        let spawned = std::thread::Builder::new().name("cache-resize".into()).spawn(run);
        *self.core.background.resizing.thread.lock() = Some(spawned.map_err(CacheError::Thread)?);
        Ok(())
    }
}

fn resize(core: &Core, pool_bytes: u64) -> Result<()> {
    let plan = core.background.plan_resize(pool_bytes)?;
    let before_bytes = core.store.header.lock().superblock.pool_bytes;
    let pool_bytes = plan.superblock.pool_bytes;
    if plan.places.slots() < core.store.slots() {
        core.background.shrink_to(&plan.places)?;
    } else {
        core.store.region.grow(pool_bytes)?;
        // The new headers are free before the superblock says that they are headers.
        free_headers(&core.store.region, &plan.places, core.store.slots())?;
    }
    // Slots that left are not used from here on, even if this fails: the pool may have either size.
    core.background.commit_size(&plan)?;
    resize_shards(core);
    if pool_bytes < before_bytes {
        core.store.region.shrink(pool_bytes)?;
    }
    Ok(())
}

/// Gives the shards the slots that the pool has now.
fn resize_shards(core: &Core) {
    let (places, choices) = (core.store.header.lock().places, core.choices.lock());
    // One shard at a time, so that requests wait for at most one list of pages.
    core.background.each_resized(&places, Shard::resize);
    core.pages.notify_all();
    core.restart_promotion(&choices);
    core.pages.waker.wake_another();
}
