//! Amounts other than latencies: the start of a program, programs at rest, and writes to the disk.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::bed::disk_bytes;
use super::files::pool;
use super::{Bench, Measure, Part, Runner};
use crate::child::{find_program, output_of, seconds_of};
use crate::error::{BenchError, Result};

/// Starts in one measurement.
const STARTS: u32 = 10;
/// Time that a program at rest is watched.
const WATCH: Duration = Duration::from_secs(1);
/// Time for the supervisor to clean after the last write; later work counts as work at rest.
const REST_DELAY: Duration = Duration::from_millis(500);
/// Size of the hot set.
const HOT_BYTES: u64 = 16 << 20;
/// Times that the hot set is written.
const HOT_TIMES: u64 = 100;

/// Measures `tidegate run -- true` against `true`, then a program at rest.
pub(super) fn launch(bench: &mut Bench<'_>) -> Result<()> {
    let program = find_program("true", "coreutils")?;
    bench.prepare_pool(pool(bench.args))?;
    let runners = bench.tidegates();
    let name = |runner: Runner| format!("{}: start and rest", runner.name());
    bench.in_turns(Part::Launch, &runners, name, |bench, runner| {
        let mut more_ms = 0.0;
        for _ in 0..STARTS {
            let of = |runner| bench.bed.command(runner, pool(bench.args), &program);
            let (plain_s, under_s) = (seconds_of(of(Runner::Plain))?, seconds_of(of(runner))?);
            more_ms += (under_s - plain_s) * 1e3 / f64::from(STARTS);
        }
        bench.found.add(Measure::LAUNCH, runner.name(), more_ms);
        let cpu_pct = rest(bench, runner)?;
        bench.found.add(Measure::IDLE_CPU, runner.name(), cpu_pct);
        Ok(None)
    })
}

/// Returns the share of a CPU that a waiting program takes after writes, together with the
/// processes that serve it.
fn rest(bench: &Bench<'_>, runner: Runner) -> Result<f64> {
    let file = bench.bed.random_file("rest", 1 << 20)?;
    let mut driver = bench.bed.driver(runner, pool(bench.args));
    driver.arg(file).args(["--size=1M", "--requests=1000", "--linger"]);
    let resting = Resting::start(driver)?;
    std::thread::sleep(REST_DELAY);
    let (begun, before) = (Instant::now(), Resting::cpu_time(bench)?);
    std::thread::sleep(WATCH);
    let used = Resting::cpu_time(bench)?.saturating_sub(before);
    let cpu_pct = used.as_secs_f64() * 100.0 / begun.elapsed().as_secs_f64();
    resting.end()?;
    Ok(cpu_pct)
}

/// A program that does nothing until its standard input ends.
struct Resting(Child);

impl Resting {
    /// Starts the program, and waits until it has reported its result.
    fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(BenchError::os("start", command.get_program()))?;
        let said = child.stdout.take().map(|output| BufReader::new(output).lines().next());
        match said.flatten() {
            Some(Ok(_)) => Ok(Self(child)),
            _ => Err(BenchError::program("bench io", "ended before it came to rest")),
        }
    }

    /// Returns the CPU time so far of all processes whose command line names the bed's directories.
    fn cpu_time(bench: &Bench<'_>) -> Result<Duration> {
        let dirs = [bench.bed.pools(), bench.bed.files()];
        let entries = std::fs::read_dir("/proc").map_err(BenchError::os("list", "/proc"))?;
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let ours = paths.filter(|path| names_one_of(path, &dirs));
        let times: Vec<Duration> = ours.map(|path| cpu_time_of(&path)).collect();
        match times.len() {
            0 | 1 => Err(BenchError::program("bench io", "is not there with its supervisor")),
            _ => Ok(times.into_iter().sum()),
        }
    }

    fn end(mut self) -> Result<()> {
        drop(self.0.stdin.take());
        let status = self.0.wait().map_err(BenchError::os("wait for", "bench io"))?;
        if status.success() {
            return Ok(());
        }
        Err(BenchError::program("bench io", format!("ended with {status}")))
    }
}

impl Drop for Resting {
    fn drop(&mut self) {
        // Both fail only if the program has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn names_one_of(process: &Path, dirs: &[&Path]) -> bool {
    let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line);
    dirs.iter().any(|dir| line.contains(&*dir.to_string_lossy()))
}

/// Returns the CPU time of the threads of a process; zero if the process has just ended.
fn cpu_time_of(process: &Path) -> Duration {
    let threads = std::fs::read_dir(process.join("task")).into_iter().flatten();
    let times = threads.filter_map(|thread| {
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        Some(Duration::from_nanos(text.split_whitespace().next()?.parse().ok()?))
    });
    times.sum()
}

/// Measures a set of blocks that fits the page cache, written again and again, each write synced.
pub(super) fn hot_set(bench: &mut Bench<'_>) -> Result<()> {
    bench.prepare_pool(pool(bench.args))?;
    let bytes = bench.args.scaled(HOT_BYTES, 64 << 10);
    let runners = bench.tidegates();
    let name = |runner: Runner| format!("{}: hot set", runner.name());
    bench.in_turns(Part::Hot, &runners, name, |bench, runner| {
        let times = rewrite(bench, runner, bytes)?;
        bench.found.add(Measure::HOT_SET, runner.name(), times);
        Ok(None)
    })
}

/// Returns how often a set of `bytes` bytes that was written [`HOT_TIMES`] times reached the disk.
fn rewrite(bench: &Bench<'_>, runner: Runner, bytes: u64) -> Result<f64> {
    let file = bench.bed.random_file("hot", bytes)?;
    let requests = bytes / 4096 * HOT_TIMES;
    let mut driver = bench.bed.driver(runner, pool(bench.args));
    driver.arg(file).args([format!("--size={bytes}"), format!("--requests={requests}")]);
    bench.bed.sync_disk()?;
    let before = disk_bytes(bench.bed.files())?;
    // At its end, the supervisor has destaged all of the log.
    output_of(driver)?;
    Ok((disk_bytes(bench.bed.files())? - before) as f64 / bytes as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_what_a_process_has_used() {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo here; read line"]);
        let resting = Resting::start(command).unwrap();
        let process = format!("/proc/{}", resting.0.id());
        let used = cpu_time_of(Path::new(&process));
        assert!(used > Duration::from_micros(100), "{used:?} for 20000 rounds of a loop");
        assert_eq!(cpu_time_of(Path::new("/proc/0")), Duration::ZERO);
    }

    #[test]
    fn a_process_is_found_by_its_arguments() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "echo here; read line", "/marked/directory/x"]);
        let resting = Resting::start(command).unwrap();
        let process = format!("/proc/{}", resting.0.id());
        let named = |dir: &str| names_one_of(Path::new(&process), &[Path::new(dir)]);
        assert!(named("/marked/directory") && !named("/other/directory"));
    }
}
