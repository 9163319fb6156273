//! `tidegate serve`: opens pools, offers them over NBD and as block devices, and drains them when a
//! signal stops it.

use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
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
use tidegate_run::open_pool_file;
use tidegate_serve::Worker;
use tidegate_serve::control::ControlServer;
use tidegate_serve::metrics::MetricsServer;
use tidegate_serve::nbd::{
    Export, ListenAddress, Server, ServerBuilder, Statistics, StopHandle, Tls, TlsMode,
};

use crate::args::{DeviceArgs, ServeArgs};
use crate::deadline::Deadline;
use crate::log::{self, Level, say, say_of};
use crate::notify::notify;
use crate::output::{field, line, one_line, print_lines};
use crate::plan::{DevicePlan, ServePlan, TlsFiles};
use crate::pool::map_to_resize;
use crate::removed::{self, Watched};
use crate::served::Served;
use crate::ublk::Attached;
use crate::{config, control, signals, ublk, waits};

/// Runs the command until a signal ends it.
///
/// # Errors
/// The arguments contradict each other; a pool or a DRAM tier cannot be opened, the server cannot
/// listen at an address, or a tier cannot be drained.
pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    let plan = match &args.config {
        Some(file) => config::read(file)?,
        None => ServePlan::of_arguments(args)?,
    };
    log::set_up(plan.log_format, plan.log_level)?;
    serve(plan)
}

fn serve(plan: ServePlan) -> Result<()> {
    let tls = plan.tls.as_ref().map(tls).transpose()?;
    // Before the first client connects: no signal is lost, and none kills the process.
    let signals = signals::catch()?;
    let (stop, deadline) = (StopHandle::new()?, Deadline::watch(plan.stop_timeout)?);
    let (reloaded, files) = (tls.clone(), plan.tls.clone());
    let reload = || reload(reloaded.as_ref(), files.as_ref());
    signals.during(&stop, &deadline, &reload, || serve_until(plan, tls, &stop, &deadline))
}

/// Opens the pools and serves them until `stop` is signalled.
fn serve_until(
    plan: ServePlan,
    tls: Option<Tls>,
    stop: &StopHandle,
    deadline: &Deadline,
) -> Result<()> {
    ublk::prepare(&plan.devices);
    let mut unused = open_all(&plan.devices)?;
    let stacks = unused.0.clone();
    let gates: Vec<_> = stacks.iter().map(|stack| Arc::new(Gate::new(stack.top()))).collect();
    let exports: Vec<_> = plan.devices.iter().zip(&gates).map(watched).collect();
    let server = bind(&plan, &exports, tls)?;
    let devices = plan.devices.into_iter().zip(stacks.into_iter().zip(gates));
    let served = devices.map(|(device, (stack, gate))| served(device, stack, gate, &server, stop));
    let mut served = served.collect::<Result<Vec<_>>>()?;
    deadline.serves(&served);
    let attached = ublk::attach_all(&mut served, &exports, stop)?;
    let control = served.iter().map(control::listen).collect::<Result<Vec<_>>>()?;
    let show = |address| control::show_metrics(address, &served);
    let metrics = plan.metrics.as_ref().map(show).transpose()?;
    let removals = watch_files(&served);
    let waits = waits::watch()?;
    let listening = (&server.addresses()[..], &attached[..]);
    announce(&served, listening, metrics.as_ref(), plan.tls.as_ref())?;
    let started = Instant::now();
    let of_devices = attached.iter().map(|one| one.device().statistics());
    let statistics = server.statistics().with(of_devices);
    unused.0.clear();
    let run = server.run(stop);
    let detached = ublk::stop_all(attached);
    // From now on no request changes a pool while its tiers are drained.
    end_control(&served, control);
    drop((metrics, removals));
    let closed = close_all(&served);
    drop(waits);
    let printed = print_end(&served, &statistics.snapshot(), started.elapsed());
    // Standard output may take no bytes, so the summary is within the deadline.
    deadline.meet();
    // The data comes first: a failure to print must not hide what was not written back.
    first_failure([closed, run.map_err(Into::into), detached, printed.map_err(Into::into)])
}

/// Stacks that no client has used yet. Dropping it releases their backings, so that a start that
/// fails keeps no other pool from them.
struct Unused(Vec<Arc<Stack>>);

impl Drop for Unused {
    fn drop(&mut self) {
        // The mark of a backing that fails stays; the failure of the start is returned.
        self.0.iter().for_each(|stack| drop(stack.release_unused()));
    }
}

/// Opens the pools of `devices`, and sets their modes before the first client connects.
fn open_all(devices: &[DevicePlan]) -> Result<Unused> {
    let mut unused = Unused(Vec::new());
    for device in devices {
        unused.0.push(of_device(device, open(device))?);
    }
    for (device, stack) in devices.iter().zip(&unused.0) {
        of_device(device, set_mode(device, stack))?;
    }
    Ok(unused)
}

/// Adds the position of `device` in the configuration file to an error.
fn of_device<T>(device: &DevicePlan, result: Result<T>) -> Result<T> {
    match &device.origin {
        Some(origin) => result.with_context(|| origin.clone()),
        None => result,
    }
}

fn set_mode(device: &DevicePlan, stack: &Stack) -> Result<()> {
    let Some(mode) = &device.args.mode else { return Ok(()) };
    let pool = device.pool.display();
    stack.set(&[("mode", mode)]).with_context(|| format!("{pool} cannot be served with --mode"))
}

/// Opens the pool of `device`, with the tiers before it and the backing behind it.
fn open(device: &DevicePlan) -> Result<Arc<Stack>> {
    let DevicePlan { pool, args, memory, .. } = device;
    let memory = RegionOptions { read_only: args.read_only, ..memory.region_options() };
    let region = Arc::new(map_to_resize(pool, memory)?);
    let stack = REGISTRY.open(StackOptions {
        backing: args.backing.clone(),
        force: args.force,
        atomic_flush: args.atomic_flush,
        keep_dirty: args.keep_dirty,
        needs_modes: args.mode.is_some(),
        dram: args.dram,
        delays: args.delay_us.map(|us| Delays::of_each(us.saturating_mul(1000))),
        notices: Some(notices(device)),
        ..StackOptions::alone(region, pool.clone())
    })?;
    Ok(Arc::new(stack))
}

/// Ends the control sockets, without waiting for requests that destage a pool with `--keep-dirty`.
fn end_control(served: &[Served], control: Vec<Vec<ControlServer>>) {
    for (one, servers) in served.iter().zip(control) {
        if one.plan.args.keep_dirty {
            servers.into_iter().for_each(ControlServer::abandon);
        }
    }
}

/// Closes all stacks at once, since one may wait for its backing until the deadline: drains each,
/// or leaves its data in the pool.
///
/// # Errors
/// Returns the first failure; the others are logged.
fn close_all(served: &[Served]) -> Result<()> {
    let close = |one: &Served| one.stack.close().map_err(Into::into);
    std::thread::scope(|scope| {
        let start = |one| std::thread::Builder::new().spawn_scoped(scope, move || close(one));
        let closing: Vec<_> = served.iter().map(|one| (one, start(one))).collect();
        first_failure(closing.into_iter().map(|(one, closing)| match closing {
            Ok(closing) => closing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            // Without memory for a thread, the stacks are closed one after the other.
            Err(_) => close(one),
        }))
    })
}

/// Awaits all `results`.
///
/// # Errors
/// Returns the first failure; the others are logged.
fn first_failure(results: impl IntoIterator<Item = Result<()>>) -> Result<()> {
    let mut first = Ok(());
    for error in results.into_iter().filter_map(Result::err) {
        match first {
            Ok(()) => first = Err(error),
            Err(_) => say(Level::Error, one_line(&format!("{error:#}"))),
        }
    }
    first
}

/// Returns what clients of a device reach: its gate, which holds changes back while the device is
/// copied, with failures logged.
fn watched((device, gate): (&DevicePlan, &Arc<Gate>)) -> Arc<dyn BlockDevice> {
    let gate: Arc<dyn BlockDevice> = Arc::<Gate>::clone(gate);
    Arc::new(Watch::new(gate, "export", notices(device)))
}

/// Offers each device over NBD.
fn bind(plan: &ServePlan, exports: &[Arc<dyn BlockDevice>], tls: Option<Tls>) -> Result<Server> {
    let complain = |line: &str| say(Level::Warning, line);
    let mut builder = ServerBuilder::new().limits(plan.limits.clone()).log(Arc::new(complain));
    for (device, watched) in plan.devices.iter().zip(exports) {
        let DeviceArgs { export, read_only, .. } = &device.args;
        let export = Export::new(export.clone(), Arc::clone(watched)).read_only(*read_only);
        builder = builder.export(export);
    }
    if let Some(tls) = tls {
        builder = builder.tls(tls);
    }
    Ok(builder.bind(&plan.nbd)?)
}

fn served(
    plan: DevicePlan,
    stack: Arc<Stack>,
    gate: Arc<Gate>,
    server: &Server,
    stop: &StopHandle,
) -> Result<Served> {
    let file = open_pool_file(&plan.pool)?;
    let statistics = server.export_statistics(&plan.args.export);
    let statistics = statistics.unwrap_or_else(|| server.statistics());
    let (plan, file, stop) = (Arc::new(plan), Arc::new(file), stop.clone());
    Ok(Served { plan, file, stack, gate, stop, statistics, ublk: None })
}

/// Starts a thread that logs when the file of a pool or of a backing is removed. Returns `None` if
/// the files cannot be watched; the server runs all the same.
fn watch_files(served: &[Served]) -> Option<Worker> {
    let files = served.iter().flat_map(|one| {
        let pool = format!("the pool {}", one.plan.pool.display());
        let pool = one.file.try_clone().ok().map(|file| (pool, file));
        let backing = &one.stack.description().backing;
        let backing = backing.as_ref().map(|url| format!("the backing {url}"));
        let backing = backing.zip(one.stack.backing_file().ok().flatten());
        let watched = |(name, file)| Watched::new(name, file, notices(&one.plan));
        [pool, backing].into_iter().flatten().filter_map(watched).collect::<Vec<_>>()
    });
    match removed::watch(files.collect()) {
        Ok(watch) => Some(watch),
        Err(error) => {
            say(Level::Warning, format_args!("nothing will tell if a pool is removed: {error:#}"));
            None
        }
    }
}

/// Returns a listener that logs a device's failures when they begin, not only in answers.
fn notices(device: &DevicePlan) -> Notices {
    let name = Some(device.args.export.clone()).filter(|name| !name.is_empty());
    Arc::new(move |line| say_of(name.as_deref(), Level::Warning, line))
}

fn tls(files: &TlsFiles) -> Result<Tls> {
    let TlsFiles { mode, certificate, key, authorities } = files;
    let tls = Tls::from_files(*mode, certificate, key, authorities.as_deref())?;
    warn_of_readers(key);
    Ok(tls)
}

/// Reads the TLS files again. A server without TLS has none.
fn reload(tls: Option<&Tls>, files: Option<&TlsFiles>) {
    let (Some(tls), Some(files)) = (tls, files) else {
        let nothing = "SIGHUP: nothing is read again, for the server has no TLS certificate";
        return say(Level::Info, nothing);
    };
    let certificate = files.certificate.display();
    match tls.reload() {
        Ok(()) => {
            warn_of_readers(&files.key);
            say(
                Level::Info,
                format_args!("SIGHUP: connections get the TLS certificate in {certificate} now"),
            );
        }
        Err(error) => say(
            Level::Error,
            format_args!("SIGHUP: the TLS certificate of before stays in use: {error}"),
        ),
    }
}

/// Warns if all users can read the private key in `key`.
fn warn_of_readers(key: &Path) {
    let others = key.metadata().map_or(0, |found| found.mode() & 0o006);
    if others != 0 {
        say(
            Level::Warning,
            format_args!("all users of this machine can read {}; chmod o-rw it", key.display()),
        );
    }
}

/// Prints the devices and the server's addresses; `ready` is the last line.
fn announce(
    served: &[Served],
    (addresses, attached): (&[ListenAddress], &[Attached]),
    metrics: Option<&MetricsServer>,
    tls: Option<&TlsFiles>,
) -> io::Result<()> {
    for one in served {
        name_if_several(served, one)?;
        print_lines(&one.stack.lines())?;
        if let Some(socket) = &one.plan.args.control {
            field("control", format_args!("unix:{}", socket.display()))?;
        }
        attached.iter().find(|attached| attached.is_of(one)).map_or(Ok(()), announce_device)?;
    }
    if let Some(metrics) = metrics {
        field("metrics", metrics.address())?;
    }
    for address in addresses {
        announce_address(address, served, tls)?;
    }
    line("ready")?;
    let devices = served.len();
    let plural = if devices == 1 { "" } else { "s" };
    notify(&format!("READY=1\nSTATUS=serving {devices} device{plural}"));
    Ok(())
}

fn announce_device(attached: &Attached) -> io::Result<()> {
    let device = attached.device();
    let path = device.path();
    if device.is_taken_up() {
        return field("ublk", format_args!("{}, taken up from the last server", path.display()));
    }
    field("ublk", path.display())
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
    for uri in served.iter().filter_map(|one| uri(address, &one.plan.args.export, secure)) {
        field("try", format_args!("nbdinfo '{uri}'"))?;
    }
    Ok(())
}

/// Returns whether every client must show a certificate, which clients without TLS never do.
fn demands_certificates(tls: Option<&TlsFiles>) -> bool {
    tls.is_some_and(|tls| tls.mode == TlsMode::Required && tls.authorities.is_some())
}

/// Prints the name of the export if there are several.
fn name_if_several(served: &[Served], one: &Served) -> io::Result<()> {
    if served.len() > 1 { field("export", &one.plan.args.export) } else { Ok(()) }
}

/// Returns whether the address is on all networks of the machine.
fn is_everywhere(address: &ListenAddress) -> bool {
    let ListenAddress::Tcp { host, .. } = address else { return false };
    host.parse().is_ok_and(|address: IpAddr| address.is_unspecified())
}

/// Returns the address as NBD clients write it, or `None` if it is not known.
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

/// Returns `text` as a part of a URI: everything but letters, digits and `-._~/` as `%` and two
/// hexadecimal digits.
fn percent_encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let encode =
        |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(encode).collect()
}

/// Prints the counts of the server, and what its tiers did.
fn print_end(served: &[Served], done: &Statistics, uptime: Duration) -> io::Result<()> {
    summarize(done, uptime)?;
    for one in served {
        name_if_several(served, one)?;
        print_lines(&one.stack.tier_lines())?;
        tell_kept(one)?;
    }
    Ok(())
}

/// Prints the size of the dirty data that a pool keeps, and how to destage it.
fn tell_kept(one: &Served) -> io::Result<()> {
    let Some(bytes) = one.stack.kept_bytes() else { return Ok(()) };
    let pool = one.plan.pool.display();
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
    let Statistics { reads, writes, flushes, trims, caches, write_zeroes, block_statuses, .. } =
        done;
    let requests = reads + writes + flushes + trims + caches + write_zeroes + block_statuses;
    let (errors, refused) = (done.errors, done.connections_refused);
    let broken = done.client_faults;
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
