//! `tidegate run --volatile`: what programs see, what reaches the disk, and how the run ends.
//! programs/volatile.c asks for syncs in all ways.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::programs::compiled;
use crate::rights::script_of_filters;
use crate::support::file_system::unmount;
use crate::support::{directory_in, preload_library, scratch, succeed, tidegate, tool};

/// Syncs that a program of these tests makes.
const SYNCS: u64 = 60;
/// Writes that may reach a disk without one: other programs sync the whole machine.
const STRAY_WRITES: u64 = SYNCS / 2;

fn volatile(scope: &str, program: &[&str]) -> Command {
    preload_library();
    let mut command = tidegate();
    command.args(["run", &format!("--volatile={scope}"), "--"]).args(program);
    command
}

/// A file system of its own in an image; it is unmounted when dropped.
pub(crate) struct Disk {
    pub(crate) mount_point: PathBuf,
    _dir: TempDir,
}

impl Disk {
    pub(crate) fn make(kind: &str) -> Self {
        let dir = directory_in("/var/tmp".into());
        let package = match kind {
            "ext4" => "e2fsprogs",
            "xfs" => "xfsprogs",
            _ => "btrfs-progs",
        };
        let image = dir.path().join("image");
        std::fs::File::create_new(&image).unwrap().set_len(320 << 20).unwrap();
        succeed(tool(&format!("mkfs.{kind}"), package).arg("-q").arg(&image));
        let mount_point = dir.path().join("mnt");
        std::fs::create_dir(&mount_point).unwrap();
        succeed(tool("mount", "mount").args(["-o", "loop"]).args([&image, &mount_point]));
        Self { mount_point, _dir: dir }
    }

    /// An overlay whose upper directory is on this disk.
    fn overlay(&self) -> Overlay {
        for name in ["lower", "upper", "work", "over"] {
            std::fs::create_dir(self.mount_point.join(name)).unwrap();
        }
        let at = |name: &str| self.mount_point.join(name).display().to_string();
        let options =
            format!("lowerdir={},upperdir={},workdir={}", at("lower"), at("upper"), at("work"));
        succeed(tool("mount", "mount").args([
            "-t",
            "overlay",
            "none",
            "-o",
            &options,
            &at("over"),
        ]));
        Overlay(self.mount_point.join("over"))
    }

    /// How many writes this disk has done.
    fn writes(&self) -> u64 {
        let source =
            succeed(tool("findmnt", "util-linux").args(["-no", "SOURCE"]).arg(&self.mount_point));
        let device = std::fs::metadata(source.trim()).unwrap().rdev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let stat = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).unwrap();
        stat.split_whitespace().nth(4).unwrap().parse().unwrap()
    }

    /// How many writes the disk does for `command`.
    fn writes_of(&self, command: &mut Command) -> u64 {
        rustix::fs::sync();
        let before = self.writes();
        succeed(command);
        self.writes() - before
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        unmount(&self.mount_point);
    }
}

struct Overlay(PathBuf);

impl Drop for Overlay {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}

/// What `program` prints in a directory that is made for it below `parent`, and removed.
fn printed(parent: &Path, program: &mut Command, way: &str) -> String {
    let place = parent.join("place");
    std::fs::create_dir(&place).unwrap();
    let printed = succeed(program.arg(way).arg(&place));
    std::fs::remove_dir_all(&place).unwrap();
    printed
}

/// Each call on each kind of descriptor answers as the kernel does, and `F_GETFL` shows what was
/// asked for.
fn answers_are_the_kernel_s_on(place: &Path) {
    let program = compiled("volatile", &[]);
    let path = program.to_str().unwrap();
    for way in ["answers", "flags"] {
        let plain = printed(place, &mut Command::new(&program), way);
        assert!(plain.lines().count() > 50, "{plain}");
        for scope in ["library", "all"] {
            let run = printed(place, &mut volatile(scope, &[path]), way);
            // The disk behind a loop device may be that of another test, and fail.
            let is_own = |(line, _): &(&str, &str)| !line.starts_with("/dev/loop");
            for (plain, run) in plain.lines().zip(run.lines()).filter(is_own) {
                assert_eq!(plain, run, "{way} on {} with {scope}", place.display());
            }
            assert_eq!(plain.lines().count(), run.lines().count());
        }
    }
}

#[test]
fn answers_are_the_kernel_s_on_ext4_and_overlayfs() {
    let disk = Disk::make("ext4");
    answers_are_the_kernel_s_on(&disk.mount_point);
    answers_are_the_kernel_s_on(&disk.overlay().0);
}

#[test]
fn answers_are_the_kernel_s_on_btrfs() {
    answers_are_the_kernel_s_on(&Disk::make("btrfs").mount_point);
}

#[test]
fn answers_are_the_kernel_s_on_xfs() {
    answers_are_the_kernel_s_on(&Disk::make("xfs").mount_point);
}

#[test]
fn answers_are_the_kernel_s_in_memory() {
    answers_are_the_kernel_s_on(directory_in("/dev/shm".into()).path());
}

/// `program` syncs often, and the disk hears of it as it is, but not when it is volatile with one
/// of these scopes.
fn reaches_no_disk(disk: &Disk, scopes: &[&str], program: impl Fn(&str) -> Vec<String>) {
    let mut number = 0;
    let mut words = || {
        number += 1;
        program(&number.to_string())
    };
    let plain = words();
    let writes = disk.writes_of(Command::new(&plain[0]).args(&plain[1..]));
    assert!(writes >= SYNCS, "{plain:?} as it is: {writes} writes");
    for scope in scopes {
        let words = words();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let writes = disk.writes_of(volatile(scope, &words).env("BY_FLAGS", "yes"));
        assert!(writes <= STRAY_WRITES, "{words:?} with {scope}: {writes} writes");
    }
}

/// The program of these tests, with arguments that have it write and sync.
fn writer(flags: &[&str], place: &Path) -> impl Fn(&str) -> Vec<String> {
    let program = compiled("volatile", flags).display().to_string();
    let place = place.display().to_string();
    move |number| {
        vec![program.clone(), "write".into(), format!("{place}/{number}"), SYNCS.to_string()]
    }
}

#[test]
fn syncs_of_c_programs_reach_no_disk() {
    for kind in ["ext4", "btrfs"] {
        let disk = Disk::make(kind);
        reaches_no_disk(&disk, &["library", "all"], writer(&[], &disk.mount_point));
    }
    let disk = Disk::make("ext4");
    let overlay = disk.overlay();
    reaches_no_disk(&disk, &["library", "all"], writer(&[], &overlay.0));
}

#[test]
fn syncs_of_static_programs_reach_no_disk_with_the_filter() {
    let disk = Disk::make("ext4");
    let words = writer(&["-static"], &disk.mount_point);
    // The filter does not see what flags ask for.
    let without_flags =
        |number: &str| [vec!["env".into(), "-u".into(), "BY_FLAGS".into()], words(number)].concat();
    reaches_no_disk(&disk, &["all", "possible"], without_flags);
    let real = without_flags("real");
    let real: Vec<&str> = real.iter().map(String::as_str).collect();
    let writes = disk.writes_of(&mut volatile("library", &real));
    assert!(writes >= SYNCS, "{writes} writes without the filter");
}

#[test]
fn syncs_of_sqlite_and_busybox_reach_no_disk() {
    let disk = Disk::make("ext4");
    let place = disk.mount_point.display().to_string();
    let shell = |script: String| vec!["sh".to_owned(), "-c".into(), script];
    reaches_no_disk(&disk, &["library", "all"], |number| {
        let rows = "insert into t values (randomblob(100));".repeat(30);
        shell(format!("sqlite3 {place}/{number}.db 'create table t(n); {rows}'"))
    });
    let busybox = succeed(tool("sh", "dash").args(["-c", "command -v busybox"]));
    reaches_no_disk(&disk, &["all"], |number| {
        let write = format!("dd if=/dev/zero of={place}/{number}.$n bs=4096 count=1 conv=fsync");
        let script = format!(
            "n={SYNCS}; while [ $n -gt 0 ]; do n=$((n - 1)); {} {write} 2>/dev/null; done",
            busybox.trim()
        );
        vec![busybox.trim().to_owned(), "sh".into(), "-c".into(), script]
    });
}

#[test]
fn negative_descriptors_stay_wrong_behind_the_filter() {
    for flags in [&[][..], &["-static"]] {
        let program = compiled("volatile", flags);
        let plain = succeed(Command::new(&program).arg("negative"));
        assert!(plain.contains("EBADF") && plain.contains("ENOMEM"), "{plain}");
        let run = succeed(&mut volatile("all", &[program.to_str().unwrap(), "negative"]));
        assert_eq!(plain, run);
    }
}

/// Behind a filter that allows only the calls of the C library's function, each hook works.
#[test]
fn hooks_make_no_calls_of_their_own_behind_a_filter_of_the_program() {
    let script = script_of_filters();
    for scope in ["library", "all"] {
        let dir = directory_in("/var/tmp".into());
        let mut command = volatile(scope, &["/bin/sh", "-c", &script]);
        assert_eq!(succeed(command.current_dir(dir.path())), "", "{scope}");
    }
}

/// A program of another C library would not start, and the dynamic linker of another machine or
/// root directory would complain.
#[test]
fn programs_that_cannot_load_the_library_start_without_it() {
    let dir = directory_in("/var/tmp".into());
    let here = |name: &str| dir.path().join(name).display().to_string();
    // Its linker is there under another name: the C library of this machine would not know it.
    std::os::unix::fs::symlink("/lib64/ld-linux-x86-64.so.2", here("ld-other.so")).unwrap();
    let program = compiled("environment", &["-Wl,--dynamic-linker=ld-other.so"]);
    let program = program.display().to_string();
    std::fs::write(here("script"), format!("#!{program} script\n")).unwrap();
    succeed(tool("chmod", "coreutils").args(["+x", &here("script")]));
    let own = compiled("environment", &[]).display().to_string();
    for way in
        ["execve", "execv", "execvp", "execl", "execlp", "execle", "spawn", "spawnp", "syscall"]
    {
        let shown = |started: &str| {
            succeed(volatile("library", &[&own, way, started]).current_dir(dir.path()))
        };
        assert_eq!(shown(&program), "\n", "{way}");
        assert_eq!(shown(&here("script")), "\n", "{way}");
        assert!(shown(&own).contains("libtidegate_volatile.so"), "{way}");
    }
    let root = format!("chroot {} /busybox true", dir.path().display());
    succeed(
        tool("sh", "dash").args(["-c", &format!("cp $(command -v busybox) {}", here("busybox"))]),
    );
    let output = volatile("library", &["sh", "-c", &root]).arg("").output().unwrap();
    assert!(output.status.success() && !said(&output).contains("LD_PRELOAD"), "{}", said(&output));
}

/// The close of any descriptor of the file would release the lock.
#[test]
fn a_program_keeps_its_record_lock_on_a_program_that_it_starts() {
    const STARTS: &str = "import fcntl, os, shutil
shutil.copy('/bin/true', 'program')
file = open('program')
fcntl.lockf(file, fcntl.LOCK_SH)
pid = os.posix_spawn('program', ['program'], {**os.environ})
os.waitpid(pid, 0)
pid = os.fork()
if pid == 0:
    try: fcntl.lockf(open('program', 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError: os._exit(0)
    os._exit(1)
status = os.waitpid(pid, 0)[1]
print(os.waitstatus_to_exitcode(status))
";
    let dir = scratch();
    let program = ["/usr/bin/python3", "-B", "-c", STARTS];
    assert_eq!(succeed(volatile("library", &program).current_dir(dir.path())), "0\n");
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_status_and_the_line_at_the_start_say_how_it_went() {
    for scope in ["library", "all"] {
        let run = |script: &str| volatile(scope, &["sh", "-c", script]).output().unwrap();
        let output = run("exit 7");
        assert_eq!(output.status.code(), Some(7));
        let line = said(&output);
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(line.contains("a power cut loses what programs synced"), "{line}");
        assert_eq!(line.contains("static and Go ones too"), scope == "library");
        assert_eq!(run("kill -9 $$").status.code(), Some(137));
    }
    let quiet = tidegate().args(["run", "--volatile", "--quiet", "--", "true"]).output().unwrap();
    assert_eq!((quiet.status.code(), said(&quiet)), (Some(0), String::new()));
}

#[test]
fn a_signal_for_the_launcher_reaches_the_program() {
    for scope in ["library", "all"] {
        let script = "trap 'exit 9' USR1; echo ready; while :; do sleep 1; done";
        let mut command = volatile(scope, &["sh", "-c", script]);
        let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(launcher.stdout.take().unwrap()).read_line(&mut line).unwrap();
        kill_process(Pid::from_child(&launcher), Signal::USR1).unwrap();
        assert_eq!(launcher.wait().unwrap().code(), Some(9));
    }
}

/// `tidegate run --volatile=SCOPE` without `CAP_SYS_ADMIN`, of a program that shows its status.
fn without_privilege(scope: &str) -> Output {
    let run = volatile(scope, &["grep", "-E", "NoNewPrivs|Seccomp:", "/proc/self/status"]);
    let mut command = tool("setpriv", "util-linux");
    command.args(["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]);
    command.arg(run.get_program()).args(run.get_args()).output().unwrap()
}

#[test]
fn privileges_are_given_up_only_when_that_is_asked_for() {
    let possible = without_privilege("possible");
    let shown = String::from_utf8_lossy(&possible.stdout).into_owned();
    assert!(shown.contains("NoNewPrivs:\t0") && shown.contains("Seccomp:\t0"), "{shown}");
    assert!(said(&possible).contains("--volatile=all"), "{}", said(&possible));
    let all = without_privilege("all");
    let shown = String::from_utf8_lossy(&all.stdout).into_owned();
    assert!(shown.contains("NoNewPrivs:\t1") && shown.contains("Seccomp:\t2"), "{shown}");
    assert!(said(&all).contains("sudo"), "{}", said(&all));
    let privileged = volatile("all", &["grep", "NoNewPrivs", "/proc/self/status"]);
    assert!(succeed(&mut { privileged }).contains('0'));
}

#[test]
fn what_a_program_leaves_behind_is_named() {
    // The shell's child is named as the program that it executes once it has done so.
    let script = "sleep 5 >/dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done";
    let output = volatile("all", &["sh", "-c", script]).output().unwrap();
    assert!(said(&output).contains("still running") && said(&output).contains("sleep ("));
    let output = volatile("all", &["sh", "-c", "(sleep 0 &); sleep 0.2"]).output().unwrap();
    assert!(!said(&output).contains("still running"), "{}", said(&output));
}

fn synced_at_end(program: &[&str]) -> Command {
    preload_library();
    let mut command = tidegate();
    command.args(["run", "--volatile", "--sync-at-end", "--"]).args(program);
    command
}

#[test]
fn all_is_synced_at_the_end() {
    let disk = Disk::make("ext4");
    let file = disk.mount_point.join("file");
    let script = format!("head -c 8M /dev/zero >{}", file.display());
    let sectors = |command: &mut Command| disk.writes_of(command);
    let without = sectors(&mut volatile("all", &["sh", "-c", &script]));
    std::fs::remove_file(&file).unwrap();
    let before = disk.writes();
    // Its status tells of all disks of the machine, and the one of another test may fail.
    let output = synced_at_end(&["sh", "-c", &script]).output().unwrap();
    let with = disk.writes() - before;
    assert!(with > without, "{with} writes with, {without} without: {}", said(&output));
}

/// A disk that is smaller than it seems: its image does not fit on the tmpfs.
#[test]
fn a_sync_at_the_end_that_fails_is_named_and_in_the_status() {
    let dir = directory_in("/var/tmp".into());
    let memory = dir.path().join("memory");
    std::fs::create_dir(&memory).unwrap();
    succeed(tool("mount", "mount").args(["-t", "tmpfs", "-o", "size=8M", "none"]).arg(&memory));
    let memory = Overlay(memory);
    let image = memory.0.join("image");
    std::fs::File::create_new(&image).unwrap().set_len(64 << 20).unwrap();
    succeed(tool("mkfs.ext4", "e2fsprogs").args(["-q", "-E", "lazy_itable_init=0"]).arg(&image));
    let mount_point = memory.0.join("mnt");
    std::fs::create_dir(&mount_point).unwrap();
    succeed(
        tool("mount", "mount").args(["-o", "loop,errors=continue"]).args([&image, &mount_point]),
    );
    let disk = Overlay(mount_point);
    let script = format!("head -c 20M /dev/urandom >{}/file", disk.0.display());
    for (status, expected) in [(0, 1), (5, 5)] {
        let script = format!("{script}; exit {status}");
        let output = synced_at_end(&["sh", "-c", &script]).output().unwrap();
        assert_eq!(output.status.code(), Some(expected), "{}", said(&output));
        let name = disk.0.display().to_string();
        assert!(said(&output).contains(&format!("cannot sync {name}")), "{}", said(&output));
    }
}
