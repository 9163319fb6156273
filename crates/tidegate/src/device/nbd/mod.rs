//! An export of an NBD server as a device: the capacity tier on another process or machine.
//!
//! Invariants:
//! 1. Requests are sent as they are started, many at a time, on one connection. So an export needs
//!    no `NBD_FLAG_CAN_MULTI_CONN`: a flush covers what was answered on its own connection.
//! 2. A connection that is lost is made again, and what was not answered is sent again. A request
//!    that is not answered within its time limit fails with an error that says so.
//! 3. A flush never succeeds for writes that may be lost with a server; the next section says how.
//! 4. No byte of a server makes the device panic, or take memory that no request asked for.
//!
//! # A server that dies between a write and a flush
//!
//! A write that was acknowledged and not flushed may be in the server's memory only. When the
//! connection ends, the client cannot tell a server that died from a network that failed, and after
//! it has connected again, a flush would cover what the new server knows, without the lost write.
//! To send the write again would need a copy of all that was acknowledged since the last flush,
//! which only this memory would hold: the tier above has these bytes anyway, on persistent memory,
//! as log and cache keep what they write here until a flush has succeeded. So the device keeps
//! nothing and tells the loss: the next flush fails, and with it each flush that was asked for
//! before its failure was told. The tier above then writes again and flushes again, as after a
//! failed flush of a disk. A flush tells only of the writes that were acknowledged before it was
//! asked for; lost ones after that fail the next flush, whose caller knows them.
//!
//! Writes in flight when the connection ends are no part of the loss: they are sent again, whole,
//! before they are acknowledged. A write with FUA is durable when it is answered; at a server
//! without FUA it is a write and a flush, and fails if the connection ends between them. A server
//! that fails to flush may have lost what it has not answered yet, too: the connection is given up
//! then, as if it had been lost.
//!
//! What the protocol cannot give: a server that lives on may still carry out a request of a
//! connection that was given up, after a newer write of the same bytes on the next connection. It
//! matters only where a network, and not the server, fails in the middle of a write, or where a
//! server is silent for longer than the time limit.
//!
//! Map: [`NbdDevice`] answers the trait; `dial` connects; `handshake` agrees on an export, which is
//! [`NbdExport`], and `export` makes [`Geometry`] and rules of it; `engine` is the thread;
//! `exchange` cuts requests into pieces and takes replies; `flushes` decides over flushes;
//! [`protocol`] has the words that a server shares.

mod dial;
mod engine;
mod error;
mod exchange;
mod export;
mod flushes;
#[cfg(any(test, feature = "test-support"))]
#[doc(hidden)]
pub mod fuzzing;
mod handshake;
pub mod protocol;
#[cfg(all(test, not(loom)))]
mod tests;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

pub use dial::NbdAddress;
pub use error::NbdError;
pub use export::NbdExport;

use self::dial::Endpoints;
use self::engine::{Engine, Server};
use self::export::Rules;
use self::protocol::export_flag::SEND_TRIM;
use super::{
    AsyncRequest, BlockDevice, Context, DeviceError, DeviceErrorKind, Extent, Geometry, Operation,
    OwnedOperation, Request, Result,
};

/// Which export to open, and how.
#[derive(Debug, Clone)]
pub struct NbdOptions {
    /// Where the server listens.
    pub address: NbdAddress,
    /// The export's name; empty for the server's default.
    pub export: String,
    /// What errors call it, such as its URL.
    pub name: String,
    /// How long a request may take, with all attempts to reach the server again: at least 1 ms.
    pub timeout: Duration,
}

/// An export of an NBD server as a [`BlockDevice`].
pub struct NbdDevice {
    name: String,
    rules: Rules,
    engine: Engine,
}

impl NbdDevice {
    /// Connects to the server and opens the export.
    ///
    /// # Errors
    /// [`Io`](DeviceErrorKind::Io) with an [`NbdError`] as its source: the server cannot be
    /// reached, refuses, or offers an export that no device can be made of.
    pub fn open(options: &NbdOptions) -> Result<Self> {
        let NbdOptions { name, .. } = options;
        Self::connect(options).map_err(|error| {
            let context = format!("cannot open {name}");
            DeviceError::with_source(DeviceErrorKind::Io, context, error)
        })
    }

    fn connect(options: &NbdOptions) -> std::result::Result<Self, NbdError> {
        let NbdOptions { address, export, name, timeout } = options;
        let endpoints = Endpoints::of(address)?;
        let give_up_after = Server::give_up_after(*timeout);
        let (socket, rules) = endpoints.dial(export, None, give_up_after)?;
        let (name, export, timeout) = (name.clone(), export.clone(), *timeout);
        let server = Server { endpoints, export, rules: rules.clone(), timeout };
        let engine = Engine::start(&name, server, socket)?;
        Ok(Self { name, rules, engine })
    }

    /// What the server told about the export.
    pub fn export(&self) -> &NbdExport {
        &self.rules.export
    }

    /// The result of `operation` where the server has nothing to do for it.
    fn answer(&self, operation: &mut Operation<'_>) -> Option<Result<()>> {
        let (geometry, export) = (&self.rules.geometry, &self.rules.export);
        let checked = geometry.check_operation(operation);
        match *operation {
            Operation::Flush => geometry.read_only.then_some(Ok(())),
            _ if checked.is_err() || operation.range().1 == 0 => Some(checked),
            Operation::Discard { .. } if !export.has(SEND_TRIM) => Some(Ok(())),
            Operation::Status { offset, len, ref mut extents, .. } => {
                **extents = vec![Extent::data(offset, len)];
                Some(Ok(()))
            }
            _ => None,
        }
    }

    fn begin(&self, mut request: AsyncRequest) {
        match self.answer(&mut request.operation()) {
            Some(result) => request.complete(result),
            None => self.engine.submit(request),
        }
    }

    /// Runs requests, of which none is a flush or there is one only, to their ends.
    fn run_together(&self, requests: &mut [Request<'_>]) {
        let (told, ends) = channel();
        for (index, request) in requests.iter().enumerate() {
            let told = told.clone();
            let completion = move |operation, result| {
                // The receiver waits for all of them.
                let _ = told.send((index, operation, result));
            };
            let operation = OwnedOperation::like(&request.operation);
            self.begin(AsyncRequest::new(operation, Context::default(), completion));
        }
        drop(told);
        for (index, operation, result) in ends {
            let request = &mut requests[index];
            operation.give_back(&mut request.operation);
            request.result = Some(result);
        }
    }
}

impl BlockDevice for NbdDevice {
    fn geometry(&self) -> Geometry {
        self.rules.geometry
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let mut requests = [Request::new(operation.reborrow())];
        self.run_together(&mut requests);
        let [request] = requests;
        request.result.unwrap_or_else(|| {
            let context = format!("{} gave a request up", self.name);
            Err(DeviceError::new(DeviceErrorKind::Io, context))
        })
    }

    fn submit(&self, batch: &mut [Request<'_>]) {
        let is_flush = |it: &Request<'_>| matches!(it.operation, Operation::Flush);
        for requests in batch.chunk_by_mut(|one, next| !is_flush(one) && !is_flush(next)) {
            self.run_together(requests);
        }
    }

    fn start(self: Arc<Self>, request: AsyncRequest) {
        self.begin(request);
    }
}
