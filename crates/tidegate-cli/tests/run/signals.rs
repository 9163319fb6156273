//! Programs that handle signals: each signal is handled once, as without Tidegate, and an operation
//! of the log makes no system call for that if no signal arrives.

use crate::bed::{Bed, Runner};
use crate::kernel_path::{calls, traced};
use crate::programs::compiled;
use crate::support::succeed;

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
