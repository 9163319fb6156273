//! An export of an NBD server as a device: the capacity tier on another process or machine.
//!
//! Invariants:
//! 1. Requests are sent as they are started, many at a time, on one connection. So an export needs
//!    no `NBD_FLAG_CAN_MULTI_CONN`: a flush covers requests answered on its own connection.
//! 2. After the loss of a connection the device reconnects and sends unanswered requests again. A
//!    request fails, with an error that says so, once the server has been silent or gone for the
//!    time limit; each answer to the oldest request starts the limit anew. An
//!    export that shows another content than before is not used.
//! 3. A flush never succeeds if writes may be lost with a server; the next section says how.
//! 4. No input from a server makes the device panic, or allocate memory that no request needs.
//!
//! # A server that dies between a write and a flush
//!
//! An acknowledged write that was not flushed may be in the server's memory only. When the
//! connection ends, the client cannot tell a crashed server from a failed network. A flush after
//! the reconnection covers only writes that the new server knows, without the lost one. To send
//! lost writes again, the device would need a copy of all writes acknowledged since the last flush.
//! The tier above has this copy anyway, on persistent memory: log and cache keep the data that they
//! write here until a flush succeeds. So the device keeps nothing and reports the loss: the next
//! flush fails, and so does each flush requested before that failure was reported. The tier above
//! then writes and flushes again, as after a failed flush of a disk. A flush reports only losses of
//! writes acknowledged before its request; later ones fail the next flush, whose caller knows them.
//!
//! Writes in flight when the connection ends are not lost: they are sent again, whole, before they
//! are acknowledged. A write with FUA is durable when it is answered; at a server without FUA it is
//! a write and a flush, and fails if the connection ends between the two. A server that fails to
//! flush may also have lost unanswered requests: the device drops the connection, as if it had been
//! lost.
//!
//! A limit of the protocol: a server that lives on may still execute a request of a dropped
//! connection, after a newer write of the same bytes on the next connection. This matters only if a
//! network, not the server, fails in the middle of a write, or if a server is silent for longer
//! than the time limit.
//!
//! Map: [`NbdDevice`] implements the trait; `dial` connects; `handshake` agrees on an export
//! ([`NbdExport`]), and `export` derives [`Geometry`] and rules; `engine` is the thread; `exchange`
//! cuts requests into pieces and takes replies, `watched` knows the content by which another export
//! is noticed, and `device::flushes` decides over flushes;
//! [`protocol`] has the definitions that a server shares.

mod dial;
mod engine;
mod error;
mod exchange;
mod export;
#[cfg(any(test, feature = "test-support"))]
#[doc(hidden)]
pub mod fuzzing;
mod handshake;
pub mod protocol;
#[cfg(all(test, not(loom)))]
mod tests;
mod watched;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

pub use dial::NbdAddress;
pub use error::NbdError;
pub use export::NbdExport;
pub use watched::{Part, Watch};

use self::dial::Endpoints;
use self::engine::{Engine, Server};
use self::export::Rules;
use self::protocol::export_flag::SEND_TRIM;
use self::watched::Watched;
use super::{
    AsyncRequest, BlockDevice, Context, DeviceError, DeviceErrorKind, Geometry, Operation,
    OwnedOperation, Request, Result,
};

/// Which export to open, and how.
#[derive(Debug, Clone)]
pub struct NbdOptions {
    /// Where the server listens.
    pub address: NbdAddress,
    /// The export's name; empty for the server's default.
    pub export: String,
    /// The device's name in errors, such as its URL.
    pub name: String,
    /// How long requests wait for a server that is silent or gone, with all attempts to reconnect:
    /// at least 1 ms. A request of many parts takes longer if the server answers the parts.
    pub timeout: Duration,
    /// Size of a block in bytes. A size that server and export do not allow is replaced by a near
    /// one. `None`: the size that the server prefers, up to 4096.
    pub block_bytes: Option<u32>,
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
    /// Fails as [`Io`](DeviceErrorKind::Io), with an [`NbdError`] as the source, if the server
    /// cannot be reached, refuses, or offers an export that a device cannot use.
    pub fn open(options: &NbdOptions) -> Result<Self> {
        Self::open_with(options, None)
    }

    /// Does what [`open`](Self::open) does. After each reconnection it compares what `watch` names,
    /// and uses no export that shows another content than this device has read or written there.
    ///
    /// # Errors
    /// Fails as [`open`](Self::open) does.
    pub fn open_watched(options: &NbdOptions, watch: &'static Watch) -> Result<Self> {
        Self::open_with(options, Some(watch))
    }

    fn open_with(options: &NbdOptions, watch: Option<&'static Watch>) -> Result<Self> {
        let NbdOptions { name, .. } = options;
        Self::connect(options, watch).map_err(|error| {
            let context = format!("cannot open {name}");
            DeviceError::with_source(DeviceErrorKind::Io, context, error)
        })
    }

    fn connect(
        options: &NbdOptions,
        watch: Option<&'static Watch>,
    ) -> std::result::Result<Self, NbdError> {
        let NbdOptions { address, export, name, timeout, block_bytes } = options;
        let endpoints = Endpoints::of(address)?;
        let give_up_after = Server::give_up_after(*timeout);
        let (socket, told) = endpoints.dial(export, None, give_up_after)?;
        let rules = Rules::of(told, *block_bytes)?;
        let (name, export, timeout) = (name.clone(), export.clone(), *timeout);
        let server = Server { endpoints, export, rules: rules.clone(), watch, timeout };
        let watched = Watched::new(&server.read_watched(&socket, None)?);
        let engine = Engine::start(&name, server, socket, watched)?;
        Ok(Self { name, rules, engine })
    }

    /// Returns the server's description of the export.
    pub fn export(&self) -> &NbdExport {
        &self.rules.export
    }

    /// Returns the result of `operation` if the server is not needed.
    fn answer(&self, operation: &mut Operation<'_>) -> Option<Result<()>> {
        let (geometry, export) = (&self.rules.geometry, &self.rules.export);
        let checked = geometry.check_operation(operation);
        match *operation {
            Operation::Flush => geometry.read_only.then_some(Ok(())),
            _ if checked.is_err() || operation.range().1 == 0 => Some(checked),
            Operation::Discard { .. } if !export.has(SEND_TRIM) => Some(Ok(())),
            Operation::Status { .. } => {
                operation.report_data();
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

    /// Runs requests to their ends. They are either a single flush or contain no flush.
    fn run_together(&self, requests: &mut [Request<'_>]) {
        let (told, ends) = channel();
        for (index, request) in requests.iter().enumerate() {
            let told = told.clone();
            let completion = move |operation, result| {
                // The receiver waits for all results.
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
