//! When a supervisor takes charge of a pool, and which launchers it welcomes: not behind a filter
//! that answers syncs, not from another PID namespace, and under whatever limits.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::bed::{Bed, Runner};
use crate::support::{preload_library, succeed, tidegate, tool};

/// Returns `tidegate run --volatile` of `tidegate` with `words` and the pool.
fn behind_a_filter(words: &[&str], pool: &Path) -> Command {
    let mut command = tidegate();
    command.args(["run", "--volatile=all", "--", env!("CARGO_BIN_EXE_tidegate")]);
    command.args(words).arg(pool);
    command
}

fn refused(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().expect("it starts");
    let stderr = String::from_utf8_lossy(&stderr).into_owned();
    assert!(!status.success(), "{}{stderr}", String::from_utf8_lossy(&stdout));
    stderr
}

#[test]
fn no_pool_is_opened_where_a_filter_answers_syncs() {
    preload_library();
    let bed = Bed::new();
    let pool = bed.pool();
    succeed(Runner::Run(&pool).command("true", bed.disk()).stdout(Stdio::null()));
    let refused = |words: &[&str], rest: &[&str]| {
        let message = refused(behind_a_filter(words, &pool).args(rest));
        assert!(message.contains("a filter of system calls answers the syncs"), "{message}");
    };
    refused(&["run", "--pool"], &["--", "true"]);
    refused(&["recover"], &[]);
    refused(&["flush"], &[]);
    succeed(tidegate().arg("recover").arg(&pool));
}

#[test]
fn a_launcher_of_another_pid_namespace_is_refused() {
    let bed = Bed::new();
    let pool = bed.pool();
    let mut first = Runner::Run(&pool).command("sh", bed.disk());
    first.args(["-c", "echo started; exec cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut first = first.spawn().expect("it starts");
    let mut started = [0; 8];
    std::io::Read::read_exact(first.stdout.as_mut().expect("it is piped"), &mut started)
        .expect("it starts");
    let mut second = tool("unshare", "util-linux");
    second.args(["--pid", "--fork", "--mount-proc", env!("CARGO_BIN_EXE_tidegate")]);
    let message = refused(second.args(["run", "--pool"]).arg(&pool).args(["--", "true"]));
    assert!(message.contains("in use by a run in another PID namespace"), "{message}");
    succeed(tidegate().args(["run", "--pool"]).arg(&pool).args(["--", "true"]));
    drop(first.stdin.take());
    assert!(first.wait().expect("it ends").success());
}

/// A shell under a limit on the size of files, without the right to remove it.
fn limited(script: &str) -> Command {
    let mut command = tool("setpriv", "util-linux");
    command.args([
        "--bounding-set=-sys_resource",
        "sh",
        "-c",
        script,
        env!("CARGO_BIN_EXE_tidegate"),
    ]);
    command
}

#[test]
fn a_limit_on_the_size_of_files_is_left_or_named() {
    let bed = Bed::new();
    let (pool, new) = (bed.pool(), bed.pool_dir().join("new"));
    let made = Runner::Run(&pool);
    succeed(made.command("true", bed.disk()).stdout(Stdio::null()));
    let script = "ulimit -Sf 1024; exec \"$0\" run --pool \"$1\" -- sh -c 'ulimit -f'";
    let printed = succeed(limited(script).arg(&pool));
    assert_eq!(printed, "1024\n", "the program's limit stays");
    let script = "ulimit -f 1024; exec \"$0\" run --size=64M --pool \"$1\" -- true";
    let message = refused(limited(script).arg(&pool));
    assert!(message.contains("ulimit -Hf"), "{message}");
    let message = refused(limited(script).arg(&new));
    assert!(message.contains("ulimit -f"), "{message}");
}
