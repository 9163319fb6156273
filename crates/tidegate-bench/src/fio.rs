//! fio: the options shared by all its command lines, and its JSON.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::child::find_program;
use crate::error::{BenchError, Result};
use crate::measure::{Op, Sample};

/// Makes a command of fio with random requests of one kind in a job called `name`, run in `dir`,
/// where fio leaves a state file if it is interrupted. The caller adds engine, range and length.
pub(crate) fn command(name: &str, op: Op, dir: &Path) -> Result<Command> {
    let mut command = Command::new(find_program("fio", "fio")?);
    command.arg(format!("--name={name}")).arg(format!("--rw=rand{}", op.name()));
    command.args(["--output-format=json", "--percentile_list=50:99:99.9:99.99"]).current_dir(dir);
    Ok(command)
}

/// Parses the output of fio: lines of its engine, then one JSON object with one group of jobs.
pub(crate) fn parse(output: &str, op: Op) -> Result<Sample> {
    let wrong = |found: String| BenchError::program("fio", found);
    let start = output.find("\n{").map_or(0, |newline| newline + 1);
    let json: Value = serde_json::from_str(&output[start..])
        .map_err(|error| wrong(format!("printed no JSON object: {error}")))?;
    let job = &json["jobs"][0];
    if job["error"].as_i64() != Some(0) {
        return Err(wrong(format!("the job ended with error {}, expected 0", job["error"])));
    }
    let side = if op == Op::Read { "read" } else { "write" };
    let number = |value: &Value, name: &str| {
        value.as_f64().ok_or_else(|| wrong(format!("its JSON has no number {side}.{name}")))
    };
    let latency = &job[side]["clat_ns"];
    let percentile = |name: &str| number(&latency["percentile"][name], name).map(whole);
    Ok(Sample {
        ops: whole(number(&job[side]["total_ios"], "total_ios")?),
        ops_per_s: number(&job[side]["iops"], "iops")?,
        mean_ns: number(&latency["mean"], "clat_ns.mean")?,
        p50_ns: percentile("50.000000")?,
        p99_ns: percentile("99.000000")?,
        p999_ns: percentile("99.900000")?,
        p9999_ns: percentile("99.990000")?,
        max_ns: whole(number(&latency["max"], "clat_ns.max")?),
        traffic: None,
    })
}

/// Converts a number that a program printed into a whole one.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "saturates, and counts and times are not negative"
)]
pub(crate) fn whole(number: f64) -> u64 {
    number as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// fio 3.33, random write with 2 jobs on nbdkit.
    const RECORDED: &str = include_str!("../tests/data/fio-nbd-randwrite.txt");

    #[test]
    fn a_recorded_run_is_read() {
        let sample = parse(RECORDED, Op::Write).unwrap();
        assert_eq!(sample.ops, 151_361);
        assert!((sample.ops_per_s - 151_209.790_210).abs() < 1e-6);
        assert!((sample.mean_ns - 414_807.767_516).abs() < 1e-6);
        let latencies =
            [sample.p50_ns, sample.p99_ns, sample.p999_ns, sample.p9999_ns, sample.max_ns];
        assert_eq!(latencies, [121_344, 5_144_576, 12_255_232, 30_277_632, 32_631_194]);
    }

    #[test]
    fn what_is_no_result_is_an_error() {
        let error = |text: &str, op| parse(text, op).unwrap_err().to_string();
        assert!(error(RECORDED, Op::Read).contains("50.000000"), "nothing was read in that run");
        assert!(error("fio: connected\n", Op::Write).contains("no JSON"));
        assert!(error("", Op::Write).contains("no JSON"));
        let failed = RECORDED.replace("\"error\" : 0", "\"error\" : 5");
        assert!(error(&failed, Op::Write).contains("error 5"));
        let cut = &RECORDED[..RECORDED.len() / 2];
        assert!(error(cut, Op::Write).contains("no JSON"));
    }
}
