//! Counters of a server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use tidegate::device::{DeviceError, DeviceErrorKind};

/// Kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
}

/// Number of [`Kind`]s.
const KINDS: usize = 7;

/// A server's counts since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Statistics {
    /// Connections open now.
    pub connections_open: u64,
    /// Connections taken.
    pub connections: u64,
    /// Connections refused because there were too many.
    pub connections_refused: u64,
    /// Connections closed because the client broke the protocol or its socket failed.
    pub client_faults: u64,
    /// Read requests answered.
    pub reads: u64,
    /// Write requests answered.
    pub writes: u64,
    /// Flush requests answered.
    pub flushes: u64,
    /// Trim requests answered.
    pub trims: u64,
    /// Cache requests answered.
    pub caches: u64,
    /// Write-zeroes requests answered.
    pub write_zeroes: u64,
    /// Block status requests answered.
    pub block_statuses: u64,
    /// Bytes of data read.
    pub read_bytes: u64,
    /// Bytes of data written.
    pub written_bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Errors of sound requests: the device failed, or there was no memory.
    pub failures: u64,
}

/// Counters of connections, shared by the server's threads.
#[derive(Default)]
pub(crate) struct ConnectionCounters {
    pub(crate) open: AtomicU64,
    pub(crate) taken: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) client_faults: AtomicU64,
}

/// Counters of requests.
#[derive(Default)]
pub(crate) struct Counts<T> {
    requests: [T; KINDS],
    read_bytes: T,
    written_bytes: T,
    errors: T,
    failures: T,
}

impl<T> Counts<T> {
    fn iter(&self) -> impl Iterator<Item = &T> {
        let Self { requests, read_bytes, written_bytes, errors, failures } = self;
        requests.iter().chain([read_bytes, written_bytes, errors, failures])
    }
}

/// The counts of one export, shared by the threads of its clients.
pub(crate) type RequestCounters = Counts<AtomicU64>;

/// The counts of one connection that are not yet in its export's counters. No other thread sees
/// them, so counting costs next to nothing.
pub(crate) type Tally = Counts<u64>;

impl RequestCounters {
    /// Adds the counts of a connection, and resets them.
    pub(crate) fn add(&self, tally: &mut Tally) {
        for (counter, &count) in self.iter().zip(tally.iter()) {
            if count > 0 {
                counter.fetch_add(count, Ordering::Relaxed);
            }
        }
        *tally = Tally::default();
    }
}

impl Tally {
    /// Counts a request of `len` bytes as done; an unknown one, without `kind`, is not counted.
    pub(crate) fn done(&mut self, kind: Option<Kind>, len: u32) {
        let Some(kind) = kind else { return };
        self.requests[kind as usize] += 1;
        match kind {
            Kind::Read => self.read_bytes += u64::from(len),
            Kind::Write => self.written_bytes += u64::from(len),
            _ => {}
        }
    }

    /// Counts a request that was answered with an error because it was not sound.
    pub(crate) fn refused(&mut self, kind: Option<Kind>) {
        self.errors += 1;
        self.done(kind, 0);
    }

    /// Counts a request that the device answered with `error`: it failed, or the request was not
    /// sound.
    pub(crate) fn ended_with(&mut self, kind: Option<Kind>, error: &DeviceError) {
        use DeviceErrorKind::{Corrupt, Io, NoSpace};
        match error.kind() {
            Io | NoSpace | Corrupt => self.failed(kind),
            _ => self.refused(kind),
        }
    }

    /// Counts a sound request that was answered with an error.
    pub(crate) fn failed(&mut self, kind: Option<Kind>) {
        self.failures += 1;
        self.refused(kind);
    }
}

/// Reads the statistics of a server, or of one of its exports, also after the server's end.
#[derive(Clone)]
pub struct StatisticsSource {
    pub(crate) connections: Arc<ConnectionCounters>,
    /// The exports whose sum is shown.
    pub(crate) exports: Vec<Arc<RequestCounters>>,
}

impl StatisticsSource {
    /// Returns the statistics of a device without connections.
    pub(crate) fn of(counters: Arc<RequestCounters>) -> Self {
        Self { connections: Arc::default(), exports: vec![counters] }
    }

    /// Returns the statistics of this server with the requests of `others` added.
    #[must_use]
    pub fn with(mut self, others: impl IntoIterator<Item = Self>) -> Self {
        self.exports.extend(others.into_iter().flat_map(|other| other.exports));
        self
    }

    /// Returns the present counts. The counts of connections are the whole server's.
    pub fn snapshot(&self) -> Statistics {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let sum = |counter: &dyn Fn(&RequestCounters) -> &AtomicU64| {
            self.exports.iter().map(|export| get(counter(export))).sum()
        };
        let requests = |kind: Kind| sum(&|export| &export.requests[kind as usize]);
        let connections = &self.connections;
        Statistics {
            connections_open: get(&connections.open),
            connections: get(&connections.taken),
            connections_refused: get(&connections.refused),
            client_faults: get(&connections.client_faults),
            reads: requests(Kind::Read),
            writes: requests(Kind::Write),
            flushes: requests(Kind::Flush),
            trims: requests(Kind::Trim),
            caches: requests(Kind::Cache),
            write_zeroes: requests(Kind::WriteZeroes),
            block_statuses: requests(Kind::BlockStatus),
            read_bytes: sum(&|export| &export.read_bytes),
            written_bytes: sum(&|export| &export.written_bytes),
            errors: sum(&|export| &export.errors),
            failures: sum(&|export| &export.failures),
        }
    }
}
