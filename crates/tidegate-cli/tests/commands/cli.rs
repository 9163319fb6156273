//! The command line as scripts see it: exit statuses, one-line errors, JSON keys, and what is
//! refused.

use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tidegate::log::layout::{COPY_DISTANCE, LIMIT_OFFSET, TAIL_OFFSET};

use crate::behind::{self, Scene};
use crate::cache_device::Disk;
use crate::nbd::Client;
use crate::support::{self, Server, ok, run, scratch, succeed, tool};

/// The error of a request that the device failed.
const EIO: u32 = 5;

/// An empty directory and a path in it.
fn place() -> (TempDir, String) {
    let dir = scratch();
    let pool = dir.path().join("pool").to_str().unwrap().to_owned();
    (dir, pool)
}

/// A directory and a fresh BTT pool of 32 MiB.
fn pool() -> (TempDir, String) {
    let (dir, pool) = place();
    ok(["create", &pool, "--engine", "btt", "--size", "32M"]);
    (dir, pool)
}

/// Runs `tidegate ARGS`, which must fail with `status` and one line on standard error, which is
/// handed back.
fn fails(status: i32, args: &[&str]) -> String {
    let output = run(args);
    let stderr = String::from_utf8(output.stderr).expect("errors are text");
    assert_eq!(output.status.code(), Some(status), "{args:?}: {stderr}");
    assert_eq!(output.stdout, b"", "{args:?}: results of a failure");
    assert_eq!(stderr.lines().count(), 1, "{args:?}: errors are one line: {stderr}");
    assert!(stderr.ends_with('\n'), "{args:?}: {stderr}");
    // Those of a server have the time before them.
    let (time, _) = stderr.split_once("tidegate: ").expect(&stderr);
    let is_time = args[0] == "serve" && time.starts_with("20") && time.ends_with("Z ");
    assert!(time.is_empty() || is_time, "{args:?}: {stderr}");
    stderr
}

/// Asserts that `text` contains each of `parts`.
#[track_caller]
fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing in: {text}");
    }
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(args)).expect("one JSON object")
}

fn file(path: impl AsRef<Path>) -> std::fs::File {
    std::fs::File::options().read(true).write(true).open(path).unwrap()
}

#[test]
fn help_names_every_command_of_this_release_and_no_other() {
    let help = ok(["--help"]);
    let commands = [
        "create", "info", "check", "serve", "run", "recover", "flush", "stat", "set", "top",
        "snapshot", "config", "bench", "record", "replay", "model",
    ];
    says(&help, &commands);
    says(&help, &["Examples:", "Exit status: 0 done", "tidegate run --", "for programs"]);
    assert!(!help.contains("supervise"), "the supervisor is not for people: {help}");
}

#[test]
fn help_of_each_command_has_its_options_and_examples() {
    for (command, options) in [
        (
            "create",
            &[
                "--engine",
                "--size",
                "--block-size",
                "--force",
                "--lba-size",
                "--btt-version",
                "--domain",
            ][..],
        ),
        ("info", &["--json"]),
        ("recover", &["--discard", "--replay"]),
        ("flush", &[]),
        ("stat", &["--json", "SOCKET"]),
        ("set", &["SOCKET", "KEY=VALUE"]),
        ("check", &["--repair", "--json"]),
        (
            "serve",
            &[
                "--nbd",
                "--export",
                "--dram",
                "--media",
                "--read-only",
                "--control",
                "--tls",
                "--tls-cert",
                "--tls-key",
            ],
        ),
    ] {
        let help = ok([command, "--help"]);
        says(&help, options);
        says(&help, &["Examples:", "POOL"]);
    }
}

#[test]
fn help_of_run_has_its_options_and_says_what_statuses_mean() {
    let help = ok(["run", "--help"]);
    says(
        &help,
        &["--pool", "--size", "--include", "--exclude", "--volatile", "--every-write", "--quiet"],
    );
    says(&help, &["--stats", "CMD", "Examples:", "128 + N"]);
}

#[test]
fn a_volatile_run_has_no_log() {
    for option in [
        "--pool=p",
        "--size=1G",
        "--include=x",
        "--exclude=x",
        "--trust=x",
        "--every-write",
        "--stats",
        "--no-absorb",
    ] {
        let name = option.split('=').next().unwrap();
        says(&fails(2, &["run", "--volatile", option, "--", "true"]), &["--volatile", name]);
    }
    says(&fails(2, &["run", "--sync-at-end", "--", "true"]), &["--volatile"]);
    says(&fails(2, &["run", "--volatile=some", "--", "true"]), &["some", "library"]);
}

#[test]
fn a_log_pool_is_made_shown_and_checked() {
    let (_dir, pool) = place();
    let text = ok(["create", &pool, "--engine", "log", "--size", "1M"]);
    says(&text, &["engine         log", "empty", "tidegate run --pool"]);
    let info = json(&["info", &pool, "--json"]);
    assert_eq!((&info["engine"], &info["log"]["live_bytes"]), (&"log".into(), &0.into()));
    assert_eq!(info["size_bytes"], info["log"]["ring_bytes"]);
    assert!(info.get("blocks").is_none());
    let check = json(&["check", &pool, "--json"]);
    assert_eq!((&check["clean"], &check["records"]), (&true.into(), &0.into()));
    says(&fails(1, &["serve", &pool, "--nbd", "unix:s"]), &["log pool", "tidegate run"]);
    says(
        &fails(1, &["create", &pool, "--engine", "log", "--size", "1M"]),
        &["already holds a log pool"],
    );
    file(&pool).write_all_at(&[0xA5; 100], (1 << 20) - 2000).unwrap();
    says(
        &String::from_utf8(run(["check", &pool]).stdout).unwrap(),
        &["the superblock at the pool's end"],
    );
    says(&ok(["check", &pool, "--repair"]), &["restored superblocks: 1", "no damage"]);
}

#[test]
fn wrong_usage_is_status_2_and_one_line() {
    for (args, parts) in [
        (&["frobnicate"][..], &["frobnicate"][..]),
        (&["create"], &["--engine", "--size", "POOL"]),
        (&["create", "p", "--engine", "zfs", "--size", "1G"], &["zfs", "btt", "raw"]),
        (
            &["create", "p", "--engine", "log", "--size", "1G", "--block-size", "512"],
            &["--engine log"],
        ),
        (&["run"], &["CMD"]),
        (
            &["run", "--volatilee", "--", "true"],
            &["'--volatilee' found; tip: a similar", "'--volatile'; tip: "],
        ),
        (&["run", "--size", "0", "--", "true"], &["more than 0"]),
        (&["recover", "p", "--discard", "--replay"], &["--discard", "--replay"]),
        (&["create", "p", "--engine", "btt", "--size", "lots"], &["lots", "K, M, G"]),
        (&["create", "p", "--engine", "btt", "--size", "0"], &["more than 0"]),
        (
            &["create", "p", "--engine", "btt", "--size", "1G", "--block-size", "1024"],
            &["1024", "512, 4096"],
        ),
        (
            &["create", "p", "--engine", "btt", "--size", "1G", "--lba-size", "513"],
            &["513", "4224"],
        ),
        (
            &[
                "create",
                "p",
                "--engine",
                "btt",
                "--size",
                "1G",
                "--lba-size",
                "520",
                "--block-size",
                "4096",
            ],
            &["520", "512"],
        ),
        (
            &["create", "p", "--engine", "raw", "--size", "1G", "--lba-size", "512"],
            &["--lba-size", "btt"],
        ),
        (
            &["create", "p", "--engine", "btt", "--size", "1G", "--btt-version", "3"],
            &["1.1", "2.0"],
        ),
        (&["info"], &["POOL"]),
        (&["info", "p", "--domain", "nvram"], &["nvram", "adr", "eadr", "msync", "volatile"]),
        (&["info", "p", "--media", "tape"], &["tape", "optane"]),
        (&["info", "p", "--dram", "lru"], &["lru", "needs a size"]),
        (&["check", "p", "--fix"], &["--fix"]),
        (&["serve", "p"], &["--nbd"]),
        (&["serve", "p", "--nbd", "/run/x"], &["unix:PATH", "tcp:HOST:PORT"]),
        (
            &["serve", "p", "--nbd", "unix:x", "--dram", "transit"],
            &["transit", "needs a size", "transit:512M"],
        ),
        (&["serve", "p", "--nbd", "unix:x", "--dram", "lru:0"], &["`0`", "no size"]),
        (&["serve", "p", "--nbd", "unix:x", "--dram", "magic"], &["magic", "none"]),
        (&["bench"], &["<ARG>"]),
        (&["serve", "p", "--nbd", "unix:x", "--tls", "require"], &["--tls-cert", "--tls-key"]),
    ] {
        says(&fails(2, args), parts);
    }
}

/// A directory with this build's `tidegate` in it and nothing beside it.
fn tidegate_alone() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = dir.path().join("tidegate");
    std::fs::hard_link(env!("CARGO_BIN_EXE_tidegate"), &program).unwrap();
    (dir, program)
}

#[test]
fn bench_is_the_program_beside() {
    let (dir, tidegate) = tidegate_alone();
    let beside = dir.path().join("tidegate-bench");
    let script = "#!/bin/sh\nprintf '%s|' \"$@\"\nexit 7\n";
    std::fs::write(&beside, script).unwrap();
    std::fs::set_permissions(&beside, PermissionsExt::from_mode(0o755)).unwrap();
    let args = ["bench", "block", "--json", "a b", "--help", "-V"];
    let output = std::process::Command::new(tidegate).args(args).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "block|--json|a b|--help|-V|");
    assert_eq!(output.status.code(), Some(7));
}

#[test]
fn bench_without_its_program_says_what_to_build() {
    let (_dir, tidegate) = tidegate_alone();
    let output = std::process::Command::new(tidegate).args(["bench", "block"]).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
    says(&message, &["tidegate-bench is not there", "cargo build --release -p tidegate-bench"]);
}

#[test]
fn a_created_pool_is_described_by_info() {
    let (_dir, pool) = pool();
    let info = json(&["info", &pool, "--json"]);
    assert_eq!(info["engine"], "btt");
    assert_eq!(info["pool_bytes"], 32 << 20);
    assert_eq!(info["block_bytes"], 4096);
    assert_eq!(info["size_bytes"], info["blocks"].as_u64().unwrap() * 4096);
    assert_eq!(info["btt"]["version"], "1.1");
    assert_eq!(info["btt"]["lba_bytes"], 4096);
    assert_eq!(info["btt"]["arenas"][0]["lanes"], 256);
    let text = ok(["info", &pool]);
    says(&text, &["engine", "btt", "version 1.1", "256 lanes", "domain", "power cut"]);
}

#[test]
fn info_says_what_a_dram_tier_would_cost() {
    let (_dir, pool) = pool();
    assert!(json(&["info", &pool, "--json"])["dram"].is_null());
    let before = std::fs::read(&pool).unwrap();
    let dram = &json(&["info", &pool, "--dram", "transit:512M", "--json"])["dram"];
    assert_eq!((&dram["policy"], &dram["slots"]), (&"transit".into(), &131_072.into()));
    assert_eq!((&dram["block_bytes"], &dram["sets"]), (&4096.into(), &256.into()));
    let metadata_bytes = dram["metadata_bytes_per_slot"].as_f64().unwrap();
    assert!((40.0..=64.0).contains(&metadata_bytes), "{metadata_bytes}");
    let text = ok(["info", &pool, "--dram", "lru:1M"]);
    says(&text, &["lru of 1M", "256 slots of 4096 bytes", "in 1 set,", "bytes of metadata a slot"]);
    says(&ok(["info", &pool, "--dram", "lru:4K"]), &["1 slot of 4096 bytes in 1 set,"]);
    says(&fails(1, &["info", &pool, "--dram", "transit:1K"]), &["transit:1K", "0 blocks"]);
    assert!(std::fs::read(&pool).unwrap() == before);
}

#[test]
fn every_geometry_of_the_format_can_be_made() {
    let (_dir, pool) = place();
    for lba_bytes in [512, 520, 528, 4096, 4104, 4160, 4224] {
        for version in ["1.1", "2.0"] {
            let lba_size = lba_bytes.to_string();
            let options = ["--lba-size", &lba_size, "--btt-version", version, "--force"];
            ok(["create", &pool, "--engine", "btt", "--size", "32M"].into_iter().chain(options));
            let info = json(&["info", &pool, "--json"]);
            assert_eq!(info["btt"]["lba_bytes"], lba_bytes);
            assert_eq!(info["block_bytes"], if lba_bytes < 4096 { 512 } else { 4096 });
            assert_eq!(info["btt"]["version"], version);
            ok(["check", &pool]);
        }
    }
}

#[test]
fn a_raw_pool_is_made_described_served_and_repaired() {
    let (dir, pool) = place();
    ok(["create", &pool, "--engine", "raw", "--size", "16M", "--block-size", "512"]);
    let info = json(&["info", &pool, "--json"]);
    assert_eq!((&info["engine"], &info["block_bytes"]), (&"raw".into(), &512.into()));
    assert_eq!(info["size_bytes"], (16 << 20) - 3 * 4096);
    let socket = dir.path().join("socket");
    let server = Server::start(Path::new(&pool), &socket, &[]);
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let mut qemu_io = tool("qemu-io", "qemu-utils");
    succeed(qemu_io.args(["-f", "raw", "-c", "write -P 3 512 1k", "-c", "read -P 3 512 1k", &uri]));
    assert!(server.stop(Signal::TERM).0.success());
    file(&pool).write_all_at(&[0xff; 8], 40).unwrap();
    says(
        &String::from_utf8(run(["check", &pool]).stdout).unwrap(),
        &["at the pool's start", "1 fault", "--repair"],
    );
    assert_eq!(run(["check", &pool]).status.code(), Some(1));
    let report = run(["check", &pool, "--json"]).stdout;
    let report: Value = serde_json::from_slice(&report).unwrap();
    assert_eq!((&report["clean"], &report["faults"]), (&false.into(), &1.into()));
    says(&ok(["check", &pool, "--repair"]), &["restored superblocks: 1", "no damage"]);
    assert_eq!(json(&["check", &pool, "--json"])["clean"], true);
}

#[test]
fn the_smallest_raw_pool_can_be_made() {
    let (_dir, pool) = place();
    says(&fails(1, &["create", &pool, "--engine", "raw", "--size", "12K"]), &["smallest is 16K"]);
    ok(["create", &pool, "--engine", "raw", "--size", "16K"]);
}

#[test]
fn one_engine_follows_the_other() {
    let (_dir, pool) = pool();
    for (engine, size) in [("raw", "20M"), ("btt", "17M"), ("raw", "64K"), ("btt", "32M")] {
        says(
            &fails(1, &["create", &pool, "--engine", engine, "--size", size]),
            &["already holds", "--force"],
        );
        ok(["create", &pool, "--engine", engine, "--size", size, "--force"]);
        assert_eq!(json(&["info", &pool, "--json"])["engine"], engine);
        ok(["check", &pool]);
    }
}

/// A file system may be mounted by the loop device.
#[test]
fn a_file_behind_a_loop_device_is_not_overwritten_at_all() {
    let (_dir, path) = place();
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    let create = ["create", &path, "--engine", "raw", "--size", "1M", "--force"];
    let device = Disk::of(Path::new(&path));
    says(&fails(1, &create), &[&path, "in use", &device.0]);
    assert_eq!(std::fs::read(&path).unwrap(), vec![7; 1 << 20]);
    drop(device);
    ok(create);
}

#[test]
fn a_pool_is_not_overwritten_unless_forced() {
    let (_dir, pool) = pool();
    let create = ["create", &pool, "--engine", "btt", "--size", "32M"];
    let uuid = |info: Value| info["btt"]["uuid"].as_str().unwrap().to_owned();
    let before = uuid(json(&["info", &pool, "--json"]));
    says(&fails(1, &create), &[&pool, "btt pool", "--force"]);
    assert_eq!(uuid(json(&["info", &pool, "--json"])), before);
    ok(create.into_iter().chain(["--force"]));
    assert_ne!(uuid(json(&["info", &pool, "--json"])), before);
}

/// A mistyped unit costs no pool.
#[test]
fn a_size_that_is_refused_leaves_the_pool_and_its_space_as_they_were() {
    let (_dir, pool) = pool();
    let state = || {
        let found = std::fs::metadata(&pool).unwrap();
        (found.len(), found.blocks(), json(&["info", &pool, "--json"])["btt"]["uuid"].clone())
    };
    let before = state();
    for size in ["8000000G", "1M"] {
        fails(1, &["create", &pool, "--engine", "btt", "--size", size, "--force"]);
        assert_eq!(state(), before, "{size}");
    }
    ok(["check", &pool]);
}

#[test]
fn force_may_change_the_size_and_the_version() {
    let (_dir, pool) = pool();
    for (size, version) in [("64M", "2.0"), ("17M", "1.1"), ("48M", "2.0")] {
        let options = ["--size", size, "--btt-version", version, "--force"];
        ok(["create", &pool, "--engine", "btt"].into_iter().chain(options));
        assert_eq!(json(&["info", &pool, "--json"])["btt"]["version"], version);
        ok(["check", &pool]);
    }
    assert_eq!(json(&["info", &pool, "--json"])["pool_bytes"], 48 << 20);
}

#[test]
fn a_foreign_file_is_not_overwritten_unless_forced() {
    let (_dir, path) = place();
    std::fs::write(&path, []).unwrap();
    file(&path).set_len(32 << 20).unwrap();
    succeed(tool("mkfs.ext4", "e2fsprogs").arg("-q").arg(&path));
    let create = ["create", &path, "--engine", "btt", "--size", "32M"];
    says(&fails(1, &create), &[&path, "ext4", "--force"]);
    succeed(tool("e2fsck", "e2fsprogs").args(["-fn", &path]));
    ok(create.into_iter().chain(["--force"]));
    ok(["check", &path]);
}

#[test]
fn an_empty_or_blank_file_may_become_a_pool() {
    for len_bytes in [0, 100, 8 << 20, 32 << 20] {
        let (_dir, path) = place();
        std::fs::write(&path, []).unwrap();
        file(&path).set_len(len_bytes).unwrap();
        ok(["create", &path, "--engine", "btt", "--size", "32M"]);
        ok(["check", &path]);
    }
}

#[test]
fn sizes_that_do_not_fit_say_what_does() {
    let (_dir, pool) = place();
    let create = |size| ["create", &pool, "--engine", "btt", "--size", size].map(str::to_owned);
    let refused = |size| {
        let args = create(size);
        fails(1, &args.each_ref().map(String::as_str))
    };
    says(&refused("1M"), &["1M", "too small", "16388K"]);
    says(&refused("33554433"), &["33554433", "largest that fits is 32M"]);
    says(&refused("1024T"), &["1024T", "does not fit its file system", "largest size that does"]);
    assert!(!Path::new(&pool).exists(), "a refused pool left a file");
    ok(create("16388K"));
}

#[test]
fn what_is_no_pool_is_refused_by_every_command() {
    let (dir, _) = place();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("empty"), []).unwrap();
    std::fs::write(path("garbage"), vec![0x5a; 1 << 20]).unwrap();
    std::fs::write(path("short"), b"BTT_ARENA_INFO").unwrap();
    std::fs::create_dir(path("directory")).unwrap();
    for name in ["empty", "garbage", "short", "directory", "absent"] {
        let (path, socket) = (path(name), format!("unix:{}", path("socket")));
        for args in [
            &["info", &path][..],
            &["check", &path],
            &["check", &path, "--repair"],
            &["serve", &path, "--nbd", &socket],
        ] {
            says(&fails(1, args), &[&path]);
        }
    }
}

#[test]
fn damage_is_found_reported_and_repaired() {
    let (_dir, pool) = pool();
    file(&pool).write_all_at(&[0xff; 8], 4096 + 64).unwrap();
    says(&ok(["info", &pool]), &["damaged", "info block 1", "the other copy is whole"]);
    says(&fails(1, &["serve", &pool, "--nbd", "unix:s"]), &["is damaged", "--repair"]);
    let output = run(["check", &pool, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["clean"], false);
    assert_eq!(report["findings"][0]["kind"], "info_damaged");
    assert_eq!(report["findings"][0]["other_copy_whole"], true);
    let output = run(["check", &pool]);
    assert_eq!(output.status.code(), Some(1));
    says(
        &String::from_utf8_lossy(&output.stdout),
        &["arena 0", "info block", "1 fault;", "--repair"],
    );
    says(&ok(["check", &pool, "--repair"]), &["restored info blocks: 1", "no damage"]);
    assert_eq!(json(&["check", &pool, "--json"])["clean"], true);
    ok(["info", &pool]);
}

fn damage_flog_of_lane_3(pool: &str) {
    let mut flog = [0; 8];
    file(pool).read_exact_at(&mut flog, 4096 + 104).unwrap();
    let lane_3 = 4096 + u64::from_le_bytes(flog) + 3 * 64;
    file(pool).write_all_at(&[0; 64], lane_3).unwrap();
}

#[test]
fn a_btt_whose_flog_is_damaged_is_repaired_before_it_is_served_for_writing() {
    let (_dir, pool) = pool();
    damage_flog_of_lane_3(&pool);
    let refused = fails(1, &["serve", &pool, "--nbd", "unix:s"]);
    says(&refused, &["flog of lane 3", "check --repair", "--read-only", "--force"]);
    let repaired = ok(["check", &pool, "--repair"]);
    says(&repaired, &["restored flog entries of lanes: 1", "not proved", "no damage"]);
    says(&ok(["check", &pool]), &["no damage"]);
}

/// What a damaged flog costs: nothing to readers, and to writers only where they insist.
#[test]
fn a_btt_whose_flog_is_damaged_is_rescued_by_readers_and_served_for_writing_by_force() {
    const BLOCKS: u64 = 200;
    let (dir, pool) = pool();
    let socket = dir.path().join("socket");
    let expected = |lba: u64| [u8::try_from(lba).unwrap() + 1; 4096];
    let server = Server::start(Path::new(&pool), &socket, &[]);
    let mut client = Client::connect(&socket).unwrap();
    let write = |client: &mut Client, lba: u64, block: &[u8]| {
        client.send_write(lba, lba * 4096, block).unwrap();
        assert_eq!(client.receive().unwrap(), (lba, 0));
    };
    (0..BLOCKS).for_each(|lba| write(&mut client, lba, &expected(lba)));
    drop(client);
    assert!(server.stop(Signal::TERM).0.success());
    damage_flog_of_lane_3(&pool);
    says(&fails(1, &["serve", &pool, "--nbd", "unix:s"]), &["--read-only", "--force"]);
    let damaged = std::fs::read(&pool).unwrap();
    for option in ["--read-only", "--force"] {
        let server = Server::start(Path::new(&pool), &socket, &[option]);
        let mut client = Client::connect(&socket).unwrap();
        for lba in 0..BLOCKS {
            assert_eq!(client.read(lba * 4096, 4096).unwrap(), expected(lba), "{option} {lba}");
        }
        if option == "--read-only" {
            assert!(std::fs::read(&pool).unwrap() == damaged, "the rescue changed the pool");
        } else {
            // More than there are free blocks: each is used again.
            for round in 0..2 * BLOCKS {
                write(&mut client, round % 4, &[0xA5; 4096]);
            }
            assert_eq!(client.read(0, 4096).unwrap(), [0xA5; 4096]);
            for lba in 4..BLOCKS {
                assert_eq!(client.read(lba * 4096, 4096).unwrap(), expected(lba), "{lba}");
            }
        }
        drop(client);
        assert!(server.stop(Signal::TERM).0.success(), "{option}");
    }
}

/// Two blocks that have one place: a write to one would destroy the other.
#[test]
fn a_btt_whose_map_names_a_block_twice_is_served_for_writing_by_force_only() {
    let (dir, pool) = pool();
    let socket = dir.path().join("socket");
    let server = Server::start(Path::new(&pool), &socket, &[]);
    let mut client = Client::connect(&socket).unwrap();
    (0..4).for_each(|lba| behind::write(&mut client, lba, 10 + u8::try_from(lba).unwrap()));
    drop(client);
    assert!(server.stop(Signal::TERM).0.success());
    let mut word = [0; 8];
    file(&pool).read_exact_at(&mut word, 4096 + 96).unwrap();
    let map = 4096 + u64::from_le_bytes(word);
    let mut entry = [0; 4];
    file(&pool).read_exact_at(&mut entry, map + 4).unwrap();
    file(&pool).write_all_at(&entry, map + 2 * 4).unwrap();
    let damaged = std::fs::read(&pool).unwrap();
    let refused = fails(1, &["serve", &pool, "--nbd", "unix:s"]);
    says(&refused, &["lbas share blocks", "--read-only", "--force"]);
    for option in ["--read-only", "--force"] {
        let server = Server::start(Path::new(&pool), &socket, &[option]);
        let mut client = Client::connect(&socket).unwrap();
        let undisputed = [0, 3].map(|lba| behind::read(&mut client, lba));
        assert_eq!(undisputed, [10, 13], "{option}");
        // One of the two would be read as the other.
        client.send_read(5, 2 * 4096, 4096).unwrap();
        let error = if option == "--force" { 0 } else { EIO };
        assert_eq!(client.receive().unwrap(), (5, error), "{option}");
        drop(client);
        assert!(server.stop(Signal::TERM).0.success(), "{option}");
        assert!(option == "--force" || std::fs::read(&pool).unwrap() == damaged, "{option}");
    }
}

/// Both copies of a position of a log that has records: the limit is found again, and of the tail
/// it is said what is left to do.
#[test]
fn a_log_that_lost_a_position_is_repaired_or_refused_with_the_way_out() {
    for (field, offset) in [("limit", LIMIT_OFFSET), ("tail", TAIL_OFFSET)] {
        let scene = Scene::new("log");
        let (pool, backing) = (scene.pool().to_str().unwrap().to_owned(), scene.backing("disk"));
        let server = scene.serve("disk", &[]);
        let mut client = scene.client();
        (0..4).for_each(|lba| behind::write(&mut client, lba, 7));
        behind::kill(server);
        for copy in [0, COPY_DISTANCE] {
            file(&pool).write_all_at(&[5; 8], 8192 + offset + copy).unwrap();
        }
        let name = format!("the log's {field} is damaged in both copies");
        let serve = ["serve", &pool, "--nbd", "unix:s", &backing];
        for args in [&serve[..], &["recover", &pool], &["recover", &pool, "--discard"]] {
            let way_out = ["check --repair", "a backup", "create --force"];
            says(&fails(1, args), &[&[name.as_str()], &way_out[..]].concat());
        }
        let repair = run(["check", &pool, "--repair"]);
        let said = String::from_utf8(repair.stdout).unwrap();
        if field == "limit" {
            says(&said, &["restored positions of the log: 1", "no damage"]);
        } else {
            assert_eq!(repair.status.code(), Some(1), "{said}");
            says(&said, &[&name, "the records do not prove what it was", "create --force"]);
            says(&fails(1, &serve), &[&name]);
            ok(["create", &pool, "--engine=log", "--size=8M", "--force"]);
            says(
                &scene.refusal(&[&backing]),
                &["may hold writes that the backing lacks", "--force"],
            );
        }
        let (kept, more) = if field == "limit" { (7, &[][..]) } else { (0, &["--force"][..]) };
        let server = scene.serve("disk", more);
        assert_eq!(behind::read(&mut scene.client(), 3), kept, "{field}");
        assert!(server.stop(Signal::TERM).0.success());
    }
}

/// A server that stopped in good order has acknowledged all that it took, and knows it.
#[test]
fn after_a_clean_stop_no_check_speaks_of_unfinished_or_doubtful_writes() {
    for engine in ["btt", "raw", "log", "cache"] {
        let (dir, pool) = place();
        ok(["create", &pool, "--engine", engine, "--size", "32M"]);
        let socket = dir.path().join("socket");
        let disk = dir.path().join("disk");
        std::fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
        let backing = format!("--backing={}", disk.display());
        let needs_backing = ["log", "cache"].contains(&engine);
        let more = if needs_backing { vec![backing.as_str()] } else { vec![] };
        let server = Server::start(Path::new(&pool), &socket, &more);
        let mut client = Client::connect(&socket).unwrap();
        for (n, byte) in (0..300).zip((0..=u8::MAX).cycle()) {
            client.send_write(n, n % 100 * 4096, &[byte; 4096]).unwrap();
        }
        for _ in 0..300 {
            assert_eq!(client.receive().unwrap().1, 0);
        }
        drop(client);
        assert!(server.stop(Signal::TERM).0.success());
        let mut said = ok(["check", &pool]);
        for count in ["0 unfinished", "0 not flushed", "0 never finished"] {
            said = said.replace(count, "");
        }
        for word in ["unfinished", "not flushed", "never finished", "nothing tells", "whether"] {
            assert!(!said.contains(word), "{engine}: {said}");
        }
    }
}

#[test]
fn a_truncated_pool_is_called_so() {
    let (_dir, pool) = pool();
    file(&pool).set_len(20 << 20).unwrap();
    for args in [&["check", &pool][..], &["check", &pool, "--repair"]] {
        let error = fails(1, args);
        says(&error, &["it was cut off", "restore it from a backup"]);
        assert!(!error.contains("tidegate check"), "it recommends itself: {error}");
    }
}

#[test]
fn a_check_without_repair_changes_nothing() {
    let (_dir, pool) = pool();
    file(&pool).write_all_at(&[0xff; 8], 4096 + 64).unwrap();
    let before = std::fs::read(&pool).unwrap();
    run(["check", &pool]);
    assert!(std::fs::read(&pool).unwrap() == before);
}

#[test]
fn serve_says_what_it_serves_and_what_it_did() {
    let (dir, pool) = pool();
    let socket = dir.path().join("socket");
    let server = Server::start(Path::new(&pool), &socket, &["--export", "db"]);
    let banner = server.banner.join("\n");
    says(
        &banner,
        &[
            &pool,
            "btt",
            "adr",
            "power cut",
            "dram",
            "recovered",
            socket.to_str().unwrap(),
            "nbdinfo",
        ],
    );
    let uri = format!("nbd+unix:///db?socket={}", socket.display());
    succeed(tool("qemu-io", "qemu-utils").args([
        "-f",
        "raw",
        "-c",
        "write 0 64k",
        "-c",
        "flush",
        &uri,
    ]));
    let (status, rest) = server.stop(Signal::TERM);
    assert!(status.success(), "{status}");
    says(&rest, &["requests", "written        64K", "uptime"]);
    assert!(!socket.exists(), "the socket stays behind");
}

#[test]
fn a_pool_in_use_is_refused_and_stays_served() {
    let (dir, pool) = pool();
    let server = Server::start(Path::new(&pool), &dir.path().join("socket"), &[]);
    let other = format!("unix:{}", dir.path().join("other").display());
    for args in [
        &["serve", &pool, "--nbd", &other][..],
        &["check", &pool, "--repair"],
        &["create", &pool, "--engine", "btt", "--size", "32M", "--force"],
    ] {
        says(&fails(1, args), &[&pool, "in use"]);
    }
    let (status, _) = server.stop(Signal::INT);
    assert!(status.success(), "{status}");
    ok(["check", &pool]);
}

#[test]
fn a_socket_in_use_is_refused_and_a_stale_one_replaced() {
    let (dir, pool) = pool();
    let socket = dir.path().join("socket");
    let server = Server::start(Path::new(&pool), &socket, &[]);
    let (_other_dir, other_pool) = self::pool();
    let listen = format!("unix:{}", socket.display());
    says(&fails(1, &["serve", &other_pool, "--nbd", &listen]), &[socket.to_str().unwrap()]);
    rustix::process::kill_process(server.pid(), Signal::KILL).unwrap();
    server.wait_killed();
    assert!(socket.exists(), "a killed server cannot remove its socket");
    let server = Server::start(Path::new(&pool), &socket, &[]);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn read_only_serves_reads_and_changes_nothing() {
    let (dir, pool) = pool();
    let before = std::fs::read(&pool).unwrap();
    let socket = dir.path().join("socket");
    let server = Server::start(Path::new(&pool), &socket, &["--read-only"]);
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    succeed(tool("qemu-io", "qemu-utils").args(["-r", "-f", "raw", "-c", "read -P 0 0 64k", &uri]));
    let write = tool("qemu-io", "qemu-utils")
        .args(["-f", "raw", "-c", "write 0 4k", &uri])
        .output()
        .unwrap();
    assert!(!write.status.success(), "a write went to a read-only export");
    assert!(server.stop(Signal::TERM).0.success());
    assert!(std::fs::read(&pool).unwrap() == before);
}

#[test]
fn tls_files_that_do_not_serve_are_named() {
    let (dir, pool) = pool();
    let path = |name: &str| -> PathBuf { dir.path().join(name) };
    std::fs::write(path("junk.pem"), "junk").unwrap();
    let (junk, absent) = (path("junk.pem"), path("absent.pem"));
    for (cert, key) in [(&absent, &absent), (&junk, &junk)] {
        let (cert, key) = (cert.to_str().unwrap(), key.to_str().unwrap());
        let args = [
            "serve",
            &pool,
            "--nbd",
            "tcp:127.0.0.1:0",
            "--tls",
            "require",
            "--tls-cert",
            cert,
            "--tls-key",
            key,
        ];
        says(&fails(1, &args), &[".pem"]);
    }
}

/// What takes nothing that is written to it: a pipe without a reader, and a full device.
fn deaf() -> [Stdio; 2] {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    [writer.into(), file("/dev/full").into()]
}

#[test]
fn a_reader_that_goes_away_changes_no_status() {
    let ((_dir, pool), (_log_dir, log)) = (self::pool(), place());
    let status = |args: &[&str]| {
        let [closed, _] = deaf();
        let output = support::tidegate().args(args).stdout(closed).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{args:?}");
        output.status.code()
    };
    assert_eq!(status(&["create", &log, "--engine=log", "--size=1M"]), Some(0));
    for args in [
        &["info", &pool][..],
        &["info", &pool, "--json"],
        &["check", &pool],
        &["check", &log],
        &["stat", &log],
        &["flush", &log],
        &["recover", &log],
        &["--help"],
    ] {
        assert_eq!(status(args), Some(0), "{args:?}");
    }
    file(&pool).write_all_at(&[0xff; 8], 4096 + 64).unwrap();
    assert_eq!(status(&["check", &pool]), Some(1), "damage is damage");
}

#[test]
fn a_full_standard_output_is_an_error_that_names_it() {
    let (_dir, pool) = pool();
    let [_, full] = deaf();
    let output = support::tidegate().args(["info", &pool]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    says(&String::from_utf8_lossy(&output.stderr), &["standard output", "No space left"]);
}

#[test]
fn a_deaf_standard_error_changes_no_status() {
    for (args, status) in
        [(&["info", "nosuch"][..], 1), (&["flush", "nosuch"], 1), (&["bogus"], 2), (&["create"], 2)]
    {
        for stderr in deaf() {
            let mut command = support::tidegate();
            let found = command.args(args).stderr(stderr).status().unwrap();
            assert_eq!(found.code(), Some(status), "{args:?}");
        }
    }
}

#[test]
fn a_damaged_header_of_a_log_is_found_and_restored_from_the_other_one() {
    let (_dir, pool) = place();
    ok(["create", &pool, "--engine", "log", "--size", "1M"]);
    let whole = std::fs::read(&pool).unwrap();
    for offset in [8192, 12288] {
        file(&pool).write_all_at(&[0; 4096], offset).unwrap();
        let report = run(["check", &pool]);
        assert_eq!(report.status.code(), Some(1), "at {offset}");
        let place = format!("header at offset {offset} is damaged");
        says(&String::from_utf8_lossy(&report.stdout), &[&place, "1 fault", "--repair"]);
        let restored = ok(["check", &pool, "--repair"]);
        says(&restored, &["restored headers of the log: 1", "no damage"]);
        assert!(std::fs::read(&pool).unwrap() == whole, "at {offset}");
    }
    // Whole, and of another log.
    let (_other_dir, other) = place();
    ok(["create", &other, "--engine", "log", "--size", "1M"]);
    let other = &std::fs::read(other).unwrap()[8192..12288];
    file(&pool).write_all_at(other, 12288).unwrap();
    says(&String::from_utf8(run(["check", &pool]).stdout).unwrap(), &["differs from the first"]);
    ok(["check", &pool, "--repair"]);
    assert!(std::fs::read(&pool).unwrap() == whole);
    for offset in [8192, 12288] {
        file(&pool).write_all_at(&[0; 4096], offset).unwrap();
    }
    says(&fails(1, &["check", &pool]), &[&pool, "both copies"]);
}

#[test]
fn causes_are_reported_once() {
    let (dir, pool) = pool();
    let socket = format!("unix:{}", dir.path().join("missing/socket").display());
    for (address, cause) in [(&*socket, "no such file"), ("tcp:no-such-host.invalid:1", "lookup")] {
        let error = fails(1, &["serve", &pool, "--nbd", address]);
        assert_eq!(error.to_lowercase().matches(cause).count(), 1, "{error}");
    }
}

/// A rescue system may have no `/proc`.
#[test]
fn without_proc_a_pool_is_not_said_to_be_missing() {
    let (_dir, pool) = pool();
    let tidegate = env!("CARGO_BIN_EXE_tidegate");
    for command in ["check", "info", "stat"] {
        let script = format!("mount -t tmpfs none /proc && {tidegate} {command} {pool}");
        let mut unshare = tool("unshare", "util-linux");
        let output = unshare.args(["-m", "sh", "-c", &script]).output().unwrap();
        assert!(!output.status.success());
        says(&String::from_utf8(output.stderr).unwrap(), &["/proc, which is not mounted"]);
    }
}
