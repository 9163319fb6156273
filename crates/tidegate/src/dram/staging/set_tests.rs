//! The state machine of a set under each policy, driven by random events against a model that knows
//! every version.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::coactive::Coactive;
use super::lru::Lru;
use super::pmbd::Pmbd;
use super::pmbd70::Pmbd70;
use super::replacement::Replacement;
use super::set::{FlushStep, ReadStep, Set, Victim, WriteStep};

const SLOTS: u32 = 8;
const LBAS: u64 = 24;
const RUN_BLOCKS: u64 = 4;

/// The next event; numbers choose among the possible ones.
#[derive(Debug, Clone)]
enum Event {
    BeginWrite(u64),
    EndWrite(usize),
    Read(u64),
    Background,
    EndWriteBack(usize, bool),
    /// With failing or successful write-backs.
    Flush(bool),
    Zero(u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        8 => (0..LBAS).prop_map(Event::BeginWrite),
        8 => any::<usize>().prop_map(Event::EndWrite),
        2 => (0..LBAS).prop_map(Event::Read),
        3 => Just(Event::Background),
        6 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(n, ok)| Event::EndWriteBack(n, ok)),
        1 => prop::bool::weighted(0.7).prop_map(Event::Flush),
        1 => (0..LBAS).prop_map(Event::Zero),
    ];
    prop::collection::vec(event, 1..300)
}

/// A set, the data of its slots and the device below; versions stand for data.
struct World<R> {
    set: Set<R>,
    data: Vec<u64>,
    below: BTreeMap<u64, u64>,
    acknowledged: BTreeMap<u64, u64>,
    filling: Vec<(u32, u64)>,
    /// Slot, lba, version, and whether a flush awaits the slot.
    writing: Vec<(u32, u64, u64, bool)>,
    version: u64,
    epoch: u64,
    /// A worker is at work and will ask again.
    is_called: bool,
    /// A flush is at work, and continues when the steps that it waits for are done.
    is_flushing: bool,
}

impl<R: Replacement> World<R> {
    fn new() -> Self {
        Self {
            set: Set::new(SLOTS, RUN_BLOCKS),
            data: vec![0; SLOTS as usize],
            below: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
            filling: Vec::new(),
            writing: Vec::new(),
            version: 0,
            epoch: 0,
            is_called: false,
            is_flushing: false,
        }
    }

    fn run(&mut self, event: &Event) {
        match *event {
            Event::BeginWrite(lba) => self.begin_write(lba),
            Event::EndWrite(which) => self.end_write(which),
            Event::Read(lba) => self.read(lba),
            Event::Background => {
                let mut run = Vec::new();
                self.is_called = self.set.take_background(&mut run);
                if self.is_called {
                    self.start(&run, None);
                }
            }
            Event::EndWriteBack(which, ok) => self.end_write_back(which, ok),
            Event::Flush(ok) => self.flush(ok),
            Event::Zero(lba) => self.zero(lba..(lba + 3).min(LBAS)),
        }
        (0..LBAS).for_each(|lba| self.nothing_is_lost(lba));
    }

    fn begin_write(&mut self, lba: u64) {
        match self.set.write(lba, self.epoch) {
            WriteStep::Fill(slot) => self.filling.push((slot, lba)),
            WriteStep::Wait => assert!(self.is_busy(), "no thread would wake the writer of {lba}"),
            WriteStep::Full => self.reclaim(),
        }
    }

    fn reclaim(&mut self) {
        let quota = self.set.begin_reclaim();
        if quota == 0 {
            assert!(self.is_busy(), "no thread would free slots");
            return;
        }
        let mut run = Vec::new();
        let mut tried = 0;
        while tried < quota {
            match self.set.take_victim(&mut run) {
                Victim::Of(slot) | Victim::Retry(slot) => self.start(&run, Some(slot)),
                Victim::None => break,
            }
            tried += u32::try_from(run.len()).unwrap();
        }
        assert!(tried > 0, "a writer was told to free slots and could not");
        self.set.end_reclaim();
    }

    fn is_busy(&self) -> bool {
        self.is_called || self.is_flushing || !self.filling.is_empty() || !self.writing.is_empty()
    }

    fn end_write(&mut self, which: usize) {
        if self.filling.is_empty() {
            return;
        }
        let (slot, lba) = self.filling.swap_remove(which % self.filling.len());
        self.version += 1;
        self.data[slot as usize] = self.version;
        self.acknowledged.insert(lba, self.version);
        self.set.filled(slot);
    }

    fn read(&mut self, lba: u64) {
        let expected = self.acknowledged.get(&lba).copied().unwrap_or(0);
        match self.set.read(lba) {
            ReadStep::Hit(slot) => assert_eq!(self.data[slot as usize], expected, "hit of {lba}"),
            ReadStep::Miss => assert_eq!(self.version_below(lba), expected, "miss of {lba}"),
            ReadStep::Wait => assert!(self.filling.iter().any(|&(_, filling)| filling == lba)),
        }
    }

    fn version_below(&self, lba: u64) -> u64 {
        self.below.get(&lba).copied().unwrap_or(0)
    }

    fn start(&mut self, run: &[u32], free: Option<u32>) {
        let lbas: Vec<u64> = run.iter().map(|&slot| self.set.lba(slot)).collect();
        assert!(lbas.windows(2).all(|pair| pair[0] + 1 == pair[1]), "no run: {lbas:?}");
        assert_eq!(
            lbas[0] / RUN_BLOCKS,
            lbas[lbas.len() - 1] / RUN_BLOCKS,
            "beyond its run: {lbas:?}"
        );
        for (&slot, lba) in run.iter().zip(lbas) {
            assert!(self.writing.iter().all(|&(_, other, ..)| other != lba), "{lba} twice");
            assert!(self.filling.iter().all(|&(filling, _)| filling != slot), "{lba} torn");
            self.writing.push((slot, lba, self.data[slot as usize], free == Some(slot)));
        }
    }

    fn end_write_back(&mut self, which: usize, ok: bool) {
        if self.writing.is_empty() {
            return;
        }
        let (slot, lba, version, free) = self.writing.swap_remove(which % self.writing.len());
        if ok {
            let old = self.below.insert(lba, version).unwrap_or(0);
            assert!(old < version, "{lba} went from version {old} to {version}");
        }
        self.set.written_back(slot, ok, free);
    }

    /// Runs a flush under load: before each of its steps another write begins and one ends.
    fn flush(&mut self, ok: bool) {
        let upto = self.epoch;
        self.epoch += 1;
        self.is_flushing = true;
        let before = self.acknowledged.clone();
        let mut run = Vec::new();
        let mut steps = 0;
        loop {
            steps += 1;
            assert!(steps < 10 * SLOTS, "the flush does not end");
            self.begin_write(u64::from(steps) % LBAS);
            self.end_write(0);
            match self.set.flush_step(upto, &mut run) {
                FlushStep::Done => break,
                FlushStep::Wait => {
                    let is_busy = !self.filling.is_empty() || !self.writing.is_empty();
                    assert!(is_busy, "the flush waits for nothing");
                    self.end_write(0);
                    self.end_write_back(0, ok);
                }
                FlushStep::WriteBack => {
                    self.start(&run, None);
                    (0..run.len()).for_each(|_| self.end_write_back(usize::MAX, ok));
                }
            }
        }
        self.is_flushing = false;
        let failed = self.set.failed_upto(upto);
        for (lba, version) in before {
            let is_durable = self.version_below(lba) >= version;
            assert!(is_durable || failed.contains(&lba), "{lba} neither durable nor failed");
        }
    }

    fn zero(&mut self, lbas: std::ops::Range<u64>) {
        self.set.close(lbas.clone());
        let mut run = Vec::new();
        let cached = self.set.cached_in(&lbas);
        let mut is_drained = true;
        for lba in cached {
            loop {
                assert_eq!(self.set.write(lba, self.epoch), WriteStep::Wait, "the range is closed");
                match self.set.drain_step(lba, &mut run) {
                    FlushStep::Done => break,
                    FlushStep::Wait => {
                        self.end_write(0);
                        self.end_write_back(0, true);
                    }
                    FlushStep::WriteBack => {
                        self.start(&run, None);
                        (0..run.len()).for_each(|_| self.end_write_back(usize::MAX, true));
                    }
                }
            }
            self.set.forget(lba);
            is_drained &= self.set.read(lba) == ReadStep::Miss;
        }
        assert!(is_drained, "something of {lbas:?} stayed in the cache");
        for lba in lbas.clone() {
            self.version += 1;
            self.below.insert(lba, self.version);
            self.acknowledged.insert(lba, self.version);
        }
        self.set.open(&lbas);
    }

    /// Data that is not below is in a slot.
    fn nothing_is_lost(&self, lba: u64) {
        let newest = self.acknowledged.get(&lba).copied().unwrap_or(0);
        let is_cached = !self.set.cached_in(&(lba..lba + 1)).is_empty();
        assert!(
            is_cached || self.version_below(lba) == newest,
            "version {newest} of {lba} is lost"
        );
    }
}

fn check<R: Replacement>(events: &[Event]) {
    let mut world = World::<R>::new();
    for event in events {
        world.run(event);
    }
    while !world.filling.is_empty() || !world.writing.is_empty() {
        world.end_write(0);
        world.end_write_back(0, true);
    }
    world.flush(true);
    for lba in 0..LBAS {
        world.read(lba);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn pmbd_keeps_every_version(events in events()) {
        check::<Pmbd>(&events);
    }

    #[test]
    fn pmbd70_keeps_every_version(events in events()) {
        check::<Pmbd70>(&events);
    }

    #[test]
    fn lru_keeps_every_version(events in events()) {
        check::<Lru>(&events);
    }

    #[test]
    fn coactive_keeps_every_version(events in events()) {
        check::<Coactive>(&events);
    }
}

/// Writes `lba` at once.
fn put<R: Replacement>(set: &mut Set<R>, lba: u64) -> WriteStep {
    let step = set.write(lba, 0);
    if let WriteStep::Fill(slot) = step {
        set.filled(slot);
    }
    step
}

fn filled<R: Replacement>(slots: u32) -> Set<R> {
    let mut set = Set::new(slots, 1);
    for lba in 0..slots.into() {
        assert!(matches!(put(&mut set, lba), WriteStep::Fill(_)));
    }
    set
}

/// Evicts the next lba successfully, and returns it.
fn evict<R: Replacement>(set: &mut Set<R>) -> u64 {
    let mut run = Vec::new();
    let Victim::Of(slot) = set.take_victim(&mut run) else { panic!("no victim") };
    assert_eq!(run, [slot]);
    let lba = set.lba(slot);
    set.written_back(slot, true, true);
    lba
}

/// Ends the write-back of `run` successfully.
fn end_well<R: Replacement>(set: &mut Set<R>, run: &[u32]) {
    for &slot in run {
        set.written_back(slot, true, false);
    }
}

fn flush<R: Replacement>(set: &mut Set<R>) {
    let mut run = Vec::new();
    while set.flush_step(u64::MAX, &mut run) == FlushStep::WriteBack {
        end_well(set, &run);
    }
}

#[test]
fn lru_evicts_by_last_use_and_gives_up_clean_blocks_without_a_write() {
    let mut set = filled::<Lru>(4);
    assert!(matches!(set.read(0), ReadStep::Hit(_)));
    put(&mut set, 1);
    assert_eq!(put(&mut set, 9), WriteStep::Full);
    assert_eq!(set.begin_reclaim(), 1);
    assert_eq!((evict(&mut set), evict(&mut set)), (2, 3));
    put(&mut set, 4);
    flush(&mut set);
    assert_eq!(set.counts(), (0, 0));
    assert!(matches!(set.read(1), ReadStep::Hit(_)), "a clean block serves reads");
    for lba in [5, 6] {
        assert!(matches!(put(&mut set, lba), WriteStep::Fill(_)));
    }
    assert_eq!(set.read(0), ReadStep::Miss, "the least recently used copy went");
    assert!(matches!(set.read(4), ReadStep::Hit(_)));
}

#[test]
fn pmbd_drains_all_at_once_and_one_writer_at_a_time() {
    let mut set = filled::<Pmbd>(8);
    assert_eq!(put(&mut set, 9), WriteStep::Full);
    assert_eq!(set.begin_reclaim(), 8);
    assert_eq!(set.begin_reclaim(), 0, "another drains");
    let drained: Vec<u64> = (0..8).map(|_| evict(&mut set)).collect();
    assert_eq!(drained, (0..8).collect::<Vec<_>>());
    set.end_reclaim();
    assert_eq!(set.read(3), ReadStep::Miss, "what is drained is gone");
    assert!(!set.wants_background());
}

#[test]
fn pmbd70_calls_the_syncer_at_70_percent_and_lets_it_stop_at_10() {
    let mut set = Set::<Pmbd70>::new(100, 1);
    for lba in 0..69 {
        put(&mut set, lba);
    }
    assert!(!set.wants_background());
    put(&mut set, 69);
    assert!(set.wants_background());
    let mut run = Vec::new();
    let mut synced = 0;
    while set.take_background(&mut run) {
        assert!(!set.wants_background(), "one syncer is enough");
        end_well(&mut set, &run);
        synced += 1;
    }
    assert_eq!(synced, 61, "70 less the 9 below the low watermark");
    for lba in 0..91 {
        put(&mut set, 1000 + lba);
    }
    assert_eq!(put(&mut set, 5000), WriteStep::Full);
    assert!(set.take_background(&mut run));
    assert_eq!(set.begin_reclaim(), 0, "the syncer is at it");
    set.end_background();
    assert!(set.begin_reclaim() > 0, "it is not any more");
}

#[test]
fn coactive_cleans_cold_blocks_ahead_and_gives_copies_up_first() {
    let mut set = filled::<Coactive>(8);
    put(&mut set, 0); // Written twice: hot. That was also the first generation and one more.
    let mut run = Vec::new();
    for _ in 0..3 {
        assert!(set.wants_background() && set.take_background(&mut run));
        end_well(&mut set, &run);
    }
    assert_eq!(set.counts(), (5, 0), "1, 2 and 3 are clean, the oldest cold ones");
    assert!(matches!(set.read(1), ReadStep::Hit(_)));
    assert!(matches!(put(&mut set, 8), WriteStep::Fill(_)));
    assert_eq!(set.read(2), ReadStep::Miss, "the least recently used copy went, not 1");
    assert!(matches!(set.read(1), ReadStep::Hit(_)));
    while set.take_background(&mut run) {
        end_well(&mut set, &run);
    }
    assert!(!set.wants_background());
    assert_eq!(set.counts(), (1, 0), "the hot block stays dirty");
}

#[test]
fn coactive_evicts_cold_before_hot_and_hot_blocks_cool_down() {
    let mut set = filled::<Coactive>(4);
    for lba in [0, 1] {
        put(&mut set, lba);
    }
    assert_eq!(put(&mut set, 100), WriteStep::Full);
    assert_eq!((evict(&mut set), evict(&mut set)), (2, 3), "0 and 1 are hot");
    // Two generations of writes to one other block.
    for _ in 0..10 {
        put(&mut set, 50);
    }
    let mut run = Vec::new();
    assert!(set.take_background(&mut run), "0 is cold again");
    assert_eq!(set.lba(run[0]), 0);
}

#[test]
fn a_failed_block_is_set_aside_and_tried_again_when_nothing_else_is_left() {
    let mut set = filled::<Lru>(2);
    let mut run = Vec::new();
    let Victim::Of(slot) = set.take_victim(&mut run) else { panic!("no victim") };
    set.written_back(slot, false, true);
    assert_eq!(set.counts(), (2, 1));
    assert!(set.has_failed(0) && matches!(set.read(0), ReadStep::Hit(_)));
    assert_eq!(evict(&mut set), 1);
    put(&mut set, 2);
    assert_eq!(evict(&mut set), 2, "block 0 is still set aside");
    assert_eq!(set.take_victim(&mut run), Victim::Retry(slot));
    set.written_back(slot, true, true);
    assert_eq!((set.counts(), set.read(0)), ((0, 0), ReadStep::Miss));
}

#[test]
fn a_write_waits_where_a_flush_waits_for_the_block() {
    let mut set = Set::<Lru>::new(4, 1);
    let WriteStep::Fill(slot) = set.write(7, 0) else { panic!("no slot") };
    let mut run = Vec::new();
    assert_eq!(set.flush_step(0, &mut run), FlushStep::Wait);
    set.filled(slot);
    assert_eq!(set.write(7, 1), WriteStep::Wait, "or the flush might never find it at rest");
    assert_eq!(set.flush_step(0, &mut run), FlushStep::WriteBack);
    assert_eq!(set.write(7, 1), WriteStep::Wait, "two versions would be on their way");
    assert!(matches!(set.read(7), ReadStep::Hit(_)));
    set.written_back(slot, true, false);
    assert!(matches!(set.write(7, 1), WriteStep::Fill(_)));
    assert_eq!(set.flush_step(0, &mut run), FlushStep::Done, "epoch 1 came later");
}
