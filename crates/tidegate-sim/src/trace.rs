//! The events of an execution on its region, in the order of their effects.
//!
//! Invariants:
//! 1. Events are in the order in which their effects became visible to other threads.
//! 2. Loads are not events: they change nothing on the medium.
//! 3. The position of an event (its index) is the simulator's clock: operations begin and end at
//!    positions.
//!
//! Entry points: [`Recorder`] (an [`Observer`] that fills a [`Trace`] and yields to the scheduler),
//! [`Trace`].

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidegate::pmem::Observer;

use crate::context;
use crate::scheduler::Scheduler;

/// One thing that happened to the medium.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Bytes were stored; their values are [`Trace::data`] of `data`.
    Store {
        /// First byte in the region.
        offset: u64,
        /// Range of the bytes in the trace.
        data: Range<usize>,
        /// The store bypassed the cache.
        streaming: bool,
    },
    /// The cache lines that hold these bytes were written back.
    WriteBack {
        /// First byte in the region.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The thread's streaming stores and write-backs are durable from here on.
    Fence,
    /// An operation of the history was called.
    Begin,
    /// The operation returned.
    End,
}

/// An [`Action`] and the thread that did it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The simulated thread.
    pub thread: usize,
    /// The action.
    pub action: Action,
}

/// The events of one execution.
#[derive(Debug, Default, Clone)]
pub struct Trace {
    events: Vec<Event>,
    bytes: Vec<u8>,
}

impl Trace {
    /// Returns the events, oldest first.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Returns the bytes of a store.
    pub fn data(&self, range: &Range<usize>) -> &[u8] {
        &self.bytes[range.clone()]
    }

    /// Appends an action of `thread`.
    pub fn push(&mut self, thread: usize, action: Action) {
        self.events.push(Event { thread, action });
    }

    /// Appends a store of `data` at `offset` by `thread`.
    pub fn push_store(&mut self, thread: usize, offset: u64, data: &[u8], streaming: bool) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(data);
        self.push(thread, Action::Store { offset, data: start..self.bytes.len(), streaming });
    }

    /// Describes the event at `position` in one line, for a report.
    pub fn describe(&self, position: usize) -> String {
        let Some(Event { thread, action }) = self.events.get(position) else {
            return "the end".to_owned();
        };
        let what = match action {
            Action::Store { offset, data, streaming } => {
                let kind = if *streaming { "stream" } else { "store" };
                let head = &self.data(data)[..data.len().min(8)];
                format!("{kind} {} bytes at {offset:#x} {head:02x?}", data.len())
            }
            Action::WriteBack { offset, len } => format!("write back {len} bytes at {offset:#x}"),
            Action::Fence => "fence".to_owned(),
            Action::Begin => "begin".to_owned(),
            Action::End => "end".to_owned(),
        };
        format!("{position:4} thread {thread}: {what}")
    }
}

/// Watches a region: yields to the scheduler before each operation, then records it.
pub struct Recorder {
    trace: Mutex<Trace>,
    scheduler: Option<Arc<Scheduler>>,
}

impl Recorder {
    /// Makes a recorder whose simulated threads take turns by `scheduler`; without a scheduler, for
    /// a single thread.
    pub fn new(scheduler: Option<Arc<Scheduler>>) -> Self {
        Self { trace: Mutex::default(), scheduler }
    }

    /// Begins the calling thread's next operation, on block `lba` and as thread number `ordinal` to
    /// the engine. Returns the position of this event.
    pub fn begin(&self, ordinal: usize, lba: Option<u64>) -> usize {
        self.step();
        context::next_operation(ordinal, lba);
        self.record(|trace, thread| trace.push(thread, Action::Begin))
    }

    /// Ends the calling thread's operation. Returns the position of this event.
    pub fn end(&self) -> usize {
        self.record(|trace, thread| trace.push(thread, Action::End))
    }

    /// Notes that the process died: its CPUs went on to other work, which drained the lines that
    /// their threads had streamed and written back, but no more. Returns the last position.
    pub fn killed(&self, threads: usize) -> usize {
        let mut trace = self.lock();
        (0..threads).for_each(|thread| trace.push(thread, Action::Fence));
        trace.events.len() - 1
    }

    /// Takes the events recorded so far.
    pub fn take(&self) -> Trace {
        std::mem::take(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Trace> {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step(&self) {
        if let Some(scheduler) = &self.scheduler {
            scheduler.step();
        }
    }

    fn record(&self, push: impl FnOnce(&mut Trace, usize)) -> usize {
        let mut trace = self.lock();
        push(&mut trace, context::thread());
        let recorded = trace.events.len();
        if let Some(scheduler) = &self.scheduler {
            scheduler.recorded(recorded);
        }
        recorded - 1
    }
}

impl Observer for Recorder {
    fn store(&self, offset: u64, data: &[u8], non_temporal: bool) {
        self.step();
        self.record(|trace, thread| trace.push_store(thread, offset, data, non_temporal));
    }

    fn write_back(&self, offset: u64, len: u64) {
        self.step();
        self.record(|trace, thread| trace.push(thread, Action::WriteBack { offset, len }));
    }

    fn fence(&self) {
        self.step();
        self.record(|trace, thread| trace.push(thread, Action::Fence));
    }

    fn load(&self, _offset: u64, _len: u64) {
        self.step();
    }

    fn relax(&self) {
        if let Some(scheduler) = &self.scheduler {
            scheduler.relax();
        }
    }

    fn thread_ordinal(&self) -> usize {
        context::ordinal()
    }
}
