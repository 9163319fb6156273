//! `tidegate serve`: opens a pool, offers it over NBD, and stops in good order on SIGTERM or SIGINT.

use std::io;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tidegate::device::BlockDevice;
use tidegate::device::delay::{Delay, Delays};
use tidegate::dram::phases::{Phase, PhaseTimes};
use tidegate::dram::{self, DramTier, Phases, Policy};
use tidegate::size::Size;
use tidegate_serve::nbd::{
    Export, Limits, ListenAddress, Server, ServerBuilder, Statistics, StopHandle, Tls, TlsMode,
};

use super::info::print_tier;
use crate::args::{LimitArgs, ServeArgs, TlsArgs, TlsWhen};
use crate::output::{counted, field, line};
use crate::pool::{self, Pool};

/// Runs the command until a signal ends it.
///
/// # Errors
/// The pool or the DRAM tier cannot be opened, an address cannot be listened at, or the tier cannot be written back.
pub(crate) fn run(args: &ServeArgs) -> Result<ExitCode> {
    let tls = tls(&args.tls)?;
    // Caught before the first client can connect: no signal is lost, and none kills the process.
    let signals = Signals::new([SIGTERM, SIGINT]).context("cannot catch signals")?;
    let pool = pool::open(args)?;
    let secure = tls.is_some();
    let tier = open_tier(args, &pool)?;
    let server = bind(args, &tier, tls)?;
    let statistics = server.statistics();
    let stop = StopHandle::new()?;
    announce(args, &pool, tier.as_ref(), &server.addresses(), secure)?;
    let started = Instant::now();
    let served = run_until_signal(server, &stop, signals);
    let written_back = write_back(args, tier.as_ref());
    let closed = served.and(written_back).and_then(|()| pool.close());
    summarize(&statistics.snapshot(), started.elapsed())?;
    summarize_tier(&tier.phases())?;
    closed?;
    Ok(ExitCode::SUCCESS)
}

/// The DRAM tier over the device of `pool`, which is as slow as `--delay-us` asks for.
fn open_tier(args: &ServeArgs, pool: &Pool) -> Result<Arc<dyn DramTier>> {
    let below = delayed(args, &pool.device);
    dram::open(args.dram.policy, args.dram.bytes, below)
        .with_context(|| format!("cannot open the DRAM tier {}", args.dram))
}

/// Makes durable what the tier still holds: nobody else will.
fn write_back(args: &ServeArgs, tier: &dyn DramTier) -> Result<()> {
    tier.shutdown().with_context(|| {
        let lost = tier.summary().dirty_slots;
        let pool = args.pool.display();
        let lost = counted(lost, "block");
        format!("{lost} in the DRAM tier of {pool} cannot be written back: lost")
    })
}

fn bind(args: &ServeArgs, tier: &Arc<dyn DramTier>, tls: Option<Tls>) -> Result<Server> {
    let device: Arc<dyn BlockDevice> = Arc::<dyn DramTier>::clone(tier);
    let export = Export::new(args.export.clone(), device).read_only(args.read_only);
    let builder = ServerBuilder::new().export(export).limits(limits(&args.limits));
    let builder = match tls {
        Some(tls) => builder.tls(tls),
        None => builder,
    };
    Ok(builder.bind(&args.nbd)?)
}

/// The device, as slow as `--delay-us` asks for.
fn delayed(args: &ServeArgs, device: &Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    let device = Arc::clone(device);
    let Some(delay_us) = args.delay_us else { return device };
    let delay_ns = delay_us.saturating_mul(1000);
    let delays = Delays { read_ns: delay_ns, write_ns: delay_ns, flush_ns: delay_ns, byte_ps: 0 };
    Arc::new(Delay::new(device, delays))
}

fn run_until_signal(server: Server, stop: &StopHandle, mut signals: Signals) -> Result<()> {
    let waiting = signals.handle();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if signals.forever().next().is_some() {
                stop.stop();
            }
        });
        let outcome = server.run(stop);
        waiting.close();
        Ok(outcome?)
    })
}

fn limits(args: &LimitArgs) -> Limits {
    let default = Limits::default();
    let connections = args.max_connections.map_or(default.connections, NonZeroUsize::get);
    Limits { connections, ..default }
}

fn tls(args: &TlsArgs) -> Result<Option<Tls>> {
    let (Some(certificate), Some(key)) = (&args.tls_cert, &args.tls_key) else { return Ok(None) };
    let mode = match args.tls {
        Some(TlsWhen::Require) | None => TlsMode::Required,
        Some(TlsWhen::Allow) => TlsMode::Optional,
    };
    Ok(Some(Tls::from_files(mode, certificate, key, args.tls_ca.as_deref())?))
}

/// Says what is served, what it promises, and how to reach it; `ready` is the last line.
fn announce(
    args: &ServeArgs,
    pool: &Pool,
    tier: &dyn DramTier,
    addresses: &[ListenAddress],
    secure: bool,
) -> io::Result<()> {
    let geometry = pool.device.geometry();
    let access = if geometry.read_only || args.read_only { ", read-only" } else { "" };
    field("pool", args.pool.display())?;
    field("engine", format_args!("{}{access}", pool.engine))?;
    field("size", Size { bytes: geometry.size_bytes() })?;
    field("blocks", format_args!("{} of {} bytes", geometry.blocks, geometry.block_bytes))?;
    field("domain", pool.region.domain())?;
    field("power cut", pool.region.power_cut())?;
    field("media", pool.region.media())?;
    if let Some(backing) = &args.backing {
        field("backing", backing)?;
    }
    field("recovered", &pool.recovered)?;
    announce_tier(tier)?;
    for address in addresses {
        field("listening", address)?;
        field("try", format_args!("nbdinfo '{}'", uri(address, &args.export, secure)))?;
    }
    line("ready")
}

fn announce_tier(tier: &dyn DramTier) -> io::Result<()> {
    let summary = tier.summary();
    if summary.policy == Policy::None {
        return field("dram tier", Policy::None);
    }
    print_tier(&summary)?;
    field("acknowledged", "in DRAM; durable at the next flush, FUA or SIGTERM")
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

/// `text` as a part of a URI: everything but letters, digits and `-._~/` as `%` and two hexadecimal digits.
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

/// Where the time of the DRAM tier went, a line for each phase that occurred.
fn summarize_tier(phases: &Phases) -> io::Result<()> {
    phases.phases.iter().try_for_each(|times| field("dram tier", describe(times)))
}

fn describe(times: &PhaseTimes) -> String {
    let PhaseTimes { phase, count, share_pct, mean_ns, p9999_ns, max_ns, .. } = times;
    let micros = |ns: &u64| Duration::from_nanos(*ns).as_secs_f64() * 1e6;
    let (mean, p9999, max) = (micros(mean_ns), micros(p9999_ns), micros(max_ns));
    let name = words(*phase);
    format!(
        "{name:<13} {count:>10} times, {share_pct:>4.1} % of the time; mean {mean:.2} µs, p99.99 {p9999:.1}, max {max:.1}"
    )
}

fn words(phase: Phase) -> &'static str {
    match phase {
        Phase::Metadata => "metadata",
        Phase::StalledWrite => "stalled write",
        Phase::Bypass => "bypass",
        Phase::CacheWrite => "cache write",
        Phase::Enqueue => "enqueue",
        Phase::Flush => "flush",
        Phase::ReadHit => "read hit",
        Phase::ReadMiss => "read miss",
        Phase::Eviction => "eviction",
        Phase::Other => "other",
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tidegate::device::fault::{Effect, Fault, Rule, When};
    use tidegate::device::memory::MemoryDevice;
    use tidegate::device::{DeviceErrorKind, Op, WriteFlags};

    use super::*;
    use crate::args::{Cli, Command};

    fn args(line: &str) -> ServeArgs {
        let Command::Serve(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else {
            panic!("{line} serves");
        };
        args
    }

    #[test]
    fn what_cannot_be_written_back_at_the_end_is_an_error() {
        let args = args("tidegate serve pool --nbd unix:s --dram transit-no-eager:1M");
        let below = Arc::new(Fault::new(Arc::new(MemoryDevice::new(4096, 64).unwrap()), 1));
        below.add(Rule::new(&[Op::Write], When::Always, Effect::Fail(DeviceErrorKind::Io)));
        let tier =
            dram::open(args.dram.policy, args.dram.bytes, Arc::<Fault>::clone(&below)).unwrap();
        tier.write(0, &[7; 4096], WriteFlags::default()).unwrap();
        let error = format!("{:#}", write_back(&args, tier.as_ref()).unwrap_err());
        assert!(error.starts_with("1 block in the DRAM tier of pool cannot"), "{error}");
        below.heal();
        write_back(&args, tier.as_ref()).unwrap();
    }

    #[test]
    fn uris_can_be_pasted() {
        let uri = |address: &str, export, secure| uri(&address.parse().unwrap(), export, secure);
        assert_eq!(uri("unix:/run/a b", "", false), "nbd+unix:///?socket=/run/a%20b");
        assert_eq!(uri("unix:/run/s", "db", true), "nbds+unix:///db?socket=/run/s");
        assert_eq!(uri("tcp:localhost:10809", "a?b", false), "nbd://localhost:10809/a%3Fb");
        assert_eq!(uri("tcp:[::1]:1", "", true), "nbds://[::1]:1/");
    }
}
