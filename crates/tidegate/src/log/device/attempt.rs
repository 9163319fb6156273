//! Requests that must not wait: writes while the log has free space, reads of blocks in the log.

use super::Core;
use super::requests::{write_record, zero_record};
use crate::device::{Attempt, Context, Op, Operation, Result, ZeroFlags};
use crate::tier::begin;

impl Core {
    /// Implements [`BlockDevice::attempt`](crate::device::BlockDevice::attempt).
    pub(super) fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        if Op::of(operation).changes() && self.blocked.is_waiting() {
            return Attempt::WouldBlock;
        }
        self.attempt_first(operation, context)
    }

    /// Attempts `operation` before any writer that waits for free space.
    pub(super) fn attempt_first(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        if let Err(error) = self.geometry.check_operation(operation) {
            return Attempt::Done(Err(error));
        }
        let running = begin(&self.requests, operation);
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
        if len == 0 {
            return Ok(true);
        }
        self.try_append(&mut zero_record(offset, len, flags), &self.note_zeroes(offset, len))
    }
}
