//! Flipped bits of what the log says of itself: no number on the medium changes in silence.

use std::io::IoSlice;
use std::sync::Arc;

use crate::device::memory::MemoryDevice;
use crate::device::{BlockDeviceExt, WriteFlags};
use crate::log::device::{Binding, LogDevice, LogDeviceError, LogDeviceOptions};
use crate::log::engine::LogEngine;
use crate::log::pool::layout::{
    COPY_DISTANCE, LIMIT_OFFSET, SECOND_HEADER_OFFSET, SESSION_OFFSET, TAIL_OFFSET, position_word,
};
use crate::log::recover::{FilePlan, Operation, plan_pool};
use crate::log::tests::{definition, key, log};
use crate::log::*;
use crate::pmem::flips::scrambled;
use crate::pmem::{Region, RegionOptions, flips};
use crate::tier::{Checked, Engine};

const POOL_BYTES: u64 = 256 << 10;

fn pool_bytes() -> (Vec<u8>, u64) {
    let region = Arc::new(Region::anonymous(POOL_BYTES).unwrap());
    let base = create(&region, &LogOptions::default()).unwrap().data_offset;
    let pool = LogPool::open(Arc::clone(&region)).unwrap();
    pool.set_limit(pool.limit().unwrap() + 4096).unwrap();
    pool.set_session([7; 16]).unwrap();
    let mut bytes = vec![0; usize::try_from(POOL_BYTES).unwrap()];
    region.read(0, &mut bytes).unwrap();
    (bytes, base)
}

fn region_of(bytes: &[u8]) -> Region {
    let region = Region::anonymous(bytes.len() as u64).unwrap();
    region.write(0, bytes).unwrap();
    region
}

/// What the pool says, if it is opened.
fn said(bytes: &[u8]) -> Result<(u64, u64, Option<[u8; 16]>), LogError> {
    let pool = LogPool::open(Arc::new(region_of(bytes)))?;
    Ok((pool.tail()?, pool.limit()?, pool.session()?))
}

fn checked(region: Region, repair: bool) -> Checked {
    LogEngine.check(region, repair, &mut |_| ()).unwrap()
}

#[test]
fn each_flipped_bit_of_header_tail_limit_and_session_is_found_and_changes_nothing() {
    let (mut bytes, base) = pool_bytes();
    let whole = said(&bytes).unwrap();
    assert_eq!(checked(region_of(&bytes), false).faults, 0);
    let places = [(0, 64), (TAIL_OFFSET, 8), (LIMIT_OFFSET, 8), (SESSION_OFFSET, 24)];
    for (offset, len) in places {
        let copy = if offset == 0 { SECOND_HEADER_OFFSET } else { COPY_DISTANCE };
        for bit in (0..len * 8).chain(copy * 8..(copy + len) * 8) {
            let at = usize::try_from(base + offset + bit / 8).unwrap();
            bytes[at] ^= 1 << (bit % 8);
            assert_eq!(said(&bytes).unwrap(), whole, "bit {bit} at {offset}");
            assert_eq!(checked(region_of(&bytes), false).faults, 1, "bit {bit} at {offset}");
            assert_eq!(checked(region_of(&bytes), true).faults, 0, "bit {bit} at {offset}");
            bytes[at] ^= 1 << (bit % 8);
        }
    }
}

#[test]
fn a_position_that_is_lost_in_both_copies_is_found_again_where_that_is_proved() {
    let (bytes, base) = pool_bytes();
    let (tail, limit, _) = said(&bytes).unwrap();
    let lose = |region: &Region, offset: u64| {
        for copy in [0, COPY_DISTANCE] {
            region.store_u64(base + offset + copy, 5).unwrap();
        }
    };
    let ring_bytes = LogPool::open(Arc::new(region_of(&bytes))).unwrap().ring_bytes();
    // No record is left, so the tail is the limit; and no record is more than a lap behind the
    // tail.
    for (offset, found) in
        [(TAIL_OFFSET, (limit, limit)), (LIMIT_OFFSET, (tail, tail + ring_bytes))]
    {
        let region = region_of(&bytes);
        lose(&region, offset);
        let region = Arc::new(region);
        assert!(matches!(LogPool::open(Arc::clone(&region)), Err(LogError::Position { .. })));
        let pool = LogPool::open_damaged(Arc::clone(&region)).unwrap();
        assert_eq!(pool.restore_positions().unwrap(), 1);
        let pool = LogPool::open(region).unwrap();
        assert_eq!((pool.tail().unwrap(), pool.limit().unwrap()), found);
    }
    let region = region_of(&bytes);
    lose(&region, TAIL_OFFSET);
    lose(&region, LIMIT_OFFSET);
    assert_eq!(checked(region, true).faults, 2, "nothing proves either");
}

#[test]
fn a_pool_of_the_former_format_is_raised_when_it_is_used() {
    let (bytes, base) = pool_bytes();
    let region = Arc::new(region_of(&bytes));
    let (tail, limit, _) = said(&bytes).unwrap();
    for (offset, position) in [(TAIL_OFFSET, tail), (LIMIT_OFFSET, limit)] {
        region.store_u64(base + offset, position).unwrap();
        region.store_u64(base + offset + COPY_DISTANCE, 0).unwrap();
    }
    let pool = LogPool::open(Arc::clone(&region)).unwrap();
    assert_eq!((pool.tail().unwrap(), pool.limit().unwrap()), (tail, limit));
    assert_eq!(pool.position_faults().unwrap(), []);
    let ring_bytes = pool.ring_bytes();
    let memory = crate::pmem::SharedMemory::anonymous(CONTROL_BYTES).unwrap();
    Ring::start(pool, memory, ring_bytes).map(Log::over).unwrap();
    for offset in [TAIL_OFFSET, LIMIT_OFFSET, TAIL_OFFSET + COPY_DISTANCE] {
        assert_eq!(region.load_u64(base + offset).unwrap(), position_word(limit));
    }
}

/// Flips of a test unless it is told another number.
const FLIPS: u64 = 5000;

/// A log of three covered files, as bytes, and the bytes of the pool that are records.
fn records_of_files() -> (Vec<u8>, std::ops::Range<u64>) {
    let log = log();
    let start = log.ring().head();
    for inode in 1..=3 {
        let guard = log.lock(log.entry_for(&key(inode)).unwrap()).unwrap();
        guard.begin_story(&definition(inode), 1 << 20).unwrap();
        let (unlogged, synced_from) = (guard.unlogged(), log.ring().head());
        let state = CoverState { unlogged, synced_from, size: 1 << 20, is_dense: true };
        assert!(guard.cover(&state, &definition(inode)).unwrap());
    }
    for n in 0..30_usize {
        let inode = n as u64 % 3 + 1;
        let guard = log.lock(log.entry_for(&key(inode)).unwrap()).unwrap();
        let data = vec![u8::try_from(n + 1).unwrap(); [100, 4096, 1000][n / 3 % 3]];
        let mut ticket = guard.begin().unwrap();
        ticket.write(n as u64 * 512, &[IoSlice::new(&data)], false).unwrap();
    }
    let pool = log.ring().pool();
    let mut bytes = vec![0; usize::try_from(pool.region().len_bytes()).unwrap()];
    pool.region().read(0, &mut bytes).unwrap();
    let start = pool.region_offset(start);
    (bytes, start..start + log.ring().head() - log.ring().tail())
}

/// What recovery would write, and where.
fn recovered(bytes: &[u8]) -> (Vec<FilePlan>, Vec<Vec<u8>>) {
    let pool = LogPool::open(Arc::new(region_of(bytes))).unwrap();
    let (plan, _) = plan_pool(&pool).unwrap();
    let steps = plan.files().iter().flat_map(|file| &file.steps);
    let data = steps.filter_map(|step| match step.operation {
        Operation::Write { len, data, .. } => {
            let mut bytes = vec![0; usize::try_from(len).unwrap()];
            pool.region().read(pool.region_offset(data), &mut bytes).unwrap();
            Some(bytes)
        }
        Operation::SetSize(_) => None,
    });
    let data = data.collect();
    (plan.files().to_vec(), data)
}

#[test]
fn a_flipped_bit_of_a_header_changes_nothing_and_one_of_data_is_named() {
    let (mut bytes, records) = records_of_files();
    let whole = recovered(&bytes);
    assert_eq!((whole.0.len(), whole.1.len()), (3, 30));
    let (flips, mut named) = (flips::numbers(FLIPS), 0);
    let count = flips.end - flips.start;
    for n in flips {
        let random = scrambled(n);
        let at = records.start + (random >> 8) % (records.end - records.start);
        let at = usize::try_from(at).unwrap();
        bytes[at] ^= 1 << (random % 8);
        let faults = checked(region_of(&bytes), false).faults;
        assert!(faults > 0 || recovered(&bytes) == whole, "bit {} of byte {at}", random % 8);
        named += u64::from(faults > 0);
        bytes[at] ^= 1 << (random % 8);
    }
    println!("{named} found, {} make no difference", count - named);
    assert!(named >= count * 9 / 10, "most bits are those of headers and data: {named} found");
}

#[test]
fn each_flipped_bit_of_a_record_header_is_put_right() {
    let (mut bytes, records) = records_of_files();
    let whole = recovered(&bytes);
    let first = usize::try_from(records.start).unwrap();
    for bit in 0..64 * 8 {
        bytes[first + bit / 8] ^= 1 << (bit % 8);
        assert!(recovered(&bytes) == whole, "bit {bit}");
        assert_eq!(checked(region_of(&bytes), false).faults, 1, "bit {bit}");
        assert_eq!(checked(region_of(&bytes), true).faults, 0, "bit {bit}");
        bytes[first + bit / 8] ^= 1 << (bit % 8);
    }
}

/// What `check --repair` says of a pool, and the pool after it.
fn repaired(bytes: &[u8]) -> (Checked, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    std::fs::write(&path, bytes).unwrap();
    let region = Region::open(&path, &RegionOptions::default()).unwrap();
    (checked(region, true), std::fs::read(&path).unwrap())
}

/// `bytes` without both copies of the position at `offset`.
fn without(bytes: &[u8], offset: u64) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let base = LogPool::open(Arc::new(region_of(&bytes))).unwrap().superblock().data_offset;
    for copy in [0, COPY_DISTANCE] {
        let at = usize::try_from(base + offset + copy).unwrap();
        bytes[at..at + 8].fill(5);
    }
    bytes
}

/// The tail proves where the limit may be, and all records behind it come back.
#[test]
fn a_log_whose_limit_is_lost_is_repaired_and_has_all_its_records() {
    let (files, _) = records_of_files();
    let whole = recovered(&files);
    assert_eq!((whole.0.len(), whole.1.len()), (3, 30));
    let damaged = without(&files, LIMIT_OFFSET);
    let found = checked(region_of(&damaged), false);
    let said = "the log's limit is damaged in both copies; the records prove that ";
    assert!(found.faults == 1 && found.lines[0].starts_with(said), "{:?}", found.lines);
    let (report, bytes) = repaired(&damaged);
    assert_eq!(report.faults, 0, "{:?}", report.lines);
    assert!(report.lines.contains(&"restored positions of the log: 1".to_owned()));
    assert!(recovered(&bytes) == whole);

    let device = records_of_a_device();
    let content = content_of(region_of(&device), false).unwrap();
    let (report, bytes) = repaired(&without(&device, LIMIT_OFFSET));
    assert_eq!(report.faults, 0, "{:?}", report.lines);
    assert!(content_of(region_of(&bytes), false).unwrap() == content);
}

/// Of records alone nothing tells which ones the files have already: with records in the log, a
/// lost tail is not guessed.
#[test]
fn a_log_with_records_whose_tail_is_lost_is_refused_with_the_way_out() {
    for bytes in [records_of_files().0, records_of_a_device()] {
        let damaged = without(&bytes, TAIL_OFFSET);
        let (report, after) = repaired(&damaged);
        assert_eq!(report.faults, 1, "{:?}", report.lines);
        assert!(after == damaged, "what is not proved is left as it was");
        let line = &report.lines[0];
        assert!(
            line.starts_with("the log's tail is damaged in both copies, and the records do not")
        );
        let refused = LogPool::open(Arc::new(region_of(&after))).unwrap_err();
        assert!(matches!(refused, LogError::Position { field: "tail" }), "{refused}");
        let refused = refused.to_string();
        for said in [line, &refused] {
            assert!(
                said.contains("a backup") && said.contains("`tidegate create --force`"),
                "{said}"
            );
        }
    }
}

/// Damages a record's header beyond what can be told from it.
fn destroy(bytes: &mut [u8], pool: &LogPool, position: u64) {
    let at = usize::try_from(pool.region_offset(position)).unwrap();
    bytes[at..at + 64].fill(0xA5);
}

#[test]
fn each_record_that_is_gone_is_missed_unless_it_was_the_last() {
    let (bytes, _) = records_of_files();
    let pool = LogPool::open(Arc::new(region_of(&bytes))).unwrap();
    let records: Vec<_> =
        Scanner::new(&pool, pool.tail().unwrap(), pool.limit().unwrap()).collect();
    let (last, others) = records.split_last().unwrap();
    for record in others {
        let mut bytes = bytes.clone();
        destroy(&mut bytes, &pool, record.position);
        let damaged = LogPool::open(Arc::new(region_of(&bytes))).unwrap();
        let (plan, _) = plan_pool(&damaged).unwrap();
        let gone = record.position..record.position + record.record_bytes();
        assert_eq!(plan.missing(), std::slice::from_ref(&gone));
        let report = checked(region_of(&bytes), false);
        assert_eq!(report.faults, 1, "{:?}", report.lines);
        assert!(report.lines[0].contains(&format!("position {}", gone.start)));
    }
    let mut bytes = bytes.clone();
    destroy(&mut bytes, &pool, last.position);
    let report = checked(region_of(&bytes), false);
    assert_eq!(report.faults, 0);
    let end = records[records.len() - 2].position;
    assert!(
        report.lines.iter().any(|line| line.contains(&format!("from position {end} on"))),
        "nobody can know: {:?}",
        report.lines
    );
}

const DEVICE_BLOCKS: u64 = 16;

fn device_over(region: Arc<Region>, salvage: bool) -> Result<LogDevice, LogDeviceError> {
    let backing = Arc::new(MemoryDevice::new(512, DEVICE_BLOCKS).unwrap());
    let options = LogDeviceOptions {
        no_thread: true,
        clean_from_bytes: Some(POOL_BYTES),
        salvage,
        ..LogDeviceOptions::default()
    };
    LogDevice::open(LogPool::open(region)?, backing, Binding::unnamed(1), options)
}

/// A log of a device with writes of three sessions and of several threads, as bytes.
fn records_of_a_device() -> Vec<u8> {
    let region = Arc::new(Region::anonymous(POOL_BYTES).unwrap());
    create(&region, &LogOptions::default()).unwrap();
    for session in 0..3 {
        let device = device_over(Arc::clone(&region), false).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..2_u64 {
                let device = &device;
                scope.spawn(move || {
                    for n in 0..16 {
                        let data = [u8::try_from(session * 32 + n * 2 + thread + 1).unwrap(); 512];
                        let block = (n * 2 + thread) % DEVICE_BLOCKS;
                        device.write(block * 512, &data, WriteFlags::default()).unwrap();
                    }
                });
            }
        });
    }
    let mut bytes = vec![0; usize::try_from(POOL_BYTES).unwrap()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

fn content_of(region: Region, salvage: bool) -> Result<Vec<u8>, LogDeviceError> {
    let device = device_over(Arc::new(region), salvage)?;
    let mut content = vec![0; usize::try_from(DEVICE_BLOCKS * 512).unwrap()];
    device.read(0, &mut content).unwrap();
    Ok(content)
}

#[test]
fn a_flipped_bit_of_a_log_of_a_device_is_put_right_or_named() {
    let mut bytes = records_of_a_device();
    let whole = content_of(region_of(&bytes), false).unwrap();
    assert!(whole.chunks(512).all(|block| block[0] > 64), "the last session wrote all blocks");
    assert_eq!(checked(region_of(&bytes), false).faults, 0);
    let pool = LogPool::open(Arc::new(region_of(&bytes))).unwrap();
    let (start, end) = (pool.tail().unwrap(), pool.limit().unwrap());
    let (mut named, mut refused) = (0, 0);
    let flips = flips::numbers(FLIPS);
    let count = flips.end - flips.start;
    for n in flips {
        let random = scrambled(n);
        let at = pool.region_offset(start + (random >> 8) % (end - start));
        let at = usize::try_from(at).unwrap();
        bytes[at] ^= 1 << (random % 8);
        let is_named = checked(region_of(&bytes), false).faults > 0;
        match content_of(region_of(&bytes), false) {
            Ok(content) => assert!(content == whole || is_named, "bit {} of {at}", random % 8),
            Err(LogDeviceError::Lost { .. }) => {
                assert!(is_named, "bit {} of {at}", random % 8);
                refused += 1;
            }
            Err(error) => panic!("{error}"),
        }
        named += u64::from(is_named);
        bytes[at] ^= 1 << (random % 8);
    }
    println!("{named} found, {} make no difference, {refused} refused", count - named);
    assert!(named >= count * 3 / 4, "{named} of {count} found");
    assert!(named > refused && refused > count / 4, "{named} named, {refused} refused");
}

#[test]
fn a_device_is_not_opened_without_its_acknowledged_records_unless_it_is_told() {
    let bytes = records_of_a_device();
    let whole = content_of(region_of(&bytes), false).unwrap();
    let pool = LogPool::open(Arc::new(region_of(&bytes))).unwrap();
    let (start, end) = (pool.tail().unwrap(), pool.limit().unwrap());
    let records: Vec<_> = Scanner::new(&pool, start, end).collect();
    // The last session begins with the gap behind the second one.
    let of_older = records.iter().filter(|it| it.finished > 0).rev().skip(32);
    for record in of_older.filter(|it| it.kind == RecordKind::Write) {
        let mut bytes = bytes.clone();
        destroy(&mut bytes, &pool, record.position);
        let Err(LogDeviceError::Lost { losses }) = content_of(region_of(&bytes), false) else {
            panic!("position {} is not missed", record.position);
        };
        assert_eq!(losses.len(), 1);
        let region = Arc::new(region_of(&bytes));
        let device = device_over(Arc::clone(&region), true).unwrap();
        assert_eq!(device.recovered().lost, losses);
        drop(device);
        let device = device_over(region, false).expect("what was passed over is not met again");
        let mut content = vec![0; whole.len()];
        device.read(0, &mut content).unwrap();
        assert!(content == whole, "a later session wrote all blocks anew");
    }
}

#[test]
fn what_comes_back_without_a_record_is_said() {
    let region = Arc::new(Region::anonymous(POOL_BYTES).unwrap());
    create(&region, &LogOptions::default()).unwrap();
    let device = device_over(Arc::clone(&region), false).unwrap();
    for (block, value) in [(3, 1), (3, 2), (5, 3), (7, 4)] {
        device.write(block * 512, &[value; 512], WriteFlags::default()).unwrap();
    }
    drop(device);
    let mut bytes = vec![0; usize::try_from(POOL_BYTES).unwrap()];
    region.read(0, &mut bytes).unwrap();
    let pool = LogPool::open(region).unwrap();
    let writes: Vec<_> = Scanner::new(&pool, pool.tail().unwrap(), pool.limit().unwrap())
        .filter(|record| record.kind == RecordKind::Write)
        .collect();
    let spoil = |bytes: &mut [u8], record: &Header| {
        let at = usize::try_from(pool.region_offset(record.data_position())).unwrap();
        bytes[at..at + 8].fill(0xA5);
    };
    let said = |record: &Header| {
        let mut bytes = bytes.clone();
        spoil(&mut bytes, record);
        let lines = checked(region_of(&bytes), false).lines;
        let error = content_of(region_of(&bytes), false).unwrap_err().to_string();
        let line = lines.into_iter().next().unwrap();
        let about = line.strip_prefix("/unnamed: ").or(line.strip_prefix("/(unnamed): "));
        assert!(error.starts_with(about.unwrap_or(&line)), "{error}, {line}");
        line
    };
    let older = format!("that of position {} comes back", writes[0].position);
    assert!(said(&writes[1]).contains(&older));
    assert!(said(&writes[2]).contains("512 bytes at offset 2560"));
    assert!(said(&writes[2]).contains("what the backing has comes back"));
    let mut bytes = bytes.clone();
    spoil(&mut bytes, &writes[1]);
    let content = content_of(region_of(&bytes), true).unwrap();
    assert_eq!((content[3 * 512], content[5 * 512]), (1, 3));
}
