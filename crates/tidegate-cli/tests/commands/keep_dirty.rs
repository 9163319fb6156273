//! A server that is stopped with `--keep-dirty`: what the backing lacks stays in the pool, all of
//! it durable, and the stop waits for no write to the backing.

use std::path::Path;
use std::process::{Child, ExitStatus};

use rustix::process::Signal;

use crate::behind::{Scene, kill, read, write};
use crate::support::{Server, ok, tidegate};

const BYTE: u8 = 7;
/// So slow that a stop which waits for one request leaves fewer dirty pages than there were.
const SLOW: &str = "delay:5s,";

fn stop(server: Server, signal: Signal) -> String {
    let (status, rest) = server.stop(signal);
    assert!(status.success(), "{status}: {rest}");
    rest
}

/// The line of `rest` that says what was kept.
fn kept(rest: &str) -> &str {
    rest.lines().find(|line| line.starts_with("kept dirty")).expect(rest)
}

fn write_all(scene: &Scene, blocks: usize) {
    let mut client = scene.client();
    (0..blocks).for_each(|lba| write(&mut client, lba, BYTE));
}

fn assert_reads(scene: &Scene, blocks: usize) {
    let mut client = scene.client();
    (0..blocks).for_each(|lba| assert_eq!(read(&mut client, lba), BYTE));
}

fn slow_backing(scene: &Scene) -> String {
    format!("--backing={SLOW}{}", scene.path("disk").display())
}

fn serve_slow(scene: &Scene) -> Server {
    let backing = slow_backing(scene);
    Server::start(&scene.pool(), &scene.path("socket"), &[&backing, "--keep-dirty"])
}

/// Waits until the backing has the first block: the rest of its delay is to come.
fn await_first_block(scene: &Scene) {
    while scene.in_file("disk", 0) == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn what_the_backing_lacks_is_there_for_the_next_server_and_for_flush() {
    for engine in ["cache", "log"] {
        let scene = Scene::new(engine);
        let pool = scene.pool();
        for signal in [Signal::TERM, Signal::INT] {
            let server = scene.serve("disk", &["--keep-dirty"]);
            write_all(&scene, 20);
            let rest = stop(server, signal);
            assert_eq!(scene.in_file("disk", 3), 0, "{engine}");
            let told = kept(&rest);
            let command = format!("`tidegate flush {}`", pool.display());
            assert!(told.contains(&command), "{told}");
            assert_eq!(rest.lines().last(), Some(told));
            if engine == "cache" {
                assert!(told.contains("80K that the backing lacks"), "{told}");
            }
            let server = scene.serve("disk", &["--keep-dirty"]);
            assert!(!server.banner.join("\n").contains("not flushed;"), "{:?}", server.banner);
            assert_reads(&scene, 20);
            kill(server);
        }
        ok(["check".as_ref(), pool.as_os_str()]);
        let said = ok(["flush".as_ref(), pool.as_os_str()]);
        assert!(said.contains("disk"), "{said}");
        (0..20).for_each(|lba| assert_eq!(scene.in_file("disk", lba), BYTE, "{engine}"));
        let rest = stop(scene.serve("disk", &["--keep-dirty"]), Signal::TERM);
        assert!(kept(&rest).contains("nothing: the backing has all"), "{rest}");
        // Without the option all goes to the backing.
        let server = scene.serve("disk", &[]);
        write(&mut scene.client(), 3, 9);
        let rest = stop(server, Signal::TERM);
        assert!(!rest.contains("kept dirty"), "{rest}");
        assert_eq!(scene.in_file("disk", 3), 9);
    }
}

/// The cleaner is in the middle of a batch at a slow backing. Had the stop waited for it, its pages
/// were clean.
#[test]
fn a_stop_waits_for_no_cleaner_at_a_slow_backing() {
    let scene = Scene::new("cache");
    let server = serve_slow(&scene);
    ok(["set", scene.pool().to_str().unwrap(), "clean-from-pct=0"]);
    write_all(&scene, 20);
    await_first_block(&scene);
    let rest = stop(server, Signal::TERM);
    assert!(kept(&rest).contains("80K that the backing lacks"), "{rest}");
    ok(["check".as_ref(), scene.pool().as_os_str()]);
    let server = scene.serve("disk", &[]);
    assert!(server.banner.join("\n").contains("20 pages, 20 of them dirty"), "{:?}", server.banner);
    assert_reads(&scene, 20);
    stop(server, Signal::TERM);
}

/// A child that is killed where the test fails.
struct Running(Child);

impl Running {
    fn command(name: &str, pool: &Path) -> Self {
        Self(tidegate().arg(name).arg(pool).spawn().unwrap())
    }

    fn wait(mut self) -> ExitStatus {
        self.0.wait().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// So it is with a flush that another command has asked the server for: that command fails.
#[test]
fn a_stop_waits_for_no_flush_that_is_under_way() {
    let scene = Scene::new("cache");
    let server = serve_slow(&scene);
    write_all(&scene, 20);
    let flush = Running::command("flush", &scene.pool());
    await_first_block(&scene);
    let rest = stop(server, Signal::TERM);
    assert!(kept(&rest).contains("80K that the backing lacks"), "{rest}");
    assert_eq!(flush.wait().code(), Some(1));
    let server = scene.serve("disk", &[]);
    assert_reads(&scene, 20);
    stop(server, Signal::TERM);
}

#[test]
fn a_dram_tier_is_drained_into_the_pool() {
    for engine in ["cache", "log"] {
        let scene = Scene::new(engine);
        let server = scene.serve("disk", &["--keep-dirty", "--dram=lru:1M"]);
        write_all(&scene, 20);
        stop(server, Signal::TERM);
        assert_eq!(scene.in_file("disk", 3), 0, "{engine}");
        let server = scene.serve("disk", &[]);
        assert_reads(&scene, 20);
        stop(server, Signal::TERM);
        assert_eq!(scene.in_file("disk", 3), BYTE, "{engine}");
    }
}

#[test]
fn an_open_group_is_committed() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &["--keep-dirty", "--atomic-flush"]);
    write_all(&scene, 20);
    let rest = stop(server, Signal::TERM);
    assert!(kept(&rest).contains("80K"), "{rest}");
    let server = scene.serve("disk", &["--atomic-flush"]);
    let banner = server.banner.join("\n");
    assert!(banner.contains("20 of them dirty; 0 unfinished, 0 not flushed"), "{banner}");
    assert_reads(&scene, 20);
    stop(server, Signal::TERM);
}

/// Nothing is asked of a backing that is gone.
#[test]
fn a_stop_needs_no_backing() {
    let scene = Scene::new("cache");
    let store = scene.path("store");
    ok(["create", store.to_str().unwrap(), "--engine=raw", "--size=24M"]);
    let store_socket = scene.path("store-socket");
    let serve_store = || Server::start(&store, &store_socket, &[]);
    let backing = format!("--backing=nbd+unix:///?socket={}&timeout=1s", store_socket.display());
    let serve = |more: &str| Server::start(&scene.pool(), &scene.path("socket"), &[&backing, more]);
    let backing_server = serve_store();
    let server = serve("--keep-dirty");
    write_all(&scene, 20);
    kill(backing_server);
    let rest = stop(server, Signal::TERM);
    assert!(kept(&rest).contains("80K"), "{rest}");
    let _store = serve_store();
    let server = serve("--mode=wb");
    assert_reads(&scene, 20);
    stop(server, Signal::TERM);
}

/// Another pool is kept from the backing until this one was flushed.
#[test]
fn another_pool_may_not_use_the_backing_meanwhile() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &["--keep-dirty"]);
    write_all(&scene, 20);
    stop(server, Signal::TERM);
    let other = scene.path("second");
    ok(["create", other.to_str().unwrap(), "--engine=cache", "--size=8M"]);
    std::fs::rename(scene.pool(), scene.path("first")).unwrap();
    std::fs::rename(other, scene.pool()).unwrap();
    let refused = scene.refusal(&[&scene.backing("disk")]);
    assert!(refused.contains("which may hold writes that the backing lacks"), "{refused}");
    ok(["flush".as_ref(), scene.path("first").as_os_str()]);
    let server = scene.serve("disk", &[]);
    assert_reads(&scene, 20);
    stop(server, Signal::TERM);
}

#[test]
fn a_file_says_so_for_a_pool_and_engines_without_a_backing_refuse_it() {
    for engine in ["btt", "raw"] {
        let scene = Scene::new("cache");
        let pool = scene.pool();
        let pool = pool.to_str().unwrap();
        ok(["create", pool, &format!("--engine={engine}"), "--size=32M", "--force"]);
        let refused = scene.refusal(&["--keep-dirty"]);
        let expected = format!("is a {engine} pool, --keep-dirty needs a cache or a log pool");
        assert!(refused.contains(&expected) && refused.lines().count() == 1, "{refused}");
    }
    let scene = Scene::new("cache");
    let show = |name: &str| scene.path(name).display().to_string();
    let config = format!(
        "nbd = [\"unix:{}\"]\n[[device]]\npool = \"{}\"\nbacking = \"{}\"\nkeep-dirty = true\n",
        show("socket"),
        show("pool"),
        show("disk")
    );
    std::fs::write(scene.path("config.toml"), config).unwrap();
    let mut command = tidegate();
    let server = Server::spawn(command.arg("serve").arg("--config").arg(show("config.toml")));
    write_all(&scene, 20);
    let rest = stop(server, Signal::TERM);
    assert!(kept(&rest).contains("80K"), "{rest}");
}
