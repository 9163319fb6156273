//! Files that the log does not have: their writes and syncs are the kernel's, at the cost that they
//! have without Tidegate; with `--every-write` each write is synced for real.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bed::{Bed, Runner};
use crate::programs::compiled;
use crate::support::{preload_library, succeed, tool};

/// A file system that is not covered, on one that is; unmounted when it is dropped.
struct Overlay(PathBuf);

impl Overlay {
    fn new(disk: &Path) -> Self {
        let parts = ["lower", "upper", "work", "merged"].map(|name| disk.join(name));
        for part in &parts {
            std::fs::create_dir(part).unwrap();
        }
        let [lower, upper, work, merged] = parts.each_ref().map(|part| part.display());
        let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        let mut mount = tool("mount", "mount");
        succeed(mount.args(["-t", "overlay", "overlay", "-o", &options]).arg(merged.to_string()));
        Self(parts[3].clone())
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        succeed(tool("umount", "mount").arg(&self.0));
    }
}

/// What `strace` counts of each system call of this command.
pub(crate) fn calls(mut strace: Command, trace: &Path) -> BTreeMap<String, usize> {
    succeed(&mut strace);
    let mut counts = BTreeMap::new();
    for line in std::fs::read_to_string(trace).unwrap().lines() {
        let call = line.split_whitespace().nth(1).unwrap_or_default();
        let name = call.split('(').next().unwrap_or_default();
        *counts.entry(name.to_owned()).or_default() += 1;
    }
    counts
}

/// A command under `strace`, which is started by this runner.
pub(crate) fn traced(runner: Runner<'_>, dir: &Path, trace: &Path) -> Command {
    let mut command = runner.command("strace", dir);
    command.args(["-f", "-qq", "-o"]).arg(trace);
    command
}

/// The system calls of 100 writes and syncs.
fn calls_of_a_hundred(bed: &Bed, runner: Runner<'_>, way: &str, path: &Path) -> usize {
    let program = compiled("plain_calls", &[]);
    let trace = bed.pool_dir().join("trace");
    let total = |times: &str| {
        let mut strace = traced(runner, bed.disk(), &trace);
        strace.arg(&program).arg(way).arg(path).arg(times);
        calls(strace, &trace).values().sum::<usize>()
    };
    total("140") - total("40")
}

#[test]
fn a_sync_of_a_plain_file_makes_no_call_beside_its_own() {
    let bed = Bed::new();
    let overlay = Overlay::new(bed.disk());
    let (pool, here) = (bed.pool(), bed.disk().join("file"));
    let in_memory = bed.pool_dir().join("file");
    let elsewhere = overlay.0.join("file");
    for (way, path) in [
        ("direct", &here),
        ("stream", &here),
        ("mapped", &here),
        ("ordinary", &elsewhere),
        ("ordinary", &in_memory),
    ] {
        let plain = calls_of_a_hundred(&bed, Runner::Plain, way, path);
        let run = calls_of_a_hundred(&bed, Runner::Run(&pool), way, path);
        assert!(run <= plain + 20, "{way} {}: {run}, plain {plain}", path.display());
    }
}

/// How many writes the program has made, and how many of them were synced.
fn synced_writes(bed: &Bed, options: &[&str], path: &Path) -> (usize, usize) {
    preload_library();
    let trace = bed.pool_dir().join("trace");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["run", "-q", "--every-write", "--size=64M"]).args(options).arg("--pool");
    command.arg(bed.pool()).args(["--", "strace", "-f", "-qq", "-o"]).arg(&trace);
    command.args(["-e", "trace=fsync,fdatasync,write,openat"]);
    let program = compiled("every_write", &[]);
    let printed = succeed(command.arg(program).arg(path).current_dir(bed.disk()));
    let lines = std::fs::read_to_string(&trace).unwrap();
    let syncs = lines.lines().filter(|line| line.contains("sync(")).count();
    // Those of the first stream are synced by the kernel: two in each round.
    let by_kernel = lines.lines().filter(|line| line.contains("O_DSYNC")).count();
    (printed.trim().parse().unwrap(), syncs + 2 * by_kernel)
}

#[test]
fn each_write_of_a_file_that_is_not_covered_is_synced_for_real() {
    let bed = Bed::new();
    let overlay = Overlay::new(bed.disk());
    let (writes, synced) = synced_writes(&bed, &[], &overlay.0.join("file"));
    assert!(writes == 120 && synced >= writes, "{synced} syncs of {writes} writes");
}

#[test]
fn the_writes_of_an_excluded_file_are_as_without_tidegate() {
    let bed = Bed::new();
    let excluded = bed.disk().join("file");
    let (writes, synced) = synced_writes(&bed, &["--exclude", "*/file"], &excluded);
    // The program's own, and few others.
    assert!(writes == 120 && synced < 20, "{synced} syncs of {writes} writes");
}
