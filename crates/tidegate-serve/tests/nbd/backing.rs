//! Our client, which backings are made of, against our server and those of other projects.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::backing::{BackingUrl, Opening};
use tidegate::device::conformance::{self, Promises};
use tidegate::device::nbd::{NbdAddress, NbdDevice, NbdOptions};
use tidegate::device::{BlockDevice, BlockDeviceExt, DeviceErrorKind, WriteFlags};
use tidegate_serve::nbd::{Export, Limits, ServerBuilder};

use crate::client::pattern;
use crate::harness::{TestServer, memory};

fn options(socket: &Path, export: &str) -> NbdOptions {
    NbdOptions {
        address: NbdAddress::Unix(socket.to_path_buf()),
        export: export.into(),
        name: format!("nbd+unix:///{export}?socket={}", socket.display()),
        timeout: Duration::from_secs(30),
        block_bytes: None,
    }
}

fn open(socket: &Path) -> NbdDevice {
    NbdDevice::open(&options(socket, "")).expect("the server is ready")
}

#[test]
fn it_conforms_over_our_server() {
    let server = TestServer::memory();
    let device: Arc<dyn BlockDevice> = Arc::new(open(&server.path()));
    assert_eq!(device.geometry().size_bytes(), 4 << 20);
    conformance::check(&*device, Promises::default());
    conformance::check_started(&device, Promises::default());
}

#[test]
fn a_backing_has_the_blocks_of_its_pool_or_else_those_that_the_server_prefers() {
    let server = TestServer::memory();
    let url = format!("nbd+unix:///?socket={}", server.path().display());
    let url: BackingUrl = url.parse().expect("a URL");
    for (asked, expected) in [(None, 4096), (Some(512), 512), (Some(2048), 2048)] {
        let opening = Opening { pool: Path::new("/nowhere"), block_bytes: asked };
        let backing = url.open(&opening).expect("the server is ready");
        assert_eq!(backing.device.geometry().block_bytes, expected, "{asked:?}");
    }
}

/// Requests longer than the server takes are cut.
#[test]
fn long_requests_fit_the_servers_limit() {
    let server = TestServer::limited(Limits { max_request_bytes: 64 << 10, ..Limits::default() });
    let device = open(&server.path());
    let data = pattern(40 << 20, 3);
    device.write(4096, &data, WriteFlags { fua: true }).expect("a long write");
    let mut back = vec![0; data.len()];
    device.read(4096, &mut back).expect("a long read");
    assert!(back == data);
}

#[test]
fn exports_are_told_apart_and_read_only_ones_refuse_changes() {
    let first = Export::new("first", memory(1 << 20)).description("for people");
    let second = Export::new("second", memory(2 << 20)).read_only(true);
    let server = TestServer::start(ServerBuilder::new().export(first).export(second));
    let named = |name: &str| NbdDevice::open(&options(&server.path(), name));
    let first = named("first").expect("it is there");
    let export = first.export();
    assert_eq!((export.name.as_str(), export.description.as_str()), ("first", "for people"));
    assert_eq!(export.size_bytes, 1 << 20);
    conformance::check_read_only(&named("second").expect("it can be read"));
    let error = named("third").map(|_| ()).expect_err("there is none");
    assert_eq!(error.kind(), DeviceErrorKind::Io);
    let cause = std::error::Error::source(&error).expect("the reason").to_string();
    assert!(cause.contains("no export of this name"), "{cause}");
}

#[test]
fn it_conforms_over_tcp() {
    use tidegate_serve::nbd::{ListenAddress, StopHandle};
    let address = ListenAddress::Tcp { host: "127.0.0.1".into(), port: 0 };
    let export = Export::new("", memory(4 << 20));
    let server = ServerBuilder::new().export(export).bind(&[address]).expect("bind");
    let bound = server.addresses().first().cloned().expect("one address");
    let ListenAddress::Tcp { host, port } = bound else { panic!("{bound} is no TCP port") };
    let stop = StopHandle::new().expect("stop handle");
    let handle = stop.clone();
    let thread = std::thread::spawn(move || server.run(&handle).expect("run"));
    let address = NbdAddress::Tcp { host, port };
    let device = NbdDevice::open(&NbdOptions { address, ..options(Path::new(""), "") });
    conformance::check(&device.expect("the server is ready"), Promises::default());
    stop.stop();
    thread.join().expect("the server stops");
}

/// A server of another project; killed when dropped.
struct Foreign {
    child: Child,
    socket: PathBuf,
}

impl Foreign {
    /// Starts `tool`, which is to listen at `socket`, and waits until it does.
    fn start(package: &str, tool: &str, arguments: &[&str], socket: &Path) -> Self {
        let mut command = Command::new(tool);
        command.args(arguments).stdin(Stdio::null());
        let child = command.spawn().unwrap_or_else(|error| {
            panic!("cannot run {tool}: {error}; install the Debian package {package}")
        });
        let mut server = Self { child, socket: socket.to_path_buf() };
        let deadline = Instant::now() + Duration::from_secs(30);
        // These servers tell nobody when they are ready; a refused connection costs a moment.
        while NbdDevice::open(&options(&server.socket, "")).is_err() {
            let ended = server.child.try_wait().expect("it can be waited for");
            assert!(ended.is_none() && Instant::now() < deadline, "{tool}: {ended:?}");
            std::thread::yield_now();
        }
        server
    }

    fn nbdkit(dir: &Path) -> Self {
        let (socket, disk) = (dir.join("nbdkit"), dir.join("disk"));
        let _ = std::fs::remove_file(&socket);
        let (socket_text, file) = (text(&socket), format!("file={}", disk.display()));
        let arguments = ["--foreground", "--unix", socket_text, "file", &file];
        Self::start("nbdkit", "nbdkit", &arguments, &socket)
    }

    fn kill(mut self) {
        self.child.kill().expect("it is alive");
        self.child.wait().expect("it can be waited for");
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn disk(dir: &Path, size_bytes: u64) {
    let file = std::fs::File::create(dir.join("disk")).expect("create");
    file.set_len(size_bytes).expect("resize");
}

#[test]
fn it_conforms_over_nbdkit_and_outlives_it() {
    let dir = tempfile::tempdir().expect("temporary directory");
    disk(dir.path(), (4 << 20) + 512);
    let server = Foreign::nbdkit(dir.path());
    let device: Arc<dyn BlockDevice> = Arc::new(open(&server.socket));
    assert_eq!(device.geometry().block_bytes, 512, "the size has no larger divisor");
    conformance::check(&*device, Promises::default());
    conformance::check_started(&device, Promises::default());
    device.write(0, &[7; 512], WriteFlags::default()).expect("write");
    server.kill();
    let reader = Arc::clone(&device);
    let waiting = std::thread::spawn(move || {
        let mut block = [0; 512];
        reader.read(0, &mut block).map(|()| block)
    });
    let server = Foreign::nbdkit(dir.path());
    let block = waiting.join().expect("no panic").expect("the read found the next server");
    assert_eq!(block, [7; 512], "the system has the file's bytes, so nothing was lost here");
    let error = device.flush().expect_err("the client cannot know that");
    assert!(error.to_string().contains("may be lost"), "{error}");
    device.write(0, &[8; 512], WriteFlags::default()).expect("write again");
    device.flush().expect("flush again");
    server.kill();
    assert_eq!(std::fs::read(dir.path().join("disk")).expect("read")[..512], [8; 512]);
}

#[test]
fn it_conforms_over_qemu_nbd() {
    let dir = tempfile::tempdir().expect("temporary directory");
    disk(dir.path(), 4 << 20);
    let (socket, file) = (dir.path().join("qemu"), dir.path().join("disk"));
    let arguments =
        ["--persistent", "--shared=8", "--format=raw", "--socket", text(&socket), text(&file)];
    let server = Foreign::start("qemu-utils", "qemu-nbd", &arguments, &socket);
    let device: Arc<dyn BlockDevice> = Arc::new(open(&server.socket));
    conformance::check(&*device, Promises::default());
    conformance::check_started(&device, Promises::default());
}

/// Another server at the same place, with a shorter export: nothing is written there.
#[test]
fn a_server_with_a_shorter_export_is_none() {
    let dir = tempfile::tempdir().expect("temporary directory");
    disk(dir.path(), 4 << 20);
    let server = Foreign::nbdkit(dir.path());
    let options = options(&server.socket, "");
    let device = NbdDevice::open(&NbdOptions { timeout: Duration::from_secs(2), ..options });
    let device = device.expect("the server is ready");
    server.kill();
    disk(dir.path(), 1 << 20);
    let _server = Foreign::nbdkit(dir.path());
    let error = device.write(0, &[7; 4096], WriteFlags::default()).expect_err("not there");
    assert!(error.to_string().contains("1048576 bytes, expected at least 4194304"), "{error}");
    assert_eq!(std::fs::read(dir.path().join("disk")).expect("read")[..4096], [0; 4096]);
}
