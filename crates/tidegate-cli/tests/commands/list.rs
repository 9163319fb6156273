//! `tidegate list`: the devices of all servers of the user. Servers of other tests are listed, too.

use std::path::PathBuf;

use rustix::process::{Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::behind;
use crate::nbd::Client;
use crate::support::{Server, ok, run, scratch, tidegate};

/// A directory with the servers of a pool alone, and of a cache and a pool that does not exist.
struct Scene {
    dir: TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self { dir: scratch() };
        ok(["create", &scene.text("alone"), "--engine=btt", "--size=32M"]);
        ok(["create", &scene.text("cache"), "--engine=cache", "--size=32M"]);
        let disk = std::fs::File::create_new(scene.path("disk")).unwrap();
        disk.set_len(64 << 20).unwrap();
        let text = r#"nbd = ["unix:DIR/socket"]
[[device]]
export = "cache"
pool = "DIR/cache"
backing = "DIR/disk"
control = "unix:DIR/control"

[[device]]
export = "a, b"
pool = "DIR/none"
"#;
        let text = text.replace("DIR", scene.dir.path().to_str().unwrap());
        std::fs::write(scene.path("config.toml"), text).unwrap();
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn serve(&self) -> (Server, Server) {
        let mut command = tidegate();
        command.args(["serve", "--config", &self.text("config.toml")]);
        let alone = Server::start(&self.path("alone"), &self.path("other"), &[]);
        (Server::spawn(&mut command), alone)
    }

    /// The lines of `list` about this directory, with `DIR` in its place.
    fn lines(&self, args: &[&str]) -> Vec<String> {
        let printed = ok([&["list"], args].concat());
        let dir = self.dir.path().to_str().unwrap();
        let own = printed.lines().filter(|line| line.contains(dir));
        own.map(|line| line.replace(dir, "DIR")).collect()
    }

    /// The devices of `list --json` in this directory.
    fn devices(&self) -> Vec<Value> {
        let listed: Value = serde_json::from_str(&ok(["list", "--json"])).unwrap();
        let devices = listed["devices"].as_array().unwrap().iter();
        let is_own = |device: &&Value| {
            PathBuf::from(device["pool"].as_str().unwrap()).starts_with(self.dir.path())
        };
        devices.filter(is_own).cloned().collect()
    }
}

#[test]
fn the_devices_of_all_servers_are_on_one_page() {
    let scene = Scene::new();
    assert!(scene.devices().is_empty());
    let (server, alone) = scene.serve();
    let mut client = Client::connect(&scene.path("socket")).unwrap();
    behind::write(&mut client, 1, 7);
    drop(client);
    let mut devices = scene.devices();
    devices.sort_by_key(|device| device["pool"].to_string());
    let [lone, cache, absent] = &devices[..] else { panic!("{devices:#?}") };
    assert_eq!((&lone["state"], &lone["export"]), (&"up".into(), &"".into()), "{lone:#}");
    assert_eq!(lone["process"], alone.pid().as_raw_pid());
    assert_eq!(lone["dirty_bytes"], 0, "{lone:#}");
    assert_eq!(cache["state"], "up", "{cache:#}");
    assert_eq!(cache["dirty_bytes"], 4096, "{cache:#}");
    assert_eq!(cache["backing"], format!("file:{}", scene.text("disk")));
    assert_eq!(cache["addresses"][0], format!("unix:{}", scene.text("socket")));
    assert_eq!(cache["control"], scene.text("control"));
    assert_eq!((&absent["state"], &absent["dirty_bytes"]), (&"down".into(), &Value::Null));
    let cause = absent["cause"].as_str().unwrap();
    assert!(cause.contains(&scene.text("none")), "{cause}");

    let lines = scene.lines(&[]);
    let row = |cells: &[&str]| {
        let is_row = |line: &&String| line.split_whitespace().eq(cells.iter().copied());
        assert_eq!(lines.iter().filter(is_row).count(), 1, "{cells:?}: {lines:#?}");
    };
    row(&["-", "-", "up", "0", "bytes", "DIR/alone", "-", "unix:DIR/other"]);
    row(&["cache", "-", "up", "4K", "DIR/cache", "file:DIR/disk", "unix:DIR/socket"]);
    row(&["a,", "b", "-", "down", "-", "DIR/none", "-", "unix:DIR/socket"]);
    assert!(lines.iter().any(|line| line.starts_with("DIR/none is down: ")), "{lines:#?}");

    let (process, lines) = (server.pid().as_raw_pid(), scene.lines(&["--csv"]));
    let cached =
        format!("cache,,up,,4096,DIR/cache,file:DIR/disk,unix:DIR/socket,DIR/control,{process}");
    assert!(lines.len() == 3 && lines.contains(&cached), "{lines:#?}");
    assert!(lines.iter().any(|line| line.starts_with("\"a, b\",,down,")), "{lines:#?}");
    assert!(server.stop(Signal::TERM).0.success());
    assert_eq!(scene.devices().len(), 1);
    assert!(alone.stop(Signal::TERM).0.success());
}

/// `list` runs in another directory than the server.
#[test]
fn paths_of_a_server_that_was_started_with_relative_ones_are_absolute() {
    let scene = Scene::new();
    let mut command = tidegate();
    command.current_dir(scene.dir.path());
    let server = Server::spawn(command.args([
        "serve",
        "alone",
        "--nbd=unix:socket",
        "--control=unix:control",
        "--vhost-user=unix:disk.sock",
    ]));
    let devices = scene.devices();
    let [device] = &devices[..] else { panic!("{devices:#?}") };
    let addresses = ["unix:socket", "vhost-user:disk.sock"]
        .map(|address| address.replace(':', &format!(":{}/", scene.dir.path().display())));
    assert_eq!(device["addresses"], serde_json::json!(addresses), "{device:#}");
    assert_eq!(device["control"], scene.text("control"), "{device:#}");
    ok(["stat", device["control"].as_str().unwrap()]);
    assert!(server.stop(Signal::TERM).0.success());
}

/// JSON has no bytes that are no characters: one such name must not hide all devices of a server.
#[test]
fn a_pool_whose_name_is_not_text_is_listed() {
    use std::os::unix::ffi::OsStrExt;
    let scene = Scene::new();
    let pool = scene.dir.path().join(std::ffi::OsStr::from_bytes(b"pool\xff"));
    std::fs::rename(scene.path("alone"), &pool).unwrap();
    let mut command = tidegate();
    command.arg("serve").arg(&pool).arg(format!("--nbd=unix:{}", scene.text("other")));
    let server = Server::spawn(&mut command);
    let devices = scene.devices();
    let [device] = &devices[..] else { panic!("{devices:#?}") };
    assert_eq!(device["pool"], *pool.to_string_lossy(), "{device:#}");
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn a_server_removes_the_sockets_of_killed_servers_and_no_others() {
    let scene = Scene::new();
    let (killed, alone) = scene.serve();
    let of_lists = |server: &Server| {
        let user = rustix::process::geteuid().as_raw();
        PathBuf::from(format!("/dev/shm/tidegate-{user}/{}.server", server.pid().as_raw_pid()))
    };
    let [dead, live] = [&killed, &alone].map(of_lists);
    assert!(dead.exists() && live.exists());
    kill_process(killed.pid(), Signal::KILL).unwrap();
    killed.wait_killed();
    let mut command = tidegate();
    let next = Server::spawn(command.args(["serve", "--config", &scene.text("config.toml")]));
    assert!(!dead.exists() && live.exists() && of_lists(&next).exists());
    for server in [next, alone] {
        assert!(server.stop(Signal::TERM).0.success());
    }
}

#[test]
fn a_server_that_was_killed_is_not_listed() {
    let scene = Scene::new();
    let (server, alone) = scene.serve();
    kill_process(server.pid(), Signal::KILL).unwrap();
    server.wait_killed();
    let devices = scene.devices();
    assert_eq!(devices.len(), 1, "{devices:#?}");
    assert!(alone.stop(Signal::TERM).0.success());
    assert_eq!(run(["list", "--json", "--csv"]).status.code(), Some(2));
}
