//! `tidegate serve`: opens pools, offers them over NBD and as block devices, and drains them when a
//! signal stops it.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tidegate::size::Size;
use tidegate::stack::Stack;
use tidegate_serve::control::{ControlServer, Request};
use tidegate_serve::metrics::MetricsServer;
use tidegate_serve::nbd::{ListenAddress, Server, ServerBuilder, Statistics, StopHandle, Tls};

use crate::args::ServeArgs;
use crate::at_once::at_once;
use crate::deadline::Deadline;
use crate::devices::{Device, Devices};
use crate::front_ends;
use crate::log::{self, Level, say};
use crate::opening::Opener;
use crate::output::{absolute, field, line, one_line, print_lines};
use crate::plan::{DevicePlan, ServePlan, TlsFiles};
use crate::reload::{FIRST_ATTEMPTS, Reloader};
use crate::served::{Reached, Served};
use crate::tls::demands_certificates;
use crate::{config, control, descriptors, detached, signals, tls, waits};

/// Time of a stop for attempts to open devices to end.
const LAST_ATTEMPTS: Duration = Duration::from_secs(2);
/// Time that standard error has to take the lines of the start.
const FIRST_LINES: Duration = Duration::from_secs(2);

/// Runs the command until a signal ends it.
///
/// # Errors
/// The arguments contradict each other; without a configuration file, a pool or a DRAM tier cannot
/// be opened; the server cannot listen at an address, or a tier cannot be drained.
pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    let plan = match &args.config {
        Some(file) => config::read(file)?,
        None => ServePlan::of_arguments(args)?,
    };
    if plan.is_detached {
        detached::leave_session();
    }
    log::set_up(plan.log_format, plan.log_level)?;
    let config = args.config.as_ref().map(std::path::absolute).transpose()?;
    serve(plan, config)
}

fn serve(plan: ServePlan, config: Option<PathBuf>) -> Result<()> {
    descriptors::raise_limit();
    let tls = plan.tls.as_ref().map(tls::read).transpose()?;
    // Before the first client connects: no signal is lost, and none kills the process.
    let signals = signals::catch()?;
    let (stop, deadline) = (StopHandle::new()?, Deadline::watch(plan.stop_timeout)?);
    let reloader = OnceLock::<Arc<Reloader>>::new();
    let reload = || match reloader.get() {
        Some(reloader) => reloader.by_signal(),
        None => say(Level::Info, "SIGHUP: nothing is read again while the server starts"),
    };
    signals.during(&stop, &deadline, &reload, || {
        serve_until(plan, config, tls, &stop, &deadline, &reloader)
    })
}

/// Opens the pools and serves them until `stop` is signalled.
fn serve_until(
    mut plan: ServePlan,
    config: Option<PathBuf>,
    tls: Option<Tls>,
    stop: &StopHandle,
    deadline: &Deadline,
    reloading: &OnceLock<Arc<Reloader>>,
) -> Result<()> {
    front_ends::prepare(&plan.devices);
    // All sockets first: if an address is in use, no pool has changed.
    let server = bind(&plan, tls.clone())?;
    let (addresses, exports) = (server.addresses(), server.exports());
    let (open, numeric) = (server.open_addresses(), server.numeric_addresses());
    let devices = Devices::new(std::mem::take(&mut plan.devices), stop)?;
    devices.all().iter().try_for_each(listen)?;
    let opener = Opener::new(&exports, &devices, numeric);
    let reloader = Arc::new(Reloader::new(config, plan, tls, &exports, &opener, stop));
    let answering = Arc::clone(&reloader);
    let answer = move |request: &Request| answering.answer(request);
    let lists = control::listen_for_lists(&devices, &addresses, answer);
    let plan = &reloader.plan;
    let show = |address| control::show_metrics(address, &devices, &exports);
    let metrics = plan.metrics.as_ref().map(show).transpose()?;
    deadline.serves(&devices);
    let waits = waits::watch()?;
    // Nothing else sets it.
    let _ = reloading.set(Arc::clone(&reloader));
    let opening = if plan.tries_again { opener.start_all() } else { opener.open_all() };
    opening?;
    let started = Instant::now();
    let run = run_server(server, stop, || {
        devices.await_attempts(FIRST_ATTEMPTS, Some(stop));
        if !addresses.is_empty() {
            let now = exports.statistics().snapshot();
            descriptors::warn_if_few(plan.limits.connections, &now);
        }
        reloader.begin();
        warn_of_network(&open, metrics.as_ref(), plan.tls.as_ref());
        let announced = announce(&devices, &addresses, metrics.as_ref(), plan.tls.is_some());
        if plan.is_detached {
            detached::leave_output();
        }
        announced
    });
    reloader.end();
    end_openers(&devices);
    let served = devices.served();
    begin_stop(&devices);
    drop(metrics);
    drop(lists);
    let closed = close_all(&devices);
    drop(waits);
    let others = served.iter().flat_map(|one| &one.reached);
    let others = others.map(|reached| reached.statistics.clone());
    let statistics = exports.statistics().with(others);
    let printed =
        print_end(devices.all().len(), &served, &statistics.snapshot(), started.elapsed());
    // Standard output may take no bytes, so the summary is within the deadline.
    deadline.meet();
    // The data comes first: a failure to print must not hide what was not written back.
    first_failure([closed, run, printed.map_err(Into::into)])
}

/// Answers requests at the control socket of the device's table.
fn listen(device: &Arc<Device>) -> Result<()> {
    device.set_control(control::listen(device)?);
    Ok(())
}

/// Has all front ends take no more requests: no device waits for the end of another one.
fn begin_stop(devices: &Devices) {
    devices.all().iter().for_each(|device| device.begin_stop());
}

/// Runs `server` until `stop` is signalled, and `announce` beside it: clients of devices that are
/// open do not wait for others. A failure of either ends both.
fn run_server(
    server: Server,
    stop: &StopHandle,
    announce: impl FnOnce() -> io::Result<()>,
) -> Result<()> {
    std::thread::scope(|scope| {
        let run = || server.run(stop).inspect_err(|_| stop.stop());
        let running = std::thread::Builder::new().name("nbd-server".into());
        let running = running.spawn_scoped(scope, run).context("cannot start a thread")?;
        let announced = announce().inspect_err(|_| stop.stop());
        let run = running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        first_failure([run.map_err(Into::into), announced.map_err(Into::into)])
    })
}

/// Ends the threads that open devices. A backing that does not answer may hold one for long: the
/// process ends without that one, as if it were killed before the device was open.
fn end_openers(devices: &Devices) {
    devices.await_attempts(LAST_ATTEMPTS, None);
    for device in devices.all() {
        let Some(mut opener) = device.take_opener() else { continue };
        if device.is_opening() {
            let pool = device.plan.pool.display();
            say(
                Level::Warning,
                format_args!("{pool} is still being opened: the stop does not wait for that"),
            );
            opener.abandon();
        }
    }
}

/// Ends the control sockets of a device, without waiting for requests that destage a pool with
/// `--keep-dirty`.
fn end_control(plan: &DevicePlan, servers: impl Iterator<Item = ControlServer>) {
    if plan.args.keep_dirty {
        servers.for_each(ControlServer::abandon);
    } else {
        servers.for_each(drop);
    }
}

/// Closes all devices at once, since one may wait for its backing until the deadline.
///
/// # Errors
/// Returns the first failure; the others are logged.
fn close_all(devices: &Devices) -> Result<()> {
    first_failure(at_once(&devices.all(), |device| close(device)))
}

/// Ends the front ends and the control sockets of a device, so that no request changes its pool any
/// more. Then drains the stack, or leaves its data in the pool.
///
/// # Errors
/// The tiers cannot be written back, or a front end cannot be ended.
fn close(device: &Device) -> Result<()> {
    let ends = device.take_ends();
    let stopped = front_ends::stop_all(ends.attached);
    end_control(&device.plan, device.take_control().into_iter().chain(ends.control));
    drop(ends.removals);
    let closed = device.served().map_or(Ok(()), |served| served.end(Stack::close));
    first_failure([closed, stopped])
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

/// Listens for clients, and announces the exports of all devices.
fn bind(plan: &ServePlan, tls: Option<Tls>) -> Result<Server> {
    let complain = |line: &str| say(Level::Warning, line);
    let mut builder = ServerBuilder::new().limits(plan.limits.clone()).log(Arc::new(complain));
    for device in &plan.devices {
        builder = builder.later(&device.args.export);
    }
    if let Some(tls) = tls {
        builder = builder.tls(tls);
    }
    Ok(builder.bind(&plan.nbd)?)
}

/// Prints the devices that are served and the server's addresses; `ready` is the last line. By then
/// standard error has the warnings of the start, if it takes lines within [`FIRST_LINES`].
fn announce(
    devices: &Devices,
    addresses: &[ListenAddress],
    metrics: Option<&MetricsServer>,
    has_tls: bool,
) -> io::Result<()> {
    let served = devices.served();
    for one in &served {
        name_if_several(devices.all().len(), one)?;
        print_lines(&one.stack.lines())?;
        if let Some(socket) = &one.plan.args.control {
            field("control", format_args!("unix:{}", socket.display()))?;
        }
        one.reached.iter().try_for_each(announce_reached)?;
    }
    if let Some(metrics) = metrics {
        field("metrics", metrics.address())?;
    }
    for address in addresses {
        announce_address(address, &served, has_tls)?;
    }
    log::flush(FIRST_LINES);
    line("ready")?;
    devices.announce();
    Ok(())
}

fn announce_reached(reached: &Reached) -> io::Result<()> {
    let address = reached.address.display();
    match reached.note {
        Some(note) => field(reached.front_end, format_args!("{address}, {note}")),
        None => field(reached.front_end, address),
    }
}

/// Warns of addresses that other machines may reach: the `open` ones, where clients need no
/// certificate, and that of the metrics.
fn warn_of_network(
    open: &[ListenAddress],
    metrics: Option<&MetricsServer>,
    tls: Option<&TlsFiles>,
) {
    for address in open.iter().filter(|_| !demands_certificates(tls)) {
        say(
            Level::Warning,
            format_args!(
                "{address} is open to the network: each client that reaches it can read and write \
                 the export; listen at 127.0.0.1, or demand TLS certificates (--tls-ca)"
            ),
        );
    }
    if let Some(metrics) = metrics.filter(|metrics| metrics.is_open_to_network()) {
        let address = metrics.address();
        say(
            Level::Warning,
            format_args!(
                "{address} is open to the network: each client that reaches it can read the \
                 metrics; listen at 127.0.0.1 if none is to"
            ),
        );
    }
}

fn announce_address(address: &ListenAddress, served: &[Served], has_tls: bool) -> io::Result<()> {
    field("listening", address)?;
    for uri in served.iter().filter_map(|one| uri(address, &one.plan.args.export, has_tls)) {
        field("try", format_args!("nbdinfo '{uri}'"))?;
    }
    Ok(())
}

/// Prints the name of the export if there are several.
fn name_if_several(devices: usize, one: &Served) -> io::Result<()> {
    if devices > 1 { field("export", &one.plan.args.export) } else { Ok(()) }
}

/// Returns the address as NBD clients write it, or `None` if it is not known.
fn uri(address: &ListenAddress, export: &str, secure: bool) -> Option<String> {
    let scheme = if secure { "nbds" } else { "nbd" };
    let export = percent_encoded(export);
    Some(match address {
        ListenAddress::Inherited => return None,
        ListenAddress::Unix(path) => {
            let path = percent_encoded(&absolute(path).to_string_lossy());
            format!("{scheme}+unix:///{export}?socket={path}")
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
fn print_end(
    devices: usize,
    served: &[Served],
    done: &Statistics,
    uptime: Duration,
) -> io::Result<()> {
    summarize(done, uptime)?;
    for one in served {
        name_if_several(devices, one)?;
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
