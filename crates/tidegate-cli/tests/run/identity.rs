//! Files are known by their file system's UUID and their handles: not by numbers of devices, which
//! change from boot to boot, and with each mount.

use std::path::Path;

use crate::bed::{Runner, replay};
use crate::crash::Workers;
use crate::power::Disk;
use crate::support::file_system::Kind;
use crate::support::scratch;

use std::os::unix::fs::MetadataExt;

const KINDS: [Kind; 2] = [Kind::Ext4, Kind::Xfs];

/// Covers the files that are named, and writes the names of their directories into them; then reads
/// paths from a pipe.
const WRITE: &str = "import os, sys
def write(path, text):
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.fsync(file)
    for number in range(3):
        os.pwrite(file, text, 0)
        os.fdatasync(file)
    os.close(file)
for at, path in enumerate(sys.argv[2:]):
    write(path, b'file system %d' % at)
os.write(1, b'written\\n')
for line in open(sys.argv[1]):
    write(line.strip(), b'behind a mount')
    os.write(1, b'again\\n')
import signal; signal.pause()";

fn start(pool: &Path, pipe: &Path, files: &[&Path]) -> Workers {
    rustix::fs::mknodat(rustix::fs::CWD, pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    // Not in a directory of the disks: they are to be unmounted.
    let mut command = Runner::Run(pool).command("/usr/bin/python3", Path::new("/"));
    command.args(["-c", WRITE]).arg(pipe).args(files);
    let mut workers = Workers::spawn(command, pool);
    workers.wait_for_line("written");
    workers
}

fn device_number(disk: &Disk) -> u64 {
    disk.mount_point().metadata().unwrap().dev()
}

/// Two file systems of a kind, made the same way: their files have the same inode numbers. The
/// disk of one comes back as that of the other.
#[test]
fn disks_that_come_back_with_other_numbers() {
    for kind in KINDS {
        let place = scratch();
        let (pool, pipe) = (place.path().join("pool"), place.path().join("pipe"));
        let mut disks = [Disk::of(kind), Disk::of(kind)];
        let files = disks.each_ref().map(|disk| disk.mount_point().join("file"));
        let workers = start(&pool, &pipe, &[&files[0], &files[1]]);
        let inodes = files.each_ref().map(|file| file.metadata().unwrap().ino());
        assert_eq!(inodes[0], inodes[1], "nothing else tells these files apart");
        let before = disks.each_ref().map(device_number);
        let devices = disks.each_mut().map(|disk| disk.file_system().device().to_owned());
        let [one, two] = &mut disks;
        one.freeze();
        two.fail_with(workers);
        one.power_off();
        two.power_on_as("none", Some(&devices[0]));
        one.power_on_as("none", Some(&devices[1]));
        for (disk, before) in [one, two].into_iter().zip(before) {
            // Where another test has taken the device meanwhile, it came back as any.
            if device_number(disk) == before {
                disk.file_system().move_to_another_device();
            }
            assert_ne!(device_number(disk), before, "{kind:?}");
        }
        replay(&pool, None);
        for (at, file) in files.iter().enumerate() {
            let found = std::fs::read_to_string(file).unwrap();
            assert_eq!(found, format!("file system {at}"), "{kind:?}");
        }
    }
}

/// A file system is taken off while the program runs, and comes back as another device.
#[test]
fn a_file_system_that_is_mounted_again_as_another_device() {
    for kind in KINDS {
        let place = scratch();
        let (pool, pipe) = (place.path().join("pool"), place.path().join("pipe"));
        let mut disk = Disk::of(kind);
        let file = disk.mount_point().join("file");
        let mut workers = start(&pool, &pipe, &[&file]);
        crate::support::ok(["flush".as_ref(), pool.as_os_str()]);
        let before = device_number(&disk);
        disk.file_system().move_to_another_device();
        assert_ne!(device_number(&disk), before);
        std::fs::write(&pipe, format!("{}\n", file.display())).unwrap();
        workers.wait_for_line("again");
        disk.lose_power(workers, "none");
        replay(&pool, None);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "behind a mount", "{kind:?}");
    }
}
