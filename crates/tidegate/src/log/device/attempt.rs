//! Requests that must not wait: writes while the log has free space, reads of blocks in the log.

use super::Core;
use super::requests::{write_record, zero_record};
use crate::device::{Attempt, Context, Operation, Result, ZeroFlags};
use crate::stats::RequestKind;

/// Returns the kind and the bytes of `operation` in the statistics. A status request has no kind.
fn counted_as(operation: &Operation<'_>) -> (Option<RequestKind>, u64) {
    match operation {
        Operation::Read { buf, .. } => (Some(RequestKind::Read), buf.len() as u64),
        Operation::Write { data, .. } => (Some(RequestKind::Write), data.len() as u64),
        Operation::Flush => (Some(RequestKind::Flush), 0),
        Operation::Discard { len, .. } | Operation::WriteZeroes { len, .. } => {
            (Some(RequestKind::Zero), *len)
        }
        Operation::Status { .. } => (None, 0),
    }
}

impl Core {
    /// Implements [`BlockDevice::attempt`](crate::device::BlockDevice::attempt).
    pub(super) fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        let is_change = !matches!(
            operation,
            Operation::Read { .. } | Operation::Flush | Operation::Status { .. }
        );
        if is_change && self.blocked.is_waiting() {
            return Attempt::WouldBlock;
        }
        self.attempt_first(operation, context)
    }

    /// Attempts `operation` before any writer that waits for free space.
    pub(super) fn attempt_first(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        let (kind, len) = counted_as(operation);
        let running = kind.map(|kind| self.requests.begin(kind, len));
        let done = match operation {
            Operation::Read { offset, buf } => self.attempt_read(*offset, buf, context),
            Operation::Write { offset, data, .. } => self.attempt_write(*offset, data),
            Operation::Flush => self.ledger.report().map(|()| true),
            Operation::Discard { offset, len } => {
                self.attempt_zeroes(*offset, *len, ZeroFlags::DISCARD)
            }
            Operation::WriteZeroes { offset, len, flags } => {
                self.attempt_zeroes(*offset, *len, *flags)
            }
            Operation::Status { .. } => Ok(false),
        };
        match done {
            Ok(true) => Attempt::Done(Ok(())),
            Ok(false) => {
                if let Some(running) = running {
                    running.hand_back();
                }
                Attempt::WouldBlock
            }
            Err(error) => Attempt::Done(Err(error)),
        }
    }

    fn attempt_read(&self, offset: u64, buf: &mut [u8], context: Context) -> Result<bool> {
        self.geometry.check(offset, buf.len() as u64)?;
        let below = |offset, buf: &mut [u8]| match self
            .backing
            .attempt(&mut Operation::Read { offset, buf }, context)
        {
            Attempt::Done(result) => result.map(|()| true),
            Attempt::WouldBlock => Ok(false),
        };
        self.read(offset, buf, &below)
    }

    /// Attempts a write of one record only: a retry of a part would write records twice.
    fn attempt_write(&self, offset: u64, data: &[u8]) -> Result<bool> {
        self.geometry.check_write(offset, data.len() as u64)?;
        if data.is_empty() {
            return Ok(true);
        }
        if data.len() > self.record_bytes_max() {
            return Ok(false);
        }
        let note = self.note_write(offset, data);
        self.try_append(&mut write_record(offset, data), &note)
    }

    fn attempt_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<bool> {
        self.geometry.check_zeroes(offset, len, flags)?;
        if len == 0 {
            return Ok(true);
        }
        self.try_append(&mut zero_record(offset, len, flags), &self.note_zeroes(offset, len))
    }
}
