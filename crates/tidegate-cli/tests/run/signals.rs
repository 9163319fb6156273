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

#[test]
fn an_operation_blocks_no_signals_if_none_arrives() {
    let bed = Bed::new();
    let (pool, trace) = (bed.pool(), bed.pool_dir().join("trace"));
    let mut strace = traced(Runner::Run(&pool), bed.disk(), &trace);
    strace.arg(compiled("signals", &[])).args([".", "0"]);
    let calls = calls(strace, &trace);
    let count = |name| calls.get(name).copied().unwrap_or(0);
    // The syncs of 200 rounds are answered by the log; admission and start block signals.
    assert!(count("fdatasync") < 20, "{calls:?}");
    assert!(count("rt_sigprocmask") < 30, "{calls:?}");
}
