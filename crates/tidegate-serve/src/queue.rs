//! The requests of one client at a device: run at once where nothing waits, else started.
//!
//! Invariants:
//! 1. Each started operation comes back exactly once from [`DeviceQueue::collect`].
//! 2. No thread waits for a started operation: its completion posts to the client's mailbox.

use std::sync::Arc;

use tidegate::device::{AsyncRequest, BlockDevice, Context, Operation, OwnedOperation, Result};

use crate::mailbox::Mailbox;

/// An operation that was started and is complete.
pub(crate) struct Done<T> {
    /// What the client calls it.
    pub(crate) tag: T,
    /// How it ended.
    pub(crate) result: Result<()>,
    /// What it was, with its memory.
    pub(crate) operation: OwnedOperation,
}

/// What happens behind an operation that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// Nothing: it is complete.
    Complete,
    /// A flush; it is complete when that is.
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
    /// A queue without requests; completions go to `mailbox`.
    pub(crate) fn new(
        device: Arc<dyn BlockDevice>,
        context: Context,
        mailbox: Arc<Mailbox<Done<T>>>,
    ) -> Self {
        Self { device, context, mailbox, in_flight: 0 }
    }

    /// Operations that were started and not collected.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Runs `operation` on this thread, if it has to wait for nothing.
    pub(crate) fn attempt(&self, operation: &mut Operation<'_>) -> Option<Result<()>> {
        self.device.attempt(operation, self.context).done()
    }

    /// Starts `operation`, which comes back as `tag`.
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

    /// Moves the operations that are complete to `into`, which is empty.
    pub(crate) fn collect(&mut self, into: &mut Vec<Done<T>>) {
        self.mailbox.collect(into);
        self.in_flight -= into.len();
    }
}
