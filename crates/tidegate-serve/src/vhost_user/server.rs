//! The socket of a virtual machine's disk: one monitor at a time is served.
//!
//! Invariants:
//! 1. A connection is closed after its requests are answered: the monitor then looks in its memory
//!    how far the server has come.
//! 2. The protocol's crate waits for the rest of a message, and for space for an answer, without
//!    end. So it gets only whole messages, and only while there is space (`arrival`).

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
// The protocol's crate takes the standard library's mutex.
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use tidegate::device::{BlockDevice, Geometry};
use vhost::vhost_user::{BackendReqHandler, Error};

use super::REQUEST_BYTES_MAX;
use super::abi::SERIAL_BYTES;
use super::arrival::{Arrival, Next};
use super::ring::Disk;
use super::session::{Service, Session};
use crate::budget::RequestMemory;
use crate::identity::mark_of;
use crate::listen::Listener;
use crate::log::Log;
use crate::request::Rules;
use crate::statistics::StatisticsSource;
use crate::{ListenAddress, LogSink, ServeError, StopHandle, Worker};

/// Pause after a failed accept: the system is out of descriptors.
const ACCEPT_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// How to serve a disk.
pub struct Options {
    /// Path of the socket.
    pub socket: PathBuf,
    /// The disk's serial number for the guest; its first 20 bytes are used.
    pub serial: String,
    /// Describes the pool: a machine goes on only with a disk that has an equal identity.
    pub identity: String,
    /// Whether the end of the server by a kill loses no write that it has acknowledged.
    pub survives_a_kill: bool,
    /// Refuse writes, whatever the device allows.
    pub read_only: bool,
    /// The memory for requests that the front ends of a server share.
    pub memory: RequestMemory,
    /// Gets lines for the operator.
    pub log: LogSink,
}

/// A disk for a virtual machine. Dropping it answers the requests in progress, closes the
/// connection, and removes the socket.
pub struct VhostUser {
    path: PathBuf,
    statistics: StatisticsSource,
    service: Arc<Service>,
    stop: StopHandle,
    _worker: Worker,
}

/// The machine of a disk that was dropped.
pub struct DurableNote(Arc<Service>);

impl DurableNote {
    /// Notes in the machine's memory that all its acknowledged writes are durable. Without this
    /// note no server gives the machine a disk that holds writes in memory of its own.
    pub fn confirm(self) {
        self.0.claimed.lock().iter().for_each(|inflight| inflight.confirm());
    }
}

impl VhostUser {
    /// Offers `device` at a socket. Monitors can connect when this returns.
    ///
    /// # Errors
    /// [`ServeError::InUse`] or [`ServeError::Io`].
    pub fn start(device: &Arc<dyn BlockDevice>, options: &Options) -> Result<Self, ServeError> {
        let listener = Listener::bind(&ListenAddress::Unix(options.socket.clone()))?;
        let rules = Rules {
            geometry: device.geometry(),
            read_only: options.read_only,
            request_bytes_max: REQUEST_BYTES_MAX,
        };
        let mut serial = [0; SERIAL_BYTES];
        let text = options.serial.as_bytes();
        let len = text.len().min(SERIAL_BYTES);
        serial[..len].copy_from_slice(&text[..len]);
        let Geometry { blocks, block_bytes, .. } = rules.geometry;
        let is_read_only = options.read_only || rules.geometry.read_only;
        let described = format!("{} {blocks} {block_bytes} {is_read_only}", options.identity);
        let (device, counters) = (Arc::clone(device), Arc::default());
        let statistics = StatisticsSource::of(Arc::clone(&counters));
        let service = Arc::new(Service {
            disk: Arc::new(Disk { device, rules, serial, counters }),
            budget: Arc::clone(&options.memory.0),
            mark: mark_of(&described),
            survives_a_kill: options.survives_a_kill,
            claimed: parking_lot::Mutex::default(),
            log: Arc::new(Log::new(Arc::clone(&options.log))),
        });
        let (served, stop) = (Arc::clone(&service), StopHandle::new()?);
        let serve = move |stop: &StopHandle| serve(&listener, &served, stop);
        let worker = Worker::start("vhost-user", stop.clone(), serve)?;
        Ok(Self { path: options.socket.clone(), statistics, service, stop, _worker: worker })
    }

    /// Begins to stop: takes no more requests.
    pub fn begin_stop(&self) {
        self.stop.stop();
    }

    /// Returns a note for the machine that its acknowledged writes are durable. To be taken once
    /// the disk is dropped, and its tiers are written back.
    pub fn durable_note(&self) -> DurableNote {
        DurableNote(Arc::clone(&self.service))
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a source of the disk's statistics, which has no connections.
    pub fn statistics(&self) -> StatisticsSource {
        self.statistics.clone()
    }
}

/// Serves one monitor after the other until `stop` is signalled.
fn serve(listener: &Listener, service: &Arc<Service>, stop: &StopHandle) {
    loop {
        let mut ready = [PollFd::new(stop, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        let _ = poll(&mut ready, None);
        if !ready[0].revents().is_empty() {
            return;
        }
        match listener.accept() {
            Ok((socket, _)) => converse(socket, listener, service, stop),
            Err(Errno::AGAIN | Errno::CONNABORTED) => {}
            Err(_) => {
                let mut stopped = [PollFd::new(stop, PollFlags::IN)];
                let _ = poll(&mut stopped, Some(&ACCEPT_PAUSE));
            }
        }
    }
}

/// Handles the messages of one monitor until it leaves, breaks the protocol, or `stop` is
/// signalled. Then answers the requests in progress.
fn converse(socket: OwnedFd, listener: &Listener, service: &Arc<Service>, stop: &StopHandle) {
    let socket = UnixStream::from(socket);
    let ended = prepare(&socket).and_then(|open| {
        // Dropped before `open`: the monitor must not see the end of the connection before its
        // requests are answered.
        let session = Arc::new(Mutex::new(Session::new(Arc::clone(service))));
        let mut handler = BackendReqHandler::from_stream(socket, session);
        handle_messages(&mut handler, &open, listener, service, stop)
    });
    if let Err(error) = ended {
        service.log.line(&format!("vhost-user: the connection is closed: {error}"));
    }
}

/// Makes reads and writes of `socket` wait. Returns another descriptor of `socket`.
fn prepare(socket: &UnixStream) -> Result<UnixStream, Error> {
    let prepared = socket.set_nonblocking(false).and_then(|()| socket.try_clone());
    prepared.map_err(Error::ReqHandlerError)
}

fn handle_messages(
    handler: &mut BackendReqHandler<Mutex<Session>>,
    socket: &UnixStream,
    listener: &Listener,
    service: &Service,
    stop: &StopHandle,
) -> Result<(), Error> {
    let arrival = Arrival::new(socket).map_err(Error::ReqHandlerError)?;
    loop {
        match arrival.next(stop, listener).map_err(Error::ReqHandlerError)? {
            Next::Stop => return Ok(()),
            Next::Message => match handler.handle_request() {
                Ok(()) => {}
                Err(Error::Disconnected) => return Ok(()),
                Err(error) => return Err(error),
            },
            // A monitor that connects anew has closed its first connection before.
            Next::Other => {
                if let Ok(other) = listener.accept() {
                    service.log.line("vhost-user: another monitor is refused: the disk is in use");
                    drop(other);
                }
            }
        }
    }
}
