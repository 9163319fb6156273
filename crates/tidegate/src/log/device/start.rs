//! Requests that are started: reads that only the backing can answer, and writers that wait for free
//! space, without a thread each.
//!
//! Invariants:
//! 1. Blocked writers append in the order of their arrival, and before writers that come later.
//! 2. A failure to clean fails all that are blocked: only then may a writer have waited in vain.
//! 3. Nobody is blocked while no thread cleans.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::index::Place;
use super::{Core, GROUP_BLOCKS, LogDevice};
use crate::device::{AsyncRequest, Attempt, OwnedOperation, start_on_pool};
use crate::log::append::Room;
use crate::log::layout::RECORD_ALIGN_BYTES;
use crate::log::stats::Counter;
use crate::sync::{AtomicU64, Ordering, fence};

/// Writers that wait for free space, oldest first.
#[derive(Default)]
pub(super) struct Blocked {
    queue: Mutex<VecDeque<AsyncRequest>>,
    /// How many they are, for a look without the lock.
    count: AtomicU64,
}

impl Blocked {
    /// Somebody waits: a writer that comes now goes behind it.
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
        if blocks.clone().any(|lba| core.index.find(lba, tail) != Place::Backing) {
            return Some(request);
        }
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
    fn versions_of(&self, blocks: &std::ops::Range<u64>) -> Vec<u32> {
        let groups = blocks.start / GROUP_BLOCKS..blocks.end.div_ceil(GROUP_BLOCKS);
        groups.map(|group| self.version(group * GROUP_BLOCKS).load(Ordering::Acquire)).collect()
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
        if !self.has_thread.load(Ordering::Acquire) {
            return Some(request);
        }
        queue.push_back(request);
        self.blocked.count.store(queue.len() as u64, Ordering::Relaxed);
        drop(queue);
        self.log.stats().add(Counter::FullWaits, 1);
        // The cleaner appends it, at the latest when it has made free space.
        self.log.wake_cleaner();
        None
    }

    fn has_space_for(&self, len: u64) -> bool {
        self.used_bytes() + len + RECORD_ALIGN_BYTES <= self.log.room_bytes(Room::Data)
    }

    /// Appends for blocked writers while there is free space. For the cleaner's thread.
    pub(super) fn resume_blocked(&self) {
        loop {
            let Some(mut request) = self.blocked.queue.lock().pop_front() else { return };
            let attempt = self.attempt_change(&request.operation());
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
            request.complete(Err(self.trouble.stuck()));
        }
    }

    /// No thread cleans from now on: blocked writers go on here, and clean.
    pub(super) fn end_blocking(&self, device: &impl crate::device::BlockDevice) {
        let queue = self.blocked.queue.lock();
        self.has_thread.store(false, Ordering::Release);
        drop(queue);
        for request in self.blocked.take_all() {
            request.run_on(device);
        }
    }
}
