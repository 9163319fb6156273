//! System calls of a program under `run`, beside the same program without: a round makes so many
//! more and no others. A limit here rises only with a reason.

use crate::bed::{Bed, Runner};
use crate::kernel_path::{calls, traced};
use crate::support::tool;

/// Returns the system calls of a hundred transactions in a journal mode of `SQLite`.
fn calls_of_a_hundred(bed: &Bed, runner: Runner<'_>, mode: &str) -> usize {
    let trace = bed.pool_dir().join("trace");
    let total = |rows: usize| {
        let dir = bed.disk().join(format!("{mode}-{rows}"));
        std::fs::create_dir(&dir).unwrap();
        let mut sql =
            format!("pragma journal_mode={mode}; pragma synchronous=full; create table t(a);");
        sql += &"insert into t values('a row');".repeat(rows);
        let mut strace = traced(runner, &dir, &trace);
        strace.arg(tool("sqlite3", "sqlite3").get_program()).arg("my.db").arg(sql);
        let made = calls(strace, &trace).values().sum::<usize>();
        std::fs::remove_dir_all(dir).unwrap();
        made
    };
    total(140) - total(40)
}

#[test]
fn a_transaction_of_sqlite_makes_few_calls_more() {
    let bed = Bed::new();
    let pool = bed.pool();
    let mut beyond = Vec::new();
    for (mode, most) in [("delete", 28), ("truncate", 15), ("persist", 14), ("wal", 2)] {
        let plain = calls_of_a_hundred(&bed, Runner::Plain, mode);
        let run = calls_of_a_hundred(&bed, Runner::Run(&pool), mode);
        println!("{mode}: {run} calls in a hundred transactions, plain {plain}");
        if run > plain + 100 * most + 20 {
            beyond.push(format!("{mode}: {run}, plain {plain}"));
        }
    }
    assert!(beyond.is_empty(), "{beyond:?}");
}
