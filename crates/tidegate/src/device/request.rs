//! Requests as values, for batches.

use super::{BlockDevice, Result, WriteFlags, ZeroFlags};

/// What a request asks for; offsets and lengths as in the methods of [`BlockDevice`].
#[derive(Debug)]
pub enum Operation<'a> {
    /// [`BlockDevice::read`].
    Read {
        /// First byte.
        offset: u64,
        /// Where the data goes.
        buf: &'a mut [u8],
    },
    /// [`BlockDevice::write`].
    Write {
        /// First byte.
        offset: u64,
        /// The data.
        data: &'a [u8],
        /// How it is to be written.
        flags: WriteFlags,
    },
    /// [`BlockDevice::flush`].
    Flush,
    /// [`BlockDevice::discard`].
    Discard {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// [`BlockDevice::write_zeroes`].
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// How zeroes are to be written.
        flags: ZeroFlags,
    },
}

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A flush.
    Flush,
    /// A discard.
    Discard,
    /// A write of zeroes.
    WriteZeroes,
}

impl Op {
    /// The kind of `operation`.
    pub fn of(operation: &Operation<'_>) -> Self {
        match operation {
            Operation::Read { .. } => Self::Read,
            Operation::Write { .. } => Self::Write,
            Operation::Flush => Self::Flush,
            Operation::Discard { .. } => Self::Discard,
            Operation::WriteZeroes { .. } => Self::WriteZeroes,
        }
    }

    /// The name in traces: one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write_zeroes",
        }
    }
}

/// One request of a batch, and its result once [`BlockDevice::submit`] is back.
#[derive(Debug)]
pub struct Request<'a> {
    pub(super) operation: Operation<'a>,
    pub(super) result: Option<Result<()>>,
}

impl<'a> Request<'a> {
    /// A request that has not run yet.
    pub fn new(operation: Operation<'a>) -> Self {
        Self { operation, result: None }
    }

    /// What the request asks for.
    pub fn operation(&self) -> &Operation<'a> {
        &self.operation
    }

    /// How it ended; nothing before it was submitted.
    pub fn result(&self) -> Option<&Result<()>> {
        self.result.as_ref()
    }

    /// Takes the result out, so that the request may be submitted again.
    pub fn take_result(&mut self) -> Option<Result<()>> {
        self.result.take()
    }

    /// Runs the request alone on `device`.
    pub(super) fn run<D: BlockDevice + ?Sized>(&mut self, device: &D) {
        self.result = Some(match &mut self.operation {
            Operation::Read { offset, buf } => device.read(*offset, buf),
            Operation::Write { offset, data, flags } => device.write(*offset, data, *flags),
            Operation::Flush => device.flush(),
            Operation::Discard { offset, len } => device.discard(*offset, *len),
            Operation::WriteZeroes { offset, len, flags } => {
                device.write_zeroes(*offset, *len, *flags)
            }
        });
    }

    /// First byte and length in bytes; zeroes for a flush.
    pub fn range(&self) -> (u64, u64) {
        match &self.operation {
            Operation::Read { offset, buf } => (*offset, buf.len() as u64),
            Operation::Write { offset, data, .. } => (*offset, data.len() as u64),
            Operation::Flush => (0, 0),
            Operation::Discard { offset, len } | Operation::WriteZeroes { offset, len, .. } => {
                (*offset, *len)
            }
        }
    }
}
