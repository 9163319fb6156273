//! The requests of one client at a device. A request that has to wait for nothing runs at once;
//! each other request is started.
//!
//! Invariants:
//! 1. Each started operation comes back exactly once from [`DeviceQueue::collect`].
//! 2. No thread waits for a started operation: its completion posts to the client's mailbox.

use std::sync::Arc;

use tidegate::device::{AsyncRequest, BlockDevice, Context, Operation, OwnedOperation, Result};

use crate::mailbox::Mailbox;

/// An operation that was started and is complete.
pub(crate) struct Done<T> {
    /// The client's tag of the operation.
    pub(crate) tag: T,
    /// How it ended.
    pub(crate) result: Result<()>,
    /// The operation itself, with its memory.
    pub(crate) operation: OwnedOperation,
}

/// The step after an operation that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// No further step: the operation is complete.
    Complete,
    /// A flush; the operation is complete when the flush is.
    Flush,
}

/// The requests of one client at a device.
pub(crate) struct DeviceQueue<T> {
    device: Arc<dyn BlockDevice>,
    context: Context,
    mailbox: Arc<Mailbox<Done<T>>>,
    in_flight: usize,
}

impl<T: Send + 'static> DeviceQueue<T> {
    /// Returns an empty queue that posts completions to `mailbox`.
    pub(crate) fn new(
        device: Arc<dyn BlockDevice>,
        context: Context,
        mailbox: Arc<Mailbox<Done<T>>>,
    ) -> Self {
        Self { device, context, mailbox, in_flight: 0 }
    }

    /// Returns the number of operations that were started and not collected.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Runs `operation` on this thread. Returns `None` if it would have to wait.
    pub(crate) fn attempt(&self, operation: &mut Operation<'_>) -> Option<Result<()>> {
        self.device.attempt(operation, self.context).done()
    }

    /// Starts `operation`, which is collected under `tag`.
    pub(crate) fn start(&mut self, tag: T, operation: OwnedOperation, then: Then) {
        self.in_flight += 1;
        let (device, context) = (Arc::clone(&self.device), self.context);
        let mailbox = Arc::clone(&self.mailbox);
        let completion = move |operation, result: Result<()>| {
            let post = move |result| mailbox.post(Done { tag, result, operation });
            if then == Then::Complete || result.is_err() {
                return post(result);
            }
            let flush = AsyncRequest::new(OwnedOperation::Flush, context, |_, ended| post(ended));
            device.start(flush);
        };
        let request = AsyncRequest::new(operation, context, completion);
        Arc::clone(&self.device).start(request);
    }

    /// Moves the complete operations to `into`, which must be empty.
    pub(crate) fn collect(&mut self, into: &mut Vec<Done<T>>) {
        self.mailbox.collect(into);
        self.in_flight -= into.len();
    }
}
