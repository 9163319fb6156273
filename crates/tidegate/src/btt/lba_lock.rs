//! Locks by lba, each with a version: writers exclude each other, readers only look.
//!
//! Invariants:
//! 1. Whoever changes the map entry of an lba holds the lock of that lba.
//! 2. The version of a lock grows by one at each unlock. While it stands still, at most the present holder
//!    has changed a map entry under it, and no block that such a change freed has been reused (the holder
//!    releases its lane, and so the freed block, only after it has unlocked).
//!
//! So a reader that finds the same version before it looks up the map and after it has copied the block
//! has copied a block that belonged to its lba all the while: it registers nowhere, and no writer has to
//! look for it. The kernel's reader table (rtt) makes each writer scan all lanes instead.

use arrayvec::ArrayVec;

use super::lane::GROUP_MAX;
use crate::sync::{AtomicU64, Ordering, fence};

/// Locks of an arena: enough that two lbas in flight seldom share one (32 KiB).
pub(super) const LOCKS_LOG2: u32 = 12;
const LOCKED: u64 = 1;

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
}

/// The locks of a group of blocks.
pub(super) type LbaGuards<'a> = ArrayVec<LbaGuard<'a>, GROUP_MAX>;

impl LbaLocks {
    /// `1 << locks_log2` locks (1 to 31).
    pub(super) fn new(locks_log2: u32) -> Self {
        Self {
            words: (0..1 << locks_log2).map(|_| AtomicU64::new(0)).collect(),
            shift: 32 - locks_log2,
        }
    }

    /// Locks `lba`, calling `relax` while another holds it. A holder never waits for a lane.
    pub(super) fn lock(&self, lba: u32, relax: impl Fn()) -> LbaGuard<'_> {
        self.lock_word(self.index(lba), relax)
    }

    /// Locks several lbas. The words are locked in ascending order, each once, so that two groups never wait for
    /// each other.
    pub(super) fn lock_group(
        &self,
        lbas: impl Iterator<Item = u32>,
        relax: impl Fn(),
    ) -> LbaGuards<'_> {
        let mut words: ArrayVec<usize, GROUP_MAX> = lbas.map(|lba| self.index(lba)).collect();
        words.sort_unstable();
        let mut guards = LbaGuards::new();
        for (at, &word) in words.iter().enumerate() {
            if at == 0 || words[at - 1] != word {
                guards.push(self.lock_word(word, &relax));
            }
        }
        guards
    }

    fn lock_word(&self, index: usize, relax: impl Fn()) -> LbaGuard<'_> {
        let word = &self.words[index];
        loop {
            let value = word.load(Ordering::Relaxed);
            let free = value & LOCKED == 0;
            if free
                && word
                    .compare_exchange(value, value | LOCKED, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return LbaGuard { word };
            }
            relax();
        }
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

impl Drop for LbaGuard<'_> {
    fn drop(&mut self) {
        let value = self.word.load(Ordering::Relaxed);
        // Odd to even: the lock bit carries into the version.
        self.word.store(value + LOCKED, Ordering::Release);
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
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::Mutex;
    use loom::thread;

    use super::*;

    /// A map entry, two blocks of two words, and a lane with its free block.
    struct Model {
        locks: LbaLocks,
        map: AtomicU64,
        blocks: [[AtomicU64; 2]; 2],
        lane: Mutex<usize>,
    }

    impl Model {
        /// The write of the arena, less the persistence: both lbas share the lane, so each write reuses the
        /// block that the write before it freed.
        fn write(&self, value: u64) {
            let mut free_block = self.lane.lock().unwrap();
            fence(Ordering::Release);
            for word in &self.blocks[*free_block] {
                word.store(value, Ordering::Relaxed);
            }
            let guard = self.locks.lock(0, thread::yield_now);
            let old = self.map.load(Ordering::Acquire);
            self.map.store(*free_block as u64, Ordering::Release);
            drop(guard);
            *free_block = usize::try_from(old).unwrap();
        }

        /// The optimistic read of the arena; None where it has to be tried again.
        fn read(&self) -> Option<[u64; 2]> {
            let version = self.locks.version(0);
            let block = usize::try_from(self.map.load(Ordering::Acquire)).unwrap();
            let data = [0, 1].map(|word: usize| self.blocks[block][word].load(Ordering::Relaxed));
            self.locks.unchanged(0, version).then_some(data)
        }
    }

    #[test]
    fn loom_a_validated_read_is_never_torn() {
        loom::model(|| {
            let model = Arc::new(Model {
                locks: LbaLocks::new(1),
                map: AtomicU64::new(0),
                blocks: [
                    [AtomicU64::new(0), AtomicU64::new(0)],
                    [AtomicU64::new(0), AtomicU64::new(0)],
                ],
                lane: Mutex::new(1),
            });
            let reader = {
                let model = model.clone();
                thread::spawn(move || {
                    if let Some([first, second]) = model.read() {
                        assert_eq!(first, second);
                    }
                })
            };
            (1..=2).for_each(|value| model.write(value));
            reader.join().unwrap();
            assert_eq!(model.read(), Some([2, 2]));
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
