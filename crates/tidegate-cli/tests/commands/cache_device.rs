//! A cache pool as a block device: what it needs, what it refuses, and where its data is
//! afterwards.

use std::path::Path;

use rustix::process::Signal;

use crate::behind::{Scene, kill, read, write};
use crate::killed_cache::{self, killed_cache};
use crate::support::{Server, ok, run, scratch, succeed, tool};

fn command(name: &str, scene: &Scene) {
    ok([name.as_ref(), scene.pool().as_os_str()]);
}

#[test]
fn a_write_is_in_the_cache_after_a_kill_and_in_the_backing_after_a_flush() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    (0..20).for_each(|lba| write(&mut client, lba, 7));
    kill(server);
    assert_eq!(scene.in_file("disk", 3), 0, "nothing was cleaned yet");
    command("check", &scene);
    let server = scene.serve("disk", &[]);
    let banner = server.banner.join("\n");
    assert!(banner.contains("20 pages, 20 of them dirty"), "{banner}");
    let mut client = scene.client();
    (0..20).for_each(|lba| assert_eq!(read(&mut client, lba), 7));
    command("flush", &scene);
    assert_eq!(scene.in_file("disk", 19), 7, "the server goes on and has cleaned all");
    write(&mut client, 3, 8);
    kill(server);
    // Without a server: the pool knows its backing.
    command("flush", &scene);
    assert_eq!(scene.in_file("disk", 3), 8);
    let server = scene.serve("disk", &[]);
    let banner = server.banner.join("\n");
    assert!(banner.contains("20 pages, 0 of them dirty"), "clean pages stay: {banner}");
    assert!(server.stop(Signal::TERM).0.success());
}

/// A crash may have kept the data of a lane's last write off the medium, so damage there cannot be
/// told from that. It is said; one changed bit is told by the name of its page.
#[test]
fn the_last_write_that_does_not_match_its_checksum_is_told_by_check_and_by_the_server() {
    const TOLD: &str = "of the last writes of 1 lane nothing tells whether they were acknowledged";
    for (damage, status) in [(&b"\x5b"[..], 1), (b"other bytes", 0)] {
        let scene = killed_cache();
        killed_cache::damage(&scene, (0x5A, 0), 70, damage);
        let output = run(["check".as_ref(), scene.pool().as_os_str()]);
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.code() == Some(status) && said.contains(TOLD), "{said}");
        let named = "the data of the dirty page at offset 4096 differs by one bit";
        assert_eq!(said.contains(named), status == 1, "{said}");
        let server = scene.serve("disk", &[]);
        let banner = server.banner.join("\n");
        assert!(banner.contains(TOLD), "{banner}");
        let named = "in 1 page of those one bit is wrong, the first at offset 4096: an older";
        assert_eq!(banner.contains(named), status == 1, "{banner}");
        assert_eq!(read(&mut scene.client(), 1), 0xC3, "the version before it");
        assert!(server.stop(Signal::TERM).0.success());
        let banner = scene.serve("disk", &[]).banner.join("\n");
        assert!(!banner.contains("nothing tells"), "it is told once: {banner}");
    }
}

/// Grows and shrinks, with a server and without one; a kill afterwards loses nothing.
#[test]
fn a_pool_gets_another_size_while_it_is_served_and_while_it_is_not() {
    let scene = Scene::new("cache");
    let pool = scene.pool();
    let (pool, bytes) = (pool.to_str().unwrap(), || scene.pool().metadata().unwrap().len());
    let refused = run(["set", pool, "size=1G"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("never used"), "{refused:?}");
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    (0..200).for_each(|lba| write(&mut client, lba, 7));
    for (size, size_bytes) in
        [("size=24M", 24 << 20), ("size=512K", 512 << 10), ("size=8M", 8 << 20)]
    {
        assert!(ok(["set", pool, size]).contains(&size[5..]));
        assert_eq!(bytes(), size_bytes);
        (0..200).for_each(|lba| assert_eq!(read(&mut client, lba), 7));
        (0..200).for_each(|lba| write(&mut client, lba, 7));
    }
    let refused = run(["set", pool, "size=16K"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("expected"), "{refused:?}");
    kill(server);
    ok(["set", pool, "size=512K", "cleaning=nop"]);
    assert_eq!(bytes(), 512 << 10);
    ok(["set", pool, "size=12M"]);
    command("check", &scene);
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    (0..200).for_each(|lba| assert_eq!(read(&mut client, lba), 7));
    assert_eq!(bytes(), 12 << 20);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn blocks_of_512_bytes_are_in_the_cache_after_a_kill_and_in_the_backing_after_a_flush() {
    let scene = Scene::new("cache");
    let pool = scene.pool();
    let create = ["create", pool.to_str().unwrap(), "--engine=cache", "--size=8M", "--force"];
    ok([&create[..], &["--block-size=512"]].concat());
    assert!(ok(["info", pool.to_str().unwrap()]).contains("record"), "the granularity is shown");
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    let blocks = [(3, 7), (9, 8), (10, 9)];
    for (block, byte) in blocks {
        client.send_write(0, block * 512, &[byte; 512]).unwrap();
        assert_eq!(client.receive().unwrap(), (0, 0));
    }
    kill(server);
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    let expected = |block| blocks.iter().find(|(at, _)| *at == block).map_or(0, |(_, byte)| *byte);
    for block in 0..16 {
        assert_eq!(client.read(block * 512, 512).unwrap(), [expected(block); 512]);
    }
    command("flush", &scene);
    kill(server);
    let file = std::fs::read(scene.path("disk")).unwrap();
    for (block, bytes) in (0..16).zip(file.chunks(512)) {
        assert_eq!(bytes, [expected(block); 512], "block {block}");
    }
    command("check", &scene);
}

#[test]
fn the_size_of_lines_is_chosen_at_creation_and_kept() {
    let scene = Scene::new("cache");
    let pool = scene.pool();
    let pool = pool.to_str().unwrap();
    let create = ["create", pool, "--engine=cache", "--size=8M", "--force"];
    let info =
        || -> serde_json::Value { serde_json::from_str(&ok(["info", pool, "--json"])).unwrap() };
    let has_lines = |text: &str, bytes: u64| {
        assert!(text.contains(&format!("\"line_bytes\":{bytes}")), "{text}");
    };
    has_lines(&info().to_string(), 4096);
    let refused = run([&create[..], &["--line-size=12K"]].concat());
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{error}");
    assert!(error.contains("--line-size is 12K") && error.contains("65536"), "{error}");
    ok([&create[..], &["--line-size=64K"]].concat());
    has_lines(&info().to_string(), 65536);
    let server = scene.serve("disk", &[]);
    (0..20).for_each(|lba| write(&mut scene.client(), lba, 7));
    kill(server);
    has_lines(&info().to_string(), 65536);
    let server = scene.serve("disk", &[]);
    (0..20).for_each(|lba| assert_eq!(read(&mut scene.client(), lba), 7));
    assert!(server.stop(Signal::TERM).0.success());
    command("check", &scene);
}

#[test]
fn recover_writes_to_the_backing_what_a_killed_server_left() {
    let scene = Scene::new("cache");
    let recover = |option: &[&str]| {
        let output = run([&["recover", scene.pool().to_str().unwrap()], option].concat());
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let server = scene.serve("disk", &[]);
    write(&mut scene.client(), 5, 9);
    let (status, error) = recover(&[]);
    assert!(status == Some(1) && error.contains("tidegate flush"), "{error}");
    kill(server);
    let (status, error) = recover(&["--discard"]);
    assert!(status == Some(1) && error.contains("--discard is for logs"), "{error}");
    assert_eq!(scene.in_file("disk", 5), 0);
    assert_eq!(recover(&[]), (Some(0), String::new()));
    assert_eq!(scene.in_file("disk", 5), 9);
}

#[test]
fn sigterm_leaves_all_in_the_backing() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &[]);
    write(&mut scene.client(), 5, 9);
    assert!(server.stop(Signal::TERM).0.success());
    assert_eq!(scene.in_file("disk", 5), 9);
    // Nothing is dirty: it may serve another backing, and its pages are not that one's.
    let server = scene.serve("other", &[]);
    assert_eq!(read(&mut scene.client(), 5), 0);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn the_mode_is_chosen_at_start_and_changed_while_it_runs() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &["--mode=wt"]);
    let mut client = scene.client();
    write(&mut client, 1, 1);
    assert_eq!(scene.in_file("disk", 1), 1);
    let set = |value: &str| ok(["set".as_ref(), scene.pool().as_os_str(), value.as_ref()]);
    set("mode=wb");
    write(&mut client, 1, 2);
    assert_eq!(scene.in_file("disk", 1), 1);
    set("mode=wi+flush");
    assert_eq!(scene.in_file("disk", 1), 2);
    write(&mut client, 1, 3);
    assert_eq!((scene.in_file("disk", 1), read(&mut client, 1)), (3, 3));
    kill(server);
    let pool = scene.pool();
    let output = run(["serve", pool.to_str().unwrap(), "--nbd=unix:/nowhere", "--mode=fast"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("--mode") && error.contains("wb, wt, wa, wi, wo or pt"), "{error}");
}

/// Puts another pool at the path of the first, which goes to `aside`.
fn replace_pool(scene: &Scene) {
    std::fs::rename(scene.pool(), scene.path("aside")).unwrap();
    ok(["create", scene.pool().to_str().unwrap(), "--engine=cache", "--size=8M"]);
}

/// A start that fails keeps no other pool from the backing.
#[test]
fn a_start_that_fails_leaves_the_backing_to_other_pools() {
    for engine in ["cache", "log"] {
        let scene = Scene::new(engine);
        let backing = scene.backing("disk");
        std::fs::write(scene.path("socket"), "no socket").unwrap();
        let error = scene.refusal(&[&backing]);
        assert!(error.contains("a file that is no socket is there"), "{error}");
        std::fs::remove_file(scene.path("socket")).unwrap();
        let error = scene.refusal(&[&backing, "--dram=lru:1"]);
        assert!(error.contains("the DRAM tier lru:1 cannot be made"), "{error}");
        if engine == "cache" {
            let error = scene.refusal(&[&backing, "--atomic-flush", "--mode=wt"]);
            assert!(error.contains("cannot be served with --mode"), "{error}");
        }
        replace_pool(&scene);
        let server = scene.serve("disk", &[]);
        assert!(server.stop(Signal::TERM).0.success());
    }
}

#[test]
fn a_mode_is_for_a_cache() {
    for engine in ["btt", "raw", "log"] {
        let dir = scratch();
        let pool = dir.path().join("pool");
        let pool = pool.to_str().unwrap();
        ok(["create", pool, &format!("--engine={engine}"), "--size=32M"]);
        let output = run(["serve", pool, "--nbd=unix:/nowhere", "--mode=wb"]);
        let error = String::from_utf8(output.stderr).unwrap();
        let expected = format!("{pool} is a {engine} pool, --mode needs a cache pool");
        assert!(output.status.code() == Some(1) && error.contains(&expected), "{error}");
    }
}

/// Serves and stops, so that all is in the backing.
fn serve_and_stop(scene: &Scene, writes: Option<u8>, more: &[&str]) -> String {
    let server = scene.serve("disk", more);
    let banner = server.banner.join("\n");
    if let Some(byte) = writes {
        (0..20).for_each(|lba| write(&mut scene.client(), lba, byte));
    }
    assert!(server.stop(Signal::TERM).0.success());
    banner
}

#[test]
fn a_pool_gives_up_what_another_pool_has_changed_behind_its_back() {
    let scene = Scene::new("cache");
    serve_and_stop(&scene, Some(7), &[]);
    replace_pool(&scene);
    // One block, which no sample of the first pool's need find.
    let server = scene.serve("disk", &[]);
    write(&mut scene.client(), 3, 8);
    kill(server);
    std::fs::rename(scene.pool(), scene.path("second")).unwrap();
    std::fs::rename(scene.path("aside"), scene.pool()).unwrap();
    let refusal = scene.refusal(&[&scene.backing("disk")]);
    assert!(refusal.contains("was behind the pool") && refusal.contains("--force"), "{refusal}");
    ok(["flush", scene.path("second").to_str().unwrap()]);
    let server = scene.serve("disk", &[]);
    let banner = server.banner.join("\n");
    assert!(banner.contains("gave up 20 clean pages"), "{banner}");
    let mut client = scene.client();
    assert_eq!((read(&mut client, 3), read(&mut client, 4)), (8, 7));
    kill(server);
}

#[test]
fn a_copy_of_a_pool_from_before_is_refused() {
    let scene = Scene::new("cache");
    serve_and_stop(&scene, Some(7), &[]);
    std::fs::copy(scene.pool(), scene.path("copy")).unwrap();
    serve_and_stop(&scene, Some(8), &[]);
    std::fs::rename(scene.path("copy"), scene.pool()).unwrap();
    let refusal = scene.refusal(&[&scene.backing("disk")]);
    assert!(refusal.contains("in a later state"), "{refusal}");
    let banner = serve_and_stop(&scene, None, &["--force"]);
    assert!(banner.contains("gave up 20 clean pages"), "{banner}");
    assert_eq!(scene.in_file("disk", 3), 8);
}

#[test]
fn a_wrong_or_missing_backing_is_refused() {
    let scene = Scene::new("cache");
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
    assert_eq!((scene.in_file("other", 3), scene.in_file("disk", 3)), (7, 0));
}

#[test]
fn settings_are_kept_by_the_pool() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &[]);
    let pool = scene.pool();
    let pool = pool.to_str().unwrap();
    ok(["set", pool, "eviction=lru", "cleaning=acp", "acp.wake-up-ms=20", "cutoff=full"]);
    let output = run(["set", pool, "acp.wake-up-ms=11000"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("expected 0 to 10000 milliseconds"), "{error}");
    write(&mut scene.client(), 1, 1);
    kill(server);
    let info = ok(["info", pool]);
    let expected = "eviction=lru, cleaning=acp, cutoff=full, acp.wake-up-ms=20";
    assert!(info.contains(expected), "{info}");
    let server = scene.serve("disk", &[]);
    let stat = ok(["stat", pool]);
    assert!(stat.contains("acp"), "{stat}");
    assert_eq!(read(&mut scene.client(), 1), 1);
    kill(server);
}

#[test]
fn io_classes_come_from_a_file_and_show_what_they_use() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &[]);
    let (pool, file) = (scene.pool(), scene.path("classes.csv"));
    let pool = pool.to_str().unwrap();
    let table = "IO class id,IO class name,Eviction priority,Allocation\r\n\
                 0,unclassified,22,1.00\r\n1,io_direction:write,1,0.50\r\n";
    std::fs::write(&file, table).unwrap();
    let from_file = format!("io-classes=@{}", file.display());
    ok(["set", pool, &from_file]);
    (0..3).for_each(|lba| write(&mut scene.client(), lba, 1));
    let stat = ok(["stat", pool]);
    let shown = stat.lines().find(|line| line.contains("io class 1")).unwrap();
    assert!(shown.contains("12K of") && shown.contains("io_direction:write"), "{shown}");
    std::fs::write(&file, "IO class id\n").unwrap();
    let output = run(["set", pool, &from_file]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("the header is"), "{error}");
    let output = run(["set", pool, "io-classes=@/nothing/here"]);
    assert_eq!(output.status.code(), Some(2));
    kill(server);
    let server = scene.serve("disk", &[]);
    let stat = ok(["stat", pool]);
    assert!(stat.contains("io class 1"), "the pool keeps them: {stat}");
    kill(server);
}

#[test]
fn a_backing_has_one_server_at_a_time() {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &[]);
    let (second, socket) = (scene.path("second"), scene.path("second-socket"));
    let second = second.to_str().unwrap();
    ok(["create", second, "--engine=cache", "--size=8M"]);
    let nbd = format!("--nbd=unix:{}", socket.display());
    let output = run(["serve", second, &nbd, &scene.backing("disk")]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("disk") && error.contains("in use"), "{error}");
    kill(server);
}

/// A disk that a file stands for; detached when dropped.
pub(crate) struct Disk(pub(crate) String);

impl Disk {
    pub(crate) fn of(file: &Path) -> Self {
        let mut losetup = tool("losetup", "mount");
        losetup.args(["--show", "--sector-size", "4096", "--find"]).arg(file);
        Self(succeed(&mut losetup).trim().to_owned())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The kernel detaches it when its last user has gone.
        let _ = tool("losetup", "mount").arg("-d").arg(&self.0).status();
    }
}

#[test]
fn a_block_device_is_a_backing_as_a_file_is() {
    let scene = Scene::new("cache");
    let disk = Disk::of(&scene.path("disk"));
    let backing = format!("--backing={}", disk.0);
    let serve = || Server::start(&scene.pool(), &scene.path("socket"), &[&backing]);
    let server = serve();
    (0..20).for_each(|lba| write(&mut scene.client(), lba, 7));
    kill(server);
    assert_eq!(scene.in_file("disk", 3), 0, "nothing was cleaned yet");
    let info = ok(["info", scene.pool().to_str().unwrap()]);
    assert!(info.contains(&disk.0), "the pool knows its backing: {info}");
    let server = serve();
    let banner = server.banner.join("\n");
    assert!(banner.contains("20 pages, 20 of them dirty"), "{banner}");
    let (second, socket) = (scene.path("second"), scene.path("second-socket"));
    ok(["create", second.to_str().unwrap(), "--engine=cache", "--size=8M"]);
    let nbd = format!("--nbd=unix:{}", socket.display());
    let output = run(["serve", second.to_str().unwrap(), &nbd, &backing]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("in use"), "{error}");
    command("flush", &scene);
    (0..20).for_each(|lba| assert_eq!(scene.in_file("disk", lba), 7));
    write(&mut scene.client(), 3, 8);
    kill(server);
    command("flush", &scene);
    assert_eq!(scene.in_file("disk", 3), 8, "without a server");
}
