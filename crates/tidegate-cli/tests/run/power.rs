//! Power cuts. The files are on an ext4 on a disk that a `tidegate serve` of a raw pool is. The
//! power fails at a random moment: that server is stopped, so nothing reaches the disk any more,
//! then everything is killed. What the page cache held is gone; what was acknowledged must come
//! back from the log: data, sizes, names.
//!
//! In every other round the disk has a volatile cache: what it took and was not told to flush is
//! gone too.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::bed::replay;
use crate::crash::{Workers, a_few, seed, verify};
#[cfg(feature = "soak")]
use crate::fsx::built_tool;
#[cfg(feature = "soak")]
use crate::postgres::{server_survives, server_user};
use crate::programs::{python, source};
use crate::support::file_system::{FileSystem, Kind};
use crate::support::{Server, ok, scratch, setting, succeed, tool};
#[cfg(feature = "soak")]
use crate::tree;

/// A disk that can lose its power; it and the pool survive.
pub(crate) struct Disk {
    /// First: it is mounted in the directory.
    powered: Option<(Server, FileSystem)>,
    pub(crate) dir: TempDir,
}

impl Disk {
    pub(crate) fn new() -> Self {
        Self::of(Kind::Ext4)
    }

    pub(crate) fn of(kind: Kind) -> Self {
        let dir = scratch();
        let image = dir.path().join("image");
        ok(["create".as_ref(), image.as_os_str(), "--engine=raw".as_ref(), "--size=512M".as_ref()]);
        let mut this = Self { powered: None, dir };
        let server = this.serve("none");
        let file_system = FileSystem::make_of(kind, this.dir.path(), &this.uri());
        this.powered = Some((server, file_system));
        this
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn mount_point(&self) -> PathBuf {
        self.path("mnt")
    }

    pub(crate) fn pool(&self) -> PathBuf {
        self.path("pool")
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path("socket").display())
    }

    fn serve(&self, dram: &str) -> Server {
        Server::start(&self.path("image"), &self.path("socket"), &["--dram", dram])
    }

    /// From here on nothing reaches the disk.
    pub(crate) fn freeze(&self) {
        let (server, _) = self.powered.as_ref().expect("the power is on");
        kill_process(server.pid(), Signal::STOP).expect("the server is alive");
    }

    /// Callers that wait for the disk get errors; it stays mounted.
    pub(crate) fn break_off(&mut self) {
        let (server, file_system) = self.powered.as_mut().expect("the power is on");
        kill_process(server.pid(), Signal::KILL).expect("the server is alive");
        file_system.break_off();
    }

    /// Breaks the file system off and unmounts it; the programs must be dead already.
    pub(crate) fn power_off(&mut self) {
        self.break_off();
        let (server, _) = self.powered.take().expect("the power is on");
        let (status, _) = server.stop(Signal::KILL);
        assert_eq!(status.signal(), Some(9));
    }

    pub(crate) fn power_on(&mut self, dram: &str) {
        self.power_on_as(dram, None);
    }

    /// Starts the server and mounts its disk, as `device` if that is free.
    pub(crate) fn power_on_as(&mut self, dram: &str, device: Option<&str>) {
        let server = self.serve(dram);
        let file_system = FileSystem::mount(self.dir.path(), &self.uri(), device);
        self.powered = Some((server, file_system));
    }

    pub(crate) fn file_system(&mut self) -> &mut FileSystem {
        let (_, file_system) = self.powered.as_mut().expect("the power is on");
        file_system
    }

    /// Mounts the file system again, with these options.
    pub(crate) fn mount_with(&mut self, options: &str) {
        self.file_system().mount_with(options);
    }

    /// Loses the power with `workers` running, comes back, and replays the log.
    pub(crate) fn cut(&mut self, workers: Workers, dram: &str) -> PathBuf {
        let acks = self.lose_power(workers, dram);
        replay(&self.pool(), None);
        acks
    }

    /// Loses the power with `workers` running and comes back; the log is not replayed.
    pub(crate) fn lose_power(&mut self, workers: Workers, dram: &str) -> PathBuf {
        let acks = self.fail_with(workers);
        self.power_on(dram);
        acks
    }

    /// Loses the power with `workers` running.
    pub(crate) fn fail_with(&mut self, mut workers: Workers) -> PathBuf {
        self.freeze();
        // They go on until they wait for the disk.
        workers.wait_until_quiet(Duration::from_millis(50), 100_000);
        workers.tree.kill();
        self.power_off();
        workers.collect(self.dir.path())
    }
}

#[test]
fn acknowledged_writes_and_names_survive_power_cuts() {
    let (mut disk, mut random) = (Disk::new(), seed());
    for round in 0..setting("TIDEGATE_POWER_ROUNDS", 2) {
        let dir = disk.mount_point().join(format!("round.{round}"));
        std::fs::create_dir(&dir).unwrap();
        let names = a_few(round);
        let (worker, count) = (&names[random.below(names.len())], 1 + random.below(100));
        println!("round {round}: the power fails when {worker} has {count}");
        let mut workers = Workers::start(&disk.pool(), &dir, &names);
        workers.wait_for(worker, count);
        let acks = disk.cut(workers, if round % 2 == 0 { "lru:32M" } else { "none" });
        verify(&dir, &acks);
        // A second replay must not change anything.
        replay(&disk.pool(), None);
        verify(&dir, &acks);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

/// Words of 8 bytes that the write of this version writes: the first one, and how many.
fn write_of(version: u64) -> (usize, usize) {
    let mixed = version * 2_654_435_761 % (1 << 32);
    let words = if mixed.is_multiple_of(5) { 64 } else { 512 };
    let pages = if mixed.is_multiple_of(8) { 640 } else { 16 };
    (usize::try_from(mixed / 256 % pages).unwrap() * 512, words)
}

/// What is overwritten later is retired without a write to the disk, and what is not, with one. The
/// log is so small that both happen many times.
#[test]
fn pages_that_are_written_again_and_again_survive_power_cuts() {
    let (mut disk, mut random) = (Disk::new(), seed());
    for round in 0..setting("TIDEGATE_POWER_ROUNDS", 2) {
        let _ = std::fs::remove_file(disk.pool());
        let pool = disk.pool();
        ok(["create".as_ref(), pool.as_os_str(), "--engine=log".as_ref(), "--size=2M".as_ref()]);
        let script = format!("exec /usr/bin/python3 -B {}", source("hot.py").display());
        let mut workers = Workers::start_script(&pool, &disk.mount_point(), &script);
        workers.wait_for("hot", 30 + random.below(100));
        let acks = disk.cut(workers, if round % 2 == 0 { "lru:32M" } else { "none" });
        let acks = std::fs::read_to_string(acks).unwrap();
        let whole = &acks[..acks.rfind('\n').unwrap()];
        let version = whole.lines().last().unwrap().strip_prefix("hot ").unwrap();
        let mut wanted = vec![0; 640 * 512];
        for version in 1..=version.parse().unwrap() {
            let (first, words) = write_of(version);
            wanted[first..first + words].fill(version);
        }
        let bytes = std::fs::read(disk.mount_point().join("hot")).unwrap();
        let found: Vec<u64> =
            bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        assert_eq!(found.len(), wanted.len());
        for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            assert!(found >= wanted, "word {at} is of write {found}, {wanted} was acknowledged");
        }
    }
}

/// A recovery that the power cuts short is done again by the next.
#[test]
fn recovery_itself_survives_a_power_cut() {
    let mut disk = Disk::new();
    let names = a_few(3);
    let mut workers = Workers::start(&disk.pool(), &disk.mount_point(), &names);
    workers.wait_for(&names[0], 60);
    let acks = disk.cut(workers, "lru:64M");
    // What recovery wrote is in the disk's cache only where it was not flushed: take it away again.
    disk.freeze();
    disk.power_off();
    disk.power_on("none");
    replay(&disk.pool(), None);
    verify(&disk.mount_point(), &acks);
}

/// fsx ends with an fsync: its file must come back from the log as it was.
#[test]
#[cfg(feature = "soak")]
fn fsx_leaves_the_same_file_after_a_power_cut() {
    let mut disk = Disk::new();
    let keep = disk.path("kept");
    std::fs::create_dir(&keep).unwrap();
    let script = format!(
        "for seed in 1 2 3; do {fsx} -N 1500 -S $seed file.$seed >/dev/null || exit 1; sync file.$seed .; done
         cp file.* {keep}; echo records.0 1; exec sleep 1000",
        fsx = built_tool("fsx").display(),
        keep = keep.display()
    );
    let mut workers = Workers::start_script(&disk.pool(), &disk.mount_point(), &script);
    workers.wait_for("records.0", 1);
    disk.cut(workers, "none");
    std::fs::remove_dir(disk.mount_point().join("lost+found")).unwrap();
    crate::bed::assert_same("files", &tree::listing(&keep), &tree::listing(&disk.mount_point()));
}

/// `NVCache`'s recovery opened files with `O_TRUNC` and erased what was in them before.
#[test]
fn recovery_keeps_what_was_in_a_file_before() {
    let mut disk = Disk::new();
    let file = disk.mount_point().join("file");
    std::fs::write(&file, vec![b'o'; 100_000]).unwrap();
    std::fs::File::open(&file).unwrap().sync_all().unwrap();
    let script = "/usr/bin/python3 -c 'import os
file = os.open(\"file\", os.O_WRONLY)
os.fsync(file)
os.pwrite(file, b\"new\", 50000)
os.write(os.open(\"file\", os.O_WRONLY | os.O_APPEND), b\"end\")
os.fdatasync(file)'
                  echo records.0 1; exec sleep 1000";
    let mut workers = Workers::start_script(&disk.pool(), &disk.mount_point(), script);
    workers.wait_for("records.0", 1);
    disk.cut(workers, "none");
    let mut wanted = vec![b'o'; 100_000];
    wanted[50_000..50_003].copy_from_slice(b"new");
    wanted.extend_from_slice(b"end");
    assert!(std::fs::read(&file).unwrap() == wanted, "the file is not as it was written");
}

/// A file of the log that is written through a descriptor with `O_DSYNC`: what is written around
/// the log must be durable, too.
#[test]
fn synchronous_writes_around_the_log_survive_a_power_cut() {
    let mut disk = Disk::new();
    let script = format!(
        "/usr/bin/python3 -B {}; echo records.0 1; exec sleep 1000",
        source("synced.py").display()
    );
    let mut workers = Workers::start_script(&disk.pool(), &disk.mount_point(), &script);
    workers.wait_for("records.0", 1);
    disk.cut(workers, "none");
    let read = |name| std::fs::read_to_string(disk.mount_point().join(name)).unwrap();
    for name in ["vector", "plain"] {
        assert_eq!(read(name), "x".repeat(65), "{name}");
    }
    for name in ["sent", "copied", "spliced", "streamed"] {
        assert_eq!(read(name), "0123456789", "{name}");
    }
}

/// After the next boot `run` replays the log before its program sees a file.
#[test]
fn the_next_run_recovers_by_itself() {
    let mut disk = Disk::new();
    let names = [String::from("fitting.1"), String::from("delete.2"), String::from("versions.3")];
    let mut workers = Workers::start(&disk.pool(), &disk.mount_point(), &names);
    workers.wait_for(&names[2], 50);
    let acks = disk.lose_power(workers, "none");
    let check = format!(
        "mount --bind boot_id /proc/sys/kernel/random/boot_id && exec {} run --pool pool -- \
         /usr/bin/python3 -B {} verify mnt {}",
        env!("CARGO_BIN_EXE_tidegate"),
        source("crash/crash.py").display(),
        acks.display()
    );
    std::fs::write(disk.path("boot_id"), "00000000-0000-4000-8000-000000000001\n").unwrap();
    let mut next_boot = tool("unshare", "util-linux");
    print!(
        "{}",
        succeed(next_boot.args(["--mount", "/bin/sh", "-c", &check]).current_dir(disk.dir.path()))
    );
}

/// Recovery refuses what was changed after the log's last record. By its clock, a boot may have
/// begun long before the last change of the boot before.
#[test]
fn a_clock_that_is_behind_stops_no_recovery() {
    let mut disk = Disk::new();
    let names = [String::from("fitting.1"), String::from("versions.3")];
    let mut workers = Workers::start(&disk.pool(), &disk.mount_point(), &names);
    workers.wait_for(&names[1], 50);
    let acks = disk.lose_power(workers, "none");
    // Another inode, as after a boot: nothing in shared memory is of it.
    let pool = disk.path("pool-of-before");
    std::fs::copy(disk.pool(), &pool).unwrap();
    let mut boot = python();
    boot.arg(source("rebooted.py")).arg("1000").arg(disk.mount_point());
    boot.arg(env!("CARGO_BIN_EXE_tidegate")).arg("recover").arg(&pool);
    print!("{}", succeed(&mut boot));
    verify(&disk.mount_point(), &acks);
}

#[test]
#[cfg(feature = "soak")]
fn a_database_server_survives_a_power_cut() {
    let mut disk = Disk::new();
    crate::bed::open_to_all(disk.dir.path());
    let dir = disk.mount_point().join("server");
    std::fs::create_dir(&dir).unwrap();
    let pool = disk.path("server-pool/pool");
    std::fs::create_dir(pool.parent().unwrap()).unwrap();
    let user = server_user();
    user.own(pool.parent().unwrap());
    server_survives(&user, &pool, &dir, |workers| {
        let acks = disk.lose_power(workers, "lru:64M");
        replay(&pool, Some(&user));
        acks
    });
}
