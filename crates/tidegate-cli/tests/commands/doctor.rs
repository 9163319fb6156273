//! `tidegate doctor`: each topic has a state, and one that is not ok has advice.

use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::file_system::FileSystem;
use crate::support::{Server, ok, run, scratch, succeed, tidegate, tool};

fn findings(printed: &str) -> Vec<Value> {
    let found: Value = serde_json::from_str(printed).expect("JSON");
    found["findings"].as_array().expect("a list").clone()
}

/// Returns the finding about `topic` that `text` is in.
fn about(all: &[Value], topic: &str, text: &str) -> Value {
    let is_it = |finding: &&Value| {
        finding["topic"] == topic && finding["found"].as_str().is_some_and(|it| it.contains(text))
    };
    all.iter().find(is_it).unwrap_or_else(|| panic!("{topic} {text}: {all:#?}")).clone()
}

#[test]
fn each_topic_has_a_state_and_advice_if_it_is_not_ok() {
    let text = ok(["doctor"]);
    let all = findings(&ok(["doctor", "--json"]));
    let topics: Vec<_> =
        all.iter().map(|finding| finding["topic"].as_str().expect("text")).collect();
    for topic in ["persistent memory", "write-back of lines", "shared memory", "servers"] {
        assert!(topics.contains(&topic), "{topics:?}");
    }
    for finding in &all {
        let is_ok = finding["state"] == "ok";
        assert_eq!(is_ok, finding.get("advice").is_none(), "{finding}");
        let topic = finding["topic"].as_str().expect("text");
        assert!(text.contains(topic), "{topic} is not in:\n{text}");
    }
    let ublk = about(&all, "block devices (ublk)", "");
    assert_eq!(ublk["state"] == "ok", Path::new("/dev/ublk-control").exists(), "{ublk}");
    assert_eq!(run(["doctor", "--now"]).status.code(), Some(2));
}

#[test]
fn limits_and_servers_that_are_down_are_seen() {
    let mut few = tool("prlimit", "util-linux");
    few.args(["--nofile=100:100", env!("CARGO_BIN_EXE_tidegate"), "doctor", "--json"]);
    let found = about(&findings(&succeed(&mut few)), "open files", "at most 100");
    assert_eq!(found["state"], "limited");

    let dir = scratch();
    let config = dir.path().join("config.toml");
    let path = dir.path().display();
    let text = format!("nbd = [\"unix:{path}/s\"]\n[[device]]\npool = \"{path}/none\"\n");
    std::fs::write(&config, text).expect("written");
    let server = Server::spawn(tidegate().args(["serve", "--config"]).arg(&config));
    let found = about(&findings(&ok(["doctor", "--json"])), "servers", "down");
    assert_eq!(found["state"], "limited");
    server.stop(Signal::TERM);
}

#[test]
fn shared_memory_that_is_full_is_seen() {
    let tidegate = env!("CARGO_BIN_EXE_tidegate");
    for (size, state) in [("1M", "limited"), ("64M", "ok")] {
        let script =
            format!("mount -t tmpfs -o size={size} none /dev/shm && {tidegate} doctor --json");
        let mut command = tool("unshare", "util-linux");
        let found = about(
            &findings(&succeed(command.args(["-m", "sh", "-c", &script]))),
            "shared memory",
            "free",
        );
        assert_eq!(found["state"], state, "{found}");
    }
}

/// `run` covers no files on an ext4 without a UUID, and doctor says how to give it one.
#[test]
fn a_file_system_that_run_cannot_cover_is_told() {
    let dir = scratch();
    let [pool, socket] = ["pool", "socket"].map(|name| dir.path().join(name));
    ok(["create".as_ref(), pool.as_os_str(), "--engine=raw".as_ref(), "--size=32M".as_ref()]);
    let server = Server::start(&pool, &socket, &[]);
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let file_system = FileSystem::make(dir.path(), &uri);
    let mount = format!("{} (ext4)", file_system.mount_point.display());
    let seen = || about(&findings(&ok(["doctor", "--json"])), "files under run", &mount);
    assert_eq!(seen()["state"], "ok");

    let device = file_system.unmount();
    // tune2fs wants a check that is newer than the last mount.
    succeed(tool("e2fsck", "e2fsprogs").args(["-fy", &device]));
    succeed(tool("tune2fs", "e2fsprogs").args(["-U", "clear", &device]));
    succeed(tool("mount", "mount").arg(&device).arg(&file_system.mount_point));
    let found = seen();
    assert_eq!(found["state"], "limited");
    let advice = found["advice"].as_str().expect("text");
    assert!(advice.contains(&format!("tune2fs -U random {device}")), "{advice}");
    drop(file_system);
    server.stop(Signal::TERM);
}
