//! fio's own `pmemblk` engine, Debian's build, on Tidegate's libpmemblk.

use std::process::Command;

use crate::linked::{libraries, scratch, succeed};
use crate::pmemblk::{Driver, ORIGINAL};

#[test]
fn fio_verifies_what_it_writes_and_the_original_reads_the_pool() {
    let dir = scratch();
    let pool = dir.path().join("pool");
    let mut fio = Command::new("fio");
    // The file's name has the size of a block, and of the pool in MiB.
    fio.arg(format!("--filename={},4096,64", pool.display()));
    fio.args(["--name=verified", "--ioengine=pmemblk", "--thread=1", "--numjobs=2", "--direct=1"]);
    fio.args(["--rw=randwrite", "--bs=4k", "--size=20M", "--offset_increment=24M"]);
    fio.args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--loops=3"]);
    fio.env("LD_LIBRARY_PATH", libraries().join("pmemblk"));
    let shown = succeed(&mut fio);
    assert_eq!(shown.matches("err= 0").count(), 2, "{shown}");
    let maps = succeed(
        Command::new("ldd").arg(which("fio")).env("LD_LIBRARY_PATH", libraries().join("pmemblk")),
    );
    assert!(maps.contains("capi/pmemblk/libpmemblk.so.1"), "{maps}");
    let mut original = Driver::start(dir.path(), ORIGINAL);
    assert_eq!(original.ok(&format!("check {} 4096", pool.display())), 1);
}

fn which(program: &str) -> std::path::PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).map(|place| place.join(program));
    places.find(|file| file.exists()).expect("the Debian package fio")
}
