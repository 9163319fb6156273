//! The file of `tidegate serve --config`: keys are named as the options, each pool is a
//! `[[device]]`.

mod document;

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use tidegate::dram::{Policy, TierSpec};
use tidegate::opening;
use tidegate_serve::nbd::ListenAddress;

use crate::args::{
    DeviceArgs, LimitArgs, MemoryArgs, STOP_TIMEOUT_SECONDS, TlsArgs, TlsWhen, parse_count,
    parse_mode, parse_unix,
};
use crate::log::{Format, Level};
use crate::plan::{DevicePlan, ServePlan, TlsFiles, limits_of};
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

fn parse(path: &Path, text: &str) -> Result<ServePlan, Vec<String>> {
    let document = Document::new(path, text);
    let plan = plan(&document);
    let faults = document.faults();
    if faults.is_empty() { Ok(plan) } else { Err(faults) }
}

fn plan(document: &Document<'_>) -> ServePlan {
    let mut root = document.root();
    let nbd = root.list("nbd");
    no_address_twice(document, &nbd);
    let limits = LimitArgs {
        max_connections: root.number("max-connections", parse_count),
        request_memory: root.parsed("request-memory"),
        stop_timeout: root
            .number("stop-timeout", str::parse::<u32>)
            .unwrap_or(STOP_TIMEOUT_SECONDS),
    };
    let metrics = root.parsed("metrics");
    let log_format = root.with("log-format", |text| Format::from_str(text, false));
    let log_level = root.with("log-level", |text| Level::from_str(text, false));
    let tls = root.table("tls").and_then(|table| tls(document, table));
    let tables = root.tables("device");
    root.finish();
    if tables.is_empty() {
        document.fault(0, "no device to serve; say `[[device]]` and its `pool = \"PATH\"`");
    }
    let devices = devices(document, tables);
    let is_reached = |device: &DevicePlan| !nbd.is_empty() || device.args.ublk.is_some();
    if devices.is_empty() && nbd.is_empty() || !devices.iter().all(is_reached) {
        let what = "no address to listen at; say `nbd = [\"unix:PATH\"]`, or `ublk = true` in each \
                    device";
        document.fault(0, what);
    }
    ServePlan {
        nbd: nbd.into_iter().map(|(address, _)| address).collect(),
        tls,
        limits: limits_of(&limits),
        metrics,
        log_format: log_format.unwrap_or(Format::Text),
        log_level: log_level.unwrap_or(Level::Info),
        stop_timeout: Duration::from_secs(limits.stop_timeout.into()),
        devices,
        tries_again: true,
    }
}

fn no_address_twice(document: &Document<'_>, addresses: &[(ListenAddress, usize)]) {
    for (at, (address, offset)) in addresses.iter().enumerate() {
        if addresses[..at].iter().any(|(earlier, _)| earlier == address) {
            document.fault(*offset, format_args!("{address} is given twice"));
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

fn devices(document: &Document<'_>, tables: Vec<Table<'_>>) -> Vec<DevicePlan> {
    let mut devices: Vec<DevicePlan> = Vec::new();
    for table in tables {
        let offset = table.offset;
        let Some(device) = device(document, table) else { continue };
        for earlier in &devices {
            let fault = |what| document.fault(offset, what);
            if earlier.args.export == device.args.export {
                let name = &device.args.export;
                fault(format!("two devices have the export {name:?}; give each its own name"));
            }
            if is_one_file(&earlier.pool, &device.pool) {
                fault(format!("two devices have the pool {}", device.pool.display()));
            }
        }
        devices.push(device);
    }
    devices
}

/// Returns whether both paths lead to one file or device. Paths that lead nowhere are compared as
/// texts.
pub(crate) fn is_one_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| {
        let found = path.metadata().ok()?;
        Some(match found.rdev() {
            0 => (found.dev(), found.ino()),
            device => (device, 0),
        })
    };
    match (identity(one), identity(other)) {
        (Some(one), Some(other)) => one == other,
        _ => std::path::absolute(one).ok() == std::path::absolute(other).ok(),
    }
}

fn device(document: &Document<'_>, mut table: Table<'_>) -> Option<DevicePlan> {
    let offset = table.offset;
    let has_pool = table.has("pool");
    let pool = table.path("pool");
    let export = table.text("export").unwrap_or_default();
    let none = TierSpec { policy: Policy::None, bytes: 0 };
    let origin = format!("{}: device {export:?}", document.position(offset));
    let args = DeviceArgs {
        export,
        ublk: table.flag("ublk").then_some(None),
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
