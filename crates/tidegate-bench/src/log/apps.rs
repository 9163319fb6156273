//! Widely used programs, each with its own benchmark if it has one.
//!
//! Without syncs, the `eatmydata` library answers the syncs of all programs.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use super::bed::{Way, under};
use super::files::pool;
use super::{Bench, Failure, Part, RUN_PREFIX};
use crate::child::{find_program, output_of};
use crate::error::{BenchError, Result};
use crate::measure::{Key, Op, Sample};
use crate::policy::name_of;
use crate::programs::parse_sample;

/// The driver.
const DRIVER: &str = include_str!("../../programs/apps.py");
/// The interpreter: Debian's, which has the modules of Debian's packages.
const PYTHON: &str = "/usr/bin/python3";

/// Programs: the name for the driver, the required program, and its package.
const APPS: [(&str, &str, &str); 8] = [
    ("redis", "redis-benchmark", "redis-server"),
    ("mariadb", "sysbench", "mariadb-server sysbench"),
    ("mariadb-advised", "sysbench", "mariadb-server sysbench"),
    ("lmdb", PYTHON, "python3-lmdb"),
    ("dpkg", "dpkg-deb", "dpkg"),
    ("svn", "svnadmin", "subversion"),
    ("duckdb", PYTHON, "python3, and duckdb from PyPI"),
    ("h2", "javac", "default-jdk-headless libh2-java"),
];

/// Returns the names of all programs.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    APPS.into_iter().map(|(name, ..)| name)
}

/// Returns the case of the program with this name.
pub(super) fn case_of(name: &str) -> String {
    format!("{RUN_PREFIX}app-{name}")
}

/// Measures the requested programs. A program that is not installed is noted.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let driver = bench.bed.file("apps.py");
    std::fs::write(&driver, DRIVER).map_err(BenchError::os("write", &driver))?;
    bench.prepare_pool(pool(bench.args))?;
    let wanted = &bench.args.apps;
    for (name, program, package) in APPS {
        if !wanted.is_empty() && !wanted.iter().any(|it| it == name) {
            continue;
        }
        let found = find_program(program, package);
        if let Err(error) = found.and_then(|_| compare(bench, &driver, name)) {
            let part = format!("{} {name}", name_of(Part::Apps));
            bench.found.failures.push(Failure { part, error: error.with_causes() });
        }
    }
    Ok(())
}

/// Measures one program without syncs, with them, and under `tidegate run`.
fn compare(bench: &mut Bench<'_>, driver: &Path, app: &str) -> Result<()> {
    let ways = Way::all(&bench.args.policies, false);
    let name = |way: Way| format!("{} {app}", way.policy());
    bench.in_turns(Part::Apps, &ways, name, |bench, way| {
        let sample = run(bench, way, driver, app)?;
        Ok(Some((Key::new(way.policy(), case_of(app), Op::Write, 0), sample)))
    })
}

fn run(bench: &Bench<'_>, way: Way, driver: &Path, app: &str) -> Result<Sample> {
    let directory = bench.bed.empty_directory()?;
    let mut command = Command::new(find_program(PYTHON, "python3")?);
    command.arg(driver).arg(app).arg(directory.path()).arg(bench.args.seconds.to_string());
    command.args(started_by(bench, way)?);
    bench.bed.place(&mut command);
    parse_sample(app, output_of(command)?.trim())
}

/// Returns the words that start a program in this way.
fn started_by(bench: &Bench<'_>, way: Way) -> Result<Vec<OsString>> {
    if way.syncs {
        let pool = pool(bench.args);
        return Ok(under(&bench.bed.tidegate, way.runner, &bench.bed.pool(pool), pool.bytes));
    }
    Ok(vec![find_program("eatmydata", "eatmydata")?.into()])
}
