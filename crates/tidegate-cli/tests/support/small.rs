//! A small ext4 file system for files of programs: one with a journal and a UUID.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::file_system::unmount;
use super::{scratch, succeed, tool};

/// Lets other users enter and list a directory.
pub fn open_to_all(dir: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
}

/// A small ext4 in a file in memory: nothing here waits for a disk that other processes use.
pub struct Small {
    dir: tempfile::TempDir,
}

impl Small {
    /// One of this size, as `truncate` writes it, mounted.
    pub fn new(size: &str) -> Self {
        let this = Self { dir: scratch() };
        std::fs::create_dir(this.mount_point()).unwrap();
        succeed(tool("truncate", "coreutils").args(["-s", size]).arg(this.image()));
        succeed(tool("mkfs.ext4", "e2fsprogs").arg("-q").arg(this.image()));
        this.mount();
        this
    }

    /// The file that it is in.
    pub fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// Where it is mounted.
    pub fn mount_point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// Lets other users reach the mount point.
    pub fn open_to_all(&self) {
        open_to_all(self.dir.path());
        open_to_all(&self.mount_point());
    }

    /// Mounts it, again.
    pub fn mount(&self) {
        let mut mount = tool("mount", "mount");
        succeed(mount.args(["-o", "loop"]).arg(self.image()).arg(self.mount_point()));
    }

    /// Takes it off.
    pub fn unmount(&self) {
        unmount(&self.mount_point());
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let mut unmount = tool("umount", "mount");
        let _ = unmount.arg("-l").arg(self.mount_point()).stderr(Stdio::null()).status();
    }
}
