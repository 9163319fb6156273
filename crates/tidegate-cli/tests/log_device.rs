//! A log pool as a block device: what it needs, what it refuses, and where its data is afterwards.

#[path = "support/nbd.rs"]
mod nbd;
mod support;

use std::path::{Path, PathBuf};

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use nbd::Client;
use support::{Server, ok, run, scratch};

const BLOCK_BYTES: usize = 4096;

/// A log pool and files to put behind it.
struct Scene {
    dir: TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self { dir: scratch() };
        let pool = scene.path("pool");
        ok(["create", pool.to_str().unwrap(), "--engine=log", "--size=8M"]);
        for name in ["disk", "other"] {
            let file = std::fs::File::create_new(scene.path(name)).unwrap();
            file.set_len(16 << 20).unwrap();
        }
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn backing(&self, name: &str) -> String {
        format!("--backing={}", self.path(name).display())
    }

    fn serve(&self, backing: &str, more: &[&str]) -> Server {
        let backing = self.backing(backing);
        let args = [&[backing.as_str()], more].concat();
        Server::start(&self.path("pool"), &self.path("socket"), &args)
    }

    fn client(&self) -> Client {
        Client::connect(&self.path("socket")).expect("the server is ready")
    }

    /// What `serve` with these arguments says when it refuses.
    fn refusal(&self, more: &[&str]) -> String {
        let nbd = format!("--nbd=unix:{}", self.path("socket").display());
        let pool = self.path("pool");
        let args = [&["serve", pool.to_str().unwrap(), &nbd], more].concat();
        let output = run(args);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    }
}

fn write(client: &mut Client, lba: usize, byte: u8) {
    client.send_write(0, (lba * BLOCK_BYTES) as u64, &[byte; BLOCK_BYTES]).unwrap();
    assert_eq!(client.receive().unwrap(), (0, 0));
}

fn read(client: &mut Client, lba: usize) -> u8 {
    let block = client.read((lba * BLOCK_BYTES) as u64, BLOCK_BYTES).unwrap();
    assert!(block.iter().all(|byte| *byte == block[0]), "block {lba} is torn");
    block[0]
}

fn in_file(path: &Path, lba: usize) -> u8 {
    std::fs::read(path).unwrap()[lba * BLOCK_BYTES]
}

fn kill(server: Server) {
    kill_process(server.pid(), Signal::KILL).unwrap();
    server.wait_killed();
}

#[test]
fn it_wants_a_backing_and_other_engines_none() {
    let scene = Scene::new();
    let error = scene.refusal(&[]);
    assert!(error.contains("--backing"), "{error}");
    let error = scene.refusal(&[&scene.backing("missing")]);
    assert!(error.contains("missing"), "{error}");
    let error = scene.refusal(&[&scene.backing("disk"), "--read-only"]);
    assert!(error.contains("--read-only"), "{error}");
    std::fs::remove_file(scene.path("pool")).unwrap();
    let pool = scene.path("pool");
    ok(["create", pool.to_str().unwrap(), "--engine=raw", "--size=8M"]);
    let error = scene.refusal(&[&scene.backing("disk")]);
    assert!(error.contains("raw pool"), "{error}");
}

#[test]
fn a_write_is_in_the_log_after_a_kill_and_in_the_backing_after_sigterm() {
    let scene = Scene::new();
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    write(&mut client, 3, 7);
    kill(server);
    assert_eq!(in_file(&scene.path("disk"), 3), 0, "nothing was cleaned yet");
    let server = scene.serve("disk", &[]);
    let banner = server.banner.join("\n");
    assert!(banner.contains("1 write (") && banner.contains("backing"), "{banner}");
    assert_eq!(read(&mut scene.client(), 3), 7);
    let (status, _) = server.stop(Signal::TERM);
    assert!(status.success(), "{status}");
    assert_eq!(in_file(&scene.path("disk"), 3), 7);
    // The log is empty: it may serve another backing.
    let server = scene.serve("other", &[]);
    assert_eq!(read(&mut scene.client(), 3), 0);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn a_log_with_data_of_another_backing_is_refused_unless_forced() {
    let scene = Scene::new();
    let server = scene.serve("disk", &[]);
    write(&mut scene.client(), 3, 7);
    kill(server);
    let error = scene.refusal(&[&scene.backing("other")]);
    assert!(error.contains("disk") && error.contains("--force"), "{error}");
    std::fs::rename(scene.path("disk"), scene.path("moved")).unwrap();
    kill(scene.serve("moved", &[]));
    let server = scene.serve("other", &["--force"]);
    assert_eq!(read(&mut scene.client(), 3), 7);
    assert!(server.stop(Signal::TERM).0.success());
    assert_eq!(in_file(&scene.path("other"), 3), 7);
    assert_eq!(in_file(&scene.path("moved"), 3), 0);
}

/// The log knows the name of its backing: `recover` destages to it without a server, and `run`,
/// which has no use for such records, refuses the pool.
#[test]
fn recover_destages_too() {
    let scene = Scene::new();
    let server = scene.serve("disk", &[]);
    write(&mut scene.client(), 3, 7);
    kill(server);
    let pool = scene.path("pool");
    let refused =
        support::run(["run".as_ref(), "--pool".as_ref(), pool.as_os_str(), "true".as_ref()]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("writes to the device"), "{said}");
    ok(["recover".as_ref(), pool.as_os_str()]);
    assert_eq!(in_file(&scene.path("disk"), 3), 7);
    assert_eq!(std::fs::metadata(scene.path("disk")).unwrap().len(), 16 << 20);
    let server = scene.serve("other", &[]);
    assert!(server.stop(Signal::TERM).0.success());
}

/// Its records would go over its own header.
#[test]
fn a_log_is_not_its_own_backing() {
    let scene = Scene::new();
    std::fs::hard_link(scene.path("pool"), scene.path("link")).unwrap();
    std::os::unix::fs::symlink(scene.path("pool"), scene.path("symlink")).unwrap();
    let before = std::fs::read(scene.path("pool")).unwrap();
    for name in ["pool", "link", "symlink"] {
        for more in [&[][..], &["--force"]] {
            let error = scene.refusal(&[&[&*scene.backing(name)], more].concat());
            assert!(error.contains("the log pool itself"), "{name}: {error}");
        }
    }
    assert!(std::fs::read(scene.path("pool")).unwrap() == before, "the pool was changed");
}

#[test]
fn a_backing_has_one_log_at_a_time() {
    let scene = Scene::new();
    let second = scene.path("second");
    ok(["create", second.to_str().unwrap(), "--engine=log", "--size=8M"]);
    let server = scene.serve("disk", &[]);
    let nbd = format!("--nbd=unix:{}", scene.path("another").display());
    let serve_second = ["serve", second.to_str().unwrap(), &nbd, &scene.backing("disk")];
    let output = run(serve_second);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("disk") && error.contains("in use"), "{error}");
    // Who serves the backing as a pool of its own is as much in the way.
    let other = scene.path("other");
    ok(["create", other.to_str().unwrap(), "--engine=raw", "--size=16M"]);
    assert!(server.stop(Signal::TERM).0.success());
    let of_other = Server::start(&other, &scene.path("another"), &[]);
    let error = scene.refusal(&[&scene.backing("other"), "--force"]);
    assert!(error.contains("other") && error.contains("in use"), "{error}");
    assert!(of_other.stop(Signal::TERM).0.success());
    let server = scene.serve("disk", &[]);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn a_backing_that_holds_a_pool_is_refused_unless_forced() {
    for engine in ["btt", "raw", "log"] {
        let scene = Scene::new();
        let disk = scene.path("disk");
        let made = format!("--engine={engine}");
        ok(["create", disk.to_str().unwrap(), &made, "--size=17M", "--force"]);
        let before = std::fs::read(&disk).unwrap();
        let error = scene.refusal(&[&scene.backing("disk")]);
        let found = format!("holds a {engine} pool");
        assert!(error.contains(&found) && error.contains("--force"), "{error}");
        assert!(std::fs::read(&disk).unwrap() == before, "the backing was changed");
        let server = scene.serve("disk", &["--force"]);
        assert!(server.stop(Signal::TERM).0.success());
    }
}

/// Its client has made one there.
#[test]
fn a_backing_of_which_the_log_has_records_may_hold_a_pool() {
    let scene = Scene::new();
    let server = scene.serve("disk", &[]);
    write(&mut scene.client(), 3000, 7);
    kill(server);
    let disk = scene.path("disk");
    ok(["create", disk.to_str().unwrap(), "--engine=raw", "--size=16M", "--force"]);
    let server = scene.serve("disk", &[]);
    assert_eq!(read(&mut scene.client(), 3000), 7);
    assert!(server.stop(Signal::TERM).0.success());
    let error = scene.refusal(&[&scene.backing("disk")]);
    assert!(error.contains("holds a raw pool"), "{error}");
}

#[test]
fn a_backing_without_a_block_is_refused() {
    let scene = Scene::new();
    for bytes in [0, 100] {
        std::fs::write(scene.path("disk"), vec![7; bytes]).unwrap();
        let error = scene.refusal(&[&scene.backing("disk")]);
        assert!(error.contains("not one block"), "{bytes}: {error}");
    }
    std::fs::create_dir(scene.path("directory")).unwrap();
    for (name, cause) in [("directory", "Is a directory"), ("missing", "No such file")] {
        let error = scene.refusal(&[&scene.backing(name)]);
        assert_eq!(error.to_lowercase().matches(&cause.to_lowercase()).count(), 1, "{error}");
    }
}
