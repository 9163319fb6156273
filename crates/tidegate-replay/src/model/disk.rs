//! Measures a disk through a file in a directory on it, with direct I/O.

use std::path::Path;
use std::time::Duration;

use tidegate::device::file::{FileDevice, FileOptions, Transfer};
use tidegate::device::{BlockDeviceExt, DeviceError};
use tidegate_bench::pattern::Pattern;
use tidegate_bench::workload::{Outcome, Stop, Workload};

use crate::error::{Error, Result};
use crate::time::SsdModel;

/// Size of the file. A disk answers reads of recent writes from its cache, so that a larger file
/// gives slower results.
const FILE_BYTES: u64 = 256 << 20;
/// Duration of each measurement.
const RUN: Duration = Duration::from_secs(1);
const PAGE_BYTES: u32 = 4096;
const LARGE_BYTES: u32 = 1 << 20;
/// Number of concurrent large requests that keep a disk busy.
const LARGE_DEPTH: u32 = 8;
/// Number of concurrent requests of a page: more than most disks serve in parallel.
const DEPTH: u32 = 32;

/// Measures the disk that `dir` is on. Takes about six seconds, during which the disk should be
/// idle otherwise.
///
/// # Errors
/// The file cannot be created in `dir`, or does not support direct I/O.
pub(super) fn measure(dir: &Path) -> Result<SsdModel> {
    let failed = |error: &dyn std::fmt::Display| {
        Error::Usage(format!("--disk {}: cannot be measured: {error}", dir.display()))
    };
    let folder = tempfile::tempdir_in(dir).map_err(|error| failed(&error))?;
    let file = open(&folder.path().join("disk"), FILE_BYTES).map_err(|error| failed(&error))?;
    // An open file needs no name, and a killed process then leaves nothing.
    folder.close().map_err(|error| failed(&error))?;
    let settings = measure_file(&file, FILE_BYTES, RUN).map_err(|error| failed(&error))?;
    format!("nvme,{settings}").parse().map_err(Error::Usage)
}

/// Makes a file of `bytes` bytes at `path`, for direct I/O.
fn open(path: &Path, bytes: u64) -> Result<FileDevice, DeviceError> {
    let options = FileOptions {
        transfer: Transfer::Direct,
        create_bytes: Some(bytes),
        ..FileOptions::default()
    };
    FileDevice::open(path, &options)
}

/// Returns the settings of an [`SsdModel`], measured on `file`, which has `bytes` bytes.
fn measure_file(file: &FileDevice, bytes: u64, run: Duration) -> Result<String, DeviceError> {
    let load = |block_bytes, depth, read_pct| Workload {
        iodepth: depth,
        read_pct,
        ..Workload::writes(Pattern::Uniform, block_bytes, bytes, Stop::After(run))
    };
    load(LARGE_BYTES, 1, 0).fill(file)?;
    let written = load(LARGE_BYTES, LARGE_DEPTH, 0).run(file)?;
    file.flush()?;
    let write_ns = load(PAGE_BYTES, 1, 0).run(file)?.write.mean();
    let flush_ns = Workload { flush_every: 1, ..load(PAGE_BYTES, 1, 0) }.run(file)?.flush.mean();
    let read = load(LARGE_BYTES, LARGE_DEPTH, 100).run(file)?;
    let read_ns = load(PAGE_BYTES, 1, 100).run(file)?.read.mean();
    let at_once = per_second(&load(PAGE_BYTES, DEPTH, 100).run(file)?, 1) * read_ns / 1e9;
    Ok(format!(
        "read_ns={read_ns:.0},write_ns={write_ns:.0},flush_ns={flush_ns:.0},read_bytes_per_s={:.0},\
         write_bytes_per_s={:.0},parallel={:.0}",
        per_second(&read, LARGE_BYTES).max(1.0),
        per_second(&written, LARGE_BYTES).max(1.0),
        at_once.clamp(1.0, f64::from(DEPTH)),
    ))
}

/// Returns the rate of a run, if each request counts `each`.
#[expect(clippy::cast_precision_loss, reason = "a rate is needed to three digits")]
fn per_second(outcome: &Outcome, each: u32) -> f64 {
    let requests = outcome.read.len() + outcome.write.len();
    requests as f64 * f64::from(each) / outcome.elapsed.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_measured_by_a_file_on_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = open(&folder.path().join("disk"), 16 << 20).unwrap();
        let settings = measure_file(&file, 16 << 20, Duration::from_millis(20)).unwrap();
        let model: SsdModel = format!("nvme,{settings}").parse().unwrap();
        assert!(model.read_ns > 0 && model.write_ns > 0 && model.flush_ns > 0, "{settings}");
        assert!((1..=u64::from(DEPTH)).contains(&model.parallel), "{settings}");
        let rates = [model.read_bytes_per_s, model.write_bytes_per_s];
        assert!(rates.iter().all(|rate| *rate > 1 << 20), "{settings}");
    }

    #[test]
    fn where_no_file_can_be_made_is_told() {
        let error = measure(Path::new("/nonexistent")).unwrap_err().to_string();
        assert!(error.contains("--disk /nonexistent: cannot be measured"), "{error}");
    }
}
