//! The programs that run on a file system, and the parsers of their output.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{CASE_PREFIX, Part, ProgramsArgs};
use crate::block::scratch;
use crate::child::{find_program, output_of};
use crate::error::{BenchError, Result};
use crate::fio::{self, whole};
use crate::measure::{Collector, Key, Op, Sample};
use crate::policy::Policy;
use crate::source::{CC, Compiler, Source};

/// The YCSB workloads, and their compiler.
const YCSB: Source = Source {
    name: "ycsb",
    text: include_str!("../../programs/ycsb.cc"),
    // A warning about RocksDB's headers is no error.
    options: &["-std=c++17", "-Wno-error", "-lrocksdb"],
};
const CXX: Compiler = ("g++", "g++");

/// Filebench's personalities, each with its threads and mean file size in Filebench.
const FILEBENCH: Source = Source {
    name: "filebench",
    text: include_str!("../../programs/filebench.c"),
    options: &["-pthread"],
};
const PERSONALITIES: [(&str, usize, u64); 4] = [
    ("fileserver", 50, 128 << 10),
    ("varmail", 16, 16 << 10),
    ("webproxy", 100, 16 << 10),
    ("webserver", 100, 16 << 10),
];

/// Sizes of the values in `RocksDB`.
const VALUES_BYTES: [u64; 3] = [128, 1024, 4096];
/// Size of a key of `db_bench`.
const KEY_BYTES: u64 = 16;
/// Of this many records one is written, if each write is synced.
const SYNC_SHARE: u64 = 256;

/// The installed programs.
pub(super) struct Programs {
    db_bench: PathBuf,
    filebench: PathBuf,
    ycsb: PathBuf,
}

impl Programs {
    /// Finds the programs, and compiles our own into `dir`.
    pub(super) fn find(dir: &Path) -> Result<Self> {
        if !Path::new("/usr/include/rocksdb/db.h").exists() {
            let what = "header rocksdb/db.h".to_owned();
            return Err(BenchError::Missing { what, package: "librocksdb-dev" });
        }
        find_program("fio", "fio")?;
        Ok(Self {
            db_bench: find_program("db_bench", "rocksdb-tools")?,
            filebench: FILEBENCH.compile(dir, CC)?,
            ycsb: YCSB.compile(dir, CXX)?,
        })
    }
}

/// One run of the programs on one file system.
pub(super) struct Run<'a> {
    pub(super) args: &'a ProgramsArgs,
    pub(super) programs: &'a Programs,
    /// The file system.
    pub(super) path: &'a Path,
    pub(super) policy: Policy,
    pub(super) into: &'a mut Collector,
}

impl Run<'_> {
    /// Runs the requested parts.
    pub(super) fn all(&mut self) -> Result<()> {
        for part in self.args.parts() {
            match part {
                Part::Rocksdb => {
                    VALUES_BYTES.into_iter().try_for_each(|bytes| self.rocksdb(bytes))?;
                }
                Part::Ycsb => self.ycsb()?,
                Part::Filebench => self.filebench()?,
                Part::Fio => self.fio()?,
            }
        }
        Ok(())
    }

    fn add(&mut self, case: &str, op: Op, threads: usize, value_bytes: u64, sample: Sample) {
        let case = format!("{CASE_PREFIX}{case}");
        let key = Key::new(self.policy.name(), case, op, value_bytes);
        self.into.add(Key { threads, ..key }, sample);
    }

    /// Runs `fillrandom`, `overwrite` and `readrandom` on one database, and `fillrandom` on another
    /// with a sync of each write.
    fn rocksdb(&mut self, value_bytes: u64) -> Result<()> {
        let records = self.args.data / (KEY_BYTES + value_bytes);
        let benchmarks = ["fillrandom", "overwrite", "readrandom"];
        let output = self.db_bench(&benchmarks, records, value_bytes, false)?;
        for benchmark in benchmarks {
            let op = if benchmark == "readrandom" { Op::Read } else { Op::Write };
            let case = format!("rocksdb-{benchmark}-{value_bytes}");
            self.add(&case, op, 1, value_bytes, parse_db_bench(&output, benchmark)?);
        }
        let (benchmark, records) = ("fillrandom", records.div_ceil(SYNC_SHARE));
        let output = self.db_bench(&[benchmark], records, value_bytes, true)?;
        let case = format!("rocksdb-{benchmark}-sync-{value_bytes}");
        self.add(&case, Op::Write, 1, value_bytes, parse_db_bench(&output, benchmark)?);
        Ok(())
    }

    fn db_bench(
        &self,
        benchmarks: &[&str],
        records: u64,
        value_bytes: u64,
        sync: bool,
    ) -> Result<String> {
        let dir = scratch(self.path)?;
        let db = dir.path().join("db");
        let mut command = Command::new(&self.programs.db_bench);
        command.args(db_bench_options(benchmarks, &db, records, value_bytes, sync));
        output_of(command)
    }

    fn ycsb(&mut self) -> Result<()> {
        let value_bytes = 1024;
        let records = (self.args.data / value_bytes).to_string();
        for workload in ["load", "a", "f"] {
            let dir = scratch(self.path)?;
            let mut command = Command::new(&self.programs.ycsb);
            command.arg(dir.path().join("db")).args([&records, &records]).arg(workload);
            let sample = parse_sample("ycsb", &output_of(command)?)?;
            self.add(&format!("ycsb-{workload}"), Op::Write, 1, value_bytes, sample);
        }
        Ok(())
    }

    fn filebench(&mut self) -> Result<()> {
        for (personality, threads, value_bytes) in PERSONALITIES {
            let dir = scratch(self.path)?;
            let mut command = Command::new(&self.programs.filebench);
            command.arg(dir.path().join("files")).arg(personality);
            command.args([self.args.data.to_string(), self.args.seconds.to_string()]);
            let sample = parse_sample("filebench", &output_of(command)?)?;
            let case = format!("filebench-{personality}");
            self.add(&case, Op::Write, threads, value_bytes, sample);
        }
        Ok(())
    }

    /// Runs random requests of 4 KiB around the page cache: writes, writes with an fsync after
    /// every 16th, reads.
    fn fio(&mut self) -> Result<()> {
        let dir = scratch(self.path)?;
        for (case, op, fsync) in
            [("write", Op::Write, 0), ("write-fsync-16", Op::Write, 16), ("read", Op::Read, 0)]
        {
            let mut command = fio::command("file", op, self.path)?;
            command.args(["--ioengine=psync", "--direct=1", "--bs=4096"]);
            command.args(["--time_based", "--norandommap", "--randrepeat=0"]);
            command.args([
                format!("--filename={}", dir.path().join("file").display()),
                format!("--size={}", self.args.data),
                format!("--fsync={fsync}"),
                format!("--runtime={}ms", (self.args.seconds * 1e3).round()),
            ]);
            let sample = fio::parse(&output_of(command)?, op)?;
            self.add(&format!("fio-{case}"), op, 1, 4096, sample);
        }
        Ok(())
    }
}

/// Returns the options of `db_bench` for `benchmarks` on the database `db`.
pub(crate) fn db_bench_options(
    benchmarks: &[&str],
    db: &Path,
    records: u64,
    value_bytes: u64,
    sync: bool,
) -> [String; 8] {
    [
        format!("--benchmarks={}", benchmarks.join(",")),
        format!("--db={}", db.display()),
        format!("--num={records}"),
        format!("--value_size={value_bytes}"),
        format!("--sync={}", u8::from(sync)),
        "--histogram=1".to_owned(),
        "--compression_type=none".to_owned(),
        "--seed=1".to_owned(),
    ]
}

/// Parses the output of `db_bench` for `benchmark`: its line, and the histogram in microseconds
/// behind the line.
pub(crate) fn parse_db_bench(output: &str, benchmark: &str) -> Result<Sample> {
    let wrong =
        |what: &str| BenchError::program("db_bench", format!("printed no {what} of {benchmark}"));
    // The program's progress is on the same line, separated by carriage returns or spaces.
    let label = format!("{benchmark:<12} :");
    let start = output.find(&label).ok_or_else(|| wrong("result"))?;
    let text = &output[start..];
    let number_before = |word: &str| {
        let line = text.lines().next()?;
        line[..line.find(word)?].split_whitespace().last()?.parse::<f64>().ok()
    };
    let number_after = |word: &str| {
        let rest = &text[text.find(word)? + word.len()..];
        rest.split_whitespace().next()?.parse::<f64>().ok()
    };
    let nanoseconds =
        |word: &str| number_after(word).map(|us| whole(us * 1e3)).ok_or_else(|| wrong(word));
    Ok(Sample {
        ops: number_after("Count:").map(whole).ok_or_else(|| wrong("Count:"))?,
        ops_per_s: number_before(" ops/sec").ok_or_else(|| wrong("ops/sec"))?,
        mean_ns: number_after("Average:").ok_or_else(|| wrong("Average:"))? * 1e3,
        p50_ns: nanoseconds("P50:")?,
        p99_ns: nanoseconds("P99:")?,
        p999_ns: nanoseconds("P99.9:")?,
        p9999_ns: nanoseconds("P99.99:")?,
        max_ns: nanoseconds("Max:")?,
        traffic: None,
    })
}

/// Parses the output of a program of ours.
pub(crate) fn parse_sample(program: &str, output: &str) -> Result<Sample> {
    serde_json::from_str(output).map_err(|error| {
        BenchError::program(program, format!("printed no object of times: {error}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `db_bench` of `RocksDB` 7.8: two benchmarks with histograms.
    const RECORDED: &str = include_str!("../../tests/data/db_bench.txt");

    #[test]
    fn a_recorded_run_is_read() {
        let sample = parse_db_bench(RECORDED, "fillrandom").unwrap();
        assert_eq!((sample.ops, sample.p50_ns, sample.p9999_ns), (20_000, 2_580, 76_000));
        assert_eq!(
            (sample.ops_per_s.to_bits(), sample.max_ns),
            (215_065.0f64.to_bits(), 28_148_000)
        );
        let sample = parse_db_bench(RECORDED, "readrandom").unwrap();
        assert_eq!((sample.ops, sample.p99_ns, sample.max_ns), (20_000, 5_150, 455_000));
        assert!(parse_db_bench(RECORDED, "fillsync").is_err());
        assert!(parse_db_bench(&RECORDED[..RECORDED.len() / 8], "fillrandom").is_err());
    }

    #[test]
    fn our_own_times_are_read() {
        let line = r#"{"ops": 5, "ops_per_s": 2.5, "mean_ns": 4.0, "p50_ns": 1, "p99_ns": 2, "p999_ns": 3, "p9999_ns": 4, "max_ns": 5}"#;
        let sample = parse_sample("ycsb", line).unwrap();
        assert_eq!((sample.ops, sample.p50_ns, sample.max_ns), (5, 1, 5));
        assert!(parse_sample("ycsb", "ycsb: IO error").is_err());
    }
}
