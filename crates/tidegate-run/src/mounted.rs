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
    /// Opens each file system that is mounted writable, by the first of its mounts that this user
    /// can open. File systems without such a mount are left out: only the sync of the whole machine
    /// covers them.
    ///
    /// # Errors
    /// Fails if the mounts cannot be read.
    pub fn hold() -> io::Result<Self> {
        let mounts = std::fs::read("/proc/self/mountinfo")?;
        let (mut devices, mut held) = (BTreeSet::new(), Vec::new());
        for mount in writable_mounts(&mounts) {
            if !devices.contains(&mount.device)
                && let Some(file) = open_on(&mount)
            {
                devices.insert(mount.device);
                held.push((mount.point, file));
            }
        }
        Ok(Self { held })
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

/// Opens the mount point of `mount`. Returns `None` if that fails, or if another mount hides it.
fn open_on(mount: &Mount) -> Option<File> {
    let kind = mount.point.metadata().ok()?;
    let file = (kind.is_dir() || kind.is_file()).then(|| File::open(&mount.point).ok())??;
    let flags = rustix::fs::AtFlags::EMPTY_PATH;
    let found = rustix::fs::statx(&file, c"", flags, rustix::fs::StatxFlags::MNT_ID).ok()?;
    (found.stx_mnt_id == mount.number).then_some(file)
}

/// Returns the writable mounts of file systems on disks, from the text of `mountinfo`.
pub(crate) fn writable_mounts(mounts: &[u8]) -> impl Iterator<Item = Mount> {
    let is_of_disk = |mount: &Mount| !is_remote_name(&mount.kind) && mount.kind != "autofs";
    Mount::all_in(mounts).filter(move |mount| mount.is_writable && is_of_disk(mount))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_writable_mounts_of_this_machine_are_found() {
        let mounts = b"21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 8:1 /srv /srv\\040x rw - ext4 /dev/sda1 rw
23 21 8:2 / /ro ro - ext4 /dev/sda2 rw
24 21 0:33 / /net rw - nfs4 host:/ rw
25 21 0:34 / /auto rw - autofs none rw
26 21 0:35 / /a\\040b rw shared:3 master:1 - btrfs /dev/sdb rw
broken line";
        let found: Vec<_> =
            writable_mounts(mounts).map(|mount| (mount.number, mount.point)).collect();
        assert_eq!(found, [(21, "/"), (22, "/srv x"), (26, "/a b")].map(|(n, at)| (n, at.into())));
    }

    #[test]
    fn a_mount_is_opened_only_if_no_other_one_hides_it() {
        let mounts = std::fs::read("/proc/self/mountinfo").unwrap();
        let root = writable_mounts(&mounts).find(|mount| mount.point.as_os_str() == "/");
        let root = root.expect("this machine can write to /");
        assert!(open_on(&root).is_some());
        assert!(open_on(&Mount { number: root.number + 1, ..root }).is_none());
    }
}
