//! The log within one process: what records promise, what they cost, how free space comes and goes.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use zerocopy::IntoBytes;

use crate::log::control::table;
use crate::log::pool::layout::{LIMIT_OFFSET, LIMIT_STEP_BYTES, RECORD_ALIGN_BYTES, TAIL_OFFSET};
use crate::log::*;
use crate::pmem::Counters;
use crate::pmem::{Kind, Region, RegionOptions, SharedMemory};

const POOL_BYTES: u64 = 1 << 20;

fn pool() -> LogPool {
    let region = Arc::new(Region::anonymous(POOL_BYTES).unwrap());
    create(&region, &LogOptions::default()).unwrap();
    LogPool::open(region).unwrap()
}

pub(in crate::log) fn log() -> Log {
    let pool = pool();
    let all = pool.ring_bytes();
    Ring::start(pool, SharedMemory::anonymous(CONTROL_BYTES).unwrap(), all).map(Log::over).unwrap()
}

pub(in crate::log) fn key(inode: u64) -> FileKey {
    FileKey { device: 1, inode, identity: 1000 + inode }
}

pub(in crate::log) fn definition(inode: u64) -> Definition<'static> {
    Definition {
        identity: 1000 + inode,
        file_system: [7; 16],
        handle: FileHandle::new(1, &inode.to_le_bytes()).unwrap(),
        covered: false,
        starts: false,
        size_bytes: 0,
        device: 1,
        inode,
        path: b"/dir/file",
    }
}

/// Defines the file where that is needed, and writes.
fn write(log: &Log, inode: u64, offset: u64, data: &[u8]) -> Result<u64, AppendError> {
    let guard = log.lock(log.entry_for(&key(inode)).unwrap()).unwrap();
    let mut ticket = guard.begin()?;
    if ticket.needs_define() {
        ticket.define(&definition(inode))?;
    }
    ticket.write(offset, &[IoSlice::new(data)], false)
}

fn found(log: &Log) -> Vec<Header> {
    Scanner::new(log.ring().pool(), log.ring().tail(), log.ring().pool().limit().unwrap()).collect()
}

fn payload(log: &Log, header: &Header) -> Vec<u8> {
    let mut bytes = vec![0; header.payload_bytes as usize];
    log.ring().pool().read_payload(header, 0, &mut bytes).unwrap();
    bytes
}

/// Notes where lines are written back.
#[derive(Default)]
struct WriteBacks(std::sync::Mutex<Vec<u64>>);

impl crate::pmem::Observer for WriteBacks {
    fn store(&self, _: u64, _: &[u8], _: bool) {}
    fn write_back(&self, offset: u64, _: u64) {
        self.0.lock().unwrap().push(offset);
    }
    fn fence(&self) {}
    fn load(&self, _: u64, _: u64) {}
    fn relax(&self) {}
}

#[test]
fn a_limit_that_a_killed_process_has_only_stored_is_durable_before_the_tail_that_becomes_it() {
    let seen = Arc::new(WriteBacks::default());
    let region = Arc::new(Region::anonymous(POOL_BYTES).unwrap().observed(seen.clone()));
    let data_offset = create(&region, &LogOptions::default()).unwrap().data_offset;
    let pool = LogPool::open(Arc::clone(&region)).unwrap();
    let (limit_at, tail_at) = (data_offset + LIMIT_OFFSET, data_offset + TAIL_OFFSET);
    let raised = layout::position_word(pool.limit().unwrap() + 4096);
    region.store_u64(limit_at, raised).unwrap();
    seen.0.lock().unwrap().clear();
    let all = pool.ring_bytes();
    drop(
        Ring::start(pool, SharedMemory::anonymous(CONTROL_BYTES).unwrap(), all)
            .map(Log::over)
            .unwrap(),
    );
    let copies = |at| [at, at + layout::COPY_DISTANCE];
    let [limit, tail] = [copies(limit_at), copies(tail_at)];
    assert_eq!(seen.0.lock().unwrap()[..4], [limit, tail].concat());
}

#[test]
fn what_a_killed_process_kept_unlogged_is_given_back() {
    let log = log();
    let file = log.entry_for(&key(7)).unwrap();
    let guard = || log.lock(file).unwrap();
    guard().keep_unlogged();
    guard().keep_unlogged();
    guard().stop_keeping();
    assert!(guard().pins() > 0);
    assert_eq!(log.keepers().processes().collect::<Vec<_>>(), [current_process()]);
    log.keepers().stop_keeping_of(current_process() + 1, Duration::ZERO);
    assert!(guard().pins() > 0, "another process has ended");
    log.keepers().stop_keeping_of(current_process(), Duration::ZERO);
    assert!(guard().pins() == 0 && log.keepers().processes().next().is_none());
    // A mark that nobody keeps is nobody's to take back.
    guard().mark_unlogged(true);
    log.keepers().stop_keeping_of(current_process(), Duration::ZERO);
    assert!(guard().pins() > 0);
}

/// Else nobody would know of the mark, and the file be unlogged for ever.
#[test]
fn a_mark_whose_file_is_locked_is_given_back_later() {
    let log = log();
    let file = log.entry_for(&key(7)).unwrap();
    log.lock(file).unwrap().keep_unlogged();
    let dead = current_process();
    let guard = log.lock(file).unwrap();
    let left = std::thread::scope(|scope| {
        scope.spawn(|| log.keepers().stop_keeping_of(dead, Duration::ZERO)).join().unwrap()
    });
    assert_eq!(left, [file]);
    assert!(guard.pins() > 0 && log.keepers().processes().eq([dead]));
    drop(guard);
    assert!(log.keepers().stop_keeping_for(dead, file, Duration::ZERO));
    assert!(log.lock(file).unwrap().pins() == 0 && log.keepers().processes().next().is_none());
}

#[test]
fn marks_without_a_place_for_their_note_stay_with_others() {
    let log = log();
    let file = log.entry_for(&key(7)).unwrap();
    (0..300).for_each(|_| log.lock(file).unwrap().keep_unlogged());
    (0..299).for_each(|_| log.lock(file).unwrap().stop_keeping());
    assert!(log.lock(file).unwrap().pins() > 0);
    log.lock(file).unwrap().stop_keeping();
    assert!(log.lock(file).unwrap().pins() == 0 && log.keepers().processes().next().is_none());
}

#[test]
fn records_are_found_in_order_with_what_they_say() {
    let log = log();
    let data: Vec<u8> = (0..10_000_u32).map(|byte| byte.to_le_bytes()[0]).collect();
    for len in [0, 1, 63, 64, 65, 4096, 9999] {
        write(&log, 7, len as u64 * 3, &data[..len]).unwrap();
    }
    let records = found(&log);
    assert_eq!(records[0].kind, RecordKind::Define);
    let fixed = payload(&log, &records[0]);
    assert_eq!(Definition::decode(&fixed), Some(definition(7)));
    for (record, len) in records[1..].iter().zip([0, 1, 63, 64, 65, 4096, 9999]) {
        assert_eq!((record.kind, record.offset), (RecordKind::Write, len as u64 * 3));
        assert_eq!(record.file, records[0].position);
        assert_eq!(payload(&log, record), data[..len]);
    }
    assert_eq!(records.len(), 8);
}

#[test]
fn every_kind_of_record_comes_back() {
    use RecordKind::{Define, End, Mark, SetSize, Void, Write, Zero};
    let log = log();
    let guard = log.lock(log.entry_for(&key(1)).unwrap()).unwrap();
    let mut ticket = guard.begin().unwrap();
    ticket.define(&definition(1)).unwrap();
    let size = ticket.set_size(10, false).unwrap();
    ticket.write(20, &[IoSlice::new(b"x")], true).unwrap();
    ticket.zero(3, 4, false).unwrap();
    ticket.mark(21, 0).unwrap();
    ticket.end().unwrap();
    ticket.void(size).unwrap();
    let records = found(&log);
    let kinds: Vec<_> = records.iter().map(|record| record.kind).collect();
    assert_eq!(kinds, [Define, SetSize, Write, Zero, Mark, End, Void]);
    assert_eq!((records[1].offset, records[3].offset, records[3].len), (10, 3, 4));
    assert_eq!((records[1].grows, records[2].grows, records[4].offset), (false, true, 21));
    assert_eq!(records[6].aux, size);
}

#[test]
fn a_write_costs_one_fence() {
    let log = log();
    write(&log, 1, 0, &[1; 4096]).unwrap();
    let before = log.ring().pool().region().counters();
    write(&log, 1, 4096, &[1; 4096]).unwrap();
    write(&log, 1, 8192, &[1; 128]).unwrap();
    let spent = log.ring().pool().region().counters() - before;
    let streamed = 64 + 4096 + 64 + 128;
    let expected = Counters { stores: 4, bytes_streamed: streamed, fences: 2, ..spent };
    assert_eq!(spent, expected);
    assert_eq!(spent.lines_written_back, 0);
}

#[test]
fn a_torn_record_is_skipped_and_the_next_is_found() {
    let log = log();
    let torn = write(&log, 1, 0, &[1; 500]).unwrap();
    let whole = write(&log, 1, 0, &[2; 500]).unwrap();
    let at = log.ring().pool().region_offset(torn) + RECORD_ALIGN_BYTES + 499;
    log.ring().pool().region().write(at, &[9]).unwrap();
    let mut scanner = Scanner::new(log.ring().pool(), log.ring().tail(), log.ring().head());
    let positions: Vec<_> = scanner.by_ref().map(|record| record.position).skip(1).collect();
    assert_eq!((positions, scanner.torn()), (vec![whole], 1));
}

#[test]
fn what_a_dead_writer_reserved_is_a_hole() {
    let log = log();
    write(&log, 1, 0, &[1; 64]).unwrap();
    let (_, slot) = log.ring().control.take_slot().unwrap();
    log.ring().reserve(slot.record, 1024, log.ring().usable_bytes(ring::Share::Data)).unwrap();
    let after = write(&log, 1, 0, &[2; 64]).unwrap();
    assert_eq!(found(&log).last().unwrap().position, after);
    assert_eq!(found(&log).len(), 3);
}

/// All that a scan finds lost: where records are missing.
fn missing(log: &Log) -> Vec<(u64, u64)> {
    let mut scanner = Scanner::new(log.ring().pool(), log.ring().tail(), log.ring().head());
    scanner.by_ref().for_each(drop);
    scanner.losses.missing().map(|it| (it.start, it.end)).collect()
}

#[test]
fn each_record_of_one_writer_says_that_all_before_it_are_finished() {
    let log = log();
    for round in 0..300 {
        write(&log, 1, round, &[1; 4000]).unwrap();
        if round % 100 == 99 {
            let found = found(&log);
            let others = found.iter().skip(1);
            let before = found.iter().map(|it| it.position + it.record_bytes());
            for (it, end) in others.zip(before) {
                assert_eq!(it.finished, end);
            }
            log.ring().retire_to(log.ring().safe_position()).unwrap();
        }
    }
}

#[test]
fn the_rest_of_a_lap_is_no_loss_and_a_record_before_it_is() {
    let log = log();
    let ring_bytes = log.ring().pool().ring_bytes();
    let lap = |position: u64| position / ring_bytes;
    let first = lap(log.ring().head());
    let mut last = 0;
    loop {
        let position = write(&log, 1, 0, &[1; 4000]).unwrap();
        if lap(position) > first {
            break;
        }
        last = position;
        if log.ring().head() - log.ring().tail() > ring_bytes / 2 {
            log.ring().retire_to(log.ring().safe_position()).unwrap();
        }
    }
    assert_eq!(missing(&log), []);
    let region = log.ring().pool().region();
    region.write(log.ring().pool().region_offset(last), &[0; 64]).unwrap();
    let end = last + 4096;
    assert_eq!(missing(&log), [(last, end)], "not the rest of the lap behind it");
}

#[test]
fn a_writer_in_the_middle_holds_the_finished_position_and_others_catch_up_behind_it() {
    let log = log();
    write(&log, 1, 0, &[1; 64]).unwrap();
    let (_, slot) = log.ring().control.take_slot().unwrap();
    let reserved =
        log.ring().reserve(slot.record, 1024, log.ring().usable_bytes(ring::Share::Data)).unwrap();
    for _ in 0..40 {
        write(&log, 1, 0, &[2; 4000]).unwrap();
    }
    assert_eq!(found(&log).last().unwrap().finished, reserved.from);
    assert_eq!(missing(&log), []);
    log.ring().finish(slot, &reserved, 0);
    let position = write(&log, 1, 0, &[2; 4000]).unwrap();
    assert_eq!(found(&log).last().unwrap().finished, position);
    write(&log, 1, 0, &[2; 4000]).unwrap();
    assert_eq!(found(&log).last().unwrap().finished, position + 4096, "without looking again");
    // The record that was said to be finished was never stored.
    assert_eq!(missing(&log), [(reserved.position, reserved.end)]);
}

#[test]
fn the_hole_of_a_dead_writer_is_never_below_the_finished_position() {
    let log = log();
    write(&log, 1, 0, &[1; 64]).unwrap();
    let hole = std::thread::scope(|scope| {
        let dying = || {
            let (_, slot) = log.ring().control.take_slot().unwrap();
            log.ring()
                .reserve(slot.record, 1024, log.ring().usable_bytes(ring::Share::Data))
                .unwrap()
        };
        scope.spawn(dying).join().unwrap()
    });
    write(&log, 1, 0, &[2; 4000]).unwrap();
    let dead = log.operations().all().next().unwrap();
    assert_eq!(dead.header, None);
    log.operations().complete(&dead);
    for _ in 0..40 {
        write(&log, 1, 0, &[2; 4000]).unwrap();
    }
    assert_eq!(found(&log).last().unwrap().finished, hole.from);
    assert_eq!(missing(&log), []);
    log.ring().retire_to(log.ring().safe_position()).unwrap();
    let position = write(&log, 1, 0, &[2; 4000]).unwrap();
    assert_eq!(found(&log).last().unwrap().finished, position, "the tail has passed the hole");
}

#[test]
fn a_full_log_takes_no_data_but_what_must_be_said_until_it_is_retired() {
    let log = log();
    while write(&log, 1, 0, &[1; 4096]).is_ok() {}
    assert_eq!(write(&log, 1, 0, &[1; 4096]), Err(AppendError::Full));
    let guard = log.lock(log.entry_for(&key(1)).unwrap()).unwrap();
    guard.begin().unwrap().end().unwrap();
    drop(guard);
    let safe = log.ring().safe_position();
    assert_eq!(safe, log.ring().head());
    log.ring().retire_to(safe).unwrap();
    assert!(found(&log).is_empty());
    // Several laps.
    for round in 0..2000_u64 {
        write(&log, 1, round, &[3; 4000]).unwrap();
        if round % 100 == 99 {
            assert_eq!(found(&log).len(), 101, "100 writes, and a definition anew");
            log.ring().retire_to(log.ring().safe_position()).unwrap();
        }
    }
}

/// Others have written and retired since it looked at the head.
#[test]
fn a_tail_that_has_passed_where_a_record_would_be_is_no_lack_of_space() {
    let log = log();
    log.ring().show_space(log.ring().head() + 4096);
    let (_, slot) = log.ring().control.take_slot().unwrap();
    log.ring().reserve(slot.record, 64, log.ring().usable_bytes(ring::Share::Data)).unwrap();
}

#[test]
fn a_large_record_without_space_asks_for_all_of_it_at_once() {
    let log = log();
    while write(&log, 1, 0, &[1; 4096]).is_ok() {}
    assert!(log.ring().wanted() <= log.ring().tail(), "small ones take what comes");
    let large = vec![2; (POOL_BYTES / 8) as usize];
    assert_eq!(write(&log, 1, 0, &large), Err(AppendError::Full));
    assert_eq!(log.ring().wanted(), log.ring().head());
    log.ring().retire_to(log.ring().safe_position()).unwrap();
    write(&log, 1, 0, &large).unwrap();
}

/// The limit goes as far as there is free space; a log whose tail is no place of a record would be
/// refused.
#[test]
fn space_that_is_shown_in_odd_steps_makes_no_odd_position() {
    let log = log();
    let fill = || while write(&log, 1, 0, &[1; 100]).is_ok() {};
    fill();
    for step in 1..200 {
        log.ring().retire_unseen(log.ring().safe_position()).unwrap();
        log.ring().show_space(log.ring().tail() + step);
        fill();
        assert!(log.ring().tail().is_multiple_of(64), "tail {}", log.ring().tail());
        let limit = log.ring().pool().limit().unwrap();
        assert!(limit.is_multiple_of(64), "limit {limit} after a step of {step}");
    }
}

#[test]
fn a_record_too_large_for_the_log_is_refused() {
    let log = log();
    let large = vec![0; (POOL_BYTES / 4) as usize];
    assert_eq!(write(&log, 1, 0, &large), Err(AppendError::TooLarge));
}

#[test]
fn an_operation_in_the_middle_holds_the_tail() {
    let log = log();
    write(&log, 1, 0, &[1; 64]).unwrap();
    let guard = log.lock(log.entry_for(&key(2)).unwrap()).unwrap();
    let mut ticket = guard.begin().unwrap();
    let bound = log.ring().head();
    ticket.define(&definition(2)).unwrap();
    ticket.write(0, &[IoSlice::new(b"x")], false).unwrap();
    assert_eq!(log.ring().safe_position(), bound);
    drop(ticket);
    assert_eq!(log.ring().safe_position(), log.ring().head());
}

#[test]
fn a_definition_outlives_the_records_that_need_it() {
    let log = log();
    write(&log, 1, 0, &[1; 64]).unwrap();
    let guard = log.lock(log.entry_for(&key(1)).unwrap()).unwrap();
    let ticket = guard.begin().unwrap();
    assert!(!ticket.needs_define());
    // The cleaner may not pass the definition while the ticket is held,
    assert_eq!(log.ring().safe_position(), log.ring().tail());
    drop(ticket);
    // and a writer that comes after it has chosen its goal defines the file anew.
    let goal = log.ring().safe_position();
    let ticket = guard.begin().unwrap();
    assert!(ticket.needs_define());
    log.ring().retire_to(goal).unwrap();
}

#[test]
fn no_record_is_left_without_a_definition() {
    let log = log();
    write(&log, 1, 0, &[1; 64]).unwrap();
    write(&log, 2, 0, &[1; 64]).unwrap();
    let guard = log.lock(log.entry_for(&key(3)).unwrap()).unwrap();
    let ticket = guard.begin().unwrap();
    let first = log.ring().tail();
    // File 1 is written once more behind the bound of the ticket, file 2 is not.
    write(&log, 1, 0, &[2; 64]).unwrap();
    assert_eq!(log.ring().safe_position(), first, "the definition of file 1");
    // Behind that goal file 1 is defined anew: so all before it may go, up to the ticket's bound.
    write(&log, 1, 0, &[3; 64]).unwrap();
    let bound = log.ring().safe_position();
    assert!(bound > first && bound < log.ring().head());
    drop(ticket);
    assert_eq!(log.ring().safe_position(), log.ring().head());
}

#[test]
fn a_checkpoint_waits_for_the_cleaner() {
    let log = log();
    write(&log, 1, 0, &[1; 64]).unwrap();
    assert!(!log.ring().checkpoint(Duration::from_secs(60)), "nobody cleans");
    std::thread::scope(|scope| {
        let (ready, started) = std::sync::mpsc::channel();
        let log = &log;
        scope.spawn(move || {
            let _supervision = log.ring().supervise(Duration::ZERO).unwrap();
            ready.send(()).unwrap();
            // The right to clean is held until the waiter has seen the new tail.
            while log.ring().stats().total(Counter::Leaves) == 0 {
                if log.ring().wanted() > log.ring().tail() {
                    log.ring().retire_to(log.ring().safe_position()).unwrap();
                }
                std::thread::yield_now();
            }
        });
        started.recv().unwrap();
        let done = log.ring().checkpoint(Duration::from_secs(60));
        log.ring().stats().add(Counter::Leaves, 1);
        assert!(done);
    });
}

#[test]
fn the_limit_is_durable_before_a_record_passes_it() {
    let log = log();
    for _ in 0..100 {
        write(&log, 1, 0, &[1; 4096]).unwrap();
        assert!(log.ring().pool().limit().unwrap() >= log.ring().head());
        assert!(log.ring().pool().limit().unwrap() - log.ring().head() <= LIMIT_STEP_BYTES);
    }
}

#[test]
fn a_new_start_meets_no_old_record() {
    let log = log();
    for _ in 0..50 {
        write(&log, 1, 0, &[1; 4096]).unwrap();
    }
    let region = Arc::clone(log.ring().pool().region());
    drop(log);
    let pool = LogPool::open(region).unwrap();
    let all = pool.ring_bytes();
    let memory = SharedMemory::anonymous(CONTROL_BYTES).unwrap();
    let log = Ring::start(pool, memory, all).map(Log::over).unwrap();
    assert!(found(&log).is_empty());
    write(&log, 1, 0, &[1; 4096]).unwrap();
    assert_eq!(found(&log).len(), 2);
}

#[test]
fn the_operation_of_a_killed_thread_is_found() {
    let log = log();
    let file = log.entry_for(&key(1)).unwrap();
    std::thread::scope(|scope| {
        let dying = scope.spawn(|| {
            let guard = log.lock(file).unwrap();
            let mut ticket = guard.begin().unwrap();
            ticket.define(&definition(1)).unwrap();
            ticket.write(5, &[IoSlice::new(b"half")], false).unwrap();
            // Dies with the lock and the slot.
            std::mem::forget(ticket);
            std::mem::forget(guard);
        });
        dying.join().unwrap();
    });
    // The first one that gets the lock has other things to do.
    drop(log.lock(file).unwrap());
    let guard = log.lock(file).unwrap();
    assert!(guard.owner_died());
    let interrupted: Vec<_> = log.operations().interrupted_on(&guard).collect();
    let header = interrupted[0].header.unwrap();
    assert_eq!((header.kind, header.offset), (RecordKind::Write, 5));
    assert_eq!(log.operations().file_of(&interrupted[0]), Some(file));
    log.operations().complete(&interrupted[0]);
    guard.entry.clear(table::flag::ORPHANED);
    assert!(!guard.owner_died());
    assert_eq!(log.operations().all().count(), 0);
    assert_eq!(log.ring().safe_position(), log.ring().head());
}

/// One that another process has completed, and that one with the killed one's number has taken.
#[test]
fn a_slot_that_serves_another_operation_is_not_given_back() {
    let log = log();
    let guard = log.lock(log.entry_for(&key(1)).unwrap()).unwrap();
    let mut ticket = guard.begin().unwrap();
    ticket.define(&definition(1)).unwrap();
    let seen = log.operations().all().next().unwrap();
    drop(ticket);
    let mut ticket = guard.begin().unwrap();
    ticket.write(0, &[IoSlice::new(b"x")], false).unwrap();
    assert!(!log.operations().is_interrupted(&seen));
    log.operations().complete(&seen);
    assert_eq!(log.operations().all().count(), 1);
    drop(ticket);
}

/// It may have been killed between the store of the header and the fence.
#[test]
fn the_record_of_a_killed_thread_is_made_durable_before_it_counts() {
    let seen = Arc::new(WriteBacks::default());
    let region = Arc::new(Region::anonymous(POOL_BYTES).unwrap().observed(seen.clone()));
    create(&region, &LogOptions::default()).unwrap();
    let (pool, memory) =
        (LogPool::open(region).unwrap(), SharedMemory::anonymous(CONTROL_BYTES).unwrap());
    let all = pool.ring_bytes();
    let log = Ring::start(pool, memory, all).map(Log::over).unwrap();
    let file = log.entry_for(&key(1)).unwrap();
    let position = std::thread::scope(|scope| {
        let dying = || {
            let guard = log.lock(file).unwrap();
            let mut ticket = guard.begin().unwrap();
            ticket.define(&definition(1)).unwrap();
            let position = ticket.write(5, &[IoSlice::new(b"half")], false).unwrap();
            std::mem::forget(ticket);
            std::mem::forget(guard);
            position
        };
        scope.spawn(dying).join().unwrap()
    });
    let guard = log.lock(file).unwrap();
    seen.0.lock().unwrap().clear();
    assert!(log.operations().interrupted_on(&guard).next().unwrap().header.is_some());
    assert_eq!(*seen.0.lock().unwrap(), [log.ring().pool().region_offset(position)]);
}

#[test]
fn an_entry_is_given_away_only_when_nothing_of_it_is_needed() {
    let log = log();
    write(&log, 1, 0, b"live").unwrap();
    let live = log.entry_for(&key(1)).unwrap();
    let pin = log.entry_for(&key(2)).unwrap();
    log.lock(pin).unwrap().mark_unlogged(true);
    let idle = log.entry_for(&key(3)).unwrap();
    for inode in 4..=FILES_MAX + 1 {
        log.entry_for(&key(inode)).unwrap();
    }
    assert_eq!(log.lock(idle).err(), Some(LockError::Stale));
    assert!(!log.is_covered(idle));
    assert_eq!(log.entry_for(&key(1)).unwrap(), live);
    assert_eq!(log.entry_for(&key(2)).unwrap(), pin);
    let again = log.entry_for(&key(3)).unwrap();
    assert_ne!(again, idle);
    assert_eq!(FileRef::from_word(again.to_word()), again);
}

#[test]
fn files_that_had_the_same_number_are_not_searched_for_ever() {
    let log = log();
    let file = |identity| FileKey { identity, ..key(1) };
    // One whose file system was unmounted, it may be: the log has something of it.
    write(&log, 1, 0, b"x").unwrap();
    let other = log.entry_for(&key(1)).unwrap();
    for identity in 2..100 {
        let removed = log.entry_for(&file(identity)).unwrap();
        assert_eq!(log.find(&file(identity)).unwrap(), Some(removed));
        // A process that has it open finds it.
        assert_eq!(log.entry_for(&file(identity)).unwrap(), removed);
    }
    assert_eq!(crate::log::control::table::chain_len(&log.ring().control, &key(1)), 2);
    assert_eq!(log.entry_for(&key(1)).unwrap(), other);
    // What is in no chain is given away, too.
    for inode in 2..=2 * FILES_MAX {
        log.entry_for(&key(inode)).unwrap();
    }
}

#[test]
fn two_attach_to_what_one_started() {
    let dir = tempfile::tempdir().unwrap();
    let (pool, control) = (dir.path().join("pool"), dir.path().join("control"));
    let options = RegionOptions {
        create_bytes: Some(POOL_BYTES),
        domain: Some(crate::pmem::Domain::Volatile),
        sparse: true,
        ..RegionOptions::default()
    };
    let region = Arc::new(Region::open(&pool, &options).unwrap());
    create(&region, &LogOptions::default()).unwrap();
    let memory = SharedMemory::create(&control, CONTROL_BYTES).unwrap();
    let supervisor = Ring::start(LogPool::open(region).unwrap(), memory, 0).map(Log::over).unwrap();
    let guest = Ring::attach(&pool, &control).map(Log::over).unwrap();
    assert!(!guest.ring().supervisor_alive());
    let supervision = supervisor.ring().supervise(Duration::ZERO).unwrap();
    assert!(guest.ring().supervisor_alive());
    assert_eq!(write(&guest, 1, 0, b"x"), Err(AppendError::Full), "no space was allocated yet");
    while supervisor.ring().allocate(64 << 10).unwrap() > 0 {}
    write(&guest, 1, 0, b"x").unwrap();
    assert_eq!(found(&supervisor).len(), 2);
    drop(supervision);
    assert!(!guest.ring().supervisor_alive());
}

#[test]
fn wild_numbers_on_the_medium_are_refused() {
    let base = pool().superblock().data_offset;
    let refused = |offset: u64, position: u64| {
        let region = Arc::clone(pool().region());
        for offset in [offset, offset + layout::COPY_DISTANCE] {
            region.store_u64(base + offset, layout::position_word(position)).unwrap();
        }
        LogPool::open(region).unwrap_err()
    };
    for wild in [64, (1 << 62) - 64, POOL_BYTES * 5] {
        let inconsistent = |error| matches!(error, LogError::Inconsistent { .. });
        assert!(inconsistent(refused(TAIL_OFFSET, wild)), "tail {wild}");
        assert!(inconsistent(refused(LIMIT_OFFSET, wild)), "limit {wild}");
    }
    // One damaged copy of the header does no harm, two do.
    let region = Arc::clone(pool().region());
    region.store_u64(base + 16, 1).unwrap();
    LogPool::open(Arc::clone(&region)).unwrap();
    region.store_u64(base + layout::SECOND_HEADER_OFFSET + 16, 1).unwrap();
    assert!(matches!(LogPool::open(region), Err(LogError::Header { .. })));
}

#[test]
fn a_log_of_another_format_is_refused() {
    let region = Arc::clone(pool().region());
    let base = pool().superblock().data_offset;
    for at in [base, base + layout::SECOND_HEADER_OFFSET] {
        let mut header = [0; 64];
        region.read(at, &mut header).unwrap();
        header[..16].copy_from_slice(b"TIDELOG1\0\0\0\0\0\0\0\0");
        let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &header);
        header[8..16].copy_from_slice(&sum.to_le_bytes());
        region.write(at, &header).unwrap();
    }
    let refused = LogPool::open(region).unwrap_err();
    assert!(matches!(&refused, LogError::Format { found } if found == "TIDELOG1"), "{refused}");
}

#[test]
fn a_session_is_noted_and_closed() {
    let pool = pool();
    assert_eq!(pool.session().unwrap(), None);
    pool.set_session([7; 16]).unwrap();
    assert_eq!(pool.session().unwrap(), Some([7; 16]));
    pool.set_session([0; 16]).unwrap();
    assert_eq!(pool.session().unwrap(), None);
}

#[test]
fn payload_parts_lie_one_after_the_other() {
    let log = log();
    let guard = log.lock(log.entry_for(&key(1)).unwrap()).unwrap();
    let mut ticket = guard.begin().unwrap();
    ticket.define(&definition(1)).unwrap();
    let parts = [IoSlice::new(b"one"), IoSlice::new(b""), IoSlice::new(b"three")];
    ticket.write(9, &parts, false).unwrap();
    let record = *found(&log).last().unwrap();
    assert_eq!(payload(&log, &record), b"onethree");
    assert_eq!(record.encode(log.ring().pool().salt()).as_bytes().len(), 64);
}

#[test]
fn a_ring_that_gets_no_more_space_is_used_as_far_as_it_has() {
    let memory = SharedMemory::anonymous(CONTROL_BYTES).unwrap();
    let log = Ring::start(pool(), memory, 128 << 10).map(Log::over).unwrap();
    let data = [7; 1000];
    let before = log.ring().head();
    while write(&log, 1, 0, &data).is_ok() {}
    assert!(log.ring().head() - before > 126 << 10 && log.ring().head() - before <= 128 << 10);
    log.ring().stop_allocating();
    assert_eq!(write(&log, 1, 0, &vec![0; 128 << 10]), Err(AppendError::TooLarge));
    for round in 0..1000 {
        if round % 50 == 0 {
            let safe = log.ring().safe_position();
            let written = log
                .ring()
                .records(log.ring().tail(), safe)
                .filter(|it| it.kind == RecordKind::Write);
            assert!(written.count() >= 50);
            log.ring().retire_to(safe).unwrap();
        }
        let position = write(&log, 1, round, &data).unwrap();
        assert!(position % log.ring().pool().ring_bytes() < 128 << 10);
    }
}

/// In a full file system a load from a hole is the end of the process.
#[test]
fn an_append_looks_at_nothing_behind_the_space_that_the_ring_has() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("pool");
    let create_bytes = Some(POOL_BYTES);
    let options = RegionOptions { create_bytes, sparse: true, ..RegionOptions::default() };
    let region = Arc::new(Region::open(&path, &options).unwrap());
    assert_eq!(region.kind(), Kind::Tmpfs);
    create(&region, &LogOptions::default()).unwrap();
    let memory = SharedMemory::anonymous(CONTROL_BYTES).unwrap();
    let log = Ring::start(LogPool::open(region).unwrap(), memory, 0).map(Log::over).unwrap();
    log.ring().allocate(128 << 10).unwrap();
    log.ring().stop_allocating();
    let taken = || std::os::unix::fs::MetadataExt::blocks(&path.metadata().unwrap());
    let before = taken();
    for lap in 0..3 {
        while write(&log, 1, lap, &[7; 1000]).is_ok() {}
        log.ring().retire_to(log.ring().safe_position()).unwrap();
    }
    assert_eq!(taken(), before);
}

#[test]
fn files_are_found_by_their_ids_many_at_once() {
    let log = log();
    let without_id = log.entry_for(&key(99)).unwrap();
    for inode in 1..6 {
        write(&log, inode, 0, b"data").unwrap();
    }
    let id = |inode| log.id_of(log.entry_for(&key(inode)).unwrap());
    let found = log.files_with_ids([id(5), 0, id(2), 77]);
    assert_eq!(found.len(), 2);
    for inode in [2, 5] {
        assert_eq!(found[&id(inode)], log.entry_for(&key(inode)).unwrap());
    }
    assert_eq!(log.id_of(without_id), 0);
}

#[test]
fn a_log_without_a_supervisor_is_retired_by_a_process_that_needs_it() {
    let log = log();
    write(&log, 1, 0, b"data").unwrap();
    let (head, tail) = (log.ring().head(), log.ring().tail());
    let file = log.entry_for(&key(1)).unwrap();
    let retired = |is_dead: bool| log.retire_alone(|_, _| is_dead, || Ok(()));
    // Begun before any goal was set: it relies on the definition at the tail.
    let guard = log.lock(file).unwrap();
    let ticket = guard.begin().unwrap();
    assert!(!retired(false) && log.ring().tail() == tail, "an operation is in the middle");
    drop(ticket);
    drop(guard);
    assert!(!log.retire_alone(|_, _| false, || Err(rustix::io::Errno::IO)), "not on the disk");
    log.note_failure(file).unwrap();
    assert!(!retired(false), "the kernel may have dropped it");
    log.lock(file).unwrap().take_failure();
    log.take_dropped();
    let supervision = log.ring().supervise(Duration::ZERO).unwrap();
    assert!(!std::thread::scope(|scope| scope.spawn(|| retired(false)).join().unwrap()));
    drop(supervision);
    let guard = log.lock(file).unwrap();
    let mut ticket = guard.begin().unwrap();
    ticket.define(&definition(1)).unwrap();
    ticket.write(0, &[IoSlice::new(b"more")], false).unwrap();
    assert!(retired(false) && log.ring().tail() == head, "the new operation is in the middle");
    std::mem::forget(ticket);
    assert!(
        retired(true)
            && log.ring().tail() == log.ring().head()
            && log.operations().all().count() == 0
    );
    assert!(!retired(true), "there is nothing left");
    assert!(guard.end_retired());
}
