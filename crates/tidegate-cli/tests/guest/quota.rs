//! Quotas of projects under `tidegate run`: a program meets its limit where it meets it without
//! Tidegate. In a guest, since many kernels have no quotas.

use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use crate::run::{read, root_of_run};
use crate::vm::{Drive, Guest, Lab, System};

/// A root with the shipped binaries, the quota's drivers and the program.
static SYSTEM: LazyLock<System> = LazyLock::new(|| {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (source, program) = (dir.path().join("quota.c"), dir.path().join("quota"));
    std::fs::write(&source, include_str!("quota.c")).expect("the source can be written");
    let status = Command::new("cc").args(["-O1", "-o"]).args([&program, &source]).status();
    assert!(status.expect("cc is there (package gcc)").success(), "quota.c does not compile");
    let mut root = root_of_run();
    root.modules.extend(["../fs/quota/quota_tree", "../fs/quota/quota_v2"]);
    root.files.push(("bin/quota".to_owned(), read(&program)));
    System::with(&root)
});

/// An ext4 with quotas of projects.
fn make_disk(path: &Path) {
    let file = std::fs::File::create(path).and_then(|file| file.set_len(64 << 20));
    file.expect("the disk's file can be made");
    let mut mkfs = Command::new("mkfs.ext4");
    mkfs.args(["-q", "-b4096", "-O", "quota,project", "-E", "quotatype=prjquota"]).arg(path);
    assert!(mkfs.status().expect("mkfs.ext4 runs").success(), "no file system is made");
}

#[test]
fn a_project_s_quota_is_met_where_it_is_met_without_tidegate() {
    let lab = Lab::enter();
    let disk = lab.path("disk");
    make_disk(&disk);
    let mut guest = Guest::boot_system(&SYSTEM, &lab, &[], Some(Drive::File(&disk)));
    guest.run("mount -t ext4 -o prjquota /dev/vda /disk && mkdir /disk/plain /disk/run");
    for (project, directory) in [(7, "plain"), (8, "run")] {
        guest.run(&format!("quota limit /dev/vda /disk/{directory} {project}"));
    }
    // Files are covered once they are a second old.
    guest.run("sleep 2");
    let plain = guest.run("quota bounded quota write /disk/plain");
    assert!(plain.contains("then Disk quota exceeded"), "{plain}");
    assert!(plain.contains("over the first: ok\ncut: ok, 4096 bytes"), "{plain}");
    let run = "tidegate run --stats --pool /dev/shm/pool --size 16M -- quota write /disk/run";
    let under_run = guest.run(&format!("quota bounded {run} 2>/tmp/said"));
    assert_eq!(under_run, plain);
    let said = guest.run("cat /tmp/said");
    let skipped =
        said.lines().find_map(|line| line.split_once("fsyncs")?.1.split_whitespace().next());
    let skipped = skipped.and_then(|number| number.parse::<u64>().ok());
    assert!(skipped.is_some_and(|skipped| skipped > 5), "the file was plain: {said}");
    assert_eq!(guest.run("umount /disk && echo unmounted"), "unmounted");
    guest.power_off();
}
