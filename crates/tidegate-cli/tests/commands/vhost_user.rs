//! `serve --vhost-user` without a machine: what users see of the socket. Machines are in the tests
//! of the guest.

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Server, ok, scratch, tidegate};

fn pool() -> (TempDir, PathBuf) {
    let dir = scratch();
    let pool = dir.path().join("pool");
    ok(["create".as_ref(), pool.as_os_str(), "--engine=btt".as_ref(), "--size=32M".as_ref()]);
    (dir, pool)
}

fn serve(pool: &Path, socket: &Path) -> Command {
    let mut command = tidegate();
    command.arg("serve").arg(pool).arg("--vhost-user").arg(socket);
    command
}

#[test]
fn a_socket_is_shown_is_private_and_goes_with_its_server() {
    let (dir, pool) = pool();
    let socket = dir.path().join("vm.sock");
    let server = Server::spawn(&mut serve(&pool, &socket));
    let told = server.banner.iter().any(|line| {
        line.split_whitespace().eq(["vhost-user", socket.to_str().expect("a plain path")])
    });
    assert!(told, "{:?}", server.banner);
    let metadata = socket.metadata().expect("the socket is there");
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);

    let listed: Value = serde_json::from_str(&ok(["list", "--json"])).expect("JSON");
    let devices = listed["devices"].as_array().expect("a list");
    let own = devices.iter().find(|device| device["pool"] == pool.to_str().expect("a plain path"));
    let address = format!("vhost-user:{}", socket.display());
    assert_eq!(own.expect("the pool is listed")["addresses"], Value::from(vec![address]));
    let stat = ok(["stat".as_ref(), "--json".as_ref(), pool.as_os_str()]);
    assert!(stat.contains("\"vhost-user\""), "{stat}");

    // A second server of another pool does not take the socket.
    let other = dir.path().join("other");
    ok(["create".as_ref(), other.as_os_str(), "--engine=btt".as_ref(), "--size=32M".as_ref()]);
    let refused = serve(&other, &socket).output().expect("it starts");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("another server listens there"), "{said}");

    let (status, _) = server.stop(Signal::TERM);
    assert!(status.success() && !socket.exists());
    // The socket of a server that was killed is replaced.
    Server::spawn(&mut serve(&pool, &socket)).stop(Signal::KILL);
    assert!(socket.exists());
    let server = Server::spawn(&mut serve(&pool, &socket));
    drop(UnixStream::connect(&socket).expect("it listens"));
    server.stop(Signal::TERM);
}

#[test]
fn a_file_gives_each_device_a_socket_of_its_own() {
    let (dir, pool) = pool();
    let config = dir.path().join("config.toml");
    let check = |text: &str| {
        let text = text.replace("DIR", dir.path().to_str().expect("a plain path"));
        std::fs::write(&config, text).expect("written");
        let checked = tidegate().args(["config", "check"]).arg(&config).output().expect("it runs");
        let said = [checked.stdout, checked.stderr].concat();
        (checked.status.success(), String::from_utf8_lossy(&said).into_owned())
    };
    let device = "[[device]]\npool = \"DIR/pool\"\nvhost-user = \"unix:DIR/vm\"\n";
    let (is_sound, said) = check(device);
    assert!(is_sound, "{said}");
    let twice = format!("nbd = [\"unix:DIR/vm\"]\n{device}");
    let (is_sound, said) = check(&twice);
    assert!(!is_sound && said.contains("is given twice"), "{said}");
    let (is_sound, said) = check("[[device]]\npool = \"DIR/pool\"\n");
    assert!(!is_sound && said.contains("`vhost-user = \"unix:PATH\"`"), "{said}");

    // A reload takes the socket away, and gives another one.
    check(device);
    let server = Server::spawn(tidegate().args(["serve", "--config"]).arg(&config));
    assert!(dir.path().join("vm").exists());
    check(&device.replace("/vm", "/second"));
    let changed = ok(["reload".as_ref(), config.as_os_str()]);
    assert!(!changed.is_empty());
    assert!(!dir.path().join("vm").exists() && dir.path().join("second").exists());
    let (status, _) = server.stop(Signal::TERM);
    assert!(status.success() && pool.exists());
}
