//! `tidegate stat`: describes a pool, and shows the counts of its server or supervisor.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tidegate::dram::{Policy, TierSpec};
use tidegate::pmem::{Region, RegionOptions};
use tidegate::pool::{Glance, glance};
use tidegate::size::Size;
use tidegate::stack::{REGISTRY, Stat};
use tidegate::stats::{Latencies, Reading, Unit, Value};
use tidegate_run::{
    Asked, PoolPaths, Reply, Request, Statistics, ask, ask_at, existing_log, inspect_pool,
    log_in_use, open_pool_file,
};

use crate::args::StatArgs;
use crate::control::{Answer, is_socket, reset_at, stat_of};
use crate::output::{Terminal, field, json, line, print_lines};

/// The facts to print.
#[derive(Serialize)]
#[serde(untagged)]
enum Found {
    /// From the pool's server, or from its header.
    Stack(Box<Stat>),
    /// From the supervisor of `tidegate run`, or from the log that it left.
    Supervisor(Box<Statistics>),
}

/// Runs the command.
///
/// # Errors
/// The pool does not exist, or the process that has it open does not answer.
pub(crate) fn run(args: &StatArgs) -> Result<()> {
    let target = &args.target;
    let found = match (args.reset, is_socket(target)) {
        (true, _) => Found::Stack(Box::new(reset_at(target)?)),
        (false, true) => of_socket(target)?,
        (false, false) => of_pool(target)?,
    };
    match (found, args.json) {
        (Found::Stack(mut stat), true) => {
            stat.lines.clear();
            json(&stat)?;
        }
        (Found::Stack(stat), false) => print_stat(&stat)?,
        (Found::Supervisor(statistics), true) => json(&statistics)?,
        (Found::Supervisor(statistics), false) => {
            let mut lines = statistics.status_lines().into_iter();
            lines.try_for_each(|(label, value)| field(label, value))?;
        }
    }
    Ok(())
}

fn of_socket(socket: &Path) -> Result<Found> {
    let shown = socket.display();
    match stat_of(socket)? {
        Answer::Of(stat) => Ok(Found::Stack(Box::new(stat))),
        Answer::Nobody => bail!("{shown}: no process listens there"),
        Answer::Supervisor => match ask(socket, &Request::Stat, &Terminal::new(false))? {
            Some(Reply::Statistics(statistics)) => Ok(Found::Supervisor(statistics)),
            Some(_) => bail!("{shown}: no server and no supervisor of a pool listens there"),
            None => bail!("{shown}: no process listens there"),
        },
    }
}

fn of_pool(path: &Path) -> Result<Found> {
    let metadata = inspect_pool(path)?;
    if let Answer::Of(stat) = stat_of(path)? {
        return Ok(Found::Stack(Box::new(stat)));
    }
    if metadata.is_file() && !may_be_supervised(path)? {
        return of_header(path);
    }
    of_log(path)
}

/// Returns whether a supervisor of `tidegate run` may use the pool in the file at `path`. That is
/// also true of a blank or damaged file, since only opening it tells more.
fn may_be_supervised(path: &Path) -> Result<bool> {
    let file = open_pool_file(path)?;
    let found = glance(&file).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(match found {
        Glance::Btt(_) => false,
        Glance::Tidegate(Some(_)) => {
            REGISTRY.of_glance(found).is_some_and(|engine| engine.traits().keeps_files)
        }
        Glance::Tidegate(None) | Glance::Unknown(_) => true,
    })
}

/// Describes a pool that no process serves, from its header.
fn of_header(path: &Path) -> Result<Found> {
    let options = RegionOptions { read_only: true, ..RegionOptions::default() };
    let region = Arc::new(Region::open(path, &options)?);
    let none = TierSpec { policy: Policy::None, bytes: 0 };
    let description = REGISTRY.describe(&region, none)?;
    Ok(Found::Stack(Box::new(Stat::of(&description, false))))
}

fn of_log(path: &Path) -> Result<Found> {
    let pool = existing_log(path)?;
    // Without a directory for its files, no supervisor can run.
    let Ok(paths) = PoolPaths::of_pool(&pool) else { return of_unsupervised(pool) };
    match ask_at(&paths, &Request::Stat, &Terminal::new(false))? {
        Asked::Reply(Reply::Statistics(statistics)) => Ok(Found::Supervisor(statistics)),
        Asked::Reply(_) => {
            bail!("{}: its supervisor gave an answer of another kind", path.display())
        }
        Asked::Unsupervised(_lock) => of_unsupervised(pool),
    }
}

/// Describes a log that no supervisor uses.
fn of_unsupervised(pool: PathBuf) -> Result<Found> {
    let (log_bytes, log_used_bytes) = log_in_use(&pool)?;
    let found = Statistics { pool, log_bytes, log_used_bytes, ..Statistics::default() };
    Ok(Found::Supervisor(Box::new(found)))
}

/// Prints the description, and every metric that is not 0.
fn print_stat(stat: &Stat) -> Result<()> {
    print_lines(&stat.lines)?;
    if !stat.live {
        line(format_args!("{:<14} none: the pool is not served", "server"))?;
    }
    for reading in &stat.metrics {
        if let Some(value) = text_of(reading) {
            let labels: Vec<_> = reading.labels.values().map(String::as_str).collect();
            line(format_args!("{:<24} {:<26} {value}", labels.join(" "), reading.metric.name))?;
        }
    }
    Ok(())
}

/// Returns the value of `reading` for people, or `None` if it is 0.
fn text_of(reading: &Reading) -> Option<String> {
    match (&reading.value, reading.metric.unit) {
        (Value::Whole(0), _) => None,
        (Value::Whole(bytes), Unit::Bytes) => Some(Size { bytes: *bytes }.to_string()),
        (Value::Whole(number), _) => Some(number.to_string()),
        (Value::Real(number), Unit::Pct) => Some(format!("{number:.1} %")),
        (Value::Real(number), _) => Some(format!("{number:.2}")),
        (Value::Latencies(latencies), _) => text_of_latencies(latencies),
    }
}

fn text_of_latencies(latencies: &Latencies) -> Option<String> {
    let micros = |ns: u64| Duration::from_nanos(ns).as_secs_f64() * 1e6;
    let quantile = |millionths| micros(latencies.quantile_ns(millionths));
    let (p50, p99, p9999) = (quantile(500_000), quantile(990_000), quantile(999_900));
    let (mean, max) = (micros(latencies.mean_ns()), micros(latencies.max_ns));
    (latencies.count > 0).then(|| {
        format!("mean {mean:.2} µs, p50 {p50:.2}, p99 {p99:.2}, p99.99 {p9999:.1}, max {max:.1}")
    })
}
