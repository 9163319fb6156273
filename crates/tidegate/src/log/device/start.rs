//! Requests that are started: reads that only the backing can answer, and writers that wait for
//! free space, without a thread each.
//!
//! Invariants:
//! 1. Blocked writers append in the order of their arrival, and before writers that come later.
//! 2. A failure to clean fails all writers that are blocked.
//! 3. No writer is blocked while no thread cleans.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::index::Location;
use super::{Core, GROUP_BLOCKS, LogDevice};
use crate::device::{AsyncRequest, Attempt, BlockDevice, Context, OwnedOperation, start_on_pool};
use crate::log::append::Share;
use crate::log::layout::RECORD_ALIGN_BYTES;
use crate::log::stats::Counter;
use crate::stats::RequestKind;
use crate::sync::{AtomicU64, Ordering, fence};
use crate::tier::version_locks::Version;

/// Writers that wait for free space, oldest first.
#[derive(Default)]
pub(super) struct Blocked {
    queue: Mutex<VecDeque<AsyncRequest>>,
    /// Number of them, for a look without the lock.
    count: AtomicU64,
}

impl Blocked {
    /// A writer waits: one that comes now goes behind it.
    pub(super) fn is_waiting(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    fn take_all(&self) -> VecDeque<AsyncRequest> {
        let mut queue = self.queue.lock();
        self.count.store(0, Ordering::Relaxed);
        std::mem::take(&mut queue)
    }
}

impl LogDevice {
    /// [`BlockDevice::start`](crate::device::BlockDevice::start).
    pub(super) fn start_request(self: Arc<Self>, request: AsyncRequest) {
        let refused = match request.owned() {
            OwnedOperation::Read { .. } => self.start_read(request),
            OwnedOperation::Write { .. }
            | OwnedOperation::Discard { .. }
            | OwnedOperation::WriteZeroes { .. } => self.core.start_change(request),
            _ => Some(request),
        };
        if let Some(request) = refused {
            start_on_pool(self, request);
        }
    }

    /// Starts a read of which the log has nothing; returns any other.
    fn start_read(self: &Arc<Self>, mut request: AsyncRequest) -> Option<AsyncRequest> {
        let (offset, len) = request.operation().range();
        let core = &self.core;
        if core.geometry.check(offset, len).is_err() {
            return Some(request);
        }
        let blocks = core.blocks_of(offset, len);
        // Before the index: a cleaning that began before this and has not ended is known by what
        // the index says.
        let versions = core.versions_of(&blocks);
        let tail = core.log.tail();
        if blocks.clone().any(|lba| core.index.find(lba, tail) != Location::Backing) {
            return Some(request);
        }
        core.requests.count(RequestKind::Read, len);
        let device = Arc::clone(self);
        let below = request.forward(move |request, result| {
            fence(Ordering::Acquire);
            if result.is_ok() && device.core.versions_of(&blocks) != versions {
                // Cleaned meanwhile, which is rare: read once more, with a thread.
                start_on_pool(device, request);
            } else {
                request.complete(result);
            }
        });
        Arc::clone(&core.backing).start(below);
        None
    }
}

impl Core {
    /// The versions of the groups of `blocks`.
    fn versions_of(&self, blocks: &Range<u64>) -> Vec<Version> {
        let groups = blocks.start / GROUP_BLOCKS..blocks.end.div_ceil(GROUP_BLOCKS);
        groups.map(|group| self.versions.version(group)).collect()
    }

    /// Has the cleaner append a change once there is free space. Returns one that is several
    /// records or finds free space now, and any where no thread cleans.
    fn start_change(&self, mut request: AsyncRequest) -> Option<AsyncRequest> {
        let (_, len) = request.operation().range();
        let is_write = matches!(request.owned(), OwnedOperation::Write { .. });
        if is_write && len > self.record_bytes_max() as u64 {
            return Some(request);
        }
        if !self.blocked.is_waiting() && self.has_space_for(len) {
            return Some(request);
        }
        let mut queue = self.blocked.queue.lock();
        if !self.waker.is_running() {
            return Some(request);
        }
        queue.push_back(request);
        self.blocked.count.store(queue.len() as u64, Ordering::Relaxed);
        drop(queue);
        self.log.stats().add(Counter::FullWaits, 1);
        // The cleaner appends it, at the latest when it has made free space.
        self.waker.wake_all();
        None
    }

    fn has_space_for(&self, len: u64) -> bool {
        self.used_bytes() + len + RECORD_ALIGN_BYTES <= self.log.usable_bytes(Share::Data)
    }

    /// Appends for blocked writers while there is free space. For the cleaner's thread.
    pub(super) fn resume_blocked(&self) {
        loop {
            let Some(mut request) = self.blocked.queue.lock().pop_front() else { return };
            let attempt = self.attempt_first(&mut request.operation(), Context::default());
            let mut queue = self.blocked.queue.lock();
            let Attempt::Done(result) = attempt else {
                return queue.push_front(request);
            };
            self.blocked.count.store(queue.len() as u64, Ordering::Relaxed);
            drop(queue);
            request.complete(result);
        }
    }

    /// Fails blocked writers, since the log cannot be cleaned. For the cleaner's thread.
    pub(super) fn fail_blocked(&self) {
        self.resume_blocked();
        for request in self.blocked.take_all() {
            request.complete(Err(self.full_and_failing()));
        }
    }

    /// The thread has stopped: blocked writers go on here, and clean.
    pub(super) fn end_blocking(&self, device: &impl BlockDevice) {
        // A writer that joined the queue saw, under its lock, that the thread was running.
        for request in self.blocked.take_all() {
            request.run_on(device);
        }
    }
}
