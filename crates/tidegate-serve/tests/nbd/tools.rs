//! Clients of other projects: libnbd, QEMU, fio.

use std::path::Path;
use std::process::Command;

use tidegate_serve::nbd::{Export, ServerBuilder};

use crate::client::pattern;
use crate::harness::TestServer;
use crate::harness::memory;

/// Runs a tool and returns what it printed; fails the test if the tool is missing or fails.
pub(crate) fn run(package: &str, tool: &str, arguments: &[&str]) -> String {
    let output = Command::new(tool).args(arguments).output().unwrap_or_else(|error| {
        panic!("cannot run {tool}: {error}; install the Debian package {package}")
    });
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{tool} {arguments:?}: {}\n{printed}\n{complaints}",
        output.status
    );
    printed
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn nbdinfo_sees_everything() {
    let first = Export::new("first", memory(1 << 20)).description("for people");
    let second = Export::new("second", memory(2 << 20)).read_only(true);
    let server = TestServer::start(ServerBuilder::new().export(first).export(second));
    let printed = run("libnbd-bin", "nbdinfo", &["--list", "--json", &server.uri()]);
    let seen: serde_json::Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(seen["protocol"], "newstyle-fixed");
    assert_eq!(seen["structured"], true);
    let exports = seen["exports"].as_array().expect("exports");
    assert_eq!(exports.len(), 2);
    assert_eq!(exports[0]["export-name"], "first");
    assert_eq!(exports[0]["description"], "for people");
    assert_eq!(exports[0]["export-size"], 1 << 20);
    assert_eq!(exports[0]["contexts"][0], "base:allocation");
    assert_eq!(exports[0]["block_size_minimum"], 512);
    assert_eq!(exports[0]["block_size_maximum"], 32 << 20);
    for can in ["cache", "df", "fast_zero", "flush", "fua", "multi_conn", "trim", "zero"] {
        assert_eq!(exports[0][format!("can_{can}")], true, "{can}");
    }
    assert_eq!(exports[1]["is_read_only"], true);
    assert_eq!(exports[1]["can_trim"], false);
    let map = run("libnbd-bin", "nbdinfo", &["--map", &server.uri()]);
    assert!(map.contains("1048576    3  hole,zero"), "{map}");
}

#[test]
fn nbdcopy_copies_in_and_out() {
    let server = TestServer::serve(memory(64 << 20));
    let (source, copy) = (server.dir().join("source"), server.dir().join("copy"));
    std::fs::write(&source, pattern(64 << 20, 3)).expect("write");
    run(
        "libnbd-bin",
        "nbdcopy",
        &["--flush", "--threads=4", "--connections=4", text(&source), &server.uri()],
    );
    run("libnbd-bin", "nbdcopy", &[&server.uri(), text(&copy)]);
    assert!(std::fs::read(&source).expect("read") == std::fs::read(&copy).expect("read"));
    assert!(server.statistics().connections > 2, "nbdcopy did not believe in multi-conn");
}

#[test]
fn qemu_io_reads_writes_zeroes_and_discards() {
    let server = TestServer::memory();
    let commands = [
        "write -P 7 0 1M",
        "write -f -P 8 1M 64k",
        "write -z 4k 8k",
        "discard 64k 64k",
        "flush",
        "read -P 7 0 4k",
        "read -P 0 4k 8k",
        "read -P 8 1M 64k",
        "read -P 7 12k 4k",
    ];
    let mut arguments = vec!["-f", "raw", "-t", "none"];
    arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
    let uri = server.uri();
    arguments.push(&uri);
    let printed = run("qemu-utils", "qemu-io", &arguments);
    assert!(!printed.contains("verification failed"), "{printed}");
}

#[test]
fn qemu_img_converts_and_compares() {
    let server = TestServer::serve(memory(16 << 20));
    let source = server.dir().join("source");
    let mut image = pattern(16 << 20, 5);
    image[1 << 20..9 << 20].fill(0);
    std::fs::write(&source, image).expect("write");
    let uri = server.uri();
    run(
        "qemu-utils",
        "qemu-img",
        &["convert", "-n", "-f", "raw", "-O", "raw", text(&source), &uri],
    );
    let printed =
        run("qemu-utils", "qemu-img", &["compare", "-f", "raw", "-F", "raw", text(&source), &uri]);
    assert!(printed.contains("identical"), "{printed}");
    let qcow = server.dir().join("copy.qcow2");
    run("qemu-utils", "qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, text(&qcow)]);
    run("qemu-utils", "qemu-img", &["check", text(&qcow)]);
    run(
        "qemu-utils",
        "qemu-img",
        &["compare", "-f", "raw", "-F", "qcow2", text(&source), text(&qcow)],
    );
}

#[test]
fn fio_verifies_its_checksums() {
    let server = TestServer::serve(memory(64 << 20));
    let uri = format!("--uri={}", server.uri());
    let arguments = [
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        "--rw=randwrite",
        "--bsrange=512-128k",
        "--bs_unaligned=0",
        "--blockalign=512",
        "--size=32M",
        "--iodepth=32",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--fsync=64",
        "--output-format=json",
    ];
    let printed = run("fio", "fio", &arguments);
    let start = printed.find('{').expect("JSON");
    let seen: serde_json::Value = serde_json::from_str(&printed[start..]).expect("JSON");
    let job = &seen["jobs"][0];
    assert_eq!(job["error"], 0);
    assert!(
        job["read"]["io_bytes"].as_u64().expect("a number") >= 32 << 20,
        "fio verified nothing"
    );
}
