//! A cache pool and its backing from the first use to the last: a backing that has data, one whose
//! server dies and comes back, copies on another host, and a backing that is used alone again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::behind::{Scene, kill, read, write};
use crate::nbd::Client;
use crate::support::{Server, await_said, ok, run, tidegate};

const BLOCK_BYTES: usize = 4096;
/// Blocks of a backing: twice as many as the pool has slots.
const BLOCKS: usize = 4096;
const REQUEST_BYTES: usize = 64 * BLOCK_BYTES;
/// The error number of a request that the backing fails.
const EIO: u32 = 5;
/// For what takes some seconds at most.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What the backing has before there is a cache.
fn byte_before(lba: usize) -> u8 {
    u8::try_from(lba % 250).unwrap() + 1
}

/// What the backing has before there is a cache, but with the byte 255 in each block of `written`.
fn content(written: impl IntoIterator<Item = usize>) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..BLOCKS).flat_map(|lba| [byte_before(lba); BLOCK_BYTES]).collect();
    for lba in written {
        bytes[lba * BLOCK_BYTES..][..BLOCK_BYTES].fill(255);
    }
    bytes
}

/// Puts data on the file `disk`.
fn fill_disk(scene: &Scene) {
    std::fs::write(scene.path("disk"), content([])).unwrap();
}

/// All that `client` reads.
fn read_all(client: &mut Client, bytes: usize) -> Vec<u8> {
    let offsets = (0..bytes as u64).step_by(REQUEST_BYTES);
    offsets.flat_map(|offset| client.read(offset, REQUEST_BYTES).unwrap()).collect()
}

fn assert_holds(found: &[u8], expected: &[u8]) {
    assert_eq!(found.len(), expected.len());
    let mut blocks = found.chunks(BLOCK_BYTES).zip(expected.chunks(BLOCK_BYTES));
    let differs = blocks.position(|(found, expected)| found != expected);
    assert_eq!(differs, None, "the first block that is not as it should be");
}

fn assert_reads(scene: &Scene, expected: &[u8]) {
    assert_holds(&read_all(&mut scene.client(), expected.len()), expected);
}

fn assert_file(path: &Path, expected: &[u8]) {
    assert_holds(&std::fs::read(path).unwrap(), expected);
}

fn stop(server: Server) {
    let (status, _) = server.stop(Signal::TERM);
    assert!(status.success(), "{status}");
}

#[test]
fn a_backing_with_data_keeps_it_and_gets_what_is_written() {
    let scene = Scene::new("cache");
    fill_disk(&scene);
    let server = scene.serve("disk", &[]);
    assert_reads(&scene, &content([]));
    let written = || (0..BLOCKS).step_by(3);
    let mut client = scene.client();
    written().for_each(|lba| write(&mut client, lba, 255));
    assert_reads(&scene, &content(written()));
    kill(server);
    let server = scene.serve("disk", &[]);
    assert_reads(&scene, &content(written()));
    stop(server);
    assert_file(&scene.path("disk"), &content(written()));
    ok(["check".as_ref(), scene.pool().as_os_str()]);
}

/// A backing is used alone after a clean stop, and after a flush of a server that is killed then.
/// What another program has made of it meanwhile is what a server finds next.
#[test]
fn a_backing_that_was_flushed_has_all_by_itself_and_may_be_changed() {
    let scene = Scene::new("cache");
    let mut expected = content([]);
    std::fs::write(scene.path("disk"), &expected).unwrap();
    for is_stopped in [true, false] {
        let server = scene.serve("disk", &[]);
        assert_reads(&scene, &expected);
        (0..500).for_each(|lba| write(&mut scene.client(), lba, 255));
        expected[..500 * BLOCK_BYTES].fill(255);
        if is_stopped {
            stop(server);
        } else {
            ok(["flush".as_ref(), scene.pool().as_os_str()]);
            kill(server);
        }
        assert_file(&scene.path("disk"), &expected);
        // Each block: the cache compares only some of its pages with the backing.
        expected = expected.iter().map(|byte| !byte).collect();
        std::fs::write(scene.path("disk"), &expected).unwrap();
    }
    let server = scene.serve("disk", &[]);
    let banner = server.banner.join("\n");
    assert!(banner.contains("gave up") && banner.contains("changed since"), "{banner}");
    assert_reads(&scene, &expected);
    stop(server);
}

/// Another host has a copy of pool and backing, at another path and with other inodes, with the
/// extended attributes of the files or without.
#[test]
fn copies_of_pool_and_backing_are_taken_up_on_another_host_with_all_that_was_written() {
    for preserve in ["--preserve=xattr", "--no-preserve=xattr"] {
        let scene = Scene::new("cache");
        fill_disk(&scene);
        let server = scene.serve("disk", &[]);
        assert_reads(&scene, &content([]));
        let written = || (0..1000).step_by(2);
        written().for_each(|lba| write(&mut scene.client(), lba, 255));
        kill(server);
        let old_disk = std::fs::read(scene.path("disk")).unwrap();

        let host = scene.copied(preserve);
        let refused = host.refusal(&[&host.backing("disk")]);
        assert!(refused.contains("dirty pages of another backing"), "{refused}");
        assert!(refused.contains("--force writes the dirty pages to this one"), "{refused}");
        assert_file(&host.path("disk"), &old_disk);
        let server = host.serve("disk", &["--force"]);
        let mut client = host.client();
        assert_holds(&read_all(&mut client, BLOCKS * BLOCK_BYTES), &content(written()));
        write(&mut client, 1, 255);
        kill(server);
        // The pool knows its new backing.
        stop(host.serve("disk", &[]));
        assert_file(&host.path("disk"), &content(written().chain([1])));
        assert_file(&scene.path("disk"), &old_disk);
    }
}

#[test]
fn a_second_server_of_a_pool_is_refused_by_any_of_its_names() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &[]);
    write(&mut scene.client(), 3, 7);
    std::fs::hard_link(scene.pool(), scene.path("link")).unwrap();
    for name in ["pool", "link"] {
        let (pool, socket) = (scene.path(name), scene.path("second-socket"));
        let nbd = format!("--nbd=unix:{}", socket.display());
        let output = run(["serve", pool.to_str().unwrap(), &nbd, &scene.backing("other")]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(pool.to_str().unwrap()) && error.contains("in use"), "{error}");
    }
    assert_eq!(read(&mut scene.client(), 3), 7);
    stop(server);
    assert_eq!((scene.in_file("disk", 3), scene.in_file("other", 3)), (7, 0));
}

/// A cache before an export of another server, a disk with a volatile cache: what it was not told
/// to flush is lost when its server is killed.
struct Remote {
    scene: Scene,
}

impl Remote {
    fn new() -> Self {
        let remote = Self { scene: Scene::new("cache") };
        ok(["create", remote.path("store").to_str().unwrap(), "--engine=raw", "--size=24M"]);
        remote
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scene.path(name)
    }

    fn serve_store(&self, socket: &str) -> Server {
        Server::start(&self.path("store"), &self.path(socket), &["--dram=lru:32M"])
    }

    fn backing(&self, socket: &str) -> String {
        let socket = self.path(socket);
        format!("--backing=nbd+unix:///?socket={}&timeout=1s", socket.display())
    }

    /// Serves the cache before the store that listens at `socket`; it writes its standard error
    /// into a file.
    fn serve(&self, socket: &str) -> Server {
        let mut command = tidegate();
        command.arg("serve").arg(self.scene.pool()).arg(self.backing(socket));
        command.arg(format!("--nbd=unix:{}", self.path("socket").display()));
        Server::spawn(command.stderr(File::create(self.path("stderr")).unwrap()))
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.path("stderr")).unwrap()
    }

    /// What `tidegate flush` says if it fails.
    fn flush(&self) -> Result<(), String> {
        let output = run(["flush".as_ref(), self.scene.pool().as_os_str()]);
        let said = String::from_utf8(output.stderr).unwrap();
        if output.status.success() { Ok(()) } else { Err(said) }
    }

    /// Kinds of requests of which standard error says that they `fail`, or that they `work again`.
    fn told(&self, what: &str) -> Vec<&'static str> {
        let said = self.said();
        let is_told = |kind: &&str| said.contains(&format!("backing: {kind} {what}"));
        ["reads", "writes", "flushes"].into_iter().filter(is_told).collect()
    }
}

/// Sends a flush, and returns the error number of the answer.
fn flush(client: &mut Client) -> u32 {
    client.send_flush(0).unwrap();
    client.receive().unwrap().1
}

#[test]
fn a_backing_that_dies_and_comes_back_gets_everything_and_its_absence_is_told() {
    let remote = Remote::new();
    let store = remote.serve_store("store-socket");
    let server = remote.serve("store-socket");
    let mut client = remote.scene.client();
    (0..1100).for_each(|lba| write(&mut client, lba, byte_before(lba)));
    kill(store);
    (1100..1400).for_each(|lba| write(&mut client, lba, byte_before(lba)));
    let reason = remote.flush().expect_err("the backing is gone");
    assert!(reason.contains("connect to the unix socket"), "{reason}");
    assert_eq!(flush(&mut client), 0, "all is durable in the cache");
    let is_told = |said: &str| said.contains("backing: writes fail: ");
    let said = await_said(&remote.path("stderr"), is_told, std::thread::yield_now);
    assert!(said.contains("store-socket"), "it names the backing: {said}");
    (1400..1600).for_each(|lba| write(&mut client, lba, byte_before(lba)));
    (0..1600).for_each(|lba| assert_eq!(read(&mut client, lba), byte_before(lba)));

    let store = remote.serve_store("store-socket");
    let deadline = Instant::now() + TIMEOUT;
    // Bytes that differ each time: what the cache has already it does not write again.
    for byte in (0..=255).cycle() {
        if remote.told("work again") == remote.told("fail: ") {
            break;
        }
        write(&mut client, 0, byte);
        let flushed = remote.flush();
        assert!(Instant::now() < deadline, "{flushed:?}: {}", remote.said());
    }
    write(&mut client, 0, byte_before(0));
    assert_eq!((remote.flush(), flush(&mut client)), (Ok(()), 0));
    // All is in the store, also after the next kill of both.
    kill(store);
    kill(server);
    let _store = remote.serve_store("store-socket");
    let mut client = Client::connect(&remote.path("store-socket")).unwrap();
    (0..1600).for_each(|lba| assert_eq!(read(&mut client, lba), byte_before(lba)));
}

/// A server that cannot be started without its backing keeps what it has. The backing may come back
/// at another address: it is told by its export.
#[test]
fn a_cache_whose_backing_is_gone_waits_for_it_with_its_pages() {
    let remote = Remote::new();
    let store = remote.serve_store("store-socket");
    let server = remote.serve("store-socket");
    let mut client = remote.scene.client();
    (0..100).for_each(|lba| write(&mut client, lba, byte_before(lba)));
    kill(store);
    kill(server);
    let pool = std::fs::read(remote.scene.pool()).unwrap();
    let refused = remote.scene.refusal(&[&remote.backing("store-socket")]);
    assert!(refused.contains("connect to the unix socket"), "{refused}");
    assert!(remote.flush().is_err());
    assert!(std::fs::read(remote.scene.pool()).unwrap() == pool, "the pool was changed");
    let store = remote.serve_store("elsewhere");
    let server = remote.serve("elsewhere");
    let mut client = remote.scene.client();
    (0..100).for_each(|lba| assert_eq!(read(&mut client, lba), byte_before(lba)));
    stop(server);
    kill(store);
    let _store = remote.serve_store("store-socket");
    let mut client = Client::connect(&remote.path("store-socket")).unwrap();
    (0..100).for_each(|lba| assert_eq!(read(&mut client, lba), byte_before(lba)));
}

/// Writes that reached the backing only, and were not flushed there before its server died, are
/// lost: the next flush says so, and the client writes again, as after a failed flush of a disk.
/// What a mode keeps in the cache is not lost.
#[test]
fn a_flush_tells_of_writes_that_a_dead_backing_has_lost() {
    for (mode, is_kept) in [("wt", true), ("wa", false), ("wi", false), ("pt", false)] {
        let remote = Remote::new();
        let store = remote.serve_store("store-socket");
        let server = remote.serve("store-socket");
        ok(["set", remote.scene.pool().to_str().unwrap(), &format!("mode={mode}")]);
        let mut client = remote.scene.client();
        let write_all = |client: &mut Client| (0..50).for_each(|lba| write(client, lba, 7));
        write_all(&mut client);
        kill(store);
        let store = remote.serve_store("store-socket");
        assert_eq!(flush(&mut client), EIO, "{mode}");
        if !is_kept {
            write_all(&mut client);
        }
        assert_eq!(flush(&mut client), 0, "{mode}: it is told once");
        (0..50).for_each(|lba| assert_eq!(read(&mut client, lba), 7, "{mode}"));
        kill(store);
        kill(server);
        let store = remote.serve_store("store-socket");
        let server = remote.serve("store-socket");
        let mut client = remote.scene.client();
        (0..50).for_each(|lba| assert_eq!(read(&mut client, lba), 7, "{mode}, after a kill"));
        drop((server, store));
    }
}
