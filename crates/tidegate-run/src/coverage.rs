//! The file systems of this machine, and whether `run` covers files on them.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::PathBuf;

use tidegate::log::recover::{file_system_id, keeps_identities};

use super::mount::Mount;
use super::mounted::writable_mounts;

/// A file system that is mounted writable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    /// Where it is mounted.
    pub mount: PathBuf,
    /// Its type, such as `ext4`.
    pub kind: String,
    /// Why `run` covers none of its files, if it covers none.
    pub obstacle: Option<String>,
}

/// Returns the file systems on disks that are mounted writable, each by its first mount.
///
/// # Errors
/// The mounts cannot be read.
pub fn coverage() -> io::Result<Vec<Coverage>> {
    let mounts = std::fs::read("/proc/self/mountinfo")?;
    let mut devices = BTreeSet::new();
    let of_disks = writable_mounts(&mounts).filter(|mount| mount.source.starts_with('/'));
    let firsts = of_disks.filter(|mount| devices.insert(mount.device.clone()));
    Ok(firsts.map(of_mount).collect())
}

fn of_mount(mount: Mount) -> Coverage {
    let obstacle = obstacle(&mount).err();
    Coverage { mount: mount.point, kind: mount.kind, obstacle }
}

/// # Errors
/// Why files on the mount are not covered.
fn obstacle(mount: &Mount) -> Result<(), String> {
    let file = File::open(&mount.point).map_err(|error| format!("it cannot be opened: {error}"))?;
    let found = rustix::fs::fstatfs(&file).map_err(|error| error.to_string())?;
    if !keeps_identities(found.f_type) {
        return Err("files there are not found again after a crash; use ext4 or XFS".into());
    }
    match (file_system_id(&file), mount.uuid_command()) {
        (Ok(_), _) => Ok(()),
        (Err(_), Some(command)) => Err(format!("it has no UUID; give it one: {command}")),
        (Err(error), None) => Err(format!("it tells no UUID: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disks_of_this_machine_have_a_verdict_each() {
        let found = coverage().unwrap();
        let mounts: BTreeSet<_> = found.iter().map(|one| &one.mount).collect();
        assert_eq!(mounts.len(), found.len());
        for one in &found {
            let is_known = ["ext2", "ext3", "ext4", "xfs"].contains(&one.kind.as_str());
            assert!(is_known || one.obstacle.is_some(), "{one:?}");
        }
    }
}
