//! The table of files in use: a hash table in the control memory.
//!
//! Invariants:
//! 1. The table's shape (buckets, chains, files of entries) changes under the table's lock only.
//! 2. An entry's other words change under the entry's lock; some atomics may change at any time.
//! 3. An entry is given to another file only while its lock is free, none of its records is live,
//!    nothing changes the file in ways that are not logged, and no interrupted operation on the
//!    file is incomplete. Its generation grows then, so that references to the former file are
//!    stale.
//! 4. A chain that leads outside the table ends there.

use std::time::Duration;

use crate::log::control::{
    BUCKETS_AT, Control, ENTRIES_AT, ENTRY_BYTES, FILES_MAX, REAL_SYNCS_AT, SLOTS, TABLE_AT,
    TABLE_LOCK_AT, TIMEOUT, words,
};
use crate::log::error::{LockError, LogError};
use crate::pmem::{LockFailure, Locked};
use crate::sync::{AtomicU64, Ordering, store_before_loads};

const BUCKETS: u64 = 65536;
/// Entries that were ever used, from the first on.
const USED_AT: u64 = TABLE_AT;
/// Index where the search for a reusable entry continues.
const HAND_AT: u64 = TABLE_AT + 8;

const _: () = assert!(BUCKETS_AT + BUCKETS * 8 <= REAL_SYNCS_AT);

/// A file, as the kernel names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileKey {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Distinguishes the file from later files with the same inode number:
    /// [`identity`](crate::log::identity).
    pub identity: u64,
}

/// A file's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileRef {
    pub(in crate::log) index: u32,
    pub(in crate::log) generation: u32,
}

impl FileRef {
    /// Returns the reference as a word, never 0.
    pub fn to_word(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// Returns the reference in a word of [`to_word`](Self::to_word).
    pub fn from_word(word: u64) -> Self {
        let half = |word: u64| u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0);
        Self { index: half(word), generation: half(word >> 32) }
    }
}

/// The words of an entry. The first [`LOCK_BYTES`](crate::pmem::LOCK_BYTES) are its lock.
#[derive(Clone, Copy)]
pub(in crate::log) struct Entry<'a> {
    control: &'a Control,
    at: u64,
}

/// Offset of the words that are cleared when an entry gets a new file.
const ID_AT: u64 = 96;

impl<'a> Entry<'a> {
    /// Clears a bit of [`flag`]. Returns whether it was set.
    pub(in crate::log) fn take_flag(&self, bit: u64) -> bool {
        let flags = self.flags();
        flags.load(Ordering::Relaxed) & bit != 0
            && flags.fetch_and(!bit, Ordering::SeqCst) & bit != 0
    }

    /// Returns whether the entry is still that of `file`.
    #[inline]
    pub(in crate::log) fn is_of(&self, file: FileRef) -> bool {
        self.generation().load(Ordering::SeqCst) == u64::from(file.generation)
    }

    /// Returns whether any of `bits` of [`flag`] is set.
    #[inline]
    pub(in crate::log) fn has(&self, bits: u64) -> bool {
        self.flags().load(Ordering::SeqCst) & bits != 0
    }

    #[inline]
    pub(in crate::log) fn set(&self, bits: u64) {
        self.flags().fetch_or(bits, Ordering::SeqCst);
    }

    #[inline]
    pub(in crate::log) fn clear(&self, bits: u64) {
        self.flags().fetch_and(!bits, Ordering::SeqCst);
    }

    pub(in crate::log) fn key(&self) -> FileKey {
        FileKey {
            device: self.device().load(Ordering::Relaxed),
            inode: self.inode().load(Ordering::Relaxed),
            identity: self.identity().load(Ordering::Relaxed),
        }
    }

    fn word(&self, offset: u64) -> &'a AtomicU64 {
        self.control.memory().word(self.at + offset)
    }

    words! { &'a AtomicU64 = word:
        /// 0: never used.
        generation at 64;
        device at 72;
        inode at 80;
        identity at 88;
        /// Position of the file's first definition, which serves as its id in records; 0: none.
        id at ID_AT;
        /// Position of the file's last definition.
        defined_at at 104;
        /// End of the file's last record.
        last_end at 112;
        /// Bits of [`flag`].
        flags at 120;
        /// Counts changes that were made around the log.
        unlogged at 128;
        /// The value of `unlogged` at the start of the last real sync that covered the file.
        synced at 136;
        /// Number of reasons why the file may change unseen at any time.
        pins at 144;
        /// Number of the next entry of the chain plus 1, 0: none.
        next at 152;
        /// End of the last mark: growth before this position is promised.
        marked_at at 160;
        /// Bytes from the file's start that are known to be on the disk or promised by the log.
        durable_size at 168;
        /// The file system's count of changes before a change of the file that is in the journal.
        journaled_changes at 176;
        /// End of the last record that changes the file's bytes or size.
        changed_end at 184;
        /// Bytes that were logged of the file since its last sync.
        unsynced_bytes at 192;
        /// The file's size in bytes, while its changes are logged.
        size at 200;
        /// End of the records that a real sync or the story's end has made durable in the file.
        retired_end at 208;
        /// Position of the definition that the file's story begins with.
        story at 216;
        /// Counts changes of the file's names and attributes, while its changes are logged.
        own_changes at 224;
        /// The value of `own_changes` at the start of the last real sync that covered the file.
        own_synced at 232;
        /// End of the last record with the file's creation or a change of its names.
        names_end at 240;
        /// When a sync last looked at the file's size, on the monotonic clock.
        checked_ns at 248;
    }
}

/// Bits of an entry's flags.
pub(in crate::log) mod flag {
    /// All of the file is in the log or on the disk, as far as `unlogged` and `synced` agree.
    pub(in crate::log) const COVERED: u64 = 1;
    /// A story of the file has begun: its changes are logged.
    pub(in crate::log) const LOGGED: u64 = 2;
    /// The story has grown the file, or changed its size, since its last mark.
    pub(in crate::log) const GREW: u64 = 4;
    /// A write-back failed, and no sync has reported it yet.
    pub(in crate::log) const FAILED: u64 = 8;
    /// A write-back failed, after which the kernel may take pages for clean that the disk lacks.
    pub(in crate::log) const DROPPED: u64 = 16;
    /// The story has changed the file since its last sync.
    pub(in crate::log) const WRITTEN: u64 = 32;
    /// Each byte below `durable_size` is written and allocated on the disk, or promised by the log.
    pub(in crate::log) const DENSE: u64 = 64;
    /// A holder of the entry's lock was killed, and its operation is not repaired yet.
    pub(in crate::log) const ORPHANED: u64 = 128;
    /// The supervisor holds a descriptor of the file, which hears of each failed write-back.
    pub(in crate::log) const KEPT: u64 = 256;
    /// The supervisor is asked to hold a descriptor of the file.
    pub(in crate::log) const WANT_KEPT: u64 = 512;

    /// The story has cut the file since its last real sync.
    pub(in crate::log) const CUT: u64 = 1024;

    /// The file's names or attributes were changed since the story's last definition.
    pub(in crate::log) const RENAMED: u64 = 2048;

    /// The story has changed the file's names or attributes since its last sync.
    pub(in crate::log) const NAMED: u64 = 4096;
    /// A Make record covers the story: the supervisor need not hold a descriptor of the file.
    pub(in crate::log) const MADE: u64 = 8192;

    /// The story has changed the file's names.
    pub(in crate::log) const MOVED: u64 = 16384;

    /// The flags that hold for one story only.
    pub(in crate::log) const OF_STORY: u64 =
        COVERED | LOGGED | GREW | WRITTEN | DENSE | CUT | RENAMED | NAMED | MADE | MOVED;
}

/// Returns entry `index`, which must be below [`FILES_MAX`].
pub(in crate::log) fn entry(control: &Control, index: u32) -> Entry<'_> {
    let index = u64::from(index) % FILES_MAX;
    Entry { control, at: ENTRIES_AT + index * ENTRY_BYTES }
}

/// Returns the number of the bucket whose chain has the entries of this file.
pub(in crate::log) fn bucket_number(device: u64, inode: u64) -> u64 {
    let mixed = (inode ^ device.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 48) % BUCKETS
}

fn bucket(control: &Control, device: u64, inode: u64) -> &AtomicU64 {
    control.memory().word(BUCKETS_AT + bucket_number(device, inode) * 8)
}

fn narrow(index: u64) -> u32 {
    u32::try_from(index % FILES_MAX).unwrap_or(0)
}

/// Returns the entry of the file with this key; adds one if there is none.
pub(in crate::log) fn find_or_add(control: &Control, key: &FileKey) -> Result<FileRef, LogError> {
    let _lock = control.memory().lock(TABLE_LOCK_AT, TIMEOUT).map_err(LogError::Lock)?;
    if let Some(file) = find(control, key) {
        return Ok(file);
    }
    forget_dead(control, key);
    add(control, key)
}

/// Returns the entry of the file with this key, if there is one.
pub(in crate::log) fn find_only(
    control: &Control,
    key: &FileKey,
) -> Result<Option<FileRef>, LogError> {
    let _lock = control.memory().lock(TABLE_LOCK_AT, TIMEOUT).map_err(LogError::Lock)?;
    Ok(find(control, key))
}

/// Returns `false` only if no file with these numbers had an entry before the call.
pub(in crate::log) fn may_have(control: &Control, device: u64, inode: u64) -> bool {
    bucket(control, device, inode).load(Ordering::SeqCst) != 0
}

/// Returns the entries that a file with these numbers may have, with their indexes.
fn chain(control: &Control, device: u64, inode: u64) -> impl Iterator<Item = (u64, Entry<'_>)> {
    let behind = move |link: &AtomicU64| {
        let index = link.load(Ordering::Relaxed).checked_sub(1)?;
        (index < FILES_MAX).then(|| (index, entry(control, narrow(index))))
    };
    let first = behind(bucket(control, device, inode));
    let chain = std::iter::successors(first, move |(_, entry)| behind(entry.next()));
    // Bounded, since the chain of a damaged table may be a cycle.
    (0..FILES_MAX).zip(chain).map(|(_, found)| found)
}

fn find(control: &Control, key: &FileKey) -> Option<FileRef> {
    let mut chain = chain(control, key.device, key.inode);
    let found = chain.find(|(_, found)| found.key() == *key);
    found.map(|(index, found)| reference(&found, index))
}

/// Returns a file with these numbers whose changes are logged.
pub(in crate::log) fn find_logged(control: &Control, device: u64, inode: u64) -> Option<FileRef> {
    let _lock = control.memory().lock(TABLE_LOCK_AT, TIMEOUT).ok()?;
    let is_it = |(_, found): &(u64, Entry<'_>)| {
        let key = found.key();
        let is_logged = found.flags().load(Ordering::SeqCst) & flag::LOGGED != 0;
        (key.device, key.inode) == (device, inode) && is_logged
    };
    let found = chain(control, device, inode).find(is_it);
    found.map(|(index, found)| reference(&found, index))
}

fn reference(entry: &Entry<'_>, index: u64) -> FileRef {
    let generation = entry.generation().load(Ordering::Relaxed) & u64::from(u32::MAX);
    FileRef { index: narrow(index), generation: u32::try_from(generation).unwrap_or(0) }
}

fn add(control: &Control, key: &FileKey) -> Result<FileRef, LogError> {
    let used = control.memory().word(USED_AT);
    let index = used.load(Ordering::Relaxed);
    if index < FILES_MAX {
        let fresh = entry(control, narrow(index));
        control.memory().init_lock(fresh.at);
        // Used only after the lock is initialized: a crash in between leaves the entry unused.
        used.store(index + 1, Ordering::Relaxed);
        return Ok(take(control, &fresh, index, key));
    }
    let index = free_one(control)?;
    Ok(take(control, &entry(control, narrow(index)), index, key))
}

/// Gives an entry, which is in no chain, to the file with this key.
fn take(control: &Control, entry: &Entry<'_>, index: u64, key: &FileKey) -> FileRef {
    // Clears all words behind the key.
    for offset in (ID_AT..ENTRY_BYTES).step_by(8) {
        entry.word(offset).store(0, Ordering::Relaxed);
    }
    entry.device().store(key.device, Ordering::Relaxed);
    entry.inode().store(key.inode, Ordering::Relaxed);
    entry.identity().store(key.identity, Ordering::Relaxed);
    // The generation changes before the chain: a process with an old reference finds it stale.
    let generation = entry.generation().load(Ordering::Relaxed) % u64::from(u32::MAX) + 1;
    entry.generation().store(generation, Ordering::SeqCst);
    let bucket = bucket(control, key.device, key.inode);
    entry.next().store(bucket.load(Ordering::Relaxed), Ordering::Relaxed);
    // Stored in one order with the lanes: see `lanes`.
    store_before_loads(bucket, index + 1);
    reference(entry, index)
}

/// Unchains entries without live records whose inode number now belongs to the file with this key.
/// Otherwise chains would grow with each file that is created and removed, since the kernel reuses
/// a few inode numbers. A file that comes back, as after an unmount, is plain then. The entries
/// themselves are reused like all others.
fn forget_dead(control: &Control, key: &FileKey) {
    let mut link = bucket(control, key.device, key.inode);
    for _ in 0..FILES_MAX {
        let next = link.load(Ordering::Relaxed);
        let Some(index) = next.checked_sub(1).filter(|index| *index < FILES_MAX) else { return };
        let found = entry(control, narrow(index));
        if is_dead(control, &found, key) {
            link.store(found.next().load(Ordering::Relaxed), Ordering::Release);
        } else {
            link = found.next();
        }
    }
}

fn is_dead(control: &Control, entry: &Entry<'_>, successor: &FileKey) -> bool {
    let key = entry.key();
    entry.last_end().load(Ordering::SeqCst) <= control.tail().load(Ordering::SeqCst)
        && (key.device, key.inode) == (successor.device, successor.inode)
        && key.identity != successor.identity
}

/// Returns how many entries a search for this key may look at.
#[cfg(all(test, not(loom)))]
pub(in crate::log) fn chain_len(control: &Control, key: &FileKey) -> usize {
    chain(control, key.device, key.inode).count()
}

/// Unchains an entry that its file does not need any more. Returns its index.
fn free_one(control: &Control) -> Result<u64, LogError> {
    let hand = control.memory().word(HAND_AT);
    for _ in 0..FILES_MAX {
        let index = hand.load(Ordering::Relaxed) % FILES_MAX;
        hand.store(index + 1, Ordering::Relaxed);
        let candidate = entry(control, narrow(index));
        let Ok(locked) = control.memory().try_lock(candidate.at) else { continue };
        keep_word(&candidate, &locked);
        if is_needed(control, &candidate) || is_interrupted(control, &candidate, index) {
            continue;
        }
        // From here on all references are stale, also for a thread that waits for the lock.
        let generation = candidate.generation().load(Ordering::Relaxed);
        candidate.generation().store(generation + 1, Ordering::SeqCst);
        unchain(control, &candidate, index);
        return Ok(index);
    }
    Err(LogError::TableFull { most: FILES_MAX })
}

fn is_needed(control: &Control, entry: &Entry<'_>) -> bool {
    entry.last_end().load(Ordering::SeqCst) > control.tail().load(Ordering::SeqCst)
        || entry.pins().load(Ordering::SeqCst) > 0
        || entry.flags().load(Ordering::Relaxed) & flag::FAILED != 0
}

/// Returns whether an operation on the file, whose lock the caller holds, was interrupted and is
/// not completed.
fn is_interrupted(control: &Control, entry: &Entry<'_>, index: u64) -> bool {
    let has_slot =
        || (0..SLOTS).any(|number| control.slot(number).file.load(Ordering::Acquire) == index + 1);
    entry.flags().load(Ordering::SeqCst) & flag::ORPHANED != 0 && has_slot()
}

fn unchain(control: &Control, gone: &Entry<'_>, index: u64) {
    let key = gone.key();
    let after = gone.next().load(Ordering::Relaxed);
    let mut link = bucket(control, key.device, key.inode);
    for _ in 0..FILES_MAX {
        let next = link.load(Ordering::Relaxed);
        if next == index + 1 {
            link.store(after, Ordering::Release);
            return;
        }
        let Some(at) = next.checked_sub(1).filter(|at| *at < FILES_MAX) else { return };
        link = entry(control, narrow(at)).next();
    }
}

/// Locks the entry if it still belongs to `file`.
pub(in crate::log) fn lock(
    control: &Control,
    file: FileRef,
    timeout: Duration,
) -> Result<Locked<'_>, LockError> {
    let entry = entry(control, file.index);
    if !entry.is_of(file) {
        return Err(LockError::Stale);
    }
    let locked = control.memory().lock(entry.at, timeout).map_err(|failure| match failure {
        LockFailure::TimedOut => LockError::Busy,
        LockFailure::Reentered => LockError::Reentered,
        LockFailure::Damaged => LockError::Stale,
    })?;
    // Also if the entry now belongs to another file: that file's lock it is now.
    keep_word(&entry, &locked);
    if entry.is_of(file) { Ok(locked) } else { Err(LockError::Stale) }
}

/// Notes in the entry that the lock's holder died: the kernel tells only the next owner, which may
/// be unable to repair.
fn keep_word(entry: &Entry<'_>, locked: &Locked<'_>) {
    if locked.owner_died() {
        entry.set(flag::ORPHANED);
    }
}

/// Returns all entries that were ever used.
pub(in crate::log) fn all(control: &Control) -> impl Iterator<Item = (FileRef, Entry<'_>)> {
    let used = control.memory().word(USED_AT).load(Ordering::Acquire).min(FILES_MAX);
    (0..used).map(|index| {
        let entry = entry(control, narrow(index));
        (reference(&entry, index), entry)
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::log::tests::{key, log};

    /// Otherwise the lock's next holder would use a file that a killed process left half changed.
    #[test]
    fn who_finds_another_file_behind_a_dead_holders_lock_keeps_the_word_of_it() {
        let log = log();
        let former = log.entry_for(&key(1)).unwrap();
        let current = FileRef { generation: former.generation + 1, ..former };
        let entry = entry(&log.ring().control, former.index);
        let (locked, is_locked) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let log = &log;
            scope.spawn(move || {
                let guard = log.lock(former).unwrap();
                locked.send(()).unwrap();
                let word = log.ring().control.memory().half(entry.at);
                while word.load(Ordering::Acquire) & libc::FUTEX_WAITERS == 0 {
                    std::thread::yield_now();
                }
                entry.generation().store(u64::from(current.generation), Ordering::SeqCst);
                std::mem::forget(guard);
            });
            is_locked.recv().unwrap();
            assert_eq!(log.lock(former).err(), Some(LockError::Stale));
        });
        assert!(log.lock(current).unwrap().owner_died());
    }

    #[test]
    fn an_entry_whose_holder_was_killed_in_an_operation_is_not_given_away() {
        let log = log();
        let file = log.entry_for(&key(1)).unwrap();
        let die = |with_a_slot: bool| {
            std::thread::scope(|scope| {
                let dying = scope.spawn(|| {
                    let guard = log.lock(file).unwrap();
                    if with_a_slot {
                        std::mem::forget(guard.begin().unwrap());
                    }
                    std::mem::forget(guard);
                });
                dying.join().unwrap();
            });
        };
        die(true);
        for inode in 2..=FILES_MAX + 1 {
            log.entry_for(&key(inode)).unwrap();
        }
        let guard = log.lock(file).unwrap();
        assert!(guard.owner_died());
        log.operations().interrupted_on(&guard).for_each(|it| log.operations().complete(&it));
        guard.entry.clear(flag::ORPHANED);
        drop(guard);
        // This holder leaves no operation to complete.
        die(false);
        for inode in FILES_MAX + 2..=2 * FILES_MAX + 2 {
            log.entry_for(&key(inode)).unwrap();
        }
        assert_eq!(log.lock(file).err(), Some(LockError::Stale));
    }
}
