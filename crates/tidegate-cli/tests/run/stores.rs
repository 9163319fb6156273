//! Key-value stores: `RocksDB` by its `db_bench` and `ldb`, `LevelDB` by a small program
//! (programs/leveldb.c), and both, killed and started again, by programs/stress.c.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bed::{Bed, Runner, transcript};
use crate::crash::{Workers, recover, seed};
use crate::programs::compiled;
use crate::support::{setting, succeed, tool};

/// Counts and results; no times, and no listing of what has times in it.
const ROCKSDB: &str = r#"
bench() {
    db_bench --db=db --seed=1 --key_size=16 --value_size=100 --compression_type=none --threads=1 --use_existing_db=1 \
        "$@" >out 2>&1 || { cat out; exit 1; }
    grep -o '([0-9]* of [0-9]* found)' out || true
}
bench --benchmarks=fillrandom --num=1000 --sync=1 --use_existing_db=0
bench --benchmarks=overwrite --num=1000 --sync=1
bench --benchmarks=overwrite --num=20000 --sync=0 --write_buffer_size=500000
bench --benchmarks=compact,readrandom --num=20000
bench --benchmarks=updaterandom --num=2000 --use_direct_io_for_flush_and_compaction=1
bench --benchmarks=overwrite --num=500 --sync=1 --mmap_write=1
bench --benchmarks=overwrite --num=500 --sync=1 --threads=4
bench --benchmarks=readrandom --num=20000
ldb --db=db checkconsistency; ldb --db=db scan | wc -l; rm -rf db out
"#;

#[test]
fn rocksdb() {
    drop((tool("db_bench", "rocksdb-tools"), tool("ldb", "rocksdb-tools")));
    let printed = Bed::new().same(|runner, dir| runner.script(&format!("set -e\n{ROCKSDB}"), dir));
    assert!(printed.ends_with("exit status: 0\n"), "fails without Tidegate too:\n{printed}");
}

fn leveldb() -> PathBuf {
    compiled("leveldb", &["-lleveldb"])
}

#[test]
fn leveldb_fills_compacts_and_reads() {
    let printed = Bed::new().same(|runner, dir| {
        let printed = transcript(runner.command(leveldb(), dir).arg("db"));
        std::fs::remove_dir_all(dir.join("db")).expect("it was made");
        printed
    });
    assert!(printed.ends_with("exit status: 0\n"), "fails without Tidegate too:\n{printed}");
}

/// Kills threads that write to one store, and checks what is there, again and again.
fn survives_kills(program: &Path) {
    let (bed, mut random) = (Bed::new(), seed());
    let keys = random.below(1 << 30).to_string();
    for round in 0..setting("TIDEGATE_STORE_ROUNDS", 2) {
        let count = 1 + random.below(300);
        println!("round {round}: killed when the first writer has done {count} more");
        let mut work = Runner::Run(&bed.pool()).command(program, bed.disk());
        work.args(["work", "db", &keys]);
        let mut workers = Workers::spawn(work, &bed.pool());
        workers.wait_for("store.0", count);
        workers.tree.kill();
        let acks = std::fs::read_to_string(workers.collect(bed.pool_dir())).unwrap();
        recover(&bed.pool(), round);
        let mut verify = Command::new(program);
        let found = succeed(verify.args(["verify", "db", &keys]).current_dir(bed.disk()));
        for writer in ["store.0 ", "store.1 ", "store.2 "] {
            let (last, found) = (last_number(&acks, writer), last_number(&found, writer));
            println!("{writer}: {last:?} acknowledged, {found:?} found");
            assert!(found >= last, "{writer}: {last:?} was acknowledged, {found:?} is there");
        }
    }
}

/// The highest number that a writer has said.
fn last_number(said: &str, writer: &str) -> Option<u64> {
    said.lines().filter_map(|line| line.strip_prefix(writer)?.parse().ok()).max()
}

#[test]
fn leveldb_keeps_what_it_synced_over_kill_9() {
    survives_kills(&compiled("stress", &["-DSTORE=leveldb", "-lleveldb"]));
}

#[test]
fn rocksdb_keeps_what_it_synced_over_kill_9() {
    survives_kills(&compiled("stress", &["-DSTORE=rocksdb", "-lrocksdb"]));
}
