//! The queue of writers that wait for free space, and started requests: reads that only the backing
//! can answer, and writers that wait without a thread each.
//!
//! Invariants:
//! 1. Blocked writers append in the order of their arrival, before later writers, so that small
//!    records do not take the space that a large record waits for.
//! 2. A failure to clean fails all blocked writers.
//! 3. While the queue has a writer, the log counts as filling: the cleaner goes on, however empty
//!    the log is. A record that does not fit into the rest of a lap needs more free space than its
//!    length, so even a half empty log may lack the space.
//! 4. A started request is in the queue only while a cleaner runs.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::index::Location;
use super::{Core, GROUP_BLOCKS, LogDevice};
use crate::device::waits::{self, Waiting};
use crate::device::{AsyncRequest, Attempt, BlockDevice, Context, OwnedOperation, start_on_pool};
use crate::log::control::stats::Counter;
use crate::log::layout::RECORD_ALIGN_BYTES;
use crate::log::ring::Share;
use crate::stats::RequestKind;
use crate::sync::{AtomicU64, Ordering, fence};
use crate::tier::version_locks::Version;

/// Names of a blocked writer and its resource in the list of waits.
pub(super) const WHO: &str = "a write to the log";
pub(super) const SPACE: &str = "free space in the log";

/// Writers that wait for free space, oldest first.
#[derive(Default)]
pub(super) struct Blocked {
    queue: Mutex<VecDeque<Writer>>,
    /// Length of the queue, readable without the lock.
    count: AtomicU64,
    /// Number of threads that joined the queue so far.
    threads: AtomicU64,
}

/// A writer that waits for free space.
enum Writer {
    /// A request: the cleaner appends its record.
    Request(AsyncRequest, Waiting),
    /// A thread, by its number in the queue: it appends its record itself.
    Thread(u64),
    /// The first writer, a request that the cleaner is trying to append. So it keeps its turn and
    /// counts as waiting.
    Resuming,
}

/// A thread's membership in the queue, until this is dropped.
pub(super) struct Turn<'a> {
    core: &'a Core,
    number: u64,
}

impl<'a> Turn<'a> {
    /// Adds the calling thread to the queue.
    pub(super) fn join(core: &'a Core) -> Self {
        let number = core.blocked.threads.fetch_add(1, Ordering::Relaxed);
        let mut queue = core.blocked.queue.lock();
        queue.push_back(Writer::Thread(number));
        core.blocked.count.store(queue.len() as u64, Ordering::SeqCst);
        Turn { core, number }
    }

    /// Returns whether the thread is the first in the queue.
    pub(super) fn has_come(&self) -> bool {
        let queue = self.core.blocked.queue.lock();
        matches!(queue.front(), Some(Writer::Thread(number)) if *number == self.number)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Core { blocked, ring, waker, .. } = self.core;
        let mut queue = blocked.queue.lock();
        queue.retain(|it| !matches!(it, Writer::Thread(number) if *number == self.number));
        blocked.count.store(queue.len() as u64, Ordering::SeqCst);
        let next_is_thread = queue.front().map(|it| matches!(it, Writer::Thread(_)));
        drop(queue);
        match next_is_thread {
            Some(true) => ring.announce_space(),
            Some(false) => waker.wake_all(),
            None => {}
        }
    }
}

impl Blocked {
    /// Returns whether a writer waits, so that a new writer must queue.
    pub(super) fn is_waiting(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// Takes the first writer if it is a request. It keeps its turn until the caller
    /// [puts it back](Self::put_first_back) or [removes it](Self::remove_first).
    fn take_first(&self) -> Option<(AsyncRequest, Waiting)> {
        let mut queue = self.queue.lock();
        let first = queue.front_mut()?;
        match std::mem::replace(first, Writer::Resuming) {
            Writer::Request(request, waiting) => Some((request, waiting)),
            other => {
                *first = other;
                None
            }
        }
    }

    /// Puts the request of [`take_first`](Self::take_first) back.
    fn put_first_back(&self, request: AsyncRequest, waiting: Waiting) {
        if let Some(first) = self.queue.lock().front_mut() {
            *first = Writer::Request(request, waiting);
        }
    }

    /// Ends the turn of the request of [`take_first`](Self::take_first). Returns whether the next
    /// writer is a thread.
    fn remove_first(&self) -> bool {
        let mut queue = self.queue.lock();
        queue.pop_front();
        self.count.store(queue.len() as u64, Ordering::SeqCst);
        matches!(queue.front(), Some(Writer::Thread(_)))
    }

    /// Takes all requests, except one that is being resumed; threads leave by themselves.
    fn take_requests(&self) -> Vec<AsyncRequest> {
        let mut queue = self.queue.lock();
        let mut requests = Vec::new();
        for writer in std::mem::take(&mut *queue) {
            match writer {
                Writer::Request(request, _) => requests.push(request),
                other => queue.push_back(other),
            }
        }
        self.count.store(queue.len() as u64, Ordering::SeqCst);
        requests
    }
}

impl LogDevice {
    /// Implements [`BlockDevice::start`](crate::device::BlockDevice::start).
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

    /// Starts a read whose blocks are all in the backing; returns any other request.
    fn start_read(self: &Arc<Self>, mut request: AsyncRequest) -> Option<AsyncRequest> {
        let (offset, len) = request.operation().range();
        let core = &self.core;
        if core.geometry.check(offset, len).is_err() {
            return Some(request);
        }
        let blocks = core.blocks_of(offset, len);
        // Before the index, which still has the blocks of a cleaning in progress.
        let versions = core.versions_of(&blocks);
        let tail = core.ring.tail();
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
    /// Returns the versions of the groups of `blocks`.
    fn versions_of(&self, blocks: &Range<u64>) -> Vec<Version> {
        let groups = blocks.start / GROUP_BLOCKS..blocks.end.div_ceil(GROUP_BLOCKS);
        groups.map(|group| self.versions.version(group)).collect()
    }

    /// Queues a change for the cleaner, which appends it once there is free space. Returns the
    /// request if it needs several records or finds free space now, or if no cleaner runs.
    fn start_change(&self, mut request: AsyncRequest) -> Option<AsyncRequest> {
        let (_, len) = request.operation().range();
        let is_write = matches!(request.owned(), OwnedOperation::Write { .. });
        let len = if is_write { len } else { 0 };
        if len > self.record_bytes_max() as u64 {
            return Some(request);
        }
        if !self.blocked.is_waiting() && self.has_space_for(len) {
            return Some(request);
        }
        let mut queue = self.blocked.queue.lock();
        if !self.waker.is_running() {
            return Some(request);
        }
        queue.push_back(Writer::Request(request, waits::begin(WHO, SPACE)));
        self.blocked.count.store(queue.len() as u64, Ordering::SeqCst);
        drop(queue);
        self.ring.stats().add(Counter::FullWaits, 1);
        // The cleaner appends it, at the latest when it has made free space.
        self.waker.wake_all();
        None
    }

    fn has_space_for(&self, len: u64) -> bool {
        self.used_bytes() + len + RECORD_ALIGN_BYTES <= self.ring.usable_bytes(Share::Data)
    }

    /// Appends blocked requests while there is free space. For the cleaner's thread.
    pub(super) fn resume_blocked(&self) {
        loop {
            let Some((mut request, waiting)) = self.blocked.take_first() else { return };
            let attempt = self.attempt_first(&mut request.operation(), Context::default());
            let Attempt::Done(result) = attempt else {
                return self.blocked.put_first_back(request, waiting);
            };
            if self.blocked.remove_first() {
                self.ring.announce_space();
            }
            request.complete(result);
        }
    }

    /// Fails blocked requests, since the log cannot be cleaned. For the cleaner's thread.
    pub(super) fn fail_blocked(&self) {
        self.resume_blocked();
        for request in self.blocked.take_requests() {
            request.complete(Err(self.full_and_failing()));
        }
    }

    /// Runs blocked requests, which clean the log themselves, after the cleaner's thread stopped.
    pub(super) fn end_blocking(&self, device: &impl BlockDevice) {
        // No request joins now: it checks for a running cleaner under the queue's lock.
        for request in self.blocked.take_requests() {
            request.run_on(device);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::memory::MemoryDevice;
    use crate::device::{IoBuffer, WriteFlags};
    use crate::log::device::{Binding, LogDeviceOptions};
    use crate::log::{LogOptions, LogPool, create};
    use crate::pmem::Region;

    fn device() -> LogDevice {
        let region = Arc::new(Region::anonymous(1 << 20).unwrap());
        create(&region, &LogOptions::default()).unwrap();
        let backing = Arc::new(MemoryDevice::new(4096, 64).unwrap());
        let options = LogDeviceOptions { no_thread: true, ..LogDeviceOptions::default() };
        let pool = LogPool::open(region).unwrap();
        LogDevice::open(pool, backing, Binding::unnamed(1), options).unwrap()
    }

    /// Else writers overtake the request, and no cleaner is woken for it.
    #[test]
    fn a_request_that_is_being_resumed_keeps_its_turn_while_a_thread_leaves() {
        let device = device();
        let blocked = &device.core.blocked;
        let (buffer, flags) = (IoBuffer::new(4096), WriteFlags::default());
        let operation = OwnedOperation::Write { offset: 0, buffer, flags };
        let request = AsyncRequest::new(operation, Context::default(), |_, _| ());
        blocked.queue.lock().push_back(Writer::Request(request, waits::begin(WHO, SPACE)));
        let thread = Turn::join(&device.core);
        let (request, waiting) = blocked.take_first().unwrap();
        assert!(!thread.has_come());
        drop(thread);
        assert!(blocked.is_waiting());
        blocked.put_first_back(request, waiting);
        assert!(blocked.is_waiting());
        device.core.resume_blocked();
        assert!(!blocked.is_waiting());
    }
}
