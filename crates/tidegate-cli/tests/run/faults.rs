//! Faults below: a full file system, a quota, one that turns read-only, a disk that dies, a
//! directory that is removed. Nothing acknowledged is lost; errors come as without Tidegate, or at
//! the next fsync.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Signal, kill_process};

use crate::bed::{Bed, OtherUser, Runner, Small, on_disk, replay, transcript};
use crate::crash::{Workers, verify};
use crate::power::Disk;
use crate::process_tree;
use crate::programs::source;
use crate::support::file_system::unmount;
use crate::support::{ok, run, scratch, succeed, tool};
use crate::tree;

/// Runs workers that write until they get an error, and tells whether they said its name.
fn fill(command: &mut Command, error: &str, dir: &Path) -> PathBuf {
    command.arg("-B").arg(source("crash/crash.py")).args(["work", ".", "filling.1", "filling.2"]);
    let said = transcript(command);
    assert_eq!(
        said.matches(error).count(),
        2,
        "each of two workers was to end with {error}: {said}"
    );
    let acks: String = said
        .lines()
        .filter(|line| line.starts_with("filling."))
        .flat_map(|line| [line, "\n"])
        .collect();
    let path = dir.join("acks");
    std::fs::write(&path, acks).unwrap();
    path
}

#[test]
fn a_full_file_system() {
    let bed = Bed::new();
    for runner in [Runner::Plain, Runner::Run(&bed.pool())] {
        let small = Small::new("16M");
        let acks = fill(
            &mut runner.command("/usr/bin/python3", &small.mount_point()),
            "ENOSPC",
            bed.disk(),
        );
        verify(&small.mount_point(), &acks);
        small.unmount();
        small.mount();
        if let Runner::Run(pool) = runner {
            replay(pool, None);
        }
        verify(&small.mount_point(), &acks);
    }
}

/// Space comes back: what could not be written is.
#[test]
fn a_full_tmpfs_that_gets_space_again() {
    let bed = Bed::new();
    let place = scratch();
    succeed(
        tool("mount", "mount").args(["-t", "tmpfs", "-o", "size=2M", "tmpfs"]).arg(place.path()),
    );
    let script = "dd if=/dev/zero of=large bs=64k count=64 conv=fsync 2>&1 | grep -o 'No space left'; rm large
                  seq 100000 > numbers; sync numbers; cksum numbers; ls";
    let printed = Runner::Run(&bed.pool()).script(script, place.path());
    let plain = Runner::Plain.script(&format!("rm numbers\n{script}"), place.path());
    unmount(place.path());
    crate::bed::assert_same("transcript", &plain, &printed);
}

/// Of a btrfs subvolume: the quotas of ext4 are not in every kernel.
#[test]
fn a_quota() {
    let (bed, user) = (Bed::new(), OtherUser::new("nobody"));
    user.own(bed.pool_dir());
    let place = scratch();
    crate::bed::open_to_all(place.path());
    let (image, mount_point) = (place.path().join("image"), place.path().join("mnt"));
    std::fs::create_dir(&mount_point).unwrap();
    succeed(tool("truncate", "coreutils").args(["-s", "256M"]).arg(&image));
    succeed(tool("mkfs.btrfs", "btrfs-progs").arg("-q").arg(&image));
    succeed(tool("mount", "mount").args(["-o", "loop"]).arg(&image).arg(&mount_point));
    let btrfs =
        |words: &[&str], dir: &Path| succeed(tool("btrfs", "btrfs-progs").args(words).arg(dir));
    btrfs(&["quota", "enable"], &mount_point);
    for (name, runner) in [("plain", Runner::Plain), ("run", Runner::Run(&bed.pool()))] {
        let dir = mount_point.join(name);
        btrfs(&["subvolume", "create"], &dir);
        btrfs(&["qgroup", "limit", "8M"], &dir);
        user.own(&dir);
        let acks =
            fill(&mut runner.command_as(&user, "/usr/bin/python3", &dir), "EDQUOT", bed.disk());
        verify(&dir, &acks);
        if let Runner::Run(pool) = runner {
            replay(pool, Some(&user));
            verify(&dir, &acks);
        }
    }
    unmount(&mount_point);
}

/// No file may be longer than a MiB: the log must not have what the kernel refused.
#[test]
fn a_limit_of_the_size_of_files() {
    let bed = Bed::new();
    for (name, runner) in [("plain", Runner::Plain), ("run", Runner::Run(&bed.pool()))] {
        let dir = bed.disk().join(name);
        std::fs::create_dir(&dir).unwrap();
        let mut command = runner.command("/usr/bin/prlimit", &dir);
        command.args(["--fsize=1048576", "--", "/usr/bin/python3"]);
        let acks = fill(&mut command, "EFBIG", bed.disk());
        verify(&dir, &acks);
        if let Runner::Run(pool) = runner {
            replay(pool, None);
            verify(&dir, &acks);
        }
    }
}

impl Small {
    /// ext4 gives up, as it does after errors of its disk: what was not written yet stays in the
    /// page cache, and goes with it.
    fn abort(&self) {
        succeed(tool("mount", "mount").args(["-o", "remount,abort"]).arg(self.mount_point()));
    }

    /// ext4 is dead at once: it opens no file, and has nothing to say of what it did not write.
    fn shut_down(&self) {
        const SHUT_DOWN: &str = "import fcntl, os, struct, sys
fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, struct.pack('I', 2))";
        let mut python = tool("/usr/bin/python3", "python3");
        succeed(python.args(["-c", SHUT_DOWN]).arg(self.mount_point()));
    }

    /// The same file system as its disk has it.
    fn mount_again(&self) {
        self.unmount();
        self.mount();
    }
}

/// Workers whose last write the kernel may cut short: those that write in place would have parts of
/// two records then.
fn that_may_fail(round: u64) -> Vec<String> {
    ["filling", "versions", "delete"].map(|kind| format!("{kind}.{round}")).to_vec()
}

fn recover(pool: &Path) {
    println!("{}", ok(["recover".as_ref(), pool.as_os_str()]));
}

/// All are killed while their file system is dead. It is mounted again in the same boot: what
/// `recover` finds there is older than what was acknowledged.
#[test]
fn a_file_system_that_turns_read_only() {
    let bed = Bed::new();
    let small = Small::new("256M");
    let mut names = that_may_fail(5);
    names.push("filling.1".into());
    let mut workers = Workers::start(&bed.pool(), &small.mount_point(), &names);
    workers.wait_for("filling.1", 100);
    small.abort();
    workers.wait_for_line("EROFS");
    workers.tree.kill();
    let acks = workers.collect(bed.disk());
    small.mount_again();
    recover(&bed.pool());
    verify(&small.mount_point(), &acks);
}

/// As before, but nobody is killed: the programs end by their errors, the supervisor with them.
#[test]
fn a_tree_that_ends_with_a_dead_file_system() {
    let bed = Bed::new();
    let small = Small::new("64M");
    let names = [String::from("filling.1"), String::from("filling.2")];
    let mut workers = Workers::start(&bed.pool(), &small.mount_point(), &names);
    workers.wait_for("filling.1", 100);
    small.abort();
    let acks = workers.collect(bed.disk());
    small.mount_again();
    recover(&bed.pool());
    verify(&small.mount_point(), &acks);
}

/// A file system that opens no file any more is no file system without the files.
#[test]
fn a_tree_that_ends_with_a_file_system_that_is_shut_down() {
    let bed = Bed::new();
    let small = Small::new("64M");
    let names = [String::from("filling.1"), String::from("filling.2")];
    let mut workers = Workers::start(&bed.pool(), &small.mount_point(), &names);
    workers.wait_for("filling.1", 100);
    small.shut_down();
    let acks = workers.collect(bed.disk());
    small.mount_again();
    recover(&bed.pool());
    verify(&small.mount_point(), &acks);
}

/// The disk dies under running programs: EIO for everybody. Later it is back, with what it had.
#[test]
fn a_disk_that_dies_and_comes_back() {
    let mut disk = Disk::new();
    let names = that_may_fail(6);
    let mut workers = Workers::start(&disk.pool(), &disk.mount_point(), &names);
    workers.wait_for(&names[0], 100);
    disk.break_off();
    let flushed = run(["flush".as_ref(), disk.pool().as_os_str()]);
    assert!(!flushed.status.success(), "without a disk: {flushed:?}");
    workers.tree.kill();
    disk.power_off();
    let acks = workers.collect(disk.dir.path());
    disk.power_on("none");
    recover(&disk.pool());
    verify(&disk.mount_point(), &acks);
}

/// What an outsider removed must not come back.
#[test]
fn a_removed_directory() {
    let bed = Bed::new();
    let dir = bed.disk().join("removed");
    std::fs::create_dir(&dir).unwrap();
    let names = [String::from("records.1"), String::from("slots.2"), String::from("large.3")];
    let mut workers = Workers::start(&bed.pool(), &dir, &names);
    for name in &names {
        workers.wait_for(name, 2);
    }
    std::fs::remove_dir_all(&dir).unwrap();
    workers.wait_for(&names[0], 200);
    workers.wait_for(&names[2], 10);
    workers.tree.kill();
    workers.collect(bed.pool_dir());
    recover(&bed.pool());
    assert!(!dir.exists(), "the directory is back: {}", tree::listing(&dir));
}

/// A pool whose file system has less free space than it should have: no SIGBUS, whatever is
/// written.
#[test]
fn no_space_for_the_pool() {
    let bed = Bed::new();
    for size in ["16M", "200K"] {
        let place = scratch();
        let mut mount = tool("mount", "mount");
        succeed(
            mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(place.path()),
        );
        let pool = place.path().join("pool");
        let script =
            "dd if=/dev/zero bs=64k count=800 of=file conv=fsync 2>&1; sync file; cksum file";
        let said = Runner::Run(&pool).script(script, bed.disk());
        unmount(place.path());
        // Works as without, or is refused before anything is started.
        let done = said.contains("52428800 file") && said.ends_with("exit status: 0\n");
        assert!(done || said == "exit status: 1\n", "{size}: {said}");
    }
}

/// Another program takes the rest of the file system while the log has a part of its space: it goes
/// on in that, lap by lap.
#[test]
fn space_for_the_pool_that_another_takes() {
    let bed = Bed::new();
    let place = scratch();
    succeed(
        tool("mount", "mount").args(["-t", "tmpfs", "-o", "size=12M", "tmpfs"]).arg(place.path()),
    );
    let write = "import os, sys
file = os.open('file', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for number in range(int(sys.argv[1])):
    os.write(file, b'x' * 8000)
    os.fsync(file)";
    let script = format!(
        "write() {{ /usr/bin/python3 -c \"{write}\" $1; }}
         write 10; cat /dev/zero > {}; write 3000; echo $?; wc -c < file",
        place.path().join("rest").display()
    );
    let said = Runner::Run(&place.path().join("pool")).script(&script, bed.disk());
    unmount(place.path());
    assert!(said.contains("No space left"), "the file system is not full: {said}");
    assert!(said.ends_with("\n0\n24000000\nexit status: 0\n"), "{said}");
}
