//! Reads that are started: those of which the cache has nothing wait for the backing without a
//! thread each.
//!
//! Such a read is of whole pages, and the cache has all of none of them. When the backing has
//! answered, the versions of the pages decide: where one was changed meanwhile, the read is made
//! once more, with a thread.

use std::sync::Arc;

use super::backing::pace::Foreground;
use super::pages::Missing;
use super::{CacheDevice, Core, Queue};
use crate::device::{AsyncRequest, Operation, OwnedOperation, Result, start_on_pool};
use crate::stats::{Begun, RequestKind};
use crate::tier::clock::now_ns;

/// A read at the backing.
struct StartedRead {
    device: Arc<CacheDevice>,
    class: u8,
    /// The class for which the pages are kept, if they are.
    kept_for: Option<u8>,
    missing: Vec<Missing>,
    begun: Begun,
    began_ns: u64,
    is_under_way: bool,
    _foreground: Foreground,
}

impl Drop for StartedRead {
    fn drop(&mut self) {
        if self.is_under_way {
            self.device.core.router.by_cost.end();
        }
    }
}

impl CacheDevice {
    /// [`BlockDevice::start`](crate::device::BlockDevice::start).
    pub(super) fn start_request(self: Arc<Self>, request: AsyncRequest) {
        let refused = match request.owned() {
            OwnedOperation::Read { .. } => self.start_read(request),
            _ => Some(request),
        };
        if let Some(request) = refused {
            self.start_with_thread(request);
        }
    }

    fn start_with_thread(self: Arc<Self>, request: AsyncRequest) {
        let queue = request.context().queue;
        start_on_pool(Arc::new(Queue { device: self, queue }), request);
    }

    /// Starts a read of which the cache has nothing; returns any other.
    fn start_read(self: &Arc<Self>, mut request: AsyncRequest) -> Option<AsyncRequest> {
        let core = &self.core;
        let range = request.operation().range();
        let (from, behaviour) = core.router.sort(request.context().queue, range, false);
        let missing = core.pages.missing_all(range).filter(|_| behaviour.reads_hits());
        let Some(missing) = missing else { return Some(request) };
        let admits = || core.admits(&(range.0..range.0 + range.1), false, from);
        let is_kept = match behaviour.keeps_misses().then(admits).transpose() {
            Ok(admitted) => admitted == Some(true),
            Err(error) => {
                request.complete(Err(error));
                return None;
            }
        };
        core.backing.pace.note_request();
        core.router.by_cost.give_back_read(range.1);
        let read = StartedRead {
            device: Arc::clone(self),
            class: from.class,
            kept_for: is_kept.then_some(from.class),
            missing,
            begun: core.requests.begin(RequestKind::Read, range.1).detach(),
            began_ns: now_ns(),
            is_under_way: core.router.by_cost.begin().detach(),
            _foreground: core.backing.pace.foreground(),
        };
        let below = request.forward(move |request, result| read.conclude(request, result));
        Arc::clone(&core.backing.device).start(below);
        None
    }
}

impl StartedRead {
    /// The backing has answered. This thread may be the backing's: nothing here waits.
    fn conclude(self, mut request: AsyncRequest, result: Result<()>) {
        let core = &self.device.core;
        core.pages.counters.count_core_read(self.class, self.missing.len() as u64, &result);
        let stood = result.and_then(|()| match request.operation() {
            Operation::Read { buf, .. } => self.keep(core, buf),
            _ => Ok(true),
        });
        if let Ok(false) = stood {
            return Arc::clone(&self.device).start_with_thread(request);
        }
        drop(core.requests.resume(self.begun));
        request.complete(stood.map(drop));
    }

    /// Offers the pages that were read to the cache. False: one was changed meanwhile.
    fn keep(&self, core: &Core, buf: &mut [u8]) -> Result<bool> {
        core.router.note_backing_read(buf.len(), self.began_ns);
        if core.pages.standing(&self.missing, buf)? < self.missing.len() {
            return Ok(false);
        }
        if let Some(class) = self.kept_for {
            core.background.fills.keep_read(&self.missing, buf, class);
        }
        core.pages.counters.count_read(self.class, 0, self.missing.len() as u64);
        Ok(true)
    }
}
