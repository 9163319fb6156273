//! Processes that give up rights, in the ways in which programs do it: they work as without
//! Tidegate, and nothing of the pool is mapped in them. A process that is killed where its numbers
//! are others', or its user is, holds nothing.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use crate::bed::{Bed, Runner, replay, transcript};
use crate::crash::Workers;
use crate::process_tree;
use crate::programs::{compiled, source};
use crate::support::{ok, scratch, succeed, tool};
use crate::traced::Traced;

/// A process covers a file, gives rights up while another of its threads writes, and goes on.
fn confined(way: &str) {
    let program = compiled("confined", &[]);
    let bed = Bed::new();
    let printed = bed.same(|runner, dir| {
        let mut command: Command = runner.command(&program, dir);
        command.arg(way).arg(bed.pool()).arg("/dev/shm/tidegate-");
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let was_mapped = !said.contains("mapped before 0");
        assert_eq!(was_mapped, matches!(runner, Runner::Run(_)), "{said}");
        assert_eq!(said.contains("confined gave up rights"), was_mapped, "{said}");
        format!("{}{}\n", String::from_utf8_lossy(&output.stdout), output.status)
    });
    assert_eq!(printed, "wrote 1, mapped 0\nexit status: 0\n", "{way}");
}

macro_rules! ways {
    ($($(#[$note:meta])* fn $test:ident() = $way:literal;)*) => {
        $($(#[$note])* #[test] fn $test() { confined($way); })*
    };
}

ways! {
    fn another_user() = "user";
    fn a_new_root() = "chroot";
    fn a_user_namespace() = "user-namespace";
    fn a_mount_namespace() = "mount-namespace";
    fn no_capabilities() = "capabilities";
    fn landlock() = "landlock";
    /// Another root and user, no new descriptors, and the filter of OpenSSH.
    fn a_filter_as_sshd_has_it() = "sshd";
    /// A filter for all threads that allows writes, syncs and little else.
    fn a_filter_as_browsers_have_it() = "renderer";
}

/// Returns the numbers of the system calls that the program makes behind its filter, plain.
fn calls_behind_the_filter(program: &Path, arguments: &[&str]) -> BTreeSet<String> {
    let dir = scratch();
    let traced = dir.path().join("traced");
    let mut command = tool("strace", "strace");
    command.args(["-f", "-n", "-o"]).arg(&traced).arg(program).args(arguments);
    succeed(command.current_dir(dir.path()));
    let lines = std::fs::read_to_string(traced).unwrap();
    let behind = lines.lines().skip_while(|line| !line.contains("PR_SET_NO_NEW_PRIVS")).skip(1);
    let number = |line: &str| Some(line.split_once('[')?.1.split_once(']')?.0.trim().to_owned());
    let numbers = behind.filter_map(number);
    numbers.filter(|number| number.bytes().all(|byte| byte.is_ascii_digit())).collect()
}

/// Returns a script that calls each function of the C library behind a filter that allows only the
/// function's own system calls. It prints the functions that fail.
pub(crate) fn script_of_filters() -> String {
    let program = compiled("one_call", &["-ldl"]);
    let names = succeed(&mut Command::new(&program));
    let mut script = String::from("umask 022\n");
    // The C library makes that by a thread of its own, whose calls differ from time to time.
    for name in names.lines().filter(|name| *name != "aio_write") {
        let calls = Vec::from_iter(calls_behind_the_filter(&program, &[name])).join(" ");
        let program = program.display();
        // Temporary files have random names.
        writeln!(
            script,
            "mkdir {name}; cd {name}; {program} {name} {calls} || echo {name} $?; rm -rf made*; cd .."
        )
        .expect("a string takes it");
    }
    script
}

/// Behind a filter that allows only the calls of the C library's function, each hook works.
#[test]
fn a_filter_for_each_function_alone() {
    let script = script_of_filters();
    let printed = Bed::new().same(|runner, dir| runner.script(&script, dir));
    assert_eq!(printed, "exit status: 0\n", "killed, or failed, without Tidegate");
}

/// A filter that kills for all but what the program itself calls kills for no call of the library.
fn filtered(way: &str) {
    let program = compiled("filtered", &["-ldl"]);
    let calls = calls_behind_the_filter(&program, &[way]);
    let printed = Bed::new().same(|runner, dir| {
        let mut command = runner.command(&program, dir);
        transcript(command.arg(way).args(&calls))
    });
    assert_eq!(printed, "ok\nexit status: 0\n", "{way}: {calls:?}");
}

macro_rules! filters {
    ($(fn $test:ident() = $way:literal;)*) => {
        $(#[test] fn $test() { filtered($way); })*
    };
}

filters! {
    fn a_filter_by_prctl() = "prctl";
    fn a_filter_by_number() = "number";
    fn a_filter_by_the_c_library_s_handle() = "handle";
    fn a_filter_of_one_thread() = "thread";
    fn a_filter_of_all_threads() = "all-threads";
    fn a_filter_that_a_forked_child_has() = "forked";
    fn a_filter_that_a_started_program_has() = "executed";
}

/// What is started in these ways could still open the pool. Without such a way it does.
#[test]
fn programs_that_are_started_without_rights() {
    for way in ["filter", "capabilities", "mount-namespace", "user-namespace"] {
        assert_eq!(mapped_by_programs(way), "0\n0\n0\n", "{way}");
    }
    assert_eq!(mapped_by_programs("none"), "1\n1\n1\n");
}

fn mapped_by_programs(way: &str) -> String {
    let bed = Bed::new();
    let pool = bed.pool();
    let mut command = Runner::Run(&pool).command("/usr/bin/python3", bed.disk());
    command.arg("-B").arg(source("heirs.py")).arg(way).arg(&pool);
    let printed = succeed(&mut command);
    process_tree::await_nobody_uses(&pool);
    printed
}

/// The child is killed when the kernel has entered its write and not begun it; its parent gets an
/// answer of the log again.
fn killed_in_a_write(way: &str) {
    let bed = Bed::new();
    let mut command = Runner::Run(&bed.pool()).command("/usr/bin/python3", bed.disk());
    command.arg("-B").arg(source("killed.py")).arg(way);
    let mut workers = Workers::spawn(command, &bed.pool());
    let child = workers.wait_for_word("child");
    let mut traced = Traced::start(&["kill"], &child);
    std::fs::write(bed.disk().join("go"), "").unwrap();
    traced.wait_for("killed");
    workers.wait_for_line("done");
    println!("{}", ok(["flush".as_ref(), bed.pool().as_os_str()]));
    workers.tree.kill();
    workers.collect(bed.pool_dir());
    replay(&bed.pool(), None);
    let found = std::fs::read(bed.disk().join("file")).unwrap();
    assert_eq!((found.len(), &found[..6]), (4096, &b"parent"[..]), "{way}");
}

#[test]
fn a_child_that_is_killed_in_a_write() {
    killed_in_a_write("fork");
}

#[test]
fn a_child_that_is_killed_in_a_write_as_another_user() {
    killed_in_a_write("user");
}

#[test]
fn a_child_that_is_killed_in_a_write_in_another_pid_namespace() {
    killed_in_a_write("pid-namespace");
}

#[test]
fn a_program_that_is_killed_in_a_write_in_another_pid_namespace() {
    killed_in_a_write("started");
}
