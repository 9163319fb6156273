//! Power cuts of a machine with ext4 on a cache, in every mode. The disk behind the cache is a
//! `tidegate serve` of a raw pool that has a volatile cache of its own: what the disk was not told
//! to flush is lost with that server. What a program on ext4 has synced must be there, whichever of
//! cache and disk a mode leaves it to.
//!
//! In rounds with the same pool and disk, at a random moment, the power fails: both servers are
//! killed with -9. In every other round only the server of the cache is. `TIDEGATE_KILL_ROUNDS`
//! says how many rounds, 5 unless set. At the end the cache is stopped, the disk loses its power,
//! and is used alone.

use std::path::PathBuf;

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::behind::kill;
use crate::replaced_files::{FILES, Program, ReplacedFiles};
use crate::spin_for_a_moment;
use crate::support::file_system::FileSystem;
use crate::support::random::Random;
use crate::support::{Server, ok, scratch, setting, succeed, tool};

#[test]
fn what_was_synced_survives_power_cuts_of_write_back() {
    cut_again_and_again(&["--mode=wb"]);
}

#[test]
fn what_was_synced_survives_power_cuts_of_write_through() {
    cut_again_and_again(&["--mode=wt"]);
}

#[test]
fn what_was_synced_survives_power_cuts_of_write_around() {
    cut_again_and_again(&["--mode=wa"]);
}

#[test]
fn what_was_synced_survives_power_cuts_of_write_invalidate() {
    cut_again_and_again(&["--mode=wi"]);
}

#[test]
fn what_was_synced_survives_power_cuts_of_write_only() {
    cut_again_and_again(&["--mode=wo"]);
}

#[test]
fn what_was_synced_survives_power_cuts_of_pass_through() {
    cut_again_and_again(&["--mode=pt"]);
}

#[test]
fn what_was_synced_survives_power_cuts_of_atomic_flush() {
    cut_again_and_again(&["--mode=wb", "--atomic-flush"]);
}

/// Directories on the file system, with a program in each. So a file is written while another one
/// is synced.
const DIRECTORIES: [&str; 2] = ["first", "second"];

/// What the programs have synced.
type Synced = [ReplacedFiles; DIRECTORIES.len()];

fn cut_again_and_again(options: &'static [&'static str]) {
    let seed = setting("TIDEGATE_SEED", u64::from(std::process::id()));
    println!("TIDEGATE_SEED={seed}");
    let (machine, mut random) = (Machine::new(options), Random(seed));
    let mut files: Synced = DIRECTORIES.map(|_| ReplacedFiles::new());
    let mut power = machine.serve_cache(machine.serve_disk());
    machine.make_file_system();
    for round in 0..setting("TIDEGATE_KILL_ROUNDS", 5) {
        let loses_power = round % 2 == 0;
        let syncs = 1 + random.below(2 * FILES);
        println!("round {round}: {syncs} files more; the disk loses its power: {loses_power}");
        let disk = machine.replace_until_kill(power, &mut files, syncs, |power| {
            spin_for_a_moment(&mut random);
            if loses_power {
                power.cut(&mut random);
                return None;
            }
            Some(power.kill_cache())
        });
        ok(["check".as_ref(), machine.path("pool").as_os_str()]);
        power = machine.serve_cache(disk.unwrap_or_else(|| machine.serve_disk()));
        assert_intact(&machine.mount("socket"), &mut files);
    }
    let Power { cache, disk } = power;
    assert!(cache.stop(Signal::TERM).0.success(), "the disk has all that was in the cache");
    ok(["check".as_ref(), machine.path("pool").as_os_str()]);
    kill(disk);
    let _disk = machine.serve_disk();
    assert_intact(&machine.mount("disk-socket"), &mut files);
}

/// The files are whole, and so is the file system. The mount has replayed the journal.
fn assert_intact(file_system: &FileSystem, files: &mut Synced) {
    for (files, dir) in files.iter_mut().zip(DIRECTORIES) {
        files.assert_in(&file_system.mount_point.join(dir));
    }
    let device = file_system.unmount();
    succeed(tool("e2fsck", "e2fsprogs").arg("-fn").arg(device));
}

/// A pool, a disk that it is before, and a place to mount the disk's file system.
struct Machine {
    dir: TempDir,
    options: &'static [&'static str],
}

/// The servers of a machine that has power.
struct Power {
    cache: Server,
    disk: Server,
}

impl Machine {
    /// A pool that is smaller than the journal of the file system, so that it is cleaned and
    /// evicted all the while.
    fn new(options: &'static [&'static str]) -> Self {
        let machine = Self { dir: scratch(), options };
        for (name, engine, size) in [("disk", "raw", "24M"), ("pool", "cache", "3M")] {
            let path = machine.path(name);
            ok(["create", path.to_str().unwrap(), "--engine", engine, "--size", size]);
        }
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn uri(&self, socket: &str) -> String {
        format!("nbd+unix:///?socket={}", self.path(socket).display())
    }

    /// Serves the disk. Its volatile cache is as large as the disk: only a flush writes it back.
    fn serve_disk(&self) -> Server {
        Server::start(&self.path("disk"), &self.path("disk-socket"), &["--dram=lru:32M"])
    }

    fn serve_cache(&self, disk: Server) -> Power {
        let backing = format!("--backing={}", self.uri("disk-socket"));
        let args = [&[backing.as_str()], self.options].concat();
        Power { cache: Server::start(&self.path("pool"), &self.path("socket"), &args), disk }
    }

    fn make_file_system(&self) {
        let file_system = FileSystem::make(self.dir.path(), &self.uri("socket"));
        let device = file_system.unmount();
        let features = succeed(tool("dumpe2fs", "e2fsprogs").arg("-h").arg(device));
        assert!(features.contains("has_journal"), "{features}");
    }

    fn mount(&self, socket: &str) -> FileSystem {
        FileSystem::mount(self.dir.path(), &self.uri(socket), None)
    }

    /// Has programs replace files, and calls `fail` when one of them has synced `syncs` of its
    /// files. Returns what that returns.
    fn replace_until_kill<T>(
        &self,
        power: Power,
        files: &mut Synced,
        syncs: usize,
        fail: impl FnOnce(Power) -> T,
    ) -> T {
        let mut file_system = self.mount("socket");
        let dirs = DIRECTORIES.map(|dir| file_system.mount_point.join(dir));
        let started = files.iter_mut().zip(&dirs).map(|(files, dir)| files.replace_in(dir));
        let programs: Vec<Program> = started.collect();
        files[0].wait_for(&programs[0], syncs);
        let failed = fail(power);
        file_system.break_off();
        files.iter_mut().zip(programs).for_each(|(files, program)| files.collect(program));
        failed
    }
}

impl Power {
    /// Kills both servers, either of them first.
    fn cut(self, random: &mut Random) {
        let mut servers = [self.cache, self.disk];
        if random.below(2) == 0 {
            servers.reverse();
        }
        for server in &servers {
            kill_process(server.pid(), Signal::KILL).expect("the server is alive");
        }
        servers.into_iter().for_each(Server::wait_killed);
    }

    /// Kills the server of the cache, and returns that of the disk.
    fn kill_cache(self) -> Server {
        kill(self.cache);
        self.disk
    }
}
