//! `tidegate flush --purge`: a cache is emptied, with a server and without one.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Signal;
use serde_json::Value;

use crate::behind::{Scene, kill, read, write};
use crate::support::{ok, run};

fn purge(scene: &Scene) -> String {
    ok(["flush".as_ref(), scene.pool().as_os_str(), "--purge".as_ref()])
}

/// Used and dirty slots, as `command` says.
fn slots(scene: &Scene, command: &str) -> [u64; 2] {
    let found = ok([command.as_ref(), scene.pool().as_os_str(), "--json".as_ref()]);
    let found: Value = serde_json::from_str(&found).unwrap();
    ["used_slots", "dirty_slots"].map(|key| found["cache"][key].as_u64().expect(key))
}

#[test]
fn a_served_cache_is_emptied_and_serving_goes_on() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    (0..100).for_each(|lba| write(&mut client, lba, 7));
    // These are kept in the background.
    (200..250).for_each(|lba| assert_eq!(read(&mut client, lba), 0));
    let said = purge(&scene);
    assert!(said.contains("the backing has all pages, and the cache is empty"), "{said}");
    assert_eq!(slots(&scene, "stat"), [0, 0]);
    (0..100).for_each(|lba| assert_eq!(scene.in_file("disk", lba), 7));
    (0..100).for_each(|lba| assert_eq!(read(&mut client, lba), 7));
    write(&mut client, 3, 8);
    kill(server);
    let server = scene.serve("disk", &[]);
    assert_eq!(read(&mut scene.client(), 3), 8);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn a_cache_that_no_server_has_is_emptied() {
    let scene = Scene::new("cache");
    let said = purge(&scene);
    assert!(said.contains("was never used"), "{said}");
    let server = scene.serve("disk", &[]);
    (0..100).for_each(|lba| write(&mut scene.client(), lba, 7));
    kill(server);
    assert_eq!(slots(&scene, "info"), [100, 100]);
    let said = purge(&scene);
    assert!(said.contains("the cache is empty: 400K were given up"), "{said}");
    assert_eq!(slots(&scene, "info"), [0, 0]);
    (0..100).for_each(|lba| assert_eq!(scene.in_file("disk", lba), 7));
    ok(["check".as_ref(), scene.pool().as_os_str()]);
    // Nothing of it is used any more: the backing may have changed.
    std::fs::write(scene.path("disk"), vec![9; 16 << 20]).unwrap();
    let server = scene.serve("disk", &[]);
    assert_eq!(read(&mut scene.client(), 3), 9);
    assert!(server.stop(Signal::TERM).0.success());
}

/// Ends the writer when it is dropped, also where the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn clients_go_on_while_their_cache_is_emptied() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &["--dram=transit:1M"]);
    let mut client = scene.client();
    (0..500).for_each(|lba| write(&mut client, lba, 7));
    let (is_over, rounds) = (AtomicBool::new(false), AtomicBool::new(false));
    let last = std::thread::scope(|scope| {
        let over = Over(&is_over);
        let writer = scope.spawn(|| {
            let (mut client, mut byte) = (scene.client(), 7_u8);
            while !is_over.load(Ordering::Relaxed) {
                byte = byte.wrapping_add(1);
                (0..100).for_each(|lba| write(&mut client, lba, byte));
                (0..100).for_each(|lba| assert_eq!(read(&mut client, lba), byte));
                rounds.store(true, Ordering::Relaxed);
            }
            byte
        });
        while !rounds.load(Ordering::Relaxed) && !writer.is_finished() {
            std::thread::yield_now();
        }
        for _ in 0..5 {
            let said = purge(&scene);
            assert!(said.contains("given up"), "{said}");
            (100..500).for_each(|lba| assert_eq!(scene.in_file("disk", lba), 7));
        }
        drop(over);
        writer.join().unwrap()
    });
    (0..500).for_each(|lba| assert_eq!(read(&mut client, lba), if lba < 100 { last } else { 7 }));
    purge(&scene);
    assert_eq!(slots(&scene, "stat"), [0, 0]);
    assert_eq!(scene.in_file("disk", 3), last, "the DRAM tier was written back, too");
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn pages_that_no_flush_committed_stay() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &["--atomic-flush"]);
    let mut client = scene.client();
    (0..20).for_each(|lba| write(&mut client, lba, 7));
    let said = purge(&scene);
    assert!(said.contains("80K are left") && said.contains("--atomic-flush"), "{said}");
    assert_eq!((slots(&scene, "stat"), scene.in_file("disk", 3)), ([20, 20], 0));
    client.send_flush(0).unwrap();
    assert_eq!(client.receive().unwrap(), (0, 0));
    purge(&scene);
    assert_eq!((slots(&scene, "stat"), scene.in_file("disk", 3)), ([0, 0], 7));
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn engines_without_clean_pages_refuse_it() {
    for engine in ["btt", "raw", "log"] {
        let scene = Scene::new("cache");
        let pool = scene.pool();
        let pool = pool.to_str().unwrap();
        ok(["create", pool, &format!("--engine={engine}"), "--size=32M", "--force"]);
        let output = run(["flush", pool, "--purge"]);
        let error = String::from_utf8(output.stderr).unwrap();
        let expected = format!("holds a {engine} pool, which keeps no pages of a backing");
        assert!(output.status.code() == Some(1) && error.contains(&expected), "{error}");
        assert!(error.contains("--purge needs a cache pool"), "{error}");
    }
    // The server says so by itself, too.
    let scene = Scene::new("log");
    let control = scene.path("control");
    let server = scene.serve("disk", &[&format!("--control=unix:{}", control.display())]);
    let mut client = UnixStream::connect(control).unwrap();
    client.write_all(b"{\"request\":\"purge\"}\n").unwrap();
    let mut reply = String::new();
    client.read_to_string(&mut reply).unwrap();
    assert!(reply.contains("cannot be purged") && reply.contains("keeps nothing"), "{reply}");
    assert!(server.stop(Signal::TERM).0.success());
    let output = run(["flush", scene.path("absent").to_str().unwrap(), "--purge"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("absent"), "{error}");
}
