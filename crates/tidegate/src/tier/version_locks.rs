//! Versions of blocks for readers that take no lock, and the locks of their writers.
//!
//! Many keys (lbas or groups of lbas) share a word: its bucket. A reader loads the version, reads,
//! and loads the version again. If it is unchanged, no writer of the bucket has ended a change
//! meanwhile (BTT), or begun one (log). So readers register nowhere, and writers need not look for
//! readers. The kernel's reader table (rtt) makes each writer scan all lanes instead.
//!
//! A tier changes versions in one of two ways:
//! - By locks: a writer holds the lock of its key while it changes the data that readers look up,
//!   and the unlock increments the version. A lock also keeps a number that its last holder left.
//! - By [`advance`](VersionLocks::advance), before a change begins: without a lock, or by the
//!   holder of the lock if readers must see the change before the unlock.

use crate::sync::{AtomicU64, Ordering, fence};

// A word: bit 0 locked, bits 1 to 15 the last holder's number plus one (0: none yet), then the
// version.
const LOCKED: u64 = 1;
const HOLDER_SHIFT: u32 = 1;
const HOLDER: u64 = 0x7FFF << HOLDER_SHIFT;
const ONE_VERSION: u64 = 1 << 16;

/// Words that each hold a version and a lock.
pub(crate) struct VersionLocks {
    words: Box<[AtomicU64]>,
    shift: u32,
}

/// A version as a reader saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version(u64);

/// A held lock. Dropping it unlocks.
pub(crate) struct VersionGuard<'a> {
    word: &'a AtomicU64,
    /// The word before the lock, without the lock bit.
    value: u64,
}

impl VersionLocks {
    /// Returns `1 << words_log2` words of 8 bytes each. `words_log2` is 1 to 31.
    pub(crate) fn new(words_log2: u32) -> Self {
        let words = (0..1 << words_log2).map(|_| AtomicU64::new(0)).collect();
        Self { words, shift: 64 - words_log2 }
    }

    /// Locks `key`, calling `relax` while another thread holds the lock. A holder may lock further
    /// keys only in ascending order of their [`rank`](Self::rank).
    #[inline]
    pub(crate) fn lock(&self, key: impl Into<u64>, relax: impl Fn()) -> VersionGuard<'_> {
        let word = self.word(key);
        loop {
            let value = word.load(Ordering::Relaxed) & !LOCKED;
            if word
                .compare_exchange_weak(value, value | LOCKED, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
            {
                return VersionGuard { word, value };
            }
            relax();
        }
    }

    /// Waits until each lock that is held at the call was unlocked, calling `relax` meanwhile.
    pub(crate) fn await_holders(&self, relax: impl Fn()) {
        for word in &self.words {
            while word.load(Ordering::Acquire) & LOCKED != 0 {
                relax();
            }
        }
    }

    /// Returns the rank of the lock of `key`: a thread locks keys in ascending order of ranks.
    #[inline]
    pub(crate) fn rank(&self, key: impl Into<u64>) -> usize {
        // Neighbours go to distant words, so that sequential writers do not share a cache line.
        let mixed = key.into().wrapping_mul(0x9E37_79B9_7F4A_7C15);
        #[expect(clippy::cast_possible_truncation, reason = "the shift leaves at most 31 bits")]
        let rank = (mixed >> self.shift) as usize;
        rank
    }

    /// Returns whether two keys share a lock.
    #[inline]
    pub(crate) fn same_bucket(&self, one: impl Into<u64>, other: impl Into<u64>) -> bool {
        self.rank(one) == self.rank(other)
    }

    /// Returns the version before a read. No load of the read comes before this one.
    #[inline]
    pub(crate) fn version(&self, key: impl Into<u64>) -> Version {
        Version(self.word(key).load(Ordering::Acquire) | LOCKED)
    }

    /// Returns whether the version is still `version` after a read. All loads of the read come
    /// before this one.
    #[inline]
    pub(crate) fn unchanged(&self, key: impl Into<u64>, version: Version) -> bool {
        fence(Ordering::Acquire);
        Version(self.word(key).load(Ordering::Relaxed) | LOCKED) == version
    }

    /// Advances the version of `key` before a store, so that no reader takes the new bytes for the
    /// bytes that it looked up. The caller holds the lock of `key`, or no thread uses that lock.
    #[inline]
    pub(crate) fn advance(&self, key: impl Into<u64>) {
        self.word(key).fetch_add(ONE_VERSION, Ordering::SeqCst);
    }

    #[inline]
    fn word(&self, key: impl Into<u64>) -> &AtomicU64 {
        &self.words[self.rank(key)]
    }
}

impl VersionGuard<'_> {
    /// Returns the number that the last holder left, if any.
    #[inline]
    pub(crate) fn last_holder(&self) -> Option<u32> {
        let holder =
            u32::try_from((self.value & HOLDER) >> HOLDER_SHIFT).expect("a holder has 15 bits");
        holder.checked_sub(1)
    }

    /// Leaves a number below 2^15 - 1 for the next holder.
    #[inline]
    pub(crate) fn set_holder(&mut self, holder: u32) {
        self.value = self.value & !HOLDER | u64::from(holder + 1) << HOLDER_SHIFT;
    }
}

impl Drop for VersionGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        // The holder may have advanced the version since it took the lock.
        let version = self.word.load(Ordering::Relaxed) & !(ONE_VERSION - 1);
        let unlocked = version | self.value & HOLDER;
        self.word.store(unlocked.wrapping_add(ONE_VERSION), Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const KEY: u64 = 7;

    #[test]
    fn a_version_changes_at_unlock_only() {
        let locks = VersionLocks::new(4);
        let before = locks.version(KEY);
        let guard = locks.lock(KEY, || ());
        assert!(locks.unchanged(KEY, before));
        assert_eq!(locks.version(KEY), before);
        drop(guard);
        assert!(!locks.unchanged(KEY, before));
    }

    #[test]
    fn holders_are_waited_for() {
        let locks = VersionLocks::new(4);
        locks.await_holders(|| panic!("none holds a lock"));
        let guard = std::cell::Cell::new(Some(locks.lock(KEY, || ())));
        locks.await_holders(|| drop(guard.take()));
        assert!(guard.take().is_none());
    }

    #[test]
    fn a_version_that_advances_is_another_one() {
        let locks = VersionLocks::new(4);
        let before = locks.version(KEY);
        locks.advance(KEY);
        assert!(!locks.unchanged(KEY, before));
    }

    #[test]
    fn the_holder_of_a_lock_advances_the_version_too() {
        let locks = VersionLocks::new(4);
        let mut guard = locks.lock(KEY, || ());
        guard.set_holder(3);
        let mut seen = vec![locks.version(KEY)];
        for _ in 0..2 {
            locks.advance(KEY);
            assert!(seen.iter().all(|version| !locks.unchanged(KEY, *version)));
            seen.push(locks.version(KEY));
        }
        drop(guard);
        assert!(seen.iter().all(|version| !locks.unchanged(KEY, *version)));
        assert_eq!(locks.lock(KEY, || ()).last_holder(), Some(3));
    }

    #[test]
    fn the_last_holder_is_kept_until_the_next() {
        let locks = VersionLocks::new(4);
        assert_eq!(locks.lock(KEY, || ()).last_holder(), None);
        locks.lock(KEY, || ()).set_holder(255);
        drop(locks.lock(KEY, || ()));
        assert_eq!(locks.lock(KEY, || ()).last_holder(), Some(255));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;

    #[test]
    fn loom_a_lock_excludes() {
        loom::model(|| {
            let shared = Arc::new((VersionLocks::new(1), AtomicU64::new(0)));
            let increment = |shared: &(VersionLocks, AtomicU64)| {
                let _guard = shared.0.lock(0_u32, thread::yield_now);
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

    /// A holder checks whether it may keep its value. Another thread forbids that and waits for
    /// holders. Then no value is kept any more that was not kept by then.
    #[test]
    fn loom_nothing_is_kept_after_holders_were_waited_for() {
        loom::model(|| {
            let words = [AtomicU64::new(0), AtomicU64::new(0)];
            let shared = Arc::new((VersionLocks::new(1), words));
            let holder = {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (locks, [is_forbidden, is_kept]) = &*shared;
                    let _guard = locks.lock(0_u32, thread::yield_now);
                    fence(Ordering::SeqCst);
                    if is_forbidden.load(Ordering::SeqCst) == 0 {
                        is_kept.store(1, Ordering::Relaxed);
                    }
                })
            };
            let (locks, [is_forbidden, is_kept]) = &*shared;
            is_forbidden.store(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            locks.await_holders(thread::yield_now);
            let kept = is_kept.load(Ordering::Relaxed);
            holder.join().unwrap();
            assert_eq!(is_kept.load(Ordering::Relaxed), kept);
        });
    }

    /// A cleaner moves two words from a log to a backing. A reader that finds none in the log reads
    /// the backing.
    #[test]
    fn loom_a_read_beside_an_announced_change_is_read_again() {
        loom::model(|| {
            let words = [AtomicU64::new(0), AtomicU64::new(0)];
            let shared = Arc::new((VersionLocks::new(1), AtomicU64::new(0), words));
            let cleaner = {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (versions, log, backing) = &*shared;
                    log.store(1, Ordering::Relaxed);
                    versions.advance(0_u32);
                    for word in backing {
                        word.store(1, Ordering::Release);
                    }
                })
            };
            let (versions, log, backing) = &*shared;
            let before = versions.version(0_u32);
            if log.load(Ordering::Relaxed) == 0 {
                let seen = [0, 1].map(|word: usize| backing[word].load(Ordering::Relaxed));
                assert!(seen == [0, 0] || !versions.unchanged(0_u32, before), "{seen:?}");
            }
            cleaner.join().unwrap();
        });
    }

    /// A writer moves a key from slot 0 to slot 1 and gives slot 0 up, with the key's lock; another
    /// thread then writes over slot 0, which may be before the writer unlocks the key.
    #[test]
    fn loom_a_read_beside_a_change_by_the_holder_of_the_lock_is_read_again() {
        loom::model(|| {
            let slots = [AtomicU64::new(7), AtomicU64::new(7)];
            let index = Mutex::new((0, None));
            let shared = Arc::new((VersionLocks::new(1), index, slots));
            let writer = {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (versions, index, _) = &*shared;
                    let guard = versions.lock(0_u32, thread::yield_now);
                    let mut locked = index.lock().unwrap();
                    versions.advance(0_u32);
                    *locked = (1, Some(0));
                    drop(locked);
                    drop(guard);
                })
            };
            let other = {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (_, index, slots) = &*shared;
                    let free: Option<usize> = index.lock().unwrap().1.take();
                    free.inspect(|free| slots[*free].store(8, Ordering::Release));
                })
            };
            let (versions, index, slots) = &*shared;
            let before = versions.version(0_u32);
            let slot = index.lock().unwrap().0;
            let seen = slots[slot].load(Ordering::Relaxed);
            assert!(seen == 7 || !versions.unchanged(0_u32, before), "{seen}");
            writer.join().unwrap();
            other.join().unwrap();
        });
    }
}
