//! Programs that handle signals: each signal is handled once, as without Tidegate, and an operation
//! of the log makes no system call for that if no signal arrives.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::bed::{Bed, Runner};
use crate::kernel_path::{calls, traced};
use crate::process_tree;
use crate::programs::compiled;
use crate::support::{preload_library, succeed, tidegate};

#[test]
fn a_storm_of_signals_is_handled_whole() {
    let bed = Bed::new();
    let pool = bed.pool();
    for runner in [Runner::Plain, Runner::Run(&pool)] {
        let mut program = runner.command(compiled("signals", &[]), bed.disk());
        assert_eq!(succeed(program.args([".", "20000"])), "whole\n");
    }
}

/// Returns how often the program makes the system calls `names`, with so many signals.
fn calls_of<const N: usize>(signals: &str, names: [&str; N]) -> [usize; N] {
    let bed = Bed::new();
    let (pool, trace) = (bed.pool(), bed.pool_dir().join("trace"));
    let mut strace = traced(Runner::Run(&pool), bed.disk(), &trace);
    strace.arg(compiled("signals", &[])).args([".", signals]);
    let calls = calls(strace, &trace);
    names.map(|name| calls.get(name).copied().unwrap_or(0))
}

#[test]
fn an_operation_blocks_no_signals_if_none_arrives() {
    let [syncs, masks] = calls_of("0", ["fdatasync", "rt_sigprocmask"]);
    // The syncs of 200 rounds are answered by the log; the start of the program blocks signals.
    assert!(syncs < 20 && masks < 30, "{syncs} real syncs, {masks} changes of the mask");
}

/// A handler that runs inside an operation does not get the lock: its file leaves the log, and its
/// sync is real.
#[test]
fn no_handler_runs_inside_an_operation() {
    let [syncs, resent] = calls_of("2000", ["fdatasync", "rt_tgsigqueueinfo"]);
    assert!(resent > 0, "no signal arrived in an operation");
    assert!(syncs < 20, "{syncs} real syncs");
}

#[test]
fn a_killed_child_of_vfork_leaves_its_parent_no_blocked_signals() {
    let bed = Bed::new();
    let pool = bed.pool();
    for runner in [Runner::Plain, Runner::Run(&pool)] {
        let mut program = runner.command(compiled("vforked", &["-pthread"]), bed.disk());
        assert_eq!(succeed(program.arg("300")), "handled\n");
    }
}

/// Waits until the process is stopped.
fn await_stopped(process: Pid) {
    let stat = format!("/proc/{}/stat", process.as_raw_pid());
    while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// As Ctrl-Z and `fg` do it, where the launcher is continued first.
#[test]
fn a_job_that_is_stopped_and_continued_stops_once() {
    let bed = Bed::new();
    let pool = bed.pool();
    for options in [&["--pool", pool.to_str().unwrap(), "--size=64M"][..], &["--volatile"]] {
        preload_library();
        let mut command = tidegate();
        command.arg("run").args(options).current_dir(bed.disk()).process_group(0);
        command.args(["--", "/bin/sh", "-c", "echo $$; read line; echo $line"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let (launcher, program) = (Pid::from_child(&child), line.trim().parse().unwrap());
        kill_process_group(launcher, Signal::TSTP).unwrap();
        await_stopped(Pid::from_raw(program).unwrap());
        await_stopped(launcher);
        kill_process(launcher, Signal::CONT).unwrap();
        child.stdin.take().unwrap().write_all(b"continued\n").unwrap();
        said.read_line(&mut line).unwrap();
        assert!(line.ends_with("continued\n"), "{line}");
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn a_program_starts_with_the_ignored_signals_and_closed_descriptors_that_there_were() {
    let bed = Bed::new();
    let pool = bed.pool();
    // The C library handles the signals behind the first 32 itself.
    let show = "grep SigIgn /proc/self/status | tail -c 9; ls /proc/self/fd | head -n 2";
    for before in
        ["true", "trap '' PIPE", "trap '' CHLD", "exec <&-", "trap '' PIPE INT; exec <&- 2>&-"]
    {
        let shown = |runner: Runner<'_>| {
            let shell = runner.command("/bin/sh", bed.disk());
            let launch = shell.get_args().map(|arg| arg.to_str().unwrap()).collect::<Vec<_>>();
            let launch = [&[shell.get_program().to_str().unwrap()][..], &launch].concat().join(" ");
            let script = format!("{before}; exec {launch} -c '{show}'");
            let mut whole = std::process::Command::new("/bin/sh");
            succeed(whole.current_dir(bed.disk()).args(["-c", &script]))
        };
        assert_eq!(shown(Runner::Run(&pool)), shown(Runner::Plain), "{before}");
    }
}

/// Options of `run` with a pool, where the shell knows the pool.
const POOLED: &str = "--size=64M --pool $POOL";

/// A shell that does `before` and becomes the launcher of another shell, with `script`, by `run`
/// with the options `how`.
fn launched(bed: &Bed, before: &str, how: &str, script: &str) -> std::process::Command {
    preload_library();
    let program = env!("CARGO_BIN_EXE_tidegate");
    let all = format!("{before}; exec {program} run -q {how} -- sh -c '{script}'");
    let mut shell = std::process::Command::new("/bin/sh");
    shell.args(["-c", &all]).env("POOL", bed.pool()).current_dir(bed.disk());
    shell
}

/// The kernel does not tell a process that ignores SIGCHLD how its children ended.
#[test]
fn a_launcher_whose_parent_ignores_the_end_of_children_passes_the_status_on() {
    let bed = Bed::new();
    for how in [POOLED, "--volatile", "--volatile --sync-at-end"] {
        let output = launched(&bed, "trap '' CHLD", how, "exit 3").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*said), (Some(3), ""), "{how}");
    }
}

/// As systemd starts a service: the program takes sockets and the watchdog only if they are meant
/// for its own process.
#[test]
fn variables_that_name_the_launcher_s_process_name_the_program_s() {
    let show = "echo $((LISTEN_PID - $$)) $((WATCHDOG_PID - $$)) $OTHER";
    let variables = "export LISTEN_PID=$$ WATCHDOG_PID=$$ OTHER=kept";
    let bed = Bed::new();
    for how in [POOLED, "--volatile"] {
        assert_eq!(succeed(&mut launched(&bed, variables, how, show)), "0 0 kept\n");
    }
}

/// As on a disk that hangs: the supervisor does not answer.
#[test]
fn a_signal_after_the_program_s_end_ends_the_launcher() {
    let bed = Bed::new();
    preload_library();
    let mut command = tidegate();
    command.args(["run", "--size=64M", "--pool"]).arg(bed.pool()).current_dir(bed.disk());
    command.args(["--", "/bin/sh", "-c", "echo started; read line"]);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0; 8]).unwrap();
    let launcher = Pid::from_child(&child);
    let supervisor = process_tree::supervisor_of(&bed.pool(), launcher);
    kill_process(supervisor, Signal::STOP).unwrap();
    child.stdin.take().unwrap().write_all(b"end\n").unwrap();
    let status = loop {
        // The first ones may still be the program's.
        let _ = kill_process(launcher, Signal::TERM);
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    kill_process(supervisor, Signal::CONT).unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(status.code(), Some(143), "{said}");
    assert!(
        said.contains("interrupted: the log in ") && said.contains("tidegate recover"),
        "{said}"
    );
    process_tree::await_nobody_uses(&bed.pool());
}
