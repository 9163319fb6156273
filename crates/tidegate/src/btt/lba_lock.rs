//! Locks by lba, each with a version and its last writer: writers exclude each other, readers only look.
//!
//! Many lbas share a lock; those of one lock are called its bucket. Invariants:
//! 1. Whoever changes the map entry of an lba holds the lock of that lba.
//! 2. The version of a lock grows by one at each unlock. While it stands still, at most the present holder
//!    has changed a map entry under it, and no block that such a change freed has been reused (the holder
//!    releases its lane, and so the freed block, only after it has unlocked).
//! 3. Of all map entries of a bucket, only the one that the last writer's lane changed in its last write may
//!    not be durable: each writer makes its predecessor's durable before it becomes the last writer.
//!
//! So a reader that finds the same version before it looks up the map and after it has copied the block
//! has copied a block that belonged to its lba all the while: it registers nowhere, and no writer has to
//! look for it. The kernel's reader table (rtt) makes each writer scan all lanes instead. And a writer knows
//! from the last writer whether the entry it replaces needs to be written back, which is seldom.

use crate::sync::{AtomicU64, Ordering, fence};

/// Locks of an arena: enough that two lbas in flight seldom share one (32 KiB).
pub(super) const LOCKS_LOG2: u32 = 12;

// A word: bit 0 locked, bits 1 to 15 the last writer's lane plus one (0: none yet), the rest the version.
const LOCKED: u64 = 1;
const WRITER_SHIFT: u32 = 1;
const WRITER: u64 = 0x7FFF << WRITER_SHIFT;
const ONE_VERSION: u64 = 1 << 16;

/// The locks of one arena.
pub(super) struct LbaLocks {
    words: Box<[AtomicU64]>,
    shift: u32,
}

/// A version as a reader saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Version(u64);

/// A lock held; dropping it unlocks.
pub(super) struct LbaGuard<'a> {
    word: &'a AtomicU64,
    /// What the word was, unlocked.
    value: u64,
}

impl LbaLocks {
    /// `1 << locks_log2` locks (1 to 31).
    pub(super) fn new(locks_log2: u32) -> Self {
        let words = (0..1 << locks_log2).map(|_| AtomicU64::new(0)).collect();
        Self { words, shift: 32 - locks_log2 }
    }

    /// Locks `lba`, calling `relax` while another holds it. A holder never waits for a lane, and locks further lbas
    /// only in ascending order of their [`rank`](Self::rank).
    pub(super) fn lock(&self, lba: u32, relax: impl Fn()) -> LbaGuard<'_> {
        let word = self.word(lba);
        loop {
            let value = word.load(Ordering::Relaxed) & !LOCKED;
            if word
                .compare_exchange_weak(value, value | LOCKED, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
            {
                return LbaGuard { word, value };
            }
            relax();
        }
    }

    /// The place of `lba`'s lock in the order in which several are locked.
    pub(super) fn rank(&self, lba: u32) -> usize {
        self.index(lba)
    }

    /// Whether two lbas share a lock.
    pub(super) fn same_bucket(&self, one: u32, other: u32) -> bool {
        self.index(one) == self.index(other)
    }

    /// The version before a read. Nothing that the read loads is loaded before it.
    pub(super) fn version(&self, lba: u32) -> Version {
        Version(self.word(lba).load(Ordering::Acquire) | LOCKED)
    }

    /// Whether the version is still `version` after the copy: every load of the copy comes before this one.
    pub(super) fn unchanged(&self, lba: u32, version: Version) -> bool {
        fence(Ordering::Acquire);
        Version(self.word(lba).load(Ordering::Relaxed) | LOCKED) == version
    }

    fn word(&self, lba: u32) -> &AtomicU64 {
        &self.words[self.index(lba)]
    }

    /// Neighbours go to distant words, so that sequential writers do not share a cache line.
    fn index(&self, lba: u32) -> usize {
        (lba.wrapping_mul(0x9E37_79B1) >> self.shift) as usize
    }
}

impl LbaGuard<'_> {
    /// The lane that last changed a map entry of the bucket.
    pub(super) fn last_writer(&self) -> Option<u32> {
        let writer =
            u32::try_from((self.value & WRITER) >> WRITER_SHIFT).expect("a writer has 15 bits");
        writer.checked_sub(1)
    }

    /// The holder's lane has changed a map entry of the bucket, and its predecessor's is durable.
    pub(super) fn set_writer(&mut self, lane: u32) {
        self.value = self.value & !WRITER | u64::from(lane + 1) << WRITER_SHIFT;
    }
}

impl Drop for LbaGuard<'_> {
    fn drop(&mut self) {
        self.word.store(self.value.wrapping_add(ONE_VERSION), Ordering::Release);
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn a_version_changes_at_unlock_only() {
        let locks = LbaLocks::new(4);
        let before = locks.version(7);
        let guard = locks.lock(7, || ());
        assert!(locks.unchanged(7, before));
        assert_eq!(locks.version(7), before);
        drop(guard);
        assert!(!locks.unchanged(7, before));
    }

    #[test]
    fn the_last_writer_is_kept_until_the_next() {
        let locks = LbaLocks::new(4);
        assert_eq!(locks.lock(7, || ()).last_writer(), None);
        locks.lock(7, || ()).set_writer(255);
        drop(locks.lock(7, || ()));
        assert_eq!(locks.lock(7, || ()).last_writer(), Some(255));
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::super::lane::Lanes;
    use super::*;

    /// Two lbas, each a map entry and its copy on the medium; blocks of two words; and the real lanes.
    struct Model {
        locks: LbaLocks,
        lanes: Lanes,
        map: [AtomicU64; 2],
        medium: [AtomicU64; 2],
        blocks: [[AtomicU64; 2]; 4],
    }

    impl Model {
        /// Lbas 0 and 1 start in blocks 0 and 1; the lanes' free blocks follow.
        fn new(lanes: u32) -> Arc<Self> {
            Arc::new(Self {
                locks: LbaLocks::new(4),
                lanes: Lanes::with_free_blocks(2..2 + lanes),
                map: [AtomicU64::new(0), AtomicU64::new(1)],
                medium: [AtomicU64::new(0), AtomicU64::new(1)],
                blocks: [(); 4].map(|()| [AtomicU64::new(0), AtomicU64::new(0)]),
            })
        }

        /// The write of the arena, less the flog.
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
            if let Some(stale) =
                guard.last_writer().and_then(|writer| self.lanes.unfenced_lba(writer))
                && self.locks.same_bucket(stale, lba)
            {
                self.persist(stale);
            }
            // Invariant 5 of the BTT: the flog entry may become valid now.
            assert_eq!(self.medium[lba as usize].load(Ordering::Relaxed), old);
            self.map[lba as usize].store(lane.free_block().into(), Ordering::Release);
            lane.advance(lba, u32::try_from(old).unwrap());
            guard.set_writer(lane.number);
        }

        /// A write-back and a fence.
        fn persist(&self, lba: u32) {
            let entry = self.map[lba as usize].load(Ordering::Acquire);
            self.medium[lba as usize].store(entry, Ordering::Relaxed);
        }

        /// The optimistic read of the arena; None where it has to be tried again.
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

    #[test]
    fn loom_a_lock_excludes() {
        loom::model(|| {
            let shared = Arc::new((LbaLocks::new(1), AtomicU64::new(0)));
            let increment = |shared: &(LbaLocks, AtomicU64)| {
                let _guard = shared.0.lock(0, thread::yield_now);
                let value = shared.1.load(Ordering::Relaxed);
                shared.1.store(value + 1, Ordering::Relaxed);
            };
            let other = {
                let shared = shared.clone();
                thread::spawn(move || increment(&shared))
            };
            increment(&shared);
            other.join().unwrap();
            assert_eq!(shared.1.load(Ordering::Relaxed), 2);
        });
    }
}
