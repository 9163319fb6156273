//! Requests that wait for nothing: writes while the log has free space, reads of what it holds.

use super::{Core, write_record, zero_record};
use crate::device::{Attempt, Context, Operation, Result};

impl Core {
    /// [`BlockDevice::attempt`](crate::device::BlockDevice::attempt).
    pub(super) fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        let done = match operation {
            Operation::Read { offset, buf } => self.attempt_read(*offset, buf, context),
            Operation::Flush => self.trouble.report().map(|()| true),
            Operation::Status { .. } => Ok(false),
            _ if self.blocked.is_waiting() => Ok(false),
            change => return self.attempt_change(change),
        };
        attempt_of(done)
    }

    /// A change, before any writer that waits for free space.
    pub(super) fn attempt_change(&self, operation: &Operation<'_>) -> Attempt {
        attempt_of(match operation {
            Operation::Write { offset, data, .. } => self.attempt_write(*offset, data),
            Operation::Discard { offset, len } | Operation::WriteZeroes { offset, len, .. } => {
                self.attempt_zeroes(*offset, *len)
            }
            _ => Ok(false),
        })
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

    /// One record at most, so that nothing is written twice where the log is full in the middle.
    fn attempt_write(&self, offset: u64, data: &[u8]) -> Result<bool> {
        self.geometry.check_write(offset, data.len() as u64)?;
        if data.is_empty() {
            return Ok(true);
        }
        if data.len() > self.record_bytes_max() {
            return Ok(false);
        }
        let note = self.note_write(offset, data);
        let appended = self.try_append(&mut write_record(offset, data), &note)?;
        if appended {
            self.count_write(data);
        }
        Ok(appended)
    }

    fn attempt_zeroes(&self, offset: u64, len: u64) -> Result<bool> {
        self.geometry.check_write(offset, len)?;
        if len == 0 {
            return Ok(true);
        }
        self.try_append(&mut zero_record(offset, len), &self.note_zeroes(offset, len))
    }
}

/// What became of an attempt that is done or, if false, would block.
fn attempt_of(done: Result<bool>) -> Attempt {
    match done {
        Ok(true) => Attempt::Done(Ok(())),
        Ok(false) => Attempt::WouldBlock,
        Err(error) => Attempt::Done(Err(error)),
    }
}
