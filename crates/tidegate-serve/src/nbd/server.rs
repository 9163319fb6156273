//! The server: listens, gives each client a thread, and stops in good order.
//!
//! Invariants: there are never more connections than [`Limits::connections`]; [`Server::run`] returns only
//! when every connection has ended and every accepted request has finished.
//!
//! Entry points: [`ServerBuilder`], [`Server::run`], [`StopHandle`].

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::time::Timespec;

use super::connection::{Connection, Fault};
use super::export::Exports;
use super::listen::Listener;
use super::log::{Log, LogSink};
use super::statistics::{Counters, StatisticsSource};
use super::worker::{Job, Mailbox, Wake, Workers};
use super::{Export, ListenAddress, ServeError, Tls};

/// How much clients may ask for.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections at a time; more are closed at once.
    pub connections: usize,
    /// Data of one read or write, in bytes: at least a block, at most 32 MiB, a power of two.
    pub max_request_bytes: u32,
    /// Data of one connection's requests that may wait in memory, in bytes; one request is always let in.
    pub in_flight_bytes: usize,
    /// Requests of one connection that may wait for slow devices.
    pub in_flight_requests: usize,
    /// Threads that run requests of slow devices and long requests.
    pub workers: usize,
    /// Time that a client has for its handshake.
    pub handshake_timeout: Duration,
    /// Time that clients have for reading their last replies when the server stops.
    pub stop_grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            max_request_bytes: 32 << 20,
            in_flight_bytes: 64 << 20,
            in_flight_requests: 256,
            workers: 16,
            handshake_timeout: Duration::from_secs(30),
            stop_grace: Duration::from_secs(5),
        }
    }
}

/// What all threads of a server share.
pub(super) struct Shared {
    pub(super) exports: Arc<Exports>,
    pub(super) limits: Limits,
    pub(super) tls: Option<Tls>,
    pub(super) counters: Arc<Counters>,
    pub(super) stopping: AtomicBool,
    log: Log,
    live: Mutex<HashMap<u64, Arc<Mailbox>>>,
    one_ended: Condvar,
}

/// Collects what a server needs.
#[derive(Default)]
pub struct ServerBuilder {
    exports: Vec<Export>,
    tls: Option<Tls>,
    limits: Limits,
    log: Option<LogSink>,
}

impl ServerBuilder {
    /// Nothing is offered yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Offers an export. The first one is what clients get that ask for the empty name.
    #[must_use]
    pub fn export(mut self, export: Export) -> Self {
        self.exports.push(export);
        self
    }

    /// Offers or requires TLS.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Replaces the default limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Where lines about misbehaving clients go; standard error by default. Their rate is limited.
    #[must_use]
    pub fn log(mut self, sink: LogSink) -> Self {
        self.log = Some(sink);
        self
    }

    /// Listens at `addresses`. Clients can connect from now on; they are served once the server runs.
    ///
    /// # Errors
    /// [`ServeError::Export`], [`ServeError::Limit`], [`ServeError::InUse`] or [`ServeError::Io`].
    pub fn bind(self, addresses: &[ListenAddress]) -> Result<Server, ServeError> {
        check_limits(&self.limits, &self.exports)?;
        let exports = Arc::new(Exports::new(self.exports)?);
        let listeners = addresses.iter().map(Listener::bind).collect::<Result<Vec<_>, _>>()?;
        let sink = self.log.unwrap_or_else(|| Arc::new(to_standard_error));
        let shared = Shared {
            exports,
            limits: self.limits,
            tls: self.tls,
            counters: Arc::default(),
            stopping: AtomicBool::new(false),
            log: Log::new(sink),
            live: Mutex::default(),
            one_ended: Condvar::new(),
        };
        Ok(Server { shared: Arc::new(shared), listeners })
    }
}

fn to_standard_error(line: &str) {
    // Where nobody reads it, nobody misses it.
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn check_limits(limits: &Limits, exports: &[Export]) -> Result<(), ServeError> {
    let most = limits.max_request_bytes;
    let block_bytes = exports.iter().map(|export| export.geometry().block_bytes).max().unwrap_or(0);
    if most.is_power_of_two() && most <= 32 << 20 && most >= block_bytes {
        return Ok(());
    }
    Err(ServeError::Limit(format!(
        "a largest request of {most} bytes: expected a power of two from a block ({block_bytes}) to 32 MiB"
    )))
}

/// Stops a server from any thread. Copies stop the same server.
#[derive(Clone)]
pub struct StopHandle(Arc<Wake>);

impl StopHandle {
    /// A handle to give to [`Server::run`].
    ///
    /// # Errors
    /// The system has no more descriptors.
    pub fn new() -> Result<Self, ServeError> {
        Ok(Self(Arc::new(Wake::new()?)))
    }

    /// Asks the server to stop: it takes no more connections and no more requests, finishes those that it
    /// has received, and returns from [`Server::run`].
    pub fn stop(&self) {
        self.0.wake();
    }
}

/// A server that listens.
pub struct Server {
    shared: Arc<Shared>,
    listeners: Vec<Listener>,
}

impl Server {
    /// Where the server listens; ports are those that the system chose.
    pub fn addresses(&self) -> Vec<ListenAddress> {
        self.listeners.iter().map(|listener| listener.address().clone()).collect()
    }

    /// Where the server's statistics can be read, also while it runs.
    pub fn statistics(&self) -> StatisticsSource {
        StatisticsSource(Arc::clone(&self.shared.counters))
    }

    /// Serves until `stop` says so. Then the sockets are closed and their files removed, and requests that
    /// were received are finished and answered.
    ///
    /// # Errors
    /// [`ServeError::Io`]: threads cannot be started, or waiting for connections fails.
    pub fn run(self, stop: &StopHandle) -> Result<(), ServeError> {
        let workers = Workers::start(self.shared.limits.workers)?;
        let jobs = workers.sender();
        let result = accept_until_stopped(&self.shared, &self.listeners, stop, &jobs);
        drop((self.listeners, jobs));
        self.shared.stop_connections();
        workers.join();
        result
    }
}

/// How long not to accept when the system has no descriptors or memory left.
const SHORTAGE_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

fn accept_until_stopped(
    shared: &Arc<Shared>,
    listeners: &[Listener],
    stop: &StopHandle,
    jobs: &Sender<Job>,
) -> Result<(), ServeError> {
    let mut fds = vec![PollFd::new(&*stop.0, PollFlags::IN)];
    fds.extend(listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
    let mut short = false;
    loop {
        let (watched, timeout) = if short { (1, Some(&SHORTAGE_PAUSE)) } else { (fds.len(), None) };
        match poll(&mut fds[..watched], timeout) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(ServeError::io("cannot wait for connections", error)),
        }
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
        short = false;
        for listener in listeners {
            short |= accept_all(shared, listener, jobs);
        }
    }
}

/// Takes all waiting connections; true if the system is short of something.
fn accept_all(shared: &Arc<Shared>, listener: &Listener, jobs: &Sender<Job>) -> bool {
    loop {
        match listener.accept() {
            Ok((socket, peer)) => {
                if let Err(error) = start_connection(shared, socket, peer, jobs) {
                    shared.log.line(&format!("nbd: {error}"));
                    return true;
                }
            }
            Err(Errno::AGAIN) => return false,
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                shared.log.line(&format!("nbd: cannot accept connections: {error}"));
                return true;
            }
            // The client has gone away already, or the like.
            Err(_) => {}
        }
    }
}

fn start_connection(
    shared: &Arc<Shared>,
    socket: OwnedFd,
    peer: String,
    jobs: &Sender<Job>,
) -> Result<(), ServeError> {
    let limit = shared.limits.connections;
    if shared.live.lock().len() >= limit {
        shared.counters.connections_refused.fetch_add(1, Ordering::Relaxed);
        shared.log.line(&format!("nbd: {peer}: refused, there are {limit} connections already"));
        return Ok(());
    }
    let place = Place::take(shared, Arc::new(Mailbox::new()?));
    let jobs = jobs.clone();
    let serve = move || {
        let mailbox = Arc::clone(&place.mailbox);
        let mut connection = Connection::new(&place.shared, socket, mailbox, jobs);
        if let Err(Fault::Broken(what)) = connection.serve() {
            place.shared.counters.client_faults.fetch_add(1, Ordering::Relaxed);
            place.shared.log.line(&format!("nbd: {peer}: connection {} closed: {what}", place.id));
        }
    };
    let thread = std::thread::Builder::new().name("nbd-connection".into()).spawn(serve);
    thread
        .map(drop)
        .map_err(|error| ServeError::io("cannot start a thread for a connection", error))
}

/// A connection's place among those of the server, given back when dropped.
struct Place {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    id: u64,
}

impl Place {
    fn take(shared: &Arc<Shared>, mailbox: Arc<Mailbox>) -> Self {
        let id = shared.counters.connections.fetch_add(1, Ordering::Relaxed);
        shared.counters.connections_open.fetch_add(1, Ordering::Relaxed);
        shared.live.lock().insert(id, Arc::clone(&mailbox));
        Self { shared: Arc::clone(shared), mailbox, id }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.counters.connections_open.fetch_sub(1, Ordering::Relaxed);
        self.shared.live.lock().remove(&self.id);
        self.shared.one_ended.notify_all();
    }
}

impl Shared {
    /// Tells all connections to stop, and waits until they have.
    fn stop_connections(&self) {
        self.stopping.store(true, Ordering::Release);
        let mut live = self.live.lock();
        for mailbox in live.values() {
            mailbox.wake().wake();
        }
        while !live.is_empty() {
            self.one_ended.wait(&mut live);
        }
    }
}
