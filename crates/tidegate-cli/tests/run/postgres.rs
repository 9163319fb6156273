//! `PostgreSQL` 15: a server with a process for each connection, which are killed, as is the server
//! itself, and a crash of everything. pgbench's own invariants tell whether a transaction was lost
//! or done by half.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bed::{Bed, OtherUser, Runner, replay, transcript};
use crate::crash::Workers;
use crate::support::setting;

/// Where Debian has the server's programs.
const PROGRAMS: &str = "/usr/lib/postgresql/15/bin";

/// Functions for the scripts below.
const PRELUDE: &str = r#"
set -eu
export PATH="/usr/lib/postgresql/15/bin:$PATH" PGHOST="$PWD" PGUSER=tester PGDATABASE=postgres LC_ALL=C
start() { pg_ctl -D data -w -t 60 -l log start >/dev/null || { cat log; exit 1; }; }
make() {
    initdb -D data -A trust -U tester --no-instructions --encoding=UTF8 >/dev/null
    cat >> data/postgresql.conf <<END
listen_addresses = ''
unix_socket_directories = '$PWD'
max_wal_size = 64MB
min_wal_size = 32MB
checkpoint_timeout = 30s
shared_buffers = 16MB
dynamic_shared_memory_type = mmap # a server that is killed leaves nothing in /dev/shm
END
}
invariants() {
    psql -Atc "select (select sum(abalance) from pgbench_accounts) = b, (select sum(tbalance) from pgbench_tellers) = b,
        (select coalesce(sum(delta), 0) from pgbench_history) = b from (select sum(bbalance) as b from pgbench_branches) as s"
    psql -Atc "create extension if not exists amcheck; select count(bt_index_check(oid, true)) > 100 from pg_class where relkind = 'i' and relam = 403 and relpersistence = 'p'" 2>&1 | tail -n1
}
until_history_has() { until [ "$(psql -Atc 'select count(*) from pgbench_history')" -ge "$1" ]; do :; done; }
"#;

/// What a server is put through: single backends killed, the postmaster killed.
const KILLS: &str = r#"
make; start
pgbench -q -i -s 1 2>/dev/null
pgbench -n -c 4 -j 2 -t 300 2>/dev/null | grep -E '^(number of transactions actually|number of failed)'
invariants
for round in $(seq $ROUNDS); do
    before=$(psql -Atc 'select count(*) from pgbench_history')
    pgbench -n -c 4 -t 100000 >/dev/null 2>&1 & bench=$!
    until_history_has $((before + 200))
    until kill -9 "$(psql -Atc "select max(pid) from pg_stat_activity where query like 'UPDATE%' or query like 'END%'")" 2>/dev/null; do :; done
    wait $bench || echo 'pgbench noticed'
    until psql -Atqc 'select 1' >/dev/null 2>&1; do :; done
    invariants
    before=$(psql -Atc 'select count(*) from pgbench_history')
    pgbench -n -c 4 -t 100000 >/dev/null 2>&1 & bench=$!
    until_history_has $((before + 200))
    postmaster=$(head -n1 data/postmaster.pid); backends=$(pgrep -P "$postmaster")
    kill -9 "$postmaster"; wait $bench || echo 'pgbench noticed'
    for pid in $backends; do while kill -0 "$pid" 2>/dev/null; do sleep 0.02; done; done
    start; invariants
done
"#;

/// A checkpoint, and every way to stop.
const STOPS: &str = r"
psql -Atqc 'checkpoint' -c 'vacuum full' ; invariants
pg_ctl -D data -w -m fast stop >/dev/null; pg_controldata data | grep state
start; invariants; pg_ctl -D data -m immediate stop >/dev/null; start; invariants
";

const END: &str = r"
pg_ctl -D data -w stop >/dev/null
rm -rf data log .s*
";

/// A server does not run as root: the user that the package made does.
pub(crate) fn server_user() -> OtherUser {
    assert!(
        Path::new(PROGRAMS).is_dir(),
        "no {PROGRAMS}: install the Debian package postgresql-15"
    );
    OtherUser::new("postgres")
}

fn as_server_user(user: &OtherUser, runner: Runner<'_>, dir: &Path, script: &str) -> Command {
    let mut command = runner.command_as(user, "/bin/bash", dir);
    command.args(["-c", &format!("exec 2>&1\n{PRELUDE}\n{script}")]);
    command
}

fn lives_as_without(life: &str) {
    let (bed, user) = (Bed::new(), server_user());
    user.own(bed.pool_dir());
    let printed = bed.same_as(&user, |runner, dir| {
        user.own(dir);
        transcript(&mut as_server_user(&user, runner, dir, life))
    });
    assert!(printed.ends_with("exit status: 0\n"), "fails without Tidegate too:\n{printed}");
    assert!(
        !printed.contains("|f") && !printed.contains("f|"),
        "fails without Tidegate too:\n{printed}"
    );
}

#[test]
fn a_server_keeps_its_invariants_when_processes_are_killed() {
    lives_as_without(&format!("ROUNDS=1\n{KILLS}{END}"));
}

#[test]
#[cfg(feature = "soak")]
fn a_server_keeps_its_invariants_for_longer() {
    let rounds = setting("TIDEGATE_POSTGRES_ROUNDS", 3);
    lives_as_without(&format!("ROUNDS={rounds}\n{KILLS}{STOPS}{END}"));
}

/// Rows are acknowledged by a psql that says each number after its commit.
const ROWS: &str = r#"
make; start
psql -Atqc 'create table rows(n int primary key)'
pgbench -q -i -s 1 2>/dev/null
pgbench -n -c 2 -t 1000000 >/dev/null 2>&1 &
for n in $(seq 100000); do echo "insert into rows values($n);"; echo "\\! echo rows.0 $n"; done | psql -Atq
"#;

const AFTER: &str = r"
rm -f data/postmaster.pid .s*; start; invariants
psql -Atc 'select count(*), max(n) from rows'
pg_ctl -D data -w stop >/dev/null
";

/// Kills a server with `crash`, recovers with `recover`, starts it again, and counts.
pub(crate) fn server_survives(
    user: &OtherUser,
    pool: &Path,
    dir: &Path,
    crash: impl FnOnce(Workers) -> PathBuf,
) {
    user.own(dir);
    let command = as_server_user(user, Runner::Run(pool), dir, ROWS);
    let mut workers = Workers::spawn(command, pool);
    workers.wait_for("rows.0", 100);
    let acks = std::fs::read_to_string(crash(workers)).expect("it was written");
    let last: u64 = acks
        .lines()
        .filter_map(|line| line.strip_prefix("rows.0 ")?.parse().ok())
        .max()
        .expect("some were");
    let found = transcript(&mut as_server_user(user, Runner::Plain, dir, AFTER));
    println!("{last} rows acknowledged; {found}");
    let (count, max) = found
        .lines()
        .find_map(|line| {
            Some((
                line.split_once('|')?.0.parse::<u64>().ok()?,
                line.split_once('|')?.1.parse::<u64>().ok()?,
            ))
        })
        .unwrap_or_else(|| panic!("the server does not start again: {found}"));
    assert!(
        count >= last && max == count,
        "{last} rows were acknowledged, there are {count}, the last is {max}"
    );
    assert!(found.contains("t|t|t"), "pgbench's invariants do not hold: {found}");
}

#[test]
fn a_server_survives_kill_9_of_the_whole_tree() {
    let (bed, user) = (Bed::new(), server_user());
    user.own(bed.pool_dir());
    server_survives(&user, &bed.pool(), bed.disk(), |mut workers| {
        workers.tree.kill();
        let acks = workers.collect(bed.pool_dir());
        replay(&bed.pool(), Some(&user));
        acks
    });
}
