//! Writers beside a cleaner, under every interleaving with few preemptions that the memory model
//! allows.
//!
//! Everything here is the real code: locks are the C library's, which loom does not see, so each
//! thread has a file of its own and the limit is raised beforehand. A planted bug is a copy of the
//! function with two steps exchanged.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use loom::sync::Arc as LoomArc;
use loom::thread;

use crate::log::control::slots::release;
use crate::log::control::table;
use crate::log::ring::Share;
use crate::log::*;
use crate::pmem::{Region, SharedMemory};
use crate::sync::Ordering;
use crate::sync::{AtomicU64, store_before_loads};

const POOL_BYTES: u64 = 128 << 10;

/// How a thread writes a record and says what it depends on.
type Write = fn(&Log, FileRef, u64);
/// How the cleaner finds out how far it may go.
type Safe = fn(&Log) -> u64;

fn region() -> Arc<Region> {
    let region = Arc::new(Region::anonymous(POOL_BYTES).unwrap());
    create(&region, &LogOptions::default()).unwrap();
    region
}

/// A log whose limit is far away, so that nobody has to lock it.
fn log(region: &Arc<Region>) -> LoomArc<Log> {
    let far = layout::position_word(POOL_BYTES * 64);
    for offset in [layout::TAIL_OFFSET, layout::LIMIT_OFFSET] {
        for copy in [offset, offset + layout::COPY_DISTANCE] {
            region.store_u64(layout_offset(copy), far).unwrap();
        }
    }
    let pool = LogPool::open(Arc::clone(region)).unwrap();
    let (all, memory) = (pool.ring_bytes(), SharedMemory::anonymous(CONTROL_BYTES).unwrap());
    let log = Ring::start(pool, memory, all).map(Log::over).unwrap();
    log.ring().control.limit().fetch_add(POOL_BYTES / 2, Ordering::SeqCst);
    // Words come into being when they are asked for first, which must not happen in two threads at
    // once.
    (0..SLOTS).for_each(|number| release(log.ring().control.slot(number)));
    (0..SLOTS.div_ceil(64))
        .for_each(|index| log.ring().control.slots_used(index).store(0, Ordering::SeqCst));
    LoomArc::new(log)
}

fn layout_offset(offset: u64) -> u64 {
    8192 + offset
}

fn key(inode: u64) -> FileKey {
    FileKey { device: 1, inode, identity: inode }
}

fn definition(inode: u64) -> Definition<'static> {
    Definition {
        identity: inode,
        file_system: [0; 16],
        handle: FileHandle::NONE,
        covered: false,
        starts: false,
        size_bytes: 0,
        device: 1,
        inode,
        path: b"/f",
    }
}

/// What every user of the log does.
fn write(log: &Log, file: FileRef, inode: u64) {
    let guard = log.lock(file).unwrap();
    let mut ticket = guard.begin().unwrap();
    if ticket.needs_define() {
        ticket.define(&definition(inode)).unwrap();
    }
    let position = ticket.write(0, &[IoSlice::new(b"x")], false).unwrap();
    assert!(log.ring().tail() <= position, "a record was retired while its operation went on");
}

fn retire(log: &Log, safe: Safe) {
    let position = safe(log);
    log.ring().control.tail().store(position, Ordering::SeqCst);
}

/// Two files that are defined, a writer for each, and a cleaner.
fn two_writers_and_a_cleaner(write: Write, safe: Safe) {
    let region = region();
    check(2, move || {
        let log = log(&region);
        let files = [1, 2].map(|inode| (log.entry_for(&key(inode)).unwrap(), inode));
        for (file, inode) in files {
            super::loom_appends::write(&log, file, inode);
        }
        let threads = files.map(|(file, inode)| {
            let log = log.clone();
            thread::spawn(move || write(&log, file, inode))
        });
        retire(&log, safe);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_defined(&log);
        retire(&log, safe);
        assert_eq!(log.ring().tail(), log.ring().head(), "nobody holds anything any more");
    });
}

/// One of them, written by a thread, and a cleaner that cleans twice.
fn a_writer_and_a_busy_cleaner(write: Write, safe: Safe) {
    let region = region();
    check(3, move || {
        let log = log(&region);
        let file = log.entry_for(&key(1)).unwrap();
        super::loom_appends::write(&log, file, 1);
        let writer = {
            let log = log.clone();
            thread::spawn(move || (0..2).for_each(|_| write(&log, file, 1)))
        };
        (0..2).for_each(|_| retire(&log, safe));
        writer.join().unwrap();
        assert_defined(&log);
    });
}

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(model);
}

/// Each record that is left has a definition that is left.
fn assert_defined(log: &Log) {
    let records: Vec<_> = log.ring().records(log.ring().tail(), log.ring().head()).collect();
    let defined =
        |id| records.iter().any(|record| record.kind == RecordKind::Define && record.file == id);
    assert!(records.iter().all(|record| defined(record.file)), "a record without a definition");
}

#[test]
fn loom_no_record_is_retired_while_it_is_held_and_none_without_its_definition() {
    two_writers_and_a_cleaner(write, |log| log.ring().safe_position());
}

#[test]
fn loom_a_definition_outlives_its_records_under_a_busy_cleaner() {
    a_writer_and_a_busy_cleaner(write, |log| log.ring().safe_position());
}

/// The writer of a device, and its cleaner, which keeps the definition in the log: nobody locks the
/// file.
fn clean_as_a_device(log: &Log, file: FileRef, keeps_definition: bool) {
    let end = log.ring().safe_position();
    let defined_at =
        table::entry(&log.ring().control, file.index).defined_at().load(Ordering::SeqCst);
    if defined_at < end && keeps_definition {
        log.ring().begin_unlocked(file).unwrap().define(&definition(1)).unwrap();
    }
    log.ring().control.tail().store(end, Ordering::SeqCst);
}

fn a_device_and_its_cleaner(keeps_definition: bool) {
    let region = region();
    check(3, move || {
        let log = log(&region);
        let file = log.entry_for(&key(1)).unwrap();
        log.ring().begin_unlocked(file).unwrap().define(&definition(1)).unwrap();
        let writer = {
            let log = log.clone();
            thread::spawn(move || {
                let mut ticket = log.ring().begin_unlocked(file).unwrap();
                let position = ticket.write(0, &[IoSlice::new(b"x")], false).unwrap();
                assert!(
                    log.ring().tail() <= position,
                    "a record was retired while its operation went on"
                );
            })
        };
        clean_as_a_device(&log, file, keeps_definition);
        writer.join().unwrap();
        assert_defined(&log);
    });
}

#[test]
fn loom_a_device_keeps_its_definition_without_a_lock() {
    a_device_and_its_cleaner(true);
}

#[test]
#[should_panic(expected = "a record without a definition")]
fn loom_finds_a_device_that_lets_its_definition_go() {
    a_device_and_its_cleaner(false);
}

/// Planted: the slot says what it depends on only after free space was reserved.
fn write_with_late_bound(log: &Log, _file: FileRef, _inode: u64) {
    let (_, slot) = log.ring().control.take_slot().unwrap();
    let reserved =
        log.ring().reserve(slot.record, 128, log.ring().usable_bytes(Share::Data)).unwrap();
    let position = reserved.position;
    store_before_loads(slot.bound, position);
    assert!(log.ring().tail() <= position, "a record was retired while its operation went on");
    release(slot);
}

#[test]
#[should_panic(expected = "retired while its operation went on")]
fn loom_finds_a_bound_stored_after_the_reservation() {
    a_writer_and_a_busy_cleaner(write_with_late_bound, |log| log.ring().safe_position());
}

/// Planted: the goal is stored after the slots were read.
fn safe_with_late_goal(log: &Log) -> u64 {
    let control = &log.ring().control;
    let head = control.head().load(Ordering::SeqCst);
    let bounds = (0..SLOTS).filter_map(|number| {
        let slot = control.slot(number);
        let taken = slot.owner.load(Ordering::SeqCst) != 0;
        taken.then(|| slot.bound.load(Ordering::SeqCst)).filter(|bound| *bound != 0)
    });
    let safe = bounds.fold(head, u64::min);
    store_before_loads(control.goal(), head);
    log.ring().with_definitions(safe).max(control.tail().load(Ordering::Relaxed))
}

#[test]
#[should_panic(expected = "a record without a definition")]
fn loom_finds_a_goal_stored_after_the_slots_were_read() {
    a_writer_and_a_busy_cleaner(write, safe_with_late_goal);
}

/// Planted: definitions that records behind the safe position need do not hold it.
fn safe_without_definitions(log: &Log) -> u64 {
    let control = &log.ring().control;
    let head = control.head().load(Ordering::SeqCst);
    store_before_loads(control.goal(), head);
    let bounds = (0..SLOTS).map(|number| control.slot(number).bound.load(Ordering::SeqCst));
    bounds.filter(|bound| *bound != 0).fold(head, u64::min)
}

#[test]
#[should_panic(expected = "a record without a definition")]
fn loom_finds_a_definition_retired_before_its_records() {
    two_writers_and_a_cleaner(write, safe_without_definitions);
}

/// The position of a record of so many bytes, for which space was reserved.
fn reserve(log: &Log, bytes: u64) -> u64 {
    let (_, slot) = log.ring().control.take_slot().unwrap();
    log.ring().reserve(slot.record, bytes, log.ring().usable_bytes(Share::Data)).unwrap().position
}

/// What a writer says of a record: that it is finished, and that it is durable.
type Finish = fn(&Log, &LoomArc<[AtomicU64; 2]>, usize);

/// Appends a record, as far as the finished position is concerned; its fence sets `fenced`.
fn append(log: &Log, fenced: &LoomArc<[AtomicU64; 2]>, number: usize) {
    let (_, slot) = log.ring().control.take_slot().unwrap();
    let reserved =
        log.ring().reserve(slot.record, 128, log.ring().usable_bytes(Share::Data)).unwrap();
    let finished = log.ring().finished_before(&reserved);
    slot.record.store(reserved.position, Ordering::Release);
    fenced[number].store(reserved.position, Ordering::Relaxed);
    log.ring().finish(slot, &reserved, finished);
    release(slot);
}

/// Planted: the finished position is moved before the fence.
fn append_with_late_fence(log: &Log, fenced: &LoomArc<[AtomicU64; 2]>, number: usize) {
    let (_, slot) = log.ring().control.take_slot().unwrap();
    let reserved =
        log.ring().reserve(slot.record, 128, log.ring().usable_bytes(Share::Data)).unwrap();
    let finished = log.ring().finished_before(&reserved);
    slot.record.store(reserved.position, Ordering::Release);
    log.ring().finish(slot, &reserved, finished);
    fenced[number].store(reserved.position, Ordering::Relaxed);
    release(slot);
}

/// Two writers, and a third one that asks which records are finished.
fn finished_records_are_fenced(append: Finish) {
    let region = region();
    check(3, move || {
        let log = log(&region);
        let start = log.ring().head();
        let fenced = LoomArc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let writers = [0, 1].map(|number| {
            let (log, fenced) = (log.clone(), fenced.clone());
            thread::spawn(move || append(&log, &fenced, number))
        });
        let finished = log.ring().catch_up();
        let seen = [0, 1].map(|number| fenced[number].load(Ordering::Relaxed));
        let below = (0..2).filter(|number| start + number * 128 < finished);
        for position in below.map(|number| start + number * 128) {
            assert!(seen.contains(&position), "a record is called finished before its fence");
        }
        for writer in writers {
            writer.join().unwrap();
        }
        assert_eq!(log.ring().catch_up(), log.ring().head(), "all are finished");
    });
}

#[test]
fn loom_what_is_called_finished_was_fenced() {
    finished_records_are_fenced(append);
}

#[test]
#[should_panic(expected = "called finished before its fence")]
fn loom_finds_a_finished_position_before_the_fence() {
    finished_records_are_fenced(append_with_late_fence);
}

#[test]
fn loom_two_reservations_never_overlap() {
    let region = region();
    check(3, move || {
        let log = log(&region);
        let bytes = 192;
        // So near the end of the lap that one of them starts at the next.
        let ring_bytes = log.ring().pool().ring_bytes();
        let near_the_end = log.ring().head().next_multiple_of(ring_bytes) + ring_bytes - 256;
        for word in [log.ring().control.head(), log.ring().control.tail()] {
            word.store(near_the_end, Ordering::SeqCst);
        }
        log.ring().control.limit().store(near_the_end + ring_bytes, Ordering::SeqCst);
        let other = {
            let log = log.clone();
            thread::spawn(move || reserve(&log, bytes))
        };
        let own = reserve(&log, bytes);
        let other = other.join().unwrap();
        assert!(own.abs_diff(other) >= bytes, "{own} and {other} overlap");
        assert!([own, other].iter().all(|start| start % ring_bytes + bytes <= ring_bytes));
        assert!(log.ring().head() >= own.max(other) + bytes);
    });
}

/// A plain write beside the beginning of a story: the writer finds the entry, or is waited for.
fn a_plain_write_beside_a_story(enter: fn(&Log) -> Option<InFlight<'_>>) {
    let region = region();
    check(3, move || {
        let log = log(&region);
        let written = LoomArc::new(loom::sync::atomic::AtomicU64::new(0));
        crate::log::files::lanes::forget_own_lane();
        // The words come into being.
        log.lanes().claim(|_, _| true);
        drop(log.lanes().enter(PLAIN));
        assert!(!log.may_have(1, 1) && log.lanes().wait_for_plain(1, 1, Duration::ZERO));
        let writer = {
            let (log, written) = (log.clone(), written.clone());
            thread::spawn(move || {
                log.lanes().claim(|_, _| true);
                let in_flight = enter(&log);
                let is_plain = !log.may_have(1, 1);
                if is_plain {
                    written.store(1, Ordering::SeqCst);
                }
                drop(in_flight);
                is_plain
            })
        };
        log.entry_for(&key(1)).unwrap();
        let is_over = log.lanes().wait_for_plain(1, 1, Duration::ZERO);
        let synced = written.load(Ordering::SeqCst);
        let was_plain = writer.join().unwrap();
        assert!(!is_over || !was_plain || synced == 1, "a plain write that the sync has missed");
    });
}

const PLAIN: PlainCall = PlainCall::Write { device: 1, inode: 1 };

#[test]
fn loom_no_plain_write_is_missed_by_a_story() {
    a_plain_write_beside_a_story(|log| log.lanes().enter(PLAIN));
}

/// Planted: the writer says nothing.
#[test]
#[should_panic(expected = "a plain write that the sync has missed")]
fn loom_finds_a_plain_write_that_nobody_said() {
    a_plain_write_beside_a_story(|_| None);
}
