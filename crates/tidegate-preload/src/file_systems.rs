//! File systems: whether their files are for the log, and the number that tells a file's identity apart from that of others.
//!
//! Invariants:
//! 1. What is noted is noted of a mount, by the number that the kernel gives to no other one, ever, and a mount shows one file
//!    system for as long as there is one. Not by the device: its number is given out again after an unmount.
//! 2. It is noted only of kinds that have one `f_fsid` for all files: btrfs has one for each subvolume.
//! 3. A note is made once and never changes, but for what is found out about handles. Without a place for it, or a number of the
//!    mount, the kernel is asked each time.
//!
//! Entry points: [`of`]; [`handles`] and [`note_handles`].
#![allow(unsafe_code)] // a field that the C library hides

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::process;
use crate::raw::{self, Errno};

/// What the log has to know of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileSystem {
    /// `f_fsid`.
    pub(crate) id: u64,
    /// Its files outlive a power cut, and no other machine changes them.
    pub(crate) is_for_log: bool,
}

/// A mount and its file system.
struct Note {
    /// 0: free.
    mount: AtomicU64,
    id: AtomicU64,
    is_for_log: AtomicU64,
    /// A [`Handles`].
    handles: AtomicU64,
}

/// How a file system tells its files from all others of all times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handles {
    /// In ways of its own: the kernel has to be asked for the handle.
    Opaque = 0,
    /// By number and generation of the inode, it seems: one handle is to be looked at.
    Unseen = 1,
    /// By number and generation of the inode, as was seen.
    Generations = 2,
}

/// Instead of a mount: the note is being made.
const BUSY: u64 = u64::MAX;
const NOTES: usize = 8;
static NOTED: [Note; NOTES] = [const {
    Note {
        mount: AtomicU64::new(0),
        id: AtomicU64::new(0),
        is_for_log: AtomicU64::new(0),
        handles: AtomicU64::new(0),
    }
}; NOTES];

/// The file system of an open file that was opened through `mount`, 0 where that is not known.
pub(crate) fn of(fd: c_int, mount: u64) -> Result<FileSystem, Errno> {
    if let Some(known) = noted(mount) {
        return Ok(known);
    }
    let stat = raw::fstatfs(fd)?;
    let found = of_stat(&stat);
    if mount != 0 && mount != BUSY && ONE_ID.contains(&kind(&stat)) {
        // For ext4 it is the only way.
        let handles = if kind(&stat) == EXT { Handles::Unseen } else { Handles::Opaque };
        note(mount, found, handles);
    }
    Ok(found)
}

/// How the file system behind a mount tells its files apart, as far as that is noted.
pub(crate) fn handles(mount: u64) -> Handles {
    let word = find(mount).map_or(0, |note| note.handles.load(Ordering::Relaxed));
    [Handles::Unseen, Handles::Generations]
        .into_iter()
        .find(|handles| *handles as u64 == word)
        .unwrap_or(Handles::Opaque)
}

/// What one of the handles behind a mount has shown.
pub(crate) fn note_handles(mount: u64, handles: Handles) {
    if let Some(note) = find(mount) {
        note.handles.store(handles as u64, Ordering::Relaxed);
    }
}

/// A file system that takes other names for the same, if it does so, does it to upper and lower case. `mount` as for [`of`], which
/// was called before.
pub(crate) fn folds_letters_if_any(mount: u64) -> bool {
    // Of the kinds that are noted: others may compose characters, or cut names.
    noted(mount).is_some()
}

/// The file system that the kernel says this of.
pub(crate) fn of_stat(stat: &libc::statfs) -> FileSystem {
    let kind = kind(stat);
    let is_for_log = match kind {
        TMPFS => process::includes_tmpfs(),
        _ => !VOLATILE.contains(&kind) && !REMOTE.contains(&kind),
    };
    FileSystem { id: id(stat), is_for_log }
}

fn find(mount: u64) -> Option<&'static Note> {
    NOTED.iter().find(|note| mount != 0 && note.mount.load(Ordering::Acquire) == mount)
}

fn noted(mount: u64) -> Option<FileSystem> {
    let note = find(mount)?;
    let is_for_log = note.is_for_log.load(Ordering::Relaxed) != 0;
    Some(FileSystem { id: note.id.load(Ordering::Relaxed), is_for_log })
}

fn note(mount: u64, found: FileSystem, handles: Handles) {
    let is_taken = |note: &&Note| {
        note.mount.compare_exchange(0, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok()
    };
    if let Some(note) = NOTED.iter().find(is_taken) {
        note.id.store(found.id, Ordering::Relaxed);
        note.is_for_log.store(u64::from(found.is_for_log), Ordering::Relaxed);
        note.handles.store(handles as u64, Ordering::Relaxed);
        note.mount.store(mount, Ordering::Release);
    }
}

fn kind(stat: &libc::statfs) -> i64 {
    stat.f_type & 0xffff_ffff
}

/// `f_fsid` as a number, its first half in the lower bits.
fn id(stat: &libc::statfs) -> u64 {
    // SAFETY: eight bytes that any bits are valid for; the C library hides their fields.
    unsafe { std::mem::transmute_copy(&stat.f_fsid) }
}

/// ext2, ext3, ext4.
const EXT: i64 = 0xef53;

/// File systems with one `f_fsid` for all of their files.
const ONE_ID: [i64; 3] = [
    EXT,
    0x5846_5342, // XFS
    TMPFS,
];

/// File systems whose files are in memory or made up.
const VOLATILE: [i64; 14] = [
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x1cd1,      // devpts
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x9584_58f6, // hugetlbfs
    0x1980_0202, // mqueue
    0x7363_6673, // securityfs
    0xcafe_4a11, // bpf
    0x6265_6570, // configfs
];

/// File systems that other machines change, so that this one's page cache is not the truth.
const REMOTE: [i64; 8] = [
    0x6969,      // NFS
    0x517b,      // SMB
    0xff53_4d42, // CIFS
    0xfe53_4d42, // SMB2
    0x0102_1997, // 9P
    0x00c3_6400, // Ceph
    0x5346_414f, // AFS
    0x7461_636f, // OCFS2
];

const TMPFS: i64 = VOLATILE[0];

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::path::Path;
    use std::process::Command;

    use super::*;
    use crate::files::Seen;

    fn run(program: &str, arguments: &[&str]) {
        assert!(Command::new(program).args(arguments).status().unwrap().success(), "{program}");
    }

    /// A file in a new tmpfs at `path`: its device, and its file system as noted and as the kernel says.
    fn in_new_mount(path: &Path) -> (u64, FileSystem, FileSystem) {
        run("mount", &["-t", "tmpfs", "none", path.to_str().unwrap()]);
        let file = File::create(path.join("file")).unwrap();
        let fd = file.as_raw_fd();
        let seen = Seen::of(fd).unwrap();
        assert_ne!(seen.mount, 0, "the kernel numbers its mounts");
        of(fd, seen.mount).unwrap();
        let known = noted(seen.mount).expect("it is noted");
        let found = of_stat(&raw::fstatfs(fd).unwrap());
        drop(file);
        run("umount", &[path.to_str().unwrap()]);
        (seen.stat.st_dev, known, found)
    }

    #[test]
    fn a_device_number_that_is_given_out_again_is_another_file_system() {
        let directory = tempfile::tempdir().unwrap();
        let mut before: Option<(u64, FileSystem)> = None;
        let mut same_device = false;
        // Others mount as well, and may be given the number in between.
        for _ in 0..100 {
            if same_device {
                break;
            }
            let (device, known, found) = in_new_mount(directory.path());
            assert_eq!(known, found);
            if let Some((former, of_former)) = before {
                same_device |= former == device;
                assert_ne!(of_former.id, known.id);
            }
            before = Some((device, known));
        }
        assert!(same_device, "this shows nothing unless a number comes again");
    }

    #[test]
    fn what_cannot_be_noted_is_asked() {
        let file = tempfile::tempfile().unwrap();
        let wanted = of_stat(&raw::fstatfs(file.as_raw_fd()).unwrap());
        assert_eq!(of(file.as_raw_fd(), 0), Ok(wanted));
        assert_eq!(noted(0), None);
    }
}
