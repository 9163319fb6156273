//! The control socket of a served pool: statistics of every engine, settings, and which users are
//! refused.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::process::{Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde_json::Value;
use tempfile::TempDir;

use crate::nbd::Client;
use crate::support::{Server, directory_in, ok, run, scratch, succeed, tool, user};

struct Scene {
    dir: TempDir,
}

impl Scene {
    fn new(engine: &str) -> Self {
        let scene = Self { dir: scratch() };
        let engine = format!("--engine={engine}");
        ok(["create", scene.text("pool").as_str(), &engine, "--size=32M"]);
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn serve(&self, args: &[&str]) -> Server {
        Server::start(&self.path("pool"), &self.path("socket"), args)
    }

    fn stat(&self, name: &str) -> Value {
        serde_json::from_str(&ok(["stat", &self.text(name), "--json"])).expect("one JSON object")
    }
}

/// The error of `tidegate ARGS`, which must fail.
fn refused(args: &[&str]) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// The value of the metric called `name` at `level`.
fn metric<'a>(stat: &'a Value, level: &str, name: &str) -> &'a Value {
    let metrics = stat["metrics"].as_array().expect("metrics");
    let found = metrics.iter().find(|it| it["name"] == name && it["labels"]["level"] == level);
    &found.unwrap_or_else(|| panic!("{level} {name} is missing in {stat:#}"))["value"]
}

fn write(socket: &Path, blocks: u64) {
    let mut client = Client::connect(socket).expect("the server is ready");
    for block in 0..blocks {
        client.send_write(0, block * 4096, &[7; 4096]).unwrap();
        assert_eq!(client.receive().unwrap(), (0, 0));
    }
}

#[test]
fn a_served_pool_is_measured_whatever_its_engine() {
    for (engine, args) in [
        ("btt", &[][..]),
        ("raw", &["--dram=lru:1M"]),
        ("btt", &["--dram=transit:1M"]),
        ("log", &["--backing=null:64M"]),
    ] {
        let scene = Scene::new(engine);
        let control = format!("--control=unix:{}", scene.text("control"));
        let server = scene.serve(&[args, &[control.as_str()]].concat());
        write(&scene.path("socket"), 10);
        for target in ["pool", "control"] {
            let stat = scene.stat(target);
            assert_eq!((&stat["live"], &stat["engine"]), (&true.into(), &engine.into()));
            assert_eq!(metric(&stat, "front_end", "written_bytes"), 40_960, "{engine}");
            assert!(metric(&stat, "pmem", "pmem_fences").is_u64());
            assert_eq!(stat["tiers"][1]["name"], engine);
            if args.is_empty() {
                assert_eq!(metric(&stat, "pmem", "writes"), 10);
                assert!(metric(&stat, "pmem", "write_ns")["count"].as_u64() > Some(0));
            }
            for metric in stat["metrics"].as_array().unwrap() {
                for key in ["name", "kind", "unit", "help"] {
                    assert!(metric[key].is_string(), "{key} is missing in {metric}");
                }
            }
        }
        let text = ok(["stat", &scene.text("pool")]);
        assert!(text.contains("written_bytes") && text.contains("40K"), "{text}");
        assert!(server.stop(Signal::TERM).0.success());
        assert!(!scene.path("control").exists(), "the control socket stays behind");
    }
}

#[test]
fn a_tier_with_several_lines_of_a_label_has_all_of_them_shown() {
    let scene = Scene::new("btt");
    let server = scene.serve(&["--dram=transit:1M"]);
    write(&scene.path("socket"), 10);
    let text = ok(["stat", &scene.text("pool")]);
    let of_tier: Vec<&str> = text.lines().filter(|line| line.starts_with("dram tier ")).collect();
    let summaries = of_tier.iter().filter(|line| line.contains("transit of 1M")).count();
    assert_eq!(summaries, 1, "{text}");
    assert!(of_tier.len() > 2, "what it is, and each phase: {text}");
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn what_a_served_cache_says_of_itself_is_of_now() {
    let scene = Scene::new("cache");
    let server = scene.serve(&["--backing=null:64M", "--mode=wb"]);
    assert_eq!(scene.stat("pool")["cache"]["mode"], "wb");
    write(&scene.path("socket"), 10);
    ok(["set", &scene.text("pool"), "mode=wo", "clean-from-pct=60"]);
    let stat = scene.stat("pool");
    assert_eq!(stat["cache"]["mode"], "wo");
    assert_eq!(stat["cache"]["settings"]["clean-from-pct"], "60");
    assert_eq!(stat["cache"]["used_slots"], 10);
    let pool_bytes = stat["pool_bytes"].as_u64().expect("bytes");
    ok(["set", &scene.text("pool"), &format!("size={}", 2 * pool_bytes)]);
    assert_eq!(scene.stat("pool")["pool_bytes"], 2 * pool_bytes);
    let text = ok(["stat", &scene.text("pool")]);
    assert_eq!(text.lines().filter(|line| line.starts_with("mode ")).count(), 1, "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("cache ")).count(), 1, "{text}");
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn a_pool_that_no_process_serves_is_described_by_its_medium() {
    let scene = Scene::new("btt");
    let stat = scene.stat("pool");
    assert_eq!((&stat["live"], &stat["engine"]), (&false.into(), &"btt".into()));
    assert_eq!(stat["btt"]["version"], "1.1");
    assert!(ok(["stat", &scene.text("pool")]).contains("the pool is not served"));
    let log = Scene::new("log").stat("pool");
    assert_eq!((&log["live"], &log["log_used_bytes"]), (&false.into(), &0.into()));
}

#[test]
fn settings_change_what_may_change_and_say_why_the_rest_does_not() {
    let scene = Scene::new("log");
    let pool = scene.text("pool");
    let error = refused(&["set", &pool, "clean-from-pct=25"]);
    assert!(error.contains("is not served"), "{error}");
    let server = scene.serve(&["--backing=null:64M"]);
    ok(["set", &pool, "clean-from-pct=25"]);
    let stat = scene.stat("pool");
    let setting = |key: &str| {
        let settings = stat["settings"].as_array().unwrap();
        settings.iter().find(|it| it["key"] == key).unwrap().clone()
    };
    assert_eq!(setting("clean-from-pct")["value"], "25");
    assert!(setting("dram")["fixed"].as_str().unwrap().contains("stop the server"));
    for (setting, part) in [
        ("clean-from-pct=0", "expected 1 to 90"),
        ("dram=lru:1M", "cannot be changed now"),
        ("engine=btt", "create another pool"),
        ("volume=11", "there is no setting `volume`"),
    ] {
        let error = refused(&["set", &pool, setting]);
        assert!(error.contains(part) && error.lines().count() == 1, "{setting}: {error}");
    }
    for wrong in ["dram=none", "volume=11", "batch=1T"] {
        refused(&["set", &pool, "clean-from-pct=30", wrong]);
        let stat = scene.stat("pool");
        let settings = stat["settings"].as_array().unwrap();
        let now = settings.iter().find(|it| it["key"] == "clean-from-pct").unwrap();
        assert_eq!(now["value"], "25", "behind {wrong}");
    }
    assert_eq!(run(["set", &pool, "nothing"]).status.code(), Some(2));
    assert!(server.stop(Signal::TERM).0.success());
}

/// As under the unit: the server's user owns the pool, and root operates it.
#[test]
fn root_asks_the_servers_of_all_users_and_others_are_told_whom_to_be() {
    let (scene, installed) = (Scene::new("btt"), directory_in("/var/tmp".into()));
    let (uid, gid) = user("nobody");
    for directory in [scene.dir.path(), installed.path()] {
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    // Else others are told that they may not open it.
    let readable = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(scene.path("pool"), readable).unwrap();
    for path in [scene.dir.path(), &scene.path("pool")] {
        std::os::unix::fs::chown(path, Some(uid), Some(gid)).unwrap();
    }
    let copy =
        tool("cp", "coreutils").arg(env!("CARGO_BIN_EXE_tidegate")).arg(installed.path()).status();
    assert!(copy.unwrap().success());
    let as_user = |uid: u32| {
        let mut command = tool("setpriv", "util-linux");
        command.args(["--clear-groups", &format!("--reuid={uid}"), &format!("--regid={gid}")]);
        command.arg(installed.path().join("tidegate"));
        command
    };
    let (pool, nbd) = (scene.text("pool"), format!("--nbd=unix:{}", scene.text("socket")));
    let server = Server::spawn(as_user(uid).args(["serve", &pool, &nbd]));
    assert_eq!(scene.stat("pool")["live"], true);
    ok(["flush", &pool]);
    ok(["snapshot", &pool, &scene.text("copy")]);
    for arguments in [&["snapshot", &pool, "/dev/null"][..], &["stat", "--reset", &pool]] {
        let said = as_user(uid + 1).args(arguments).output().unwrap().stderr;
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains("as that process's user, or as root"), "{said}");
    }
    assert!(server.stop(Signal::TERM).0.success());
}

/// As in a rescue shell: no server can be there, and the pool's lock proves it.
#[test]
fn a_pool_is_written_back_where_no_socket_can_be() {
    for engine in ["cache", "log"] {
        let dir = directory_in("/var/tmp".into());
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let (pool, disk) = (path("pool"), path("disk"));
        ok(["create", &pool, &format!("--engine={engine}"), "--size=8M"]);
        std::fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
        let (socket, backing) = (dir.path().join("socket"), format!("--backing={disk}"));
        let server = Server::start(Path::new(&pool), &socket, &[&backing]);
        write(&socket, 10);
        rustix::process::kill_process(server.pid(), Signal::KILL).unwrap();
        server.wait_killed();
        let tidegate = env!("CARGO_BIN_EXE_tidegate");
        let script = format!(
            "mount -t tmpfs -o ro none /dev/shm && {tidegate} stat {pool} && {tidegate} flush {pool}"
        );
        succeed(tool("unshare", "util-linux").args(["-m", "sh", "-c", &script]));
        assert_eq!(std::fs::read(&disk).unwrap()[9 * 4096], 7, "{engine}");
    }
}

/// Any user can make the directory of another one first.
#[test]
fn a_directory_for_sockets_that_is_not_the_users_own_is_told_and_left_alone() {
    let dir = directory_in("/var/tmp".into());
    let pool = dir.path().join("pool").to_str().unwrap().to_owned();
    ok(["create", &pool, "--engine=log", "--size=8M"]);
    let (tidegate, uid) = (env!("CARGO_BIN_EXE_tidegate"), rustix::process::geteuid().as_raw());
    for (make, found) in [
        ("mkdir $D && chown 1 $D", "belongs to user 1 and is not used"),
        ("ln -s /var/tmp $D", "is no directory and is not used"),
        ("mkfifo $D", "is no directory and is not used"),
        ("mkdir $D && chmod 777 $D", "has mode 777"),
    ] {
        let script = format!(
            "D=/dev/shm/tidegate-{uid} && mount -t tmpfs none /dev/shm && {make} && \
             ls -ld --time-style=full-iso $D && for command in recover flush; do \
             timeout 30 {tidegate} $command {pool} && exit 1; done; \
             ls -ld --time-style=full-iso $D"
        );
        let mut command = tool("unshare", "util-linux");
        let output = command.args(["-m", "sh", "-c", &script]).output().unwrap();
        let [said, listed] =
            [output.stderr, output.stdout].map(|bytes| String::from_utf8(bytes).unwrap());
        let expected = format!("tidegate: /dev/shm/tidegate-{uid} {found}");
        assert!(said.lines().all(|line| line.starts_with(&expected)), "{make}: {said}");
        assert_eq!((output.status.code(), said.lines().count()), (Some(0), 2), "{make}: {said}");
        let (before, after) = listed.trim_end().split_once('\n').unwrap();
        assert_eq!(before, after, "{make}");
    }
}

/// The value of setting `key` of the pool.
fn setting(scene: &Scene, key: &str) -> String {
    let stat = scene.stat("pool");
    let settings = stat["settings"].as_array().unwrap();
    let found = settings.iter().find(|it| it["key"] == key);
    found.unwrap_or_else(|| panic!("no {key} in {stat:#}"))["value"].as_str().unwrap().to_owned()
}

/// All settings of one command, or none: of each kind that the cache has, in each order.
#[test]
fn a_set_with_one_wrong_value_changes_nothing() {
    let scene = Scene::new("cache");
    let server = scene.serve(&["--backing=null:64M"]);
    let good = ["mode=wt", "cleaning=acp", "clean-from-pct=41", "io-classes=none", "size=40M"];
    let wrong =
        ["mode=xx", "cleaning=no", "clean-from-pct=101", "size=big", "nothing=1", "dram=none"];
    let keys = ["mode", "cleaning", "clean-from-pct", "size"];
    let before = keys.map(|key| setting(&scene, key));
    let pool = scene.text("pool");
    for wrong in wrong {
        // A key that is given twice is refused as such.
        let key = wrong.split_inclusive('=').next().unwrap();
        let others = good.into_iter().filter(|it| !it.starts_with(key)).collect::<Vec<_>>();
        for at in 0..=others.len() {
            let mut settings = others.clone();
            settings.insert(at, wrong);
            refused(&[&["set", pool.as_str()][..], &settings].concat());
        }
        assert_eq!(keys.map(|key| setting(&scene, key)), before, "behind {wrong}");
    }
    // One that is found out only when it is done: earlier ones are taken back.
    let error = refused(&["set", &pool, "mode=pt", "clean-from-pct=41", "size=1"]);
    assert!(error.contains("a size that the pool can get"), "{error}");
    assert_eq!(keys.map(|key| setting(&scene, key)), before);
    ok([&["set", pool.as_str()][..], &good].concat());
    assert_eq!(setting(&scene, "mode"), "wt");
    assert!(server.stop(Signal::TERM).0.success());
}

/// A flush changes no setting, whatever is set meanwhile; and it has all written that was there.
#[test]
fn a_flush_beside_sets_takes_none_of_them_back() {
    let scene = Scene::new("cache");
    let server = scene.serve(&["--backing=null:64M"]);
    let (pool, done) = (scene.text("pool"), std::sync::atomic::AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                write(&scene.path("socket"), 50);
                ok(["flush", pool.as_str()]);
            }
        });
        for round in 0..30 {
            let mode = ["wt", "pt", "wo", "wb"][round % 4];
            ok(["set", pool.as_str(), &format!("mode={mode}")]);
            assert_eq!(setting(&scene, "mode"), mode, "round {round}");
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn a_flush_of_a_served_pool_writes_what_it_holds_whatever_its_engine() {
    for engine in ["cache", "log", "btt"] {
        let scene = Scene::new(engine);
        let disk = scene.path("disk");
        std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        let backing = format!("--backing={}", disk.display());
        let args: &[&str] = if engine == "btt" { &["--dram=lru:1M"] } else { &[&backing] };
        let server = scene.serve(args);
        write(&scene.path("socket"), 20);
        let said = ok(["flush", &scene.text("pool")]);
        let expected = match engine {
            "btt" => "all is in the pool, which has no backing",
            _ => "all is written that its server held for the backing",
        };
        assert!(said.contains(expected), "{said}");
        if engine != "btt" {
            let on_disk = std::fs::read(&disk).unwrap();
            assert!(on_disk[..20 * 4096].iter().all(|byte| *byte == 7), "{engine}");
        }
        assert!(server.stop(Signal::TERM).0.success());
    }
}

#[test]
fn the_control_socket_is_the_owners_and_takes_any_bytes() {
    let scene = Scene::new("raw");
    let control = scene.path("control");
    let argument = format!("--control=unix:{}", control.display());
    let server = scene.serve(&[&argument]);
    let mode = std::fs::metadata(&control).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for bytes in [&b"\n"[..], b"{\"request\":\"quit\"}\n", &[0xFF; 5000], &vec![b'['; 60_000]] {
        let mut client = UnixStream::connect(&control).unwrap();
        client.write_all(bytes).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut reply = String::new();
        client.read_to_string(&mut reply).unwrap();
        assert!(reply.starts_with("{\"reply\":\"failed\""), "{reply}");
    }
    assert_eq!(scene.stat("control")["live"], true);
    assert!(server.stop(Signal::TERM).0.success());
    assert!(refused(&["stat", control.to_str().unwrap()]).contains("there is no pool"));
}

/// Connects to a socket, and prints what comes: the server does not wait for the request of another
/// user.
const LISTEN: &str = "import socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
print(client.makefile().readline())";

/// The kernel says whose a client is: one of another user is not answered even where a careless
/// operator opened the socket to all.
#[test]
fn the_control_socket_answers_no_other_user() {
    let scene = Scene::new("raw");
    let control = scene.path("control");
    let server = scene.serve(&[&format!("--control=unix:{}", control.display())]);
    let (user, group) = user("nobody");
    let listen = || {
        let mut command = tool("setpriv", "util-linux");
        command.args(["--clear-groups", &format!("--reuid={user}"), &format!("--regid={group}")]);
        command.args(["/usr/bin/python3", "-c", LISTEN]).arg(&control).output().unwrap()
    };
    let open = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open(scene.dir.path(), 0o755);
    let error = String::from_utf8(listen().stderr).unwrap();
    assert!(error.contains("PermissionError"), "{error}");
    open(&control, 0o666);
    let output = listen();
    let reply = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && reply.contains("only the server's own user"), "{reply}");
    assert_eq!(scene.stat("control")["live"], true);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn what_is_no_pool_has_no_statistics() {
    let scene = Scene::new("btt");
    let output = run(["stat", scene.dir.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "a directory is no pool");
    let error = refused(&["stat", &scene.text("absent")]);
    assert!(error.contains("absent"), "{error}");
}

/// A server that a debugger has stopped, say, keeps nobody waiting for ever.
#[test]
fn a_server_that_hangs_is_told_by_requests_that_may_take_long() {
    let scene = Scene::new("btt");
    let server = scene.serve(&[]);
    kill_process(server.pid(), Signal::STOP).unwrap();
    // Its threads run on until one of them has seen the signal.
    let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(server.pid()), stopped).unwrap();
    let (pool, copy) = (scene.text("pool"), scene.text("copy"));
    let requests: [&[&str]; 3] =
        [&["flush", &pool], &["snapshot", &pool, &copy], &["set", &pool, "mode=wt"]];
    std::thread::scope(|threads| {
        for request in requests {
            threads.spawn(move || {
                let said = refused(request);
                assert!(said.contains("does not answer"), "{request:?}: {said}");
            });
        }
        // It hides no other server.
        let listed: Value = serde_json::from_str(&ok(["list", "--json"])).unwrap();
        let own = format!("{}.server", server.pid().as_raw_pid());
        let mut silent = listed["silent"].as_array().unwrap().iter();
        let is_own = |socket: &Value| socket.as_str().is_some_and(|path| path.ends_with(&own));
        assert!(silent.any(is_own), "{listed:#}");
    });
    kill_process(server.pid(), Signal::CONT).unwrap();
    assert!(server.stop(Signal::TERM).0.success());
}
