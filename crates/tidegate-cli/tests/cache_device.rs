//! A cache pool as a block device: what it needs, what it refuses, and where its data is
//! afterwards.

#[path = "support/nbd.rs"]
mod nbd;
mod support;

use std::path::PathBuf;

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use nbd::Client;
use support::{Server, ok, run, scratch};

const BLOCK_BYTES: usize = 4096;

/// A cache pool and files to put behind it.
struct Scene {
    dir: TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self { dir: scratch() };
        ok([
            "create".as_ref(),
            scene.pool().as_os_str(),
            "--engine=cache".as_ref(),
            "--size=8M".as_ref(),
        ]);
        for name in ["disk", "other"] {
            let file = std::fs::File::create_new(scene.path(name)).unwrap();
            file.set_len(16 << 20).unwrap();
        }
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn pool(&self) -> PathBuf {
        self.path("pool")
    }

    fn backing(&self, name: &str) -> String {
        format!("--backing={}", self.path(name).display())
    }

    fn serve(&self, backing: &str, more: &[&str]) -> Server {
        let backing = self.backing(backing);
        Server::start(&self.pool(), &self.path("socket"), &[&[backing.as_str()], more].concat())
    }

    fn client(&self) -> Client {
        Client::connect(&self.path("socket")).expect("the server is ready")
    }

    fn in_disk(&self, name: &str, lba: usize) -> u8 {
        std::fs::read(self.path(name)).unwrap()[lba * BLOCK_BYTES]
    }

    /// What `serve` with these arguments says when it refuses.
    fn refusal(&self, more: &[&str]) -> String {
        let (pool, socket) = (self.pool(), self.path("socket"));
        let nbd = format!("--nbd=unix:{}", socket.display());
        let output = run([&["serve", pool.to_str().unwrap(), &nbd], more].concat());
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    }

    fn command(&self, name: &str) {
        ok([name.as_ref(), self.pool().as_os_str()]);
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

fn kill(server: Server) {
    kill_process(server.pid(), Signal::KILL).unwrap();
    server.wait_killed();
}

#[test]
fn a_write_is_in_the_cache_after_a_kill_and_in_the_backing_after_a_flush() {
    let scene = Scene::new();
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    (0..20).for_each(|lba| write(&mut client, lba, 7));
    kill(server);
    assert_eq!(scene.in_disk("disk", 3), 0, "nothing was cleaned yet");
    scene.command("check");
    let server = scene.serve("disk", &[]);
    let banner = server.banner.join("\n");
    assert!(banner.contains("20 pages, 20 of them dirty"), "{banner}");
    let mut client = scene.client();
    (0..20).for_each(|lba| assert_eq!(read(&mut client, lba), 7));
    scene.command("flush");
    assert_eq!(scene.in_disk("disk", 19), 7, "the server goes on and has cleaned all");
    write(&mut client, 3, 8);
    kill(server);
    // Without a server: the pool knows its backing.
    scene.command("flush");
    assert_eq!(scene.in_disk("disk", 3), 8);
    let server = scene.serve("disk", &[]);
    let banner = server.banner.join("\n");
    assert!(banner.contains("20 pages, 0 of them dirty"), "clean pages stay: {banner}");
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn sigterm_leaves_all_in_the_backing() {
    let scene = Scene::new();
    let server = scene.serve("disk", &[]);
    write(&mut scene.client(), 5, 9);
    assert!(server.stop(Signal::TERM).0.success());
    assert_eq!(scene.in_disk("disk", 5), 9);
    // Nothing is dirty: it may serve another backing, and its pages are not that one's.
    let server = scene.serve("other", &[]);
    assert_eq!(read(&mut scene.client(), 5), 0);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn the_mode_is_chosen_at_start_and_changed_while_it_runs() {
    let scene = Scene::new();
    let server = scene.serve("disk", &["--mode=wt"]);
    let mut client = scene.client();
    write(&mut client, 1, 1);
    assert_eq!(scene.in_disk("disk", 1), 1);
    let set = |value: &str| ok(["set".as_ref(), scene.pool().as_os_str(), value.as_ref()]);
    set("mode=wb");
    write(&mut client, 1, 2);
    assert_eq!(scene.in_disk("disk", 1), 1);
    set("mode=wi+flush");
    assert_eq!(scene.in_disk("disk", 1), 2);
    write(&mut client, 1, 3);
    assert_eq!((scene.in_disk("disk", 1), read(&mut client, 1)), (3, 3));
    kill(server);
    let error = scene.refusal(&[&scene.backing("disk"), "--mode=fast"]);
    assert!(error.contains("wb, wt, wa, wi, wo or pt"), "{error}");
}

#[test]
fn a_wrong_or_missing_backing_is_refused() {
    let scene = Scene::new();
    let error = scene.refusal(&[]);
    assert!(error.contains("--backing"), "{error}");
    let error = scene.refusal(&[&scene.backing("disk"), "--read-only"]);
    assert!(error.contains("--read-only"), "{error}");
    let server = scene.serve("disk", &[]);
    write(&mut scene.client(), 3, 7);
    kill(server);
    let error = scene.refusal(&[&scene.backing("other")]);
    assert!(error.contains("disk") && error.contains("--force"), "{error}");
    let server = scene.serve("other", &["--force"]);
    assert!(server.stop(Signal::TERM).0.success());
    assert_eq!((scene.in_disk("other", 3), scene.in_disk("disk", 3)), (7, 0));
}
