//! The state machine of a set under many interleavings of a writer, an evictor, a reader and a
//! flush (shuttle).
//!
//! The threads act as the runtime does, over a set of three slots and one hot lba, and a device
//! below that fails now and then. They check P3 (reads never go back, and never miss an
//! acknowledged write) and P4 (a successful flush has written its data below). A fourth thread
//! changes the write mode while two writers compete.

use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};
use shuttle::thread;

use super::super::free_set::FreeSet;
use super::set::{FlushStep, ReadStep, Set, WriteStep};
use super::table::Table;
use super::write_mode::WriteMode;

const LBA: u64 = 5;
const SLOTS: u32 = 3;
const STAMPS: u64 = 4;
const INTERLEAVINGS: usize = 3000;

struct Tier {
    table: Table,
    set: Mutex<Set>,
    changed: Condvar,
    free: FreeSet,
    slots: [RwLock<u64>; SLOTS as usize],
    below: Mutex<u64>,
    epoch: AtomicU64,
    acknowledged: AtomicU64,
    mode: AtomicU64,
    /// Writes that bypass the cache without a lock.
    bypassing: AtomicU64,
}

const CACHED: u64 = WriteMode::Cached as u64;
const SWITCHING: u64 = WriteMode::Switching as u64;
const BYPASSING: u64 = WriteMode::Bypassing as u64;

impl Tier {
    fn new() -> Self {
        Self {
            table: Table::new(SLOTS, 0, 0),
            set: Mutex::new(Set::new()),
            changed: Condvar::new(),
            free: FreeSet::full(SLOTS),
            slots: [const { RwLock::new(0) }; SLOTS as usize],
            below: Mutex::new(0),
            epoch: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            mode: AtomicU64::new(CACHED),
            bypassing: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Set> {
        self.set.lock().unwrap()
    }

    fn wait<'a>(&self, set: MutexGuard<'a, Set>) -> MutexGuard<'a, Set> {
        self.changed.wait(set).unwrap()
    }

    fn mode(&self) -> u64 {
        self.mode.load(Ordering::SeqCst)
    }

    /// Writes one uncached block in the bypassing mode. Returns false if the bypass may not begin.
    fn write_bypassing(&self, stamp: u64) -> bool {
        if self.mode() != BYPASSING {
            return false;
        }
        self.bypassing.fetch_add(1, Ordering::SeqCst);
        let goes = self.mode() == BYPASSING && self.table.find(LBA).is_none();
        if goes {
            *self.below.lock().unwrap() = stamp;
        }
        self.bypassing.fetch_sub(1, Ordering::SeqCst);
        goes
    }

    /// Changes from bypassing to cached, if no bypass runs, and back to bypassing.
    fn switch_mode(&self) {
        self.mode.store(SWITCHING, Ordering::SeqCst);
        if self.bypassing.load(Ordering::SeqCst) == 0 {
            self.mode.store(CACHED, Ordering::SeqCst);
            thread::yield_now();
            self.mode.store(SWITCHING, Ordering::SeqCst);
        }
        drop(self.lock());
        self.mode.store(BYPASSING, Ordering::SeqCst);
    }

    /// Writes one block: bypassing, through a slot, or below with its lba closed.
    fn write(&self, stamp: u64) {
        if self.write_bypassing(stamp) {
            return self.acknowledge(stamp);
        }
        let mut set = self.lock();
        let slot = loop {
            match set.write(&self.table, LBA) {
                WriteStep::Copy(slot) => break slot,
                WriteStep::Wait => set = self.wait(set),
                step => match (self.mode() == CACHED).then(|| self.free.take()).flatten() {
                    Some(slot) => {
                        let epoch = self.epoch.load(Ordering::SeqCst);
                        set.admit(&self.table, LBA, slot, epoch);
                        break slot;
                    }
                    None if step == WriteStep::Beside => set = self.wait(set),
                    None => {
                        assert!(set.close(LBA), "a write to a closed lba waits");
                        drop(set);
                        *self.below.lock().unwrap() = stamp;
                        self.lock().open(LBA);
                        self.changed.notify_all();
                        return self.acknowledge(stamp);
                    }
                },
            }
        };
        drop(set);
        *self.slots[slot as usize].write().unwrap() = stamp;
        self.lock().written(&self.table, slot);
        self.changed.notify_all();
        self.acknowledge(stamp);
    }

    fn acknowledge(&self, stamp: u64) {
        self.acknowledged.store(stamp, Ordering::SeqCst);
    }

    fn read(&self) -> u64 {
        let mut set = self.lock();
        loop {
            match Set::read(&self.table, LBA) {
                ReadStep::Wait => set = self.wait(set),
                ReadStep::Hit(slot) => {
                    let data = self.slots[slot as usize].read().unwrap();
                    drop(set);
                    return *data;
                }
                ReadStep::Miss => {
                    drop(set);
                    return *self.below.lock().unwrap();
                }
            }
        }
    }

    /// Evicts the first slot in the queue, if any. The device fails unless `ok`.
    fn evict(&self, upto: u64, ok: bool) {
        let mut run = Vec::new();
        if !self.lock().take_for_eviction(&self.table, upto, &mut run) {
            return;
        }
        if ok {
            let stamp = *self.slots[run[0] as usize].read().unwrap();
            *self.below.lock().unwrap() = stamp;
        }
        if let Some(free) = self.lock().evicted(&self.table, run[0], ok) {
            self.free.give(free);
        }
        self.changed.notify_all();
    }

    /// Flushes. Returns whether all data of epochs before the call is below.
    fn flush(&self) -> bool {
        let upto = self.epoch.fetch_add(1, Ordering::SeqCst);
        let mut set = self.lock();
        set.begin_flush(&self.table, upto);
        let step = loop {
            match set.flush_step(&self.table, upto) {
                FlushStep::Wait => set = self.wait(set),
                FlushStep::Evict(_) => {
                    drop(set);
                    self.evict(upto, true);
                    set = self.lock();
                }
                step => break step,
            }
        };
        set.end_flush();
        self.changed.notify_all();
        step == FlushStep::Done
    }
}

fn one_writer_one_evictor_one_reader_one_flush() {
    let tier = Arc::new(Tier::new());
    let spawn = |work: fn(&Tier)| {
        let tier = tier.clone();
        thread::spawn(move || work(&tier))
    };
    let threads = [
        spawn(|tier| (1..=STAMPS).for_each(|stamp| tier.write(stamp))),
        spawn(|tier| (0..STAMPS).for_each(|round| tier.evict(u64::MAX, round != 1))),
        spawn(|tier| {
            let mut seen = 0;
            for _ in 0..STAMPS {
                let least = tier.acknowledged.load(Ordering::SeqCst).max(seen);
                seen = tier.read();
                assert!(seen >= least, "read {seen} after {least}");
            }
        }),
    ];
    for _ in 0..2 {
        let before = tier.acknowledged.load(Ordering::SeqCst);
        if tier.flush() {
            let below = *tier.below.lock().unwrap();
            assert!(below >= before, "flushed, but {below} is below and {before} was acknowledged");
        }
    }
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(tier.flush());
    assert_eq!(tier.read(), STAMPS);
    assert_eq!(*tier.below.lock().unwrap(), STAMPS);
    assert!(tier.lock().is_empty());
    assert_eq!(tier.free.count(), SLOTS);
}

/// Checks that nothing changes any more once both writes are acknowledged, whichever came first.
fn two_writers_of_a_block_while_the_mode_changes() {
    let tier = Arc::new(Tier::new());
    tier.mode.store(BYPASSING, Ordering::SeqCst);
    let spawn = |work: fn(&Tier)| {
        let tier = tier.clone();
        thread::spawn(move || work(&tier))
    };
    let writers = [spawn(|tier| tier.write(1)), spawn(|tier| tier.write(2))];
    let others =
        [spawn(Tier::switch_mode), spawn(|tier| (0..2).for_each(|_| tier.evict(u64::MAX, true)))];
    for writer in writers {
        writer.join().unwrap();
    }
    let first = tier.read();
    for other in others {
        other.join().unwrap();
    }
    assert!(tier.flush());
    let (second, below) = (tier.read(), *tier.below.lock().unwrap());
    assert_eq!((second, below), (first, first));
}

#[test]
fn shuttle_a_change_of_the_write_mode_keeps_order() {
    shuttle::check_random(two_writers_of_a_block_while_the_mode_changes, INTERLEAVINGS * 10);
    shuttle::check_pct(two_writers_of_a_block_while_the_mode_changes, INTERLEAVINGS * 10, 5);
}

#[test]
fn shuttle_random_interleavings_keep_order() {
    shuttle::check_random(one_writer_one_evictor_one_reader_one_flush, INTERLEAVINGS);
}

#[test]
fn shuttle_few_preemptions_keep_order() {
    shuttle::check_pct(one_writer_one_evictor_one_reader_one_flush, INTERLEAVINGS, 3);
}
