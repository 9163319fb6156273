//! Files that recovery cannot write to as they are: append-only, immutable, running. All others are
//! recovered; what is left is named, and recovered later.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};

use crate::bed::{Runner, on_disk};
use crate::crash::Workers;
use crate::support::file_system::Kind;
use crate::support::image::Image;
use crate::support::{run, scratch, succeed, tool};

/// Covers the files that are named, by as many syncs as a new file takes, and overwrites their last
/// byte.
const WRITE: &str = "import os, sys, signal
for path in sys.argv[1:]:
    file = os.open(path, os.O_RDWR)
    for number in range(9):
        os.pwrite(file, b'N', os.fstat(file).st_size - 1)
        os.fdatasync(file)
os.write(1, b'written\\n')
signal.pause()";
/// `cap_net_bind_service`, as `setcap` sets it.
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Leaves the file at `path` as a disk has it that lacks its last write, with the time of before.
fn lose(path: &Path) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(b"-", file.metadata().unwrap().len() - 1).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(900_000_000)).unwrap();
}

fn last_byte(path: &Path) -> u8 {
    *fs::read(path).unwrap().last().unwrap()
}

fn recover(pool: &Path) -> Output {
    run(["recover".as_ref(), "--replay".as_ref(), pool.as_os_str()])
}

fn chattr(change: &str, path: &Path) {
    succeed(tool("chattr", "e2fsprogs").arg(change).arg(path));
}

fn flags(path: &Path) -> String {
    let listed = succeed(tool("lsattr", "e2fsprogs").arg(path));
    listed.split_whitespace().next().unwrap_or_default().to_owned()
}

#[test]
fn a_running_program_is_left_and_protected_files_keep_what_they_had() {
    for kind in [Kind::Ext4, Kind::Xfs] {
        let (place, dir) = (scratch(), on_disk());
        let pool = place.path().join("pool");
        let disk = Image::make(kind, dir.path(), "disk");
        let path = |name| disk.mount_point.join(name);
        let (tool, trail, fixed, setuid) =
            (path("tool"), path("trail"), path("fixed"), path("setuid"));
        let files = [&tool, &trail, &fixed, &setuid];
        for file in files {
            fs::copy("/bin/sleep", file).unwrap();
            lose(file);
        }
        let mut command = Runner::Run(&pool).command("/usr/bin/python3", Path::new("/"));
        command.args(["-c", WRITE]).args(files);
        let mut workers = Workers::spawn(command, &pool);
        workers.wait_for_line("written");
        workers.tree.kill();
        for file in files {
            lose(file);
        }
        fs::set_permissions(&setuid, Permissions::from_mode(0o4751)).unwrap();
        let file = File::options().write(true).open(&setuid).unwrap();
        fsetxattr(&file, "security.capability", &CAPABILITY, XattrFlags::empty()).unwrap();
        let modified = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 4000);
        file.set_modified(modified).unwrap();
        drop(file);
        chattr("+a", &trail);
        chattr("+i", &fixed);
        let flags_before = [flags(&trail), flags(&fixed)];
        let mut running = Command::new(&tool).arg("1000").spawn().unwrap();

        let left = recover(&pool);
        let said = String::from_utf8_lossy(&left.stderr).into_owned();
        assert!(!left.status.success() && said.contains("end the program that runs it"), "{said}");
        assert_eq!(files.map(|file| last_byte(file)), *b"-NNN", "{kind:?} {said}");
        assert_eq!([flags(&trail), flags(&fixed)], flags_before, "{kind:?}");
        let file = File::open(&setuid).unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.mode() & 0o7777, 0o4751);
        assert_eq!(metadata.modified().unwrap(), modified);
        let mut capability = [0; 64];
        let len = fgetxattr(&file, "security.capability", &mut capability[..]).unwrap();
        assert_eq!(capability[..len], CAPABILITY);

        // A program goes on with a file that is recovered; a new tree may not begin.
        let refused = run(["run".as_ref(), "--pool".as_ref(), pool.as_os_str(), "true".as_ref()]);
        assert!(!refused.status.success(), "{refused:?}");
        drop(file);
        lose(&setuid);
        running.kill().unwrap();
        running.wait().unwrap();
        let done = recover(&pool);
        assert!(done.status.success(), "{done:?}");
        for (file, expected) in files.into_iter().zip(*b"NNN-") {
            assert_eq!(last_byte(file), expected, "{kind:?} {}", file.display());
        }
        chattr("-a", &trail);
        chattr("-i", &fixed);
    }
}
