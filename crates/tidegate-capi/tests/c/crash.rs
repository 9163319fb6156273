//! Kills with -9 in the middle of writes, after which the other library opens the pool; and threads
//! that write one block at once.

use crate::linked::{our_libpmemblk, scratch};
use crate::pmemblk::{Driver, ORIGINAL};

const POOL_BYTES: u64 = 17 << 20;

/// The byte that the driver's write number `number` of a thread fills its block with.
fn byte_of(number: usize) -> i64 {
    i64::try_from(1 + number % 251).unwrap()
}

/// Asserts that a thread's blocks are those after `done` writes, or after one more.
fn assert_after(driver: &mut Driver, thread: usize, done: usize) {
    for slot in 0..64 {
        let found = driver.ok(&format!("read {}", 64 * thread + slot));
        let last = (0..done).rev().find(|number| number % 64 == slot);
        let expected = last.map_or(0, byte_of);
        let may_be_newer = done % 64 == slot && found == byte_of(done);
        assert!(found == expected || may_be_newer, "thread {thread} slot {slot}: {found}");
    }
}

fn kill_and_open(killed: &str, opener: &str, block_bytes: u32) {
    let dir = scratch();
    let pool = dir.path().join("pool").to_str().unwrap().to_owned();
    for writes in [1, 70, 3000, 20_000] {
        let _ = std::fs::remove_file(&pool);
        let mut driver = Driver::start(dir.path(), killed);
        driver.ok(&format!("create {pool} {block_bytes} {POOL_BYTES}"));
        let done = driver.storm(2, writes);
        let mut other = Driver::start(dir.path(), opener);
        assert_eq!(other.ok(&format!("check {pool} {block_bytes}")), 1);
        other.ok(&format!("open {pool} {block_bytes}"));
        for (thread, done) in done.into_iter().enumerate() {
            assert_after(&mut other, thread, done);
        }
    }
}

#[test]
fn the_original_opens_what_a_kill_of_ours_left() {
    kill_and_open(&our_libpmemblk(), ORIGINAL, 4096);
}

#[test]
fn ours_opens_what_a_kill_of_the_original_left() {
    kill_and_open(ORIGINAL, &our_libpmemblk(), 512);
}

#[test]
fn two_threads_write_one_block_and_a_third_reads_it_whole() {
    for block_bytes in [512, 1000, 4096, 65_536] {
        let dir = scratch();
        let pool = dir.path().join("pool").to_str().unwrap().to_owned();
        let mut driver = Driver::start(dir.path(), &our_libpmemblk());
        driver.ok(&format!("create {pool} {block_bytes} {}", 2 * POOL_BYTES));
        driver.ok("duel 3000");
        driver.ok("close");
        assert_eq!(driver.ok(&format!("check {pool} {block_bytes}")), 1);
    }
}
