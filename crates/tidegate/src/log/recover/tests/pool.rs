//! A real log pool, brought into real files.

use std::fs::{self, File};
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use rustix::io::Errno;

use super::test_files::{TestFiles, Trouble};
use crate::log::recover::source::{Proving, is_proved, plan_hastily};
use crate::log::recover::{
    ApplyOptions, Content, Extent, FileSystem, LocalFiles, LogData, Outcome, apply, identity_of,
    plan_pool, recover_pool,
};
use crate::log::{
    CONTROL_BYTES, Definition, FileKey, Log, LogOptions, LogPool, RecordKind, Scanner, Ticket,
    create,
};
use crate::pmem::{Region, SharedMemory};

fn start(region: &Arc<Region>) -> Log {
    let pool = LogPool::open(Arc::clone(region)).expect("the pool opens");
    let all = pool.ring_bytes();
    let control = SharedMemory::anonymous(CONTROL_BYTES).expect("a little memory can be had");
    Log::start(pool, control, all).expect("the log starts")
}

/// Logs an operation on a new file, which is made and removed again as if a crash had lost it.
fn lose(log: &Log, path: &Path, operation: impl FnOnce(&mut Ticket<'_>)) {
    let file = File::create_new(path).expect("nothing is there");
    fs::remove_file(path).expect("a file can be removed");
    log_of(log, &file, path, true, operation);
}

/// Logs an operation on a file that is there.
fn see(log: &Log, path: &Path, operation: impl FnOnce(&mut Ticket<'_>)) {
    let file = File::open(path).expect("it is there");
    log_of(log, &file, path, false, operation);
}

fn log_of(
    log: &Log,
    file: &File,
    path: &Path,
    born: bool,
    operation: impl FnOnce(&mut Ticket<'_>),
) {
    let stat = file.metadata().expect("an open file has metadata");
    let identity = identity_of(file).expect("the file system has handles");
    let key = FileKey { device: stat.dev(), inode: stat.ino(), identity };
    let guard = log.lock(log.entry_for(&key).expect("the table has room")).expect("it is free");
    let mut ticket = guard.begin().expect("a slot is free");
    let definition = Definition {
        identity,
        device: key.device,
        inode: key.inode,
        mode: stat.mode(),
        uid: stat.uid(),
        gid: stat.gid(),
        born,
        path: path.as_os_str().as_bytes(),
    };
    ticket.define(&definition).expect("the log has room");
    operation(&mut ticket);
}

fn recover(region: &Arc<Region>) -> Outcome {
    recover_with(region, &LocalFiles).expect("the log has something")
}

fn recover_with(region: &Arc<Region>, files: &impl FileSystem) -> Option<Outcome> {
    let pool = LogPool::open(Arc::clone(region)).expect("the pool opens");
    let recovered = recover_pool(&pool, files, 4, &|_| ()).expect("memory can be read");
    recovered.map(|recovered| {
        assert_eq!(recovered.unreadable_bytes, 0);
        recovered.outcome
    })
}

/// Whether a hasty plan, and what it copies, is found whole.
fn is_whole_in_haste(pool: &LogPool) -> bool {
    let Ok(Some((plan, _))) = plan_hastily(pool) else { return false };
    let extents = plan.files().iter().flat_map(|file| &file.extents);
    let can_be_copied = |extent: &Extent| match extent.content {
        Content::Zero => true,
        Content::Log(position) => {
            let mut bytes = vec![0; usize::try_from(extent.bytes()).expect("it is short")];
            Proving(pool).read(position, &mut bytes).is_ok()
        }
    };
    is_proved(pool, &plan, 1) && extents.into_iter().all(can_be_copied)
}

/// By a plan of records that were all looked at before.
fn recover_with_care(region: &Arc<Region>) -> Outcome {
    let pool = LogPool::open(Arc::clone(region)).expect("the pool opens");
    let (plan, unreadable_bytes) = plan_pool(&pool).expect("memory can be read");
    assert_eq!(unreadable_bytes, 0);
    let options = ApplyOptions { pool: pool.superblock().uuid, workers: 4 };
    apply(&plan, &pool, &LocalFiles, options, &|_| (), &mut |_| Ok(()))
}

#[test]
fn a_pool_gives_back_what_the_files_lost() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let region = Arc::new(Region::anonymous(8 << 20).expect("a little memory can be had"));
    create(&region, &LogOptions::default()).expect("the pool can be made");
    let log = start(&region);
    let large: Vec<u8> = (0..3_000_000_u32).map(|byte| byte.to_le_bytes()[1]).collect();
    lose(&log, &folder.path().join("large"), |ticket| {
        for (number, part) in large.chunks(700_000).enumerate() {
            ticket.write(number as u64 * 700_000, &[IoSlice::new(part)]).expect("there is room");
        }
    });
    let (temp, name) = (folder.path().join("temp"), folder.path().join("new/name"));
    lose(&log, &temp, |ticket| {
        ticket.write(10, &[IoSlice::new(b"more "), IoSlice::new(b"parts")]).expect("there is room");
        ticket.zero(12, 2).expect("there is room");
        ticket.set_size(18).expect("there is room");
        let (from, to) = (temp.as_os_str().as_bytes(), name.as_os_str().as_bytes());
        ticket.rename(from, to, 0).expect("there is room");
    });
    for _ in 0..2 {
        let outcome = recover(&region);
        assert!(outcome.is_complete(), "{:?}", outcome.failures);
        assert!(fs::read(folder.path().join("large")).expect("it is there") == large);
        assert_eq!(fs::read(&name).expect("it is there"), b"\0\0\0\0\0\0\0\0\0\0mo\0\0 par");
        assert!(!temp.exists());
    }
    let inode = || fs::metadata(&name).expect("it is there").ino();
    let before = inode();
    assert_eq!(recover(&region).files_created, 0);
    assert_eq!(inode(), before);
    // A log that is started anew has nothing more to say.
    drop(start(&region));
    let pool = LogPool::open(Arc::clone(&region)).expect("the pool opens");
    assert!(plan_pool(&pool).expect("memory can be read").0.is_empty());
}

/// A pool of `mib`, made.
fn made(mib: u64) -> Arc<Region> {
    let region = Arc::new(Region::anonymous(mib << 20).expect("a little memory can be had"));
    create(&region, &LogOptions::default()).expect("the pool can be made");
    region
}

#[test]
fn torn_payloads_are_not_part_of_the_plan_however_large_the_log_is() {
    for mib in [4_u64, 40] {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let region = made(mib);
        let log = start(&region);
        let (path, other) = (folder.path().join("file"), folder.path().join("other"));
        let block = vec![7; 64 << 10];
        let blocks = mib * 12;
        let mut torn = Vec::new();
        lose(&log, &path, |ticket| {
            for number in 0..blocks {
                let position = ticket.write(number * 65536, &[IoSlice::new(&block)]);
                let position = position.expect("there is room");
                torn.extend((number % 50 == 20).then_some(position));
            }
            let linked = ticket.link(other.as_os_str().as_bytes()).expect("there is room");
            torn.push(linked);
        });
        for position in &torn {
            let at = log.pool().region_offset(*position) + 64;
            region.write(at, b"torn").expect("memory can be written");
        }
        let (plan, unreadable_bytes) = plan_pool(log.pool()).expect("memory can be read");
        let lost = torn.len() as u64 - 1;
        assert!(lost > 0 && unreadable_bytes == 0);
        assert_eq!(plan.data_bytes(), (blocks - lost) * 65536);
        assert_eq!(plan.files()[0].names.len(), 1, "the link is not whole");
        assert_eq!(plan.findings().total(), 0);
    }
}

#[test]
fn a_large_file_gets_each_byte_whatever_fails_on_the_way() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let region = made(24);
    let log = start(&region);
    let path = folder.path().join("file");
    let (blocks, block_bytes) = (4096_u64, 4096_u64);
    // Every 64th block is a hole, and their order is none.
    let is_hole = |block: u64| block % 64 == 63;
    let content = |block: u64| [block.to_le_bytes(), (!block).to_le_bytes()].concat().repeat(256);
    lose(&log, &path, |ticket| {
        for block in (0..blocks).map(|number| number * 619 % blocks).filter(|it| !is_hole(*it)) {
            let bytes = content(block);
            ticket.write(block * block_bytes, &[IoSlice::new(&bytes)]).expect("there is room");
        }
    });
    let quiet = TestFiles::new(Trouble::None);
    assert!(recover_with(&region, &quiet).is_some_and(|outcome| outcome.is_complete()));
    let expected: Vec<u8> = (0..blocks - 1)
        .flat_map(|block| if is_hole(block) { vec![0; 4096] } else { content(block) })
        .collect();
    assert!(fs::read(&path).expect("it is there") == expected);
    let all = quiet.operations();
    assert!(all > 30, "there are too few operations to fail");
    for at in (0..all).step_by(7) {
        fs::write(&path, "").expect("it can be emptied");
        let failing = TestFiles::new(Trouble::FailAt(at, Errno::NOSPC));
        // That it ends is all that is wanted here: a file that was not written is one that is not complete.
        let outcome = recover_with(&region, &failing).expect("the log has something");
        let whole = fs::read(&path).is_ok_and(|found| found == expected);
        assert!(whole || !outcome.is_complete(), "{at}: {:?}", outcome.failures);
        assert!(recover(&region).is_complete());
        assert!(fs::read(&path).expect("it is there") == expected, "{at}");
    }
}

#[derive(Debug, Clone)]
enum Change {
    /// The last one: where a byte of the payload is changed.
    Write(u64, usize, Option<usize>),
    Zero(u64, u64),
    SetSize(u64),
    Retire,
}

/// Changes of a file in an order that is none.
fn changes() -> impl Strategy<Value = Vec<Change>> {
    let range = || (0..9000_u64, 1..5000_usize);
    let torn = proptest::option::weighted(0.1, any::<proptest::sample::Index>());
    let write = (range(), torn).prop_map(|((offset, len), torn)| {
        Change::Write(offset, len, torn.map(|torn| torn.index(len)))
    });
    let change = prop_oneof![
        5 => write,
        1 => range().prop_map(|(offset, len)| Change::Zero(offset, len as u64)),
        1 => range().prop_map(|(size, _)| Change::SetSize(size)),
        1 => Just(Change::Retire),
    ];
    proptest::collection::vec(change, 1..10)
}

/// Logs them.
fn make(ticket: &mut Ticket<'_>, region: &Region, log: &Log, changes: &[Change]) {
    for (number, change) in (1..).zip(changes) {
        match *change {
            Change::Zero(offset, len) => ticket.zero(offset, len),
            Change::SetSize(size) => ticket.set_size(size),
            Change::Retire => ticket.retire(),
            Change::Write(offset, len, torn) => {
                let written = ticket.write(offset, &[IoSlice::new(&vec![number; len])]);
                if let (Ok(position), Some(torn)) = (&written, torn) {
                    let at = log.pool().region_offset(*position) + 64 + torn as u64;
                    region.write(at, b"~").expect("memory can be written");
                }
                written
            }
        }
        .expect("there is room");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_copying_finds_torn_changes_no_file_that_care_would_not(
        files in proptest::array::uniform3(changes()),
    ) {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let paths = ["old", "new", "newer"].map(|name| folder.path().join(name));
        let reset = || {
            fs::write(&paths[0], [9; 4000]).expect("it can be written");
            paths[1..].iter().for_each(|path| drop(fs::remove_file(path)));
        };
        let content = || paths.each_ref().map(|path| fs::read(path).ok());
        let region = made(1);
        let log = start(&region);
        reset();
        see(&log, &paths[0], |ticket| make(ticket, &region, &log, &files[0]));
        for (path, changes) in paths[1..].iter().zip(&files[1..]) {
            lose(&log, path, |ticket| make(ticket, &region, &log, changes));
        }
        let is_torn = |change: &Change| matches!(change, Change::Write(_, _, Some(_)));
        // Else it would be slow.
        prop_assert!(is_whole_in_haste(log.pool()) || files.iter().flatten().any(is_torn));
        let careful = recover_with_care(&region);
        let expected = content();
        reset();
        let hasty = recover_with(&region, &LocalFiles);
        prop_assert_eq!(careful.is_complete(), hasty.is_none_or(|hasty| hasty.is_complete()));
        prop_assert!(content() == expected);
    }
}

#[test]
fn data_that_newer_data_hides_is_not_read() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (region, path) = (made(1), folder.path().join("file"));
    let log = start(&region);
    lose(&log, &path, |ticket| {
        for data in [[1; 4096], [2; 4096]] {
            ticket.write(0, &[IoSlice::new(&data)]).expect("there is room");
        }
    });
    let quiet = TestFiles::new(Trouble::None);
    assert!(recover_with(&region, &quiet).is_some_and(|outcome| outcome.is_complete()));
    let once = quiet.operations();
    let pool = LogPool::open(Arc::clone(&region)).expect("the pool opens");
    let tail = pool.tail().expect("it can be read");
    let first = Scanner::new(&pool, tail, u64::MAX)
        .find(|header| header.kind == RecordKind::Write)
        .expect("it was written");
    let tear = |position| {
        let at = pool.region_offset(position) + 64;
        region.write(at, b"torn").expect("memory can be written");
    };
    // The size is the first one's to say: it is looked at.
    let plan = plan_pool(&pool).expect("memory can be read").0;
    assert_eq!(plan.unproved, [first.position]);
    tear(first.position + first.record_bytes());
    fs::remove_file(&path).expect("it is there");
    let torn = TestFiles::new(Trouble::None);
    assert!(recover_with(&region, &torn).is_some_and(|outcome| outcome.is_complete()));
    assert!(fs::read(&path).expect("it is there") == [1; 4096]);
    assert!(torn.operations() > once, "a hasty plan was tried first");
}

#[test]
fn long_records_are_looked_at_before_a_file_is_touched() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (region, path) = (made(24), folder.path().join("file"));
    let log = start(&region);
    let (old, new) = (vec![1; 3 << 20], vec![2; 2 << 20]);
    lose(&log, &path, |ticket| {
        ticket.write(0, &[IoSlice::new(&old)]).expect("there is room");
        let torn = ticket.write(1 << 20, &[IoSlice::new(&new)]).expect("there is room");
        region.write(log.pool().region_offset(torn) + 99, b"torn").expect("memory can be written");
    });
    assert!(recover(&region).is_complete());
    assert!(fs::read(&path).expect("it is there") == old);
}
