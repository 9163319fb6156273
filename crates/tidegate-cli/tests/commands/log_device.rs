//! A log pool as a block device: what it needs, what it refuses, and where its data is afterwards.

use rustix::fs::{CWD, FileType, mknodat};
use rustix::process::Signal;

use crate::behind::{Scene, kill, read, write};
use crate::support::{self, Server, ok, run};

#[test]
fn it_wants_a_backing_and_other_engines_none() {
    let scene = Scene::new("log");
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
    let scene = Scene::new("log");
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    write(&mut client, 3, 7);
    kill(server);
    assert_eq!(scene.in_file("disk", 3), 0, "nothing was cleaned yet");
    let server = scene.serve("disk", &[]);
    let banner = server.banner.join("\n");
    assert!(banner.contains("1 write (") && banner.contains("backing"), "{banner}");
    assert_eq!(read(&mut scene.client(), 3), 7);
    let (status, _) = server.stop(Signal::TERM);
    assert!(status.success(), "{status}");
    assert_eq!(scene.in_file("disk", 3), 7);
    assert!(!banner.contains("in boot"), "the session of a device is of no boot: {banner}");
    // The log is empty: it may serve another backing.
    let server = scene.serve("other", &[]);
    assert_eq!(read(&mut scene.client(), 3), 0);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn a_log_with_data_of_another_backing_is_refused_unless_forced() {
    let scene = Scene::new("log");
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
    assert_eq!(scene.in_file("other", 3), 7);
    assert_eq!(scene.in_file("moved", 3), 0);
}

/// The log knows the name of its backing: `recover` destages to it without a server, and `run`,
/// which has no use for such records, refuses the pool.
#[test]
fn recover_destages_too() {
    let scene = Scene::new("log");
    let server = scene.serve("disk", &[]);
    write(&mut scene.client(), 3, 7);
    kill(server);
    let pool = scene.path("pool");
    let refused =
        support::run(["run".as_ref(), "--pool".as_ref(), pool.as_os_str(), "true".as_ref()]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("writes to the device"), "{said}");
    ok(["recover".as_ref(), pool.as_os_str()]);
    assert_eq!(scene.in_file("disk", 3), 7);
    assert_eq!(std::fs::metadata(scene.path("disk")).unwrap().len(), 16 << 20);
    let server = scene.serve("other", &[]);
    assert!(server.stop(Signal::TERM).0.success());
}

/// A backing that was cut short, and another file at its path: `recover` looks at it as `serve`
/// does, for a cache too.
#[test]
fn recover_refuses_the_backings_that_serve_refuses() {
    let cut = |scene: &Scene| {
        let disk = std::fs::File::options().write(true).open(scene.path("disk")).unwrap();
        disk.set_len(8 << 20).unwrap();
    };
    let replace = |scene: &Scene| {
        std::fs::rename(scene.path("disk"), scene.path("moved")).unwrap();
        std::fs::rename(scene.path("other"), scene.path("disk")).unwrap();
    };
    let remove = |scene: &Scene| std::fs::remove_file(scene.path("disk")).unwrap();
    let changes: [&dyn Fn(&Scene); 3] = [&cut, &replace, &remove];
    for engine in ["log", "cache"] {
        for change in changes {
            let scene = Scene::new(engine);
            let server = scene.serve("disk", &[]);
            write(&mut scene.client(), 3000, 7);
            kill(server);
            change(&scene);
            let pool = std::fs::read(scene.pool()).unwrap();
            let refused = scene.refusal(&[&scene.backing("disk")]);
            let recover = run(["recover".as_ref(), scene.pool().as_os_str()]);
            assert_eq!(recover.status.code(), Some(1), "{engine}");
            let said = String::from_utf8_lossy(&recover.stderr);
            // The server has the time before it.
            assert!(said.lines().count() == 1 && refused.ends_with(&*said), "{said}{refused}");
            assert!(std::fs::read(scene.pool()).unwrap() == pool, "{engine}: the pool was changed");
            if let Ok(disk) = std::fs::read(scene.path("disk")) {
                assert!(disk.iter().all(|byte| *byte == 0), "{engine}: the backing was changed");
            }
        }
    }
}

/// Its records would go over its own header.
#[test]
fn a_log_is_not_its_own_backing() {
    let scene = Scene::new("log");
    std::fs::hard_link(scene.path("pool"), scene.path("link")).unwrap();
    std::os::unix::fs::symlink(scene.path("pool"), scene.path("symlink")).unwrap();
    let before = std::fs::read(scene.path("pool")).unwrap();
    for name in ["pool", "link", "symlink"] {
        for more in [&[][..], &["--force"]] {
            let error = scene.refusal(&[&[&*scene.backing(name)], more].concat());
            assert!(error.contains("is the pool itself"), "{name}: {error}");
        }
    }
    assert!(std::fs::read(scene.path("pool")).unwrap() == before, "the pool was changed");
}

#[test]
fn a_backing_has_one_log_at_a_time() {
    let scene = Scene::new("log");
    let second = scene.path("second");
    ok(["create", second.to_str().unwrap(), "--engine=log", "--size=8M"]);
    let server = scene.serve("disk", &[]);
    let nbd = format!("--nbd=unix:{}", scene.path("another").display());
    let serve_second = ["serve", second.to_str().unwrap(), &nbd, &scene.backing("disk")];
    let output = run(serve_second);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("disk") && error.contains("in use"), "{error}");
    // A server of the backing as a pool of its own is as much in the way.
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
        let scene = Scene::new("log");
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
    let scene = Scene::new("log");
    let server = scene.serve("disk", &[]);
    write(&mut scene.client(), 3000, 7);
    kill(server);
    let disk = scene.path("disk");
    ok(["create", disk.to_str().unwrap(), "--engine=raw", "--size=16M", "--force"]);
    // The log cannot know that it was the client.
    let server = scene.serve("disk", &["--force"]);
    assert_eq!(read(&mut scene.client(), 3000), 7);
    assert!(server.stop(Signal::TERM).0.success());
    let error = scene.refusal(&[&scene.backing("disk")]);
    assert!(error.contains("holds a raw pool"), "{error}");
}

#[test]
fn a_backing_without_a_block_is_refused() {
    let scene = Scene::new("log");
    for bytes in [0, 100] {
        std::fs::write(scene.path("disk"), vec![7; bytes]).unwrap();
        let error = scene.refusal(&[&scene.backing("disk")]);
        assert!(error.contains("not one block"), "{bytes}: {error}");
    }
    std::fs::create_dir(scene.path("directory")).unwrap();
    mknodat(CWD, scene.path("fifo"), FileType::Fifo, 0o600.into(), 0).unwrap();
    let expected = "a regular file or a block device is expected";
    for (name, cause) in [
        ("directory", format!("it is a directory: {expected}")),
        ("fifo", format!("it is a FIFO: {expected}")),
        ("missing", "No such file".into()),
    ] {
        let error = scene.refusal(&[&scene.backing(name)]);
        assert_eq!(error.to_lowercase().matches(&cause.to_lowercase()).count(), 1, "{error}");
    }
}
