//! Power cuts behind an `fdatasync` that commits the journal on plain file systems, though the file
//! was only overwritten: an earlier rename is there. Each case is also run plain, which shows that
//! the kernel has it so.

use std::path::Path;

use crate::bed::{Runner, replay};
use crate::crash::Workers;
use crate::power::Disk;
use crate::programs::source;
use crate::support::file_system::Kind;

const SIZE: usize = 64 << 10;

/// Cuts the power behind `programs/commits.py` of this kind, plain and under `run`.
fn check(disk: &mut Disk, options: &str, kind: &str) {
    let pool = disk.pool();
    for runner in [Runner::Plain, Runner::Run(&pool)] {
        disk.mount_with(options);
        let dir = disk.mount_point().join("case");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("db"), vec![b'o'; SIZE]).unwrap();
        std::fs::write(dir.join("X"), "x").unwrap();
        rustix::fs::syncfs(std::fs::File::open(&dir).unwrap()).unwrap();
        cut(disk, runner, &dir, kind);
        let names = ["X", "Y"].map(|name| dir.join(name).exists());
        let content = std::fs::read(dir.join("db")).unwrap();
        let is_new = kind == "read" || content[0] == b'N';
        assert!(is_new && names == [false, true], "{kind}, {runner:?}: {is_new}, {names:?}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

fn cut(disk: &mut Disk, runner: Runner<'_>, dir: &Path, kind: &str) {
    let mut command = runner.command("/usr/bin/python3", dir);
    command.arg("-B").arg(source("commits.py")).arg(kind);
    let mut workers = Workers::spawn(command, &disk.pool());
    workers.wait_for_line("done");
    disk.lose_power(workers, "none");
    if let Runner::Run(pool) = runner {
        replay(pool, None);
    }
}

#[test]
fn an_overwrite_of_blocks_that_are_shared_commits_what_came_before() {
    let mut disk = Disk::of(Kind::Xfs);
    for kind in ["clone", "clone of a range", "deduplication", "copy_file_range"] {
        check(&mut disk, "defaults", kind);
    }
}

#[test]
fn an_overwrite_by_the_journal_commits_what_came_before() {
    let mut disk = Disk::new();
    check(&mut disk, "commit=300,data=journal", "data in the journal");
}

#[test]
fn fsync_of_a_file_that_was_read_commits_what_came_before() {
    let mut disk = Disk::new();
    check(&mut disk, "commit=300,strictatime", "read");
}
