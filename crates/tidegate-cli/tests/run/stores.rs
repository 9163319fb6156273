//! Key-value stores: `RocksDB` by its `db_bench` and `ldb`, `LevelDB` by a small program (programs/leveldb.c).

use std::path::PathBuf;
use std::sync::OnceLock;

use crate::bed::{Bed, replay, transcript};
use crate::crash::Workers;
use crate::programs::compiled;
use crate::support::{succeed, tool};

/// Counts and results; no times, and no listing of what has times in it.
const ROCKSDB: &str = r#"
bench() {
    db_bench --db=db --seed=1 --key_size=16 --value_size=100 --compression_type=none --threads=1 --use_existing_db=1 \
        "$@" >out 2>&1 || { cat out; exit 1; }
    grep -o '([0-9]* of [0-9]* found)' out || true
}
bench --benchmarks=fillrandom --num=3000 --sync=1 --use_existing_db=0
bench --benchmarks=overwrite --num=3000 --sync=1
bench --benchmarks=overwrite --num=20000 --sync=0 --write_buffer_size=500000
bench --benchmarks=compact,readrandom --num=20000
bench --benchmarks=updaterandom --num=2000 --use_direct_io_for_flush_and_compaction=1
bench --benchmarks=overwrite --num=2000 --sync=1 --mmap_write=1
bench --benchmarks=overwrite --num=2000 --sync=1 --threads=4
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
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    compiled(&PROGRAM, "leveldb", &["-lleveldb"])
}

#[test]
fn leveldb_fills_compacts_and_reads() {
    let printed = Bed::new().same(|runner, dir| {
        let printed = transcript(runner.command(leveldb(), dir).args(["session", "db"]));
        std::fs::remove_dir_all(dir.join("db")).expect("it was made");
        printed
    });
    assert!(printed.ends_with("exit status: 0\n"), "fails without Tidegate too:\n{printed}");
}

#[test]
fn leveldb_keeps_what_it_synced_over_kill_9() {
    let bed = Bed::new();
    let script = format!("exec {} work db", leveldb().display());
    let mut workers = Workers::start_script(&bed.pool(), bed.disk(), &script);
    workers.wait_for("leveldb.0", 2000);
    workers.tree.kill();
    let acks = std::fs::read_to_string(workers.collect(bed.disk())).unwrap();
    replay(&bed.pool(), None);
    let last = acks
        .lines()
        .last()
        .and_then(|line| line.strip_prefix("leveldb.0 "))
        .expect("it acknowledges");
    print!(
        "{}",
        succeed(
            tool("env", "coreutils")
                .arg(leveldb())
                .args(["verify", "db", last])
                .current_dir(bed.disk())
        )
    );
}
