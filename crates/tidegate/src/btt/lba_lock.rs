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

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::pmem::Region;

const LOCKS_LOG2: u32 = 12;
const LOCKED: u64 = 1;

/// The locks of one arena.
pub(super) struct LbaLocks {
    words: Box<[AtomicU64]>,
}

/// A version as a reader saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Version(u64);

/// A lock held; dropping it unlocks.
pub(super) struct LbaGuard<'a> {
    word: &'a AtomicU64,
}

impl LbaLocks {
    pub(super) fn new() -> Self {
        Self { words: (0..1 << LOCKS_LOG2).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Locks `lba`, waiting for its present holder. A holder never waits for a lane or another lba.
    pub(super) fn lock(&self, region: &Region, lba: u32) -> LbaGuard<'_> {
        let word = self.word(lba);
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
            region.relax();
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
        // Neighbours go to distant words, so that sequential writers do not share a cache line.
        let hash = lba.wrapping_mul(0x9E37_79B1) >> (32 - LOCKS_LOG2);
        &self.words[hash as usize]
    }
}

impl Drop for LbaGuard<'_> {
    fn drop(&mut self) {
        let value = self.word.load(Ordering::Relaxed);
        // Odd to even: the lock bit carries into the version.
        self.word.store(value + LOCKED, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_changes_at_unlock_only() {
        let region = Region::anonymous(4096).unwrap();
        let locks = LbaLocks::new();
        let before = locks.version(7);
        let guard = locks.lock(&region, 7);
        assert!(locks.unchanged(7, before));
        assert_eq!(locks.version(7), before);
        drop(guard);
        assert!(!locks.unchanged(7, before));
    }
}
