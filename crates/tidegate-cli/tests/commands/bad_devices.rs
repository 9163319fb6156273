//! A server whose devices cannot all be opened: it serves the others, and takes up each device once
//! the cause is gone.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::behind;
use crate::nbd::Client;
use crate::support::{Server, ok, run, scratch, succeed, tidegate, tool};

const SERVED: &str = "the device is served now";
/// A start or a stop that waits for a device that is down would take longer.
const PROMPT: Duration = Duration::from_secs(20);

/// A directory with pools, and a server of several.
struct Scene {
    dir: TempDir,
    /// The `[[device]]`s of the configuration.
    devices: String,
}

impl Scene {
    fn new() -> Self {
        Self { dir: scratch(), devices: String::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Adds a device whose export and pool are `name`, with `keys` of the configuration, in which
    /// `DIR` is the directory.
    fn device(mut self, name: &str, keys: &str) -> Self {
        let keys = keys.replace("DIR", self.dir.path().to_str().unwrap());
        let pool = self.text(name);
        let device = format!("[[device]]\nexport = \"{name}\"\npool = \"{pool}\"\n{keys}\n");
        self.devices.push_str(&device);
        self
    }

    /// Makes a pool.
    fn pool(self, name: &str, engine: &str) -> Self {
        ok(["create", &self.text(name), &format!("--engine={engine}"), "--size=32M"]);
        self
    }

    /// Makes a disk for a pool.
    fn disk(&self, name: &str) {
        File::create_new(self.path("new")).unwrap().set_len(64 << 20).unwrap();
        std::fs::rename(self.path("new"), self.path(name)).unwrap();
    }

    /// Starts the server, and returns it with its log.
    fn serve(&self) -> (Server, Log) {
        let dir = self.dir.path().to_str().unwrap();
        let config = format!(
            "nbd = [\"unix:{dir}/socket\"]\nmetrics = \"unix:{dir}/metrics\"\n{}",
            self.devices
        );
        std::fs::write(self.path("config.toml"), config).unwrap();
        let mut command = tidegate();
        command.args(["serve", "--config", &self.text("config.toml")]).stderr(Stdio::piped());
        if self.path("notices").exists() {
            command.env("NOTIFY_SOCKET", self.path("notices"));
        }
        let mut server = Server::spawn(&mut command);
        let log = Log(server.stderr());
        (server, log)
    }

    fn connect(&self, export: &str) -> Client {
        Client::connect_to(&self.path("socket"), export).unwrap()
    }

    /// Asks for export `name`, as a client of another project does.
    fn assert_refused(&self, name: &str) {
        let uri = format!("nbd+unix:///{name}?socket={}", self.text("socket"));
        let output = tool("nbdinfo", "libnbd-bin").arg(&uri).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        let is_refused = error.contains("No such file or directory for");
        assert!(!output.status.success() && is_refused, "{name}: {error}");
    }

    /// Writes to export `name` and reads that again.
    fn assert_served(&self, name: &str) {
        let mut client = self.connect(name);
        behind::write(&mut client, 1, 7);
        assert_eq!(behind::read(&mut client, 1), 7, "{name}");
    }

    /// The metric `tidegate_up` of export `name`.
    fn up(&self, name: &str) -> String {
        let mut curl = tool("curl", "curl");
        let page = succeed(
            curl.args(["-s", "--unix-socket"]).args([&self.text("metrics"), "http://it/metrics"]),
        );
        let sample = format!("tidegate_up{{export=\"{name}\"}} ");
        let value = page.lines().find_map(|line| line.strip_prefix(&sample));
        value.unwrap_or_else(|| panic!("no {sample} in {page}")).to_owned()
    }

    fn names(&self) -> Vec<String> {
        names_at(&self.text("socket"))
    }
}

/// The names of a server's exports, as a client of another project lists them.
pub(crate) fn names_at(socket: &str) -> Vec<String> {
    let uri = format!("nbd+unix:///?socket={socket}");
    let list = succeed(tool("nbdinfo", "libnbd-bin").args(["--list", &uri]));
    let names = list.lines().filter_map(|line| line.strip_prefix("export=\""));
    names.map(|name| name.trim_end_matches("\":").to_owned()).collect()
}

/// The log of a server.
pub(crate) struct Log(pub(crate) BufReader<ChildStderr>);

impl Log {
    /// Waits for the line that contains `text`. Returns it, and the number of lines before it.
    pub(crate) fn until(&mut self, text: &str) -> (String, usize) {
        let mut before = 0;
        loop {
            let mut line = String::new();
            assert!(self.0.read_line(&mut line).unwrap() > 0, "the log ended without: {text}");
            if line.contains(text) {
                return (line, before);
            }
            before += 1;
        }
    }

    pub(crate) fn rest(mut self) -> String {
        let mut rest = String::new();
        self.0.read_to_string(&mut rest).unwrap();
        rest
    }
}

pub(crate) fn assert_stops(server: Server) {
    let stopped = Instant::now();
    let (status, rest) = server.stop(Signal::TERM);
    assert!(status.success() && rest.contains("stopped"), "{status}: {rest}");
    assert!(stopped.elapsed() < PROMPT, "{:?}", stopped.elapsed());
}

fn content(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

/// The service manager is told, too.
#[test]
fn seven_devices_are_served_and_the_eighth_once_its_backing_appears() {
    let good: Vec<String> = (1..8).map(|number| format!("good{number}")).collect();
    let keys = "backing = \"DIR/folder/disk\"\ncontrol = \"unix:DIR/control\"";
    let mut scene = Scene::new().pool("bad", "cache").device("bad", keys);
    for name in &good {
        scene = scene.pool(name, "btt").device(name, "");
    }
    let notices = UnixDatagram::bind(scene.path("notices")).unwrap();
    let told = || {
        let mut bytes = [0; 1000];
        let received = notices.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..received].to_vec()).unwrap()
    };
    let before = content(&scene.path("bad"));
    let started = Instant::now();
    let (server, mut log) = scene.serve();
    assert!(started.elapsed() < PROMPT, "{:?}", started.elapsed());
    assert_eq!(told(), "READY=1\nSTATUS=serving 7 of 8 devices, 1 down");
    for name in &good {
        scene.assert_served(name);
        assert_eq!(scene.up(name), "1.0");
    }
    let (line, earlier) = log.until("device \"bad\" is not served: ");
    let disk = scene.text("folder/disk");
    assert!(line.contains(&format!("the server opens it once {disk} is there")), "{line}");
    assert_eq!((earlier, scene.up("bad")), (0, "0.0".to_owned()));
    assert_eq!(scene.names(), good);
    // It is the first device, and no other takes its place as the default.
    scene.assert_refused("bad");
    scene.assert_refused("");
    let stat = ok(["stat", &scene.text("control"), "--json"]);
    let stat: serde_json::Value = serde_json::from_str(&stat).unwrap();
    assert_eq!((&stat["state"], &stat["live"]), (&"down".into(), &false.into()), "{stat}");
    assert!(stat["cause"].as_str().unwrap().contains(&disk), "{stat}");
    let refused = run(["flush", &scene.text("control")]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is not served: "), "{refused:?}");
    assert!(content(&scene.path("bad")) == before, "the pool has changed");

    std::fs::create_dir(scene.path("folder")).unwrap();
    scene.disk("folder/disk");
    let (_, between) = log.until(SERVED);
    assert_eq!((between, told()), (0, "STATUS=serving 8 devices".to_owned()));
    scene.assert_served("bad");
    scene.assert_served("");
    assert_eq!((scene.up("bad"), scene.names().len()), ("1.0".to_owned(), 8));
    let stat = ok(["stat", &scene.text("bad"), "--json"]);
    assert!(stat.contains("\"state\": \"up\"") && stat.contains("\"live\": true"), "{stat}");
    assert_stops(server);
    assert_eq!(log.rest().lines().count(), 1, "the signal");
    assert_eq!(content(&scene.path("folder/disk"))[4096], 7, "the stop has written it back");
}

#[test]
fn a_pool_that_appears_is_served_though_it_was_the_only_device() {
    let scene = Scene::new().device("pool", "");
    let (server, mut log) = scene.serve();
    log.until("device \"pool\" is not served: ");
    ok(["create", &scene.text("new"), "--engine=btt", "--size=32M"]);
    std::fs::rename(scene.path("new"), scene.path("pool")).unwrap();
    log.until(SERVED);
    scene.assert_served("pool");
    assert_stops(server);
}

/// The pool is restored from its start on, and looks whole before it is.
#[test]
fn a_damaged_pool_is_served_once_it_is_restored() {
    let scene = Scene::new().pool("good", "btt").device("good", "");
    let scene = scene.pool("damaged", "btt").device("damaged", "");
    let whole = content(&scene.path("damaged"));
    let zeroes = vec![0; whole.len()];
    std::fs::write(scene.path("damaged"), &zeroes).unwrap();
    let (server, mut log) = scene.serve();
    let (line, _) = log.until("damaged holds no pool");
    assert!(line.contains("config.toml:") && line.contains("device \"damaged\""), "{line}");
    assert!(line.contains("the server tries again"), "{line}");
    scene.assert_served("good");
    scene.assert_refused("damaged");
    assert!(content(&scene.path("damaged")) == zeroes, "the file has changed");
    let mut restored = File::options().write(true).open(scene.path("damaged")).unwrap();
    for piece in whole.chunks(whole.len() / 32) {
        restored.write_all(piece).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(scene.up("damaged"), "0.0");
    }
    log.until(SERVED);
    scene.assert_served("damaged");
    assert_stops(server);
    ok(["check", &scene.text("damaged")]);
}

/// While it waits, the server itself locks nothing.
#[test]
fn a_pool_that_another_process_has_is_served_once_that_ends() {
    let scene = Scene::new().pool("good", "btt").device("good", "");
    let scene = scene.pool("taken", "btt").device("taken", "");
    let other = Server::start(&scene.path("taken"), &scene.path("other"), &[]);
    let (server, mut log) = scene.serve();
    log.until("device \"taken\" is not served: ");
    scene.assert_served("good");
    let mut client = Client::connect(&scene.path("other")).unwrap();
    behind::write(&mut client, 2, 9);
    drop(client);
    assert!(other.stop(Signal::TERM).0.success());
    log.until(SERVED);
    let mut client = scene.connect("taken");
    assert_eq!(behind::read(&mut client, 2), 9);
    drop(client);
    assert_stops(server);
}

#[test]
fn a_server_stops_at_once_with_devices_that_are_down() {
    let scene = Scene::new().pool("cache", "cache").device("cache", "backing = \"DIR/disk\"");
    let scene = scene.device("absent", "");
    std::fs::write(scene.path("text"), "no pool").unwrap();
    let scene = scene.device("text", "").pool("good", "btt").device("good", "");
    let (server, mut log) = scene.serve();
    log.until("is not served: ");
    log.until("is not served: ");
    log.until("is not served: ");
    // The pool of a device that is down can be used: the server has no lock.
    ok(["check", &scene.text("cache")]);
    scene.assert_served("good");
    assert_stops(server);
    assert!(!log.rest().contains("is not served"));
}

/// The backing's server answers no client. It hangs up on the first one.
#[test]
fn a_backing_that_does_not_answer_holds_up_neither_the_others_nor_a_stop() {
    let scene = Scene::new().pool("good", "btt").device("good", "").pool("cache", "cache");
    let silent = UnixListener::bind(scene.path("silent")).unwrap();
    let scene = scene.device("cache", "backing = \"nbd+unix:///?socket=DIR/silent&timeout=60s\"");
    let (server, mut log) = std::thread::scope(|scope| {
        let serving = scope.spawn(|| scene.serve());
        drop(silent.accept().unwrap());
        serving.join().unwrap()
    });
    log.until("device \"cache\" is not served: ");
    // The next attempt is under way now.
    let waiting = silent.accept().unwrap();
    scene.assert_served("good");
    assert_eq!(scene.up("cache"), "0.0");
    assert_stops(server);
    log.until("cache is still being opened");
    drop(waiting);
}

/// The text of the file does not show the fault: the system looks `127.1` up as it does names.
#[test]
fn a_device_whose_backing_is_an_export_of_the_same_server_is_not_served() {
    let port = {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().port()
    };
    let scene = Scene::new().pool("good", "btt").device("good", "").pool("cache", "cache");
    let backing = format!("backing = \"nbd://127.1:{port}/good\"");
    let scene = scene.device("cache", &backing);
    let dir = scene.dir.path().to_str().unwrap();
    let nbd = format!("nbd = [\"unix:{dir}/socket\", \"tcp:127.0.0.1:{port}\"]");
    std::fs::write(scene.path("config.toml"), format!("{nbd}\n{}", scene.devices)).unwrap();
    let mut command = tidegate();
    command.args(["serve", "--config", &scene.text("config.toml")]).stderr(Stdio::piped());
    let mut server = Server::spawn(&mut command);
    let (line, _) = Log(server.stderr()).until("device \"cache\" is not served: ");
    assert!(line.contains("is an export of this server"), "{line}");
    scene.assert_served("good");
    assert_stops(server);
}

/// Sockets are bound before a pool is opened, which may bind the pool to its backing.
#[test]
fn a_start_that_finds_an_address_in_use_changes_nothing() {
    let scene = Scene::new().pool("pool", "cache").pool("first", "btt");
    scene.disk("disk");
    let (pool, backing) = (scene.text("pool"), format!("--backing={}", scene.text("disk")));
    let before = content(&scene.path("pool"));
    let metrics = format!("--metrics=unix:{}", scene.text("metrics"));
    let control = format!("--control=unix:{}", scene.text("control"));
    let server = Server::start(&scene.path("first"), &scene.path("socket"), &[&metrics, &control]);
    let nbd = |name: &str| format!("--nbd=unix:{}", scene.text(name));
    for more in [&[nbd("socket")][..], &[nbd("free"), metrics], &[nbd("free"), control]] {
        let refused = run([&["serve".to_owned(), pool.clone(), backing.clone()], more].concat());
        let error = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(1) && error.contains("another server"), "{error}");
        assert!(content(&scene.path("pool")) == before, "the pool has changed: {more:?}");
    }
    assert!(server.stop(Signal::TERM).0.success());
}
