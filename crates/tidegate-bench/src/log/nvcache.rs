//! The authors' `NVCache`: a C library that replaces musl, built outside this repository.
//!
//! The path of its log is compiled in; docs/benchmarks/run.md describes the build. It is measured
//! with one thread only: with two it usually crashes.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use super::Bench;
use crate::child::{find_program, output_of};
use crate::error::{BenchError, Result};
use crate::measure::Sample;
use crate::programs::parse_sample;
use crate::source::{Compiler, Source};

/// The policy of the peer's rows.
pub(super) const POLICY: &str = "peer:nvcache";
/// The driver, linked with musl.
const DRIVER: Source =
    Source { name: "io", text: include_str!("../../programs/io.c"), options: &[] };
const MUSL: Compiler = ("musl-gcc", "musl-tools");
/// The path of the peer's log.
const LOG: &str = "/dev/shm/nvcache.pmem";
/// Entries of the log for 100 writes, so that the log is never full.
const ENTRIES_PCT: u64 = 200;
/// Upper bound of an entry's size.
const ENTRY_BYTES: u64 = 5000;

/// Seconds after which the peer counts as hanging.
const TIMEOUT_S: &str = "60";

/// The peer's log, removed on drop.
struct Log;

impl Drop for Log {
    fn drop(&mut self) {
        // Fails only if there is no log.
        let _ = std::fs::remove_file(LOG);
    }
}

/// Writes `requests` random blocks of `block_bytes` to a file of `bytes`.
pub(super) fn write(
    bench: &Bench<'_>,
    library: &Path,
    file: &Path,
    [bytes, block_bytes, requests]: [u64; 3],
) -> Result<Sample> {
    let driver = DRIVER.compile(bench.bed.files(), MUSL)?;
    let entries = (requests * ENTRIES_PCT / 100).max(10_000);
    let log = Log;
    let sized = File::create(LOG).and_then(|file| file.set_len(entries * ENTRY_BYTES + (16 << 20)));
    sized.map_err(BenchError::os("make", LOG))?;
    bench.bed.sync_disk()?;
    let mut command = Command::new(find_program("timeout", "coreutils")?);
    command.args(["--signal=KILL", TIMEOUT_S]).args([library, &driver]).arg(file);
    command.args([bytes, block_bytes, requests].map(|number| number.to_string()));
    command.env("NVCACHE_LOG_SIZE", entries.to_string());
    let output = output_of(command)?;
    drop(log);
    parse_sample(POLICY, output.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::CC;

    #[test]
    fn the_driver_writes_its_blocks_and_says_how_long_they_took() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, vec![0; 64 << 10]).unwrap();
        let driver = DRIVER.compile(dir.path(), CC).unwrap();
        let mut command = Command::new(&driver);
        command.arg(&file).args(["65536", "4096", "500"]);
        let sample = parse_sample(POLICY, output_of(command).unwrap().trim()).unwrap();
        assert!(sample.ops == 500 && sample.p50_ns <= sample.max_ns, "{sample:?}");
        let written = std::fs::read(&file).unwrap();
        assert_eq!(written.len(), 64 << 10);
        assert!(written.chunks(4096).all(|block| block[4000] == 0x5a), "each was chosen");
    }
}
