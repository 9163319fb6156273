//! What the log does not know: changes by programs outside and by programs without Tidegate, while
//! the session lives and after it was killed, and ends that nobody records. After a power cut older
//! bytes never come back over newer ones that were synced.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::crash::{Workers, kill_supervisor};
use crate::power::Disk;
use crate::process_tree;
use crate::programs::compiled;
use crate::support::ok;

/// Covers files; tells; goes on when it is told to, by the end of a pipe.
const PRELUDE: &str = "import os, subprocess, sys, time
def overwrite(file, data, at=0): os.pwrite(file, data, at); os.fdatasync(file)
def covered(name, size=8192):
    file = os.open(name, os.O_RDWR | os.O_CREAT)
    for _ in range(10): overwrite(file, b'.' * size)
    return file
# A sync sooner after the last one does not look at the time of the file.
def unhurried(): time.sleep(.001)
def tell(number): print('told', number, flush=True)
def wait():
    with open('go') as pipe: pipe.read()
os.mkfifo('go')
";

/// A Python program under `run`, on a disk that can lose its power.
struct Session {
    disk: Disk,
    workers: Workers,
}

impl Session {
    fn start(program: &str) -> Self {
        Self::start_in("64M", program)
    }

    fn start_in(pool_size: &str, program: &str) -> Self {
        let disk = Disk::new();
        let pool = disk.pool();
        let size = format!("--size={pool_size}");
        ok(["create".as_ref(), pool.as_os_str(), "--engine=log".as_ref(), size.as_ref()]);
        let script = format!("exec /usr/bin/python3 -B -c \"{PRELUDE}{program}\"");
        let mut workers = Workers::start_script(&pool, &disk.mount_point(), &script);
        workers.wait_for("told", 1);
        Self { disk, workers }
    }

    /// Writes and syncs as a program outside, once the file can get a later time.
    fn write_outside(&self, name: &str, data: &[u8]) {
        if !has_fine_times() {
            std::thread::sleep(TICK);
        }
        let file = File::options().write(true).open(self.disk.mount_point().join(name)).unwrap();
        file.write_all_at(data, 0).unwrap();
        file.sync_all().unwrap();
    }

    /// Lets the program go on until it tells once more.
    fn go_on(&mut self) {
        let told = self.workers.acknowledged("told ");
        File::options().write(true).open(self.disk.mount_point().join("go")).unwrap();
        self.workers.wait_for("told", told + 1);
    }

    fn kill_launcher_and_supervisor(&self) {
        process_tree::kill_launchers(&self.disk.pool());
        kill_supervisor(&self.disk.pool(), &self.workers);
    }

    /// Loses the power and comes back; the disk, and what recovery says and whether it has done
    /// all.
    fn cut(self) -> (Disk, String, bool) {
        let Self { mut disk, workers } = self;
        disk.lose_power(workers, "none");
        let (said, is_whole) = recover(&disk.pool());
        (disk, said, is_whole)
    }
}

/// The longest tick of the clock of file timestamps.
const TICK: Duration = Duration::from_millis(10);

/// Returns whether a file's time moves on by less than a tick once it was looked at: Linux 6.13 and
/// newer.
fn has_fine_times() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(13))
}

fn recover(pool: &Path) -> (String, bool) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output = command.args(["recover", "--replay"]).arg(pool).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&said).into_owned(), output.status.success())
}

fn start_of(disk: &Disk, name: &str) -> u8 {
    std::fs::read(disk.mount_point().join(name)).unwrap()[0]
}

/// Overwrites a file, and then another one all the time.
const TWO_FILES: &str = "file, other = covered('file'), covered('other')
unhurried(); overwrite(file, b'i' * 4096); tell(1)
while True: overwrite(other, b'x' * 100)
";

#[test]
fn what_a_program_outside_has_synced_while_the_session_lives_is_left_as_it_is() {
    let session = Session::start(TWO_FILES);
    session.write_outside("file", &[b'o'; 4096]);
    let (disk, said, is_whole) = session.cut();
    assert!(!is_whole && said.contains("/file: the file was changed after the log"), "{said}");
    // It is left, and the other one recovered.
    assert_eq!([start_of(&disk, "file"), start_of(&disk, "other")], [b'o', b'x']);
}

#[test]
fn without_changes_from_outside_all_is_recovered() {
    let (disk, said, is_whole) = Session::start(TWO_FILES).cut();
    assert!(is_whole, "{said}");
    assert_eq!([start_of(&disk, "file"), start_of(&disk, "other")], [b'i', b'x']);
}

#[test]
fn what_was_synced_without_tidegate_after_all_was_killed_is_left_as_it_is() {
    let mut session = Session::start(
        "file = covered('file'); unhurried(); overwrite(file, b'i' * 4096); tell(1); wait()",
    );
    session.workers.tree.kill();
    session.write_outside("file", &[b'o'; 4096]);
    let (disk, said, is_whole) = session.cut();
    assert!(!is_whole && said.contains("/file: the file was changed after the log"), "{said}");
    assert_eq!(start_of(&disk, "file"), b'o');
}

/// As logrotate's `copytruncate` does.
#[test]
fn a_file_that_is_cut_from_outside_has_what_was_appended_since() {
    let mut session = Session::start(
        "file = os.open('log', os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in range(30): os.write(file, b'old line\\\\n' * 40); os.fdatasync(file)
tell(1); wait()
for number in range(3): os.write(file, b'new line\\\\n'); os.fdatasync(file)
tell(2); wait()",
    );
    let log = session.disk.mount_point().join("log");
    File::options().write(true).truncate(true).open(&log).unwrap();
    session.go_on();
    let written = std::fs::read(&log).unwrap();
    let (disk, said, is_whole) = session.cut();
    assert!(is_whole, "{said}");
    let found = std::fs::read(disk.mount_point().join("log")).unwrap();
    assert_eq!(String::from_utf8_lossy(&found), String::from_utf8_lossy(&written));
    assert!(found.starts_with(b"new line"));
}

/// The ends of all stories find no space in the log, and no supervisor makes any.
#[test]
fn more_files_than_have_space_for_their_ends_keep_what_was_synced_without_a_supervisor() {
    let mut session = Session::start_in(
        "128K",
        "files = [covered(f'file.{n}', 64) for n in range(100)]
tell(1); wait()
for round in range(10):
    for file in files: overwrite(file, b'%04d' % round * 100)
tell(2); wait()",
    );
    session.kill_launcher_and_supervisor();
    session.go_on();
    let (disk, said, is_whole) = session.cut();
    assert!(is_whole, "{said}");
    for number in 0..100 {
        let found = std::fs::read(disk.mount_point().join(format!("file.{number}"))).unwrap();
        assert!(found.starts_with(b"0009"), "file.{number}: {:?}", &found[..4]);
    }
}

#[test]
fn a_static_program_that_is_started_without_a_supervisor_finds_an_empty_log() {
    let program = compiled("static", &["-static"]);
    let mut session = Session::start(&format!(
        "file = covered('file', 20)
overwrite(file, b'i' * 20); tell(1); wait()
overwrite(file, b'j' * 20)
subprocess.run(['{}', 'file'], check=True); tell(2); wait()",
        program.display()
    ));
    session.kill_launcher_and_supervisor();
    session.go_on();
    let (disk, said, is_whole) = session.cut();
    assert!(is_whole, "{said}");
    let found = std::fs::read(disk.mount_point().join("file")).unwrap();
    assert_eq!(String::from_utf8_lossy(&found), format!("{} two ", "j".repeat(20)));
}

/// The times of a covered file are the program's to set.
#[test]
fn a_time_that_the_program_has_set_is_not_from_outside() {
    let session = Session::start(
        "file = covered('file')
os.utime(file, (4_000_000_000, 4_000_000_000)); os.fsync(file)
for _ in range(10): overwrite(file, b'i' * 4096)
tell(1); wait()",
    );
    let (disk, said, is_whole) = session.cut();
    assert!(is_whole, "{said}");
    assert_eq!(start_of(&disk, "file"), b'i');
}
