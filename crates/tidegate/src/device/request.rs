//! Operations as values: alone, in batches, and tried at once.

use super::{BlockDevice, Extent, Result, WriteFlags, ZeroFlags};

/// The client and the I/O class of a request. Tiers pass both on to the tier below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Context {
    /// The client's queue: a connection, or a queue of a virtual disk. It determines locality and
    /// IO classes.
    pub queue: u32,
    /// The I/O class, which decides how a cache treats the request; 0 for requests without one.
    pub class: u8,
}

/// The outcome of [`BlockDevice::attempt`].
#[derive(Debug)]
pub enum Attempt {
    /// The operation ran to its end.
    Done(Result<()>),
    /// The operation has to wait for something slower than memory, and the device left it alone.
    /// The caller still owns its memory, and starts or runs it.
    WouldBlock,
}

impl Attempt {
    /// Returns the result of an operation that ran to its end.
    pub fn done(self) -> Option<Result<()>> {
        match self {
            Self::Done(result) => Some(result),
            Self::WouldBlock => None,
        }
    }
}

/// An operation of a device.
#[derive(Debug, strum::EnumDiscriminants)]
#[strum_discriminants(name(Op), doc = "The kind of a request.")]
#[strum_discriminants(derive(Hash, strum::IntoStaticStr), strum(serialize_all = "snake_case"))]
pub enum Operation<'a> {
    /// Reads `buf.len()` bytes at `offset`. Fails if they are misaligned or out of range, or the
    /// medium fails; the content of `buf` is undefined then.
    Read {
        /// First byte.
        offset: u64,
        /// Where the data goes.
        buf: &'a mut [u8],
    },
    /// Writes `data` at `offset`. Fails if it is misaligned or out of range, the device is
    /// read-only or has no space, or its medium fails. After an error each block is old or new,
    /// none is torn.
    Write {
        /// First byte.
        offset: u64,
        /// The data.
        data: &'a [u8],
        /// How it is to be written.
        flags: WriteFlags,
    },
    /// Makes every write acknowledged before this call durable. Fails if the medium fails: data
    /// written since the last successful flush may not be durable then.
    Flush,
    /// Tells the device that the content of `len` bytes at `offset` is no longer needed; reads of
    /// each whole block then return zeroes or the old bytes. Fails as a write does.
    Discard {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Makes `len` bytes at `offset` read as zeroes. Fails as a write does, and as
    /// [`Unsupported`](super::DeviceErrorKind::Unsupported) if [`ZeroFlags::fast_only`] is set and
    /// the device would have to write zeroes.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// How zeroes are to be written.
        flags: ZeroFlags,
    },
    /// Gets the allocation state of `len` bytes at `offset`: adjacent extents of whole blocks that
    /// cover a prefix of the range, at least one block and at most `most` extents. Fails as a read
    /// does.
    Status {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Most extents.
        most: usize,
        /// Receives the extents; the old content is lost.
        extents: &'a mut Vec<Extent>,
    },
}

impl Operation<'_> {
    /// Answers a [`Status`](Self::Status) by one extent of data, for a device that knows no holes.
    /// Leaves any other operation alone.
    pub fn report_data(&mut self) {
        if let Self::Status { offset, len, extents, .. } = self {
            **extents = vec![Extent::data(*offset, *len)];
        }
    }

    /// Returns the same operation over the same memory, with a shorter borrow.
    pub(crate) fn reborrow(&mut self) -> Operation<'_> {
        match *self {
            Self::Read { offset, ref mut buf } => Operation::Read { offset, buf },
            Self::Write { offset, data, flags } => Operation::Write { offset, data, flags },
            Self::Flush => Operation::Flush,
            Self::Discard { offset, len } => Operation::Discard { offset, len },
            Self::WriteZeroes { offset, len, flags } => {
                Operation::WriteZeroes { offset, len, flags }
            }
            Self::Status { offset, len, most, ref mut extents } => {
                Operation::Status { offset, len, most, extents }
            }
        }
    }

    /// Returns the first byte and the length in bytes; zeroes for a flush.
    pub fn range(&self) -> (u64, u64) {
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

impl Op {
    /// Returns the kind of `operation`.
    pub fn of(operation: &Operation<'_>) -> Self {
        operation.into()
    }

    /// Returns whether operations of this kind change blocks.
    pub(crate) fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes)
    }

    /// Returns the name in traces, one word.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// One request of a batch, with its result once [`BlockDevice::submit`] has returned.
#[derive(Debug)]
pub struct Request<'a> {
    pub(super) operation: Operation<'a>,
    pub(super) result: Option<Result<()>>,
}

impl<'a> Request<'a> {
    /// Makes a request that has not run yet.
    pub fn new(operation: Operation<'a>) -> Self {
        Self { operation, result: None }
    }

    /// Returns the operation.
    pub fn operation(&self) -> &Operation<'a> {
        &self.operation
    }

    /// Returns the result; `None` before the request was submitted.
    pub fn result(&self) -> Option<&Result<()>> {
        self.result.as_ref()
    }

    /// Takes the result out, so that the request can be submitted again.
    pub fn take_result(&mut self) -> Option<Result<()>> {
        self.result.take()
    }

    /// Runs the request alone on `device`.
    pub(crate) fn run_on<D: BlockDevice + ?Sized>(&mut self, device: &D) {
        self.result = Some(device.run(&mut self.operation));
    }
}
