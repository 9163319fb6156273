//! `tidegate run` as users will have it: the pool on an NVDIMM, as a file of a DAX file system and
//! as a device of its own (devdax), files on a virtual disk. The cut is the end of the machine.
//!
//! The sequences, and what a cut may leave, are those of `tidegate-crashtest`. What the guest
//! stored in the NVDIMM and wrote to its disk is in files of the host; its page cache dies with it.

use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use tidegate_crashtest::file_system::FileSystem;
use tidegate_crashtest::generator;
use tidegate_crashtest::machine::disk::{Disk, OUTSIDE};
use tidegate_crashtest::machine::program::Interpreter;
use tidegate_crashtest::model::crowd::PROGRAM;
use tidegate_crashtest::model::{Kind, Model, Verdict};
use tidegate_crashtest::sequence::{Outside, Sequence, Step};

use crate::initramfs::Addition;
use crate::support::built::build_tidegate;
use crate::vm::{Drive, Guest, Lab, Nvdimm, System};

/// Behind the exchange.
const POOL_NVDIMM: usize = 1;
const NVDIMM_BYTES: u64 = 64 << 20;
/// Where the kernel begins with what it gives users: before it is what says so.
const OFFSET_BYTES: u64 = 2 << 20;
/// How many sequences a test takes; `make soak` takes more.
const SEQUENCES: u64 = 1;

/// What a pool lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Medium {
    /// A file of ext4 mounted with `dax=always`: mapped with `MAP_SYNC`.
    DaxFileSystem,
    /// `/dev/dax0.0`.
    Devdax,
}

static SYSTEM: LazyLock<System> = LazyLock::new(|| System::with(&root_of_run()));

/// A root with the shipped binaries, and what they need.
pub(crate) fn root_of_run() -> Addition {
    build_tidegate();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let interpreter = Interpreter::compile(dir.path()).expect("the interpreter is compiled");
    let tidegate = Path::new(env!("CARGO_BIN_EXE_tidegate"));
    let library = tidegate.with_file_name("libtidegate_preload.so");
    let mut files = vec![
        ("bin/tidegate".to_owned(), stripped(tidegate, dir.path())),
        ("bin/libtidegate_preload.so".to_owned(), stripped(&library, dir.path())),
        ("bin/interpreter".to_owned(), read(&interpreter.dynamic)),
        ("bin/interpreter-static".to_owned(), read(&interpreter.linked)),
    ];
    files.extend(libraries(tidegate));
    Addition {
        modules: vec!["dax/device_dax", "dax/dax_pmem", "block/virtio_blk"],
        files,
        functions: include_str!("functions"),
    }
}

pub(crate) fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|err| panic!("{}: {err}", path.display()))
}

/// A binary without its debug information: the root is memory of the guest.
fn stripped(path: &Path, dir: &Path) -> Vec<u8> {
    let to = dir.join("stripped");
    let status = Command::new("strip").arg("-o").arg(&to).arg(path).status();
    assert!(status.expect("strip is there (package binutils)").success(), "{}", path.display());
    read(&to)
}

/// The shared libraries of a binary, where they are on this machine.
pub(crate) fn libraries(binary: &Path) -> Vec<(String, Vec<u8>)> {
    let out = Command::new("ldd").arg(binary).output().expect("ldd runs");
    let out = String::from_utf8(out.stdout).expect("ldd prints text");
    let paths = out.split_whitespace().filter(|word| word.starts_with('/'));
    paths.map(|path| (path.trim_start_matches('/').to_owned(), read(Path::new(path)))).collect()
}

/// What outlives the machines: their NVDIMM and their disk.
struct Host {
    lab: Lab,
    medium: Medium,
    nvdimm: Nvdimm,
    disk: Disk,
}

impl Host {
    fn new(medium: Medium) -> Self {
        let lab = Lab::enter();
        let nvdimm = Nvdimm::plain(&lab.path("nvdimm"));
        let file = std::fs::File::create(&nvdimm.path).and_then(|file| file.set_len(NVDIMM_BYTES));
        file.expect("the NVDIMM's file can be made");
        if medium == Medium::DaxFileSystem {
            let mut mkfs = Command::new("mkfs.ext4");
            mkfs.args(["-q", "-b4096", "-E", &format!("offset={OFFSET_BYTES}")]).arg(&nvdimm.path);
            mkfs.arg(format!("{}k", (NVDIMM_BYTES - OFFSET_BYTES) / 1024));
            assert!(mkfs.status().expect("mkfs.ext4 runs").success(), "no file system is made");
        }
        let dir = lab.path(".");
        let interpreter = Interpreter::compile(&dir).expect("the interpreter is compiled");
        let disk = Disk::new(&dir, &interpreter.idle, FileSystem::Ext4, None);
        let disk = disk.expect("a disk can be made (needs root)");
        Self { lab, medium, nvdimm, disk }
    }

    /// A new machine, with the pool's medium where it belongs; the path of the pool.
    fn boot(&self) -> (Guest, String) {
        let nvdimms = std::slice::from_ref(&self.nvdimm);
        let mut guest = Guest::boot_system(
            &SYSTEM,
            &self.lab,
            nvdimms,
            Some(Drive::File(self.disk.image_path())),
        );
        let region = guest.region(POOL_NVDIMM);
        match self.medium {
            Medium::DaxFileSystem => {
                guest.run(&format!("daxfs {region}"));
                (guest, "/pmem/pool".to_owned())
            }
            Medium::Devdax => {
                guest.run(&format!("devdax {region}"));
                (guest, format!("/dev/dax{region}.0"))
            }
        }
    }

    /// Runs a sequence, ends the machine, and has the next one do `recovery` with the pool, its
    /// disk being mounted; judges what is left. The machine that is given is replaced.
    fn test(
        &mut self,
        (guest, pool): &mut (Guest, String),
        sequence: &Sequence,
        recovery: &str,
    ) -> Verdict {
        self.disk.reset().expect("the disk can be written");
        self.create_pool(guest, pool);
        run(guest, pool, sequence);
        guest.cut();
        (*guest, *pool) = self.boot();
        guest.run(&format!("disk && {recovery} {pool} 2>&1 && umount /disk"));
        let verdict = self.judge(sequence);
        println!("{:?}: {}: {verdict}", self.medium, sequence.one_line());
        verdict
    }

    fn create_pool(&self, guest: &mut Guest, pool: &str) {
        let size = if self.medium == Medium::Devdax { "62M" } else { "16M" };
        guest.run(&format!("tidegate create {pool} --engine log --force --size {size} 2>&1"));
        let told = guest.run(&format!("tidegate info {pool}"));
        assert!(told.contains("adr"), "the memory itself is not mapped: {told}");
    }

    /// Judges what a recovery left on the disk.
    fn judge(&mut self, sequence: &Sequence) -> Verdict {
        self.disk.mount().expect("the disk can be mounted");
        let mut state = self.disk.read().expect("the disk can be read");
        // No sequence of these tests runs it.
        state.remove(PROGRAM);
        self.disk.unmount().expect("the disk can be unmounted");
        let model = Model::new(Kind::Ext4).under_run().after(sequence);
        model.expect("the sequence is valid").judge(&state, true)
    }
}

/// Executes the steps of a sequence under `tidegate run`.
fn run(guest: &mut Guest, pool: &str, sequence: &Sequence) {
    // ext4 takes an inode that it loads while a transaction runs for changed by that: a commit
    // ends what mounting began, then all are loaded.
    guest.run(&format!("disk && outside commit /disk/{OUTSIDE} && load"));
    guest.run(&format!("start {pool} {}", if sequence.hold { "hold" } else { "" }));
    for (number, step) in (1..).zip(&sequence.steps) {
        let answer = guest.run(&match step {
            Step::Outside(Outside::Commit) => format!("outside commit /disk/{OUTSIDE}"),
            Step::Outside(Outside::WriteBack(path)) => format!("outside writeback /disk/{path}"),
            Step::Outside(Outside::Retire) => {
                format!("tidegate flush {pool} >/dev/null && echo ok")
            }
            _ => format!("step {number} {step}"),
        });
        assert!(answer.ends_with("ok"), "{}: {step}: {answer}", sequence.one_line());
    }
}

/// Sequences of two to four operations, from seeds.
fn sequences(medium: Medium) -> impl Iterator<Item = Sequence> {
    let count = std::env::var("TIDEGATE_GUEST_CUTS").ok();
    let count = count.map_or(SEQUENCES, |count| count.parse().expect("a number of sequences"));
    let first = 1000 * (1 + medium as u64);
    (first..first + count).map(|seed| {
        let length = 2 + usize::try_from(seed % 3).expect("it is small");
        generator::sample(length, seed)
    })
}

fn end_machines(medium: Medium) {
    let fixed = [
        "prepare; new d0/B 5000; fsync .; rename d0/B d0/A; fsync d0",
        "hold; fsync d0/A; write d0/A 1000 3000; fdatasync d0/A; append d0/A 3000; fsync d0/A",
    ];
    let fixed = fixed.map(|text| text.parse().expect("it is valid"));
    let mut host = Host::new(medium);
    let mut machine = host.boot();
    for sequence in fixed.into_iter().chain(sequences(medium)) {
        let mut verdict = host.test(&mut machine, &sequence, "tidegate recover");
        if matches!(verdict, Verdict::Misordered(_)) {
            // A commit by something else explains it: that does not come again.
            verdict = host.test(&mut machine, &sequence, "tidegate recover");
        }
        assert!(verdict.is_allowed(), "{medium:?}: {}: {verdict}", sequence.one_line());
    }
    let synced = "prepare; new d0/B 5000; fsync .".parse().expect("it is valid");
    let lost = host.test(&mut machine, &synced, ": without");
    assert!(matches!(lost, Verdict::Forbidden(_)), "a recovery that is left out is not seen");
    machine.0.power_off();
}

#[test]
fn machines_that_end_keep_what_was_synced_with_the_pool_on_a_dax_file_system() {
    end_machines(Medium::DaxFileSystem);
}

#[test]
fn machines_that_end_keep_what_was_synced_with_the_pool_on_devdax() {
    end_machines(Medium::Devdax);
}
