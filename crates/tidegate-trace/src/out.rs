//! Queue of events from a reader.

use std::collections::VecDeque;

use super::bad::Result;
use super::event::{Event, FileId, Op};
use super::fields::range;

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Read,
    Write,
}

/// The events of the lines that were read, in order. A line may give any number of events.
#[derive(Debug, Default)]
pub(super) struct Out {
    queue: VecDeque<Event>,
    /// Time of the first event, as the trace states it.
    first_us: Option<u64>,
    last_us: u64,
    line_us: u64,
    stream: u32,
}

impl Out {
    /// Sets the stream and time, as the trace states it, of the next events. Events are in the
    /// order of lines: a time earlier than that of the previous event counts as the previous time.
    pub(super) fn at(&mut self, time_us: u64, stream: u32) {
        self.line_us = time_us;
        self.stream = stream;
    }

    pub(super) fn push(&mut self, op: Op) {
        let first_us = *self.first_us.get_or_insert(self.line_us);
        self.last_us = self.last_us.max(self.line_us.saturating_sub(first_us));
        self.queue.push_back(Event { time_us: self.last_us, stream: self.stream, op });
    }

    /// Emits a read or a write, unless it has no bytes.
    pub(super) fn transfer(&mut self, way: Way, file: FileId, offset: u64, len: u64) -> Result<()> {
        let (offset_bytes, len_bytes) = range(offset, len)?;
        match way {
            _ if len_bytes == 0 => {}
            Way::Read => self.push(Op::Read { file, offset_bytes, len_bytes }),
            Way::Write => self.push(Op::Write { file, offset_bytes, len_bytes }),
        }
        Ok(())
    }

    pub(super) fn pop(&mut self) -> Option<Event> {
        self.queue.pop_front()
    }
}
