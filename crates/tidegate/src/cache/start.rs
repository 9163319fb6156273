//! Reads that are started: a read that misses all its pages waits for the backing without a thread.
//!
//! Such a read has whole pages only, and no page is whole in the cache. When the backing has
//! answered, the versions of the pages decide: if a page was changed, a thread reads once more.

use std::sync::Arc;

use super::backing::pace::Foreground;
use super::pages::Missing;
use super::policy::cost::Kind;
use super::router::{Misses, Route};
use super::{CacheDevice, Core, kind_of};
use crate::device::{AsyncRequest, Operation, Result, run_on_pool, start_on_pool};
use crate::stats::{Begun, RequestKind};
use crate::tier::clock::now_ns;

/// A read that waits for the backing.
struct StartedRead {
    device: Arc<CacheDevice>,
    /// The route, with the decision whether the pages are cached.
    route: Route,
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
    /// Implements [`BlockDevice::start`](crate::device::BlockDevice::start).
    pub(super) fn start_request(self: Arc<Self>, mut request: AsyncRequest) {
        let operation = request.operation();
        let (kind, range) = (kind_of(&operation), operation.range());
        if matches!(operation, Operation::Flush | Operation::Status { .. }) {
            return start_on_pool(self, request);
        }
        let route = match self.core.router.route(request.context().queue, kind, range) {
            Ok(route) => route,
            Err(error) => return request.complete(Err(error)),
        };
        let is_read = kind == Some(Kind::Read) && route.needs_cache_alone;
        match is_read.then(|| self.core.pages.missing_all(&route.bytes())).flatten() {
            Some(missing) => self.start_read(request, route, missing),
            None => self.start_with_thread(request, route),
        }
    }

    fn start_with_thread(self: Arc<Self>, request: AsyncRequest, route: Route) {
        self.core.router.take_turn(&route);
        run_on_pool(request, move |operation| self.core.run(operation, Some(route)));
    }

    /// Starts a read of pages that are all `missing`.
    fn start_read(self: Arc<Self>, request: AsyncRequest, route: Route, missing: Vec<Missing>) {
        let core = &self.core;
        let misses = match core.admits(&route) {
            Ok(true) => Misses::Cached,
            Ok(false) => Misses::Uncached,
            Err(error) => return request.complete(Err(error)),
        };
        core.backing.pace.note_request();
        let read = StartedRead {
            device: Arc::clone(&self),
            route: Route { misses, ..route },
            missing,
            begun: core.requests.begin(RequestKind::Read, route.request.len_bytes).detach(),
            began_ns: now_ns(),
            is_under_way: core.router.by_cost.begin().detach(),
            _foreground: core.backing.pace.foreground(),
        };
        let below = request.forward(move |request, result| read.conclude(request, result));
        Arc::clone(&core.backing.device).start(below);
    }
}

impl StartedRead {
    /// Ends the read after the backing's answer, maybe on a thread of the backing: never waits.
    fn conclude(self, mut request: AsyncRequest, result: Result<()>) {
        let core = &self.device.core;
        core.pages.counters.count_core_read(self.route.class, self.missing.len() as u64, &result);
        let stood = result.and_then(|()| match request.operation() {
            Operation::Read { buf, .. } => self.keep(core, buf),
            _ => Ok(true),
        });
        if let Ok(false) = stood {
            return Arc::clone(&self.device).start_with_thread(request, self.route);
        }
        drop(core.requests.resume(self.begun));
        request.complete(stood.map(drop));
    }

    /// Offers the pages that were read to the cache. Returns `false` if a page was changed.
    fn keep(&self, core: &Core, buf: &mut [u8]) -> Result<bool> {
        core.router.note_backing_read(buf.len(), self.began_ns);
        if core.pages.standing(&self.missing, buf)? < self.missing.len() {
            return Ok(false);
        }
        let class = self.route.class;
        if self.route.misses == Misses::Cached {
            core.background.fills.keep_read(&self.missing, buf, class);
        }
        core.pages.counters.count_read(class, 0, self.missing.len() as u64);
        Ok(true)
    }
}
