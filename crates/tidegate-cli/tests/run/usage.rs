//! The command itself: what it refuses, what it passes on, what it leaves behind.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::bed::{Bed, Runner, Small, on_disk};
use crate::causes::PRELUDE;
use crate::process_tree;
use crate::programs::{compiled, source};
use crate::support::file_system::unmount;
use crate::support::{ok, preload_library, run, scratch, succeed, tidegate, tool};

/// `tidegate run` with the test's pool, ready for `-- CMD`.
fn tidegate_run(bed: &Bed) -> Command {
    preload_library();
    let mut command = tidegate();
    command.args(["run", "--size=64M", "--pool"]).arg(bed.pool()).current_dir(bed.disk());
    command.env("TIDEGATE_COVER_AFTER", "1");
    command
}

/// `command`, with all signals heeded: the caller of the tests may ignore some, as under `nohup` or
/// behind a script's `&`.
fn heeding_signals(command: &Command) -> Command {
    let mut heeding = Command::new("env");
    heeding.arg("--default-signal").arg(command.get_program()).args(command.get_args());
    heeding.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    heeding.current_dir(command.get_current_dir().expect("it was given one"));
    heeding
}

fn run_under(bed: &Bed, program: &[&str]) -> Output {
    let mut command = Runner::Run(&bed.pool()).command(program[0], bed.disk());
    command.args(&program[1..]).output().expect("it starts")
}

/// One line on standard error that holds all of `words`, and the status.
fn assert_refused(output: &Output, status: i32, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{said}");
    for word in words {
        assert!(said.contains(word), "no {word:?} in: {said}");
    }
}

#[test]
fn wrong_usage_has_status_2() {
    let bed = Bed::new();
    let pool = bed.pool();
    for args in [
        vec!["run"],
        vec!["run", "--"],
        vec!["run", "--size", "many", "--", "true"],
        vec!["run", "--wrong", "--", "true"],
    ] {
        assert_refused(&run(&args), 2, &[]);
    }
    assert!(!pool.exists());
    assert_refused(&run(["recover"]), 2, &[]);
    assert_refused(&run(["flush"]), 2, &[]);
}

#[test]
fn programs_that_cannot_be_started_are_named() {
    let bed = Bed::new();
    assert_refused(
        &run_under(&bed, &["no-such-program-anywhere"]),
        1,
        &["no-such-program-anywhere"],
    );
    let text = bed.disk().join("text");
    std::fs::write(&text, "no program").unwrap();
    assert_refused(&run_under(&bed, &[text.to_str().unwrap()]), 1, &["text"]);
    process_tree::assert_nobody_uses(&bed.pool());
}

#[test]
fn pools_that_are_no_logs_are_refused_and_kept() {
    let bed = Bed::new();
    let pool = bed.pool();
    ok(["create".as_ref(), pool.as_os_str(), "--engine=btt".as_ref(), "--size=32M".as_ref()]);
    let before = std::fs::read(&pool).unwrap();
    assert_refused(&run_under(&bed, &["true"]), 1, &[pool.to_str().unwrap()]);
    assert!(std::fs::read(&pool).unwrap() == before, "the pool was changed");
    std::fs::write(&pool, b"precious text").unwrap();
    assert_refused(&run_under(&bed, &["true"]), 1, &[pool.to_str().unwrap()]);
    assert_eq!(std::fs::read(&pool).unwrap(), b"precious text");
    for command in ["recover", "flush"] {
        let refused = run([command.as_ref(), pool.as_os_str()]);
        assert_refused(&refused, 1, &[pool.to_str().unwrap()]);
    }
}

/// One of the wrong size would be in the way of the next try.
#[test]
fn a_pool_that_cannot_be_used_is_not_left() {
    let bed = Bed::new();
    let pool = bed.pool();
    let run_with = |size: &str| {
        let options = ["run", size, "--pool", pool.to_str().unwrap(), "--", "true"];
        preload_library();
        run(options)
    };
    for (size, reason) in [
        ("--size=1K", "the smallest is 92K"),
        ("--size=20K", "the smallest is 92K"),
        ("--size=88K", "the smallest is 92K"),
        ("--size=1000001", "the largest that fits is 976K"),
    ] {
        assert_refused(&run_with(size), 1, &[pool.to_str().unwrap(), reason]);
        assert!(!pool.exists(), "{size}: it was left");
    }
    assert!(run_with("--size=1M").status.success());
}

/// A pool whose file system has no free space even for a small log: nothing stays, whether the file
/// was there or not.
#[test]
fn a_pool_without_space_is_not_left() {
    let (bed, place) = (Bed::new(), scratch());
    let mut mount = tool("mount", "mount");
    succeed(mount.args(["-t", "tmpfs", "-o", "size=64K", "tmpfs"]).arg(place.path()));
    let (pool, empty) = (place.path().join("pool"), place.path().join("empty"));
    std::fs::write(&empty, []).unwrap();
    std::fs::set_permissions(&empty, std::fs::Permissions::from_mode(0o600)).unwrap();
    let number = |path: &Path| {
        let found = path.metadata().unwrap();
        format!("{:x}-{:x}.", found.dev(), found.ino())
    };
    let of_empty = number(&empty);
    for path in [&pool, &empty] {
        let mut command = Runner::Run(path).command("true", bed.disk());
        assert_refused(&command.output().unwrap(), 1, &["space"]);
    }
    let left = (pool.exists(), empty.metadata().unwrap().len());
    unmount(place.path());
    assert_eq!(left, (false, 0));
    let control = format!("/dev/shm/tidegate-{}", rustix::process::geteuid().as_raw());
    let names = std::fs::read_dir(&control).unwrap().map(|entry| entry.unwrap().file_name());
    let names: Vec<_> = names.filter_map(|name| name.into_string().ok()).collect();
    let left: Vec<_> = names.iter().filter(|name| name.starts_with(&of_empty)).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn an_empty_file_becomes_a_pool_of_the_size_that_is_asked_for() {
    let bed = Bed::new();
    std::fs::write(bed.pool(), []).unwrap();
    std::fs::set_permissions(bed.pool(), std::fs::Permissions::from_mode(0o600)).unwrap();
    assert!(tidegate_run(&bed).args(["--", "true"]).status().unwrap().success());
    assert_eq!(bed.pool().metadata().unwrap().len(), 64 << 20);
    ok(["check".as_ref(), bed.pool().as_os_str()]);
}

/// Only `run` and `create` make a pool of nothing.
#[test]
fn what_holds_no_log_is_named_before_its_mode() {
    let bed = Bed::new();
    let pool = bed.pool();
    let refused_by = |commands: &[&str], words: &[&str]| {
        for command in commands {
            let output = run([command.as_ref(), pool.as_os_str()]);
            let words = [&[pool.to_str().unwrap()], words].concat();
            assert_refused(&output, 1, &words);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!said.contains("--pool") && !said.contains("chmod"), "{command}: {said}");
        }
    };
    let refused = |words: &[&str]| refused_by(&["recover", "flush", "stat"], words);
    for zeroes in [0, 1 << 20] {
        std::fs::write(&pool, vec![0; zeroes]).unwrap();
        refused(&["holds only zeroes, no log pool"]);
    }
    std::fs::write(&pool, "precious text").unwrap();
    std::fs::set_permissions(&pool, std::fs::Permissions::from_mode(0o644)).unwrap();
    refused(&["holds text, no log pool"]);
    std::fs::remove_file(&pool).unwrap();
    refused(&["there is no pool"]);
    for engine in ["btt", "raw"] {
        let (made, shown) = (format!("--engine={engine}"), pool.to_str().unwrap());
        ok(["create", shown, &made, "--size=32M", "--force"]);
        let found = format!("holds a {engine} pool, no log pool");
        refused_by(&["recover", "flush"], &[&found]);
        assert_refused(&run_under(&bed, &["true"]), 1, &[&found]);
    }
}

/// The checksum in the header of a log: CRC-64/NVME.
fn header_sum(header: &[u8]) -> u64 {
    let step = |crc: u64, _| (crc >> 1) ^ (0x9a6c_9329_ac4b_c9b5 * (crc & 1));
    !header.iter().fold(u64::MAX, |crc, byte| (0..8).fold(crc ^ u64::from(*byte), step))
}

/// A pool of an earlier format, with both headers as that release has left them: no command reads
/// it, changes it or makes it anew, and each says what to do.
#[test]
fn a_log_of_an_earlier_format_is_refused_with_the_way_out() {
    let bed = Bed::new();
    let (pool, header_bytes) = (bed.pool(), 64);
    ok(["create".as_ref(), pool.as_os_str(), "--engine=log".as_ref(), "--size=1M".as_ref()]);
    let made = std::fs::read(&pool).unwrap();
    let headers: Vec<_> = (0..made.len() / 64)
        .map(|line| line * 64)
        .filter(|at| made[*at..].starts_with(b"TIDELOG4"))
        .collect();
    assert_eq!(headers.len(), 2, "a header and its copy");
    for former in [b"TIDELOG1", b"TIDELOG2"] {
        let mut content = made.clone();
        for at in &headers {
            let header = &mut content[*at..*at + header_bytes];
            let sum = u64::from_le_bytes(header[8..16].try_into().unwrap());
            header[8..16].fill(0);
            assert_eq!(header_sum(header), sum, "the checksum is another one");
            header[..8].copy_from_slice(former);
            let sum = header_sum(header);
            header[8..16].copy_from_slice(&sum.to_le_bytes());
        }
        std::fs::write(&pool, &content).unwrap();
        let (shown, former) = (pool.to_str().unwrap(), str::from_utf8(former).unwrap());
        let words = [shown, former, "by the release that made it"];
        assert_refused(&run_under(&bed, &["true"]), 1, &words);
        for command in ["recover", "flush", "check"] {
            assert_refused(&run([command, shown]), 1, &words);
        }
        assert_refused(&run(["recover", "--discard", shown]), 1, &words);
        assert!(std::fs::read(&pool).unwrap() == content, "{former}: the pool was changed");
    }
}

#[test]
fn a_read_only_file_system_is_named() {
    let place = scratch();
    let mut mount = tool("mount", "mount");
    succeed(mount.args(["-t", "tmpfs", "-o", "ro", "tmpfs"]).arg(place.path()));
    let pool = place.path().join("pool");
    let create = ["create", pool.to_str().unwrap(), "--engine=log", "--size=1M"];
    let refused = run(create);
    unmount(place.path());
    assert_refused(&refused, 1, &["read-only"]);
}

/// What `run` has to say may find no reader: the program is started all the same, and its status is
/// kept.
#[test]
fn a_deaf_standard_error_changes_nothing() {
    let bed = Bed::new();
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    let closed = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        Stdio::from(writer)
    };
    for stderr in [full(), closed()] {
        let mut command = tidegate_run(&bed);
        command.args(["--stats", "--", "sh", "-c", "echo started; exit 5"]).stderr(stderr);
        let output = command.stdout(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(5));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "started\n");
    }
}

#[test]
fn static_programs_are_run_with_a_line_that_says_so() {
    let (program, bed) = (compiled("static", &["-static"]), Bed::new());
    std::fs::write(bed.disk().join("file"), "x").unwrap();
    let output = run_under(&bed, &[program.to_str().unwrap(), "file"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("linked statically") && said.contains("real ones"), "{said}");
    let quiet = tidegate_run(&bed).args(["-q", "--"]).arg(&program).arg("file").output().unwrap();
    assert!(quiet.stderr.is_empty(), "{}", String::from_utf8_lossy(&quiet.stderr));
}

/// Where the kernel's own memory is not what the kernel says it is.
#[test]
#[cfg(feature = "soak")]
fn programs_run_in_valgrind() {
    drop(tool("valgrind", "valgrind"));
    let script = "valgrind -q --tool=none sh -c 'printf data > file; cat file' 2>/dev/null; valgrind -q --tool=none sync file 2>/dev/null";
    let printed = Bed::new().same(|runner, dir| runner.script(script, dir));
    assert_eq!(printed, "dataexit status: 0\n");
}

/// Such a program deeper in the tree is an outsider: it works, on the same files.
#[test]
fn static_programs_in_the_tree_see_and_change_files() {
    let program = compiled("static", &["-static"]);
    let script = format!(
        "printf one > file; sync file; {program} file; cat file; printf three >> file; sync file; {program} file; cat file",
        program = program.display()
    );
    let printed = Bed::new().same(|runner, dir| runner.script(&script, dir));
    assert!(printed.contains("exit status: 0"), "{printed}");
}

/// A program that starts a static one waits for the supervisor, but not for a stopped one.
#[test]
fn static_programs_start_while_the_supervisor_is_stopped() {
    let (program, bed) = (compiled("static", &["-static"]), Bed::new());
    preload_library();
    let script = "printf one > file; sync file; echo ready; read line; $0 file; echo started";
    let mut command = tidegate_run(&bed);
    command.args(["-q", "--", "sh", "-c", script]).arg(program);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let supervisor = process_tree::supervisor_of(&bed.pool(), Pid::from_child(&child));
    kill_process(supervisor, Signal::STOP).unwrap();
    drop(child.stdin.take());
    let mut started = String::new();
    output.read_line(&mut started).unwrap();
    kill_process(supervisor, Signal::CONT).unwrap();
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(format!("{started}{rest}").ends_with("started\n"), "{started}{rest}");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_pool_s_name_may_have_any_bytes() {
    use std::os::unix::ffi::OsStrExt;
    let bed = Bed::new();
    let pool = bed.pool_dir().join(std::ffi::OsStr::from_bytes(b"pool \xff"));
    preload_library();
    let mut command = tidegate();
    command.args(["run", "-q", "--size=64M", "--pool"]).arg(&pool).current_dir(bed.disk());
    let output = command.args(["--", "sh", "-c", "echo x > file; sync file"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
    ok([std::ffi::OsStr::new("recover"), pool.as_os_str()]);
}

#[test]
fn statuses_and_signals_are_passed_on() {
    let bed = Bed::new();
    assert_eq!(run_under(&bed, &["sh", "-c", "exit 42"]).status.code(), Some(42));
    let killed = run_under(&bed, &["sh", "-c", "kill -KILL $$"]).status;
    assert!(killed.code() == Some(137) || killed.signal() == Some(9), "{killed}");
    for (signal, number) in
        [(Signal::TERM, 15), (Signal::INT, 2), (Signal::HUP, 1), (Signal::USR1, 10)]
    {
        let mut command = heeding_signals(&tidegate_run(&bed));
        let script = format!(
            "trap 'echo got {number}; exit 7' {number}; echo ready; while :; do sleep 0.01; done"
        );
        command.args(["--", "sh", "-c", &script]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        kill_process(Pid::from_child(&child), signal).unwrap();
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert_eq!((rest, child.wait().unwrap().code()), (format!("got {number}\n"), Some(7)));
    }
}

#[test]
fn nothing_stays_behind_a_program_that_does_nothing() {
    let bed = Bed::new();
    assert!(run_under(&bed, &["true"]).status.success());
    process_tree::assert_nobody_uses(&bed.pool());
    let mode = bed.pool().metadata().unwrap().mode();
    assert_eq!(mode & 0o777, 0o600, "the pool is for its owner only");
    // Others have pools there too: what belongs to this one is named after its file.
    let pool = bed.pool().metadata().unwrap();
    let own = format!("{:x}-{:x}.", pool.dev(), pool.ino());
    let control = format!("/dev/shm/tidegate-{}", rustix::process::geteuid().as_raw());
    let entries = std::fs::read_dir(&control).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let left: Vec<_> = names.filter(|name| name.starts_with(&own)).collect();
    assert!(
        left.iter().all(|name| *name == format!("{own}lock")),
        "more than a lock stays: {left:?}"
    );
}

/// The program gets its environment, arguments, working directory and descriptors as they are.
#[test]
fn programs_see_what_they_see_without() {
    let script = r#"
echo "$0 $# $*"; pwd -P | sed 's/.*\///'; env | grep -v -e ^LD_PRELOAD -e ^TIDEGATE_ -e ^_= | sort | cksum
ls -l /proc/self/fd | wc -l; umask; ulimit -a | cksum; cat /proc/self/limits | cksum; ps -o tty= -p $$
sed -n 's/^Sig...:/&/p' /proc/self/status; grep Threads /proc/self/status; nice
"#;
    Bed::new().same(|runner, dir| runner.script(script, dir));
}

#[test]
fn files_can_be_chosen() {
    let bed = Bed::new();
    for options in [["--include", "*.db"], ["--exclude", "*.txt"]] {
        let mut command = tidegate_run(&bed);
        command.args(options);
        let script = "for f in a.db b.txt; do printf data > $f; sync $f; done";
        command.args(["--", "sh", "-c", script]);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        println!("{said}");
        assert_eq!(std::fs::read(bed.disk().join("b.txt")).unwrap(), b"data");
    }
}

#[test]
fn statistics_at_the_end() {
    let bed = Bed::new();
    let mut command = tidegate_run(&bed);
    let program = format!(
        "{PRELUDE}fd = covered('file'); print(ask()['writes'])\n\
         for n in range(500): os.write(fd, b'x' * 4096); os.fdatasync(fd)"
    );
    command.args(["--stats", "--", "/usr/bin/python3", "-c", &program]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let before: u64 = String::from_utf8_lossy(&output.stdout).trim().parse().unwrap();
    for word in [&format!(" {} logged", before + 500), "p50", "p99"] {
        assert!(said.contains(word), "no {word:?} in the statistics:\n{said}");
    }
}

/// `O_DSYNC` stays with the kernel.
#[test]
fn synchronous_writes_are_synced_by_the_kernel() {
    let bed = Bed::new();
    let mut command = tidegate_run(&bed);
    let output =
        command.args(["--", "/usr/bin/python3"]).arg(source("synced.py")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "flags 0o10000\n");
}

/// What `tidegate run --stats` says after this Python program.
fn statistics_of(bed: &Bed, program: &str) -> String {
    let mut command = tidegate_run(bed);
    command.args(["--stats", "--", "/usr/bin/python3", "-c", program]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

/// A mapping keeps a file out of the log; a killed process cannot say that it is gone.
#[test]
fn files_of_killed_processes_come_back_into_the_log() {
    let bed = Bed::new();
    let program = format!(
        "import json, mmap, os, subprocess\n\
         def skipped(): return json.loads(subprocess.check_output(['{}', 'stat', '--json', '{}']))['fsyncs_skipped']\n\
         fd = os.open('file', os.O_RDWR | os.O_CREAT); os.write(fd, bytes(4096))\n\
         if os.fork() == 0: mmap.mmap(fd, 4096); os.kill(os.getpid(), 9)\n\
         os.wait()\n\
         while not skipped():\n\
         \x20   for _ in range(10): os.pwrite(fd, b'x', 0); os.fdatasync(fd)",
        env!("CARGO_BIN_EXE_tidegate"),
        bed.pool().display()
    );
    // Ends only when a sync was skipped. To ask starts a program that cannot be watched: the next
    // sync is real.
    statistics_of(&bed, &program);
}

/// A daemon that has become another user cannot tell the supervisor of a child: the supervisor has
/// to find it.
#[test]
fn daemons_of_other_users_keep_their_supervisor() {
    const PROGRAM: &str = r"
import os, signal
os.mkfifo('wait')
wait = os.open('wait', os.O_RDWR)
file = os.open('file', os.O_WRONLY | os.O_CREAT)
os.setuid(65534)
if os.fork() == 0:
    os.setsid()
    signal.alarm(60) # where the test has failed
    os.read(wait, 1)
    for n in range(100): os.write(file, b'x' * 10)
";
    let bed = Bed::new();
    let mut command = tidegate_run(&bed);
    command.args(["--", "/usr/bin/python3", "-c", PROGRAM]);
    let mut launcher = command.spawn().unwrap();
    let pid = Pid::from_child(&launcher);
    assert!(launcher.wait().unwrap().success());
    let stat = || ok(["stat".as_ref(), bed.pool().as_os_str()]);
    let said = stat();
    assert!(said.contains("with 1 process"), "{said}");
    let supervisor = process_tree::supervisor_of(&bed.pool(), pid);
    let handle = pidfd_open(supervisor, PidfdFlags::empty()).unwrap();
    std::fs::write(bed.disk().join("wait"), "!").unwrap();
    let mut events = [PollFd::new(&handle, PollFlags::IN)];
    retry_on_intr(|| poll(&mut events, None)).unwrap();
    process_tree::assert_nobody_uses(&bed.pool());
    assert_eq!(std::fs::read(bed.disk().join("file")).unwrap(), b"x".repeat(1000));
}

/// What people outside the tree read and write is the same file.
#[test]
fn outsiders_see_and_change_the_same_files() {
    let bed = Bed::new();
    let file = bed.disk().join("file");
    let script = "printf 'from inside\n' > file; sync file; echo written; read line; cat file; printf 'inside again\n' >> file; sync file";
    let mut command = tidegate_run(&bed);
    command.args(["--", "sh", "-c", script]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "from inside\n");
    let mut outside = std::fs::OpenOptions::new().append(true).open(&file).unwrap();
    std::io::Write::write_all(&mut outside, b"from outside\n").unwrap();
    drop(child.stdin.take());
    line.clear();
    output.read_to_string(&mut line).unwrap();
    assert_eq!(line, "from inside\nfrom outside\n");
    assert!(child.wait().unwrap().success());
    assert_eq!(
        std::fs::read_to_string(&file).unwrap(),
        "from inside\nfrom outside\ninside again\n"
    );
}

/// The kernel has each write that returned: a freeze of the file system writes them all back.
#[test]
fn a_snapshot_of_a_frozen_file_system_has_every_write() {
    let (bed, small, snapshot) = (Bed::new(), Small::new("64M"), Small::new("64M"));
    snapshot.unmount();
    drop(tool("fsfreeze", "util-linux"));
    let script = format!(
        "seq 500000 > numbers; sync numbers; fsfreeze -f . && cp {} {}; fsfreeze -u . && cksum numbers",
        small.image().display(),
        snapshot.image().display()
    );
    let written = Runner::Run(&bed.pool()).script(&script, &small.mount_point());
    snapshot.mount();
    let found = Runner::Plain.script("cksum numbers", &snapshot.mount_point());
    assert!(written.ends_with("exit status: 0\n"), "{written}");
    assert_eq!(found, written);
}

/// `NVCache` kept one core busy when idle.
#[test]
fn no_cpu_when_idle() {
    let bed = Bed::new();
    let mut command = tidegate_run(&bed);
    command.args(["--", "sh", "-c", "printf data > file; sync file; echo ready; exec cat"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let supervisor = process_tree::supervisor_of(&bed.pool(), Pid::from_child(&child));
    // It may be about the pool's space or the last records still, in the first of these seconds.
    let is_idle = (0..10).any(|_| {
        let before = process_tree::cpu_ticks(supervisor);
        succeed(tool("sleep", "coreutils").arg("1"));
        process_tree::cpu_ticks(supervisor) == before
    });
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    assert!(is_idle, "a supervisor with nothing to do uses CPU in each second");
}

/// A pool on a disk, not in memory, works the same.
#[test]
fn pools_may_lie_on_a_disk() {
    let (bed, place) = (Bed::new(), on_disk());
    let pool = place.path().join("pool");
    let mut command: Command = Runner::Run(&pool).command("/bin/sh", bed.disk());
    succeed(command.args(["-c", "seq 10000 > file; sync file; cat file | cksum"]));
    process_tree::assert_nobody_uses(&pool);
}
