//! The server: listens, gives each client a thread, and stops in good order.
//!
//! Invariants: there are never more connections than [`Limits::connections`], not counting
//! connections that are giving up their places; [`Server::run`] returns only when every connection
//! has ended and every accepted request has finished.
//!
//! Entry points: [`ServerBuilder`], [`Server::run`], [`StopHandle`].

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::time::Timespec;
use tidegate::device::spell::QUIET;

use super::connection::{Connection, Fault};
use super::export::{Exports, State};
use super::member::Member;
use super::service::Service;
use super::session::Mail;
use super::share::Share;
use super::shortage::Shortage;
use super::{
    Export, Limits, ListenAddress, LogSink, ServeError, StatisticsSource, StopHandle, Tls,
};
use crate::budget::{Budget, RequestMemory};
use crate::headroom;
use crate::listen::Listener;
use crate::log::Log;
use crate::statistics::RequestCounters;

/// The service, and the connections that are open.
struct Shared {
    service: Service,
    live: Mutex<HashMap<u64, Arc<Member>>>,
    one_ended: Condvar,
}

/// Collects the exports and settings of a server.
///
/// ```
/// use std::sync::Arc;
/// use tidegate::device::memory::MemoryDevice;
/// use tidegate_serve::nbd::{Export, ServerBuilder, StopHandle};
///
/// let device = Arc::new(MemoryDevice::new(512, 2048)?);
/// let address = "tcp:127.0.0.1:0".parse()?;
/// let server = ServerBuilder::new().export(Export::new("disk", device)).bind(&[address])?;
/// println!("clients connect to {}", server.addresses()[0]);
/// let stop = StopHandle::new()?;
/// let running = std::thread::spawn({
///     let stop = stop.clone();
///     move || server.run(&stop)
/// });
/// stop.stop(); // As SIGTERM does.
/// running.join().expect("the server does not panic")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct ServerBuilder {
    exports: Vec<(String, State)>,
    tls: Option<Tls>,
    limits: Limits,
    log: Option<LogSink>,
}

impl ServerBuilder {
    /// Returns a builder without exports.
    pub fn new() -> Self {
        Self::default()
    }

    /// Offers an export. Clients that ask for the empty name get the first export.
    #[must_use]
    pub fn export(mut self, export: Export) -> Self {
        self.exports.push((export.name.clone(), State::Open(export)));
        self
    }

    /// Announces an export whose device opens later: its clients wait until the [`ExportTable`]
    /// tells the outcome.
    #[must_use]
    pub fn later(mut self, name: impl Into<String>) -> Self {
        self.exports.push((name.into(), State::Opening));
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

    /// Sends lines about misbehaving clients to `sink`, at a limited rate. Default: standard error.
    #[must_use]
    pub fn log(mut self, sink: LogSink) -> Self {
        self.log = Some(sink);
        self
    }

    /// Listens at `addresses`. Clients can connect from now on; [`Server::run`] serves them.
    ///
    /// # Errors
    /// [`ServeError::Export`], [`ServeError::Limit`], [`ServeError::InUse`] or [`ServeError::Io`].
    pub fn bind(self, addresses: &[ListenAddress]) -> Result<Server, ServeError> {
        self.limits.check(None)?;
        let share = Share::new(&self.limits, self.tls.is_some());
        let leased_bytes = share.leased_bytes(&self.limits)?;
        let exports = Arc::new(Exports::new(self.exports)?);
        let checks = exports.of_open(|export| self.limits.check(Some(export)));
        checks.into_iter().collect::<Result<(), _>>()?;
        let listeners = Listener::bind_all(addresses)?;
        let sink = self.log.unwrap_or_else(|| Arc::new(to_standard_error));
        let service = Service {
            budget: Arc::new(Budget::new(leased_bytes)),
            exports,
            limits: self.limits,
            share,
            tls: self.tls,
            counters: Arc::default(),
            log: Log::new(sink),
            memory: Shortage::default(),
            stopping: AtomicBool::new(false),
        };
        let shared = Shared { service, live: Mutex::default(), one_ended: Condvar::new() };
        Ok(Server { shared: Arc::new(shared), listeners })
    }
}

fn to_standard_error(line: &str) {
    // A log line that cannot be written is lost, and the server goes on.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A server that listens.
pub struct Server {
    shared: Arc<Shared>,
    listeners: Vec<Listener>,
}

impl Server {
    /// Returns the addresses, with the ports that the system chose.
    pub fn addresses(&self) -> Vec<ListenAddress> {
        self.listeners.iter().map(|listener| listener.address().clone()).collect()
    }

    /// Returns the same addresses, with IP addresses in the place of names of hosts.
    pub fn numeric_addresses(&self) -> Vec<ListenAddress> {
        self.listeners.iter().map(Listener::numeric_address).collect()
    }

    /// Returns those addresses that other machines may reach.
    pub fn open_addresses(&self) -> Vec<ListenAddress> {
        let open = self.listeners.iter().filter(|listener| listener.is_open_to_network());
        open.map(|listener| listener.address().clone()).collect()
    }

    /// Returns a source of the server's statistics, which works also while the server runs.
    pub fn statistics(&self) -> StatisticsSource {
        self.exports().statistics()
    }

    /// Returns the exports of the server, whose devices may open while it runs.
    pub fn exports(&self) -> ExportTable {
        ExportTable(Arc::clone(&self.shared))
    }

    /// Serves until `stop` is signalled. Then closes the sockets and removes their files, and
    /// finishes and answers the requests that were received.
    ///
    /// # Errors
    /// [`ServeError::Io`] if no thread can be started, or waiting for connections fails.
    pub fn run(self, stop: &StopHandle) -> Result<(), ServeError> {
        let result = accept_until_stopped(&self.shared, &self.listeners, stop);
        drop(self.listeners);
        self.shared.stop_connections();
        result
    }
}

/// The exports of a server, for their owner, also while the server runs and after its end.
#[derive(Clone)]
pub struct ExportTable(Arc<Shared>);

impl ExportTable {
    /// Returns the memory for requests, which other front ends share with this server.
    pub fn request_memory(&self) -> RequestMemory {
        RequestMemory(Arc::clone(&self.0.service.budget))
    }

    /// Lets clients use `export`, which was announced.
    ///
    /// # Errors
    /// [`ServeError::Export`] if its name was not announced; [`ServeError::Limit`] if its blocks
    /// are larger than a request may be.
    pub fn offer(&self, export: Export) -> Result<(), ServeError> {
        self.0.service.limits.check(Some(&export))?;
        self.set(&export.name.clone(), State::Open(export))
    }

    /// Refuses clients that ask for export `name`, whose device cannot be opened now.
    ///
    /// # Errors
    /// [`ServeError::Export`] if the name was not announced.
    pub fn refuse(&self, name: &str) -> Result<(), ServeError> {
        self.set(name, State::Unavailable)
    }

    /// Ends the connections to export `name` once their requests are answered, and waits for that.
    /// If the export `reopens`, clients that ask for it wait until it is [offered](Self::offer)
    /// again or refused. Otherwise they are refused.
    ///
    /// # Errors
    /// [`ServeError::Export`] if the name was not announced.
    pub fn close(&self, name: &str, reopens: bool) -> Result<(), ServeError> {
        let state = if reopens { State::Opening } else { State::Unavailable };
        if let State::Open(export) = self.0.service.exports.set(name, state)? {
            export.users.close(|| wake_all(&self.0.live.lock()));
        }
        Ok(())
    }

    /// Makes `names` the names of the exports, in this order. Exports of other names must be
    /// [closed](Self::close); clients of new names wait.
    ///
    /// # Errors
    /// [`ServeError::Export`] if a name is given twice, or none is. Nothing has changed then.
    pub fn announce(&self, names: &[&str]) -> Result<(), ServeError> {
        self.0.service.exports.rename(names)?;
        wake_all(&self.0.live.lock());
        Ok(())
    }

    fn set(&self, name: &str, state: State) -> Result<(), ServeError> {
        self.0.service.exports.set(name, state)?;
        wake_all(&self.0.live.lock());
        Ok(())
    }

    /// Returns a source of the statistics of all exports that are open now.
    pub fn statistics(&self) -> StatisticsSource {
        self.statistics_from(self.0.service.exports.of_open(|export| Arc::clone(&export.counters)))
    }

    /// Returns a source of the statistics of `export`, with connections of the whole server.
    pub fn statistics_of(&self, export: &Export) -> StatisticsSource {
        self.statistics_from(vec![Arc::clone(&export.counters)])
    }

    fn statistics_from(&self, exports: Vec<Arc<RequestCounters>>) -> StatisticsSource {
        StatisticsSource { connections: Arc::clone(&self.0.service.counters), exports }
    }
}

/// Connections of a listener that are accepted before the server looks at its stop and at other
/// listeners.
const ACCEPTS_AT_ONCE: u32 = 16;
/// Pause after an accept that fails because the system has no descriptors or memory left.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);

fn accept_until_stopped(
    shared: &Arc<Shared>,
    listeners: &[Listener],
    stop: &StopHandle,
) -> Result<(), ServeError> {
    let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
    fds.extend(listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
    let (mut short, shortage) = (false, Shortage::default());
    loop {
        let watched = if short { 1 } else { fds.len() };
        // The end of a shortage is noticed without a client, too.
        let look = if short { Some(SHORTAGE_PAUSE) } else { shortage.is_on().then_some(QUIET) };
        let timeout = look.and_then(|look| Timespec::try_from(look).ok());
        match poll(&mut fds[..watched], timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(ServeError::io("cannot wait for connections", error)),
        }
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
        short = false;
        let log = &shared.service.log;
        for listener in listeners {
            if let Err(error) = accept_some(shared, listener) {
                short = true;
                tell_shortage(&shortage, log, &error);
            }
        }
        if !short {
            shortage.over(log, "connections are accepted");
        }
    }
}

fn tell_shortage(shortage: &Shortage, log: &Log, error: &ServeError) {
    let (mut what, mut advice) = (error.to_string(), "");
    if let ServeError::Io { source, .. } = error {
        what = format!("{what}: {source}");
        if Errno::from_io_error(source) == Some(Errno::MFILE) {
            advice = "; raise the limit (ulimit -n, LimitNOFILE=) or --max-connections less";
        }
    }
    shortage.note(log, &what, &format!("clients wait meanwhile{advice}"));
}

/// Accepts waiting connections, at most [`ACCEPTS_AT_ONCE`]: clients that connect without end keep
/// neither a stop nor the clients of another listener waiting. Each mailbox is created before its
/// connection is accepted: a client that waits while descriptors are short is served later, while
/// an accepted one would be lost.
///
/// # Errors
/// The system is short of descriptors or memory, or the socket fails; connections keep waiting.
fn accept_some(shared: &Arc<Shared>, listener: &Listener) -> Result<(), ServeError> {
    for _ in 0..ACCEPTS_AT_ONCE {
        if !headroom::for_connection() {
            return Err(ServeError::io("cannot accept connections", Errno::NOMEM));
        }
        let mail = Mail::new()?;
        match listener.accept() {
            Ok((socket, peer)) => start_connection(shared, socket, peer, mail)?,
            Err(Errno::AGAIN) => return Ok(()),
            Err(error) if concerns_one_client(error) => {}
            Err(error) => return Err(ServeError::io("cannot accept connections", error)),
        }
    }
    Ok(())
}

/// Returns whether an accept failed for one client, which has disconnected or was refused by the
/// system. The next accept then gets another client; after all other errors it fails again.
fn concerns_one_client(error: Errno) -> bool {
    let of_network = [
        Errno::NETDOWN,
        Errno::PROTO,
        Errno::NOPROTOOPT,
        Errno::HOSTDOWN,
        Errno::NONET,
        Errno::HOSTUNREACH,
        Errno::NETUNREACH,
        Errno::TIMEDOUT,
    ];
    [Errno::INTR, Errno::CONNABORTED, Errno::PERM].contains(&error) || of_network.contains(&error)
}

fn start_connection(
    shared: &Arc<Shared>,
    socket: OwnedFd,
    peer: String,
    mail: Mail,
) -> Result<(), ServeError> {
    let limit = shared.service.limits.connections;
    if !shared.has_place() {
        shared.service.counters.refused.fetch_add(1, Ordering::Relaxed);
        let line = format!("nbd: {peer}: refused, there are {limit} connections already");
        shared.service.log.line(&line);
        return Ok(());
    }
    let entry = Registration::new(shared, Arc::new(Member::new(Arc::new(mail))));
    let serve = move || {
        let shared = &entry.shared;
        let connection = Connection::new(&shared.service, entry.id, socket, &entry.member);
        // The socket closes after the count: a client that sees its end finds it counted.
        let (served, _connection) = match connection {
            Ok(mut connection) => (connection.serve(), Some(connection)),
            Err(fault) => (Err(fault), None),
        };
        if let Err(Fault::Broken(what)) = served {
            shared.service.counters.client_faults.fetch_add(1, Ordering::Relaxed);
            let line = format!("nbd: {peer}: connection {} closed: {what}", entry.id);
            shared.service.log.line(&line);
        }
    };
    let thread = std::thread::Builder::new().name("nbd-connection".into()).spawn(serve);
    thread
        .map(drop)
        .map_err(|error| ServeError::io("cannot start a thread for a connection", error))
}

/// A connection's entry in the server's list, removed when dropped.
struct Registration {
    shared: Arc<Shared>,
    member: Arc<Member>,
    id: u64,
}

impl Registration {
    fn new(shared: &Arc<Shared>, member: Arc<Member>) -> Self {
        let counters = &shared.service.counters;
        let id = counters.taken.fetch_add(1, Ordering::Relaxed);
        counters.open.fetch_add(1, Ordering::Relaxed);
        shared.live.lock().insert(id, Arc::clone(&member));
        Self { shared: Arc::clone(shared), member, id }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.shared.service.counters.open.fetch_sub(1, Ordering::Relaxed);
        self.shared.live.lock().remove(&self.id);
        self.shared.one_ended.notify_all();
    }
}

/// Makes the threads of `live` connections look at the state of the server.
fn wake_all(live: &HashMap<u64, Arc<Member>>) {
    for member in live.values() {
        member.mailbox.wake().wake();
    }
}

impl Shared {
    /// Returns whether one more connection may be taken. At the limit, tells one whose client does
    /// nothing to give up its place; it ends in a moment.
    fn has_place(&self) -> bool {
        let (live, limits, now) = (self.live.lock(), &self.service.limits, Instant::now());
        if live.values().filter(|member| !member.is_evicted()).count() < limits.connections {
            return true;
        }
        let overdue = live.values().filter_map(|it| Some((it.overdue(now, limits)?, it)));
        let longest = overdue.max_by_key(|(overdue, _)| *overdue);
        longest.inspect(|(_, member)| member.evict()).is_some()
    }

    /// Tells all connections to stop, and waits for their end.
    fn stop_connections(&self) {
        self.service.stopping.store(true, Ordering::Release);
        let mut live = self.live.lock();
        wake_all(&live);
        while !live.is_empty() {
            self.one_ended.wait(&mut live);
        }
    }
}
