//! `serve` under a service manager: sockets that are passed, what it is told, and the units.

use std::collections::BTreeSet;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::nbd::Client;
use crate::support::{self, ok, scratch, succeed, tidegate, tool};

struct Scene {
    dir: TempDir,
    /// What the service manager is told.
    notices: UnixDatagram,
}

impl Scene {
    fn new() -> Self {
        let dir = scratch();
        ok(["create", dir.path().join("pool").to_str().unwrap(), "--engine=btt", "--size=32M"]);
        let notices = UnixDatagram::bind(dir.path().join("notices")).unwrap();
        notices.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self { dir, notices }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// The next message to the service manager.
    fn told(&self) -> String {
        let mut bytes = [0; 1000];
        let received = self.notices.recv(&mut bytes).expect("the server says something");
        String::from_utf8(bytes[..received].to_vec()).unwrap()
    }

    /// Starts a server as systemd does, with a socket that is there before it.
    fn activate(&self) -> Activated {
        let mut systemd = tool("systemd-socket-activate", "systemd");
        systemd.arg("-l").arg(self.path("socket"));
        systemd.arg("-E").arg(format!("NOTIFY_SOCKET={}", self.text("notices")));
        systemd.arg(env!("CARGO_BIN_EXE_tidegate")).arg("serve").arg(self.path("pool"));
        systemd.args(["--nbd", "systemd", "--metrics"]);
        systemd.arg(format!("unix:{}", self.text("metrics")));
        systemd.arg(format!("--control=unix:{}", self.text("control")));
        let child = systemd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Activated(child.spawn().expect("systemd-socket-activate starts"))
    }
}

struct Activated(Child);

impl Drop for Activated {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Connects to a socket that will be there, which starts the server.
fn connect(socket: &Path) -> UnixStream {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_server_takes_passed_sockets_and_says_ready_when_all_is_there() {
    let scene = Scene::new();
    let mut server = scene.activate();
    let early = connect(&scene.path("socket"));
    let told = scene.told();
    assert!(told.starts_with("READY=1\n") && told.contains("STATUS=serving 1 device"), "{told}");
    // All at once, without another try.
    for socket in ["control", "metrics", "socket"] {
        UnixStream::connect(scene.path(socket)).unwrap_or_else(|e| panic!("{socket}: {e}"));
    }
    let mut client = Client::connect(&scene.path("socket")).unwrap();
    client.send_write(1, 0, &[3; 4096]).unwrap();
    assert_eq!(client.receive().unwrap(), (1, 0));
    drop((client, early));
    kill_process(Pid::from_child(&server.0), Signal::TERM).unwrap();
    let told = scene.told();
    assert!(told.starts_with("STOPPING=1\n"), "{told}");
    assert!(server.0.wait().unwrap().success());
    // The socket is the service manager's: clients may wait there for the next server.
    assert!(scene.path("socket").exists() && !scene.path("control").exists());
}

/// A server that cannot start never says that it is ready.
#[test]
fn a_server_that_fails_is_never_ready() {
    let scene = Scene::new();
    let blocked = scene.path("metrics");
    std::fs::write(&blocked, "no socket").unwrap();
    let mut server = scene.activate();
    let _client = connect(&scene.path("socket"));
    assert_eq!(server.0.wait().unwrap().code(), Some(1));
    scene.notices.set_nonblocking(true).unwrap();
    assert!(scene.notices.recv(&mut [0; 100]).is_err(), "it was told something");
}

#[test]
fn without_passed_sockets_the_server_says_what_is_missing() {
    let scene = Scene::new();
    let output = support::run(["serve", &scene.text("pool"), "--nbd", "systemd"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
    assert!(error.contains("no sockets were passed (LISTEN_FDS)"), "{error}");
}

/// Else the server would take a socket of its own for one that was passed.
#[test]
fn a_count_of_sockets_that_were_not_all_passed_is_refused() {
    let scene = Scene::new();
    let start = "import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
os.dup2(listener.fileno(), 3, inheritable=True)
os.closerange(4, 64)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='2')
os.execv(sys.argv[2], sys.argv[2:])";
    let mut python = tool("python3", "python3");
    python.args(["-c", start]).arg(scene.path("socket")).arg(env!("CARGO_BIN_EXE_tidegate"));
    let output = python.arg("serve").arg(scene.path("pool")).args(["--nbd", "systemd"]).output();
    let output = output.unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("a socket that was passed"), "{error}");
}

fn contrib(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib").join(name)
}

/// The units, with the binary of this build and a directory of its own in it; `change` makes of the
/// text of a unit another one.
fn units(dir: &TempDir, change: impl Fn(String) -> String) -> [PathBuf; 3] {
    ["tidegate.service", "tidegate.socket", "tidegate-ublk@.service"].map(|name| {
        let text = std::fs::read_to_string(contrib("systemd").join(name)).unwrap();
        let text = text.replace("/usr/bin/tidegate", env!("CARGO_BIN_EXE_tidegate"));
        // What the manual is, the tests of pages say.
        let kept = text.lines().filter(|line| !line.starts_with("Documentation="));
        let unit = dir.path().join(name);
        std::fs::write(&unit, change(kept.collect::<Vec<_>>().join("\n") + "\n")).unwrap();
        unit
    })
}

/// Whether systemd would load the units, and what it says of them. Other units of the machine may
/// have faults of their own.
fn verify(units: [PathBuf; 3]) -> (bool, Vec<String>) {
    let mut analyze = tool("systemd-analyze", "systemd");
    let found = analyze.args(["verify", "--man=no"]).args(units).output().unwrap();
    let said = String::from_utf8_lossy(&found.stderr);
    let ours = said.lines().filter(|line| line.contains("tidegate")).map(str::to_owned);
    (found.status.success(), ours.collect())
}

#[test]
fn systemd_finds_nothing_wrong_in_the_units() {
    let dir = tempfile::tempdir().unwrap();
    let ours = units(&dir, |text| text);
    assert_eq!(verify(ours.clone()), (true, vec![]));
    let mut analyze = tool("systemd-analyze", "systemd");
    analyze.args(["security", "--offline=true", "--threshold=20", "--no-pager"]);
    succeed(analyze.arg(&ours[0]));
}

/// What is wrong in a unit is said in words, with status 0; a program that is not there has
/// status 1.
#[test]
fn systemd_finds_what_is_wrong_in_a_unit() {
    let dir = tempfile::tempdir().unwrap();
    for (right, wrong, is_loaded, told) in [
        ("ProtectClock=", "ProtectClocks=", true, "Unknown key 'ProtectClocks' in section"),
        ("RequiresMountsFor=", "RequiresMounts=", true, "Unknown key 'RequiresMounts' in section"),
        ("SocketMode=", "SocketMood=", true, "Unknown key 'SocketMood' in section [Socket]"),
        ("=strict", "=strickt", true, "Failed to parse protect system value"),
        (
            concat!(env!("CARGO_BIN_EXE_tidegate"), " serve --"),
            "/none --",
            false,
            "/none is not executable",
        ),
    ] {
        let (status, said) = verify(units(&dir, |text| text.replace(right, wrong)));
        assert_eq!((status, said.len()), (is_loaded, 1), "{wrong}: {said:?}");
        assert!(said[0].contains(told), "{said:?}");
    }
}

/// The names of the system calls in `set`, and in the sets that it names.
fn calls_of(set: &str, found: &mut BTreeSet<String>) {
    let listed = succeed(tool("systemd-analyze", "systemd").args(["syscall-filter", set]));
    for line in listed.lines().skip(1).map(str::trim) {
        match line {
            "" => {}
            line if line.starts_with('#') => {}
            line if line.starts_with('@') => calls_of(line, found),
            line => drop(found.insert(line.to_owned())),
        }
    }
}

/// The system calls that the filter of the unit lets through.
fn allowed_calls() -> BTreeSet<String> {
    let unit = std::fs::read_to_string(contrib("systemd/tidegate.service")).unwrap();
    let mut allowed = BTreeSet::new();
    for filter in unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")) {
        match filter.strip_prefix('~') {
            None => filter.split(' ').for_each(|set| calls_of(set, &mut allowed)),
            Some(denied) => {
                let mut out = BTreeSet::new();
                denied.split(' ').for_each(|set| calls_of(set, &mut out));
                allowed.retain(|call| !out.contains(call));
            }
        }
    }
    allowed
}

/// A configuration with each kind of tier and of backing, and TLS, in the directory of `scene`.
fn configure_all(scene: &Scene) {
    let config = format!(
        "nbd = [\"unix:{0}/socket\", \"tcp:localhost:0\"]\nmetrics = \"unix:{0}/metrics\"\n\
         [tls]\ncert = \"{0}/ca-cert.pem\"\nkey = \"{0}/key.pem\"\nwhen = \"allow\"\n\
         [[device]]\nexport = \"a\"\npool = \"{0}/pool\"\ndram = \"transit:1M\"\n\
         [[device]]\nexport = \"b\"\npool = \"{0}/log\"\nbacking = \"{0}/disk\"\n\
         [[device]]\nexport = \"c\"\npool = \"{0}/cache\"\nbacking = \"{0}/disk2\"\n\
         [[device]]\nexport = \"d\"\npool = \"{0}/log2\"\n\
         backing = \"nbd+unix:///?socket={0}/store.socket\"\n",
        scene.dir.path().display()
    );
    std::fs::write(scene.path("config.toml"), config).unwrap();
    for (name, engine) in [("log", "log"), ("log2", "log"), ("cache", "cache"), ("store", "btt")] {
        ok(["create", &scene.text(name), &format!("--engine={engine}"), "--size=32M"]);
    }
    for disk in ["disk", "disk2"] {
        std::fs::File::create(scene.path(disk)).unwrap().set_len(64 << 20).unwrap();
    }
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(scene.path("ca-cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(scene.path("key.pem"), made.signing_key.serialize_pem()).unwrap();
}

/// Has a server that is configured so do what servers do.
fn use_all(scene: &Scene, server: &support::Server) {
    std::fs::write(scene.path("data"), vec![1; 1 << 20]).unwrap();
    let copy_to = |uri: &str| {
        succeed(tool("nbdcopy", "libnbd-bin").args(["--flush", &scene.text("data"), uri]));
    };
    for name in ["a", "b", "c", "d"] {
        copy_to(&format!("nbd+unix:///{name}?socket={}", scene.text("socket")));
    }
    let address = server.banner.iter().find_map(|line| line.rsplit_once("tcp:")).expect("a port");
    let port = address.1.rsplit(':').next().unwrap().trim_matches(|c: char| !c.is_ascii_digit());
    let certificates = scene.dir.path().display();
    copy_to(&format!("nbds://localhost:{port}/a?tls-certificates={certificates}"));
    for pool in ["pool", "log", "cache", "log2"] {
        ok(["stat", &scene.text(pool)]);
    }
    ok(["set", &scene.text("cache"), "size=24M"]);
    ok(["set", &scene.text("cache"), "size=32M"]);
    for pool in ["pool", "log"] {
        ok(["snapshot", &scene.text(pool), &scene.text(&format!("copy of {pool}"))]);
    }
    let mut curl = tool("curl", "curl");
    let socket = scene.text("metrics");
    let page = succeed(curl.args(["-s", "--unix-socket", &socket, "http://it/metrics"]));
    assert!(page.contains("tidegate_written_bytes_total"), "{page}");
}

/// The filter of the unit lets through all that a server does: each kind of tier and of backing,
/// with clients in the clear and with TLS, settings, another size, copies and metrics.
#[test]
fn the_sandbox_of_the_unit_allows_what_a_server_does() {
    let allowed = allowed_calls();
    assert!(allowed.len() > 100 && !allowed.contains("mount"), "{allowed:?}");
    let scene = Scene::new();
    configure_all(&scene);
    let store = support::Server::start(&scene.path("store"), &scene.path("store.socket"), &[]);
    let trace = scene.path("trace");
    let mut strace = tool("strace", "strace");
    strace.args(["-f", "-qq", "-o"]).arg(&trace).arg(env!("CARGO_BIN_EXE_tidegate"));
    strace.args(["serve", "--config", &scene.text("config.toml")]);
    let server = support::Server::spawn(&mut strace);
    use_all(&scene, &server);
    // strace passes the signal on to nobody: the server is its child.
    let children = succeed(
        tool("pgrep", "procps")
            .args(["-P", &rustix::process::Pid::as_raw_nonzero(server.pid()).to_string()]),
    );
    let child = children.trim().parse().expect("one child");
    kill_process(Pid::from_raw(child).unwrap(), Signal::TERM).unwrap();
    let (status, rest) = server.wait();
    assert!(status.success() && rest.contains("stopped"), "{rest}");
    assert!(store.stop(Signal::TERM).0.success());
    let traced = std::fs::read_to_string(&trace).unwrap();
    let name = |line: &str| {
        let call = line.split_whitespace().nth(1)?;
        Some(call.split_once('(')?.0.to_owned())
    };
    let used: BTreeSet<String> = traced.lines().filter_map(name).collect();
    for call in ["accept4", "connect", "ftruncate", "linkat"] {
        assert!(used.contains(call), "{call} is not traced: {used:?}");
    }
    let refused: Vec<_> = used.difference(&allowed).collect();
    assert!(refused.is_empty(), "the unit refuses {refused:?}");
}

/// What the file that is installed has in comments is what a server takes.
#[test]
fn the_example_of_a_configuration_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(contrib("tidegate.toml")).unwrap();
    let uncommented: Vec<_> = text
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => rest,
            _ => line,
        })
        .collect();
    let file = dir.path().join("all.toml");
    std::fs::write(&file, uncommented.join("\n")).unwrap();
    ok(["config", "check", file.to_str().unwrap()]);
    let mut plain = tidegate();
    let output = plain.args(["config", "check"]).arg(contrib("tidegate.toml")).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.code() == Some(1) && said.contains("no device to serve"), "{said}");
}
