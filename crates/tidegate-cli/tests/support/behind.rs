//! A pool in front of a file, served over NBD.
//!
//! Needs the modules `support` and `nbd` of the test binary.

use std::path::PathBuf;

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::nbd::Client;
use crate::support::{Server, ok, run, scratch, succeed, tool};

const BLOCK_BYTES: usize = 4096;

/// A pool and files to put behind it.
pub(crate) struct Scene {
    dir: TempDir,
}

impl Scene {
    /// A pool of `engine`, and the files `disk` and `other`.
    pub(crate) fn new(engine: &str) -> Self {
        let scene = Self { dir: scratch() };
        let (pool, engine) = (scene.pool(), format!("--engine={engine}"));
        ok(["create", pool.to_str().unwrap(), &engine, "--size=8M"]);
        for name in ["disk", "other"] {
            let file = std::fs::File::create_new(scene.path(name)).unwrap();
            file.set_len(16 << 20).unwrap();
        }
        scene
    }

    /// Copies of the pool and of `disk` in another directory; `preserve` is an option of `cp`.
    #[allow(dead_code, reason = "not all test binaries copy scenes")]
    pub(crate) fn copied(&self, preserve: &str) -> Self {
        let copy = Self { dir: scratch() };
        let files = [self.pool(), self.path("disk")];
        succeed(tool("cp", "coreutils").arg(preserve).args(files).arg(copy.dir.path()));
        copy
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn pool(&self) -> PathBuf {
        self.path("pool")
    }

    pub(crate) fn backing(&self, name: &str) -> String {
        format!("--backing={}", self.path(name).display())
    }

    pub(crate) fn serve(&self, backing: &str, more: &[&str]) -> Server {
        let backing = self.backing(backing);
        Server::start(&self.pool(), &self.path("socket"), &[&[backing.as_str()], more].concat())
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.path("socket")).expect("the server is ready")
    }

    /// The first byte of a block of a file.
    pub(crate) fn in_file(&self, name: &str, lba: usize) -> u8 {
        std::fs::read(self.path(name)).unwrap()[lba * BLOCK_BYTES]
    }

    /// What `serve` with these arguments says when it refuses.
    pub(crate) fn refusal(&self, more: &[&str]) -> String {
        let (pool, socket) = (self.pool(), self.path("socket"));
        let nbd = format!("--nbd=unix:{}", socket.display());
        let output = run([&["serve", pool.to_str().unwrap(), &nbd], more].concat());
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    }
}

pub(crate) fn write(client: &mut Client, lba: usize, byte: u8) {
    client.send_write(0, (lba * BLOCK_BYTES) as u64, &[byte; BLOCK_BYTES]).unwrap();
    assert_eq!(client.receive().unwrap(), (0, 0));
}

pub(crate) fn read(client: &mut Client, lba: usize) -> u8 {
    let block = client.read((lba * BLOCK_BYTES) as u64, BLOCK_BYTES).unwrap();
    assert!(block.iter().all(|byte| *byte == block[0]), "block {lba} is torn");
    block[0]
}

pub(crate) fn kill(server: Server) {
    kill_process(server.pid(), Signal::KILL).unwrap();
    server.wait_killed();
}
