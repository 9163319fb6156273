//! Open CAS's library OCF as a peer: a program that drives it and prints the measurements.
//!
//! The program is not part of this project. It is started as `PROGRAM CASE SIZE_BYTES SECONDS DIR
//! FILES`: `CASE` is `miss`, `hit`, `evict` or `full-file`, for a write-back cache of `SIZE_BYTES`
//! in `DIR`, with lines of 4 KiB, before a backing four times as large. The backing keeps nothing;
//! for `full-file` it is a file in `FILES`, with a flush after each 32 writes. The program prints
//! one JSON object with the fields of [`Sample`].

use std::process::Command;

use super::Bench;
use super::bed::PAGE_BYTES;
use crate::child::output_of;
use crate::error::{BenchError, Result};
use crate::measure::{Key, Op, Sample};

/// The policy in rows.
pub(super) const OCF: &str = "peer:ocf";

/// Measures `case` with the program, if one was named, for `seconds` on a cache of `size_bytes`,
/// and collects the result under the same case as the cache's.
pub(super) fn turn(bench: &mut Bench<'_>, case: &str, size_bytes: u64, seconds: f64) -> Result<()> {
    let Some(program) = &bench.args.peer_ocf else { return Ok(()) };
    let mut command = Command::new(program);
    command.arg(case.trim_start_matches("cache-"));
    command.args([size_bytes.to_string(), seconds.to_string()]);
    command.args([&bench.args.dir, &bench.args.files]);
    let said = output_of(command)?;
    let sample = sample_of(&said)
        .map_err(|found| BenchError::program(&program.display().to_string(), found))?;
    let (policy, case) = (OCF.to_owned(), case.to_owned());
    let block_bytes = u64::from(PAGE_BYTES);
    let key = Key { policy, case, op: Op::Write, threads: 1, iodepth: 1, block_bytes };
    bench.collector.add(key, sample);
    Ok(())
}

/// Parses the sample in the program's output.
fn sample_of(said: &str) -> std::result::Result<Sample, String> {
    let line = said.lines().last().unwrap_or_default();
    serde_json::from_str(line)
        .map_err(|error| format!("printed \"{line}\", expected a sample as JSON: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_the_last_line_and_anything_else_is_told() {
        let sample = Sample { ops: 7, ..Sample::single(0.5) };
        let line = serde_json::to_string(&sample).unwrap();
        assert_eq!(sample_of(&format!("starting\n{line}\n")), Ok(sample));
        for wrong in ["", "fast", "{}", "{\"ops\": -1}"] {
            let error = sample_of(wrong).unwrap_err();
            assert!(error.contains(&format!("printed \"{wrong}\", expected")), "{error}");
        }
    }
}
