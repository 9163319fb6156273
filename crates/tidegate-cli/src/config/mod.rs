//! The file of `tidegate serve --config`: keys are named as the options, each pool is a
//! `[[device]]`.

mod document;

use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use tidegate::backing::BackingUrl;
use tidegate::dram::{Policy, TierSpec};
use tidegate::opening::{self, Expected, is_one_file};
use tidegate_serve::nbd::{Export, ListenAddress, check_limits};

use crate::args::{
    DeviceArgs, LimitArgs, MemoryArgs, STOP_TIMEOUT_SECONDS, TlsArgs, TlsWhen, parse_count,
    parse_mode, parse_socket, parse_unix,
};
use crate::front_ends::is_any_wanted;
use crate::log::{Format, Level};
use crate::plan::{DevicePlan, ServePlan, TlsFiles, collision, limits_of};
use document::{Document, Table};

/// Most bytes of a file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads the plan in the file at `path`.
///
/// # Errors
/// The file cannot be read, or has faults: the error is the first one with the number of others.
pub(crate) fn read(path: &Path) -> Result<ServePlan> {
    match check(path)? {
        Ok(plan) => Ok(plan),
        Err(faults) => match &faults[..] {
            [first] => bail!("{first}"),
            [first, rest @ ..] => bail!(
                "{first} (and {} more; `tidegate config check {}` lists them)",
                rest.len(),
                path.display()
            ),
            [] => bail!("{}: something is wrong in it", path.display()),
        },
    }
}

/// Reads the file at `path`. Returns the plan, or the file's faults, a line each.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn check(path: &Path) -> Result<Result<ServePlan, Vec<String>>> {
    let text = opening::read_text(path, FILE_BYTES_MAX);
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    Ok(parse(path, &text))
}

/// Returns a line for each file of `plan` that is of another kind than expected. An absent file is
/// none, because the server waits until it appears.
pub(crate) fn wrong_files(plan: &ServePlan) -> Vec<String> {
    let of_device = |device: &DevicePlan| {
        let origin = device.origin.as_deref().unwrap_or_default();
        let backing = device.args.backing.as_ref().and_then(BackingUrl::file);
        let pool = wrong_file(&device.pool, Expected::Pool, format_args!("{origin}: the pool"));
        let backing = backing.and_then(|path| {
            wrong_file(&path, Expected::Blocks, format_args!("{origin}: the backing"))
        });
        pool.into_iter().chain(backing)
    };
    let of_tls = |tls: &TlsFiles| {
        let files = [Some(&tls.certificate), Some(&tls.key), tls.authorities.as_ref()];
        files.map(|path| wrong_file(path?, Expected::File, format_args!("TLS file")))
    };
    let of_tls = plan.tls.iter().flat_map(of_tls).flatten();
    plan.devices.iter().flat_map(of_device).chain(of_tls).collect()
}

fn wrong_file(path: &Path, expected: Expected, what: impl Display) -> Option<String> {
    let error = expected.check(&path.metadata().ok()?).err()?;
    Some(format!("{what} {}: {error}", path.display()))
}

fn parse(path: &Path, text: &str) -> Result<ServePlan, Vec<String>> {
    let document = Document::new(path, text);
    let plan = plan(&document);
    let faults = document.faults();
    if faults.is_empty() { Ok(plan) } else { Err(faults) }
}

fn plan(document: &Document<'_>) -> ServePlan {
    let mut root = document.root();
    let nbd: Vec<(ListenAddress, usize)> = root.list("nbd");
    let limits_offset = root.offset_of("request-memory").or(root.offset_of("max-connections"));
    let limits = LimitArgs {
        max_connections: root.number("max-connections", parse_count),
        request_memory: root.parsed("request-memory"),
        stop_timeout: root
            .number("stop-timeout", str::parse::<u32>)
            .unwrap_or(STOP_TIMEOUT_SECONDS),
    };
    let metrics_offset = root.offset_of("metrics");
    let metrics: Option<ListenAddress> = root.parsed("metrics");
    let log_format = root.with("log-format", |text| Format::from_str(text, false));
    let log_level = root.with("log-level", |text| Level::from_str(text, false));
    let tls = root.table("tls").and_then(|table| tls(document, table));
    let tables = root.tables("device");
    root.finish();
    let has_tables = !tables.is_empty();
    let (stop_timeout, limits) = (limits.stop_timeout, limits_of(&limits));
    if let Err(error) = check_limits(&limits, tls.is_some()) {
        document.fault(limits_offset.unwrap_or(0), error);
    }
    let devices = devices(document, tables);
    // A faulty address or table may be all that is missing.
    let is_sound = !document.has_faults();
    if !has_tables {
        document.fault(0, "no device to serve; say `[[device]]` and its `pool = \"PATH\"`");
    }
    let sockets = devices.iter().flat_map(|(device, offset)| {
        device.args.sockets().into_iter().map(|socket| (socket, *offset))
    });
    let others = metrics.clone().zip(metrics_offset).into_iter().chain(sockets);
    let listening: Vec<_> = nbd.iter().map(|(address, _)| address.clone()).collect();
    for (device, offset) in &devices {
        device.own_export(&listening).into_iter().for_each(|fault| document.fault(*offset, fault));
    }
    no_address_twice(document, &nbd.iter().cloned().chain(others).collect::<Vec<_>>());
    let devices: Vec<_> = devices.into_iter().map(|(device, _)| device).collect();
    let is_reached = |device: &DevicePlan| !nbd.is_empty() || is_any_wanted(&device.args);
    let are_reached = has_tables && devices.iter().all(is_reached) || !nbd.is_empty();
    if is_sound && !are_reached {
        let what = "no address to listen at; say `nbd = [\"unix:PATH\"]`, or `ublk = true` or \
                    `vhost-user = \"unix:PATH\"` in each device";
        document.fault(0, what);
    }
    ServePlan {
        nbd: listening,
        tls,
        limits,
        metrics,
        log_format: log_format.unwrap_or(Format::Text),
        log_level: log_level.unwrap_or(Level::Info),
        stop_timeout: Duration::from_secs(stop_timeout.into()),
        devices,
        tries_again: true,
        is_detached: false,
    }
}

fn no_address_twice(document: &Document<'_>, addresses: &[(ListenAddress, usize)]) {
    for (at, (address, offset)) in addresses.iter().enumerate() {
        let earlier = addresses[..at].iter().map(|(earlier, _)| earlier);
        if let Some(what) = collision(address, earlier) {
            document.fault(*offset, what);
        }
    }
}

fn tls(document: &Document<'_>, mut table: Table<'_>) -> Option<TlsFiles> {
    let offset = table.offset;
    let args = TlsArgs {
        tls: table.with("when", |text| TlsWhen::from_str(text, false)),
        tls_cert: table.path("cert"),
        tls_key: table.path("key"),
        tls_ca: table.path("ca"),
    };
    table.finish();
    let files = TlsFiles::of_arguments(&args);
    if files.is_none() {
        document.fault(offset, "`tls` needs the files `cert` and `key`");
    }
    files
}

fn devices(document: &Document<'_>, tables: Vec<Table<'_>>) -> Vec<(DevicePlan, usize)> {
    let mut devices: Vec<(DevicePlan, usize)> = Vec::new();
    for table in tables {
        let offset = table.offset;
        let Some(device) = device(document, table) else { continue };
        let own = pool_as_backing(&device, &device.pool);
        let shared = devices.iter().flat_map(|(earlier, _)| shared(earlier, &device));
        own.into_iter().chain(shared).for_each(|fault| document.fault(offset, fault));
        devices.push((device, offset));
    }
    devices
}

/// Returns the faults of two devices that share what belongs to one.
fn shared(one: &DevicePlan, other: &DevicePlan) -> Vec<String> {
    let (export, pool) = (&other.args.export, other.pool.display());
    let backings = one.args.backing.as_ref().zip(other.args.backing.as_ref());
    let faults = [
        (one.args.export == *export)
            .then(|| format!("two devices have the export {export:?}; give each its own name")),
        is_one_file(&one.pool, &other.pool).then(|| format!("two devices have the pool {pool}")),
        backings
            .filter(|(one, other)| one.shares_data_with(other))
            .map(|(_, backing)| format!("two devices have the backing {backing}")),
        pool_as_backing(one, &other.pool),
        pool_as_backing(other, &one.pool),
    ];
    faults.into_iter().flatten().collect()
}

/// Returns the fault of `device` if its backing is the file of `pool`.
fn pool_as_backing(device: &DevicePlan, pool: &Path) -> Option<String> {
    let backing = device.args.backing.as_ref()?;
    let is_pool = is_one_file(&backing.file()?, pool);
    is_pool
        .then(|| format!("the backing {backing} is a pool: name another file, or a block device"))
}

fn device(document: &Document<'_>, mut table: Table<'_>) -> Option<DevicePlan> {
    let offset = table.offset;
    let has_pool = table.has("pool");
    let places = ["mode", "atomic-flush", "keep-dirty", "read-only"];
    let places = places.map(|key| (key, table.offset_of(key)));
    let pool = table.path("pool");
    let name = |text: &str| Export::check_name(text).map(|()| text.to_owned());
    let export = table.with("export", name).unwrap_or_default();
    let none = TierSpec { policy: Policy::None, bytes: 0 };
    let origin = format!("{}: device {export:?}", document.position(offset));
    let args = DeviceArgs {
        export,
        ublk: table.flag("ublk").then_some(None),
        vhost_user: table.with("vhost-user", parse_socket),
        dram: table.parsed("dram").unwrap_or(none),
        backing: table.parsed("backing"),
        mode: table.with("mode", parse_mode),
        atomic_flush: table.flag("atomic-flush"),
        keep_dirty: table.flag("keep-dirty"),
        force: table.flag("force"),
        read_only: table.flag("read-only"),
        control: table.with("control", parse_unix),
        delay_us: None,
    };
    let domain = table.parsed("domain");
    let memory = MemoryArgs { domain, media: table.parsed("media").unwrap_or_default() };
    table.finish();
    for (key, fault) in args.contradictions() {
        let place = places.iter().find(|(known, _)| *known == key).and_then(|(_, place)| *place);
        document.fault(place.unwrap_or(offset), fault);
    }
    if !has_pool {
        document.fault(offset, "a `[[device]]` needs its `pool`");
    }
    Some(DevicePlan { pool: pool?, args, memory, origin: Some(origin) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_in_each_form() {
        let text = "nbd = [\"unix:/s\"]\nmax-connections = 0x4_00\nstop-timeout = 0b11\n\
                    [[device]]\npool = \"/p\"\n";
        let plan = parse(Path::new("file"), text).expect("it is right");
        assert_eq!((plan.limits.connections, plan.stop_timeout.as_secs()), (1024, 3));
    }
}
