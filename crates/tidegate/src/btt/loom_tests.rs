//! The locks of lbas and the lanes under all interleavings of a few writers and a reader.

use loom::sync::Arc;
use loom::thread;

use super::lane::Lanes;
use crate::sync::{AtomicU64, Ordering};
use crate::tier::version_locks::VersionLocks;

/// Two lbas, each with a map entry and its copy on the medium; blocks of two words; the real lanes.
struct Model {
    locks: VersionLocks,
    lanes: Lanes,
    map: [AtomicU64; 2],
    medium: [AtomicU64; 2],
    blocks: [[AtomicU64; 2]; 4],
}

impl Model {
    /// Lbas 0 and 1 start in blocks 0 and 1; the lanes' free blocks follow.
    fn new(lanes: u32) -> Arc<Self> {
        Arc::new(Self {
            locks: VersionLocks::new(4),
            lanes: Lanes::with_free_blocks(2..2 + lanes),
            map: [AtomicU64::new(0), AtomicU64::new(1)],
            medium: [AtomicU64::new(0), AtomicU64::new(1)],
            blocks: [(); 4].map(|()| [AtomicU64::new(0), AtomicU64::new(0)]),
        })
    }

    /// Writes as the arena does, without the flog.
    fn write(&self, thread: usize, lba: u32, value: u64) {
        let mut lane = self.lanes.wait_for_one(thread, thread::yield_now).unwrap();
        if let Some(lba) = lane.unfenced_lba() {
            self.persist(lba);
        }
        for word in &self.blocks[lane.free_block() as usize] {
            word.store(value, Ordering::Relaxed);
        }
        let mut guard = self.locks.lock(lba, thread::yield_now);
        let old = self.map[lba as usize].load(Ordering::Acquire);
        if let Some(stale) = guard.last_holder().and_then(|writer| self.lanes.unfenced_lba(writer))
            && self.locks.same_bucket(stale, lba)
        {
            self.persist(stale);
        }
        // Invariant 5 of the BTT: the flog entry may become valid now.
        assert_eq!(self.medium[lba as usize].load(Ordering::Relaxed), old);
        self.map[lba as usize].store(lane.free_block().into(), Ordering::Release);
        lane.advance(lba, u32::try_from(old).unwrap());
        guard.set_holder(lane.number);
    }

    /// Writes back and fences.
    fn persist(&self, lba: u32) {
        let entry = self.map[lba as usize].load(Ordering::Acquire);
        self.medium[lba as usize].store(entry, Ordering::Relaxed);
    }

    /// Reads optimistically as the arena does. Returns `None` if a writer interfered.
    fn read(&self, lba: u32) -> Option<[u64; 2]> {
        let version = self.locks.version(lba);
        let block = usize::try_from(self.map[lba as usize].load(Ordering::Acquire)).unwrap();
        let data = [0, 1].map(|word: usize| self.blocks[block][word].load(Ordering::Relaxed));
        self.locks.unchanged(lba, version).then_some(data)
    }
}

#[test]
fn loom_a_map_entry_is_durable_before_it_is_replaced() {
    loom::model(|| {
        let model = Model::new(2);
        let other = {
            let model = model.clone();
            thread::spawn(move || model.write(1, 0, 1))
        };
        model.write(0, 0, 2);
        model.write(0, 1, 3);
        other.join().unwrap();
        model.write(0, 0, 4);
    });
}

#[test]
fn loom_a_validated_read_is_never_torn() {
    loom::model(|| {
        let model = Model::new(1);
        let reader = {
            let model = model.clone();
            thread::spawn(move || {
                if let Some([first, second]) = model.read(0) {
                    assert_eq!(first, second);
                }
            })
        };
        (1..=2).for_each(|value| model.write(0, 0, value));
        reader.join().unwrap();
        assert_eq!(model.read(0), Some([2, 2]));
    });
}
