//! One file in the hands of both libraries, in turn.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::linked::{our_libpmemblk, scratch};
use crate::pmemblk::{Driver, ORIGINAL};

const POOL_BYTES: u64 = 17 << 20;
const BLOCKS: u64 = 12;

/// A step of a program.
#[derive(Debug, Clone, Copy)]
enum Step {
    Write(u64, u8),
    Zero(u64),
    Error(u64),
    /// Goes on with the other library; the flag: this one is killed with the pool open.
    Switch(bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..BLOCKS, 1..=255_u8).prop_map(|(block, byte)| Step::Write(block, byte)),
        2 => (0..BLOCKS).prop_map(Step::Zero),
        1 => (0..BLOCKS).prop_map(Step::Error),
        2 => any::<bool>().prop_map(Step::Switch),
    ];
    proptest::collection::vec(step, 1..80)
}

/// The libraries, ours first.
fn both() -> [String; 2] {
    [our_libpmemblk(), ORIGINAL.to_owned()]
}

/// Asserts that a reader finds `model`, whose blocks in error are `None`.
fn assert_blocks(driver: &mut Driver, model: &BTreeMap<u64, Option<u8>>) {
    for block in 0..BLOCKS {
        let found = driver.call(&format!("read {block}"));
        match model.get(&block).copied().unwrap_or(Some(0)) {
            Some(byte) => assert_eq!(found, Ok(byte.into()), "block {block}"),
            None => assert_eq!(found.map_err(|(errno, _)| errno), Err(libc::EIO), "block {block}"),
        }
    }
}

fn play(block_bytes: u32, creator: usize, steps: &[Step]) {
    let dir = scratch();
    let pool = dir.path().join("pool").to_str().unwrap().to_owned();
    let (libraries, mut turn) = (both(), creator);
    let mut model = BTreeMap::new();
    let mut driver = Driver::start(dir.path(), &libraries[turn]);
    driver.ok(&format!("create {pool} {block_bytes} {POOL_BYTES}"));
    let blocks = driver.ok("blocks");
    for step in steps {
        match *step {
            Step::Write(block, byte) => {
                driver.ok(&format!("write {block} {byte}"));
                model.insert(block, Some(byte));
            }
            Step::Zero(block) => {
                driver.ok(&format!("zero {block}"));
                model.insert(block, Some(0));
            }
            Step::Error(block) => {
                driver.ok(&format!("error {block}"));
                model.insert(block, None);
            }
            Step::Switch(killed) => {
                if !killed {
                    driver.ok("close");
                }
                drop(driver);
                turn = 1 - turn;
                driver = Driver::start(dir.path(), &libraries[turn]);
                assert_eq!(driver.ok(&format!("check {pool} {block_bytes}")), 1);
                driver.ok(&format!("open {pool} {block_bytes}"));
                assert_eq!(driver.ok("blocks"), blocks);
                assert_blocks(&mut driver, &model);
            }
        }
    }
    assert_blocks(&mut driver, &model);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn both_libraries_find_each_others_writes(
        steps in steps(),
        creator in 0..2_usize,
        block_bytes in prop_oneof![Just(512_u32), Just(520), Just(1000), Just(4096), Just(9000)],
    ) {
        play(block_bytes, creator, &steps);
    }
}

/// A file with other bytes behind its first page of zeroes: the library leaves most of them.
#[test]
fn a_pool_that_was_made_over_an_old_file_is_read() {
    for maker in [0, 1] {
        let dir = scratch();
        let pool = dir.path().join("pool").to_str().unwrap().to_owned();
        let mut bytes = vec![0xA5; usize::try_from(POOL_BYTES).unwrap()];
        bytes[..4096].fill(0);
        std::fs::write(&pool, bytes).unwrap();
        let libraries = both();
        let mut driver = Driver::start(dir.path(), &libraries[maker]);
        driver.ok(&format!("create {pool} 512 0"));
        assert_eq!(driver.ok("read 3"), 0);
        driver.ok("write 3 30");
        driver.ok("close");
        let mut other = Driver::start(dir.path(), &libraries[1 - maker]);
        assert_eq!(other.ok(&format!("check {pool} 512")), 1);
        other.ok(&format!("open {pool} 512"));
        assert_eq!(["read 3", "read 4"].map(|read| other.ok(read)), [30, 0]);
        other.ok("write 4 40");
        other.ok("close");
        driver.ok(&format!("open {pool} 512"));
        assert_eq!(["read 3", "read 4"].map(|read| driver.ok(read)), [30, 40]);
    }
}

/// Each error has the number that a program may look for.
#[test]
fn errors_have_the_numbers_of_the_original() {
    let numbers = |library: &str| {
        let dir = scratch();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let (pool, text, none) = (path("pool"), path("text"), path("none"));
        std::fs::write(&text, vec![b'a'; 9 << 20]).unwrap();
        let mut driver = Driver::start(dir.path(), library);
        driver.ok(&format!("create {pool} 1000 {POOL_BYTES}"));
        let mut open = Driver::start(dir.path(), library);
        let busy = ["open", "check"].map(|it| open.errno(&format!("{it} {pool} 0")));
        let outside = ["read -1", "write -1 3", "zero -1", "error -1", "read 99999999"];
        let outside = outside.map(|it| driver.errno(it));
        driver.ok("error 5");
        let lost = driver.errno("read 5");
        driver.ok("close");
        let commands = [
            format!("open {pool} 512"),
            format!("check {pool} 512"),
            format!("open {none} 0"),
            format!("check {none} 0"),
            format!("open {text} 0"),
            format!("check {text} 0"),
            format!("create {pool} 512 {POOL_BYTES}"),
            format!("create {text} 512 0"),
            format!("create {none} 0 {POOL_BYTES}"),
            format!("create {none} 512 1000000"),
            format!("create {none} 99999999 {POOL_BYTES}"),
            format!("create {none} 99999999999 {POOL_BYTES}"),
            format!("open {} 0", dir.path().display()),
        ];
        let others = commands.map(|command| (driver.errno(&command), command.replace(&pool, "")));
        assert!(!std::path::Path::new(&none).exists(), "a failed create leaves no file");
        let others = others
            .map(|(errno, command)| (errno, command.replace(dir.path().to_str().unwrap(), "")));
        (busy, outside, lost, others)
    };
    assert_eq!(numbers(&our_libpmemblk()), numbers(ORIGINAL));
}
