//! An ext4 file system on an NBD export: a pool, its server, nbdfuse, a loop device and a mount.
//!
//! Invariant: each part has a guard, and the guards undo the parts in reverse order. The loop
//! device is detached with the mount.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use tempfile::TempDir;

use super::{ProgramsArgs, call};
use crate::block::{pool_bytes, scratch};
use crate::child::{Child, find_program};
use crate::error::{BenchError, Result};
use crate::nbd::{create_pool, this_server};
use crate::policy::Policy;

/// Attempts to take a free loop device: another program may take it first.
const LOOP_TRIES: u32 = 5;
/// Major number of loop devices.
const LOOP_MAJOR: u32 = 7;
/// Longest time until nbdfuse shows the export.
const FUSE_LIMIT: Duration = Duration::from_secs(30);

/// A mounted file system.
pub(super) struct FileSystem {
    mount: Mount,
    // Ended in this order; then the directory is removed.
    _fuse: Fuse,
    _server: Child,
    _dir: TempDir,
}

impl FileSystem {
    /// Makes the whole file system for `policy`.
    pub(super) fn new(args: &ProgramsArgs, policy: Policy) -> Result<Self> {
        let dir = scratch(&args.dir)?;
        let (path, fuse_path) = (dir.path().join("mnt"), dir.path().join("nbd"));
        for new in [&path, &fuse_path] {
            std::fs::create_dir(new).map_err(BenchError::os("create", new))?;
        }
        let socket = dir.path().join("socket");
        let server = serve(args, policy, dir.path(), &socket)?;
        let image = fuse_path.join("disk.img");
        let nbdfuse = find_program("nbdfuse", "libnbd-bin")?;
        let process = Child::start(&nbdfuse, [&image, Path::new("--unix"), &socket])?;
        let fuse = Fuse { path: fuse_path, _process: process };
        wait_for(&image)?;
        let device = Loop::attach(&image, &[])?;
        call("mkfs.ext4", "e2fsprogs", &["-q", "-F", &device.0])?;
        let mount = Mount::new(&device, path)?;
        Ok(Self { mount, _fuse: fuse, _server: server, _dir: dir })
    }

    /// Returns the mount point.
    pub(super) fn path(&self) -> &Path {
        &self.mount.path
    }

    /// Unmounts the file system, and ends the mount's lower parts.
    ///
    /// # Errors
    /// The file system cannot be written back.
    pub(super) fn unmount(self) -> Result<()> {
        call("umount", "mount", &[&self.path().to_string_lossy()]).map(drop)
    }
}

/// The directory where nbdfuse shows an export.
struct Fuse {
    path: PathBuf,
    _process: Child,
}

impl Drop for Fuse {
    fn drop(&mut self) {
        let _ = call("fusermount3", "fuse3", &["-uz", &self.path.to_string_lossy()]);
    }
}

/// A mounted file system, unmounted on drop, or when its last user ends.
pub(crate) struct Mount {
    pub(crate) path: PathBuf,
}

impl Mount {
    pub(crate) fn new(device: &Loop, path: PathBuf) -> Result<Self> {
        call("mount", "mount", &[&device.0, &path.to_string_lossy()])?;
        Ok(Self { path })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = call("umount", "mount", &["--lazy", &self.path.to_string_lossy()]);
    }
}

/// Serves a new pool in `dir` on `socket`.
fn serve(args: &ProgramsArgs, policy: Policy, dir: &Path, socket: &Path) -> Result<Child> {
    let pool = dir.join("pool");
    create_pool(&pool, pool_bytes(args.size))?;
    let mut words = vec!["serve".to_owned(), pool.display().to_string()];
    words.push(format!("--nbd=unix:{}", socket.display()));
    words.push(format!("--media={}", args.media));
    if policy.has_tier() {
        words.push(format!("--dram={}:{}", policy.name(), args.cache));
    }
    let server = Child::start(&this_server()?, words)?;
    server.wait_for_line("ready")?;
    Ok(server)
}

fn wait_for(image: &Path) -> Result<()> {
    let begun = Instant::now();
    while !image.exists() {
        if begun.elapsed() > FUSE_LIMIT {
            let found = format!("does not show {} after {FUSE_LIMIT:?}", image.display());
            return Err(BenchError::program("nbdfuse", found));
        }
        // nbdfuse does not report this.
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// A loop device, detached on drop. If it is mounted, it is detached when it is unmounted.
pub(crate) struct Loop(String);

impl Loop {
    /// Makes a disk of `image`, with blocks of 4096 bytes and the additional losetup `options`.
    pub(crate) fn attach(image: &Path, options: &[&str]) -> Result<Self> {
        let image = image.to_string_lossy();
        let mut tries = 0;
        loop {
            tries += 1;
            let device = call("losetup", "mount", &["--find"])?.trim().to_owned();
            make_node(&device)?;
            let words = [&["--sector-size", "4096"], options, &[&*device, &*image]].concat();
            match call("losetup", "mount", &words) {
                Ok(_) => return Ok(Self(device)),
                Err(error) if tries == LOOP_TRIES => return Err(error),
                Err(_) => {}
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = call("losetup", "mount", &["--detach", &self.0]);
    }
}

/// Creates the device node of a loop device if it is missing, as in a container.
fn make_node(device: &str) -> Result<()> {
    let number = device.trim_start_matches("/dev/loop").parse();
    let (Ok(number), false) = (number, Path::new(device).exists()) else { return Ok(()) };
    let mode = Mode::RUSR | Mode::WUSR;
    let made = mknodat(CWD, device, FileType::BlockDevice, mode, makedev(LOOP_MAJOR, number));
    made.map_err(|errno| BenchError::os("create", device)(errno.into()))
}
