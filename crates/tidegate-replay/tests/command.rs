//! `tidegate-replay` as a program: exit status, what it prints, and the files that it writes.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tidegate_replay::model::costs::Costs;

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate-replay")).args(args).output().unwrap()
}

/// Runs it, which succeeds; what it prints.
fn ok(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs it, which fails; the one line that it says.
fn fails(status: i32, args: &[&str]) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(status));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("tidegate: ") && said.lines().count() == 1, "{said}");
    said
}

/// A page that needs nothing else, and says how to make it again.
fn page(dir: &Path, again: &str) -> String {
    let page = std::fs::read_to_string(dir.join("index.html")).unwrap();
    assert!(page.contains("<svg") && !page.contains("http"), "{page}");
    assert!(page.contains(again), "{again} is not in {page}");
    page
}

#[test]
fn a_replay_prints_a_table_and_advice_and_writes_rows_and_a_page() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let mut lines = String::from("ts_us,tid,op,file,offset,len\n");
    for at in 0..500_u64 {
        let _ = writeln!(lines, "{at},1,write,/data,{},100", at % 61 * 4096);
        let _ = writeln!(lines, "{at},1,fsync,/data,0,0");
    }
    lines.push_str("this is no line\n");
    std::fs::write(path("t.csv"), lines).unwrap();
    let (trace, json, report) = (path("t.csv"), path("rows.json"), path("report"));
    let args = ["replay", &trace, "--schemes=dram,afcm", "--json", &json, "--report", &report];
    let printed = ok(&args);
    assert!(printed.contains("afcm") && printed.contains("Advice: "), "{printed}");
    let rows: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!((rows["bad_lines"].as_u64(), rows["operations"].as_u64()), (Some(1), Some(1000)));
    assert_eq!(rows["rows"].as_array().unwrap().len(), 2);
    let page = page(Path::new(&report), "tidegate replay ");
    assert!(page.contains("--schemes=dram,afcm") && page.contains("Advice: "), "{page}");
}

/// A plan for memory that is still to be bought.
#[test]
fn more_persistent_memory_than_this_machine_has_is_planned() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t.csv");
    std::fs::write(&trace, "ts_us,tid,op,file,offset,len\n0,1,write,/a,0,100\n1,1,fsync,/a,0,0\n")
        .unwrap();
    let trace = trace.to_str().unwrap();
    let printed = ok(&["replay", trace, "--schemes=log,tidegate", "--pmem=4T"]);
    assert!(printed.contains("log") && printed.contains("tidegate"), "{printed}");
    // No process has so many addresses, and the arguments are right.
    let said = fails(1, &["replay", trace, "--schemes=log", "--pmem=1000000T"]);
    assert!(said.contains("memory for a replay: "), "{said}");
}

#[test]
fn an_option_that_record_has_not_is_no_program() {
    let said = fails(2, &["record", "--quite", "--", "true"]);
    assert!(said.contains("'--quite'"), "{said}");
}

#[test]
fn rows_have_the_keys_that_scripts_read() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t.csv");
    std::fs::write(&trace, "ts_us,tid,op,file,offset,len\n0,1,write,/a,0,100\n1,1,fsync,/a,0,0\n")
        .unwrap();
    let found: serde_json::Value =
        serde_json::from_str(&ok(&["replay", trace.to_str().unwrap(), "--json=-"])).unwrap();
    let mut expected = vec![
        "scheme",
        "dram_pages",
        "pmem_bytes",
        "reads",
        "read_hits",
        "writes",
        "syncs",
        "synced_pages",
        "ssd_pages_written",
        "ssd_pages_read",
        "pmem_data_bytes",
        "pmem_metadata_bytes",
        "index_bytes",
        "seconds",
    ];
    expected.sort_unstable();
    let rows = found["rows"].as_array().unwrap();
    assert!(!rows.is_empty());
    for row in rows {
        let mut keys: Vec<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, expected);
    }
}

#[test]
fn a_trace_is_done_on_real_files_and_their_seconds_stand_beside_the_modelled_ones() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, files) = (dir.path().join("t.csv"), dir.path().join("files"));
    std::fs::create_dir(&files).unwrap();
    let mut lines = String::from("ts_us,tid,op,file,offset,len\n");
    for at in 0..50_u64 {
        let _ = writeln!(lines, "{at},1,write,/data,{},100\n{at},1,fsync,/data,0,0", at * 4096);
    }
    std::fs::write(&trace, lines).unwrap();
    let (trace, folder) = (trace.to_str().unwrap(), files.to_str().unwrap());
    let args = ["replay", trace, "--schemes=dram", "--real", folder];
    let printed = ok(&args);
    assert!(printed.contains("sync seconds") && printed.contains("real files"), "{printed}");
    let found: serde_json::Value =
        serde_json::from_str(&ok(&[&args[..], &["--json=-"]].concat())).unwrap();
    let real = &found["real"];
    assert_eq!((real["operations"].as_u64(), real["syncs"].as_u64()), (Some(100), Some(50)));
    let seconds = |key: &str| real[key].as_f64().unwrap();
    assert!(seconds("seconds") > seconds("sync_seconds") && seconds("sync_seconds") > 0.0);
    assert_eq!(std::fs::read_dir(&files).unwrap().count(), 0, "nothing is left");
    assert!(fails(1, &["replay", trace, "--real", "/no/such/folder"]).contains("/no/such/folder"));
}

/// A signal, and a failure, remove the files as the end does.
#[test]
fn a_replay_on_real_files_that_is_broken_off_leaves_none() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, files) = (dir.path().join("t.csv"), dir.path().join("files"));
    std::fs::create_dir(&files).unwrap();
    let line = "1,1,write,/data,0,1048576\n";
    let lines = format!("ts_us,tid,op,file,offset,len\n{}", line.repeat(20_000));
    std::fs::write(&trace, lines).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate-replay"));
    command.arg("replay").arg(&trace).arg("--schemes=dram").arg("--real").arg(&files);
    let left = || std::fs::read_dir(&files).unwrap().count();
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        while left() == 0 {
            std::thread::yield_now();
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), left()), (Some(1), 0), "{said}");
        assert!(said.starts_with("tidegate: interrupted; ") && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn a_replay_takes_what_was_measured_of_this_machine() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (costs, trace, folder) = (path("costs.json"), path("t.csv"), path(""));
    ok(&["model", "--calibrate", &costs, "--disk", &folder, "--pmem", "/dev/shm"]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the costs, and nothing else");
    std::fs::write(&trace, "ts_us,tid,op,file,offset,len\n0,1,write,/a,0,100\n1,1,fsync,/a,0,0\n")
        .unwrap();
    let printed = ok(&["replay", "--costs", &costs, &trace]);
    for part in ["Storage nvme,read_ns=", ",parallel=", "memory dram,thread_write_bytes_per_s="] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    ok(&["model", "--costs", &costs, "--cores=1", "--jobs=1", "--iodepth=1", "--policies=btt"]);
    assert!(fails(2, &["replay", "--costs", &costs, "--ssd=hdd", &trace]).contains("--ssd"));
    assert!(fails(2, &["model", "--disk", &folder]).contains("--calibrate"));
}

#[test]
fn there_is_no_advice_on_a_trace_without_requests() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t.csv");
    for lines in ["", "1,1,fsync,/a,0,0\n", "1,1,truncate,/a,0,0\n"] {
        std::fs::write(&trace, format!("ts_us,tid,op,file,offset,len\n{lines}")).unwrap();
        let printed = ok(&["replay", trace.to_str().unwrap()]);
        assert!(printed.contains("Advice: none, for there is nothing to advise on"), "{printed}");
    }
}

/// Times of locks, threads and the table count for the tiers that the model runs.
#[test]
fn a_replay_through_a_dram_tier_takes_all_costs_that_were_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (costs, trace) = (path("costs.json"), path("t.csv"));
    let lines = "ts_us,tid,op,file,offset,len\n0,1,write,/a,0,4096\n1,1,fsync,/a,0,0\n";
    std::fs::write(&trace, lines).unwrap();
    let seconds = |chosen: &Costs| {
        chosen.write(Path::new(&costs)).unwrap();
        let args = ["replay", "--costs", &costs, "--schemes=btt,transit", "--json=-", &trace];
        let found: serde_json::Value = serde_json::from_str(&ok(&args)).unwrap();
        [0, 1].map(|row| found["rows"][row]["seconds"].as_f64().unwrap())
    };
    let fast = seconds(&Costs::optane());
    let slow = seconds(&Costs { btt_ns: 1_000_000, ..Costs::optane() });
    for (fast, slow) in fast.into_iter().zip(slow) {
        assert!(slow > fast + 0.0009, "{slow} {fast}");
    }
}

#[test]
fn a_model_prints_tables_and_writes_a_page() {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report");
    let args = "model --cores 2 --jobs 1,2 --policies btt,transit --iodepth 1,8 --cache 1M --size \
                32M --seconds 0.001 --report";
    let args: Vec<_> = args.split(' ').chain([report.to_str().unwrap()]).collect();
    assert!(ok(&args).contains("transit"));
    let page = page(&report, "tidegate model --cores 2 --jobs 1,2");
    assert!(page.contains("Throughput") && page.contains("Mean latency"), "{page}");
}

#[test]
fn what_is_wrong_is_said_in_one_line() {
    assert!(fails(2, &["replay"]).contains("<TRACE>"));
    // No option of the modelled machine is dropped.
    for mode in ["--validate", "--calibrate=/nowhere/x", "--papers=/nowhere/x"] {
        for option in ["--costs=optane", "--cores=8", "--block-bytes=512", "--json=x"] {
            let said = fails(2, &["model", mode, option]);
            assert!(said.contains("cannot be used with"), "{mode} {option}: {said}");
        }
    }
    assert!(fails(2, &["replay", "x", "--schemes=dram,none"]).contains("sccm"));
    assert!(fails(2, &["model", "--cores", "none"]).contains("none"));
    assert!(fails(1, &["replay", "/nowhere/trace.csv"]).contains("/nowhere/trace.csv"));
    for args in [&["replay", "--costs=/dev/zero", "x"][..], &["model", "--costs=/dev/zero"]] {
        assert!(fails(1, args).contains("/dev/zero: it is a character device"), "{args:?}");
    }
    assert!(ok(&["replay", "--help"]).contains("Usage: tidegate replay"));
}
