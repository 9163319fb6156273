//! When a supervisor takes charge of a pool: not behind a filter that answers syncs.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::bed::{Bed, Runner};
use crate::support::{preload_library, succeed, tidegate};

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
