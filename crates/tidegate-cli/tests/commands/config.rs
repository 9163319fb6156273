//! `serve --config` and `config check`: one server with many devices, and what is said of a file
//! that is wrong.

use std::io::{BufRead as _, Read as _};
use std::path::PathBuf;
use std::process::Stdio;

use rustix::fs::{CWD, FileType, mknodat};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::nbd::Client;
use crate::support::{Server, ok, run, scratch, succeed, tidegate, tool};

struct Scene {
    dir: TempDir,
}

impl Scene {
    /// A directory with two pools and the configuration `text`, in which `DIR` is the directory.
    fn new(text: &str) -> Self {
        let scene = Self { dir: scratch() };
        for pool in ["one", "two"] {
            ok(["create", &scene.path(pool), "--engine=btt", "--size=32M"]);
        }
        scene.write(text);
        scene
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, text: &str) {
        let text = text.replace("DIR", self.dir.path().to_str().unwrap());
        std::fs::write(self.path("config.toml"), text).unwrap();
    }

    /// Status and lines of `config check`, without the name of the file.
    fn check(&self) -> (Option<i32>, Vec<String>) {
        let file = self.path("config.toml");
        let output = run(["config", "check", &file]);
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text.lines().map(|line| line.replace(&format!("{file}:"), ""));
        (output.status.code(), lines.collect())
    }

    /// The one line with which `serve --config` is refused.
    fn refusal(&self) -> String {
        let output = run(["serve", "--config", &self.path("config.toml")]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
        error
    }

    fn serve(&self) -> Server {
        Server::spawn(tidegate().args(["serve", "--config", &self.path("config.toml")]))
    }
}

const TWO: &str = r#"
nbd = ["unix:DIR/socket", "tcp:127.0.0.1:0"]
metrics = "unix:DIR/metrics"
max-connections = 7
request-memory = "64M"
log-format = "json"

[[device]]
pool = "DIR/one"
control = "unix:DIR/control"
export = "one"

[[device]]
pool = "DIR/two"
export = "two"
dram = "lru:1M"
read-only = false
domain = "volatile"
media = "dram"
"#;

#[test]
fn one_server_has_an_export_for_each_device() {
    let scene = Scene::new(TWO);
    assert_eq!(scene.check().0, Some(0));
    let server = scene.serve();
    assert!(server.banner.iter().any(|line| line.starts_with("export") && line.contains("two")));
    let socket = PathBuf::from(scene.path("socket"));
    let mut client = Client::connect(&socket).expect("the first device is the default");
    client.send_write(1, 0, &[7; 4096]).unwrap();
    assert_eq!(client.receive().unwrap(), (1, 0));
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", scene.path("socket"));
    std::fs::write(scene.path("data"), [9; 8192]).unwrap();
    succeed(tool("nbdcopy", "libnbd-bin").args([scene.path("data"), uri("two")]));
    // Each is counted for itself.
    let written = |target: &str| {
        let stat = ok(["stat", &scene.path(target), "--json"]);
        let stat: serde_json::Value = serde_json::from_str(&stat).unwrap();
        let metrics = stat["metrics"].as_array().unwrap().clone();
        let found = metrics
            .iter()
            .find(|it| it["name"] == "written_bytes" && it["labels"]["level"] == "front_end");
        found.unwrap()["value"].as_u64().unwrap()
    };
    assert_eq!((written("one"), written("control"), written("two")), (4096, 4096, 8192));
    let mut curl = tool("curl", "curl");
    let page = curl.args(["-s", "--unix-socket", &scene.path("metrics"), "http://it/metrics"]);
    let page = succeed(page);
    for line in [
        r#"tidegate_written_bytes_total{export="one",level="front_end",tier="nbd"} 4096"#,
        r#"tidegate_written_bytes_total{export="two",level="front_end",tier="nbd"} 8192"#,
        r#"tidegate_connections_total{level="front_end",tier="nbd"}"#,
    ] {
        assert!(page.contains(line), "{line} is missing in\n{page}");
    }
    let (status, rest) = server.stop(Signal::TERM);
    assert!(status.success() && rest.contains("stopped"), "{rest}");
    // What the DRAM tier had is in the pool.
    let server = scene.serve();
    succeed(tool("nbdcopy", "libnbd-bin").args([uri("two"), scene.path("copy")]));
    assert_eq!(std::fs::read(scene.path("copy")).unwrap()[..8192], [9; 8192]);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn each_fault_of_a_file_has_its_line_and_column() {
    let scene = Scene::new(
        r#"nbd = ["unix:/s", "unx:/s", 4]
metricks = "tcp:127.0.0.1:1"
max-connections = 0

[[device]]
pool = "DIR/one"
drm = "lru:1M"
domain = "ardr"
read-only = "yes"

[[device]]
export = ""

[tls]
cert = "a.pem"
"#,
    );
    let (status, lines) = scene.check();
    assert_eq!(status, Some(1));
    let expected = [
        ("1:19: ", "expected unix:PATH"),
        ("1:29: ", "`nbd` is a list of texts, found integer"),
        ("2:1: ", "`metricks` is no key of the file; the nearest is `metrics`"),
        ("3:19: ", "a whole number from 1 on is expected"),
        ("7:1: ", "`drm` is no key of device; the nearest is `dram`"),
        ("8:10: ", "ardr"),
        ("9:13: ", "`read-only` is true or false, found string"),
        ("11:1: ", "needs its `pool`"),
        ("14:1: ", "needs the files `cert` and `key`"),
    ];
    for (line, (position, text)) in lines.iter().zip(expected) {
        assert!(line.starts_with(position) && line.contains(text), "{line}: {position} {text}");
    }
    assert_eq!(lines.len(), expected.len(), "{lines:#?}");
    let error = scene.refusal();
    assert!(error.contains("config.toml:1:19: ") && error.contains("and 8 more"), "{error}");
}

#[test]
fn a_file_that_is_no_toml_or_contradicts_itself_is_refused() {
    let scene = Scene::new("nbd = [\"unix:/s\"\n[[device]\n");
    let (status, lines) = scene.check();
    assert!(status == Some(1) && lines.iter().any(|line| line.starts_with("2:")), "{lines:?}");
    scene.write("");
    let (_, lines) = scene.check();
    assert!(lines.len() == 2 && lines[1].contains("[[device]]"), "{lines:?}");
    scene.write(
        "nbd = [\"unix:/s\", \"unix:/s\"]\n[[device]]\npool = \"/p\"\n[[device]]\npool = \"/p\"\n",
    );
    let (_, lines) = scene.check();
    assert!(lines[0].starts_with("1:19: unix:/s is given twice"), "{lines:?}");
    assert!(lines[1].starts_with("4:1: two devices have the export"), "{lines:?}");
    assert!(lines[2].starts_with("4:1: two devices have the pool /p"), "{lines:?}");
    let error = run(["config", "check", &scene.path("none")]);
    assert_eq!(error.status.code(), Some(1));
    let both = run(["serve", &scene.path("one"), "--config", &scene.path("config.toml")]);
    assert_eq!(both.status.code(), Some(2), "a pool and a file");
}

#[test]
fn each_line_of_a_json_log_is_an_object() {
    let scene = Scene::new(TWO);
    let mut command = tidegate();
    command.args(["serve", "--config", &scene.path("config.toml")]).stderr(Stdio::piped());
    let mut server = Server::spawn(&mut command);
    let mut stderr = server.stderr();
    let mut text = String::new();
    rustix::process::kill_process(server.pid(), Signal::USR1).unwrap();
    // Signals that are pending at the same time are handled in any order.
    stderr.read_line(&mut text).unwrap();
    assert!(server.stop(Signal::TERM).0.success());
    stderr.read_to_string(&mut text).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert_eq!(lines[0]["message"], "SIGUSR1: ignored");
    assert_eq!(
        (&lines[1]["level"], &lines[1]["message"]),
        (&"info".into(), &"SIGTERM: stopping".into())
    );
    assert!(lines[0]["time"].as_str().unwrap().ends_with('Z'));
}

#[test]
fn one_pool_by_two_paths_is_a_fault_and_so_is_a_mode_that_is_none() {
    let scene = Scene::new(
        r#"nbd = ["unix:DIR/socket"]

[[device]]
pool = "DIR/one"
export = "one"

[[device]]
pool = "DIR/./one"
export = "point"

[[device]]
pool = "DIR/link"
export = "link"
mode = "fast"

[[device]]
pool = "DIR/two"
export = "two"
"#,
    );
    std::os::unix::fs::symlink("one", scene.path("link")).unwrap();
    let (status, lines) = scene.check();
    assert_eq!((status, lines.len()), (Some(1), 4), "{lines:#?}");
    let of = |start: &str| lines.iter().filter(|line| line.starts_with(start)).count();
    let told = lines.iter().filter(|line| line.contains("two devices have the pool")).count();
    // The third device is the pool of both others.
    assert_eq!((told, of("7:"), of("11:")), (3, 1, 2), "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains("expected wb, wt, wa")), "{lines:#?}");
}

/// What the server would refuse later is a fault of the file.
#[test]
fn each_value_that_the_server_would_refuse_is_a_fault() {
    let scene = Scene::new("");
    let device = "\n[[device]]\npool = \"DIR/one\"\n";
    let long = "x".repeat(4097);
    for (file, expected) in [
        (format!("request-memory = \"1M\"{device}"), "2:18: memory of 1048576 bytes"),
        (
            format!("request-memory = \"64M\"\nmax-connections = 656{device}"),
            "2:18: 656 connections with 67108864 bytes",
        ),
        (
            // With TLS each connection takes more.
            format!("request-memory = \"64M\"\n[tls]\ncert = \"a\"\nkey = \"b\"\n{device}"),
            "2:18: 256 connections with 67108864 bytes",
        ),
        (format!("{device}export = \"{long}\""), "5:10: `export`: an export's name has 4097 bytes"),
        (format!("{device}export = \"a\\u0000b\""), "5:10: `export` has a NUL"),
        ("[[device]]\npool = \"a\\u0000b\"\n".into(), "3:8: `pool` has a NUL"),
        ("[[device]]\npool = \"\"\n".into(), "3:8: `pool`: the path is empty"),
        (format!("metrics = \"unix:a\\u0000\"{device}"), "2:11: `metrics` has a NUL"),
        (format!("metrics = \"unix:{long}\"{device}"), "2:11: `metrics`: cannot listen at"),
        (format!("{device}control = \"unix:{long}\""), "5:11: `control`: cannot listen at"),
        (
            format!("{device}backing = \"DIR/x\"\natomic-flush = true\ndram = \"transit:1M\""),
            "6:16: --atomic-flush and --dram exclude each other",
        ),
        (
            format!("{device}backing = \"DIR/x\"\natomic-flush = true\nmode = \"wt\""),
            "7:8: `mode`: ",
        ),
        (format!("{device}mode = \"wb\""), "5:8: `mode` is for pools with a backing"),
        (format!("{device}keep-dirty = true"), "5:14: `keep-dirty` is for pools with a backing"),
        (format!("{device}atomic-flush = true"), "5:16: `atomic-flush` is for pools with"),
        (
            format!("{device}backing = \"DIR/x\"\nread-only = true"),
            "6:13: a pool with a `backing` cannot be served `read-only`",
        ),
    ] {
        scene.write(&format!("nbd = [\"unix:DIR/socket\"]\n{file}"));
        let (status, lines) = scene.check();
        assert_eq!((status, lines.len()), (Some(1), 1), "{file}: {lines:?}");
        assert!(lines[0].starts_with(expected), "{expected}: {lines:?}");
        assert!(scene.refusal().contains(expected));
    }
}

/// An address may be missing only because another fault hides it.
#[test]
fn a_faulty_address_or_table_is_not_told_as_a_missing_address_too() {
    let scene = Scene::new("");
    for (file, expected) in [
        ("[[device]]\nublk = true\n", "1:1: a `[[device]]` needs its `pool`"),
        ("[[device]]\npool = \"DIR/one\"\nvhost-user = 1\n", "3:14: `vhost-user` is a text"),
        ("nbd = [\"unix\"]\n[[device]]\npool = \"DIR/one\"\n", "1:8: `nbd`: cannot listen at"),
        ("[[device]]\npool = \"DIR/one\"\n", "1:1: no address to listen at"),
    ] {
        scene.write(file);
        let (_, lines) = scene.check();
        assert!(lines.len() == 1 && lines[0].starts_with(expected), "{expected}: {lines:?}");
    }
}

/// `config check` demands a backing with these options.
#[test]
fn only_engines_with_a_backing_have_modes_atomic_flush_or_dirty_data() {
    for engine in tidegate::stack::REGISTRY.engines() {
        let traits = engine.traits();
        let is_of_backed_pools = traits.has_modes || traits.has_atomic_flush || traits.keeps_dirty;
        assert!(traits.needs_backing || !is_of_backed_pools, "{engine}");
    }
}

#[test]
fn addresses_that_collide_by_their_meaning_are_a_fault() {
    let scene = Scene::new("");
    let device = "[[device]]\npool = \"DIR/one\"\n";
    for (file, expected) in [
        (
            format!("nbd = [\"tcp:0.0.0.0:9\", \"tcp:[::ffff:127.0.0.1]:9\"]\n{device}"),
            "1:25: tcp:[::ffff:127.0.0.1]:9 collides with tcp:0.0.0.0:9",
        ),
        (
            format!("nbd = [\"tcp:127.0.0.1:9\"]\nmetrics = \"tcp:[::]:9\"\n{device}"),
            "2:11: tcp:[::]:9 collides with tcp:127.0.0.1:9",
        ),
        (
            format!("nbd = [\"unix:/n/s\"]\n{device}control = \"unix:/n/./s\"\n"),
            "2:1: unix:/n/./s is given twice",
        ),
    ] {
        scene.write(&file);
        let (_, lines) = scene.check();
        assert!(lines.len() == 1 && lines[0].starts_with(expected), "{expected}: {lines:?}");
    }
    let (one, socket) = (scene.path("one"), format!("--nbd=unix:{}", scene.path("socket")));
    let metrics = format!("--metrics=unix:{}", scene.path("./socket"));
    let output = run(["serve", &one, &socket, &metrics]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("/socket is given twice"), "{error}");
}

#[test]
fn a_backing_belongs_to_one_device_and_is_no_pool() {
    let scene = Scene::new("");
    std::fs::write(scene.path("disk"), [0; 8192]).unwrap();
    std::os::unix::fs::symlink("disk", scene.path("link")).unwrap();
    let devices = |backings: [&str; 2]| {
        let [one, two] = backings;
        scene.write(&format!(
            "nbd = [\"unix:DIR/socket\"]\n\
             [[device]]\nexport = \"one\"\npool = \"DIR/one\"\nbacking = \"{one}\"\n\
             [[device]]\nexport = \"two\"\npool = \"DIR/two\"\nbacking = \"{two}\"\n",
        ));
        scene.check().1
    };
    for (backings, expected) in [
        (["DIR/disk", "delay:1ms,DIR/link"], "6:1: two devices have the backing delay:1ms,"),
        (["nbd://host/x", "nbd://host:10809/x"], "6:1: two devices have the backing nbd://"),
        (["DIR/disk", "DIR/two"], "6:1: the backing file:"),
        (["DIR/two", "DIR/disk"], "6:1: the backing file:"),
        (["DIR/one", "DIR/disk"], "2:1: the backing file:"),
    ] {
        let lines = devices(backings);
        assert!(lines.len() == 1 && lines[0].starts_with(expected), "{backings:?}: {lines:?}");
    }
    assert!(devices(["null:1M", "null:1M"])[0].contains("nothing wrong"));
}

/// A stop ends the exports of a server before it writes dirty data to backings.
#[test]
fn a_backing_that_the_same_server_offers_is_a_fault() {
    let scene = Scene::new("");
    for (nbd, backing, is_own) in [
        ("unix:DIR/socket", "nbd+unix:///two?socket=DIR/./socket", true),
        ("unix:DIR/socket", "delay:1ms,nbd+unix:///two?socket=DIR/socket", true),
        ("unix:DIR/socket", "nbd+unix:///two?socket=DIR/other", false),
        ("tcp:127.0.0.1:9", "nbd://localhost:9/two", true),
        ("tcp:0.0.0.0:9", "nbd://192.0.2.1:9/two", false),
    ] {
        scene.write(&format!(
            "nbd = [\"{nbd}\"]\n\
             [[device]]\nexport = \"one\"\npool = \"DIR/one\"\nbacking = \"{backing}\"\n\
             [[device]]\nexport = \"two\"\npool = \"DIR/two\"\n",
        ));
        let (status, lines) = scene.check();
        assert_eq!(status == Some(1), is_own, "{lines:?}");
        let expected = if is_own { "2:1: the backing " } else { "nothing wrong" };
        assert!(lines.len() == 1 && lines[0].contains(expected), "{lines:?}");
        assert_eq!(lines[0].contains("is an export of this server"), is_own, "{lines:?}");
    }
    let nbd = format!("--nbd=unix:{}", scene.path("socket"));
    let backing = format!("--backing=nbd+unix:///?socket={}", scene.path("socket"));
    let output = run(["serve", &scene.path("one"), &nbd, &backing]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("is an export of this server"), "{error}");
}

/// The server waits until such a file is replaced, so that only the check tells.
#[test]
fn a_pool_backing_or_key_of_another_kind_is_told() {
    let scene = Scene::new(
        "nbd = [\"unix:DIR/socket\"]\n[tls]\ncert = \"DIR/fifo\"\nkey = \"DIR/none\"\n\
         [[device]]\npool = \"DIR\"\nbacking = \"DIR/fifo\"\n\
         [[device]]\npool = \"DIR/later\"\nbacking = \"DIR/one\"\nexport = \"later\"\n",
    );
    mknodat(CWD, scene.path("fifo"), FileType::Fifo, 0o600.into(), 0).unwrap();
    let (status, lines) = scene.check();
    assert_eq!((status, lines.len()), (Some(1), 3), "{lines:#?}");
    for (line, expected) in lines.iter().zip([
        "5:1: device \"\": the pool ",
        "5:1: device \"\": the backing ",
        "TLS file ",
    ]) {
        assert!(line.starts_with(expected), "{line}");
    }
    assert!(lines[0].contains("it is a directory: a regular file or a devdax"), "{lines:#?}");
    assert!(lines[1].contains("it is a FIFO: a regular file or a block device"), "{lines:#?}");
}

/// No command waits for the other end of a FIFO, or reads a file without an end.
#[test]
fn what_is_no_file_of_a_bounded_size_is_not_read() {
    let dir = scratch();
    let [fifo, huge] = ["fifo", "huge"].map(|name| dir.path().join(name).display().to_string());
    mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
    std::fs::File::create(&huge).unwrap().set_len(1 << 40).unwrap();
    for (path, found) in [
        ("/dev/zero", "it is a character device: a regular file is expected"),
        (&fifo, "it is a FIFO: a regular file is expected"),
        ("/", "it is a directory: a regular file is expected"),
        (&huge, "it has more than"),
    ] {
        let value = format!("io-classes=@{path}");
        for args in [
            &["config", "check", path][..],
            &["serve", "--config", path],
            &["set", "/nowhere", &value],
        ] {
            let error = String::from_utf8(run(args).stderr).unwrap();
            let expected = format!("cannot read {path}: {found}");
            assert!(error.contains(&expected), "{args:?}: {error}");
        }
    }
}

/// A server that is open to the network, which is a warning; of which the memory is gone at the
/// stop, which is an error; and the stop itself.
#[test]
fn a_log_level_leaves_out_what_matters_less() {
    const LOST: &str = "cannot be written back: lost: ";
    for (level, lines) in [
        ("info", &["open to the network", "SIGTERM: stopping", LOST][..]),
        ("warning", &["open to the network", LOST]),
        ("error", &[LOST]),
    ] {
        let scene = Scene::new(&format!(
            "nbd = [\"unix:DIR/socket\", \"tcp:0.0.0.0:0\"]\nlog-level = \"{level}\"\n\
             [[device]]\npool = \"DIR/one\"\ndram = \"transit-no-eager:4M\"\n"
        ));
        let mut command = tidegate();
        let stderr = std::fs::File::create(scene.path("stderr")).unwrap();
        command.args(["serve", "--config", &scene.path("config.toml")]).stderr(stderr);
        let server = Server::spawn(&mut command);
        let mut client = Client::connect(&PathBuf::from(scene.path("socket"))).unwrap();
        client.send_write(1, 0, &[7; 4096]).unwrap();
        assert_eq!(client.receive().unwrap(), (1, 0));
        let pool = std::fs::File::options().write(true).open(scene.path("one")).unwrap();
        pool.set_len(8192).unwrap();
        assert_eq!(server.stop(Signal::TERM).0.code(), Some(1), "{level}");
        let said = std::fs::read_to_string(scene.path("stderr")).unwrap();
        assert_eq!(said.lines().count(), lines.len(), "{level}: {said}");
        for (line, expected) in said.lines().zip(lines) {
            assert!(line.contains(expected), "{level}: {expected} is missing in {line}");
        }
    }
}
