//! `tidegate reload` and SIGHUP: devices come, go and change while a server runs, and the others
//! notice nothing.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::bad_devices::{Log, assert_stops, names_at};
use crate::behind;
use crate::nbd::Client;
use crate::support::random::Random;
use crate::support::{Server, ok, run, scratch, tidegate};

/// A directory with the pools `a` to `e`. Block 1 of each has a byte of its own.
struct Scene {
    dir: TempDir,
}

/// The devices of a configuration: the keys of each export.
type Devices<'d> = &'d [(&'d str, &'d str)];

impl Scene {
    fn new() -> Self {
        let scene = Self { dir: scratch() };
        for pool in ["a", "b", "c", "d", "e"] {
            ok(["create", &scene.text(pool), "--engine=btt", "--size=32M"]);
        }
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Writes the configuration, in which `DIR` is the directory.
    fn write(&self, devices: Devices<'_>, more: &str) {
        let mut text = format!("nbd = [\"unix:DIR/socket\"]\n{more}\n");
        for (export, keys) in devices {
            write!(text, "[[device]]\nexport = \"{export}\"\n{keys}\n").unwrap();
        }
        let text = text.replace("DIR", self.dir.path().to_str().unwrap());
        std::fs::write(self.path("config.toml"), text).unwrap();
    }

    fn serve(&self, devices: Devices<'_>) -> Server {
        self.write(devices, "");
        Server::spawn(tidegate().args(["serve", "--config", &self.text("config.toml")]))
    }

    /// Starts a server of the configuration that was written, and returns it with its log.
    fn serve_with_log(&self) -> (Server, Log) {
        let mut command = tidegate();
        command.args(["serve", "--config", &self.text("config.toml")]).stderr(Stdio::piped());
        let mut server = Server::spawn(&mut command);
        let log = Log(server.stderr());
        (server, log)
    }

    /// Reloads by these devices. Returns the exit status and the output, with `DIR` in place of
    /// the directory.
    fn reload(&self, devices: Devices<'_>) -> (Option<i32>, String) {
        self.write(devices, "");
        self.reload_file()
    }

    fn reload_file(&self) -> (Option<i32>, String) {
        let output = run(["reload", &self.text("config.toml")]);
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        let said = said.replace(self.dir.path().to_str().unwrap(), "DIR");
        (output.status.code(), said.replace("DIR/config.toml: ", ""))
    }

    fn client(&self, export: &str) -> Client {
        Client::connect_to(&self.path("socket"), export).unwrap()
    }

    fn names(&self) -> Vec<String> {
        names_at(&self.text("socket"))
    }

    fn mark(&self, export: &str, byte: u8) {
        behind::write(&mut self.client(export), 1, byte);
    }

    fn marked(&self, export: &str) -> u8 {
        behind::read(&mut self.client(export), 1)
    }
}

#[test]
fn devices_come_and_go_and_the_client_of_another_one_notices_nothing() {
    let scene = Scene::new();
    let (a, b, c) =
        (("a", "pool = \"DIR/a\""), ("b", "pool = \"DIR/b\""), ("c", "pool = \"DIR/c\""));
    let server = scene.serve(&[a, b]);
    let (mut kept, mut ended) = (scene.client("a"), scene.client("b"));
    behind::write(&mut kept, 1, 1);
    behind::write(&mut ended, 1, 2);

    assert_eq!(scene.reload(&[a, c]), (Some(0), "b is closed\nc is served\n".into()));
    assert_eq!(behind::read(&mut kept, 1), 1);
    assert!(ended.read(0, 4096).is_err());
    assert_eq!(scene.names(), ["a", "c"]);
    scene.mark("c", 3);
    assert!(ok(["check", &scene.text("b")]).contains("no damage"), "the pool is free");

    assert_eq!(scene.reload(&[a, c]), (Some(0), "no device has changed\n".into()));
    assert_eq!(scene.reload(&[b, a]), (Some(0), "c is closed\nb is served\n".into()));
    assert_eq!((scene.marked(""), scene.marked("b")), (2, 2), "the first one has no other name");
    assert_eq!(behind::read(&mut kept, 1), 1);
    drop((kept, ended));
    assert_stops(server);
}

#[test]
fn a_device_whose_table_changes_is_opened_anew_and_pools_change_their_names() {
    let scene = Scene::new();
    let (a, b) = (("a", "pool = \"DIR/a\""), ("b", "pool = \"DIR/b\""));
    let server = scene.serve(&[a, b]);
    scene.mark("a", 1);
    scene.mark("b", 2);
    let mut kept = scene.client("b");
    let read_only = ("a", "pool = \"DIR/a\"\nread-only = true\ncontrol = \"unix:DIR/control\"");
    assert_eq!(scene.reload(&[read_only, b]), (Some(0), "a is served by its new table\n".into()));
    assert_eq!((scene.marked("a"), behind::read(&mut kept, 1)), (1, 2));
    scene.client("a").send_write(1, 4096, &[9; 4096]).unwrap();
    assert_eq!(scene.marked("a"), 1);
    assert!(ok(["stat", &scene.text("control")]).contains("read-only"));

    let swapped = [("a", "pool = \"DIR/b\""), ("b", "pool = \"DIR/a\"")];
    let (status, said) = scene.reload(&swapped);
    assert_eq!((status, said.lines().count()), (Some(0), 2), "{said}");
    assert_eq!((scene.marked("a"), scene.marked("b")), (2, 1));
    assert_stops(server);
}

#[test]
fn a_file_with_faults_changes_nothing_and_a_table_that_fails_is_taken_back() {
    let scene = Scene::new();
    let (a, b) = (("a", "pool = \"DIR/a\""), ("b", "pool = \"DIR/b\""));
    let server = scene.serve(&[a, b]);
    scene.mark("b", 2);
    let mut kept = scene.client("a");
    behind::write(&mut kept, 1, 1);

    let (status, said) = scene.reload(&[("b", "pool = \"DIR/b\"\nreadonly = true")]);
    let expected = "no device has changed: DIR/config.toml:6:1: `readonly` is no key of device";
    assert!(status == Some(1) && said.contains(expected), "{said}");
    let (status, said) = scene.reload(&[a, ("b", "pool = \"DIR/none\"")]);
    let expected = "b is as before, since its new table cannot be opened: ";
    assert!(status == Some(1) && said.contains(expected) && said.contains("DIR/none"), "{said}");
    assert_eq!((behind::read(&mut kept, 1), scene.marked("b")), (1, 2));

    let (status, said) = scene.reload(&[("a", "pool = \"DIR/a\"\ncontrol = \"unix:DIR/no/a\""), b]);
    let expected = "a is as before, since its new table cannot be opened: ";
    assert!(status == Some(1) && said.contains(expected), "{said}");
    drop(kept);
    let mut kept = scene.client("a");
    assert_eq!(behind::read(&mut kept, 1), 1);

    // A new device has nothing to go back to.
    let (status, said) = scene.reload(&[a, b, ("late", "pool = \"DIR/late\"")]);
    assert!(status == Some(1) && said.contains("late is down, and is tried again: "), "{said}");
    ok(["create", &scene.text("new"), "--engine=btt", "--size=32M"]);
    std::fs::rename(scene.path("new"), scene.path("late")).unwrap();
    while !scene.names().contains(&"late".into()) {
        std::thread::yield_now();
    }
    assert_eq!(scene.marked("late"), 0);

    scene.write(&[a, b, ("late", "pool = \"DIR/late\"")], "max-connections = 7");
    let expected = "`max-connections` has changed: that takes a restart of the server";
    let (status, said) = scene.reload_file();
    assert!(status == Some(1) && said.contains(expected), "{said}");
    drop(kept);
    assert_stops(server);
}

#[test]
fn a_cache_that_goes_has_written_back_what_it_holds() {
    let scene = Scene::new();
    ok(["create", &scene.text("cache"), "--engine=cache", "--size=32M"]);
    File::create_new(scene.path("disk")).unwrap().set_len(64 << 20).unwrap();
    let cached = ("disk", "pool = \"DIR/cache\"\nbacking = \"DIR/disk\"\nmode = \"wb\"");
    let a = ("a", "pool = \"DIR/a\"");
    let server = scene.serve(&[a, cached]);
    scene.mark("disk", 7);
    assert_eq!(scene.reload(&[a]), (Some(0), "disk is closed\n".into()));
    assert_eq!(std::fs::read(scene.path("disk")).unwrap()[4096], 7);
    // The pool can be opened again.
    assert_eq!(scene.reload(&[cached, a]), (Some(0), "disk is served\n".into()));
    assert_eq!(scene.marked("disk"), 7);
    assert_stops(server);
}

#[test]
fn sighup_reloads_and_logs_it_and_a_server_of_a_pool_has_nothing_to_reload() {
    let scene = Scene::new();
    let (a, b) = (("a", "pool = \"DIR/a\""), ("b", "pool = \"DIR/b\""));
    scene.write(&[a], "");
    let (server, mut log) = scene.serve_with_log();
    scene.write(&[a, b], "");
    kill_process(server.pid(), Signal::HUP).unwrap();
    log.until("SIGHUP: b is served");
    scene.mark("b", 2);
    scene.write(&[], "");
    kill_process(server.pid(), Signal::HUP).unwrap();
    log.until("SIGHUP: no device has changed: ");
    assert_eq!(scene.marked("b"), 2);
    assert_stops(server);

    let alone = Server::start(&scene.path("a"), &scene.path("other"), &[]);
    let output = run(["detach", &scene.text("a")]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("it has clients of another front end"),
        "{said}"
    );
    let (status, said) = scene.reload_file();
    assert!(
        status == Some(1)
            && said.contains("no server of this user was started by `serve --config DIR/"),
        "{said}"
    );
    assert_stops(alone);
}

/// The deadline of a stop holds for a device that a reload closes, too. The pool keeps the data.
#[test]
fn a_stop_ends_while_a_reload_waits_for_a_backing() {
    let scene = Scene::new();
    ok(["create", &scene.text("log"), "--engine=log", "--size=32M"]);
    File::create_new(scene.path("disk")).unwrap().set_len(64 << 20).unwrap();
    let slow = "pool = \"DIR/log\"\nbacking = \"delay:60s,DIR/disk\"\ndram = \"lru:4M\"";
    let slow = ("slow", slow);
    let a = ("a", "pool = \"DIR/a\"\ndram = \"lru:4M\"");
    scene.write(&[a, slow], "stop-timeout = 2");
    let (server, log) = scene.serve_with_log();
    scene.mark("slow", 7);
    scene.mark("a", 1);
    scene.write(&[a], "stop-timeout = 2");
    std::thread::scope(|scope| {
        let reload = scope.spawn(|| scene.reload_file());
        let is_closing = |line: &str| line.contains(&scene.text("log")) && line.contains("closing");
        while !ok(["list"]).lines().any(is_closing) {
            assert!(!reload.is_finished(), "{:?}", reload.join());
        }
        let (status, _) = server.stop(Signal::TERM);
        assert_eq!(status.code(), Some(1));
        assert_eq!(reload.join().unwrap().0, Some(1));
        let said = log.rest();
        let expected = "not stopped in good order after 2 s, ended: 4.25K (4352 bytes) that";
        let is_told = said.contains(expected) && said.contains("that the backing lacks stay in");
        assert!(is_told, "{said}");
    });
    let server = scene.serve(&[a, ("slow", "pool = \"DIR/log\"\nbacking = \"DIR/disk\"")]);
    assert_eq!((scene.marked("a"), scene.marked("slow")), (1, 7));
    assert_stops(server);
}

/// A stop keeps the lock of such a backing until the process ends; a reload releases it.
#[test]
fn a_device_that_keeps_its_dirty_data_can_change_and_go() {
    let scene = Scene::new();
    ok(["create", &scene.text("cache"), "--engine=cache", "--size=32M"]);
    File::create_new(scene.path("disk")).unwrap().set_len(64 << 20).unwrap();
    let keys = "pool = \"DIR/cache\"\nbacking = \"DIR/disk\"\nkeep-dirty = true";
    let (a, kept) = (("a", "pool = \"DIR/a\""), ("kept", keys));
    let server = scene.serve(&[a, kept]);
    scene.mark("kept", 7);
    let changed = format!("{keys}\ncontrol = \"unix:DIR/control\"");
    let told = "kept is served by its new table\n".to_owned();
    assert_eq!(scene.reload(&[a, ("kept", &changed)]), (Some(0), told));
    assert_eq!(scene.marked("kept"), 7);
    assert_eq!(scene.reload(&[a]), (Some(0), "kept is closed\n".into()));
    assert_eq!(std::fs::read(scene.path("disk")).unwrap()[4096], 7);
    assert_eq!(scene.reload(&[a, kept]), (Some(0), "kept is served\n".into()));
    assert_stops(server);
}

/// A client that connects again after each break finds its last acknowledged write.
#[test]
fn a_client_that_connects_again_loses_no_write_by_changes_of_its_device() {
    const RELOADS: u32 = 20;
    let scene = Scene::new();
    let tables = ["4M", "8M"].map(|size| format!("pool = \"DIR/a\"\ndram = \"lru:{size}\""));
    let server = scene.serve(&[("a", &tables[0])]);
    let ends = AtomicBool::new(false);
    let breaks = std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_until(&ends, || scene.client("a")));
        for round in 1..=RELOADS {
            let (status, said) = scene.reload(&[("a", &tables[round as usize % 2])]);
            assert_eq!(status, Some(0), "{said}");
        }
        ends.store(true, Ordering::Relaxed);
        writer.join().unwrap()
    });
    assert!(breaks > 0, "no reload broke the connection off");
    assert_stops(server);
}

/// Writes ever higher numbers, and reads them over each new connection. Returns the number of
/// connections that broke.
fn write_until(ends: &AtomicBool, connect: impl Fn() -> Client) -> u32 {
    let (mut last, mut breaks) = (0_u64, 0);
    while !ends.load(Ordering::Relaxed) {
        let mut client = connect();
        let found = client.read(0, 4096).unwrap();
        let found = u64::from_le_bytes(found[..8].try_into().unwrap());
        assert!(found == last || found == last + 1, "{found} after {last}");
        last = found;
        while !ends.load(Ordering::Relaxed) {
            let data = (last + 1).to_le_bytes().repeat(512);
            let sent = client.send_write(0, 0, &data);
            if sent.and_then(|()| client.receive()).is_err() {
                breaks += 1;
                break;
            }
            last += 1;
        }
    }
    breaks
}

/// The table of a device, as the test plays it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Table {
    pool: char,
    read_only: bool,
}

/// Configurations at random: names come and go, pools move between them, and tables change. The
/// client of a device whose table stays keeps its connection; each name has its pool's data.
#[test]
fn each_configuration_of_many_is_served_as_it_says() {
    let scene = Scene::new();
    let all = ["a", "b", "c", "d", "e"].map(|pool| (pool, format!("pool = \"DIR/{pool}\"")));
    let all = all.each_ref().map(|(name, keys)| (*name, keys.as_str()));
    let server = scene.serve(&all);
    for (name, _) in all {
        scene.mark(name, name.as_bytes()[0]);
    }
    let mut random = Random(1);
    let plain = |name: char| (name, Table { pool: name, read_only: false });
    let mut tables: BTreeMap<char, Table> = "abcde".chars().map(plain).collect();
    let mut clients: BTreeMap<char, Client> = BTreeMap::new();
    for round in 0..40 {
        let mut pools: Vec<char> = "abcde".chars().collect();
        let mut next = BTreeMap::new();
        for name in "abcde".chars() {
            let stays = tables.get(&name).filter(|table| pools.contains(&table.pool));
            let table = match (random.below(4), stays) {
                (0 | 1, Some(stays)) => *stays,
                (2, _) => continue,
                _ => {
                    let pool = pools[random.below(pools.len())];
                    Table { pool, read_only: random.below(2) == 0 }
                }
            };
            pools.retain(|pool| *pool != table.pool);
            next.insert(name, table);
        }
        if next.is_empty() {
            continue;
        }
        let keys = |(name, table): (&char, &Table)| {
            let Table { pool, read_only } = table;
            (name.to_string(), format!("pool = \"DIR/{pool}\"\nread-only = {read_only}"))
        };
        let texts: Vec<_> = next.iter().map(keys).collect();
        let devices: Vec<_> = texts.iter().map(|(name, keys)| (&name[..], &keys[..])).collect();
        let (status, said) = scene.reload(&devices);
        assert_eq!(status, Some(0), "round {round}: {said}");
        let names: Vec<_> = texts.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(scene.names(), names);
        for name in "abcde".chars() {
            let is_kept = next.contains_key(&name) && next.get(&name) == tables.get(&name);
            let client = clients.remove(&name).filter(|_| is_kept);
            let Some(table) = next.get(&name) else { continue };
            let mut client = client.unwrap_or_else(|| scene.client(&name.to_string()));
            assert_eq!(
                char::from(behind::read(&mut client, 1)),
                table.pool,
                "round {round}: {name}"
            );
            clients.insert(name, client);
        }
        tables = next;
    }
    drop(clients);
    assert_stops(server);
}
