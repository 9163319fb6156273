//! The writable file systems on this machine's disks, held open to be synced after the program.
//!
//! Invariant: they are opened before the program starts. So the sync at the end reports each
//! write-back that failed while the program ran, even if the program has mounted another file
//! system over it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::PathBuf;

use tidegate_interpose::file_systems::is_remote_name;

use super::mount::Mount;

/// File systems, each with the path of one of its mounts.
#[derive(Debug, Default)]
pub struct Mounted {
    held: Vec<(PathBuf, File)>,
}

impl Mounted {
    /// Opens each file system that is mounted writable. File systems that this user may not open
    /// are left out: only the sync of the whole machine covers them.
    ///
    /// # Errors
    /// Fails if the mounts cannot be read.
    pub fn hold() -> io::Result<Self> {
        let mounts = std::fs::read("/proc/self/mountinfo")?;
        let opened = |path: PathBuf| {
            let kind = path.metadata().ok()?;
            let file =
                if kind.is_dir() || kind.is_file() { File::open(&path).ok()? } else { None? };
            Some((path, file))
        };
        Ok(Self { held: writable_mounts(&mounts).into_iter().filter_map(opened).collect() })
    }

    /// Syncs the whole machine, then each file system, since only that reports failures. Returns
    /// the file systems that failed, with the reason.
    #[must_use]
    pub fn sync(&self) -> Vec<(&PathBuf, io::Error)> {
        rustix::fs::sync();
        let outcomes = self.held.iter().map(|(path, file)| (path, rustix::fs::syncfs(file)));
        outcomes.filter_map(|(path, outcome)| Some((path, outcome.err()?.into()))).collect()
    }
}

/// Returns a mount point of each writable file system on a disk, from the text of `mountinfo`.
fn writable_mounts(mounts: &[u8]) -> Vec<PathBuf> {
    let mut devices = BTreeSet::new();
    let is_of_disk = |mount: &Mount| !is_remote_name(&mount.kind) && mount.kind != "autofs";
    let found = Mount::all_in(mounts).filter(|mount| mount.is_writable && is_of_disk(mount));
    found.filter(|mount| devices.insert(mount.device.clone())).map(|mount| mount.point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_writable_file_system_of_this_machine_is_found_once() {
        let mounts = b"21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 8:1 /srv /srv\\040x rw - ext4 /dev/sda1 rw
23 21 8:2 / /ro ro - ext4 /dev/sda2 rw
24 21 0:33 / /net rw - nfs4 host:/ rw
25 21 0:34 / /auto rw - autofs none rw
26 21 0:35 / /a\\040b rw shared:3 master:1 - btrfs /dev/sdb rw
broken line";
        assert_eq!(writable_mounts(mounts), [PathBuf::from("/"), PathBuf::from("/a b")]);
    }
}
