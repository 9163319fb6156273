//! The log as a device, in one process: its promises, and the requests to its backing.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use proptest::prelude::*;

use super::super::{Counter, FileKey, Log, LogOptions, Ring, create};
use super::*;
use crate::device::conformance::{self, Model, Promises};
use crate::device::fault::{Effect, Fault, Rule, When};
use crate::device::memory::MemoryDevice;
use crate::device::{IoBuffer, Op, OwnedOperation, WriteFlags};
use crate::pmem::{Counters, Region, RegionOptions};
use crate::tier::Tier;

const POOL_BYTES: u64 = 1 << 20;
const BLOCK: usize = 4096;

fn region() -> Arc<Region> {
    let region = Arc::new(Region::anonymous(POOL_BYTES).unwrap());
    create(&region, &LogOptions::default()).unwrap();
    region
}

fn backing() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(4096, 1024).unwrap())
}

fn try_open(
    region: &Arc<Region>,
    backing: &Arc<impl BlockDevice + 'static>,
    identity: u64,
    options: LogDeviceOptions,
) -> std::result::Result<LogDevice, LogDeviceError> {
    let pool = LogPool::open(Arc::clone(region)).unwrap();
    let backing: Arc<dyn BlockDevice> = Arc::clone(backing) as Arc<dyn BlockDevice>;
    LogDevice::open(pool, backing, Binding::unnamed(identity), options)
}

fn open(region: &Arc<Region>, backing: &Arc<impl BlockDevice + 'static>) -> LogDevice {
    try_open(region, backing, 1, LogDeviceOptions::default()).unwrap()
}

fn without_thread() -> LogDeviceOptions {
    LogDeviceOptions { no_thread: true, ..LogDeviceOptions::default() }
}

fn write(device: &dyn BlockDevice, lba: usize, byte: u8) -> Result<()> {
    device.write((lba * BLOCK) as u64, &[byte; BLOCK], WriteFlags::default())
}

fn read(device: &dyn BlockDevice, lba: usize) -> u8 {
    let mut block = [0; BLOCK];
    device.read((lba * BLOCK) as u64, &mut block).unwrap();
    assert!(block.iter().all(|byte| *byte == block[0]), "a torn block");
    block[0]
}

#[test]
fn it_conforms() {
    for options in [LogDeviceOptions::default(), without_thread()] {
        let device = try_open(&region(), &backing(), 1, options).unwrap();
        let promises = Promises { whole_blocks: true, ..Promises::default() };
        conformance::check(&device, promises);
        conformance::check_started(&(Arc::new(device) as _), promises);
    }
    for block_bytes in [512, 1024] {
        let backing = Arc::new(MemoryDevice::new(block_bytes, 2048).unwrap());
        let device = open(&region(), &backing);
        conformance::check(&device, Promises { whole_blocks: true, ..Promises::default() });
    }
}

#[test]
fn a_write_costs_one_fence_and_is_there_after_reopening() {
    let (region, backing) = (region(), backing());
    let device = open(&region, &backing);
    write(&device, 0, 1).unwrap();
    let before = region.counters();
    write(&device, 1, 2).unwrap();
    let spent = region.counters() - before;
    let expected = Counters { fences: 1, bytes_streamed: 64 + 4096, ..spent };
    assert_eq!((spent, spent.lines_written_back), (expected, 0));
    drop(device);
    assert_eq!(read(backing.as_ref(), 1), 0, "nothing was destaged");
    let device = open(&region, &backing);
    assert_eq!((read(&device, 0), read(&device, 1), read(&device, 2)), (1, 2, 0));
    assert_eq!(device.recovered().records, 2);
    device.drain().unwrap();
    assert_eq!((read(backing.as_ref(), 0), read(backing.as_ref(), 1)), (1, 2));
    assert_eq!(device.core.ring.pool().session().unwrap(), None, "closed");
    drop(device);
    let device = open(&region, &backing);
    assert_eq!(device.recovered().records, 0);
    assert_eq!(device.core.ring.pool().session().unwrap(), Some(NO_BOOT));
}

/// A log that keeps its records when it closes neither waits for the cleaner nor uses the backing.
#[test]
fn a_log_that_stops_destaging_keeps_its_records() {
    let (region, below) = (region(), Arc::new(Fault::new(backing(), 1)));
    let options = LogDeviceOptions { clean_from_bytes: Some(0), ..LogDeviceOptions::default() };
    let device = try_open(&region, &below, 1, options).unwrap();
    below.add(Rule::new(&[Op::Write], When::Always, Effect::Hang));
    write(&device, 3, 7).unwrap();
    below.wait_until_hung(1);
    device.stop_destaging();
    write(&device, 4, 8).unwrap();
    device.flush().unwrap();
    assert!(device.state().pending_bytes > 0);
    drop(device);
    // Copied, since the hanging thread still holds the region.
    let mut image = vec![0; usize::try_from(POOL_BYTES).unwrap()];
    region.read(0, &mut image).unwrap();
    let copy = Arc::new(Region::anonymous(POOL_BYTES).unwrap());
    copy.write(0, &image).unwrap();
    below.heal();
    below.release();
    let device = open(&copy, &backing());
    assert_eq!((device.recovered().records, read(&device, 3), read(&device, 4)), (2, 7, 8));
}

#[test]
fn what_a_log_has_for_the_backing_is_pending_from_its_first_change_on() {
    let (region, backing) = (region(), backing());
    let device = open(&region, &backing);
    assert_eq!(device.state().pending_bytes, 0);
    device.discard(0, 4096).unwrap();
    assert!(device.state().pending_bytes > 0);
    device.drain().unwrap();
    assert_eq!(device.state().pending_bytes, 0);
    drop(device);
    let device = open(&region, &backing);
    assert!(device.fill_bytes().0 > 0, "the definition of the device");
    assert_eq!(device.state().pending_bytes, 0);
    write(&device, 3, 7).unwrap();
    assert!(device.state().pending_bytes > 0);
}

#[test]
fn a_hot_block_reaches_the_backing_once() {
    let below = Arc::new(Fault::new(backing(), 1));
    let device = try_open(&region(), &below, 1, without_thread()).unwrap();
    // The rule never fires; it counts writes.
    below.add(Rule::new(&[Op::Write], When::From(u64::MAX), Effect::Disappear));
    for round in 0..100 {
        write(&device, 7, round).unwrap();
        write(&device, 8, round).unwrap();
    }
    device.drain().unwrap();
    let recorded = device.core.ring.stats().total(Counter::CleanerSyncs);
    assert_eq!(recorded, 1, "one batch");
    assert_eq!((read(&device, 7), read(below.as_ref(), 8)), (99, 99));
}

#[test]
fn a_full_log_is_cleaned_by_its_writers_or_by_the_thread() {
    for options in [LogDeviceOptions::default(), without_thread()] {
        let (region, backing) = (region(), backing());
        let device = try_open(&region, &backing, 1, options).unwrap();
        // About 16 MiB through a log of 1 MiB, from three threads with blocks of their own.
        std::thread::scope(|scope| {
            for thread in 0..3_usize {
                let device = &device;
                scope.spawn(move || {
                    for round in 0..1400_usize {
                        let lba = thread * 300 + round * 7 % 300;
                        write(device, lba, (round % 251).to_le_bytes()[0]).unwrap();
                        assert_eq!(read(device, lba), (round % 251).to_le_bytes()[0]);
                    }
                });
            }
        });
        drop(device);
        let device = open(&region, &backing);
        for lba in 0..300 {
            let last = (0..1400_usize).rev().find(|round| round * 7 % 300 == lba).unwrap();
            for thread in 0..3 {
                assert_eq!(read(&device, thread * 300 + lba), (last % 251).to_le_bytes()[0]);
            }
        }
    }
}

#[test]
fn zeroes_of_any_length_cost_one_small_record_and_come_back() {
    let (region, backing) = (region(), backing());
    (0..1024).for_each(|lba| write(backing.as_ref(), lba, 9).unwrap());
    let device = try_open(&region, &backing, 1, without_thread()).unwrap();
    write(&device, 5, 1).unwrap();
    let before = device.fill_bytes().0;
    device.discard(0, 1000 * BLOCK as u64).unwrap();
    assert_eq!(device.fill_bytes().0 - before, 64);
    write(&device, 6, 2).unwrap();
    let look = |device: &LogDevice| [5, 6, 999, 1000].map(|lba| read(device, lba));
    assert_eq!(look(&device), [0, 2, 0, 9]);
    drop(device);
    let device = try_open(&region, &backing, 1, without_thread()).unwrap();
    assert_eq!(look(&device), [0, 2, 0, 9]);
    device.drain().unwrap();
    assert_eq!(look(&device), [0, 2, 0, 9]);
    assert_eq!([5, 6, 999, 1000].map(|lba| read(backing.as_ref(), lba)), [0, 2, 0, 9]);
}

#[test]
fn a_backing_that_fails_loses_nothing_and_is_tried_again() {
    for kind in [DeviceErrorKind::Io, DeviceErrorKind::NoSpace] {
        for op in [Op::Write, Op::Flush] {
            let below = Arc::new(Fault::new(backing(), 1));
            let region = region();
            let device = try_open(&region, &below, 1, without_thread()).unwrap();
            (0..50).for_each(|lba| write(&device, lba, 1).unwrap());
            below.add(Rule::new(&[op], When::Always, Effect::Fail(kind)));
            assert_eq!(device.drain().unwrap_err().kind(), kind);
            device.flush().expect("all is durable in the log");
            // The log accepts writes until it is full, then names the backing's error.
            let refused = (50..1024).find_map(|lba| write(&device, lba, 2).err()).unwrap();
            assert_eq!(refused.kind(), kind);
            assert_eq!((read(&device, 7), read(&device, 60)), (1, 2));
            below.heal();
            write(&device, 1000, 3).unwrap();
            device.drain().unwrap();
            assert_eq!([7, 60, 1000].map(|lba| read(below.as_ref(), lba)), [1, 2, 3]);
        }
    }
}

/// A record that the log itself cannot read is not a failure of the backing.
#[test]
fn a_log_whose_memory_failed_is_reported_by_the_next_flush() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("pool");
    std::fs::File::create(&path).unwrap().set_len(POOL_BYTES).unwrap();
    let region = Arc::new(Region::open(&path, &RegionOptions::default()).unwrap());
    create(&region, &LogOptions::default()).unwrap();
    let device = try_open(&region, &backing(), 1, without_thread()).unwrap();
    (0..50).for_each(|lba| write(&device, lba, 1).unwrap());
    device.flush().unwrap();
    // Cuts off most of the records.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(POOL_BYTES / 16).unwrap();
    device.drain().unwrap_err();
    device.flush().expect_err("what was acknowledged is lost");
    device.flush().expect("it is told once");
}

#[test]
fn the_thread_tries_a_failing_backing_again() {
    let below = Arc::new(Fault::new(backing(), 1));
    let options =
        LogDeviceOptions { clean_from_bytes: Some(64 << 10), ..LogDeviceOptions::default() };
    let device = try_open(&region(), &below, 1, options).unwrap();
    below.add(Rule::new(&[Op::Flush], When::Nth(1), Effect::Fail(DeviceErrorKind::Io)));
    for round in 0..40 {
        write(&device, round, 5).unwrap();
    }
    while device.core.used_bytes() > 64 << 10 {
        std::thread::yield_now();
    }
    assert_eq!(below.injected(), 1);
    device.flush().unwrap();
    assert_eq!(read(&device, 3), 5);
}

#[test]
fn the_thread_is_idle_while_the_log_is_less_than_half_full() {
    let (region, backing) = (region(), backing());
    let device = open(&region, &backing);
    (0..50).for_each(|lba| write(&device, lba, 1).unwrap());
    device.core.waker.await_all_idle();
    assert_eq!(device.core.ring.stats().total(Counter::CleanerSyncs), 0);
    (50..200).for_each(|lba| write(&device, lba, 1).unwrap());
    while device.core.used_bytes() > POOL_BYTES / 2 {
        std::thread::yield_now();
    }
    device.core.waker.await_all_idle();
}

#[test]
fn the_backing_is_flushed_for_each_batch() {
    let device = try_open(&region(), &backing(), 1, without_thread()).unwrap();
    let flushes = || device.core.ring.stats().total(Counter::CleanerSyncs);
    device.set("batch", "1").unwrap();
    (0..50).for_each(|lba| write(&device, lba, 1).unwrap());
    device.destage().unwrap();
    assert_eq!(flushes(), 50, "one for each write");
    device.set("batch", "1M").unwrap();
    (0..50).for_each(|lba| write(&device, lba, 2).unwrap());
    device.destage().unwrap();
    assert_eq!(flushes(), 51);
    assert_eq!(device.settings()[1].value, "1M");
    for refused in ["0", "65M", "x"] {
        let error = device.set("batch", refused).unwrap_err().to_string();
        assert!(error.contains("1 to 64M"), "{error}");
    }
}

#[test]
fn a_backing_that_hangs_holds_up_only_a_full_log() {
    let below = Arc::new(Fault::new(backing(), 1));
    let options =
        LogDeviceOptions { clean_from_bytes: Some(64 << 10), ..LogDeviceOptions::default() };
    let device = try_open(&region(), &below, 1, options).unwrap();
    below.add(Rule::new(&[Op::Write, Op::Flush], When::Nth(1), Effect::Hang));
    (0..100).for_each(|lba| write(&device, lba, 5).unwrap());
    below.wait_until_hung(1);
    (0..100).for_each(|lba| write(&device, lba, 6).unwrap());
    assert_eq!(read(&device, 3), 6);
    device.flush().unwrap();
    below.release();
    device.drain().unwrap();
    assert_eq!(read(below.as_ref(), 99), 6);
}

#[test]
fn a_log_with_records_for_another_backing_is_refused() {
    let (region, one, other) = (region(), backing(), backing());
    let device = open(&region, &one);
    write(&device, 1, 1).unwrap();
    drop(device);
    let refused = try_open(&region, &other, 2, LogDeviceOptions::default()).err().unwrap();
    assert!(matches!(refused, LogDeviceError::OtherBacking { records: 1, .. }), "{refused}");
    let small = Arc::new(MemoryDevice::new(4096, 1).unwrap());
    let refused = try_open(&region, &small, 1, LogDeviceOptions::default()).err().unwrap();
    assert!(matches!(refused, LogDeviceError::Misfit { offset: 4096, .. }), "{refused}");
    // Once all records are destaged, another backing may have the log; with force, at once with the
    // records.
    let device = open(&region, &one);
    device.drain().unwrap();
    drop(device);
    let device = open(&region, &one);
    assert_eq!(read(&device, 1), 1);
    drop(device);
    let device = try_open(&region, &other, 2, LogDeviceOptions::default()).unwrap();
    assert_eq!(read(&device, 1), 0);
    write(&device, 1, 2).unwrap();
    drop(device);
    let force = LogDeviceOptions { adopt_foreign: true, ..LogDeviceOptions::default() };
    let device = try_open(&region, &one, 1, force).unwrap();
    assert_eq!(read(&device, 1), 2);
    drop(device);
    assert!(try_open(&region, &other, 2, LogDeviceOptions::default()).is_err(), "it is ours now");
    assert_eq!(read(&open(&region, &one), 1), 2);
}

#[test]
fn a_log_without_free_space_opens() {
    let (region, backing) = (region(), backing());
    let below = Arc::new(Fault::new(Arc::clone(&backing) as Arc<dyn BlockDevice>, 1));
    let device = try_open(&region, &below, 1, without_thread()).unwrap();
    below.add(Rule::new(&[], When::Always, Effect::Fail(DeviceErrorKind::Io)));
    let written = (0..1024).take_while(|lba| write(&device, *lba, 3).is_ok()).count();
    drop(device);
    below.heal();
    // Opens the log repeatedly without cleaning; each opening begins at the limit.
    for _ in 0..40 {
        drop(try_open(&region, &below, 1, without_thread()).unwrap());
    }
    let device = open(&region, &below);
    assert!((0..written).all(|lba| read(&device, lba) == 3));
    (0..1024).for_each(|lba| write(&device, lba, 4).unwrap());
    assert!((0..1024).all(|lba| read(&device, lba) == 4));
}

#[test]
fn records_of_files_are_not_taken_for_blocks() {
    let region = region();
    let pool = LogPool::open(Arc::clone(&region)).unwrap();
    let all = pool.ring_bytes();
    let memory = crate::pmem::SharedMemory::anonymous(CONTROL_BYTES).unwrap();
    let log = Ring::start(pool, memory, all).map(Log::over).unwrap();
    let file = log.entry_for(&FileKey { device: 1, inode: 2, identity: 3 }).unwrap();
    let guard = log.lock(file).unwrap();
    let mut ticket = guard.begin().unwrap();
    ticket.define(&Binding::unnamed(3).definition()).unwrap();
    ticket.set_size(7, false).unwrap();
    drop(ticket);
    drop(guard);
    drop(log);
    let force = LogDeviceOptions { adopt_foreign: true, ..LogDeviceOptions::default() };
    let refused = try_open(&region, &backing(), 1, force).err().unwrap();
    assert!(matches!(refused, LogDeviceError::Files { records: 1 }), "{refused}");
}

/// One step of a random sequence.
#[derive(Debug, Clone)]
enum Step {
    Write { lba: u64, blocks: usize },
    Zero { lba: u64, blocks: u64 },
    Read { lba: u64, blocks: usize },
    Reopen,
    Shutdown,
    Fail,
    Heal,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let lba = 0..200_u64;
    let step = prop_oneof![
        10 => (lba.clone(), 1..8_usize).prop_map(|(lba, blocks)| Step::Write { lba, blocks }),
        2 => (lba.clone(), 1..50_u64).prop_map(|(lba, blocks)| Step::Zero { lba, blocks }),
        6 => (lba, 1..100_usize).prop_map(|(lba, blocks)| Step::Read { lba, blocks }),
        1 => Just(Step::Reopen),
        1 => Just(Step::Shutdown),
        1 => Just(Step::Fail),
        2 => Just(Step::Heal),
    ];
    proptest::collection::vec(step, 1..100)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn it_agrees_with_the_model_across_reopening_and_failures(steps in steps(), threaded: bool) {
        let region = Arc::new(Region::anonymous(256 << 10).unwrap());
        create(&region, &LogOptions::default()).unwrap();
        let below = Arc::new(Fault::new(Arc::new(MemoryDevice::new(512, 1024).unwrap()), 1));
        let options = LogDeviceOptions { no_thread: !threaded, ..LogDeviceOptions::default() };
        let mut device = try_open(&region, &below, 1, options).unwrap();
        let (mut model, mut stamp) = (Model::of(&device), 0);
        for step in steps {
            match step {
                Step::Write { lba, blocks } => {
                    stamp += 1;
                    let mut data = vec![0; blocks * 512];
                    conformance::fill(&mut data, stamp);
                    let result = device.write(lba * 512, &data, WriteFlags::default());
                    model.wrote(lba * 512, &data, &result);
                }
                Step::Zero { lba, blocks } => {
                    let zeroes = vec![0; usize::try_from(blocks).unwrap() * 512];
                    let result = device.write_zeroes(lba * 512, blocks * 512, ZeroFlags::default());
                    model.wrote(lba * 512, &zeroes, &result);
                }
                Step::Read { lba, blocks } => {
                    let mut data = vec![0; blocks * 512];
                    device.read(lba * 512, &mut data).unwrap();
                    model.read(lba * 512, &data);
                }
                Step::Reopen => {
                    drop(device);
                    below.heal();
                    device = try_open(&region, &below, 1, options).unwrap();
                }
                Step::Shutdown => {
                    let _ = device.drain();
                }
                Step::Fail => {
                    let effect = Effect::Short { blocks: 3, kind: DeviceErrorKind::Io };
                    below.add(Rule::new(&[Op::Write, Op::WriteZeroes], When::Chance(300_000), effect));
                }
                Step::Heal => below.heal(),
            }
        }
        below.heal();
        device.drain().unwrap();
        let mut data = vec![0; 400 * 512];
        below.read(0, &mut data).unwrap();
        model.read(0, &data);
    }
}

fn write_at_once(device: &LogDevice, lba: usize, byte: u8) -> Option<Result<()>> {
    let (data, flags) = ([byte; BLOCK], WriteFlags::default());
    let mut write = Operation::Write { offset: (lba * BLOCK) as u64, data: &data, flags };
    device.attempt(&mut write, Context::default()).done()
}

fn read_at_once(device: &LogDevice, lba: usize) -> Option<u8> {
    let mut block = [0; BLOCK];
    let mut read = Operation::Read { offset: (lba * BLOCK) as u64, buf: &mut block };
    let done = device.attempt(&mut read, Context::default()).done();
    done.map(|result| result.map(|()| block[0]).unwrap())
}

fn start(device: &Arc<LogDevice>, operation: OwnedOperation) -> Receiver<(u8, Result<()>)> {
    let (told, ended) = channel();
    let completion = move |operation: OwnedOperation, result| {
        let first = operation.into_buffer().map_or(0, |buffer| buffer.data()[0]);
        told.send((first, result)).unwrap();
    };
    Arc::clone(device).start(AsyncRequest::new(operation, Context::default(), completion));
    ended
}

fn write_of(lba: usize, byte: u8) -> OwnedOperation {
    let mut buffer = IoBuffer::new(BLOCK);
    buffer.data_mut().fill(byte);
    OwnedOperation::Write { offset: (lba * BLOCK) as u64, buffer, flags: WriteFlags::default() }
}

/// Returns a log before a backing that hangs on all requests.
fn before_hung() -> (Arc<LogDevice>, Arc<Fault>) {
    let below = Arc::new(Fault::new(backing(), 1));
    let device = Arc::new(open(&region(), &below));
    below.add(Rule::new(&[], When::Always, Effect::Hang));
    (device, below)
}

#[test]
fn what_the_log_holds_never_waits_for_the_backing() {
    let (device, below) = before_hung();
    assert!(write_at_once(&device, 3, 7).unwrap().is_ok());
    assert_eq!(read_at_once(&device, 3), Some(7));
    assert_eq!(read_at_once(&device, 4), None, "only the backing has it");
    let (offset, len, flags) = (BLOCK as u64, 2 * BLOCK as u64, ZeroFlags::default());
    let mut zero = Operation::WriteZeroes { offset, len, flags };
    assert!(device.attempt(&mut zero, Context::default()).done().unwrap().is_ok());
    assert_eq!(read_at_once(&device, 2), Some(0));
    assert!(device.attempt(&mut Operation::Flush, Context::default()).done().unwrap().is_ok());
    below.heal();
}

/// More reads than there are threads can wait in the backing at once.
#[test]
fn reads_of_the_backing_wait_without_a_thread() {
    let (device, below) = before_hung();
    let reads: Vec<_> = (0..100_u64)
        .map(|lba| {
            let buffer = IoBuffer::new(BLOCK);
            start(&device, OwnedOperation::Read { offset: lba * BLOCK as u64, buffer })
        })
        .collect();
    below.wait_until_hung(100);
    below.heal();
    below.release();
    for read in reads {
        let (byte, result) = read.recv().unwrap();
        assert_eq!((byte, result.is_ok()), (0, true));
    }
}

/// Writers that find the log full wait without a thread. They go on in order after cleaning.
#[test]
fn blocked_writers_wait_without_a_thread() {
    let (device, below) = before_hung();
    let mut count = 0;
    while let Some(result) = write_at_once(&device, count, 1) {
        result.unwrap();
        count += 1;
    }
    let blocked: Vec<_> = (0..100).map(|_| start(&device, write_of(5, 2))).collect();
    let last = start(&device, write_of(5, 3));
    assert!(blocked.iter().all(|ended| ended.try_recv().is_err()));
    // A later write waits for the earlier ones.
    assert!(write_at_once(&device, 6, 9).is_none());
    below.heal();
    below.release();
    for ended in blocked.iter().chain([&last]) {
        assert!(ended.recv().unwrap().1.is_ok());
    }
    assert_eq!(read(&*device, 5), 3);
}

#[test]
fn blocked_writers_fail_with_the_backing() {
    let below = Arc::new(Fault::new(backing(), 1));
    let device = Arc::new(open(&region(), &below));
    let failing = Rule::new(&[Op::Write], When::Always, Effect::Fail(DeviceErrorKind::NoSpace));
    below.add(failing);
    let mut count = 0;
    while write_at_once(&device, count, 1).is_some() {
        count += 1;
    }
    let ended = start(&device, write_of(5, 2));
    let error = ended.recv().unwrap().1.unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::NoSpace);
    below.heal();
    assert_eq!(read(&*device, 5), 1);
}

/// Without its thread, the device cleans the log and completes the blocked writes.
#[test]
fn blocked_writers_end_with_the_thread() {
    let (device, below) = before_hung();
    let mut count = 0;
    while write_at_once(&device, count, 1).is_some() {
        count += 1;
    }
    let ended: Vec<_> = (0..50).map(|lba| start(&device, write_of(lba, 2))).collect();
    below.wait_until_hung(1);
    below.heal();
    std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| device.drain());
        below.release();
        shutdown.join().unwrap().unwrap();
    });
    assert!(ended.into_iter().all(|ended| ended.recv().unwrap().1.is_ok()));
}

/// Writes and zeroes of any length complete in the smallest logs, for any `clean_from_bytes`,
/// started or with a thread. The end of the ring falls into another part of a record in each round.
#[test]
fn changes_larger_than_the_log_end_from_every_share_on() {
    const TIMEOUT: Duration = Duration::from_secs(60);
    for (bytes, pct) in [(128 << 10, 1), (128 << 10, 90), (1 << 20, 50), (1 << 20, 90)] {
        let region = Arc::new(Region::anonymous(bytes).unwrap());
        create(&region, &LogOptions::default()).unwrap();
        let clean_from_bytes = Some(bytes * pct / 100);
        let options = LogDeviceOptions { clean_from_bytes, ..LogDeviceOptions::default() };
        let device = Arc::new(try_open(&region, &backing(), 1, options).unwrap());
        let (tell, ends) = channel();
        for round in 0..24_usize {
            let blocks = [1, 7, 64, 300, 1000][round % 5];
            let mut buffer = IoBuffer::new(blocks * BLOCK);
            buffer.data_mut().fill(u8::try_from(round).unwrap());
            let flags = WriteFlags::default();
            let operation = match round % 7 {
                6 => OwnedOperation::Discard { offset: 0, len: 1024 * BLOCK as u64 },
                _ => OwnedOperation::Write { offset: 0, buffer, flags },
            };
            let tell = tell.clone();
            let tell = move |_, result: Result<()>| tell.send(result).unwrap();
            if round % 3 == 0 {
                let device = Arc::clone(&device);
                let request = AsyncRequest::new(operation, Context::default(), tell);
                std::thread::spawn(move || request.run_on(&*device));
            } else {
                let request = AsyncRequest::new(operation, Context::default(), tell);
                Arc::clone(&device).start(request);
            }
        }
        for _ in 0..24 {
            ends.recv_timeout(TIMEOUT).expect("a change ends").unwrap();
        }
        assert!(!device.core.blocked.is_waiting());
        write(&*device, 3, 77).unwrap();
        device.drain().unwrap();
        assert_eq!(read(&*device, 3), 77);
    }
}
