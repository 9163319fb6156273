//! A log before an export of an NBD server: another Tidegate, which is killed, comes back, and is
//! replaced by a wrong one.

use std::path::PathBuf;

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::nbd::Client;
use crate::support::{Server, ok, run, scratch};

const BLOCK_BYTES: usize = 4096;
/// More than the log holds.
const BLOCKS: usize = 3000;

/// A log pool, and a pool that another server exports.
struct Scene {
    dir: TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self { dir: scratch() };
        scene.create("log", "--engine=log", "--size=8M");
        scene.create("store", "--engine=btt", "--size=32M");
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn create(&self, name: &str, engine: &str, size: &str) {
        ok(["create", self.path(name).to_str().unwrap(), engine, size, "--force"]);
    }

    /// Serves the store, or another pool, where the log looks for it.
    fn serve_store(&self, name: &str, more: &[&str]) -> Server {
        Server::start(&self.path(name), &self.path("store.socket"), more)
    }

    fn backing(&self) -> String {
        let socket = self.path("store.socket");
        format!("--backing=nbd+unix:///?socket={}&timeout=20s", socket.display())
    }

    fn serve_log(&self) -> Server {
        Server::start(&self.path("log"), &self.path("log.socket"), &[&self.backing()])
    }

    /// What `serve` of the log says when it refuses.
    fn refusal(&self, backing: &str) -> String {
        let (pool, socket) = (self.path("log"), self.path("log.socket"));
        let nbd = format!("--nbd=unix:{}", socket.display());
        let output = run(["serve", pool.to_str().unwrap(), &nbd, backing]);
        assert!([1, 2].map(Some).contains(&output.status.code()), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

fn byte_of(lba: usize) -> u8 {
    u8::try_from(lba % 251).unwrap() + 1
}

fn kill(server: Server) {
    kill_process(server.pid(), Signal::KILL).unwrap();
    server.wait_killed();
}

/// The server behind the log dies in the middle of the work, twice.
#[test]
fn a_backing_that_is_killed_and_comes_back_gets_everything() {
    let scene = Scene::new();
    let mut store = scene.serve_store("store", &[]);
    let log = scene.serve_log();
    let mut client = Client::connect(&scene.path("log.socket")).unwrap();
    for lba in 0..BLOCKS {
        if lba == 1100 || lba == 2300 {
            kill(store);
            store = scene.serve_store("store", &[]);
        }
        client.send_write(0, (lba * BLOCK_BYTES) as u64, &[byte_of(lba); BLOCK_BYTES]).unwrap();
        assert_eq!(client.receive().unwrap(), (0, 0), "block {lba}");
    }
    drop(client);
    let (status, _) = log.stop(Signal::TERM);
    assert!(status.success(), "all of the log is in the backing: {status}");
    let mut client = Client::connect(&scene.path("store.socket")).unwrap();
    for lba in 0..BLOCKS {
        let block = client.read((lba * BLOCK_BYTES) as u64, BLOCK_BYTES).unwrap();
        assert_eq!(block, [byte_of(lba); BLOCK_BYTES], "block {lba}");
    }
    drop(store);
}

#[test]
fn a_wrong_or_missing_export_is_refused_with_the_reason() {
    let scene = Scene::new();
    let error = scene.refusal(&scene.backing());
    assert!(error.contains("connect to the unix socket"), "nobody is there: {error}");
    let error = scene.refusal("--backing=nbd+unix:///x");
    assert!(error.contains("no socket=PATH") && error.contains("nbd://HOST"), "{error}");
    let store = scene.serve_store("store", &["--read-only"]);
    let error = scene.refusal(&scene.backing());
    assert!(error.contains("exports it read-only"), "{error}");
    drop(store);
    let store = scene.serve_store("store", &["--export=disk"]);
    let error = scene.refusal(&scene.backing().replace("///", "///other"));
    assert!(error.contains("no export of this name"), "{error}");
    kill(store);
    let store = scene.serve_store("store", &[]);
    let log = scene.serve_log();
    let mut client = Client::connect(&scene.path("log.socket")).unwrap();
    client.send_write(0, 0, &[7; BLOCK_BYTES]).unwrap();
    assert_eq!(client.receive().unwrap(), (0, 0));
    kill(log);
    drop(store);
    scene.create("larger", "--engine=btt", "--size=40M");
    let store = scene.serve_store("larger", &[]);
    let error = scene.refusal(&scene.backing());
    assert!(error.contains("its size is 39864K, and was 31680K"), "{error}");
    drop(store);
    let recover = ["recover".into(), scene.path("log")];
    assert_eq!(run(&recover).status.code(), Some(1), "no server is there");
    let _store = scene.serve_store("store", &[]);
    ok(&recover);
    let mut client = Client::connect(&scene.path("store.socket")).unwrap();
    assert_eq!(client.read(0, BLOCK_BYTES).unwrap(), [7; BLOCK_BYTES]);
}

#[test]
fn help_lists_the_backings() {
    let text = ok(["help", "backings"]);
    for word in [
        "file:PATH",
        "nbd://HOST",
        "nbd+unix:///EXPORT?socket=PATH",
        "null:SIZE",
        "delay:TIME,URL",
        "identity",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert_eq!(ok(["backings"]).trim_end(), text.trim_end());
}
