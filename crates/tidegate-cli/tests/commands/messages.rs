//! What is said of wrong arguments, of what is unsafe, and of what goes wrong while serving.

use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, mknodat};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::cache_device::Disk;
use crate::support::{Server, await_said, ok, run, scratch, tidegate, tool, user};
use crate::{behind, nbd};

/// A directory with a pool.
fn with_pool() -> TempDir {
    let dir = scratch();
    ok(["create", &text(&dir, "pool"), "--engine=btt", "--size=32M"]);
    dir
}

fn text(dir: &TempDir, name: &str) -> String {
    dir.path().join(name).to_str().unwrap().to_owned()
}

/// The one line with which `serve` of the pool in `dir` is refused.
fn refusal(dir: &TempDir, status: i32, args: &[&str]) -> String {
    let pool = text(dir, "pool");
    let mut all = vec!["serve", pool.as_str()];
    all.extend(args);
    let output = run(&all);
    one_line(&output, status)
}

fn one_line(output: &Output, status: i32) -> String {
    let error = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(status), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

#[test]
fn wrong_arguments_of_serve_say_what_is_expected() {
    let dir = with_pool();
    let nbd = format!("--nbd=unix:{}", text(&dir, "socket"));
    let error = refusal(&dir, 2, &[&nbd, &nbd]);
    assert!(error.contains("is given twice"), "{error}");
    let error = refusal(&dir, 2, &[&nbd, "--max-connections=0"]);
    assert!(error.contains("a whole number from 1 on is expected"), "{error}");
    let error = refusal(&dir, 1, &[&nbd, "--dram=transit:2T"]);
    assert!(error.contains("transit:2T cannot be made: so much memory cannot be had"), "{error}");
    let (junk, none) = (text(&dir, "junk"), text(&dir, "none"));
    std::fs::write(&junk, [0x93; 100]).unwrap();
    let error = refusal(&dir, 1, &[&nbd, "--tls-cert", &junk, "--tls-key", &junk]);
    assert!(error.contains("junk: it holds no certificate in PEM form"), "{error}");
    let error = refusal(&dir, 1, &[&nbd, "--tls-cert", &none, "--tls-key", &junk]);
    assert!(error.contains("none") && error.contains("No such file"), "{error}");
}

#[test]
fn a_link_to_nothing_is_called_so() {
    let dir = scratch();
    let link = text(&dir, "link");
    symlink("nowhere", &link).unwrap();
    for args in [vec!["info", &link], vec!["create", &link, "--engine=btt", "--size=32M"]] {
        let error = one_line(&run(&args), 1);
        assert!(error.contains("link is a link to nowhere, which is not there"), "{error}");
    }
}

/// No command waits for the other end of a FIFO, or goes on as if a pool were there.
#[test]
fn what_can_be_no_pool_is_refused_by_each_command() {
    let dir = scratch();
    let (fifo, folder, copy) = (text(&dir, "fifo"), text(&dir, "folder"), text(&dir, "copy"));
    let nbd = format!("--nbd=unix:{}", text(&dir, "socket"));
    mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
    std::fs::create_dir(&folder).unwrap();
    for (path, found) in [
        (fifo.as_str(), "is a FIFO: a regular file or a devdax"),
        (&folder, "is a directory: a regular file or a devdax"),
        ("/dev/null", "is a character device that is no devdax device"),
    ] {
        for args in [
            &["info", path][..],
            &["check", path],
            &["stat", path],
            &["flush", path],
            &["flush", path, "--purge"],
            &["recover", path],
            &["snapshot", path, &copy],
            &["set", path, "mode=wt"],
            &["top", path],
            &["create", path, "--engine=btt", "--size=32M"],
            &["serve", path, &nbd],
        ] {
            let output = run(args);
            let error = one_line(&output, output.status.code().expect("it is not killed"));
            assert!(!output.status.success() && error.contains(found), "{args:?}: {error}");
        }
    }
}

#[test]
fn a_setting_is_given_once_and_a_size_is_told_as_it_was_asked() {
    let dir = scratch();
    let pool = text(&dir, "pool");
    ok(["create", &pool, "--engine=cache", "--size=16M"]);
    let error = one_line(&run(["set", &pool, "mode=wt+flush", "mode=wb"]), 2);
    assert!(error.contains("the setting `mode` is given twice"), "{error}");
    let nbd = format!("--nbd=unix:{}", text(&dir, "socket"));
    let mut command = tidegate();
    command.args(["serve", &pool, "--backing=null:64M", &nbd]);
    let server = Server::spawn(&mut command);
    let error = one_line(&run(["set", &pool, "size=1"]), 1);
    assert!(error.contains("1 bytes are too few for a pool"), "{error}");
    assert!(server.stop(Signal::TERM).0.success());
}

/// Only what is not there is called so.
#[test]
fn a_pool_that_another_user_may_not_open_is_not_called_missing() {
    let dir = scratch();
    let (folder, pool) = (dir.path().join("folder"), text(&dir, "folder/pool"));
    std::fs::create_dir(&folder).unwrap();
    ok(["create", &pool, "--engine=cache", "--size=16M"]);
    let (user, group) = user("nobody");
    let set_mode = |path: &Path, mode| {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    };
    set_mode(dir.path(), 0o755);
    for mode in [0o700, 0o755] {
        set_mode(&folder, mode);
        for args in [&["stat", &pool][..], &["set", &pool, "mode=wt"], &["flush", &pool]] {
            let mut command = tool("setpriv", "util-linux");
            command.args(["--clear-groups", &format!("--reuid={user}")]);
            command.arg(format!("--regid={group}")).arg(tidegate().get_program()).args(args);
            let error = one_line(&command.output().unwrap(), 1);
            let expected = format!("user {user} may not open {pool}, run this as the pool's owner");
            assert!(error.contains(&expected), "{args:?}: {error}");
        }
    }
}

/// A terminal obeys what it is sent, also where that is the name of a file.
#[test]
fn control_characters_in_names_are_escaped() {
    let dir = scratch();
    let name = text(&dir, "a\u{1b}[31mb\nc");
    let error = one_line(&run(["info", &name]), 1);
    assert!(error.contains("a\\u{1b}[31mb"), "{error}");
    let made = ok(["create", &name, "--engine=btt", "--size=32M"]);
    for shown in [made, ok(["info", &name]), ok(["check", &name])] {
        assert!(shown.contains("a\\u{1b}[31mb\\nc") && !shown.contains('\u{1b}'), "{shown}");
    }
    let json: serde_json::Value = serde_json::from_str(&ok(["info", &name, "--json"])).unwrap();
    assert_eq!(json["pool"], name.as_str());
}

#[test]
fn help_that_cannot_be_printed_is_a_failure() {
    for args in [&["--version"][..], &["help"], &["serve", "--help"], &["help", "backings"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = tidegate().args(args).stdout(full).output().unwrap();
        assert!(one_line(&output, 1).contains("cannot write to standard output"), "{args:?}");
    }
}

/// What a server in `dir` prints on standard error until it is ready and stopped.
fn warnings(dir: &TempDir, args: &[&str]) -> String {
    let mut command = tidegate();
    let log = std::fs::File::create(text(dir, "stderr")).unwrap();
    command.arg("serve").arg(text(dir, "pool")).args(args).stderr(log);
    let (status, _) = Server::spawn(&mut command).stop(Signal::TERM);
    assert!(status.success());
    std::fs::read_to_string(text(dir, "stderr")).unwrap()
}

/// A certificate and its key in `dir`, as files.
fn with_certificate(dir: &TempDir) -> (String, String) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (text(dir, "cert.pem"), text(dir, "key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    (certificate, key)
}

/// Only a server that lets nobody in without a certificate is not warned of.
#[test]
fn an_export_that_the_network_can_write_is_warned_of() {
    let dir = with_pool();
    let (certificate, key) = with_certificate(&dir);
    let tls = ["--tls-cert", &certificate, "--tls-key", &key];
    let authority = ["--tls-ca", certificate.as_str()];
    let required = [&tls[..], &authority].concat();
    let optional = [&required[..], &["--tls=allow"]].concat();
    for (address, args, is_warned) in [
        ("0.0.0.0:0", &[][..], true),
        ("[::]:0", &[], true),
        ("0.0.0.0:0", &tls, true),
        ("0.0.0.0:0", &optional, true),
        ("0.0.0.0:0", &required, false),
        ("127.0.0.1:0", &[], false),
        ("127.0.0.1:0", &tls, false),
    ] {
        let nbd = format!("--nbd=tcp:{address}");
        let said = warnings(&dir, &[&[nbd.as_str()], args].concat());
        let is_told =
            |line: &&str| line.contains("open to the network") && line.contains("--tls-ca");
        let told = said.lines().filter(is_told).count();
        assert_eq!(told, usize::from(is_warned), "{address} {args:?}: {said}");
    }
}

#[test]
fn a_key_that_others_can_read_is_warned_of() {
    let dir = with_pool();
    let (certificate, key) = with_certificate(&dir);
    let args = ["--nbd=tcp:127.0.0.1:0", "--tls-cert", &certificate, "--tls-key", &key];
    for (mode, is_warned) in [(0o644, true), (0o640, false)] {
        std::fs::set_permissions(&key, PermissionsExt::from_mode(mode)).unwrap();
        let said = warnings(&dir, &args);
        assert_eq!(said.contains("all users of this machine can read"), is_warned, "{said}");
    }
}

/// A tmpfs of its own, unmounted in the end.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn mounted() -> Self {
        let dir = scratch();
        let mount = tool("mount", "mount")
            .args(["-t", "tmpfs", "-o", "size=24M", "small"])
            .arg(dir.path())
            .status();
        assert!(mount.unwrap().success(), "the tests of disks that are full need root");
        Self(dir)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

/// Fills what is left at `path`.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
}

/// A backing that is full is told once when it begins, and when it is over; the server lives.
#[test]
fn a_backing_that_gets_full_is_told_when_it_happens() {
    let small = SmallDisk::mounted();
    let dir = scratch();
    let backing = small.path("disk");
    std::fs::File::create(&backing).unwrap().set_len(64 << 20).unwrap();
    fill(&small.path("rest"));
    ok(["create", &text(&dir, "pool"), "--engine=log", "--size=16M"]);
    let log = std::fs::File::create(text(&dir, "stderr")).unwrap();
    let mut command = tidegate();
    command.arg("serve").arg(text(&dir, "pool")).stderr(log);
    command.arg(format!("--nbd=unix:{}", text(&dir, "socket")));
    command.arg(format!("--backing=file:{}", backing.display()));
    let server = Server::spawn(&mut command);
    // More than the log has space for.
    let uri = format!("nbd+unix:///?socket={}", text(&dir, "socket"));
    std::fs::write(text(&dir, "image"), vec![7; 40 << 20]).unwrap();
    let copied = tool("nbdcopy", "libnbd-bin").args([text(&dir, "image"), uri]).output().unwrap();
    assert!(!copied.status.success(), "the backing takes it all");
    let said = || std::fs::read_to_string(text(&dir, "stderr")).unwrap();
    let fails = |line: &&str| line.contains("Z tidegate: backing: writes fail: ");
    let is_told = |said: &str| said.lines().any(|line| fails(&line));
    let before = await_said(Path::new(&text(&dir, "stderr")), is_told, std::thread::yield_now);
    std::fs::remove_file(small.path("rest")).unwrap();
    let works = |line: &str| line.contains("Z tidegate: backing: writes work again, after ");
    let mut client = nbd::Client::connect(Path::new(&text(&dir, "socket"))).unwrap();
    ok(["set", &text(&dir, "pool"), "clean-from-pct=1"]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !said().lines().any(works) {
        assert!(Instant::now() < deadline, "it is not said that it works again: {}", said());
        // Enough for the log to be cleaned, so to write to the backing.
        client.send_write(1, 0, &vec![8; 1 << 20]).unwrap();
        assert_eq!(client.receive().unwrap(), (1, 0));
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(client);
    let (status, _) = server.stop(Signal::TERM);
    assert!(status.success(), "there is space again: {}", said());
    let first = before.lines().find(fails).unwrap();
    assert!(first.contains("disk") && first.contains("No space left"), "{first}");
    assert_eq!(said().lines().filter(fails).count(), 1, "{}", said());
    let over = said().lines().filter(|line| works(line)).count();
    assert_eq!(over, 1, "{}", said());
}

/// A disk without space takes what it is given, and tells of it at its flush, once.
struct FullDisk {
    small: SmallDisk,
    disk: Option<Disk>,
}

impl FullDisk {
    fn new() -> Self {
        let small = SmallDisk::mounted();
        std::fs::File::create(small.path("disk")).unwrap().set_len(64 << 20).unwrap();
        let disk = Some(Disk::of(&small.path("disk")));
        fill(&small.path("rest"));
        Self { small, disk }
    }

    fn backing(&self) -> String {
        format!("--backing={}", self.disk.as_ref().unwrap().0)
    }

    fn get_space(&self) {
        std::fs::remove_file(self.small.path("rest")).unwrap();
    }

    /// The first of `blocks` blocks that begins with another byte than 7.
    fn first_other(mut self, blocks: usize) -> Option<usize> {
        drop(self.disk.take());
        let found = std::fs::read(self.small.path("disk")).unwrap();
        (0..blocks).find(|lba| found[lba * 4096] != 7)
    }
}

/// What was written is in the pool, and is written to the disk again when that works.
#[test]
fn a_disk_whose_flush_failed_gets_everything_once_it_works() {
    const BLOCKS: usize = 3000;
    for engine in ["cache", "log"] {
        let (disk, dir) = (FullDisk::new(), scratch());
        let (pool, socket) = (text(&dir, "pool"), text(&dir, "socket"));
        ok(["create", &pool, &format!("--engine={engine}"), "--size=16M"]);
        let log = std::fs::File::create(text(&dir, "stderr")).unwrap();
        let mut command = tidegate();
        command.arg("serve").arg(&pool).arg(format!("--nbd=unix:{socket}")).arg(disk.backing());
        let server = Server::spawn(command.stderr(log));
        let mut client = nbd::Client::connect(Path::new(&socket)).unwrap();
        ok(["set", &pool, "clean-from-pct=50"]);
        (0..BLOCKS).for_each(|lba| behind::write(&mut client, lba, 7));
        let said = || std::fs::read_to_string(text(&dir, "stderr")).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !said().contains("backing: flushes fail: ") {
            assert!(Instant::now() < deadline, "{engine}: the disk takes it all: {}", said());
            std::thread::sleep(Duration::from_millis(50));
        }
        disk.get_space();
        drop(client);
        let (status, _) = server.stop(Signal::TERM);
        assert!(status.success(), "{engine}: the disk is not used again: {}", said());
        assert_eq!(disk.first_other(BLOCKS), None, "{engine}: a block that the disk does not have");
    }
}

/// A pool of which the end is missing is named as that, with what helps, by every command.
#[test]
fn a_btt_that_was_cut_off_is_called_so() {
    let dir = with_pool();
    let (pool, nbd) = (text(&dir, "pool"), format!("--nbd=unix:{}", text(&dir, "socket")));
    for bytes in [20 << 20, 5000] {
        std::fs::File::options().write(true).open(&pool).unwrap().set_len(bytes).unwrap();
        for args in [vec!["info", &pool], vec!["check", &pool], vec!["serve", &pool, &nbd]] {
            let error = one_line(&run(&args), 1);
            assert!(error.contains(&format!("has only {bytes} bytes")), "{args:?}: {error}");
            assert!(error.contains("copy it again from where it is whole"), "{args:?}: {error}");
        }
    }
}

/// A pool that loses its end while it is served: what is gone is an error, which is said once, and
/// the rest is served on.
#[test]
fn a_pool_that_is_cut_off_while_it_is_served_fails_only_where_it_is_gone() {
    const EIO: u32 = 5;
    let dir = scratch();
    let [pool, socket, stderr] = ["pool", "socket", "stderr"].map(|name| text(&dir, name));
    ok(["create", &pool, "--engine=raw", "--size=32M"]);
    let mut command = tidegate();
    command.arg("serve").arg(&pool).arg(format!("--nbd=unix:{socket}"));
    let server = Server::spawn(command.stderr(std::fs::File::create(&stderr).unwrap()));
    let mut client = nbd::Client::connect(Path::new(&socket)).unwrap();
    let write = |client: &mut nbd::Client, offset: u64, byte: u8| {
        client.send_write(1, offset, &[byte; 4096]).unwrap();
        client.receive().unwrap()
    };
    assert_eq!(write(&mut client, 0, 7), (1, 0));
    assert_eq!(write(&mut client, 20 << 20, 8), (1, 0));
    std::fs::File::options().write(true).open(&pool).unwrap().set_len(16 << 20).unwrap();
    // More pages than are told apart.
    let lost_pages = (0..100).map(|page| (24 << 20) + page * 4096);
    for offset in [20 << 20, 20 << 20].into_iter().chain(lost_pages) {
        client.send_read(2, offset, 4096).unwrap();
        assert_eq!(client.receive().unwrap(), (2, EIO), "{offset}");
        assert_eq!(client.read(0, 4096).unwrap(), [7; 4096]);
    }
    assert_eq!(write(&mut client, 4096, 9), (1, 0));
    assert_eq!(client.read(4096, 4096).unwrap(), [9; 4096]);
    drop(client);
    let is_told = |said: &str| said.contains("export: reads fail: ");
    let said = await_said(Path::new(&stderr), is_told, std::thread::yield_now);
    assert!(said.contains("memory error"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    let (status, _) = server.stop(Signal::TERM);
    assert!(status.code().is_some(), "it is ended in good order: {status}");
}

/// The other engines keep their own data in the part that is gone: requests fail, none gets the
/// bytes of another, and the server is told of and stopped as ever.
#[test]
fn a_pool_of_any_engine_that_is_cut_off_while_it_is_served_never_gives_wrong_data() {
    const EIO: u32 = 5;
    const BLOCKS: usize = 1500;
    for engine in ["btt", "log", "cache"] {
        let dir = scratch();
        let [pool, disk, socket, stderr] =
            ["pool", "disk", "socket", "stderr"].map(|name| text(&dir, name));
        ok(["create", &pool, &format!("--engine={engine}"), "--size=32M"]);
        std::fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
        let mut command = tidegate();
        command.arg("serve").arg(&pool).arg(format!("--nbd=unix:{socket}"));
        command.args((engine != "btt").then(|| format!("--backing={disk}")));
        let server = Server::spawn(command.stderr(std::fs::File::create(&stderr).unwrap()));
        let mut client = nbd::Client::connect(Path::new(&socket)).unwrap();
        let mut write = |lba: u64, byte: u8| {
            client.send_write(lba, lba * 4096, &[byte; 4096]).unwrap();
            let (cookie, error) = client.receive().unwrap();
            assert!(cookie == lba && [0, EIO].contains(&error), "{engine}: {error}");
            error == 0
        };
        assert!((0..BLOCKS as u64).all(|lba| write(lba, 7)), "{engine}");
        std::fs::File::options().write(true).open(&pool).unwrap().set_len(4 << 20).unwrap();
        // What a block may hold: a write that failed may be there or not.
        let mut blocks = vec![vec![7]; BLOCKS];
        for (block, lba) in blocks[..1000].iter_mut().zip(0..) {
            if write(lba, 8) {
                block.clear();
            }
            block.push(8);
        }
        let mut failed = blocks.iter().filter(|it| it.len() == 2).count();
        for (block, lba) in blocks.iter().zip(0..) {
            client.send_read(lba, lba * 4096, 4096).unwrap();
            let (cookie, error) = client.receive().unwrap();
            assert!(cookie == lba && [0, EIO].contains(&error), "{engine}: {error}");
            if error == EIO {
                failed += 1;
                continue;
            }
            let found = client.receive_data(4096).unwrap();
            let is_whole = found.iter().all(|it| *it == found[0]);
            assert!(is_whole && block.contains(&found[0]), "{engine}: block {lba}: {}", found[0]);
        }
        drop(client);
        assert!(failed > 100, "{engine}: {failed}");
        let parts = ["export: ", " fail: ", "memory error"];
        let is_told = |said: &str| parts.iter().all(|part| said.contains(part));
        let said = await_said(Path::new(&stderr), is_told, std::thread::yield_now);
        assert!(said.lines().count() <= 6, "not one a request: {said}");
        let (status, _) = server.stop(Signal::TERM);
        assert!(status.code().is_some(), "{engine}: it is ended in good order: {status}");
    }
}

#[test]
fn a_sparse_pool_on_a_full_file_system_is_called_so() {
    let dir = with_pool();
    let small = SmallDisk::mounted();
    let pool = small.path("pool");
    let copied =
        tool("cp", "coreutils").arg("--sparse=always").arg(text(&dir, "pool")).arg(&pool).status();
    assert!(copied.unwrap().success());
    fill(&small.path("rest"));
    let nbd = format!("--nbd=unix:{}", text(&dir, "socket"));
    let error = one_line(&run(["serve", pool.to_str().unwrap(), &nbd]), 1);
    assert!(error.contains("is sparse, and has no space for all of its 32M"), "{error}");
    assert!(error.contains("free space on its file system, or serve"), "{error}");
}

/// A pool or a backing whose last name is gone is said once, and can be saved.
#[test]
fn a_pool_or_a_backing_that_is_removed_is_told() {
    let dir = scratch();
    let [pool, backing, stderr, copy] =
        ["pool", "backing", "stderr", "copy"].map(|name| text(&dir, name));
    ok(["create", &pool, "--engine=log", "--size=16M"]);
    std::fs::File::create(&backing).unwrap().set_len(64 << 20).unwrap();
    let mut command = tidegate();
    command.arg("serve").arg(&pool).stderr(std::fs::File::create(&stderr).unwrap());
    let control = text(&dir, "control");
    command.arg(format!("--control=unix:{control}"));
    command.args([format!("--nbd=unix:{}", text(&dir, "socket")), format!("--backing={backing}")]);
    let server = Server::spawn(&mut command);
    let mut client = nbd::Client::connect(Path::new(&text(&dir, "socket"))).unwrap();
    client.send_write(1, 0, &[5; 4096]).unwrap();
    assert_eq!(client.receive().unwrap(), (1, 0));
    // A name more or less is no matter.
    std::fs::hard_link(&backing, text(&dir, "second")).unwrap();
    std::fs::remove_file(text(&dir, "second")).unwrap();
    let said = || std::fs::read_to_string(&stderr).unwrap();
    let removed = |name: &str| {
        std::fs::remove_file(text(&dir, name)).unwrap();
        let wanted = format!("the {name} ");
        let is_told = |line: &str| line.contains(&wanted) && line.contains(" was removed: ");
        let is_there = |said: &str| said.lines().any(is_told);
        await_said(Path::new(&stderr), is_there, std::thread::yield_now);
    };
    removed("backing");
    removed("pool");
    ok(["snapshot", &control, &copy]);
    assert_eq!(std::fs::read(&copy).unwrap()[..4096], [5; 4096]);
    assert_eq!(said().lines().count(), 2, "{}", said());
    assert!(server.stop(Signal::TERM).0.success());
}

/// What counts is the address that the socket has, however it was written.
#[test]
fn addresses_that_other_machines_reach_are_told() {
    let dir = with_pool();
    let stderr = text(&dir, "stderr");
    let said = |addresses: &[&str]| {
        let mut command = tidegate();
        command.arg("serve").arg(text(&dir, "pool")).args(addresses);
        command.arg(format!("--nbd=unix:{}", text(&dir, "socket")));
        let server = Server::spawn(command.stderr(std::fs::File::create(&stderr).unwrap()));
        let said = std::fs::read_to_string(&stderr).unwrap();
        assert!(server.stop(Signal::TERM).0.success());
        said
    };
    let mut local = vec!["--nbd=tcp:127.0.0.1:0", "--nbd=tcp:localhost:0", "--nbd=tcp:127.2:0"];
    let mut open = vec!["--nbd=tcp:0.0.0.0:0", "--nbd=tcp:0:0"];
    if std::net::TcpListener::bind("[::1]:0").is_ok() {
        local.extend(["--nbd=tcp:[::1]:0", "--nbd=tcp:[::ffff:127.0.0.1]:0"]);
        open.extend(["--nbd=tcp:[::]:0", "--nbd=tcp:[::ffff:0.0.0.0]:0"]);
    }
    local.push("--metrics=tcp:127.0.0.1:0");
    open.push("--metrics=tcp:0:0");
    assert_eq!(said(&local), "");
    let warned = said(&open);
    let is_warning = |line: &&str| line.contains("is open to the network: each client");
    assert_eq!(warned.lines().filter(is_warning).count(), open.len(), "{warned}");
    assert!(warned.lines().any(|line| line.contains("can read the metrics")), "{warned}");
}

/// The limit of open files is raised as far as possible. A server tells at its start how many
/// connections the limit is enough for, and each takes as many descriptors as it counts.
#[test]
fn a_limit_that_is_too_low_for_the_connections_is_told_at_the_start() {
    let dir = with_pool();
    let [socket, stderr] = ["socket", "stderr"].map(|name| text(&dir, name));
    let served = |files: &str| {
        let mut command = tool("prlimit", "util-linux");
        command.arg(format!("--nofile={files}")).arg(env!("CARGO_BIN_EXE_tidegate")).arg("serve");
        command.arg(text(&dir, "pool")).arg(format!("--nbd=unix:{socket}"));
        command.stderr(std::fs::File::create(&stderr).unwrap());
        Server::spawn(&mut command)
    };
    let said = || std::fs::read_to_string(&stderr).unwrap();
    assert!(served("64:1024").stop(Signal::TERM).0.success());
    assert!(!said().contains("may be open"), "{}", said());
    let server = served("64:64");
    let line = said();
    assert!(line.contains("64 files may be open, enough for ") && line.lines().count() == 1);
    let (_, rest) = line.split_once("enough for ").unwrap();
    let (possible, rest) = rest.split_once(' ').unwrap();
    assert!(rest.starts_with("connections of 256 (--max-connections)"), "{line}");
    let possible: usize = possible.parse().unwrap();
    let connect = |_| nbd::Client::connect(Path::new(&socket)).expect("it is served");
    let clients: Vec<_> = (0..possible).map(connect).collect();
    assert!(possible > 10, "{line}");
    assert_eq!(said(), line, "the limit was enough");
    drop(clients);
    assert!(server.stop(Signal::TERM).0.success());
}

/// A server without descriptors for its clients says so once, with what to do, and takes clients
/// again.
#[test]
fn a_lack_of_descriptors_is_said_once() {
    let dir = with_pool();
    let socket = text(&dir, "socket");
    let log = std::fs::File::create(text(&dir, "stderr")).unwrap();
    let mut command = tool("prlimit", "util-linux");
    command.arg("--nofile=32").arg(env!("CARGO_BIN_EXE_tidegate")).arg("serve");
    command.arg(text(&dir, "pool")).arg(format!("--nbd=unix:{socket}")).stderr(log);
    let server = Server::spawn(&mut command);
    let clients: Vec<_> =
        (0..40).map(|_| std::os::unix::net::UnixStream::connect(&socket).unwrap()).collect();
    let stderr = text(&dir, "stderr");
    let said = || std::fs::read_to_string(&stderr).unwrap();
    let is_told = |said: &str| said.lines().count() >= 2;
    await_said(Path::new(&stderr), is_told, std::thread::yield_now);
    // Ten more attempts of the server to accept.
    std::thread::sleep(Duration::from_secs(1));
    let lines = said();
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(lines.contains("Too many open files") && lines.contains("LimitNOFILE="), "{lines}");
    drop(clients);
    nbd::Client::connect(Path::new(&socket)).expect("it takes clients again");
    assert!(server.stop(Signal::TERM).0.success());
}
