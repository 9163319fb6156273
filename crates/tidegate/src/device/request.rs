//! Operations as values: alone, in batches, and tried at once.

use super::{BlockDevice, Extent, Result, WriteFlags, ZeroFlags};

/// Which client and which class of I/O a request belongs to. Tiers pass it on to the tier below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Context {
    /// The client's queue: a connection, or a queue of a virtual disk. It chooses locality and IO
    /// classes.
    pub queue: u32,
    /// The I/O class, by which a cache treats requests differently; 0 is the class of requests that
    /// name none.
    pub class: u8,
}

/// What became of an operation that a device was to run at once.
#[derive(Debug)]
pub enum Attempt {
    /// The operation ran to its end.
    Done(Result<()>),
    /// The operation has to wait for something slower than memory, and the device left it alone.
    /// The caller still has all of its memory, and starts it or runs it.
    WouldBlock,
}

impl Attempt {
    /// The result of an operation that ran to its end.
    pub fn done(self) -> Option<Result<()>> {
        match self {
            Self::Done(result) => Some(result),
            Self::WouldBlock => None,
        }
    }
}

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
    /// [`BlockDevice::status`].
    Status {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Most extents.
        most: usize,
        /// Where the extents go; what was there is lost.
        extents: &'a mut Vec<Extent>,
    },
}

impl Operation<'_> {
    /// Runs the operation to its end on `device`.
    ///
    /// # Errors
    /// Those of the device.
    pub fn run_on<D: BlockDevice + ?Sized>(&mut self, device: &D) -> Result<()> {
        match self {
            Self::Read { offset, buf } => device.read(*offset, buf),
            Self::Write { offset, data, flags } => device.write(*offset, data, *flags),
            Self::Flush => device.flush(),
            Self::Discard { offset, len } => device.discard(*offset, *len),
            Self::WriteZeroes { offset, len, flags } => device.write_zeroes(*offset, *len, *flags),
            Self::Status { offset, len, most, extents } => {
                **extents = device.status(*offset, *len, *most)?;
                Ok(())
            }
        }
    }

    /// First byte, length in bytes.
    pub(crate) fn range(&self) -> (u64, u64) {
        match self {
            Self::Read { offset, buf } => (*offset, buf.len() as u64),
            Self::Write { offset, data, .. } => (*offset, data.len() as u64),
            Self::Flush => (0, 0),
            Self::Discard { offset, len }
            | Self::WriteZeroes { offset, len, .. }
            | Self::Status { offset, len, .. } => (*offset, *len),
        }
    }
}

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
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
    /// A question for the allocation state.
    Status,
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
            Operation::Status { .. } => Self::Status,
        }
    }

    /// The name in traces: one word.
    pub fn name(self) -> &'static str {
        self.into()
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
    pub(crate) fn run<D: BlockDevice + ?Sized>(&mut self, device: &D) {
        self.result = Some(self.operation.run_on(device));
    }

    /// First byte and length in bytes; zeroes for a flush.
    pub fn range(&self) -> (u64, u64) {
        self.operation.range()
    }
}
