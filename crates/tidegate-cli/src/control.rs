//! The control socket of a served pool: its path, its answers, and the requests of commands.

use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Map;
use tidegate::opening::is_one_file;
use tidegate::pool::{Content, Glance, glance};
use tidegate::stack::Stat;
use tidegate::stats::{Collector, Metric, Reading, Unit};
use tidegate::tier::{Purged, line};
use tidegate_serve::control::{
    Asked, ControlServer, Listed, Reply, Request, ask, ask_if, remove_dead_socket,
};
use tidegate_serve::metrics::MetricsServer;
use tidegate_serve::nbd::{ExportTable, ListenAddress, Statistics};

use tidegate_run::{
    PoolPaths, has_open, inspect_pool, is_locked, open_pool_file, socket_directories,
    socket_directory,
};

use crate::devices::{Device, Devices};
use crate::log::{Level, say};
use crate::output::absolute;
use crate::served::Served;
use crate::snapshot::Made;

/// A metric, and the function that takes it from the statistics.
type Counted = (Metric, fn(&Statistics) -> u64);

const fn count(name: &'static str, help: &'static str) -> Metric {
    Metric::counter(name, Unit::Count, help)
}

const UP: Metric = Metric::gauge("up", Unit::Count, "1 if the device is served, 0 if not");

static CONNECTIONS: [Counted; 4] = [
    (Metric::gauge("connections_open", Unit::Count, "Connections open now"), |it| {
        it.connections_open
    }),
    (count("connections", "Connections taken"), |it| it.connections),
    (count("connections_refused", "Connections refused because there were too many"), |it| {
        it.connections_refused
    }),
    (
        count(
            "client_faults",
            "Connections closed because the client broke the protocol or its socket failed",
        ),
        |it| it.client_faults,
    ),
];

static REQUESTS: [Counted; 9] = [
    (count("reads", "Read requests answered"), |it| it.reads),
    (Metric::counter("read_bytes", Unit::Bytes, "Bytes of data read"), |it| it.read_bytes),
    (count("writes", "Write requests answered"), |it| it.writes),
    (Metric::counter("written_bytes", Unit::Bytes, "Bytes of data written"), |it| it.written_bytes),
    (count("flushes", "Flush requests answered"), |it| it.flushes),
    (count("trims", "Trim requests answered"), |it| it.trims),
    (count("write_zeroes", "Write-zeroes requests answered"), |it| it.write_zeroes),
    (count("errors", "Requests answered with an error"), |it| it.errors),
    (
        count(
            "failures",
            "Sound requests answered with an error: the device failed, or there was no memory",
        ),
        |it| it.failures,
    ),
];

/// Returns the control socket of the pool at `pool`, whether or not a server has it open. Only the
/// user has access to the socket's directory.
///
/// # Errors
/// The pool cannot be inspected, or the directory is not the user's own.
fn socket_of(pool: &Path) -> Result<PathBuf> {
    Ok(serve_socket(&PoolPaths::of_pool(pool)?))
}

fn serve_socket(paths: &PoolPaths) -> PathBuf {
    paths.socket().with_extension("serve")
}

/// Answers control requests for `device` until the server is dropped, at the socket in its plan, if
/// it has one. While the device is not open, the answers say why.
///
/// # Errors
/// The server cannot listen at the socket.
pub(crate) fn listen(device: &Arc<Device>) -> Result<Option<ControlServer>> {
    let Some(socket) = device.plan.args.control.clone() else { return Ok(None) };
    let device = Arc::clone(device);
    let server = ControlServer::start(&[socket], move |request, client| {
        replied(match device.served() {
            Some(served) => answer(&request, &served, client),
            None => answer_without_pool(&request, &device),
        })
    })?;
    Ok(Some(server))
}

/// Answers control requests for `served` until the server is dropped, at the socket that commands
/// find by the pool. Returns `None` if the server cannot listen there; the pool is served all the
/// same.
pub(crate) fn listen_by_pool(served: &Served) -> Option<ControlServer> {
    let of_pool = served.clone();
    let start = |path| {
        ControlServer::start(&[path], move |request, client| {
            replied(answer(&request, &of_pool, client))
        })
    };
    match socket_of(&served.plan.pool).and_then(|path| Ok(start(path)?)) {
        Ok(server) => Some(server),
        Err(error) => {
            let what = "`tidegate stat` cannot find this server by its pool";
            say(Level::Warning, format_args!("{what}: {error:#}"));
            None
        }
    }
}

/// Answers requests for the list of `devices`, which clients reach at `addresses`, and by `answer`
/// other requests to the server as a whole, until this is dropped. Returns `None` if the server
/// cannot listen; the devices are served all the same.
pub(crate) fn listen_for_lists(
    devices: &Arc<Devices>,
    addresses: &[ListenAddress],
    answer: impl Fn(&Request) -> Reply + Send + Sync + 'static,
) -> Option<ControlServer> {
    let shown = |address: &ListenAddress| match address {
        ListenAddress::Unix(path) => ListenAddress::Unix(absolute(path)).to_string(),
        other => other.to_string(),
    };
    let addresses: Vec<_> = addresses.iter().map(shown).collect();
    let devices = Arc::clone(devices);
    let start = move |path| {
        ControlServer::start(&[path], move |request, _| match request {
            Request::List => Reply::List { devices: devices.listed(&addresses) },
            request => answer(&request),
        })
    };
    match server_socket().and_then(|path| Ok(start(path)?)) {
        Ok(server) => Some(server),
        Err(error) => {
            say(Level::Warning, format_args!("`tidegate list` cannot find this server: {error:#}"));
            None
        }
    }
}

/// The ending of the sockets where servers answer requests for lists.
const LISTS: &str = "server";

/// Returns the socket where this process answers requests for lists. Removes the sockets of killed
/// servers.
fn server_socket() -> Result<PathBuf> {
    let directory = socket_directory()?;
    for socket in list_sockets(&directory) {
        remove_dead_socket(&socket);
    }
    Ok(directory.join(format!("{}.{LISTS}", std::process::id())))
}

/// Returns the sockets in `directory` where servers answer requests for lists, in order.
fn list_sockets(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let is_of_lists = |path: &PathBuf| path.extension().is_some_and(|ending| ending == LISTS);
    let mut sockets: Vec<_> = entries.map(|entry| entry.path()).filter(is_of_lists).collect();
    sockets.sort();
    sockets
}

/// The devices of the servers of this machine.
#[derive(Default, Serialize)]
pub(crate) struct Servers {
    pub(crate) devices: Vec<Listed>,
    /// The sockets of servers that do not answer.
    pub(crate) silent: Vec<PathBuf>,
}

/// Asks all servers of this machine that this user may ask for their devices. A server that hangs
/// hides no other.
pub(crate) fn list() -> Servers {
    let mut servers = Servers::default();
    for (socket, answer) in ask_servers(&Request::List) {
        match answer {
            Some(Reply::List { devices }) => servers.devices.extend(devices),
            _ => servers.silent.push(socket),
        }
    }
    servers
}

/// Returns the device of `pool` and the socket of its server, if a server that this user may ask
/// serves it.
pub(crate) fn device_of(pool: &Path) -> Option<(PathBuf, Listed)> {
    let of_server = |(socket, answer)| {
        let Some(Reply::List { devices }) = answer else { return None };
        let is_open = |device: &Listed| device.state == "up" && is_one_file(&device.pool, pool);
        Some((socket, devices.into_iter().find(is_open)?))
    };
    ask_servers(&Request::List).into_iter().find_map(of_server)
}

/// Asks all servers of this machine that this user may ask. Returns the socket of each, with its
/// answer, or `None` if it does not answer.
pub(crate) fn ask_servers(request: &Request) -> Vec<(PathBuf, Option<Reply>)> {
    let directories = socket_directories();
    let sockets = directories.iter().flat_map(|directory| list_sockets(directory));
    let answer = |socket: PathBuf| {
        let asked = match ask(&socket, request) {
            // A server that ends meanwhile breaks the connection, and is not found again.
            Err(error) if error.kind() != ErrorKind::TimedOut && *request == Request::List => {
                ask(&socket, request)
            }
            asked => asked,
        };
        match asked {
            Ok(Asked::Reply(reply)) => Some((socket, Some(reply))),
            // The server has ended since, or was killed.
            Ok(Asked::Nobody | Asked::Other) => None,
            Err(_) => Some((socket, None)),
        }
    };
    sockets.filter_map(answer).collect()
}

fn replied(answer: Result<Reply>) -> Reply {
    answer.unwrap_or_else(|error| Reply::Failed { message: format!("{error:#}") })
}

/// Shows the metrics of all `devices` at `address` until the server is dropped.
///
/// # Errors
/// The server cannot listen there.
pub(crate) fn show_metrics(
    address: &ListenAddress,
    devices: &Arc<Devices>,
    exports: &ExportTable,
) -> Result<MetricsServer> {
    let (devices, exports) = (Arc::clone(devices), exports.clone());
    Ok(MetricsServer::start(address, move || readings(&devices.all(), &exports))?)
}

/// Returns the counts of all `devices` since their resets, labelled with their exports' names.
fn readings(devices: &[Arc<Device>], exports: &ExportTable) -> Vec<Reading> {
    let mut collector = Collector::default();
    collector.extend(connections(devices, exports));
    for device in devices {
        let own = readings_of(device.served());
        match device.plan.args.export.as_str() {
            "" => collector.extend(own),
            name => collector.labelled("export", name, |labelled| labelled.extend(own)),
        }
    }
    collector.finish()
}

/// Returns the counts of one device, which is down without `served`.
fn readings_of(served: Option<Served>) -> Vec<Reading> {
    let mut own = Collector::default();
    own.add(&UP, u64::from(served.is_some()));
    let Some(served) = served else { return own.finish() };
    let found = served.statistics.snapshot();
    in_front_end(&mut own, "nbd", |own| collect(&REQUESTS, &found, own));
    in_front_ends(&mut own, &served);
    served.stack.metrics(&mut own);
    served.stack.since_reset(own.finish())
}

/// Returns the counts of connections; with several devices the whole server's, since its start.
fn connections(devices: &[Arc<Device>], exports: &ExportTable) -> Vec<Reading> {
    let mut collector = Collector::default();
    let found = exports.statistics().snapshot();
    in_front_end(&mut collector, "nbd", |all| collect(&CONNECTIONS, &found, all));
    let readings = collector.finish();
    let only = if let [only] = devices { only.served() } else { None };
    match only {
        Some(only) => only.stack.since_reset(readings),
        None => readings,
    }
}

fn in_front_end(
    collector: &mut Collector,
    name: &'static str,
    collect: impl FnOnce(&mut Collector),
) {
    collector.labelled("level", "front_end", |collector| {
        collector.labelled("tier", name, collect);
    });
}

/// Adds the counts of the front ends beside NBD.
fn in_front_ends(collector: &mut Collector, served: &Served) {
    for reached in &served.reached {
        let found = reached.statistics.snapshot();
        let add = |collector: &mut Collector| collect(&REQUESTS, &found, collector);
        in_front_end(collector, reached.front_end, add);
    }
}

fn answer(request: &Request, served: &Served, client: BorrowedFd<'_>) -> Result<Reply> {
    let Served { stack, .. } = served;
    Ok(match request {
        Request::Stat => up(stack.stat(front_end(served))),
        Request::Reset => up(stack.reset(front_end(served))),
        Request::Set { settings } => {
            stack.set(&borrowed(settings))?;
            Reply::Set
        }
        Request::Flush => {
            let uncommitted_bytes = stack.destage()?;
            let (volatile_bytes, kept_bytes) = stack.pending_bytes();
            let left_bytes = volatile_bytes + kept_bytes;
            let has_no_backing = stack.description().backing.is_none();
            Reply::Flushed { left_bytes, uncommitted_bytes, has_no_backing }
        }
        Request::Purge => {
            let Purged { freed_bytes, left_bytes } = stack.purge()?;
            Reply::Purged { freed_bytes, left_bytes }
        }
        Request::List | Request::Reload { .. } | Request::End { .. } => {
            bail!("this socket is of one pool: `tidegate list` finds the servers")
        }
        Request::Snapshot { file } => {
            let Made { bytes, held, backing } = served.copy_to(file, client)?;
            let held_ns = u64::try_from(held.as_nanos()).unwrap_or(u64::MAX);
            Reply::Snapshot { bytes, held_ns, backing }
        }
    })
}

/// Returns the statistics of a device that is served.
fn up(mut stat: Stat) -> Reply {
    stat.description.insert("state".into(), "up".into());
    Reply::Stat { stat: Box::new(stat) }
}

/// Answers for a device that is not open.
fn answer_without_pool(request: &Request, device: &Device) -> Result<Reply> {
    let (pool, cause) = (device.plan.pool.display(), device.cause());
    match (request, cause) {
        (Request::Stat, cause) => {
            Ok(Reply::Stat { stat: Box::new(stat_without_pool(device, cause)) })
        }
        (_, Some(cause)) => bail!("{pool} is not served: {cause}"),
        (_, None) => bail!("{pool} is being opened: try again once it is served"),
    }
}

fn stat_without_pool(device: &Device, cause: Option<String>) -> Stat {
    let pool = device.plan.pool.display().to_string();
    let state = if cause.is_some() { "down" } else { "opening" };
    let shown =
        [Some(state), cause.as_deref()].into_iter().flatten().collect::<Vec<_>>().join(": ");
    let lines = vec![line("pool", &pool), line("state", shown)];
    let mut description = Map::new();
    description.insert("pool".into(), pool.into());
    description.insert("state".into(), state.into());
    description.extend(cause.map(|cause| ("cause".into(), cause.into())));
    let (tiers, settings, metrics) = Default::default();
    Stat { live: false, description, tiers, settings, metrics, lines }
}

/// Returns a function that adds the counts of the front end.
fn front_end(served: &Served) -> impl FnOnce(&mut Collector) {
    let found = served.statistics.snapshot();
    move |collector| {
        in_front_end(collector, "nbd", |collector| {
            collect(&CONNECTIONS, &found, collector);
            collect(&REQUESTS, &found, collector);
        });
        in_front_ends(collector, served);
    }
}

/// Returns `settings` as a stack takes them.
pub(crate) fn borrowed(settings: &[(String, String)]) -> Vec<(&str, &str)> {
    settings.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
}

fn collect(table: &[Counted], found: &Statistics, collector: &mut Collector) {
    for (metric, value) in table {
        collector.add(metric, value(found));
    }
}

/// The outcome of a request to a server.
pub(crate) enum Answer<T> {
    /// The server's answer.
    Of(T),
    /// No server has the pool open, or listens at the socket.
    Nobody,
    /// A supervisor of `tidegate run` listens at the socket.
    Supervisor,
}

impl<T> Answer<T> {
    /// Returns the server's answer, which no other process can give.
    ///
    /// # Errors
    /// No server serves `target`; `no_server` or `supervisor` ends the message.
    pub(crate) fn of_server(self, target: &Path, no_server: &str, supervisor: &str) -> Result<T> {
        let shown = target.display();
        match self {
            Self::Of(answer) => Ok(answer),
            Self::Nobody => match content_of(target)? {
                Some(found) => bail!("{shown} holds {found}, no pool"),
                None if is_locked(target) => bail!(
                    "{shown} is open in a process that does not answer here: run this as that \
                     process's user, or as root"
                ),
                None => bail!("{shown} is not served: {no_server}"),
            },
            Self::Supervisor => bail!("{shown} is {supervisor}"),
        }
    }
}

/// Returns the content of the file at `path` if it is no pool. Returns `None` for a pool, for a
/// devdax device, which no call reads, and for the socket of a server that has ended.
///
/// # Errors
/// The path is none of these, or cannot be opened.
fn content_of(path: &Path) -> Result<Option<Content>> {
    if is_socket(path) {
        return Ok(None);
    }
    let file = open_pool_file(path)?;
    Ok(match glance(&file) {
        Ok(Glance::Unknown(content)) => Some(content),
        _ => None,
    })
}

/// Asks the server that listens at `target`, or serves the pool there, for its statistics.
///
/// # Errors
/// The server does not answer, or refuses.
pub(crate) fn stat_of(target: &Path) -> Result<Answer<Stat>> {
    statistics(target, &Request::Stat)
}

fn statistics(target: &Path, asked: &Request) -> Result<Answer<Stat>> {
    request(target, asked, |reply| match reply {
        Reply::Stat { stat } => Some(*stat),
        _ => None,
    })
}

/// Asks the server that listens at `target`, or serves the pool there, to reset its counters.
/// Returns the counts until then.
///
/// # Errors
/// No server has the pool open, or the server refuses.
pub(crate) fn reset_at(target: &Path) -> Result<Stat> {
    statistics(target, &Request::Reset)?.of_server(
        target,
        "counters are a server's, which begins with 0",
        "of a supervisor of `tidegate run`: its counters begin with it",
    )
}

/// The outcome of a flush.
pub(crate) struct Flushed {
    /// Bytes that the tiers still hold for the backing.
    pub(crate) left_bytes: u64,
    /// The part of `left_bytes` that no flush of a client has committed.
    pub(crate) uncommitted_bytes: u64,
    /// The pool has no backing, and holds all data itself.
    pub(crate) has_no_backing: bool,
}

/// Asks the server of the pool at `pool` to destage everything that it holds.
///
/// # Errors
/// The server does not answer, or the backing or the memory failed.
pub(crate) fn flush_of(pool: &Path) -> Result<Answer<Flushed>> {
    request(pool, &Request::Flush, |reply| match reply {
        Reply::Flushed { left_bytes, uncommitted_bytes, has_no_backing } => {
            Some(Flushed { left_bytes, uncommitted_bytes, has_no_backing })
        }
        _ => None,
    })
}

/// Asks the server of the pool at `pool` to destage everything that it holds, and to remove its
/// pages. Returns [`Answer::Nobody`] if the pool has no server.
///
/// # Errors
/// The server does not answer, or the backing or the memory failed.
pub(crate) fn purge_of(pool: &Path) -> Result<Answer<Purged>> {
    request(pool, &Request::Purge, |reply| match reply {
        Reply::Purged { freed_bytes, left_bytes } => Some(Purged { freed_bytes, left_bytes }),
        _ => None,
    })
}

/// Asks the server that listens at `target`, or serves the pool there, to change `settings`.
///
/// # Errors
/// A setting cannot be changed, or the server does not answer.
pub(crate) fn set_at(target: &Path, settings: &[(String, String)]) -> Result<Answer<()>> {
    let set = Request::Set { settings: settings.to_vec() };
    request(target, &set, |reply| matches!(reply, Reply::Set).then_some(()))
}

/// Asks the server at `target` to copy its pool, or the pool's backing, to `file`.
///
/// # Errors
/// No server has the pool open, or it cannot be copied.
pub(crate) fn snapshot_at(target: &Path, file: &Path) -> Result<Made> {
    let file = std::path::absolute(file).context("cannot tell where this process is")?;
    let made = request(target, &Request::Snapshot { file }, |reply| match reply {
        Reply::Snapshot { bytes, held_ns, backing } => {
            Some(Made { bytes, held: Duration::from_nanos(held_ns), backing })
        }
        _ => None,
    });
    made?.of_server(
        target,
        "copy its file as it is",
        "of a supervisor of `tidegate run`: copy the files that it is for",
    )
}

/// Returns whether a socket is at `path`.
pub(crate) fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    path.metadata().is_ok_and(|found| found.file_type().is_socket())
}

/// Sends `asked` to the server that listens at `target`, or serves the pool there; `of` takes the
/// answer out of the expected reply.
///
/// # Errors
/// The server does not answer, refuses, or replies something else.
fn request<T>(
    target: &Path,
    asked: &Request,
    of: impl FnOnce(Reply) -> Option<T>,
) -> Result<Answer<T>> {
    let shown = target.display();
    match answer_at(target, asked)? {
        Asked::Reply(Reply::Failed { message }) => bail!("{shown}: {message}"),
        Asked::Reply(reply) => match of(reply) {
            Some(answer) => Ok(Answer::Of(answer)),
            None => bail!("{shown}: the server gave an answer of another kind"),
        },
        Asked::Nobody => Ok(Answer::Nobody),
        Asked::Other => Ok(Answer::Supervisor),
    }
}

/// Returns the message about a server that does not answer at `socket`.
pub(crate) fn not_answered(socket: &Path) -> String {
    format!("the server at {} does not answer", socket.display())
}

/// Asks the server that listens at `target`, or serves the pool there: a server of this user, or,
/// for root, of any user if it has the pool open.
fn answer_at(target: &Path, asked: &Request) -> Result<Asked> {
    if is_socket(target) {
        return ask(target, asked).with_context(|| not_answered(target));
    }
    let own = match socket_of(target) {
        Ok(socket) => ask(&socket, asked).with_context(|| not_answered(&socket))?,
        // Without the directory of the sockets, no server of this user can be asked.
        Err(_) => inspect_pool(target).map(|_| Asked::Nobody)?,
    };
    if own != Asked::Nobody || !rustix::process::geteuid().is_root() {
        return Ok(own);
    }
    for paths in PoolPaths::of_others(target)? {
        let socket = serve_socket(&paths);
        let asked = ask_if(&socket, asked, |process| has_open(process, target));
        let asked = asked.with_context(|| not_answered(&socket))?;
        if asked != Asked::Nobody {
            return Ok(asked);
        }
    }
    Ok(Asked::Nobody)
}
