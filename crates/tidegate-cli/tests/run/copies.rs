//! A file system that is mounted beside a copy of itself, with the same UUID and the same handles:
//! clones and snapshots of volumes. Neither may get what was written to the other.

use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use tempfile::TempDir;

use crate::bed::{Runner, on_disk};
use crate::crash::Workers;
use crate::support::file_system::{Kind, unmount};
use crate::support::image::{Image, ImageCopy};
use crate::support::{run, scratch, succeed, tool};

/// Covers the files that are named, of which each gets a text of its own; then does so again for
/// each path that it reads from a pipe.
const WRITE: &str = "import os, sys, signal
def write(path, text):
    file = os.open(path, os.O_RDWR)
    for number in range(9):
        os.pwrite(file, text, 0)
        os.fdatasync(file)
for at, path in enumerate(sys.argv[2:]):
    write(path, b'synced %d' % at)
os.write(1, b'written\\n')
for line in open(sys.argv[1]):
    write(line.strip(), b'synced n')
    os.write(1, b'again\\n')
signal.pause()";
const BEFORE: &str = "........";

/// A volume with a file, and its copy.
struct Scene {
    volume: Image,
    copy: ImageCopy,
    place: TempDir,
    _dir: TempDir,
}

impl Scene {
    fn new(kind: Kind) -> Self {
        let (place, dir) = (scratch(), on_disk());
        let volume = Image::make(kind, dir.path(), "volume");
        std::fs::write(volume.mount_point.join("file"), BEFORE).unwrap();
        let copy = volume.copy(dir.path(), "copy");
        Self { volume, copy, place, _dir: dir }
    }

    fn pool(&self) -> PathBuf {
        self.place.path().join("pool")
    }

    fn files(&self) -> [PathBuf; 2] {
        [&self.volume.mount_point, &self.copy.mount_point].map(|at| at.join("file"))
    }

    fn start(&self, files: &[&Path]) -> (Workers, BufReader<PipeReader>) {
        let pipe = self.place.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        let (said, says) = std::io::pipe().unwrap();
        let mut command = Runner::Run(&self.pool()).command("/usr/bin/python3", Path::new("/"));
        command.args(["-c", WRITE]).arg(pipe).args(files).stderr(says);
        let mut workers = Workers::spawn(command, &self.pool());
        workers.wait_for_line("written");
        (workers, BufReader::new(said))
    }

    fn replay(&self) -> Output {
        run(["recover".as_ref(), "--replay".as_ref(), self.pool().as_os_str()])
    }

    fn assert_replay_says(&self, expected: &str) {
        let output = self.replay();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.contains(expected), "{output:?}");
    }
}

fn content(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn a_volume_and_its_copy_are_both_plain() {
    for kind in [Kind::Ext4, Kind::Xfs] {
        let scene = Scene::new(kind);
        let _copy = scene.copy.mount();
        let files = scene.files();
        let (mut workers, _said) = scene.start(&[&files[0], &files[1]]);
        workers.tree.kill();
        scene.assert_replay_says("nothing to recover");
        assert_eq!(files.map(|file| content(&file)), ["synced 0", "synced 1"], "{kind:?}");
    }
}

#[test]
fn a_copy_that_is_mounted_later_ends_the_stories_of_the_volume() {
    let scene = Scene::new(Kind::Ext4);
    let [file, copied] = scene.files();
    let (mut workers, said) = scene.start(&[&file]);
    let _copy = scene.copy.mount();
    let is_notice = |line: &String| line.contains("several file systems with the UUID");
    assert!(said.lines().map(Result::unwrap).any(|line| is_notice(&line)));
    std::fs::write(scene.place.path().join("pipe"), format!("{}\n", file.display())).unwrap();
    workers.wait_for_line("again");
    workers.tree.kill();
    scene.assert_replay_says("nothing to recover");
    assert_eq!([content(&file), content(&copied)], ["synced n", BEFORE]);
}

#[test]
fn recovery_beside_a_copy_names_both_and_touches_neither() {
    let scene = Scene::new(Kind::Ext4);
    let [file, copied] = scene.files();
    let (mut workers, _said) = scene.start(&[&file]);
    workers.tree.kill();
    // As if the disk did not have it.
    let before = file.metadata().unwrap().modified().unwrap() - Duration::from_secs(3600);
    std::fs::write(&file, BEFORE).unwrap();
    File::options().write(true).open(&file).unwrap().set_modified(before).unwrap();
    let copy = scene.copy.mount();
    let refused = scene.replay();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success(), "{said}");
    for mount_point in [&scene.volume.mount_point, &scene.copy.mount_point] {
        assert!(said.contains(&mount_point.display().to_string()), "{said}");
    }
    assert_eq!([content(&file), content(&copied)], [BEFORE; 2]);
    drop(copy);
    scene.assert_replay_says("written to 1 files");
    assert_eq!(content(&file), "synced 0");
}

#[test]
fn a_second_mount_of_the_volume_is_no_copy() {
    let scene = Scene::new(Kind::Ext4);
    let [file, _] = scene.files();
    std::fs::create_dir(&scene.copy.mount_point).unwrap();
    let bind = [&scene.volume.mount_point, &scene.copy.mount_point];
    succeed(tool("mount", "mount").arg("--bind").args(bind));
    let (mut workers, _said) = scene.start(&[&file]);
    workers.tree.kill();
    scene.assert_replay_says("written to 1 files");
    unmount(&scene.copy.mount_point);
}
