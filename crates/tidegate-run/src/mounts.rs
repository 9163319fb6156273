//! Whether the file systems under the log's files are still those that the files were written to.
//!
//! The page cache has what the kernel was told for as long as a file system stays mounted. One that was mounted anew has what
//! its disk has, also in the same boot; numbers of files and of devices are the same. Numbers of mounts only grow, and a mount
//! keeps its file system: where a file's file system is still found through a mount that is not younger than the file's
//! definition, it is the same one.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use tidegate::log::recover::mount_of;
use tidegate::log::{Definition, Log, RecordKind};

use super::backlog::{Known, as_path};

/// What became of file systems.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Now {
    /// All are the same.
    Same,
    /// That cannot be told: one is not there, or the kernel has no numbers of mounts that last.
    Unknown,
    /// The one at this path was mounted anew.
    Younger(PathBuf),
}

/// What the files in the log were on: by device, the oldest mount that one of them was defined on; 0: not known.
struct Mounts(HashMap<u64, u64>);

impl Mounts {
    fn of(log: &Log) -> Self {
        let mut oldest = HashMap::new();
        for (device, mount) in log.live_mounts() {
            let known = oldest.entry(device).or_insert(mount);
            *known = mount.min(*known);
        }
        Self(oldest)
    }

    /// What became of all of them; `paths` are those of the files on a device.
    fn look<'a, P: Iterator<Item = &'a Path>>(&self, paths: impl Fn(u64) -> P) -> Now {
        let mut all = Now::Same;
        for (&device, &mount) in &self.0 {
            match look(device, mount, paths(device)) {
                Now::Same => {}
                Now::Unknown => all = Now::Unknown,
                younger @ Now::Younger(_) => return younger,
            }
        }
        all
    }
}

/// What became of `device`, which had files at `paths` when `mount` led to it.
fn look<'a>(device: u64, mount: u64, paths: impl Iterator<Item = &'a Path>) -> Now {
    let mut asked = HashSet::new();
    let mut now = Now::Unknown;
    for path in paths.flat_map(Path::ancestors) {
        if !asked.insert(path) {
            continue;
        }
        match mount_at(device, path) {
            Some(found) if found != 0 && found <= mount => return Now::Same,
            Some(_) if mount != 0 => now = Now::Younger(path.to_path_buf()),
            _ => {}
        }
    }
    now
}

/// The mount that leads to `path`, if that is on `device`.
fn mount_at(device: u64, path: &Path) -> Option<u64> {
    let flags = (OFlags::PATH | OFlags::NOFOLLOW).bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path).ok()?;
    (file.metadata().ok()?.dev() == device).then(|| mount_of(&file))
}

/// What became of the file systems that `log` has records of.
pub(super) fn of_log(log: &Log) -> Now {
    let mut paths: HashMap<u64, HashSet<PathBuf>> = HashMap::new();
    let mut payload = Vec::new();
    let records = log.records(log.tail(), log.head());
    for header in records.filter(|header| header.kind == RecordKind::Define) {
        payload.resize(header.payload_bytes as usize, 0);
        // Failed memory: the file may be found by another record.
        let read = log.pool().read_payload(&header, 0, &mut payload).is_ok();
        if let Some(definition) = Definition::decode(&payload).filter(|_| read) {
            let path = as_path(definition.path).to_path_buf();
            paths.entry(definition.device).or_default().insert(path);
        }
    }
    Mounts::of(log).look(|device| paths.get(&device).into_iter().flatten().map(PathBuf::as_path))
}

/// A file system of `files` that was mounted anew since the log has records of it: a path on it. One that is gone altogether was
/// synced by the kernel when it was unmounted.
pub(super) fn mounted_anew(log: &Log, files: &[&Known]) -> Option<PathBuf> {
    let now = Mounts::of(log).look(|device| {
        let of_device = files.iter().filter(move |file| file.device == device);
        of_device.flat_map(|file| file.names.iter().map(PathBuf::as_path))
    });
    if let Now::Younger(path) = now { Some(path) } else { None }
}
