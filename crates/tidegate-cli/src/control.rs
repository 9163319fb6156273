//! The control socket of a served pool: where it is, what it answers, and how commands ask.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tidegate::stack::{Stack, Stat};
use tidegate::stats::{Collector, Metric, Reading, Unit};
use tidegate::tier::Purged;
use tidegate_serve::control::{Asked, ControlServer, Reply, Request, ask};
use tidegate_serve::metrics::MetricsServer;
use tidegate_serve::nbd::{ListenAddress, Statistics, StatisticsSource};

use tidegate_run::PoolPaths;

use crate::log::{Level, say};
use crate::snapshot::{Made, Source};

const CONNECTIONS_OPEN: Metric =
    Metric::gauge("connections_open", Unit::Count, "Connections open now");
const CONNECTIONS: Metric = Metric::counter("connections", Unit::Count, "Connections taken");
const CONNECTIONS_REFUSED: Metric = Metric::counter(
    "connections_refused",
    Unit::Count,
    "Connections refused because there were too many",
);
const CLIENT_FAULTS: Metric = Metric::counter(
    "client_faults",
    Unit::Count,
    "Connections closed because the client broke the protocol or its socket failed",
);
const READS: Metric = Metric::counter("reads", Unit::Count, "Read requests answered");
const WRITES: Metric = Metric::counter("writes", Unit::Count, "Write requests answered");
const FLUSHES: Metric = Metric::counter("flushes", Unit::Count, "Flush requests answered");
const TRIMS: Metric = Metric::counter("trims", Unit::Count, "Trim requests answered");
const WRITE_ZEROES: Metric =
    Metric::counter("write_zeroes", Unit::Count, "Write-zeroes requests answered");
const READ_BYTES: Metric = Metric::counter("read_bytes", Unit::Bytes, "Bytes of data read");
const WRITTEN_BYTES: Metric =
    Metric::counter("written_bytes", Unit::Bytes, "Bytes of data written");
const ERRORS: Metric = Metric::counter("errors", Unit::Count, "Requests answered with an error");
const FAILURES: Metric = Metric::counter(
    "failures",
    Unit::Count,
    "Sound requests answered with an error: the device failed, or there was no memory",
);

/// The control socket of the pool at `pool`, wherever that is served. Only the user has access to
/// its directory.
///
/// # Errors
/// The pool cannot be inspected, or the directory is not the user's own.
fn socket_of(pool: &Path) -> Result<PathBuf> {
    Ok(PoolPaths::of_pool(pool)?.socket().with_extension("serve"))
}

/// A pool that is served.
#[derive(Clone)]
pub(crate) struct Served {
    /// The name of its export.
    pub(crate) export: String,
    pub(crate) stack: Arc<Stack>,
    /// What its clients did; connections are the server's.
    pub(crate) statistics: StatisticsSource,
    /// For a copy of the pool.
    pub(crate) source: Source,
}

/// Answers `tidegate stat` and `tidegate set` for `served` until the server is dropped, at the
/// socket of the pool at `pool`, and at `socket` too.
///
/// # Errors
/// Nothing can listen at `socket`.
pub(crate) fn listen(
    pool: &Path,
    socket: Option<&Path>,
    served: &Served,
) -> Result<Vec<ControlServer>> {
    let start = |path: PathBuf| {
        let served = served.clone();
        ControlServer::start(&[path], move |request| answer(&request, &served))
    };
    let mut servers = Vec::new();
    if let Some(socket) = socket {
        servers.push(start(socket.to_owned())?);
    }
    match socket_of(pool).and_then(|path| Ok(start(path)?)) {
        Ok(server) => servers.push(server),
        // The pool is served all the same.
        Err(error) => {
            let what = "`tidegate stat` cannot find this server by its pool";
            say(Level::Warning, format_args!("{what}: {error:#}"));
        }
    }
    Ok(servers)
}

/// Shows the metrics of all `served` pools at `address` until the server is dropped.
///
/// # Errors
/// Nothing can listen there.
pub(crate) fn show_metrics(address: &ListenAddress, served: &[Served]) -> Result<MetricsServer> {
    let served = served.to_vec();
    Ok(MetricsServer::start(address, move || readings(&served))?)
}

/// What all `served` pools counted since their resets, each labelled with the name of its export if
/// that has one.
fn readings(served: &[Served]) -> Vec<Reading> {
    let mut collector = Collector::default();
    collector.extend(connections(served));
    for Served { export, stack, statistics, .. } in served {
        let mut own = Collector::default();
        in_front_end(&mut own, |it| collect_requests(&statistics.snapshot(), it));
        stack.metrics(&mut own);
        let own = stack.since_reset(own.finish());
        match export.as_str() {
            "" => collector.extend(own),
            name => collector.labelled("export", name, |it| it.extend(own)),
        }
    }
    collector.finish()
}

/// What was counted of connections. Those of several pools are their server's, and begin with it.
fn connections(served: &[Served]) -> Vec<Reading> {
    let Some(first) = served.first() else { return Vec::new() };
    let mut collector = Collector::default();
    in_front_end(&mut collector, |it| collect_connections(&first.statistics.snapshot(), it));
    match served {
        [only] => only.stack.since_reset(collector.finish()),
        _ => collector.finish(),
    }
}

fn in_front_end(collector: &mut Collector, collect: impl FnOnce(&mut Collector)) {
    collector.labelled("level", "front_end", |collector| {
        collector.labelled("tier", "nbd", collect);
    });
}

fn answer(request: &Request, served: &Served) -> Reply {
    match request {
        Request::Stat => Reply::Stat { stat: Box::new(served.stack.stat(front_end(served))) },
        Request::Reset => Reply::Stat { stat: Box::new(served.stack.reset(front_end(served))) },
        Request::Set { settings } => set(&served.stack, settings),
        Request::Purge => purge(&served.stack),
        Request::Snapshot { file } => snapshot(&served.source, file),
    }
}

/// Adds what the front end counted.
fn front_end(served: &Served) -> impl FnOnce(&mut Collector) {
    let found = served.statistics.snapshot();
    move |collector| {
        in_front_end(collector, |collector| {
            collect_connections(&found, collector);
            collect_requests(&found, collector);
        });
    }
}

fn purge(stack: &Stack) -> Reply {
    match stack.purge() {
        Ok(Purged { freed_bytes, left_bytes }) => Reply::Purged { freed_bytes, left_bytes },
        Err(error) => Reply::Failed { message: format!("{:#}", anyhow::Error::from(error)) },
    }
}

fn snapshot(source: &Source, file: &Path) -> Reply {
    match source.copy_to(file) {
        Ok(Made { bytes, held, backing }) => {
            let held_ns = u64::try_from(held.as_nanos()).unwrap_or(u64::MAX);
            Reply::Snapshot { bytes, held_ns, backing }
        }
        Err(error) => Reply::Failed { message: format!("{error:#}") },
    }
}

fn set(stack: &Stack, settings: &[(String, String)]) -> Reply {
    for (number, (key, value)) in settings.iter().enumerate() {
        if let Err(error) = stack.set(key, value) {
            let kept = match number {
                0 => String::new(),
                number => format!("; the first {number} of the settings stay changed"),
            };
            return Reply::Failed { message: format!("{error}{kept}") };
        }
    }
    Reply::Set
}

fn collect_connections(found: &Statistics, collector: &mut Collector) {
    for (metric, value) in [
        (&CONNECTIONS_OPEN, found.connections_open),
        (&CONNECTIONS, found.connections),
        (&CONNECTIONS_REFUSED, found.connections_refused),
        (&CLIENT_FAULTS, found.client_faults),
    ] {
        collector.add(metric, value);
    }
}

fn collect_requests(found: &Statistics, collector: &mut Collector) {
    for (metric, value) in [
        (&READS, found.reads),
        (&READ_BYTES, found.read_bytes),
        (&WRITES, found.writes),
        (&WRITTEN_BYTES, found.written_bytes),
        (&FLUSHES, found.flushes),
        (&TRIMS, found.trims),
        (&WRITE_ZEROES, found.write_zeroes),
        (&ERRORS, found.errors),
        (&FAILURES, found.failures),
    ] {
        collector.add(metric, value);
    }
}

/// What became of a question to a server.
pub(crate) enum Answer<T> {
    /// The server's answer.
    Of(T),
    /// No server has the pool open, or listens at the socket.
    Nobody,
    /// A supervisor of `tidegate run` listens at the socket.
    Supervisor,
}

/// Asks the server at `socket` for its statistics.
///
/// # Errors
/// It does not answer, or refuses.
pub(crate) fn stat_at(socket: &Path) -> Result<Answer<Stat>> {
    statistics_at(socket, &Request::Stat)
}

fn statistics_at(socket: &Path, asked: &Request) -> Result<Answer<Stat>> {
    Ok(match request(socket, socket, asked)? {
        Answer::Of(Reply::Stat { stat }) => Answer::Of(*stat),
        Answer::Of(_) => bail!("{}: the server gave an answer of another kind", socket.display()),
        Answer::Nobody => Answer::Nobody,
        Answer::Supervisor => Answer::Supervisor,
    })
}

/// Has the server that listens at `target`, or serves the pool there, count anew. Returns what it
/// counted until then.
///
/// # Errors
/// No server has it open, or it refuses.
pub(crate) fn reset_at(target: &Path) -> Result<Stat> {
    let socket = if is_socket(target) { target.to_owned() } else { socket_of(target)? };
    let shown = target.display();
    match statistics_at(&socket, &Request::Reset)? {
        Answer::Of(stat) => Ok(stat),
        Answer::Nobody => {
            bail!("{shown} is not served: counters are a server's, which begins with 0")
        }
        Answer::Supervisor => {
            bail!("{shown} is of a supervisor of `tidegate run`: its counters begin with it")
        }
    }
}

/// Has the server of the pool at `pool` write all that it holds to the backing, and give it up.
/// Nobody: it has none.
///
/// # Errors
/// The server does not answer, or the backing or the memory failed.
pub(crate) fn purge_of(pool: &Path) -> Result<Answer<Purged>> {
    Ok(match request(pool, &socket_of(pool)?, &Request::Purge)? {
        Answer::Of(Reply::Purged { freed_bytes, left_bytes }) => {
            Answer::Of(Purged { freed_bytes, left_bytes })
        }
        Answer::Of(_) => bail!("{}: the server gave an answer of another kind", pool.display()),
        Answer::Nobody => Answer::Nobody,
        Answer::Supervisor => Answer::Supervisor,
    })
}

/// Asks the server of the pool at `pool` for its statistics.
///
/// # Errors
/// As for [`stat_at`].
pub(crate) fn stat_of(pool: &Path) -> Result<Answer<Stat>> {
    stat_at(&socket_of(pool)?)
}

/// Has the server that listens at `target`, or serves the pool there, change `settings`.
///
/// # Errors
/// No server has it open, or a setting cannot be changed.
pub(crate) fn set_at(target: &Path, settings: Vec<(String, String)>) -> Result<()> {
    let is_socket = is_socket(target);
    let socket = if is_socket { target.to_owned() } else { socket_of(target)? };
    let shown = target.display();
    match request(target, &socket, &Request::Set { settings })? {
        Answer::Of(_) => Ok(()),
        Answer::Nobody => {
            bail!("{shown} is not served: settings are a server's; start `tidegate serve` first")
        }
        Answer::Supervisor => {
            bail!("{shown} is the socket of a supervisor of `tidegate run`, which has no settings")
        }
    }
}

/// Has the server at `target` copy its pool, or the backing of that, to `file`.
///
/// # Errors
/// No server has the pool open, or it cannot be copied.
pub(crate) fn snapshot_at(target: &Path, file: &Path) -> Result<Made> {
    let socket = if is_socket(target) { target.to_owned() } else { socket_of(target)? };
    let file = std::path::absolute(file).context("cannot tell where this process is")?;
    let shown = target.display();
    match request(target, &socket, &Request::Snapshot { file })? {
        Answer::Of(Reply::Snapshot { bytes, held_ns, backing }) => {
            Ok(Made { bytes, held: Duration::from_nanos(held_ns), backing })
        }
        Answer::Of(_) => bail!("{shown}: the server gave an answer of another kind"),
        Answer::Nobody => bail!("{shown} is not served: copy its file as it is"),
        Answer::Supervisor => {
            bail!("{shown} is of a supervisor of `tidegate run`: copy the files that it is for")
        }
    }
}

/// A socket is at `path`.
pub(crate) fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    path.metadata().is_ok_and(|found| found.file_type().is_socket())
}

/// Sends a request to the server at `socket`, which errors call `named`.
fn request(named: &Path, socket: &Path, request: &Request) -> Result<Answer<Reply>> {
    let asked = ask(socket, request);
    match asked.with_context(|| format!("the server at {} does not answer", socket.display()))? {
        Asked::Reply(Reply::Failed { message }) => bail!("{}: {message}", named.display()),
        Asked::Reply(reply) => Ok(Answer::Of(reply)),
        Asked::Nobody => Ok(Answer::Nobody),
        Asked::Other => Ok(Answer::Supervisor),
    }
}
