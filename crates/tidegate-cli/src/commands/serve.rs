//! `tidegate serve`: opens a pool, offers it over NBD, and drains it when a signal stops it.

use std::io;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use tidegate::device::BlockDevice;
use tidegate::device::delay::Delays;
use tidegate::device::watch::{Notices, Watch};
use tidegate::size::Size;
use tidegate::stack::{REGISTRY, Stack, StackOptions};
use tidegate_serve::metrics::MetricsServer;
use tidegate_serve::nbd::{
    Export, Limits, ListenAddress, Server, ServerBuilder, Statistics, StopHandle, Tls, TlsMode,
};

use crate::args::{LimitArgs, ServeArgs, TlsArgs, TlsWhen};
use crate::control;
use crate::output::{UsageError, field, line, print_lines, say};
use crate::{pool, signals};

/// Runs the command until a signal ends it.
///
/// # Errors
/// The pool or the DRAM tier cannot be opened, an address cannot be listened at, or a tier cannot
/// be drained.
pub(crate) fn run(args: &ServeArgs) -> Result<ExitCode> {
    check_addresses(&args.nbd)?;
    let tls = tls(&args.tls)?;
    // Caught before the first client can connect: no signal is lost, and none kills the process.
    let signals = signals::catch()?;
    let stack = Arc::new(open(args)?);
    let secure = tls.is_some();
    let server = bind(args, stack.top(), tls)?;
    let statistics = server.statistics();
    let stop = StopHandle::new()?;
    let control = control::listen(&args.pool, args.control.as_deref(), &stack, &statistics)?;
    let show = |address| control::show_metrics(address, &stack, &statistics);
    let metrics = args.metrics.as_ref().map(show).transpose()?;
    print_lines(&stack.description().lines())?;
    announce(args, &server.addresses(), metrics.as_ref(), secure)?;
    let started = Instant::now();
    let served = signals.during(&stop, || server.run(&stop));
    // Nothing is changed any more that the tiers still hold data for.
    drop((control, metrics));
    let closed = served.map_err(Into::into).and(stack.drain().map_err(anyhow::Error::from));
    summarize(&statistics.snapshot(), started.elapsed())?;
    print_lines(&stack.tier_lines())?;
    closed?;
    Ok(ExitCode::SUCCESS)
}

/// Opens the pool, and the tiers before it and the backing behind it that `args` name.
fn open(args: &ServeArgs) -> Result<Stack> {
    let region = Arc::new(pool::map(&args.pool, &args.memory, args.read_only)?);
    let stack = REGISTRY.open(StackOptions {
        region,
        path: args.pool.clone(),
        backing: args.backing.clone(),
        force: args.force,
        salvage: false,
        atomic_flush: args.atomic_flush,
        dram: args.dram,
        delays: args.delay_us.map(|us| Delays::of_each(us.saturating_mul(1000))),
        notices: Some(notices()),
    })?;
    if let Some(mode) = &args.mode {
        // Before the first client.
        stack.set("mode", mode)?;
    }
    Ok(stack)
}

/// # Errors
/// An address is given twice.
fn check_addresses(addresses: &[ListenAddress]) -> Result<()> {
    let twice =
        addresses.iter().enumerate().find(|(at, address)| addresses[..*at].contains(address));
    match twice {
        Some((_, address)) => {
            Err(UsageError(format!("--nbd {address} is given twice; give each address once"))
                .into())
        }
        None => Ok(()),
    }
}

fn bind(args: &ServeArgs, device: Arc<dyn BlockDevice>, tls: Option<Tls>) -> Result<Server> {
    let device = Arc::new(Watch::new(device, "export", notices()));
    let export = Export::new(args.export.clone(), device).read_only(args.read_only);
    let builder = ServerBuilder::new().export(export).limits(limits(&args.limits));
    let builder = match tls {
        Some(tls) => builder.tls(tls),
        None => builder,
    };
    Ok(builder.bind(&args.nbd)?)
}

/// Failures are lines on standard error when they begin, not only in what they are an answer to.
fn notices() -> Notices {
    Arc::new(|line| say(line))
}

fn limits(args: &LimitArgs) -> Limits {
    let default = Limits::default();
    let connections = args.max_connections.map_or(default.connections, NonZeroUsize::get);
    let memory_bytes = args.request_memory.map(|size| usize::try_from(size.bytes));
    let memory_bytes =
        memory_bytes.map_or(default.memory_bytes, |bytes| bytes.unwrap_or(usize::MAX));
    Limits { connections, memory_bytes, ..default }
}

fn tls(args: &TlsArgs) -> Result<Option<Tls>> {
    let (Some(certificate), Some(key)) = (&args.tls_cert, &args.tls_key) else { return Ok(None) };
    let mode = match args.tls {
        Some(TlsWhen::Require) | None => TlsMode::Required,
        Some(TlsWhen::Allow) => TlsMode::Optional,
    };
    let tls = Tls::from_files(mode, certificate, key, args.tls_ca.as_deref())?;
    let others = key.metadata().map_or(0, |found| found.mode() & 0o006);
    if others != 0 {
        say(format_args!("all users of this machine can read {}; chmod o-rw it", key.display()));
    }
    Ok(Some(tls))
}

/// Prints how the server is reached; `ready` is the last line.
fn announce(
    args: &ServeArgs,
    addresses: &[ListenAddress],
    metrics: Option<&MetricsServer>,
    secure: bool,
) -> io::Result<()> {
    if let Some(socket) = &args.control {
        field("control", format_args!("unix:{}", socket.display()))?;
    }
    if let Some(metrics) = metrics {
        field("metrics", metrics.address())?;
    }
    for address in addresses {
        if !secure && is_everywhere(address) {
            say(format_args!(
                "{address} is open to the network: each client that reaches it can read and write \
                 the export; listen at 127.0.0.1, or demand TLS certificates (--tls-ca)"
            ));
        }
        field("listening", address)?;
        field("try", format_args!("nbdinfo '{}'", uri(address, &args.export, secure)))?;
    }
    line("ready")
}

/// It is on all networks of the machine.
fn is_everywhere(address: &ListenAddress) -> bool {
    match address {
        ListenAddress::Unix(_) => false,
        ListenAddress::Tcp { host, .. } => {
            host.parse().is_ok_and(|address: IpAddr| address.is_unspecified())
        }
    }
}

/// The address as NBD clients write it.
fn uri(address: &ListenAddress, export: &str, secure: bool) -> String {
    let scheme = if secure { "nbds" } else { "nbd" };
    let export = percent_encoded(export);
    match address {
        ListenAddress::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            format!("{scheme}+unix:///{export}?socket={}", percent_encoded(&path.to_string_lossy()))
        }
        ListenAddress::Tcp { host, port } if host.contains(':') => {
            format!("{scheme}://[{host}]:{port}/{export}")
        }
        ListenAddress::Tcp { host, port } => format!("{scheme}://{host}:{port}/{export}"),
    }
}

/// `text` as a part of a URI: everything but letters, digits and `-._~/` as `%` and two hexadecimal
/// digits.
fn percent_encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let encode =
        |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(encode).collect()
}

fn summarize(done: &Statistics, uptime: Duration) -> io::Result<()> {
    let Statistics {
        reads,
        writes,
        flushes,
        trims,
        caches,
        write_zeroes,
        block_statuses,
        errors,
        ..
    } = done;
    let requests = reads + writes + flushes + trims + caches + write_zeroes + block_statuses;
    let (refused, broken) = (done.connections_refused, done.client_faults);
    line("stopped")?;
    field(
        "requests",
        format_args!(
            "{requests}: {reads} reads, {writes} writes, {flushes} flushes; {errors} failed"
        ),
    )?;
    field("read", Size { bytes: done.read_bytes })?;
    field("written", Size { bytes: done.written_bytes })?;
    field(
        "connections",
        format_args!("{}; {refused} refused, {broken} broken off", done.connections),
    )?;
    field("uptime", format_args!("{} s", uptime.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_can_be_pasted() {
        let uri = |address: &str, export, secure| uri(&address.parse().unwrap(), export, secure);
        assert_eq!(uri("unix:/run/a b", "", false), "nbd+unix:///?socket=/run/a%20b");
        assert_eq!(uri("unix:/run/s", "db", true), "nbds+unix:///db?socket=/run/s");
        assert_eq!(uri("tcp:localhost:10809", "a?b", false), "nbd://localhost:10809/a%3Fb");
        assert_eq!(uri("tcp:[::1]:1", "", true), "nbds://[::1]:1/");
    }
}
