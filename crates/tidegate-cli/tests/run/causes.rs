//! What `run` says of syncs that are real: numbers by cause in the statistics, and a line on
//! standard error for what a user can change.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::bed::Bed;
use crate::programs::compiled;
use crate::support::file_system::unmount;
use crate::support::{preload_library, scratch, succeed, tidegate, tool};

/// What the programs here have: `stat()` prints the statistics, the real syncs counted since
/// `begin()`.
pub(crate) const PRELUDE: &str = concat!(
    include_str!("programs/supervisor.py"),
    "import ctypes, mmap, subprocess, sys
before = {}
def begin(): before.update(ask()['real_syncs'])
def stat():
    now = ask()
    for name, number in before.items(): now['real_syncs'][name] -= number
    print(json.dumps(now))
def covered(name):
    # Closed before its first sync: it is not covered by a record that makes it.
    with open(name, 'wb') as new: new.write(bytes(8192))
    file = os.open(name, os.O_RDWR)
    answered = ask()['fsyncs_skipped']
    # On a busy machine the supervisor may be late for the first ones.
    while ask()['fsyncs_skipped'] == answered:
        os.pwrite(file, b'x', 0)
        os.fsync(file)
    return file
"
);

/// `tidegate run` of this Python program, by this name.
fn python(bed: &Bed, options: &[&str], name: &str, program: &str) -> Command {
    preload_library();
    let mut command = tidegate();
    command.args(["run", "--size=64M", "--pool"]).arg(bed.pool()).args(options);
    command.current_dir(bed.disk()).env("TIDEGATE_COVER_AFTER", "1");
    command.args(["--", name, "-c", &format!("{PRELUDE}{program}")]);
    command
}

/// The real syncs by cause that are not 0 when the program calls `stat()`.
fn causes(bed: &Bed, options: &[&str], program: &str) -> Vec<(String, u64)> {
    let printed = succeed(&mut python(bed, options, "/usr/bin/python3", program));
    let statistics: Value = serde_json::from_str(&printed).expect("one JSON object");
    let causes = statistics["real_syncs"].as_object().expect("an object").iter();
    let number = |value: &Value| value.as_u64().expect("a number");
    causes.map(|(name, it)| (name.clone(), number(it))).filter(|(_, it)| *it > 0).collect()
}

fn assert_causes(options: &[&str], program: &str, expected: &[(&str, u64)]) {
    let mut found = causes(&Bed::new(), options, program);
    found.sort();
    let mut expected: Vec<_> =
        expected.iter().map(|(name, number)| ((*name).to_owned(), *number)).collect();
    expected.sort();
    assert_eq!(found, expected, "{program}");
}

#[test]
fn the_sync_that_admits_a_file() {
    let found = causes(&Bed::new(), &[], "covered('file'); stat()");
    let not_yet = found.iter().find(|(name, _)| name == "not_yet");
    assert_eq!(not_yet.map(|(_, number)| *number), Some(1), "{found:?}");
}

/// A file is covered from its second sync on if it is a second old, else from its eighth on.
#[test]
fn syncs_of_a_file_that_was_just_made() {
    const PROGRAM: &str = "import time
for attempt in range(20):
    begin()
    start = time.monotonic()
    # Closed before its first sync: it is not covered by a record that makes it.
    open(f'{attempt}', 'wb').close()
    file = os.open(f'{attempt}', os.O_RDWR)
    for n in range(4): os.write(file, b'x'); os.fdatasync(file)
    if time.monotonic() - start < 0.9: break
    # This machine is busy: the file came of age meanwhile.
stat()
while ask()['fsyncs_skipped'] == 0: os.pwrite(file, b'x', 0); os.fdatasync(file)
";
    let bed = Bed::new();
    let mut command = python(&bed, &[], "/usr/bin/python3", PROGRAM);
    let printed = succeed(command.env_remove("TIDEGATE_COVER_AFTER"));
    let statistics: Value = serde_json::from_str(&printed).expect("one JSON object");
    let number = |cause: &str| statistics["real_syncs"][cause].as_u64().unwrap();
    // What the first one finds pending depends on what else was made.
    assert_eq!(number("not_yet") + number("pending") + number("new_pending"), 4, "{printed}");
    assert_eq!(statistics["real_syncs"]["refused"], 0, "{printed}");
}

/// A file that was synced often is covered while it is young.
#[test]
fn many_syncs_of_a_file_that_was_just_made() {
    const PROGRAM: &str = "import time
for attempt in range(20):
    start, answered = time.monotonic(), ask()['fsyncs_skipped']
    open(f'{attempt}', 'wb').close()
    file = os.open(f'{attempt}', os.O_RDWR)
    for n in range(40): os.pwrite(file, b'x', 0); os.fdatasync(file)
    found = ask()['fsyncs_skipped'] - answered
    if time.monotonic() - start < 0.9: break
    # This machine is busy: the file came of age meanwhile.
print(found)
";
    let bed = Bed::new();
    let mut command = python(&bed, &[], "/usr/bin/python3", PROGRAM);
    let printed = succeed(command.env_remove("TIDEGATE_COVER_AFTER"));
    assert!(printed.trim().parse::<u64>().unwrap() > 0, "{printed}");
}

/// Each real sync is listed under its file and its process, and not under others.
#[test]
fn files_and_processes_with_their_real_syncs() {
    const PROGRAM: &str = "file = covered('file')
for n in range(3): os.rename('file', 'other'); os.fsync(file); os.rename('other', 'file')
os.fsync(os.open('.', os.O_RDONLY))
synced = os.open('synced', os.O_WRONLY | os.O_CREAT | os.O_DSYNC)
for n in range(5): os.write(synced, b'x')
child = os.fork()
if child == 0:
    mapped = os.open('mapped', os.O_RDWR | os.O_CREAT)
    os.ftruncate(mapped, 4096)
    view = mmap.mmap(mapped, 4096)
    for n in range(7): os.fsync(mapped)
    os._exit(0)
os.waitpid(child, 0)
print(json.dumps([ask(), os.getpid(), child]))";
    let bed = Bed::new();
    let output = python(&bed, &["--stats"], "/usr/bin/python3", PROGRAM).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let (found, parent, child): (Value, u64, u64) =
        serde_json::from_slice(&output.stdout).expect("statistics and two processes");
    let listed = found["real_syncs_by_file"].as_array().expect("a list");
    let disk = bed.disk().canonicalize().unwrap();
    let number_of = |path: &Path, process: u64, cause: &str| {
        let is_it = |row: &&Value| {
            row["file"] == path.to_str().unwrap()
                && (&row["process"], &row["cause"]) == (&process.into(), &cause.into())
        };
        let row =
            listed.iter().find(is_it).unwrap_or_else(|| panic!("{}: {found}", path.display()));
        assert_eq!(row["program"], "python3");
        row["number"].as_u64().unwrap()
    };
    assert_eq!(number_of(&disk, parent, "directories"), 1);
    assert_eq!(number_of(&disk.join("synced"), parent, "synchronous"), 5);
    assert_eq!(number_of(&disk.join("mapped"), child, "pinned"), 7);
    assert_eq!(number_of(&disk.join("other"), parent, "own"), 3);
    let sum = |numbers: &mut dyn Iterator<Item = &Value>| -> u64 {
        numbers.map(|number| number.as_u64().unwrap()).sum()
    };
    let by_cause = sum(&mut found["real_syncs"].as_object().unwrap().values());
    let by_file = sum(&mut listed.iter().map(|row| &row["number"]));
    assert_eq!(by_cause, by_file + found["real_syncs_unlisted"].as_u64().unwrap(), "{found}");
    let line = format!("7 of {} by python3 ({child}): mapped", disk.join("mapped").display());
    assert!(said.contains(&line), "{said}");
}

#[test]
fn a_sync_after_the_file_was_renamed() {
    let program =
        "file = covered('file'); begin(); os.rename('file', 'other'); os.fsync(file); stat()";
    assert_causes(&[], program, &[("own", 1)]);
}

#[test]
fn a_sync_of_growth_while_another_name_is_pending() {
    let program = "file = covered('file'); begin(); os.mkdir('directory')
os.pwrite(file, b'x', 8192); os.fdatasync(file); stat()";
    assert_causes(&[], program, &[("pending", 1)]);
}

#[test]
fn a_sync_of_much_that_was_written() {
    let program = "file = covered('file'); begin()
for n in range(5): os.pwrite(file, bytes(1 << 20), 0)
os.fdatasync(file); stat()";
    assert_causes(&[], program, &[("by_gain", 1)]);
}

#[test]
fn syncs_of_files_that_are_written_unseen() {
    for open in [
        "file = os.open('file', os.O_RDWR | os.O_CREAT | os.O_DIRECT)",
        "file = os.open('file', os.O_RDWR | os.O_CREAT)
os.write(file, bytes(4096)); mapped = mmap.mmap(file, 4096)",
        "library = ctypes.CDLL(None); library.fopen.restype = ctypes.c_void_p
library.fileno.argtypes = [ctypes.c_void_p]; open('file', 'w').close()
file = library.fileno(library.fopen(b'file', b'w'))",
    ] {
        let program = format!("{open}\nos.fsync(file); os.fdatasync(file)\nstat()");
        assert_causes(&[], &program, &[("pinned", 2)]);
    }
}

#[test]
fn syncs_of_directories_and_of_files_without_names() {
    let program = "directory = os.open('.', os.O_RDONLY); os.fsync(directory)
os.fsync(os.open('.', os.O_RDWR | os.O_TMPFILE))
stat()";
    assert_causes(&[], program, &[("directories", 1), ("refused", 1)]);
}

#[test]
fn writes_that_the_kernel_syncs() {
    let program = "for flag in os.O_SYNC, os.O_DSYNC:
    file = os.open('file', os.O_RDWR | os.O_CREAT | flag)
    os.write(file, b'one'); os.writev(file, [b'th', b'ree'])
added = os.open('added', os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DSYNC)
for n in range(3): os.pwrite(added, b'x', 0)
locked = os.open('locked', os.O_RDWR | os.O_CREAT)
import fcntl
fcntl.lockf(locked, fcntl.LOCK_EX)
synced = os.open('locked', os.O_RDWR | os.O_DSYNC)
for n in range(4): os.pwrite(synced, b'x', 0)
stat()";
    assert_causes(&[], program, &[("synchronous", 11)]);
}

/// The first one is the kernel's, and covers the file.
#[test]
fn writes_to_a_place_that_the_kernel_would_sync() {
    let program = "for flag in os.O_SYNC, os.O_DSYNC:
    open(str(flag), 'wb').close()
    file = os.open(str(flag), os.O_RDWR | flag)
    answered = ask()['fsyncs_skipped']
    # On a busy machine the supervisor may be late for the first ones.
    while ask()['fsyncs_skipped'] == answered: os.pwrite(file, b'x', 0)
    begin()
    for n in range(9): os.pwrite(file, b'xy', n)
    assert ask()['fsyncs_skipped'] == answered + 10, ask()
stat()";
    assert_causes(&[], program, &[]);
}

#[test]
fn syncs_of_files_that_are_kept_out() {
    let program = "file = os.open('two.txt', os.O_RDWR | os.O_CREAT); covered('one.db'); begin()
os.fsync(file); os.fsync(file); stat()";
    assert_causes(&["--exclude=*.txt"], program, &[("excluded", 2)]);
}

#[test]
fn syncs_while_a_program_runs_that_cannot_be_watched() {
    let program = format!(
        "child = subprocess.Popen(['{}'])
file = os.open('file', os.O_RDWR | os.O_CREAT); os.fsync(file); os.fsync(file)
stat()
child.kill()",
        compiled("waiting", &["-static"]).display()
    );
    assert_causes(&[], &program, &[("suspended", 2)]);
}

/// The kernel reaps the static program at once: its number says nothing when the supervisor gets
/// it.
#[test]
fn syncs_while_a_child_lives_whose_parent_nobody_waited_for() {
    let program = format!(
        "import signal
file = covered('file')
signal.signal(signal.SIGCHLD, signal.SIG_IGN); begin()
for n in range(20):
    reader, writer = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, reader, 0)]
    os.posix_spawn('{}', ['leaving'], os.environ, file_actions=actions)
    os.pwrite(file, b'y', 0); os.fdatasync(file)
    os.close(reader); os.close(writer)
stat()
answered = ask()['fsyncs_skipped']
while ask()['fsyncs_skipped'] == answered: os.pwrite(file, b'z', 0); os.fsync(file)",
        compiled("leaving", &["-static"]).display()
    );
    assert_causes(&[], &program, &[("suspended", 20)]);
}

/// Kills the supervisor, and returns when the next one answers.
const REPLACE_SUPERVISOR: &str = "import select
def supervisor():
    pool = os.environ['TIDEGATE_POOL'].encode()
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{pid}/cmdline', 'rb') as line: words = line.read().split(b'\\0')
        except OSError: continue
        if b'supervise' in words and pool in words: return int(pid)
def replace_supervisor():
    pid = supervisor()
    handle = os.pidfd_open(pid)
    os.kill(pid, 9)
    select.select([handle], [], [])
    while True:
        try: return ask()
        except (OSError, ValueError): pass
";

/// The next supervisor knows the program, and its end.
#[test]
fn syncs_after_the_supervisor_was_killed_beside_a_program_that_cannot_be_watched() {
    let program = format!(
        "{REPLACE_SUPERVISOR}
file = covered('file')
child = subprocess.Popen(['{}'])
replace_supervisor(); begin()
for n in range(2): os.pwrite(file, b'y', 0); os.fsync(file)
stat()
child.kill(); child.wait()
answered = ask()['fsyncs_skipped']
while ask()['fsyncs_skipped'] == answered: os.pwrite(file, b'z', 0); os.fsync(file)",
        compiled("waiting", &["-static"]).display()
    );
    assert_causes(&[], &program, &[("suspended", 2)]);
}

/// Its launcher and its supervisor are gone when another program joins the pool.
#[test]
fn syncs_of_a_second_run_beside_what_the_first_one_left() {
    let program = format!(
        "{REPLACE_SUPERVISOR}
null = subprocess.DEVNULL
child = subprocess.Popen(['{}'], stdout=null, stderr=null)
replace_supervisor()
print(child.pid)",
        compiled("waiting", &["-static"]).display()
    );
    let bed = Bed::new();
    let printed = succeed(&mut python(&bed, &[], "/usr/bin/python3", &program));
    let left = Pid::from_raw(printed.trim().parse().unwrap()).unwrap();
    let second = "file = os.open('file', os.O_RDWR | os.O_CREAT)
begin(); os.fsync(file); os.fsync(file); stat()";
    let found = causes(&bed, &[], second);
    kill_process(left, Signal::KILL).unwrap();
    assert_eq!(found, [("suspended".to_owned(), 2)]);
}

/// A covered file has its syncs answered while the tool runs, and after another one ended that is
/// not trusted. Then, with the trusted tool in the same place, the shell that becomes one, and the
/// program that `run` starts itself.
#[test]
fn a_trusted_program_leaves_files_in_the_log() {
    let (waiting, tool) = (compiled("waiting", &["-static"]), compiled("static", &["-static"]));
    let (trusted, bed) = (waiting.display(), Bed::new());
    let program = format!(
        "file = covered('file'); begin()
def answered():
    before = ask()['fsyncs_skipped']
    os.pwrite(file, b'y', 0); os.fdatasync(file)
    return ask()['fsyncs_skipped'] - before
children = [subprocess.Popen(['{trusted}']), subprocess.Popen(['sh', '-c', 'exec {trusted}'])]
spawned = os.posix_spawn('{trusted}', ['waiting'], os.environ)
# Not answered by a notice: the last of them has become the tool.
while os.readlink(f'/proc/{{children[1].pid}}/exe') != '{trusted}': pass
counts = [answered() for n in range(3)]
subprocess.run(['{tool}'], check=True, stdout=subprocess.DEVNULL)
while answered() == 0: pass
for child in children: child.kill()
os.kill(spawned, 9)
now = ask()
print(json.dumps(dict(counts=counts, plain=now['plain'])))",
        tool = tool.display()
    );
    let options = ["--trust=/no/such", &format!("--trust={trusted}")];
    let mut command = python(&bed, &options, "/usr/bin/python3", &program);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let printed: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(printed["counts"], serde_json::json!([1, 1, 1]), "{said}");
    let plain = printed["plain"].as_array().expect("a list");
    assert!(plain.contains(&serde_json::json!(["waiting-static", "trusted"])), "{printed}");
    assert!(plain.iter().all(|it| it[0] != "waiting-static" || it[1] == "trusted"), "{printed}");
    assert!(!said.contains("waiting"), "the user has asked for it: {said}");
}

#[test]
fn a_trusted_program_that_run_starts_is_in_the_statistics() {
    let (tool, bed) = (compiled("static", &["-static"]), Bed::new());
    let said = |options: &[&str]| {
        preload_library();
        let mut command = tidegate();
        command.args(["run", "--size=64M", "--stats", "--pool"]).arg(bed.pool()).args(options);
        said_by(command.arg("--").arg(&tool).current_dir(bed.disk()))
    };
    let without = said(&["--no-absorb"]);
    assert!(
        without.contains("static-static is linked statically: its syncs are real ones"),
        "{without}"
    );
    let with = said(&["--trust=*/static-static"]);
    let line = "static-static is trusted to change no file that is synced, and not watched\n";
    assert!(with.contains(line) && !with.contains("linked statically"), "{with}");
}

/// The one that `run` starts is looked at as those that it starts are.
#[test]
fn a_program_with_calls_of_its_own_has_real_syncs_unless_it_is_trusted() {
    let (own, bed) = (compiled("own", &[]), Bed::new());
    let said = |options: &[&str], name: &str| {
        preload_library();
        let mut command = tidegate();
        command.args(["run", "--size=64M", "--stats", "--pool"]).arg(bed.pool()).args(options);
        said_by(command.arg("--").arg(&own).args([name, "final"]).current_dir(bed.disk()))
    };
    let line = "tidegate: own makes system calls of its own, beside those of the C library: its \
                syncs are real ones\n";
    let without = said(&[], "one");
    assert_eq!(without.matches(line).count(), 1, "{without}");
    let with = said(&["--trust=*/own"], "two");
    let trusted = "own is trusted to change no file that is synced, and not watched\n";
    assert!(with.contains(trusted) && !with.contains("of its own"), "{with}");
}

/// Each by its own name, and not by that of the program that starts it.
#[test]
fn programs_of_the_tree_that_cannot_be_watched_are_named_once() {
    let (bed, other_libc) = (Bed::new(), compiled("static", &["-Wl,--dynamic-linker=ld-other.so"]));
    std::os::unix::fs::symlink("/lib64/ld-linux-x86-64.so.2", bed.disk().join("ld-other.so"))
        .unwrap();
    let privileged = bed.disk().join("privileged");
    std::fs::copy("/bin/true", &privileged).unwrap();
    std::os::unix::fs::chown(&privileged, Some(65534), None).unwrap();
    std::fs::set_permissions(&privileged, Permissions::from_mode(0o4755)).unwrap();
    let is_static = compiled("static", &["-static"]);
    let program = format!(
        "for path in {:?}:
    for way in [path], ['sh', '-c', path + '; exit $?'], ['sh', '-c', 'exec ' + path]:
        subprocess.run(way, check=True, stdout=subprocess.DEVNULL)
",
        [&is_static, &compiled("go", &[]), &compiled("own", &[]), &other_libc, &privileged]
    );
    let said = said_by(&mut python(&bed, &[], "/usr/bin/python3", &program));
    for line in [
        "static-static is linked statically: its syncs are real ones; linking it dynamically changes that\n",
        "go is a Go program, which makes its system calls itself: its syncs are real ones\n",
        "own makes system calls of its own, beside those of the C library: its syncs are real ones\n",
        "static-Wl,--dyn uses another C library than glibc: its syncs are real ones\n",
        "privileged gains privileges when it starts (set-user-ID and the like), or may not be read: \
         its syncs are real ones\n",
    ] {
        assert_eq!(said.matches(&format!("tidegate: {line}")).count(), 1, "{line} {said}");
    }
    let told = said.matches("syncs are real").count();
    assert_eq!(told, 5, "other programs are named: {said}");
}

/// A program that does not find the log writes unseen, and cannot say so.
#[test]
fn a_program_that_does_not_find_the_log_has_it_suspended() {
    const PROGRAM: &str = "file = covered('file')
c = ctypes.CDLL(None, use_errno=True)
assert c.mount(b'none', b'/dev/shm', b'tmpfs', 0, None) == 0
subprocess.run(['true'], check=True)
assert c.umount(b'/dev/shm') == 0
begin(); os.pwrite(file, b'y', 0); os.fsync(file)
stat()";
    let bed = Bed::new();
    let inner = python(&bed, &[], "/usr/bin/python3", PROGRAM);
    // Of its own: the rest of this machine keeps its /dev/shm.
    let mut command = tool("unshare", "util-linux");
    command.args(["--mount", "--propagation=private"]).arg(inner.get_program());
    command.args(inner.get_args()).current_dir(bed.disk()).env("TIDEGATE_COVER_AFTER", "1");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let printed: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(printed["real_syncs"]["suspended"], 1, "{printed}");
    assert_eq!(said.matches("does not reach the pool's supervisor").count(), 1, "{said}");
}

/// The supervisor is there: logging is suspended while the program lives.
#[test]
fn a_program_that_starts_where_the_log_is_hidden_is_named() {
    const PROGRAM: &str = "file = covered('file')
control = os.environ['TIDEGATE_CONTROL']
os.rename(control, control + '.hidden')
begin()
child = subprocess.Popen(['cat'], stdin=subprocess.PIPE)
os.pwrite(file, b'y', 0); os.fsync(file)
os.rename(control + '.hidden', control)
child.communicate()
answered = ask()['fsyncs_skipped']
while ask()['fsyncs_skipped'] == answered: os.pwrite(file, b'z', 0); os.fsync(file)
stat()";
    let bed = Bed::new();
    let output = python(&bed, &[], "/usr/bin/python3", PROGRAM).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let printed: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert!(printed["real_syncs"]["suspended"].as_u64() > Some(0), "{printed}");
    let line = "cat starts where it does not find the pool, or what /dev/shm had of it";
    assert_eq!(said.matches(line).count(), 1, "{said}");
}

/// A quarter of the log is written and nothing more: there is free space all the time. The first of
/// the programs has the memory of the pool allocated.
#[test]
fn no_writer_waits_while_the_log_has_free_space() {
    const PROGRAM: &str = "file = covered('file')
for n in range(16 << 20 >> 13): os.pwrite(file, bytes(8192), 0); os.fdatasync(file)
now = ask()
print(json.dumps([now['stalls'], now['written_bytes'], now['log_bytes']]))";
    let bed = Bed::new();
    succeed(&mut python(&bed, &[], "/usr/bin/python3", PROGRAM));
    let printed = succeed(&mut python(&bed, &[], "/usr/bin/python3", PROGRAM));
    let [stalls, written_bytes, log_bytes]: [u64; 3] = serde_json::from_str(&printed).unwrap();
    assert!(written_bytes >= 15 << 20 && written_bytes < log_bytes, "{printed}");
    assert_eq!(stalls, 0, "{printed}");
}

/// Nobody has announced it, and the process that started it is gone.
#[test]
fn syncs_while_a_program_runs_that_was_started_without_rights() {
    let program = "import struct
reader, writer = os.pipe()
if os.fork() == 0:
    assert ctypes.CDLL(None).capset(struct.pack('II', 0x20080522, 0), bytes(24)) == 0
    subprocess.Popen(['cat'], stdin=reader)
    os._exit(0)
os.wait(); begin()
file = os.open('file', os.O_RDWR | os.O_CREAT); os.fsync(file); os.fsync(file); stat()";
    assert_causes(&[], program, &[("suspended", 2)]);
}

/// A file system that is not on the list of those whose files are known again after a boot; its
/// syncs are real.
#[test]
fn syncs_on_another_file_system() {
    let place = scratch();
    let (image, mount_point) = (place.path().join("image"), place.path().join("mnt"));
    std::fs::create_dir(&mount_point).unwrap();
    succeed(tool("truncate", "coreutils").args(["-s", "256M"]).arg(&image));
    succeed(tool("mkfs.btrfs", "btrfs-progs").arg("-q").arg(&image));
    succeed(tool("mount", "mount").args(["-o", "loop"]).arg(&image).arg(&mount_point));
    let bed = Bed::new();
    let program = |path: &str| {
        format!(
            "file = os.open('{path}', os.O_RDWR | os.O_CREAT)
for n in range(3): os.write(file, b'x'); os.fsync(file)
stat()"
        )
    };
    let path = mount_point.join("file").display().to_string();
    let output = python(&bed, &["--stats"], "/usr/bin/python3", &program(&path)).output().unwrap();
    unmount(&mount_point);
    let (printed, said) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    let statistics: Value = serde_json::from_str(&printed).expect("one JSON object");
    assert_eq!(statistics["real_syncs"]["unsupported"], 3, "{said}");
    assert_eq!(statistics["fsyncs_done"], 3, "{said}");
    assert_eq!((&statistics["fsyncs_skipped"], &statistics["writes"]), (&0.into(), &0.into()));
    let line = format!(
        "python3 syncs files that are not on an ext4 or XFS with a UUID, but on {} (btrfs): its \
         syncs are real ones; moving them to ext4 or XFS changes that",
        mount_point.display()
    );
    assert_eq!(said.matches(&line).count(), 1, "{said}");
    assert!(said.contains("on a file system that is not logged: 3"), "{said}");
    assert!(said.contains(&format!("3 of {path} by python3 (")), "{said}");
    // One in memory is neither counted nor told of: its syncs do nothing.
    let path = bed.pool_dir().join("file").display().to_string();
    let found = causes(&bed, &[], &program(&path));
    assert!(found.is_empty(), "{found:?}");
}

/// Runs a program that covers `file`, lets the kernel write to it in a way that no hook sees, and
/// syncs it: no sync is answered by the log. Returns what the program printed, and what was said.
fn plain_from_then_on(given_away: &str) -> (String, String) {
    let program = format!(
        "import fcntl
file = covered('file')
{given_away}
answered = ask()['fsyncs_skipped']
for n in range(20): os.pwrite(file, b'y', 4096); os.fsync(file)
assert ask()['fsyncs_skipped'] == answered
"
    );
    let bed = Bed::new();
    let output = python(&bed, &[], "/usr/bin/python3", &program).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    (String::from_utf8_lossy(&output.stdout).into_owned(), said)
}

/// `losetup` ends, and the kernel goes on writing.
#[test]
fn syncs_of_a_file_that_became_a_loop_device() {
    tool("losetup", "mount");
    let (device, _) = plain_from_then_on(
        "attach = ['losetup', '--find', '--show', 'file']
print(subprocess.run(attach, check=True, capture_output=True, text=True).stdout)",
    );
    succeed(tool("losetup", "mount").args(["--detach", device.trim()]));
}

/// Files below are written under the overlay's names and numbers.
#[test]
fn syncs_after_an_overlay_was_mounted() {
    for call in ["mount", "syscall"] {
        let (_, said) = plain_from_then_on(&format!(
            "for name in 'lower', 'upper', 'work', 'merged': os.mkdir(name)
libc = ctypes.CDLL(None, use_errno=True)
options = b'lowerdir=lower,upperdir=upper,workdir=work'
number = 165 if os.uname().machine == 'x86_64' else 40
call = libc.mount if '{call}' == 'mount' else lambda *words: libc.syscall(number, *words)
assert call(b'none', b'merged', b'overlay', 0, options) == 0, ctypes.get_errno()
assert libc.umount2(b'merged', 0) == 0"
        ));
        assert!(said.contains("mounts a file system over the files of others"), "{said}");
    }
}

/// The supervisor's descriptor of the file would break it.
#[test]
fn syncs_of_a_file_with_a_lease() {
    plain_from_then_on(
        "fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
assert fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_WRLCK",
    );
}

/// Two processes of a program that uses `io_uring`, and syncs.
/// Two processes of a program that uses `io_uring`, and syncs.
const WITH_URING: &str = "for child in os.fork(), 0:
    ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(200))
    file = os.open('file', os.O_RDWR | os.O_CREAT); os.fsync(file); os.fsync(file)
";

fn said_by(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

#[test]
fn a_cause_is_told_once_with_what_changes_it() {
    let bed = Bed::new();
    let server = bed.disk().join("mariadbd");
    std::os::unix::fs::symlink("/usr/bin/python3", &server).unwrap();
    let name = server.to_str().unwrap();
    let said = said_by(&mut python(&bed, &["--stats"], name, WITH_URING));
    let line = "mariadbd writes by io_uring: its syncs are real ones";
    let told = format!("tidegate: {line}; innodb_use_native_aio=0 changes that\n");
    assert_eq!(said.matches(&told).count(), 1, "{said}");
    assert!(said.contains("mariadbd writes by io_uring\n"), "not in the statistics: {said}");
    let said = said_by(&mut python(&bed, &[], "/usr/bin/python3", WITH_URING));
    assert_eq!(said.matches("python3 writes by io_uring").count(), 1, "{said}");
    let said = said_by(&mut python(&bed, &["-q"], name, WITH_URING));
    assert_eq!(said, "");
}

/// What users cannot change, or chose themselves, is in the statistics alone.
#[test]
fn a_cause_that_nobody_can_change_is_listed() {
    let program = "file = os.open('file', os.O_RDWR | os.O_CREAT | os.O_DIRECT)
os.fsync(file); os.close(os.open('other', os.O_WRONLY | os.O_CREAT))";
    let said = said_by(&mut python(&Bed::new(), &["--stats"], "/usr/bin/python3", program));
    assert!(said.contains("python3 writes by direct I/O (O_DIRECT)\n"), "{said}");
    assert!(!said.contains("its syncs are real ones"), "{said}");
    let said = said_by(&mut python(&Bed::new(), &[], "/usr/bin/python3", program));
    assert!(!said.contains("direct"), "{said}");
}

/// The supervisor has fewer descriptors than the tree has processes.
#[test]
fn more_processes_than_descriptors_keep_their_supervisor() {
    const PROGRAM: &str = "reader, writer = os.pipe()
children = [subprocess.Popen(['cat'], stdin=reader) for n in range(220)]
while ask()['processes'] < 221: pass
os.close(reader); os.close(writer)
for child in children: child.wait()
file = covered('file'); begin()
while ask()['processes'] > 1: pass
os.pwrite(file, b'y', 0); os.fsync(file); stat()";
    let bed = Bed::new();
    let inner = python(&bed, &[], "/usr/bin/python3", PROGRAM);
    let mut command = tool("prlimit", "util-linux");
    command.arg("--nofile=150:150").arg(inner.get_program()).args(inner.get_args());
    let command = command.current_dir(bed.disk()).env("TIDEGATE_COVER_AFTER", "1");
    let said = said_by(command);
    assert!(!said.contains("died"), "{said}");
}
