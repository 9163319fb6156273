//! Requests that a device starts and completes later: they own their memory.
//!
//! Invariants:
//! 1. The completion of an [`AsyncRequest`] is called exactly once, on every path. A request that a
//!    device drops, by a bug or a panic, completes with an error.
//! 2. The completion gets the request's memory back.
//! 3. A completion never blocks: it runs on the thread that completes the requests of a device.

use std::mem::replace;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{
    Attempt, BlockDevice, Context, DeviceError, DeviceErrorKind, Extent, IoBuffer, Operation,
    Result, WriteFlags, ZeroFlags,
};

/// The operation of an asynchronous request: an [`Operation`] that owns its memory.
#[derive(Debug)]
pub enum OwnedOperation {
    /// [`Operation::Read`] into all of `buffer`.
    Read {
        /// First byte.
        offset: u64,
        /// Where the data goes.
        buffer: IoBuffer,
    },
    /// [`Operation::Write`] of all of `buffer`.
    Write {
        /// First byte.
        offset: u64,
        /// The data.
        buffer: IoBuffer,
        /// How it is to be written.
        flags: WriteFlags,
    },
    /// [`Operation::Flush`].
    Flush,
    /// [`Operation::Discard`].
    Discard {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// [`Operation::WriteZeroes`].
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// How zeroes are to be written.
        flags: ZeroFlags,
    },
    /// [`Operation::Status`].
    Status {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Most extents.
        most: usize,
        /// Where the extents go.
        extents: Vec<Extent>,
    },
}

impl OwnedOperation {
    /// Copies `operation`, and the data of a write, into memory of its own.
    pub(super) fn like(operation: &Operation<'_>) -> Self {
        match *operation {
            Operation::Read { offset, ref buf } => {
                Self::Read { offset, buffer: IoBuffer::new(buf.len()) }
            }
            Operation::Write { offset, data, flags } => {
                let mut buffer = IoBuffer::new(data.len());
                buffer.data_mut().copy_from_slice(data);
                Self::Write { offset, buffer, flags }
            }
            Operation::Flush => Self::Flush,
            Operation::Discard { offset, len } => Self::Discard { offset, len },
            Operation::WriteZeroes { offset, len, flags } => {
                Self::WriteZeroes { offset, len, flags }
            }
            Operation::Status { offset, len, most, .. } => {
                Self::Status { offset, len, most, extents: Vec::new() }
            }
        }
    }

    /// Copies the result of a read or a query to `operation`, which this is [like](Self::like).
    pub(super) fn give_back(self, operation: &mut Operation<'_>) {
        match (operation, self) {
            (Operation::Read { buf, .. }, Self::Read { buffer, .. }) => {
                buf.copy_from_slice(buffer.data());
            }
            (Operation::Status { extents, .. }, Self::Status { extents: found, .. }) => {
                **extents = found;
            }
            _ => {}
        }
    }

    /// Returns the operation over this one's memory.
    pub fn borrow(&mut self) -> Operation<'_> {
        match self {
            Self::Read { offset, buffer } => {
                Operation::Read { offset: *offset, buf: buffer.data_mut() }
            }
            Self::Write { offset, buffer, flags } => {
                Operation::Write { offset: *offset, data: buffer.data(), flags: *flags }
            }
            Self::Flush => Operation::Flush,
            Self::Discard { offset, len } => Operation::Discard { offset: *offset, len: *len },
            Self::WriteZeroes { offset, len, flags } => {
                Operation::WriteZeroes { offset: *offset, len: *len, flags: *flags }
            }
            Self::Status { offset, len, most, extents } => {
                Operation::Status { offset: *offset, len: *len, most: *most, extents }
            }
        }
    }

    /// Returns the buffer of a read or a write.
    pub fn into_buffer(self) -> Option<IoBuffer> {
        match self {
            Self::Read { buffer, .. } | Self::Write { buffer, .. } => Some(buffer),
            _ => None,
        }
    }
}

/// Called with the result of a request and its memory.
type Completion = Box<dyn FnOnce(OwnedOperation, Result<()>) + Send>;

/// A request for [`BlockDevice::start`].
pub struct AsyncRequest {
    operation: OwnedOperation,
    context: Context,
    completion: Option<Completion>,
}

impl AsyncRequest {
    /// Makes a request. Any thread may call `completion` with the result; it must not block.
    pub fn new(
        operation: OwnedOperation,
        context: Context,
        completion: impl FnOnce(OwnedOperation, Result<()>) + Send + 'static,
    ) -> Self {
        Self { operation, context, completion: Some(Box::new(completion)) }
    }

    /// Returns the client and the class of the request.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Returns the operation over the request's memory.
    pub fn operation(&mut self) -> Operation<'_> {
        self.operation.borrow()
    }

    /// Returns the operation.
    pub fn owned(&self) -> &OwnedOperation {
        &self.operation
    }

    /// Gives the request memory of its own again, with the data of a write, and leaks the memory to
    /// which the kernel may still write or from which it may still read.
    pub(super) fn leak_memory(&mut self) {
        let new = OwnedOperation::like(&self.operation.borrow());
        std::mem::forget(replace(&mut self.operation, new));
    }

    /// Ends the request with `result`.
    pub fn complete(mut self, result: Result<()>) {
        self.finish(result);
    }

    /// Runs the request to its end on `device`, on this thread. If the device panics, it fails.
    pub fn run_on<D: BlockDevice + ?Sized>(self, device: &D) {
        self.run_by(|operation| device.run(operation));
    }

    /// Runs the request on this thread by `run`, a device's function, and completes it.
    pub(super) fn run_by(mut self, run: impl FnOnce(&mut Operation<'_>) -> Result<()>) {
        let ran = catch_unwind(AssertUnwindSafe(|| run(&mut self.operation.borrow())));
        let result = ran.unwrap_or_else(|_| {
            Err(DeviceError::new(DeviceErrorKind::Io, "the device panicked in a request"))
        });
        self.complete(result);
    }

    /// Runs the request at once on `device`. Returns the request if it would block.
    pub fn attempt_on<D: BlockDevice + ?Sized>(mut self, device: &D) -> Option<Self> {
        match device.attempt(&mut self.operation.borrow(), self.context) {
            Attempt::Done(result) => {
                self.complete(result);
                None
            }
            Attempt::WouldBlock => Some(self),
        }
    }

    /// Runs the request at once on `device` if that does not block, else starts it there.
    pub fn start_on(self, device: &Arc<dyn BlockDevice>) {
        if let Some(request) = self.attempt_on(&**device) {
            Arc::clone(device).start(request);
        }
    }

    /// Makes the request that a layer sends to the device below. When that ends, `then` gets this
    /// request, with its memory, and the result.
    #[must_use]
    pub fn forward(mut self, then: impl FnOnce(Self, Result<()>) + Send + 'static) -> Self {
        let operation = replace(&mut self.operation, OwnedOperation::Flush);
        Self::new(operation, self.context, move |operation, result| {
            self.operation = operation;
            then(self, result);
        })
    }

    fn finish(&mut self, result: Result<()>) {
        if let Some(completion) = self.completion.take() {
            completion(replace(&mut self.operation, OwnedOperation::Flush), result);
        }
    }
}

impl Drop for AsyncRequest {
    fn drop(&mut self) {
        if self.completion.is_some() {
            let context = "the device gave a request up without an answer";
            self.finish(Err(DeviceError::new(DeviceErrorKind::Io, context)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::device::memory::MemoryDevice;

    fn flush(told: std::sync::mpsc::Sender<Result<()>>) -> AsyncRequest {
        AsyncRequest::new(OwnedOperation::Flush, Context::default(), move |_, result| {
            told.send(result).unwrap();
        })
    }

    #[test]
    fn a_dropped_request_completes_with_an_error() {
        let (told, results) = channel();
        drop(flush(told.clone()));
        assert!(results.recv().unwrap().is_err());
        drop(flush(told).forward(AsyncRequest::complete));
        assert!(results.recv().unwrap().is_err());
    }

    #[test]
    fn a_forwarded_request_gets_its_memory_back() {
        let device = MemoryDevice::new(512, 8).unwrap();
        let (told, results) = channel();
        let read = OwnedOperation::Read { offset: 0, buffer: IoBuffer::new(512) };
        let request = AsyncRequest::new(read, Context::default(), move |operation, result| {
            told.send((operation.into_buffer().map(|it| it.data().len()), result)).unwrap();
        });
        let below = request.forward(|request, result| {
            assert!(matches!(request.owned(), OwnedOperation::Read { .. }));
            request.complete(result);
        });
        assert!(below.attempt_on(&device).is_none());
        let (len, result) = results.recv().unwrap();
        assert_eq!((len, result.is_ok()), (Some(512), true));
    }
}
