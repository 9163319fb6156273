//! No signal costs what SIGTERM keeps: it stops the server in good order, or is ignored.

use std::io::{BufRead as _, Read as _};
use std::process::{Command, Stdio};

use rustix::fs::{CWD, FileType, mknodat};
use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::nbd::Client;
use crate::support::{Server, ok, scratch, succeed, tidegate, tool};

const BLOCK_BYTES: usize = 4096;
const BLOCKS: usize = 200;

/// A BTT behind a DRAM tier, which loses what it holds when its process is killed.
struct Scene(TempDir);

impl Scene {
    fn new() -> Self {
        let scene = Self(scratch());
        ok(["create", &scene.path("pool"), "--engine=btt", "--size=32M"]);
        scene
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// Serves by `command`, which is to have the arguments of `tidegate`.
    fn serve_by(&self, mut command: Command) -> Server {
        command.args(["serve", &self.path("pool"), "--dram=lru:4M", "--nbd"]);
        command.arg(format!("unix:{}", self.path("socket")));
        Server::spawn(command.stderr(Stdio::piped()))
    }

    fn serve(&self) -> Server {
        self.serve_by(tidegate())
    }

    fn client(&self) -> Client {
        Client::connect(self.path("socket").as_ref()).unwrap()
    }

    fn write_all(&self, byte: u8) {
        let mut client = self.client();
        for lba in 0..BLOCKS {
            client.send_write(0, (lba * BLOCK_BYTES) as u64, &[byte; BLOCK_BYTES]).unwrap();
            assert_eq!(client.receive().unwrap(), (0, 0));
        }
    }

    /// A new server has all blocks.
    fn expect_all(&self, byte: u8) {
        let server = self.serve();
        let mut client = self.client();
        for lba in 0..BLOCKS {
            let block = client.read((lba * BLOCK_BYTES) as u64, BLOCK_BYTES).unwrap();
            assert!(block.iter().all(|found| *found == byte), "block {lba}");
        }
        drop(client);
        assert!(server.stop(Signal::TERM).0.success());
    }
}

#[test]
fn signals_that_end_a_process_stop_the_server_in_good_order() {
    let usual = [Signal::TERM, Signal::INT, Signal::QUIT, Signal::POWER];
    // Those that the system raises for other reasons, sent by another process here.
    let unusual = [Signal::XCPU, Signal::STKFLT, Signal::TRAP, Signal::SYS, Signal::ABORT];
    for (byte, signal) in (1..).zip(usual.into_iter().chain(unusual)) {
        let scene = Scene::new();
        let mut server = scene.serve();
        let mut stderr = server.stderr();
        scene.write_all(byte);
        let (status, said) = server.stop(signal);
        assert!(status.success() && said.contains("stopped"), "{signal:?}: {status} {said}");
        let mut errors = String::new();
        stderr.read_to_string(&mut errors).unwrap();
        assert!(errors.contains("Z tidegate: SIG") && errors.ends_with(": stopping\n"), "{errors}");
        scene.expect_all(byte);
    }
}

#[test]
fn signals_that_mean_nothing_are_ignored_with_a_line() {
    let scene = Scene::new();
    let mut server = scene.serve();
    let mut stderr = server.stderr();
    scene.write_all(1);
    for signal in ["USR1", "USR2", "ALRM", "VTALRM", "PROF", "IO", "XFSZ", "35", "64"] {
        let pid = server.pid().as_raw_nonzero().to_string();
        succeed(tool("kill", "procps").args([&format!("-{signal}"), &pid]));
        let name =
            signal.parse::<i32>().map_or(format!("SIG{signal}"), |_| format!("signal {signal}"));
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        assert!(line.ends_with(&format!("tidegate: {name}: ignored\n")), "{name}: {line}");
    }
    scene.write_all(2);
    assert!(server.stop(Signal::TERM).0.success());
    scene.expect_all(2);
}

/// Makes a certificate for `name` and its key.
fn certify(scene: &Scene, name: &str) {
    let mut openssl = tool("openssl", "openssl");
    openssl.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days=2"]);
    openssl.arg(format!("-subj=/CN={name}"));
    openssl.args(["-keyout", &scene.path("key"), "-out", &scene.path("certificate")]);
    succeed(&mut openssl);
}

/// A hangup never ends a server, and says what is read again.
#[test]
fn a_hangup_has_certificates_read_again() {
    for has_tls in [true, false] {
        let scene = Scene::new();
        let mut command = tidegate();
        let socket = format!("--nbd=unix:{}", scene.path("socket"));
        command.args(["serve", &scene.path("pool"), &socket]);
        if has_tls {
            certify(&scene, "first");
            let files = ["--tls-cert", "certificate", "--tls-key", "key"];
            let path =
                |(at, it): (usize, &&str)| if at % 2 == 1 { scene.path(it) } else { (*it).into() };
            command.args(files.iter().enumerate().map(path)).arg("--tls=allow");
        }
        let mut server = Server::spawn(command.stderr(Stdio::piped()));
        let mut stderr = server.stderr();
        let mut hang_up = |server: &Server| {
            kill_process(server.pid(), Signal::HUP).unwrap();
            let mut line = String::new();
            stderr.read_line(&mut line).unwrap();
            line
        };
        let mut client = scene.client();
        if has_tls {
            certify(&scene, "second");
            let said = hang_up(&server);
            assert!(said.contains("connections get the TLS certificate in"), "{said}");
            std::fs::write(scene.path("certificate"), "broken").unwrap();
            let said = hang_up(&server);
            assert!(
                said.contains("the TLS certificate of before stays in use: TLS file"),
                "{said}"
            );
            certify(&scene, "third");
            // An open of this one would wait, and no signal would be handled any more.
            std::fs::remove_file(scene.path("key")).unwrap();
            mknodat(CWD, scene.path("key"), FileType::Fifo, 0o600.into(), 0).unwrap();
            let said = hang_up(&server);
            assert!(said.contains("it is a FIFO: a regular file is expected"), "{said}");
        } else {
            let said = hang_up(&server);
            assert!(said.contains("nothing is read again"), "{said}");
        }
        // The connection of before goes on.
        assert_eq!(client.read(0, BLOCK_BYTES).unwrap(), [0; BLOCK_BYTES]);
        drop(client);
        assert!(server.stop(Signal::TERM).0.success());
    }
}

#[test]
fn a_hangup_does_not_stop_a_server_under_nohup() {
    let scene = Scene::new();
    let mut command = tool("nohup", "coreutils");
    command.arg(tidegate().get_program());
    let server = scene.serve_by(command);
    kill_process(server.pid(), Signal::HUP).unwrap();
    scene.write_all(3);
    assert!(server.stop(Signal::TERM).0.success());
    scene.expect_all(3);
}
