//! Absorbed files: writes that the kernel learns of later. All of it with files absorbed after the first write or the fourth, so
//! that every way out of absorption is taken often.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::bed::{Bed, Runner, Small, transcript};
use crate::crash::{Workers, moment, one_of_each, seed, verify};
use crate::posix::killed_and_replayed;
use crate::process_tree;
use crate::programs::{compiled, source};
use crate::support::{ok, scratch, setting, succeed, tool};

const AFTER: &str = "TIDEGATE_ABSORB_AFTER";

fn random_operations() -> PathBuf {
    compiled("absorb", &[])
}

fn same_with_random_operations(threads: u32, after: u32) {
    let program = random_operations();
    let bed = Bed::new();
    let first = u64::try_from(seed().below(1000)).unwrap();
    for seed in first..first + setting("TIDEGATE_ABSORB_SEEDS", 2) {
        println!("seed {seed}");
        let script = format!("export {AFTER}={after}; {} {seed} 1500 {threads}", program.display());
        let printed = bed.same(|runner, dir| runner.script(&script, dir));
        assert!(printed.ends_with("exit status: 0\n"), "fails without Tidegate too:\n{printed}");
        std::fs::remove_dir_all(bed.disk().join("work")).unwrap();
        std::fs::remove_dir_all(bed.disk().join("plain")).unwrap();
    }
}

#[test]
fn random_operations_of_one_thread() {
    same_with_random_operations(1, 1);
    same_with_random_operations(1, 4);
}

#[test]
fn random_operations_of_several_threads() {
    same_with_random_operations(4, 1);
    same_with_random_operations(4, 4);
}

/// Writes page after page, opens the file anew now and then, and says what is written.
const PAGES: &str = r"
import os, struct
for n in range(1, 4000):
    if n % 16 == 1:
        if n > 1: os.close(fd)
        fd = os.open('pages', os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, struct.pack('<Q', n) * 512, n % 64 * 4096)
    os.fdatasync(fd)
    os.write(1, b'%d\n' % n)
";

#[test]
fn an_outsider_finds_all_that_was_acknowledged() {
    let bed = Bed::new();
    let mut command = Runner::Run(&bed.pool()).command("/usr/bin/python3", bed.disk());
    let mut child =
        command.args(["-c", PAGES]).env(AFTER, "1").stdout(Stdio::piped()).spawn().unwrap();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let acknowledged: u64 = line.unwrap().parse().unwrap();
        if acknowledged.is_multiple_of(37) {
            let mut word = [0; 8];
            let file = std::fs::File::open(bed.disk().join("pages")).unwrap();
            file.read_exact_at(&mut word, acknowledged % 64 * 4096).unwrap();
            assert!(
                u64::from_le_bytes(word) >= acknowledged,
                "{} instead of {acknowledged}",
                u64::from_le_bytes(word)
            );
        }
    }
    assert!(child.wait().unwrap().success());
}

/// Workers with absorbed files.
fn start(pool: &Path, dir: &Path, names: &[String]) -> Workers {
    let mut command = Runner::Run(pool).command("/usr/bin/python3", dir);
    command.arg("-B").arg(source("crash/crash.py")).args(["work", "."]).args(names).env(AFTER, "2");
    Workers::spawn(command, pool)
}

#[derive(Clone, Copy)]
enum Victims {
    Programs,
    All,
}

fn nothing_is_lost_by_killing(victims: Victims) {
    let (bed, mut random) = (Bed::new(), seed());
    for round in 0..setting("TIDEGATE_KILL_ROUNDS", 3) {
        let dir = bed.disk().join(format!("round.{round}"));
        std::fs::create_dir(&dir).unwrap();
        let names = one_of_each(round);
        let (worker, count) = moment(&names, &mut random);
        println!("round {round}: killed when {worker} has {count}");
        let mut workers = start(&bed.pool(), &dir, &names);
        workers.wait_for(worker, count);
        match victims {
            Victims::All => workers.tree.kill(),
            Victims::Programs => workers.tree.kill_programs(),
        }
        let acks = workers.collect(bed.disk());
        drop(succeed(&mut Runner::Run(&bed.pool()).command("true", Path::new("/"))));
        verify(&dir, &acks);
        process_tree::await_nobody_uses(&bed.pool());
        ok(["recover".as_ref(), "--replay".as_ref(), bed.pool().as_os_str()]);
        verify(&dir, &acks);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn nothing_is_lost_with_the_programs() {
    nothing_is_lost_by_killing(Victims::Programs);
}

#[test]
fn nothing_is_lost_with_all() {
    nothing_is_lost_by_killing(Victims::All);
}

/// Of each worker more than it had: nobody waits for a supervisor that is dead.
fn wait_for_more(workers: &mut Workers, names: &[String], more: usize) {
    for name in names {
        let count = workers.acknowledged(&format!("{name} ")) + more;
        workers.wait_for(name, count);
    }
}

#[test]
fn nothing_is_lost_with_the_supervisor() {
    let bed = Bed::new();
    for round in 0..setting("TIDEGATE_KILL_ROUNDS", 2) {
        let dir = bed.disk().join(format!("round.{round}"));
        std::fs::create_dir(&dir).unwrap();
        let names = one_of_each(round);
        let mut workers = start(&bed.pool(), &dir, &names);
        for _ in 0..3 {
            wait_for_more(&mut workers, &names, 8);
            for supervisor in process_tree::supervisors_of(&bed.pool()) {
                let _ = kill_process(supervisor, Signal::KILL);
            }
        }
        wait_for_more(&mut workers, &names, 8);
        workers.tree.kill();
        let acks = workers.collect(bed.disk());
        ok(["recover".as_ref(), "--replay".as_ref(), bed.pool().as_os_str()]);
        verify(&dir, &acks);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

/// Two processes on one database: each waits for the other's leases, whose supervisors die.
#[test]
fn sqlite_sees_nothing_of_supervisors_that_die() {
    for mode in ["delete", "wal"] {
        let bed = Bed::new();
        let insert = |first: u32| {
            let last = first + 150;
            format!(
                "for n in $(seq {first} {last}); do echo \"insert into t values($n);\"; done | sqlite3 -cmd '.timeout 120000' my.db"
            )
        };
        let script = format!(
            "sqlite3 my.db 'pragma journal_mode={mode}; create table t(n integer primary key)'; echo made\n({}) & ({}); wait\n\
             sqlite3 my.db 'select count(*), sum(n) from t; pragma integrity_check'",
            insert(0),
            insert(1000)
        );
        let mut command = Runner::Run(&bed.pool()).command("/bin/sh", bed.disk());
        command.args(["-c", &format!("exec 2>&1\n{script}")]).env(AFTER, "1");
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(said.any(|line| line == "made"));
        let killer = std::thread::spawn(move || {
            for _ in 0..6 {
                let found = process_tree::supervisors_of(&bed.pool());
                for supervisor in &found {
                    let _ = kill_process(*supervisor, Signal::KILL);
                }
                drop(succeed(tool("sleep", "coreutils").arg("0.3")));
            }
            bed
        });
        let rest: Vec<_> = said.collect();
        assert_eq!(rest, ["302|173650", "ok"], "{mode}");
        assert!(child.wait().unwrap().success());
        drop(killer.join().unwrap());
    }
}

/// The signal about an open goes to the dead supervisor; the launcher starts another one, which asks nobody. Of the two
/// descriptors of the file that it finds one cannot write.
#[test]
fn an_outsider_does_not_wait_for_a_dead_supervisor() {
    let bed = Bed::new();
    let script = "import os, sys\n\
                  os.close(os.open('idle', os.O_WRONLY | os.O_CREAT))\n\
                  no_file = os.open('idle', os.O_PATH)\n\
                  fd = os.open('idle', os.O_RDWR)\n\
                  for n in range(20): os.write(fd, b'%04d' % n * 1024)\n\
                  os.write(1, b'written\\n')\n\
                  sys.stdin.read(1)\n\
                  os.write(fd, b'last'); os.fsync(fd)\n\
                  assert os.pread(fd, 4, 19 * 4096) == b'0019' and os.lseek(fd, 0, 1) == 20 * 4096 + 4";
    let mut command = Runner::Run(&bed.pool()).command("/usr/bin/python3", bed.disk());
    command.args(["-c", script]).env(AFTER, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut said = [0; 8];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    let supervisor = process_tree::supervisor_of(&bed.pool(), Pid::from_child(&child));
    kill_process(supervisor, Signal::KILL).expect("it is alive");
    // The kernel would let it in after 45 seconds, to less than this.
    let found = std::fs::read(bed.disk().join("idle")).unwrap();
    assert_eq!((found.len(), &found[19 * 4096..][..4]), (20 * 4096, &b"0019"[..]));
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    assert!(std::fs::read(bed.disk().join("idle")).unwrap().ends_with(b"0019last"));
}

/// The others of a tree that has lost its supervisor, and a new one that takes over.
#[test]
fn a_new_supervisor_settles_what_the_old_one_has_left() {
    let bed = Bed::new();
    let script = "import os, sys\n\
                  fd = os.open('taken', os.O_RDWR | os.O_CREAT)\n\
                  for n in range(20): os.write(fd, b'%04d' % n * 1024)\n\
                  os.write(1, b'written\\n')\n\
                  sys.stdin.read(1)\n\
                  os.write(fd, b'last'); os.fsync(fd)\n\
                  assert os.pread(fd, 4, 19 * 4096) == b'0019' and os.lseek(fd, 0, 1) == 20 * 4096 + 4";
    let mut command = Runner::Run(&bed.pool()).command("/usr/bin/python3", bed.disk());
    command.args(["-c", script]).env(AFTER, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut said = [0; 8];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    let supervisor = process_tree::supervisor_of(&bed.pool(), Pid::from_child(&child));
    kill_process(supervisor, Signal::KILL).expect("it is alive");
    let found = Runner::Run(&bed.pool()).script("tail -c 4 taken; stat -c %s taken", bed.disk());
    assert_eq!(found, "001981920\nexit status: 0\n");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    assert!(std::fs::read(bed.disk().join("taken")).unwrap().ends_with(b"0019last"));
}

/// A process that absorbs a file gives it another name, in ways in which the supervisor cannot help at once: nothing of it is
/// lost in a replay, and the log still has its names.
fn renamed_and_replayed(before_rename: &str, kills_supervisor: bool) {
    let bed = Bed::new();
    let script = format!(
        "import os, resource, sys\n\
         fd = os.open('log', os.O_RDWR | os.O_CREAT | os.O_EXCL)\n\
         for n in range(20): os.write(fd, b'%04d' % n * 1024)\n\
         os.write(1, b'written\\n')\n\
         sys.stdin.read(1)\n\
         {before_rename}\n\
         os.rename('log', 'log.1')\n\
         resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n\
         os.write(os.open('log', os.O_RDWR | os.O_CREAT | os.O_EXCL), b'another')\n\
         os.write(1, b'renamed\\n')\n\
         sys.stdin.read()"
    );
    let mut command = Runner::Run(&bed.pool()).command("/usr/bin/python3", bed.disk());
    command.args(["-c", &script]).env(AFTER, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut tree = process_tree::ProcessTree::of(&mut command, &bed.pool());
    let mut child = command.spawn().unwrap();
    let (mut input, mut said) = (child.stdin.take().unwrap(), [0; 8]);
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    if kills_supervisor {
        let supervisor = process_tree::supervisor_of(&bed.pool(), Pid::from_child(&child));
        process_tree::kill_launchers(&bed.pool());
        kill_process(supervisor, Signal::KILL).expect("it is alive");
    }
    input.write_all(b"x").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    tree.kill();
    tree.wait();
    let _ = child.wait();
    if kills_supervisor {
        // As if the disk had got nothing since the file was made.
        std::fs::remove_file(bed.disk().join("log")).unwrap();
        std::fs::rename(bed.disk().join("log.1"), bed.disk().join("log")).unwrap();
        File::options().write(true).open(bed.disk().join("log")).unwrap().set_len(0).unwrap();
    }
    println!("{}", ok(["recover".as_ref(), "--replay".as_ref(), bed.pool().as_os_str()]));
    let found = std::fs::read(bed.disk().join("log.1")).unwrap();
    assert_eq!((found.len(), &found[19 * 4096..][..4]), (20 * 4096, &b"0019"[..]));
    assert_eq!(std::fs::read(bed.disk().join("log")).unwrap(), b"another");
}

#[test]
fn a_file_is_renamed_without_a_supervisor() {
    renamed_and_replayed("pass", true);
}

#[test]
fn a_file_is_renamed_without_descriptors() {
    renamed_and_replayed("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 64))", false);
}

/// A file is cut, by its name, to the size that the kernel thought it had.
#[test]
fn a_file_that_is_cut_to_what_the_kernel_has() {
    for after in [4, 32] {
        let bed = Bed::new();
        let script = format!(
            "import os\n\
             fd = os.open('file', os.O_RDWR | os.O_CREAT)\n\
             for n in range(2 * {after}): os.write(fd, b'%04d' % n * 1024)\n\
             os.truncate('file', {after} * 4096)\n\
             os.fsync(fd)"
        );
        killed_and_replayed(&bed, after, &script);
        let found = std::fs::read(bed.disk().join("file")).unwrap();
        assert_eq!(found.len(), after as usize * 4096);
    }
}

/// A program fills the file system through an absorbed file: it is told as without Tidegate, before anything was accepted that
/// the disk cannot take.
#[test]
fn a_file_system_that_a_program_fills_up() {
    let bed = Bed::new();
    let small = Small::new("200M");
    let script = "import errno, os\n\
                  fd = os.open('file', os.O_WRONLY | os.O_CREAT)\n\
                  try:\n    \
                      for n in range(100000): os.write(fd, b'%08d' % n * 512)\n\
                  except OSError as error: print(n, errno.errorcode[error.errno])\n\
                  os.fsync(fd)";
    let mut command = Runner::Run(&bed.pool()).command("/usr/bin/python3", &small.mount_point());
    let said = transcript(command.args(["-c", script]).env(AFTER, "1"));
    let (pages, rest) = said.split_once(' ').expect(&said);
    assert_eq!(rest, "ENOSPC\nexit status: 0\n");
    ok(["recover".as_ref(), "--replay".as_ref(), bed.pool().as_os_str()]);
    let kept = std::fs::read(small.mount_point().join("file")).unwrap();
    let pages: usize = pages.parse().unwrap();
    assert!(pages > 30_000 && kept.len() >= pages * 4096, "{pages} pages, {} bytes", kept.len());
    for (n, page) in kept.chunks_exact(4096).enumerate().take(pages) {
        assert!(page == format!("{n:08}").repeat(512).as_bytes(), "page {n}");
    }
}

/// The file system is full before the kernel hears of what the log holds: a sync tells, reads find it, and when there is room
/// again, so does everybody.
#[test]
fn a_file_system_that_fills_up() {
    let bed = Bed::new();
    let place = scratch();
    succeed(
        tool("mount", "mount").args(["-t", "tmpfs", "-o", "size=200M", "tmpfs"]).arg(place.path()),
    );
    let script = "import os\n\
                  fd = os.open('kept', os.O_RDWR | os.O_CREAT)\n\
                  for n in range(1000):\n    \
                      os.write(fd, b'%04d' % n * 1024)\n    \
                      if n == 1: os.write(1, b'absorbed\\n'); os.read(0, 1)\n\
                  os.write(1, b'written\\n')\n\
                  os.read(0, 1)\n\
                  try: os.fsync(fd); said = b'synced\\n'\n\
                  except OSError as error: said = b'error\\n'\n\
                  assert os.pread(fd, 4, 999 * 4096) == b'0999'\n\
                  os.pwrite(fd, b'last', 999 * 4096)\n\
                  os.write(1, said)\n\
                  os.read(0, 1)";
    let mut command = Runner::Run(&bed.pool()).command("/usr/bin/python3", place.path());
    command.args(["-c", script]).env(AFTER, "1").env("TIDEGATE_INCLUDE_TMPFS", "1");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut go_on = || std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"1").unwrap();
    assert_eq!(said.next().unwrap(), "absorbed");
    let filler = place.path().join("filler");
    std::fs::write(&filler, vec![1; 220 << 20]).unwrap_err();
    go_on();
    assert_eq!(said.next().unwrap(), "written");
    let flushed = crate::support::run(["flush".as_ref(), bed.pool().as_os_str()]);
    assert!(!flushed.status.success(), "nothing could be flushed: {flushed:?}");
    go_on();
    assert_eq!(said.next().unwrap(), "error");
    std::fs::remove_file(&filler).unwrap();
    let kept = std::fs::read(place.path().join("kept")).unwrap();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    succeed(tool("umount", "mount").arg("-l").arg(place.path()));
    let page = |n: usize| {
        if n == 999 {
            format!("last{}", "0999".repeat(1023))
        } else {
            format!("{n:04}").repeat(1024)
        }
    };
    assert!(kept.chunks(4096).enumerate().all(|(n, found)| found == page(n).as_bytes()));
    assert_eq!(kept.len(), 1000 * 4096);
}

#[test]
fn an_absorbed_write_and_its_sync_make_no_system_calls() {
    let bed = Bed::new();
    drop(tool("strace", "strace"));
    // All of its space: a write never waits until there is some.
    let pool = std::fs::File::options().write(true).create_new(true).mode(0o600).open(bed.pool());
    let flags = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(pool.unwrap(), flags, 0, 64 << 20).unwrap();
    let trace = bed.pool_dir().join("trace");
    let mut command = Runner::Run(&bed.pool()).command("strace", bed.disk());
    command.env(AFTER, "32").arg("-o").arg(&trace).arg(random_operations());
    succeed(&mut command);
    let trace = std::fs::read_to_string(trace).unwrap();
    let between: Vec<_> =
        trace.lines().skip_while(|line| !line.contains("\"/begin\"")).skip(1).collect();
    let calls: Vec<_> = between.iter().take_while(|line| !line.contains("\"/end\"")).collect();
    assert!(calls.len() < between.len(), "the trace has no end");
    // But for those that wake the cleaner, once in some megabytes.
    let are_wakes = calls.iter().all(|line| line.contains("FUTEX_WAKE"));
    assert!(calls.len() < 10 && are_wakes, "{} calls: {calls:?}", calls.len());
}

/// Starts a Python script whose files are absorbed soon; hands back what the pool counted when it said `written`, and the script,
/// which waits for the end of its input.
fn statistics_when_written(bed: &Bed, script: &str) -> (Child, serde_json::Value) {
    let mut command = Runner::Run(&bed.pool()).command("/usr/bin/python3", bed.disk());
    command.args(["-c", script]).env(AFTER, "32");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "written");
    let statistics = ok(["stat".as_ref(), bed.pool().as_os_str(), "--json".as_ref()]);
    (child, serde_json::from_str(&statistics).unwrap())
}

/// Who opens a file with `O_DSYNC` never syncs it, and what it had before it was opened is in no log.
#[test]
fn files_that_are_synced_by_their_flag() {
    let bed = Bed::new();
    std::fs::write(bed.disk().join("file"), vec![b'.'; 1 << 20]).unwrap();
    let script = "import os, sys\n\
                  fd = os.open('file', os.O_RDWR | os.O_DSYNC)\n\
                  for n in range(2000): os.pwrite(fd, b'%04d' % n * 1024, n % 256 * 4096)\n\
                  os.write(1, b'written\\n')\n\
                  sys.stdin.read(1)";
    let (mut child, statistics) = statistics_when_written(&bed, script);
    assert!(statistics["absorbed_writes"].as_u64() > Some(1900), "{statistics}");
    assert_eq!(statistics["fsyncs_done"].as_u64(), Some(1), "{statistics}");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    let kept = std::fs::read(bed.disk().join("file")).unwrap();
    let last = (1744..2000).map(|n| (n % 256, format!("{n:04}").repeat(1024)));
    assert!(kept.len() == 1 << 20);
    for (at, page) in last {
        assert!(&kept[at * 4096..][..4096] == page.as_bytes(), "page {at}");
    }
}

/// A log file, as most programs open it: its descriptor cannot read what the last page has.
#[test]
fn files_that_are_only_appended_to() {
    for bytes in [100, 128, 4096] {
        let bed = Bed::new();
        let script = format!(
            "import os, sys\n\
             fd = os.open('log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n\
             for n in range(2000): os.write(fd, b'%08d' % n * ({bytes} // 8) + b'.' * ({bytes} % 8))\n\
             os.write(1, b'written\\n')\n\
             sys.stdin.read(1)\n\
             for n in range(2000): os.write(fd, b'more')\n\
             os.pwrite(fd, b'end', 5)"
        );
        let (mut child, statistics) = statistics_when_written(&bed, &script);
        assert!(statistics["absorbed_writes"].as_u64() > Some(1800), "{bytes}: {statistics}");
        let line = |n| format!("{}{}", format!("{n:08}").repeat(bytes / 8), ".".repeat(bytes % 8));
        let mut expected: String = (0..2000).map(line).collect();
        assert_eq!(std::fs::read_to_string(bed.disk().join("log")).unwrap(), expected);
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        expected += &("more".repeat(2000) + "end");
        assert_eq!(std::fs::read_to_string(bed.disk().join("log")).unwrap(), expected);
    }
}

/// The disk dies under a file that is absorbed: whatever needs the disk is told so, and nothing waits for ever.
#[test]
fn a_disk_that_dies() {
    const SCRIPT: &str = r"
import errno, fcntl, os, struct, sys
def said(what):
    try: return what() or 'done'
    except OSError as error: return errno.errorcode[error.errno]
fd = os.open('kept', os.O_RDWR | os.O_CREAT)
for n in range(100): os.write(fd, b'%04d' % n * 1024)
os.fsync(fd)
folder = os.open('.', os.O_RDONLY)
fcntl.ioctl(folder, 0x8004587d, struct.pack('I', 2))
print('read', said(lambda: os.pread(fd, 4, 99 * 4096)))
print('cut', said(lambda: os.ftruncate(fd, 10)))
print('sent', said(lambda: os.sendfile(1, fd, 0, 10)))
sys.stdout.flush()
if os.fork() == 0:
    print('child', said(lambda: os.pread(fd, 4, 99 * 4096)))
    sys.stdout.flush()
    os._exit(0)
os.wait()
sys.stdin.read(1)
print('synced', said(lambda: os.fsync(fd)), flush=True)
";
    let (bed, small) = (Bed::new(), Small::new("300M"));
    let mut command = Runner::Run(&bed.pool()).command("/usr/bin/python3", &small.mount_point());
    command.args(["-c", SCRIPT]).env(AFTER, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let before: Vec<_> = said.by_ref().take(4).collect();
    assert_eq!(before, ["read b'0099'", "cut EIO", "sent EIO", "child EIO"]);
    let flushed = crate::support::run(["flush".as_ref(), bed.pool().as_os_str()]);
    assert!(!flushed.status.success(), "nothing can be flushed: {flushed:?}");
    drop(child.stdin.take());
    assert_eq!(said.collect::<Vec<_>>(), ["synced EIO"]);
    assert!(child.wait().unwrap().success());
}

fn same(script: &str) {
    let script = format!("export {AFTER}=1\n{script}");
    let printed = Bed::new().same(|runner, dir| runner.script(&script, dir));
    assert!(printed.ends_with("exit status: 0\n"), "fails without Tidegate too:\n{printed}");
}

/// The same for a Python script, with files that are absorbed after the first write.
fn same_python(script: &str) {
    same(&format!("cat > script.py << 'END'\n{script}\nEND\npython3 script.py; rm script.py"));
}

/// A process loses its record locks on a file with any of its descriptors that is closed.
#[test]
fn record_locks_are_kept() {
    same_python(
        r"
import fcntl, os, tempfile
def others_find(path):
    child = os.fork()
    if child == 0:
        try: fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB); found = 0
        except OSError: found = 1
        os._exit(found)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
memory = tempfile.mkdtemp(dir='/dev/shm')
for path in memory + '/file', 'file':
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    for n in range(10): os.write(fd, b'x' * 1000)
    fcntl.lockf(fd, fcntl.LOCK_EX)
    synced = os.open(path, os.O_RDWR | os.O_DSYNC)
    os.write(synced, b'synced')
    print(others_find(path), fcntl.fcntl(synced, fcntl.F_GETFL) & os.O_DSYNC == os.O_DSYNC)
    os.unlink(path) if path != 'file' else None
os.rmdir(memory)
",
    );
}

/// A lease is the description's, which an absorbed file shares with the supervisor.
#[test]
fn leases_are_the_programs() {
    same_python(
        r"
import fcntl, os
fd = os.open('file', os.O_RDWR | os.O_CREAT)
def write():
    for n in range(10): os.write(fd, b'%04d' % n * 1024)
write()
print(fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_UNLCK)
print(fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK))
write()
print(fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK)
print(fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK))
write()
",
    );
}

#[test]
fn sqlite_in_all_journal_modes() {
    for mode in ["delete", "truncate", "persist", "memory", "wal", "off"] {
        same(&crate::sqlite::SESSION.replace("MODE", mode));
    }
}

#[test]
fn sqlite_of_two_processes() {
    for mode in ["delete", "persist", "wal"] {
        let insert = |first: u32| {
            format!(
                "for n in $(seq {first} {}); do echo \"insert into t values($n);\"; done | sqlite3 -cmd '.timeout 60000' my.db",
                first + 60
            )
        };
        same(&format!(
            "sqlite3 my.db 'pragma journal_mode={mode}; create table t(n integer primary key)'\n({}) & ({}); wait\n\
             sqlite3 my.db 'select count(*), sum(n) from t; pragma integrity_check; vacuum'; rm -f my.db*",
            insert(0),
            insert(100)
        ));
    }
}

#[test]
fn fio_verifies() {
    drop(tool("fio", "fio"));
    for options in [
        "--rw=randwrite --bs=4k --fdatasync=1",
        "--rw=randrw --bs=3000 --fsync=8",
        "--rw=write --bs=9k --numjobs=2",
    ] {
        same(&format!(
            "fio --output=report --name=job --ioengine=psync --size=4M --randseed=7 --allrandrepeat=1 --verify=crc32c --verify_fatal=1 \
             --do_verify=1 --verify_state_save=0 --filename_format='file.$jobnum' {options} || cat report; stat -c '%n %s' file*; rm -f report file*"
        ));
    }
}

/// What the kernel is told later changes neither times nor rights that were set meanwhile; and a write changes the times at once.
#[test]
fn times_and_rights_are_those_of_the_writes() {
    same(
        "cat > times.py << 'END'\n\
         import os, time\n\
         fd = os.open('file', os.O_RDWR | os.O_CREAT)\n\
         def write():\n\
         \x20   for n in range(20): os.write(fd, b'x' * 1000)\n\
         write()\n\
         first = os.fstat(fd).st_mtime_ns\n\
         time.sleep(0.05)\n\
         write()\n\
         second = os.fstat(fd)\n\
         print(first < second.st_mtime_ns <= second.st_ctime_ns, os.stat('file').st_mtime_ns == second.st_mtime_ns)\n\
         time.sleep(0.05)\n\
         os.utime('file', (1000000000, 1000000000))\n\
         print(os.stat('file').st_mtime)\n\
         write()\n\
         os.utime(fd, (1100000000, 1100000000))\n\
         write()\n\
         os.fchmod(fd, 0o4755)\n\
         last = os.fstat(fd).st_mtime_ns\n\
         time.sleep(0.05)\n\
         os.close(fd)\n\
         print(last == os.stat('file').st_mtime_ns)\n\
         END\n\
         python3 times.py; stat -c %a file\n\
         dd if=/dev/zero of=big bs=4k count=50 2> /dev/null; touch -d @1200000000 big; mkdir to; tar cf - big | tar xf - -C to; stat -c %Y to/big\n\
         rm -f file times.py",
    );
}

/// The kernel refuses such opens of a leased file: the hook makes them again, and waits.
#[test]
fn opens_that_do_not_want_to_wait() {
    same(
        "cat > other.py << 'END'\n\
         import os, sys\n\
         sys.stdin.read(1)\n\
         fd = os.open('file', os.O_RDONLY | os.O_NONBLOCK)\n\
         print(len(os.read(fd, 1 << 20)), os.get_blocking(fd))\n\
         END\n\
         python3 -c \"import os, subprocess\n\
         other = subprocess.Popen(['python3', 'other.py'], stdin=subprocess.PIPE)\n\
         fd = os.open('file', os.O_RDWR | os.O_CREAT)\n\
         for n in range(20): os.write(fd, b'x' * 1000)\n\
         other.communicate(b'1')\"",
    );
}

/// The lease is another program's, which does not mean to give it back.
#[test]
fn opens_that_do_not_wait_for_leases_of_others() {
    same_python(
        r"
import fcntl, os, signal
signal.signal(signal.SIGIO, signal.SIG_IGN)
for path, bytes in ('written', b'x' * 1000), ('empty', b''):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, bytes)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    child = os.fork()
    if child == 0:
        try: os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except BlockingIOError: os._exit(7)
        os._exit(8)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK)
    os.close(fd)
",
    );
}

/// A descriptor that a child inherits, reads by two trees, and whatever else `sh` does with files.
#[test]
fn shells() {
    same(
        "exec 3<>both; for n in $(seq 50); do echo line $n >&3; done; cat both | cksum; (echo child >&3); echo parent >&3; cksum < both; \
          dd if=/dev/zero bs=4k count=50 conv=fsync of=zeroes 2> /dev/null; cp zeroes copy; mv copy moved; cksum moved; ls -s moved > /dev/null; \
          python3 -c \"import os; fd = os.open('x', os.O_RDWR | os.O_CREAT | os.O_APPEND); [os.write(fd, b'%d,' % n) for n in range(5000)]; \
          os.system('cksum x'); os.execlp('cksum', 'cksum', 'x')\"",
    );
}
