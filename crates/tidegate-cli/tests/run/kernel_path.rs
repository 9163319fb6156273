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

/// Some file systems act on `O_TRUNC` when a file is opened, as tracefs does.
#[test]
fn the_kernel_gets_o_trunc_for_a_file_that_cannot_be_covered() {
    let bed = Bed::new();
    let overlay = Overlay::new(bed.disk());
    let (pool, trace) = (bed.pool(), bed.pool_dir().join("trace"));
    let script = "import ctypes, os, sys
path = sys.argv[1]
for flags in os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC:
    os.close(os.open(path, flags))
how = (ctypes.c_uint64 * 3)(os.O_WRONLY | os.O_TRUNC, 0, 0)
assert ctypes.CDLL(None).syscall(437, -100, path.encode(), how, ctypes.c_size_t(24)) > 0";
    for (path, expected) in
        [(bed.disk().join("file"), 0), (overlay.0.join("file"), 3), (bed.pool_dir().join("x"), 3)]
    {
        std::fs::write(&path, "old").unwrap();
        let mut strace = traced(Runner::Run(&pool), bed.disk(), &trace);
        strace.args(["-P", path.to_str().unwrap(), "-e", "trace=openat,openat2"]);
        succeed(strace.args(["/usr/bin/python3", "-c", script]).arg(&path));
        let lines = std::fs::read_to_string(&trace).unwrap();
        let given = lines.lines().filter(|line| line.contains("O_TRUNC")).count();
        assert_eq!(given, expected, "{}: {lines}", path.display());
        assert_eq!(std::fs::read(&path).unwrap(), b"", "{}", path.display());
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
