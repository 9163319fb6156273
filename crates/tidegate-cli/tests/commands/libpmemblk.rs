//! Pools of libpmemblk under every command that takes a pool: made and read by Debian's library,
//! served, checked and converted by Tidegate.

use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::nbd::Client;
use crate::pmemblk::{Driver, ORIGINAL};
use crate::support::{Server, ok, run, scratch};

/// A pool of 32 MiB with blocks of `block_bytes`, in which the original has written block 7.
fn pool_of_original(block_bytes: u32) -> (TempDir, String) {
    let dir = scratch();
    let pool = dir.path().join("pool").to_str().unwrap().to_owned();
    let mut original = Driver::start(dir.path(), ORIGINAL);
    original.ok(&format!("create {pool} {block_bytes} 33554432"));
    original.ok("write 7 70");
    original.ok("close");
    (dir, pool)
}

fn fails(args: &[&str]) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn serve(dir: &Path, pool: &str, work: impl FnOnce(&mut Client)) {
    let socket = dir.join("socket");
    let server = Server::start(Path::new(pool), &socket, &[]);
    work(&mut Client::connect(&socket).unwrap());
    drop(server);
}

fn read(client: &mut Client, block: u64) -> u8 {
    let data = client.read(block * 4096, 4096).unwrap();
    assert!(data.iter().all(|&byte| byte == data[0]), "block {block} is torn");
    data[0]
}

fn write(client: &mut Client, block: u64, byte: u8) {
    client.send_write(1, block * 4096, &[byte; 4096]).unwrap();
    assert_eq!(client.receive().unwrap(), (1, 0));
}

#[test]
fn a_pool_is_served_in_place_and_goes_back_to_the_original() {
    let (dir, pool) = pool_of_original(4096);
    assert!(ok(["check", &pool]).contains("no damage"));
    let info: Value = serde_json::from_str(&ok(["info", &pool, "--json"])).unwrap();
    assert_eq!(info["engine"], "btt");
    assert_eq!(info["btt"]["version"], "libpmemblk");
    assert!(ok(["stat", &pool]).contains("version libpmemblk"));
    serve(dir.path(), &pool, |client| {
        assert_eq!([7, 8].map(|block| read(client, block)), [70, 0]);
        write(client, 8, 80);
        write(client, 7, 71);
    });
    let mut original = Driver::start(dir.path(), ORIGINAL);
    assert_eq!(original.ok(&format!("check {pool} 4096")), 1);
    original.ok(&format!("open {pool} 0"));
    assert_eq!(["read 7", "read 8", "read 9"].map(|read| original.ok(read)), [71, 80, 0]);
    // The original's lock keeps every command away.
    assert!(fails(&["check", &pool]).contains("is in use"));
    assert!(fails(&["convert", &pool]).contains("is in use"));
}

#[test]
fn a_pool_that_the_original_never_wrote_is_empty() {
    let dir = scratch();
    let pool = dir.path().join("pool").to_str().unwrap().to_owned();
    let mut original = Driver::start(dir.path(), ORIGINAL);
    original.ok(&format!("create {pool} 4096 33554432"));
    let blocks = original.ok("blocks");
    original.ok("close");
    assert!(ok(["check", &pool]).contains("no damage"));
    let info: Value = serde_json::from_str(&ok(["info", &pool, "--json"])).unwrap();
    assert_eq!(info["blocks"], blocks);
    let url = format!("unix:{}", dir.path().join("socket").display());
    let refused = fails(&["serve", &pool, "--read-only", "--nbd", &url]);
    assert!(refused.contains("nothing was ever written"), "{refused}");
    serve(dir.path(), &pool, |client| assert_eq!(read(client, 3), 0));
    assert_eq!(original.ok(&format!("check {pool} 4096")), 1);
    original.ok(&format!("open {pool} 4096"));
    assert_eq!(original.ok("blocks"), blocks);
    original.ok("write 3 30");
}

#[test]
fn a_pool_is_converted_in_place() {
    let (dir, pool) = pool_of_original(4096);
    let file = std::fs::File::open(&pool).unwrap();
    let data = |file: &std::fs::File| {
        let mut data = vec![0; 16 << 20];
        file.read_exact_at(&mut data, 3 * 4096).unwrap();
        data
    };
    let before = data(&file);
    assert!(ok(["convert", &pool]).contains("version 1.1"));
    assert!(data(&file) == before, "no data moves");
    assert!(ok(["check", &pool]).contains("no damage"));
    serve(dir.path(), &pool, |client| assert_eq!([7, 8].map(|it| read(client, it)), [70, 0]));
    let mut original = Driver::start(dir.path(), ORIGINAL);
    assert_eq!(original.errno(&format!("open {pool} 0")), 22);
    assert!(fails(&["convert", &pool]).contains("nothing to convert"));
}

#[test]
fn what_cannot_be_done_with_a_pool_is_refused_with_the_reason() {
    let (dir, pool) = pool_of_original(1000);
    for engine in ["btt", "raw", "log", "cache"] {
        let refused = fails(&["create", &pool, "--engine", engine, "--size", "64M"]);
        assert!(
            refused.contains("already holds a libpmemblk pool, which can be served"),
            "{refused}"
        );
    }
    let refused = fails(&["convert", &pool]);
    assert!(refused.contains("1000 bytes") && refused.contains("512 or 4096"), "{refused}");
    let url = format!("unix:{}", dir.path().join("socket").display());
    let refused = fails(&["serve", &pool, "--nbd", &url]);
    assert!(refused.contains("1000 bytes") && refused.contains("power of two"), "{refused}");
    assert!(ok(["check", &pool]).contains("no damage"));
    let file = std::fs::File::options().write(true).open(&pool).unwrap();
    file.write_all_at(&[1], 1000).unwrap();
    let output = run(["check", &pool]);
    assert_eq!(output.status.code(), Some(1));
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(stdout.contains("libpmemblk pool: its checksum is"), "{stdout}");
}

#[test]
fn a_pool_that_tidegate_makes_is_the_originals() {
    let dir = scratch();
    let pool = dir.path().join("pool").to_str().unwrap().to_owned();
    ok(["create", &pool, "--engine", "btt", "--btt-version", "libpmemblk", "--size", "32M"]);
    let mut original = Driver::start(dir.path(), ORIGINAL);
    assert_eq!(original.ok(&format!("check {pool} 4096")), 1);
    original.ok(&format!("open {pool} 4096"));
    original.ok("write 5 50");
    original.ok("close");
    assert!(ok(["check", &pool]).contains("1 blocks written"));
}
