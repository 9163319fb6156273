//! The program as a user runs it: exit status, output and files. Needs what `scripts/install-deps
//! bench` installs.

#[path = "../../tidegate-cli/tests/support/built.rs"]
mod built;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use assert_cmd::Command;
use serde_json::Value;

use built::build_tidegate;

fn bench(words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate-bench"));
    command.args(words.split(' ')).timeout(std::time::Duration::from_secs(900));
    command
}

/// One measurement at a time: a phase that gets no CPU in its time has no row.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn rows_of(words: &str) -> Value {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("rows.json");
    bench(words).arg("--json").arg(&json).assert().success();
    serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap()
}

fn stderr_of(words: &str, status: i32) -> String {
    let output = bench(words).assert().code(status).get_output().clone();
    String::from_utf8(output.stderr).expect("messages are text")
}

#[test]
fn block_measures_every_policy() {
    let found = rows_of(
        "block --seconds 0.3 --repetitions 2 --size 32M --threads 1,2 --fsync-every 100 --read-share 0,100",
    );
    let rows = found["rows"].as_array().unwrap();
    let measured =
        [("btt", "write"), ("btt", "read"), ("btt", "flush"), ("peer:libpmemblk", "write")];
    for (policy, op) in measured {
        let matching = |row: &&Value| row["policy"] == policy && row["op"] == op;
        let threads: Vec<_> = rows.iter().filter(matching).map(|row| &row["threads"]).collect();
        assert_eq!(threads, [1, 2], "{policy} {op}");
    }
    for row in rows {
        assert!(row["ops_per_s"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["p50_ns"].as_u64() <= row["max_ns"].as_u64(), "{row}");
    }
}

#[test]
fn dram_tiers_are_measured_with_their_phases() {
    let policies = "transit,transit-no-eager,transit-no-bypass,pmbd,pmbd70,lru,coactive";
    let found = rows_of(&format!(
        "block --policies raw,btt,{policies} --cache 1M,2M --seconds 0.3 --repetitions 1 --size 16M \
         --read-share 20 --fsync-every 100 --burst 500 --duty 90 --pattern zipf"
    ));
    for policy in policies.split(',') {
        for case in ["zipf-0.99-1M", "zipf-0.99-2M"] {
            let matching = |row: &&Value| row["policy"] == policy && row["case"] == case;
            let ops: Vec<_> = found["rows"].as_array().unwrap().iter().filter(matching).collect();
            assert_eq!(ops.len(), 3, "{policy} {case}: writes, reads and flushes");
            let phases = found["phases"].as_array().unwrap().iter().filter(matching);
            let shares = phases.map(|row| row["share_pct"].as_f64().unwrap()).sum::<f64>();
            assert!((shares - 100.0).abs() < 0.1, "{policy} {case}: shares add up to {shares} %");
        }
        let mut idle = found["idle"].as_array().unwrap().iter();
        assert!(idle.any(|row| row["policy"] == policy), "{policy} at rest");
    }
}

#[test]
fn the_requests_of_a_run_are_written_for_replay() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.csv");
    rows_of(&format!(
        "block --policies btt,lru --cache 1M --seconds 0.02 --repetitions 1 --size 32M --trace {}",
        trace.display()
    ));
    let text = std::fs::read_to_string(trace).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("ts_us,op,offset,len"));
    assert!(lines.clone().count() > 10 && lines.all(|line| line.contains(",write,")), "{text}");
}

#[test]
fn tidegate_bench_writes_rows_for_scripts() {
    build_tidegate();
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("rows.json");
    let tidegate = Path::new(env!("CARGO_BIN_EXE_tidegate-bench")).with_file_name("tidegate");
    let words = "bench block --policies btt --seconds 0.05 --repetitions 1 --size 32M --json";
    let mut command = Command::new(tidegate);
    command.args(words.split(' ')).arg(&json).assert().success();
    let found: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let keys = "policy case op threads iodepth block_bytes ops_per_s mean_ns p50_ns p99_ns p999_ns \
                p9999_ns max_ns pmem_data_bytes pmem_metadata_bytes fences";
    for key in keys.split(' ') {
        assert!(!found["rows"][0][key].is_null(), "{key} is missing in {found}");
    }
}

#[test]
fn a_btt_write_costs_its_block_and_two_fences() {
    let found =
        rows_of("block --policies btt --read-share 0 --seconds 0.02 --repetitions 1 --size 32M");
    let row = &found["rows"][0];
    let blocks = row["pmem_data_bytes"].as_u64().unwrap() / 4096;
    assert_eq!(row["fences"].as_u64().unwrap(), 2 * blocks);
}

#[test]
fn an_opening_after_a_crash_is_timed() {
    let found = rows_of("open --size 64M --writes 1000 --repetitions 2");
    assert_eq!(found["rows"][0]["case"], "open-after-crash");
    assert!(found["open"]["peak_memory_bytes"].as_u64().unwrap() > 0);
    let hits = found["open"]["first_hits_s"].as_array().unwrap();
    let opened_s = found["rows"][0]["mean_ns"].as_f64().unwrap() / 1e9;
    let after = hits.iter().filter(|hit| hit.as_f64().is_some_and(|hit_s| hit_s >= opened_s));
    assert_eq!((hits.len(), after.count() > 0), (2, true), "{hits:?} after {opened_s} s");
}

/// An ext4 of its own in memory: `run` covers no file without a journal, as the machine's may be.
struct Ext4 {
    dir: tempfile::TempDir,
}

impl Ext4 {
    fn mounted() -> Self {
        let this = Self { dir: tempfile::tempdir_in("/dev/shm").unwrap() };
        std::fs::create_dir(this.mount_point()).unwrap();
        let image = this.dir.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(2 << 30).unwrap();
        let steps: [(&str, &[&Path]); 2] = [
            ("mkfs.ext4", &["-q".as_ref(), &image]),
            ("mount", &["-o".as_ref(), "loop".as_ref(), &image, &this.mount_point()]),
        ];
        for (tool, words) in steps {
            Command::new(tool).args(words).assert().success();
        }
        this
    }

    fn mount_point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        // What it printed does not matter: the test has its outcome.
        let _ = Command::new("umount").arg("-l").arg(self.mount_point()).output();
    }
}

#[test]
fn caches_are_measured_beside_the_floor_a_btt_and_the_backing_alone() {
    build_tidegate();
    let page_dir = tempfile::tempdir().unwrap();
    let page = page_dir.path().join("page.md");
    let tables = ["machine-cache", "cache-cases", "study-4k", "cache-full", "cache-targets"];
    let markers = tables.map(|table| format!("<!-- table: {table} -->\n<!-- end -->\n"));
    std::fs::write(&page, markers.concat()).unwrap();
    let report = page_dir.path().join("report");
    let found = rows_of(&format!(
        "cache --size 16M --open-size 16M --seconds 0.02 --repetitions 1 --report {} --update-docs {}",
        report.display(),
        page.display()
    ));
    let rows = found["rows"].as_array().unwrap();
    for (case, policies) in [
        ("miss", "copy btt cache log"),
        ("hit", "copy btt cache log"),
        ("evict", "copy btt cache log"),
        ("miss-memory", "backing cache log"),
        ("evict-delay", "backing cache log"),
        ("study-125pct-2nd", "copy btt backing cache cache-16k cache-64k cache-cost"),
        ("cache-nbd-random", "btt cache"),
        ("cache-fill-90pct-disk", "cache-null cache"),
        ("cache-full-file", "cache backing backing-512"),
        ("cache-read-miss", "backing cache"),
        ("cache-open", "cache"),
    ] {
        let first = rows.iter().find(|row| row["case"] == case).unwrap_or_else(|| panic!("{case}"));
        let is_identical = |row: &&Value| {
            let keys = ["case", "op", "threads", "iodepth", "block_bytes"];
            keys.iter().all(|key| row[key] == first[key])
        };
        let measured: Vec<_> =
            rows.iter().filter(is_identical).map(|row| row["policy"].as_str().unwrap()).collect();
        assert_eq!(measured, policies.split(' ').collect::<Vec<_>>(), "{case}");
    }
    for row in rows {
        assert!(row["ops_per_s"].as_f64().unwrap() > 0.0, "{row}");
    }
    let miss = rows.iter().find(|row| row["case"] == "miss" && row["policy"] == "cache").unwrap();
    let stored = ["pmem_data_bytes", "pmem_metadata_bytes"].map(|key| miss[key].as_u64().unwrap());
    let writes = 16 * 256 * 45 / 100;
    assert_eq!(stored.iter().sum::<u64>(), writes * (4096 + 64), "a page and its header");
    let hits = found["amounts"].as_array().unwrap().iter().filter(|it| it["unit"] == "%");
    assert_eq!(hits.count(), 2, "measured and simulated: {found}");
    let page = std::fs::read_to_string(page).unwrap();
    for table in tables {
        let empty = format!("<!-- table: {table} -->\n<!-- end -->");
        assert!(page.contains(table) && !page.contains(&empty), "{table} is empty: {page}");
    }
    let html = std::fs::read_to_string(report.join("index.html")).unwrap();
    assert!(html.contains("Writes of 4 KiB, MB/s") && html.contains("class=\"plot\""));
    let deep = rows.iter().filter(|row| row["case"] == "study-50pct-1st" && row["iodepth"] == 32);
    let deep: Vec<_> =
        deep.map(|row| (row["policy"].as_str(), row["block_bytes"].as_u64())).collect();
    let (small, large) = (4 << 10, [128 << 10, 1 << 20]);
    let of_small = ["cache", "btt", "backing-32"].map(|policy| (policy, small));
    let of_large = ["cache", "btt", "backing", "backing-32"];
    let of_large = large.into_iter().flat_map(|size| of_large.map(|policy| (policy, size)));
    for (policy, size) in of_small.into_iter().chain(of_large) {
        assert!(deep.contains(&(Some(policy), Some(size))), "{policy} {size}: {deep:?}");
    }
}

#[test]
fn caches_by_cost_are_measured_when_it_is_asked_for() {
    let found = rows_of("cache --only cost --size 16M --seconds 0.002 --repetitions 1");
    let measured = cases_and_policies(&found);
    for case in ["cache-cost-optane-read", "cache-cost-optane-1-write", "cache-cost-cxl-read"] {
        for policy in ["backing", "cache", "cache-cost"] {
            assert!(measured.contains(&(case, policy)), "{policy} {case}");
        }
    }
    let amounts = found["amounts"].as_array().unwrap();
    let shares =
        amounts.iter().filter(|it| it["measure"].as_str().unwrap().contains("the backing"));
    assert_eq!(shares.count() * 3, measured.len() * 2, "of both caches of each cell: {found}");
}

#[test]
fn ocf_is_measured_beside_the_cache_by_a_program_that_is_named() {
    let words = "cache --only miss --size 16M --repetitions 2 --peer-ocf";
    let found = rows_of(&format!("{words} tests/data/peer-ocf.sh"));
    let rows = found["rows"].as_array().unwrap();
    let ocf: Vec<_> = rows.iter().filter(|row| row["policy"] == "peer:ocf").collect();
    assert_eq!(ocf.len(), 1, "one thread, before a device that keeps nothing: {found}");
    assert_eq!((ocf[0]["case"].as_str(), ocf[0]["p50_ns"].as_u64()), (Some("miss"), Some(1)));
    let refused = stderr_of(&format!("{words} /bin/echo"), 1);
    assert!(refused.contains("/bin/echo") && refused.contains("expected a sample"), "{refused}");
}

const LOG_TABLES: [&str; 9] = [
    "machine-run",
    "log-append",
    "run-write",
    "run-full",
    "run-read",
    "run-databases",
    "run-recovery",
    "run-amounts",
    "run-targets",
];

#[test]
fn programs_under_run_are_measured_beside_the_same_without() {
    build_tidegate();
    let (dir, files) = (tempfile::tempdir().unwrap(), Ext4::mounted());
    let page = dir.path().join("page.md");
    let markers = LOG_TABLES.map(|table| format!("<!-- table: {table} -->\n<!-- end -->\n"));
    std::fs::write(&page, markers.concat()).unwrap();
    let found = rows_of(&format!(
        "log --scale 0.003 --seconds 0.05 --steady-seconds 0.05 --repetitions 1 --files {} --update-docs {}",
        files.mount_point().display(),
        page.display()
    ));
    let rows = found["rows"].as_array().unwrap();
    for (case, policies) in [
        ("log-append-4096", "copy log"),
        ("run-write-fdatasync", "plain run"),
        ("run-append-fdatasync", "plain run"),
        ("run-full-random", "plain run disk-depth-32"),
        ("run-read-dirty", "plain run"),
        ("run-recovery", "recover in-order"),
        ("run-sqlite-wal", "plain-nosync run-nosync plain run"),
        ("run-rocksdb-fillrandom", "plain-nosync plain run"),
        ("run-postgres-pgbench", "plain-nosync plain run"),
    ] {
        let first = rows.iter().find(|row| row["case"] == case).unwrap_or_else(|| panic!("{case}"));
        let matching =
            rows.iter().filter(|row| row["case"] == case && row["threads"] == first["threads"]);
        let measured: Vec<_> = matching.map(|row| row["policy"].as_str().unwrap()).collect();
        assert_eq!(measured, policies.split(' ').collect::<Vec<_>>(), "{case}");
    }
    for row in rows {
        assert!(row["ops_per_s"].as_f64().unwrap() > 0.0, "{row}");
    }
    let amounts = found["amounts"].as_array().unwrap();
    assert_eq!(amounts.len(), 4, "four: {amounts:?}");
    let log_bytes = amounts.iter().find(|amount| amount["unit"] == "bytes").unwrap();
    let each = log_bytes["values"][0].as_f64().unwrap();
    // A record of 192 bytes, and the mark of its sync.
    assert!((250.0..280.0).contains(&each), "{each} bytes of log for an append of 128");
    let page = std::fs::read_to_string(page).unwrap();
    for table in LOG_TABLES {
        let empty = format!("<!-- table: {table} -->\n<!-- end -->");
        assert!(page.contains(table) && !page.contains(&empty), "{table} is empty: {page}");
    }
}

/// The case and the policy of each row of a report.
fn cases_and_policies(report: &Value) -> Vec<(&str, &str)> {
    let rows = report["rows"].as_array().unwrap();
    rows.iter()
        .map(|row| (row["case"].as_str().unwrap(), row["policy"].as_str().unwrap()))
        .collect()
}

#[test]
fn a_load_at_a_pace_is_measured_when_it_is_asked_for() {
    build_tidegate();
    let files = Ext4::mounted();
    let found = rows_of(&format!(
        "log --parts paced --scale 0.003 --steady-seconds 0.05 --repetitions 1 --files {}",
        files.mount_point().display()
    ));
    let cases = ["run-steady-256m-paced", "run-steady-2g-paced"];
    let policies = ["plain-nosync", "run-log-1g-new", "run-log-1g"];
    let expected = cases.map(|case| policies.map(|policy| (case, policy)));
    assert_eq!(cases_and_policies(&found), expected.concat());
}

#[test]
fn programs_by_their_own_benchmarks_are_measured_beside_the_same_without_syncs() {
    build_tidegate();
    let files = Ext4::mounted();
    let found = rows_of(&format!(
        "log --parts apps --apps dpkg,lmdb --scale 0.01 --seconds 0.05 --repetitions 1 --files {}",
        files.mount_point().display()
    ));
    let apps = ["run-app-lmdb", "run-app-dpkg"];
    let expected = apps.map(|app| ["plain-nosync", "plain", "run"].map(|policy| (app, policy)));
    assert_eq!(cases_and_policies(&found), expected.concat());
}

#[test]
fn fio_is_measured_on_both_libraries_with_the_functions_of_libpmemblk() {
    build_tidegate();
    let dir = tempfile::tempdir().unwrap();
    let built = Path::new(env!("CARGO_BIN_EXE_tidegate-bench")).parent().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/link-capi");
    assert_cmd::Command::new(script).arg(built).arg(dir.path()).assert().success();
    let library = dir.path().join("pmemblk");
    let found = rows_of(&format!(
        "pmemblk --threads 1 --seconds 0.2 --repetitions 1 --size 32M --library {}",
        library.display()
    ));
    let policies = ["libpmemblk", "peer:libpmemblk"];
    let expected = [policies; 2].concat().into_iter().map(|policy| ("pmemblk-random", policy));
    assert_eq!(cases_and_policies(&found), expected.collect::<Vec<_>>());
    let missing = stderr_of("pmemblk --library /nowhere", 1);
    assert!(missing.contains("/nowhere/libpmemblk.so.1") && missing.contains("scripts/link-capi"));
}

#[test]
fn wrong_usage_is_status_2_and_says_what_is_known() {
    assert!(stderr_of("block --policies fifo", 2).contains("peer:libpmemblk"));
    assert!(stderr_of("block --seconds 0", 2).contains("--seconds"));
    assert!(stderr_of("block --duty 0", 2).contains("--duty"));
    assert!(stderr_of("block --threads 0", 2).contains("--threads"));
    assert!(stderr_of("block --media optane", 2).contains("libpmemblk"));
    assert!(stderr_of("log --policies fast", 2).contains("run"));
    assert!(stderr_of("log --files /dev/shm", 2).contains("tmpfs"));
    assert!(stderr_of("cache --only miss --size 1M", 2).contains("16M"));
    assert!(stderr_of("cache --only open --open-size 1M", 2).contains("16M"));
    assert!(stderr_of("cache --only full --files /dev/shm", 2).contains("tmpfs"));
    assert!(stderr_of("open --repetitions 0", 2).contains("--repetitions"));
    assert!(stderr_of("programs --policies raw", 2).contains("raw"));
    assert!(stderr_of("programs --data 1G --size 2G", 2).contains("--data"));
}

#[test]
fn failures_are_status_1_in_one_line() {
    let message = stderr_of("block --policies copy --dir /nonexistent", 1);
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(
        message.starts_with("tidegate-bench: ") && message.contains("/nonexistent"),
        "{message}"
    );
    let message = stderr_of("nbd --policies btt --server no-such-server --seconds 0.1", 1);
    assert!(message.contains("no-such-server"), "{message}");
}

/// The limits hold for the profile of the tests, whose counts are the same on each machine.
#[test]
#[cfg(all(target_arch = "x86_64", debug_assertions))]
fn hot_paths_take_no_more_instructions_than_their_limits() {
    build_tidegate();
    let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/hot-paths.txt");
    let dir = env!("CARGO_TARGET_TMPDIR");
    bench(&format!("paths --limits {limits} --dir {dir}")).assert().success();
}
