//! `tidegate serve`: opens pools, offers them over NBD, and drains them when a signal stops it.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tidegate::device::BlockDevice;
use tidegate::device::delay::Delays;
use tidegate::device::gate::Gate;
use tidegate::device::watch::{Notices, Watch};
use tidegate::pmem::RegionOptions;
use tidegate::size::Size;
use tidegate::stack::{REGISTRY, Stack, StackOptions};
use tidegate_serve::control::ControlServer;
use tidegate_serve::metrics::MetricsServer;
use tidegate_serve::nbd::{
    Export, ListenAddress, Server, ServerBuilder, Statistics, StopHandle, Tls, TlsMode,
};

use crate::args::ServeArgs;
use crate::control::{self, Served};
use crate::log::{self, Level, say, say_of};
use crate::notify::notify;
use crate::output::{field, line, print_lines};
use crate::plan::{DevicePlan, ServePlan, TlsFiles};
use crate::removed::{RemovalWatch, Watched};
use crate::snapshot::Source;
use crate::{config, pool, signals};

/// Runs the command until a signal ends it.
///
/// # Errors
/// What is asked for contradicts itself; a pool or a DRAM tier cannot be opened, an address cannot
/// be listened at, or a tier cannot be drained.
pub(crate) fn run(args: &ServeArgs) -> Result<ExitCode> {
    let plan = match &args.config {
        Some(file) => config::read(file)?,
        None => ServePlan::of_arguments(args)?,
    };
    log::set_up(plan.log_format, plan.log_level);
    serve(&plan)?;
    Ok(ExitCode::SUCCESS)
}

fn serve(plan: &ServePlan) -> Result<()> {
    let tls = plan.tls.as_ref().map(tls).transpose()?;
    // Caught before the first client can connect: no signal is lost, and none kills the process.
    let signals = signals::catch()?;
    let stacks = plan.devices.iter().map(open_named).collect::<Result<Vec<_>>>()?;
    let gates: Vec<_> = stacks.iter().map(|stack| Arc::new(Gate::new(stack.top()))).collect();
    let server = bind(plan, &gates, tls)?;
    let served: Vec<Served> = plan
        .devices
        .iter()
        .zip(stacks.into_iter().zip(gates))
        .map(|(device, (stack, gate))| served(device, stack, gate, &server))
        .collect::<Result<_>>()?;
    let stop = StopHandle::new()?;
    let control = listen_for_control(plan, &served)?;
    let show = |address| control::show_metrics(address, &served);
    let metrics = plan.metrics.as_ref().map(show).transpose()?;
    let removals = watch_files(plan, &served);
    announce(plan, &served, &server.addresses(), metrics.as_ref())?;
    let (started, statistics) = (Instant::now(), server.statistics());
    let run = signals.during(&stop, || server.run(&stop));
    // Nothing is changed any more that the tiers still hold data for.
    end_control(plan, control);
    drop((metrics, removals));
    let closed = close_all(&served);
    summarize(&statistics.snapshot(), started.elapsed())?;
    for one in &served {
        name_if_several(&served, one)?;
        print_lines(&one.stack.tier_lines())?;
        tell_kept(one)?;
    }
    run?;
    closed
}

fn open_named(device: &DevicePlan) -> Result<Arc<Stack>> {
    let opened = open(device);
    match &device.origin {
        Some(origin) => opened.with_context(|| origin.clone()),
        None => opened,
    }
}

/// Opens the pool, and the tiers before it and the backing behind it that `device` names.
fn open(device: &DevicePlan) -> Result<Arc<Stack>> {
    let memory = RegionOptions { read_only: device.read_only, ..device.memory.region_options() };
    let region = Arc::new(pool::map_to_resize(&device.pool, memory)?);
    let stack = REGISTRY.open(StackOptions {
        backing: device.backing.clone(),
        force: device.force,
        atomic_flush: device.atomic_flush,
        keep_dirty: device.keep_dirty,
        dram: device.dram,
        delays: device.delay_us.map(|us| Delays::of_each(us.saturating_mul(1000))),
        notices: Some(notices(device)),
        ..StackOptions::alone(region, device.pool.clone())
    })?;
    if let Some(mode) = &device.mode {
        // Before the first client.
        stack.set("mode", mode)?;
    }
    Ok(Arc::new(stack))
}

/// Ends the control sockets. A request that writes to the backing of a pool that keeps what is
/// dirty is not waited for.
fn end_control(plan: &ServePlan, control: Vec<Vec<ControlServer>>) {
    for (device, servers) in plan.devices.iter().zip(control) {
        if device.keep_dirty {
            servers.into_iter().for_each(ControlServer::abandon);
        }
    }
}

/// Drains each stack, or leaves what its pool holds there, also where another one fails.
///
/// # Errors
/// The first failure; the others are in the log.
fn close_all(served: &[Served]) -> Result<()> {
    let mut first = Ok(());
    for one in served {
        let Err(error) = one.stack.close() else { continue };
        if first.is_ok() {
            first = Err(error.into());
        } else {
            say(Level::Error, format_args!("{:#}", anyhow::Error::from(error)));
        }
    }
    first
}

/// Offers each device through its gate, which holds changes back while the device is copied.
fn bind(plan: &ServePlan, gates: &[Arc<Gate>], tls: Option<Tls>) -> Result<Server> {
    let complain = |line: &str| say(Level::Warning, line);
    let mut builder = ServerBuilder::new().limits(plan.limits.clone()).log(Arc::new(complain));
    for (device, gate) in plan.devices.iter().zip(gates) {
        let gate: Arc<dyn BlockDevice> = Arc::<Gate>::clone(gate);
        let watched = Arc::new(Watch::new(gate, "export", notices(device)));
        let export = Export::new(device.export.clone(), watched).read_only(device.read_only);
        builder = builder.export(export);
    }
    if let Some(tls) = tls {
        builder = builder.tls(tls);
    }
    Ok(builder.bind(&plan.nbd)?)
}

fn served(
    device: &DevicePlan,
    stack: Arc<Stack>,
    gate: Arc<Gate>,
    server: &Server,
) -> Result<Served> {
    let pool = device.pool.clone();
    let file = File::open(&pool).with_context(|| format!("cannot open {}", pool.display()))?;
    let statistics = server.export_statistics(&device.export);
    Ok(Served {
        export: device.export.clone(),
        statistics: statistics.unwrap_or_else(|| server.statistics()),
        source: Source { pool, file: Arc::new(file), stack: Arc::clone(&stack), gate },
        stack,
    })
}

/// The servers of each device's control sockets.
fn listen_for_control(plan: &ServePlan, served: &[Served]) -> Result<Vec<Vec<ControlServer>>> {
    let devices = plan.devices.iter().zip(served);
    devices.map(|(it, one)| control::listen(&it.pool, it.control.as_deref(), one)).collect()
}

/// Has a line say when the file of a pool or of a backing is removed. A server that cannot watch
/// them serves all the same.
fn watch_files(plan: &ServePlan, served: &[Served]) -> Option<RemovalWatch> {
    let files = plan.devices.iter().zip(served).flat_map(|(device, one)| {
        let description = one.stack.description();
        let pool = (format!("the pool {}", device.pool.display()), one.source.file.try_clone());
        let backing = description.backing.as_ref().map(|url| format!("the backing {url}"));
        let backing = backing.zip(one.stack.backing_file().ok().flatten());
        let files = [pool.1.ok().map(|file| (pool.0, file)), backing];
        let watched = |(name, file)| Watched::new(name, file, notices(device));
        files.into_iter().flatten().filter_map(watched).collect::<Vec<_>>()
    });
    match RemovalWatch::start(files.collect()) {
        Ok(watch) => Some(watch),
        Err(error) => {
            say(Level::Warning, format_args!("nothing will tell if a pool is removed: {error:#}"));
            None
        }
    }
}

/// Failures are lines on standard error when they begin, not only in what they are an answer to.
fn notices(device: &DevicePlan) -> Notices {
    let name = Some(device.export.clone()).filter(|name| !name.is_empty());
    Arc::new(move |line| say_of(name.as_deref(), Level::Warning, line))
}

fn tls(files: &TlsFiles) -> Result<Tls> {
    let TlsFiles { mode, certificate, key, authorities } = files;
    let tls = Tls::from_files(*mode, certificate, key, authorities.as_deref())?;
    let others = key.metadata().map_or(0, |found| found.mode() & 0o006);
    if others != 0 {
        say(
            Level::Warning,
            format_args!("all users of this machine can read {}; chmod o-rw it", key.display()),
        );
    }
    Ok(tls)
}

/// Prints what is served and how the server is reached; `ready` is the last line.
fn announce(
    plan: &ServePlan,
    served: &[Served],
    addresses: &[ListenAddress],
    metrics: Option<&MetricsServer>,
) -> io::Result<()> {
    for (device, one) in plan.devices.iter().zip(served) {
        name_if_several(served, one)?;
        print_lines(&one.stack.description().lines())?;
        if let Some(socket) = &device.control {
            field("control", format_args!("unix:{}", socket.display()))?;
        }
    }
    if let Some(metrics) = metrics {
        field("metrics", metrics.address())?;
    }
    for address in addresses {
        announce_address(address, served, plan.tls.as_ref())?;
    }
    line("ready")?;
    let devices = served.len();
    notify(&format!(
        "READY=1\nSTATUS=serving {devices} device{}",
        if devices == 1 { "" } else { "s" }
    ));
    Ok(())
}

fn announce_address(
    address: &ListenAddress,
    served: &[Served],
    tls: Option<&TlsFiles>,
) -> io::Result<()> {
    let secure = tls.is_some();
    if is_everywhere(address) && !demands_certificates(tls) {
        say(
            Level::Warning,
            format_args!(
                "{address} is open to the network: each client that reaches it can read and write \
                 the export; listen at 127.0.0.1, or demand TLS certificates (--tls-ca)"
            ),
        );
    }
    field("listening", address)?;
    for uri in served.iter().filter_map(|one| uri(address, &one.export, secure)) {
        field("try", format_args!("nbdinfo '{uri}'"))?;
    }
    Ok(())
}

/// No client is let in that does not show a certificate. One that may come in the clear shows none.
fn demands_certificates(tls: Option<&TlsFiles>) -> bool {
    tls.is_some_and(|tls| tls.mode == TlsMode::Required && tls.authorities.is_some())
}

/// Prints the name of the export where there are others.
fn name_if_several(served: &[Served], one: &Served) -> io::Result<()> {
    if served.len() > 1 { field("export", &one.export) } else { Ok(()) }
}

/// It is on all networks of the machine.
fn is_everywhere(address: &ListenAddress) -> bool {
    match address {
        ListenAddress::Unix(_) | ListenAddress::Inherited => false,
        ListenAddress::Tcp { host, .. } => {
            host.parse().is_ok_and(|address: IpAddr| address.is_unspecified())
        }
    }
}

/// The address as NBD clients write it, where it is known.
fn uri(address: &ListenAddress, export: &str, secure: bool) -> Option<String> {
    let scheme = if secure { "nbds" } else { "nbd" };
    let export = percent_encoded(export);
    Some(match address {
        ListenAddress::Inherited => return None,
        ListenAddress::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            format!("{scheme}+unix:///{export}?socket={}", percent_encoded(&path.to_string_lossy()))
        }
        ListenAddress::Tcp { host, port } if host.contains(':') => {
            format!("{scheme}://[{host}]:{port}/{export}")
        }
        ListenAddress::Tcp { host, port } => format!("{scheme}://{host}:{port}/{export}"),
    })
}

/// `text` as a part of a URI: everything but letters, digits and `-._~/` as `%` and two hexadecimal
/// digits.
fn percent_encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let encode =
        |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(encode).collect()
}

/// Says what a pool that keeps what is dirty has for the backing, and how that gets there.
fn tell_kept(one: &Served) -> io::Result<()> {
    let Some(bytes) = one.stack.kept_bytes() else { return Ok(()) };
    let pool = one.source.pool.display();
    if bytes == 0 {
        return field("kept dirty", format_args!("nothing: the backing has all that {pool} holds"));
    }
    let size = Size { bytes };
    field(
        "kept dirty",
        format_args!(
            "{size} that the backing lacks are in {pool}: `tidegate flush {pool}` writes them to \
             it; or serve the pool again"
        ),
    )
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
        let uri =
            |address: &str, export, secure| uri(&address.parse().unwrap(), export, secure).unwrap();
        assert_eq!(uri("unix:/run/a b", "", false), "nbd+unix:///?socket=/run/a%20b");
        assert_eq!(uri("unix:/run/s", "db", true), "nbds+unix:///db?socket=/run/s");
        assert_eq!(uri("tcp:localhost:10809", "a?b", false), "nbd://localhost:10809/a%3Fb");
        assert_eq!(uri("tcp:[::1]:1", "", true), "nbds://[::1]:1/");
    }
}
