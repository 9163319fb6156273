//! The programs that are run on a file system, and what they say of it.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Part, ProgramsArgs};
use crate::child::{find_program, output_of};
use crate::error::{BenchError, Result};
use crate::fio;
use crate::measure::{Op, Sample};
use crate::source::{CC, Source};

/// Source of the YCSB workloads.
const YCSB: &str = include_str!("../../programs/ycsb.cc");

/// Filebench's personalities, each with the threads and the mean bytes of a file that it has there.
const FILEBENCH: Source = Source {
    name: "filebench",
    text: include_str!("../../programs/filebench.c"),
    libraries: &["-pthread"],
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
/// Of so many records one is written where each write is synced.
const SYNC_SHARE: u64 = 256;

/// What a program found.
pub(super) struct Measured {
    pub(super) case: String,
    pub(super) op: Op,
    pub(super) threads: usize,
    /// Size of what is requested.
    pub(super) value_bytes: u64,
    pub(super) sample: Sample,
}

/// Programs that are there.
pub(super) struct Programs {
    db_bench: PathBuf,
    filebench: PathBuf,
    fio: PathBuf,
    ycsb: PathBuf,
}

/// Takes what was found.
type Sink<'a> = dyn FnMut(Measured) + 'a;

impl Programs {
    /// Finds them, and compiles our own into `dir`.
    pub(super) fn find(dir: &Path) -> Result<Self> {
        let compiler = find_program("g++", "g++")?;
        let (source, ycsb) = (dir.join("ycsb.cc"), dir.join("ycsb"));
        std::fs::write(&source, YCSB).map_err(BenchError::os("write", &source))?;
        if !Path::new("/usr/include/rocksdb/db.h").exists() {
            let what = "header rocksdb/db.h".to_owned();
            return Err(BenchError::Missing { what, package: "librocksdb-dev" });
        }
        let mut compile = Command::new(compiler);
        compile.args(["-O2", "-std=c++17", "-o"]).args([&ycsb, &source]).arg("-lrocksdb");
        output_of(compile)?;
        Ok(Self {
            db_bench: find_program("db_bench", "rocksdb-tools")?,
            filebench: FILEBENCH.compile(dir, CC)?,
            fio: find_program("fio", "fio")?,
            ycsb,
        })
    }

    /// Runs those that are asked for on the file system at `path`.
    pub(super) fn run_all(
        &self,
        args: &ProgramsArgs,
        path: &Path,
        found: &mut Sink<'_>,
    ) -> Result<()> {
        for part in args.parts() {
            match part {
                Part::Rocksdb => VALUES_BYTES
                    .iter()
                    .try_for_each(|&bytes| self.rocksdb(args, path, bytes, found))?,
                Part::Ycsb => self.ycsb(args, path, found)?,
                Part::Filebench => self.filebench(args, path, found)?,
                Part::Fio => self.fio(args, path, found)?,
            }
        }
        Ok(())
    }

    /// `fillrandom`, `overwrite` and `readrandom` on one database, and `fillrandom` on another with
    /// a sync of each write.
    fn rocksdb(
        &self,
        args: &ProgramsArgs,
        path: &Path,
        value_bytes: u64,
        found: &mut Sink<'_>,
    ) -> Result<()> {
        let records = args.data / (KEY_BYTES + value_bytes);
        let benchmarks = ["fillrandom", "overwrite", "readrandom"];
        let output = self.db_bench(path, &benchmarks, records, value_bytes, false)?;
        for benchmark in benchmarks {
            let op = if benchmark == "readrandom" { Op::Read } else { Op::Write };
            let case = format!("rocksdb-{benchmark}-{value_bytes}");
            let sample = parse_db_bench(&output, benchmark)?;
            found(Measured { case, op, threads: 1, value_bytes, sample });
        }
        let (benchmark, records) = ("fillrandom", records.div_ceil(SYNC_SHARE));
        let output = self.db_bench(path, &[benchmark], records, value_bytes, true)?;
        let case = format!("rocksdb-{benchmark}-sync-{value_bytes}");
        let sample = parse_db_bench(&output, benchmark)?;
        found(Measured { case, op: Op::Write, threads: 1, value_bytes, sample });
        Ok(())
    }

    fn db_bench(
        &self,
        path: &Path,
        benchmarks: &[&str],
        records: u64,
        value_bytes: u64,
        sync: bool,
    ) -> Result<String> {
        let db = Removed(path.join("db"));
        let mut command = Command::new(&self.db_bench);
        command.args([
            format!("--benchmarks={}", benchmarks.join(",")),
            format!("--db={}", db.0.display()),
            format!("--num={records}"),
            format!("--value_size={value_bytes}"),
            format!("--sync={}", u8::from(sync)),
        ]);
        command.args(["--histogram=1", "--compression_type=none", "--seed=1"]);
        output_of(command)
    }

    fn ycsb(&self, args: &ProgramsArgs, path: &Path, found: &mut Sink<'_>) -> Result<()> {
        let (records, value_bytes) = (args.data / 1024, 1024);
        for workload in ["load", "a", "f"] {
            let db = Removed(path.join("db"));
            let mut command = Command::new(&self.ycsb);
            command.arg(&db.0).args([records.to_string(), records.to_string()]).arg(workload);
            let sample = parse_sample("ycsb", &output_of(command)?)?;
            let case = format!("ycsb-{workload}");
            found(Measured { case, op: Op::Write, threads: 1, value_bytes, sample });
        }
        Ok(())
    }

    fn filebench(&self, args: &ProgramsArgs, path: &Path, found: &mut Sink<'_>) -> Result<()> {
        for (personality, threads, value_bytes) in PERSONALITIES {
            let files = Removed(path.join("files"));
            let mut command = Command::new(&self.filebench);
            command.arg(&files.0).arg(personality);
            command.args([args.data.to_string(), args.seconds.to_string()]);
            let sample = parse_sample("filebench", &output_of(command)?)?;
            let case = format!("filebench-{personality}");
            found(Measured { case, op: Op::Write, threads, value_bytes, sample });
        }
        Ok(())
    }

    /// Random requests of 4 KiB around the page cache: writes, writes with an fsync after every
    /// 16th, reads.
    fn fio(&self, args: &ProgramsArgs, path: &Path, found: &mut Sink<'_>) -> Result<()> {
        let file = Removed(path.join("file"));
        for (case, op, fsync) in
            [("write", Op::Write, 0), ("write-fsync-16", Op::Write, 16), ("read", Op::Read, 0)]
        {
            let mut command = Command::new(&self.fio);
            command.args(["--name=file", "--ioengine=psync", "--direct=1", "--bs=4096"]);
            command.args(["--time_based", "--norandommap", "--randrepeat=0"]);
            command.args(["--output-format=json", "--percentile_list=50:99:99.9:99.99"]);
            command.args([
                format!("--filename={}", file.0.display()),
                format!("--rw=rand{}", op.name()),
                format!("--size={}", args.data),
                format!("--fsync={fsync}"),
                format!("--runtime={}ms", (args.seconds * 1e3).round()),
            ]);
            let sample = fio::parse(&output_of(command)?, op)?;
            let case = format!("fio-{case}");
            found(Measured { case, op, threads: 1, value_bytes: 4096, sample });
        }
        Ok(())
    }
}

/// A file or directory that is removed at the end.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        // Where this fails the file system, which goes as well, is full or broken: the next program
        // will say so.
        let _ = if self.0.is_dir() {
            std::fs::remove_dir_all(&self.0)
        } else {
            std::fs::remove_file(&self.0)
        };
    }
}

/// Reads what `db_bench` printed of `benchmark`: its line, and the histogram in microseconds behind
/// it.
pub(crate) fn parse_db_bench(output: &str, benchmark: &str) -> Result<Sample> {
    let wrong =
        |what: &str| BenchError::program("db_bench", format!("printed no {what} of {benchmark}"));
    // Its progress is on the same line, parted by carriage returns or spaces.
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

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "saturates, and times are not negative"
)]
fn whole(number: f64) -> u64 {
    number as u64
}

/// Reads what a program of ours printed.
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
