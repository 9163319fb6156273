//! An ext4 file system on a served export, without the kernel's NBD: nbdfuse shows the export as a
//! file, a loop device makes a disk of it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{succeed, tool};

/// What file system is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Ext4,
    Xfs,
}

/// A mounted file system; undone when dropped.
pub struct FileSystem {
    fuse_dir: PathBuf,
    fuse: Child,
    loop_device: String,
    /// Where it is mounted.
    pub mount_point: PathBuf,
}

impl FileSystem {
    /// Makes a new ext4 on the export `uri` and mounts it on `dir/mnt`.
    pub fn make(dir: &Path, uri: &str) -> Self {
        Self::make_of(Kind::Ext4, dir, uri)
    }

    /// Makes a new file system on the export `uri` and mounts it on `dir/mnt`.
    pub fn make_of(kind: Kind, dir: &Path, uri: &str) -> Self {
        let this = Self::attach(dir, uri, None);
        // All tables are written here: else the kernel writes them while the test goes on, and a
        // disk that is stopped then stops `sync` everywhere.
        let (mkfs, package, whole): (_, _, &[&str]) = match kind {
            Kind::Ext4 => ("mkfs.ext4", "e2fsprogs", &["-E", "lazy_itable_init=0"]),
            Kind::Xfs => ("mkfs.xfs", "xfsprogs", &[]),
        };
        succeed(tool(mkfs, package).arg("-q").args(whole).arg(&this.loop_device));
        this.mounted()
    }

    /// Mounts on `dir/mnt` what is on the export `uri`, as the disk `device` if that is free.
    pub fn mount(dir: &Path, uri: &str, device: Option<&str>) -> Self {
        Self::attach(dir, uri, device).mounted()
    }

    /// The disk that it is on.
    pub fn device(&self) -> &str {
        &self.loop_device
    }

    /// Takes it off and mounts it again where it was, as another disk.
    pub fn move_to_another_device(&mut self) {
        let device = attach_loop(&self.image(), None);
        self.unmount();
        succeed(tool("losetup", "mount").arg("-d").arg(&self.loop_device));
        self.loop_device = device;
        succeed(tool("mount", "mount").arg(&self.loop_device).arg(&self.mount_point));
    }

    /// Takes it off and mounts it again where it was, with these options.
    pub fn mount_with(&self, options: &str) {
        self.unmount();
        let mut mount = tool("mount", "mount");
        succeed(mount.args(["-o", options]).arg(&self.loop_device).arg(&self.mount_point));
    }

    fn image(&self) -> PathBuf {
        self.fuse_dir.join("disk.img")
    }

    fn attach(dir: &Path, uri: &str, device: Option<&str>) -> Self {
        let (fuse_dir, mount_point) = (dir.join("nbd"), dir.join("mnt"));
        std::fs::create_dir_all(&fuse_dir).unwrap();
        std::fs::create_dir_all(&mount_point).unwrap();
        let image = fuse_dir.join("disk.img");
        let fuse = start_nbdfuse(&image, dir, uri);
        let loop_device = attach_loop(&image, device);
        Self { fuse_dir, fuse, loop_device, mount_point }
    }

    fn mounted(self) -> Self {
        succeed(tool("mount", "mount").arg(&self.loop_device).arg(&self.mount_point));
        self
    }

    /// The disk is gone: callers that wait for it get an error now. (nbdfuse itself may wait for
    /// ever for a server that died.)
    pub fn break_off(&mut self) {
        // Both do nothing the second time.
        let _ = self.fuse.kill();
        let _ = self.fuse.wait();
    }

    /// Takes the file system off, and hands back the device that it was on.
    pub fn unmount(&self) -> String {
        unmount(&self.mount_point);
        self.loop_device.clone()
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let quiet = |command: &mut Command| {
            let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
            status.is_ok_and(|status| status.success())
        };
        if !quiet(tool("umount", "mount").arg(&self.mount_point)) {
            quiet(tool("umount", "mount").arg("-l").arg(&self.mount_point));
        }
        quiet(tool("losetup", "mount").arg("-d").arg(&self.loop_device));
        // Where its server died nbdfuse has gone too, and left a mount that nobody can look at.
        if !quiet(tool("fusermount3", "fuse3").arg("-u").arg(&self.fuse_dir)) {
            quiet(tool("fusermount3", "fuse3").arg("-uz").arg(&self.fuse_dir));
        }
        if matches!(self.fuse.try_wait(), Ok(None)) {
            let _ = kill_process(Pid::from_child(&self.fuse), Signal::TERM);
        }
        let _ = self.fuse.wait();
    }
}

/// Takes off what is mounted at `mount_point`. It may be in use for a moment longer than the
/// processes that used it: a test that reads of one of them in /proc keeps its memory, and so the
/// files that it had mapped; and a process that another thread starts has all open files until it
/// runs its program.
pub fn unmount(mount_point: &Path) {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut unmount = tool("umount", "mount");
    unmount.arg(mount_point);
    loop {
        let output = unmount.output().expect("umount starts");
        if output.status.success() {
            return;
        }
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(why.contains("busy") && Instant::now() < deadline, "{why}");
        std::thread::yield_now();
    }
}

/// Starts nbdfuse and waits until it shows the export as the file `image`: it then writes its
/// process id into a file, here a pipe, and reading that waits.
fn start_nbdfuse(image: &Path, dir: &Path, uri: &str) -> Child {
    let ready = dir.join("nbdfuse.pid");
    let _ = std::fs::remove_file(&ready);
    rustix::fs::mknodat(rustix::fs::CWD, &ready, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    let mut nbdfuse = tool("nbdfuse", "libnbd-bin");
    nbdfuse.arg("--pidfile").arg(&ready).arg(image).arg(uri);
    let child = nbdfuse.stdin(Stdio::null()).spawn().expect("nbdfuse starts");
    std::fs::read(&ready).expect("nbdfuse says that it is ready");
    child
}

/// A disk with the blocks of the export: nbdfuse passes requests on as they are, and the server
/// takes whole blocks only. It is `device`, if that is given and free.
fn attach_loop(image: &Path, device: Option<&str>) -> String {
    let losetup = |place: &str| {
        let mut losetup = tool("losetup", "mount");
        losetup.args(["--show", "--sector-size", "4096", place]).arg(image);
        losetup
    };
    let output = device.map(|device| losetup(device).output().expect("losetup runs"));
    let attached = output.filter(|output| output.status.success());
    let attached = attached.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    attached.unwrap_or_else(|| succeed(&mut losetup("--find"))).trim().to_owned()
}
