//! The machine of a measurement: without it the numbers mean nothing.

use std::fmt;
use std::path::Path;

use serde::Serialize;
use tidegate::pmem::MediaModel;

use crate::workload::clock_overhead_ns;

/// `f_type` of tmpfs, from statfs(2).
const TMPFS_MAGIC: i128 = 0x0102_1994;

/// The machine, the medium and the harness.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// Model of the CPU.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cores: usize,
    /// Version of the kernel.
    pub kernel: String,
    /// The stand-in for persistent memory.
    pub medium: String,
    /// Durability domain of the pools measured in process.
    pub domain: &'static str,
    /// Media model.
    pub media: String,
    /// Cost of one reading of the clock in nanoseconds, inside every latency measured in process.
    pub clock_overhead_ns: f64,
    /// Load average over a minute before the run: above 0, other programs had a share of the CPUs.
    pub load_average: String,
    /// Seconds of one run; 0 where a run is a single operation.
    pub seconds: f64,
    /// Runs of each case.
    pub repetitions: u32,
}

impl Machine {
    /// Describes this machine, for `repetitions` runs of `seconds` on pools in `dir`.
    pub fn of(dir: &Path, media: &MediaModel, seconds: f64, repetitions: u32) -> Self {
        let unknown = || "unknown".to_owned();
        Self {
            cpu: cpu_model().unwrap_or_else(unknown),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: first_word("/proc/sys/kernel/osrelease").unwrap_or_else(unknown),
            medium: medium(dir),
            domain: "adr",
            media: media.to_string(),
            clock_overhead_ns: clock_overhead_ns(),
            load_average: first_word("/proc/loadavg").unwrap_or_else(unknown),
            seconds,
            repetitions,
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, cores, kernel, medium, domain, media, load_average, .. } = self;
        writeln!(f, "{cpu}, {cores} CPUs, Linux {kernel}, load {load_average}")?;
        writeln!(f, "{medium}; domain {domain}, media model {media}")?;
        let length =
            if self.seconds > 0.0 { format!(" of {} s", self.seconds) } else { String::new() };
        let Self { repetitions, clock_overhead_ns, .. } = self;
        write!(
            f,
            "{repetitions} runs{length} a case; a clock reading costs {clock_overhead_ns:.0} ns"
        )
    }
}

fn cpu_model() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(": ")?.1.to_owned())
}

fn first_word(path: &str) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.split_whitespace().next()?.to_owned())
}

/// Returns whether `dir` is in a tmpfs.
pub(crate) fn is_tmpfs(dir: &Path) -> bool {
    rustix::fs::statfs(dir).is_ok_and(|found| i128::from(found.f_type) == TMPFS_MAGIC)
}

fn medium(dir: &Path) -> String {
    if is_tmpfs(dir) {
        return format!("tmpfs {} stands for persistent memory", dir.display());
    }
    format!("files in {}", dir.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tmpfs_is_called_by_its_name() {
        assert!(medium(Path::new("/dev/shm")).contains("tmpfs"));
        assert!(medium(Path::new("/proc")).starts_with("files in"));
    }
}
