//! The devices and addresses of `tidegate serve`, from the command line or from a file.

use std::net::{SocketAddr, ToSocketAddrs};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use tidegate::device::nbd::NbdAddress;
use tidegate_serve::nbd::{Limits, ListenAddress, TlsMode};

use crate::args::{DeviceArgs, LimitArgs, MemoryArgs, ServeArgs, TlsArgs, TlsWhen};
use crate::log::{Format, Level};
use crate::output::UsageError;

/// One server: its addresses, and a device for each export.
#[derive(Debug)]
pub(crate) struct ServePlan {
    pub(crate) nbd: Vec<ListenAddress>,
    pub(crate) tls: Option<TlsFiles>,
    pub(crate) limits: Limits,
    pub(crate) metrics: Option<ListenAddress>,
    pub(crate) log_format: Format,
    pub(crate) log_level: Level,
    /// The longest time of a stop.
    pub(crate) stop_timeout: Duration,
    pub(crate) devices: Vec<DevicePlan>,
    /// Devices that cannot be opened are tried again, and others are served meanwhile. Otherwise
    /// the failure ends the server.
    pub(crate) tries_again: bool,
    /// The server leaves the process that started it and its terminal once it is ready.
    pub(crate) is_detached: bool,
}

/// A pool, with the tiers before it, the backing behind it, and its export.
#[derive(Debug)]
pub(crate) struct DevicePlan {
    pub(crate) pool: PathBuf,
    pub(crate) args: DeviceArgs,
    pub(crate) memory: MemoryArgs,
    /// The device's name and position in the configuration file, for errors.
    pub(crate) origin: Option<String>,
}

/// Transport security.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    pub(crate) mode: TlsMode,
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    pub(crate) authorities: Option<PathBuf>,
}

impl ServePlan {
    /// Returns the plan of the command line.
    ///
    /// # Errors
    /// [`UsageError`] if two addresses collide, or no pool is given.
    pub(crate) fn of_arguments(args: &ServeArgs) -> Result<Self, UsageError> {
        let sockets = args.device.sockets();
        let addresses: Vec<_> = args.nbd.iter().chain(&args.metrics).chain(&sockets).collect();
        let collides = |at| collision(addresses[at], addresses[..at].iter().copied());
        if let Some(text) = (0..addresses.len()).find_map(collides) {
            return Err(UsageError(text));
        }
        let missing = || UsageError("a POOL or --config FILE is expected".into());
        let pool = args.pool.clone().ok_or_else(missing)?;
        let (device, memory) = (args.device.clone(), args.memory.clone());
        let device = DevicePlan { pool, args: device, memory, origin: None };
        if let Some(text) = device.own_export(&args.nbd) {
            return Err(UsageError(text));
        }
        Ok(Self {
            nbd: args.nbd.clone(),
            tls: TlsFiles::of_arguments(&args.tls),
            limits: limits_of(&args.limits),
            metrics: args.metrics.clone(),
            log_format: args.log.log_format,
            log_level: args.log.log_level,
            stop_timeout: Duration::from_secs(args.limits.stop_timeout.into()),
            devices: vec![device],
            tries_again: false,
            is_detached: args.detached,
        })
    }
}

impl ServePlan {
    /// Returns the keys of the settings, of the server as a whole, that differ in `other`.
    pub(crate) fn settings_that_differ(&self, other: &Self) -> Vec<&'static str> {
        let differ = [
            ("nbd", self.nbd != other.nbd),
            ("metrics", self.metrics != other.metrics),
            ("tls", self.tls != other.tls),
            ("max-connections", self.limits.connections != other.limits.connections),
            ("request-memory", self.limits.memory_bytes != other.limits.memory_bytes),
            ("stop-timeout", self.stop_timeout != other.stop_timeout),
            ("log-format", self.log_format != other.log_format),
            ("log-level", self.log_level != other.log_level),
        ];
        differ.into_iter().filter_map(|(key, differs)| differs.then_some(key)).collect()
    }
}

impl DevicePlan {
    /// Returns why the server that listens at `nbd` cannot have this device, if its backing is an
    /// export of that server: a stop ends the exports before the data is written to the backing.
    pub(crate) fn own_export(&self, nbd: &[ListenAddress]) -> Option<String> {
        let backing = self.args.backing.as_ref()?;
        let servers = [backing.server()?];
        self.own_export_at(nbd, &servers)
    }

    /// Does what [`own_export`](Self::own_export) does, with the name of the backing's host looked
    /// up.
    pub(crate) fn own_export_looked_up(&self, nbd: &[ListenAddress]) -> Option<String> {
        let NbdAddress::Tcp { host, port } = self.args.backing.as_ref()?.server()? else {
            return self.own_export(nbd);
        };
        let found = (host.as_str(), port).to_socket_addrs().ok()?;
        let numeric = |found: SocketAddr| NbdAddress::Tcp { host: found.ip().to_string(), port };
        self.own_export_at(nbd, &found.map(numeric).collect::<Vec<_>>())
    }

    fn own_export_at(&self, nbd: &[ListenAddress], servers: &[NbdAddress]) -> Option<String> {
        let is_reached =
            |address: &ListenAddress| servers.iter().any(|server| address.is_reached_at(server));
        let backing = self.args.backing.as_ref().filter(|_| nbd.iter().any(is_reached))?;
        Some(format!(
            "the backing {backing} is an export of this server, which ends its exports before it \
             writes to the backing: serve the pool and its backing by two servers"
        ))
    }

    /// Returns whether `other` is the same device, opened in the same way.
    pub(crate) fn is_as(&self, other: &Self) -> bool {
        (&self.pool, &self.args, &self.memory) == (&other.pool, &other.args, &other.memory)
    }
}

impl TlsFiles {
    pub(crate) fn of_arguments(args: &TlsArgs) -> Option<Self> {
        let mode = match args.tls {
            Some(TlsWhen::Require) | None => TlsMode::Required,
            Some(TlsWhen::Allow) => TlsMode::Optional,
        };
        Some(Self {
            mode,
            certificate: args.tls_cert.clone()?,
            key: args.tls_key.clone()?,
            authorities: args.tls_ca.clone(),
        })
    }
}

/// Returns why no server can listen at `address` and at all `earlier` ones, if none can.
pub(crate) fn collision<'a>(
    address: &ListenAddress,
    mut earlier: impl Iterator<Item = &'a ListenAddress>,
) -> Option<String> {
    let other = earlier.find(|other| address.collides_with(other))?;
    if other == address {
        return Some(format!("{address} is given twice; give each address once"));
    }
    Some(format!("{address} collides with {other}; give each a path or port of its own"))
}

/// Returns the limits, with defaults for limits that are not given.
pub(crate) fn limits_of(args: &LimitArgs) -> Limits {
    let default = Limits::default();
    let connections = args.max_connections.map_or(default.connections, NonZeroUsize::get);
    let memory_bytes = args.request_memory.map(|size| usize::try_from(size.bytes));
    let memory_bytes =
        memory_bytes.map_or(default.memory_bytes, |bytes| bytes.unwrap_or(usize::MAX));
    Limits { connections, memory_bytes, ..default }
}
