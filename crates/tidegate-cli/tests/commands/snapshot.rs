//! `tidegate snapshot`: a copy of a pool that is being written is a state of one instant, and so is
//! one of the backing of a pool.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::nbd::Client;
use crate::support::{Server, ok, run, scratch};

const BLOCKS: u64 = 1000;
const BLOCK_BYTES: usize = 4096;

struct Scene {
    dir: TempDir,
}

impl Scene {
    fn new(engine: &str) -> Self {
        let scene = Self { dir: scratch() };
        scene.create("pool", engine, "32M");
        scene
    }

    /// A pool smaller than what is written to it, and a file of zeroes as its backing.
    fn with_backing(engine: &str) -> Self {
        let scene = Self { dir: scratch() };
        scene.create("pool", engine, "2M");
        std::fs::File::create_new(scene.text("backing")).unwrap().set_len(64 << 20).unwrap();
        scene
    }

    fn create(&self, name: &str, engine: &str, size: &str) {
        ok(["create", &self.text(name), &format!("--engine={engine}"), "--size", size]);
    }

    fn text(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    fn serve(&self, pool: &str, args: &[&str]) -> Server {
        Server::start(Path::new(&self.text(pool)), Path::new(&self.text("socket")), args)
    }

    fn client(&self) -> Client {
        Client::connect(Path::new(&self.text("socket"))).expect("the server is ready")
    }
}

/// Writes 1, 2, 3 and so on, each to the next block, one after the other; `last` is the newest
/// that was acknowledged.
fn count(mut client: Client, last: &AtomicU64, stop: &AtomicBool) {
    for number in 1_u64.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let block = number.to_le_bytes().repeat(BLOCK_BYTES / 8);
        client.send_write(number, number % BLOCKS * 4096, &block).unwrap();
        assert_eq!(client.receive().unwrap(), (number, 0));
        last.store(number, Ordering::SeqCst);
    }
}

/// The numbers in the blocks of the pool that is served.
fn numbers(mut client: Client) -> Vec<u64> {
    let blocks = (0..BLOCKS).map(|block| client.read(block * 4096, BLOCK_BYTES).unwrap());
    let number = |block: Vec<u8>| {
        let words: Vec<_> = block.chunks(8).collect();
        assert!(words.iter().all(|word| word == &words[0]), "a torn block");
        u64::from_le_bytes(words[0].try_into().unwrap())
    };
    blocks.map(number).collect()
}

/// Copies the pool of `scene`, or its backing, while blocks are written; `serve_copy` serves one.
fn copies_are_of_one_instant(scene: &Scene, args: &[&str], serve_copy: impl Fn(&str) -> Server) {
    const COPIES: usize = 4;
    let server = scene.serve("pool", args);
    let (last, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let client = scene.client();
    let bounds: Vec<_> = std::thread::scope(|scope| {
        scope.spawn(|| count(client, &last, &stop));
        let copy = |at: usize| {
            while last.load(Ordering::SeqCst) < BLOCKS * (at as u64 + 1) {
                std::thread::yield_now();
            }
            let before = last.load(Ordering::SeqCst);
            ok(["snapshot", &scene.text("pool"), &scene.text(&format!("copy{at}"))]);
            (before, last.load(Ordering::SeqCst))
        };
        let bounds = (0..COPIES).map(copy).collect();
        stop.store(true, Ordering::Relaxed);
        bounds
    });
    assert!(server.stop(Signal::TERM).0.success());
    for (at, (before, after)) in bounds.into_iter().enumerate() {
        let server = serve_copy(&format!("copy{at}"));
        let found = numbers(scene.client());
        let newest = *found.iter().max().unwrap();
        // The write after the last that was acknowledged may be there.
        assert!((before..=after + 1).contains(&newest), "{newest}: not {before} to {after}");
        for (block, number) in (0..BLOCKS).zip(found) {
            let expected = newest - (newest + BLOCKS - block) % BLOCKS;
            assert_eq!(number, expected, "block {block} of a copy at {newest}");
        }
        assert!(server.stop(Signal::TERM).0.success());
    }
}

fn copies_of_a_pool_are_of_one_instant(args: &[&str]) {
    let scene = Scene::new("btt");
    copies_are_of_one_instant(&scene, args, |copy| {
        ok(["check", &scene.text(copy)]);
        scene.serve(copy, &[])
    });
}

#[test]
fn a_copy_of_a_pool_is_of_one_instant() {
    copies_of_a_pool_are_of_one_instant(&[]);
}

#[test]
fn a_copy_has_what_a_dram_tier_had() {
    copies_of_a_pool_are_of_one_instant(&["--dram=lru:16M"]);
}

/// A copy is the whole device without the pool: another pool is put before it.
fn copies_of_a_backing_are_of_one_instant(engine: &str, more: &[&str]) {
    let scene = Scene::with_backing(engine);
    let backing = |name: &str| format!("--backing={}", scene.text(name));
    let own = backing("backing");
    let args = [&[own.as_str()], more].concat();
    copies_are_of_one_instant(&scene, &args, |copy| {
        let pool = format!("{copy}.pool");
        scene.create(&pool, "log", "2M");
        scene.serve(&pool, &[&backing(copy)])
    });
}

#[test]
fn a_copy_of_a_backing_has_what_a_log_had() {
    copies_of_a_backing_are_of_one_instant("log", &[]);
}

#[test]
fn a_copy_of_a_backing_has_what_a_cache_had() {
    copies_of_a_backing_are_of_one_instant("cache", &["--mode=wb"]);
}

#[test]
fn a_copy_of_a_backing_has_what_a_dram_tier_before_a_log_had() {
    copies_of_a_backing_are_of_one_instant("log", &["--dram=lru:2M"]);
}

/// Where writes wait for a flush there is no copy, which would have a part of them, and the attempt
/// commits nothing.
#[test]
fn a_copy_under_atomic_flush_waits_for_a_flush() {
    let scene = Scene::with_backing("cache");
    let backing = format!("--backing={}", scene.text("backing"));
    let args = [backing.as_str(), "--mode=wb", "--atomic-flush"];
    let server = scene.serve("pool", &args);
    let mut client = scene.client();
    let write = |client: &mut Client, value: u8| {
        for block in 0..3 {
            client.send_write(1, block * 4096, &[value; BLOCK_BYTES]).unwrap();
            assert_eq!(client.receive().unwrap(), (1, 0));
        }
    };
    write(&mut client, 1);
    client.send_flush(2).unwrap();
    assert_eq!(client.receive().unwrap(), (2, 0));
    ok(["snapshot", &scene.text("pool"), &scene.text("copy")]);
    write(&mut client, 2);
    let output = run(["snapshot", &scene.text("pool"), &scene.text("none")]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("3 pages wait for the flush"), "{error}");
    assert!(!Path::new(&scene.text("none")).exists());
    let copy = std::fs::read(scene.text("copy")).unwrap();
    assert!(copy[..3 * BLOCK_BYTES].iter().all(|byte| *byte == 1), "as at the flush");
    assert_eq!(copy.len(), 64 << 20);
    rustix::process::kill_process(server.pid(), Signal::KILL).unwrap();
    server.wait_killed();
    let server = scene.serve("pool", &args);
    let kept = scene.client().read(0, 3 * BLOCK_BYTES).unwrap();
    assert!(kept.iter().all(|byte| *byte == 1), "the copy committed what no flush had");
    assert!(server.stop(Signal::TERM).0.success());
}

/// A copy of a backing that is mostly holes takes the space of the rest.
#[test]
fn a_copy_of_a_backing_has_its_holes() {
    use std::os::unix::fs::MetadataExt;
    let scene = Scene::with_backing("log");
    let server = scene.serve("pool", &[&format!("--backing={}", scene.text("backing"))]);
    let mut client = scene.client();
    client.send_write(1, 32 << 20, &[7; BLOCK_BYTES]).unwrap();
    assert_eq!(client.receive().unwrap(), (1, 0));
    let said = ok(["snapshot", &scene.text("pool"), &scene.text("copy")]);
    assert!(said.contains("a copy of 64M, of file:"), "{said}");
    assert!(server.stop(Signal::TERM).0.success());
    let copy = std::fs::read(scene.text("copy")).unwrap();
    assert!(copy == std::fs::read(scene.text("backing")).unwrap());
    let stored_bytes = std::fs::metadata(scene.text("copy")).unwrap().blocks() * 512;
    assert!(stored_bytes <= 1 << 20, "{stored_bytes}");
}

#[test]
fn what_cannot_be_copied_is_refused_and_nothing_is_left() {
    let scene = Scene::new("btt");
    let refused = |target: &str, file: &str| {
        let output = run(["snapshot", &scene.text(target), &scene.text(file)]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
        error
    };
    let error = refused("pool", "copy");
    assert!(error.contains("is not served: copy its file"), "{error}");
    let server = scene.serve("pool", &[]);
    std::fs::write(scene.text("copy"), "precious").unwrap();
    let error = refused("pool", "copy");
    assert!(error.contains("cannot make") && error.contains("exists"), "{error}");
    assert_eq!(std::fs::read(scene.text("copy")).unwrap(), b"precious");
    let error = refused("pool", "none/copy");
    assert!(error.contains("No such file"), "{error}");
    assert!(server.stop(Signal::TERM).0.success());

    scene.create("log", "log", "16M");
    let server = scene.serve("log", &["--backing=null:64M"]);
    let error = refused("log", "of-log");
    assert!(error.contains("null:64M does not do: it keeps no data"), "{error}");
    assert!(!Path::new(&scene.text("of-log")).exists());
    assert!(server.stop(Signal::TERM).0.success());
}
