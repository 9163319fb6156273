//! `tidegate snapshot`: a copy of a pool that is being written is a state of one instant.

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
        ok(["create", &scene.text("pool"), &format!("--engine={engine}"), "--size=32M"]);
        scene
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

fn copies_are_of_one_instant(engine: &str, args: &[&str]) {
    const COPIES: usize = 4;
    let scene = Scene::new(engine);
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
        let copy = format!("copy{at}");
        ok(["check", &scene.text(&copy)]);
        let server = scene.serve(&copy, &[]);
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

#[test]
fn a_copy_of_a_pool_is_of_one_instant() {
    copies_are_of_one_instant("btt", &[]);
}

#[test]
fn a_copy_has_what_a_dram_tier_had() {
    copies_are_of_one_instant("btt", &["--dram=lru:16M"]);
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

    ok(["create", &scene.text("log"), "--engine=log", "--size=16M"]);
    let server = scene.serve("log", &["--backing=null:64M"]);
    let error = refused("log", "of-log");
    assert!(error.contains("has a backing") && error.contains("copy the backing"), "{error}");
    assert!(!Path::new(&scene.text("of-log")).exists());
    assert!(server.stop(Signal::TERM).0.success());
}
