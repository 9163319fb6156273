//! Writes and cuts: decides whether the log records them, or the file leaves first.
//!
//! Invariants:
//! 1. A write is recorded before the kernel makes it, and only if the log knows all of the file and
//!    its current size.
//! 2. A truncation of a covered file is recorded only while nothing is pending in its file system.
//!    Recovery always applies a cut, so the cut must not outlive an earlier change that recovery
//!    lacks.
//! 3. Growth behind a cut is also recorded only while nothing is pending. Recovery cannot
//!    distinguish it from the bytes before the cut, and would apply it without the pending changes.
//! 4. A file whose change the log does not take leaves before that change.
//!
//! Entry points: [`decide_write`], then [`decide_record`]; [`confirmed_start`] after the kernel's
//! write; [`decide_cut`].

use crate::log::files::FileGuard;
use crate::log::files::story::Change;

/// Bytes that a truncation adds to the file's logged bytes: its record.
const RECORD_BYTES: u64 = 64;

/// The target of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// To the descriptor's position, which moves.
    Current,
    /// To this offset in the file.
    At(u64),
    /// To the file's end, without moving the position.
    End,
}

/// How a write of a locked file is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteAction {
    /// The kernel alone makes it.
    Plain,
    /// The log records it first, if [`decide_record`] does not object.
    Record,
    /// The file leaves, and then the kernel makes it.
    Leave,
}

/// Facts from the log about a locked file that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct WriteFacts {
    /// The file's story has begun.
    pub is_logged: bool,
    /// Logging is suspended: a process runs that the supervisor cannot watch.
    pub is_suspended: bool,
    /// The file is pinned to the kernel path.
    pub is_pinned: bool,
    /// The file was covered, and may have been changed without a record since then.
    pub is_disturbed: bool,
}

impl WriteFacts {
    /// Reads the facts about a locked file.
    #[inline]
    pub fn of(guard: &FileGuard<'_>) -> Self {
        Self {
            is_logged: guard.is_logged(),
            is_suspended: guard.log.processes().is_suspended(),
            is_pinned: guard.pins() > 0,
            is_disturbed: guard.is_disturbed(),
        }
    }
}

/// Decides a write of a locked file.
#[inline]
pub fn decide_write(facts: &WriteFacts) -> WriteAction {
    if !facts.is_logged {
        WriteAction::Plain
    } else if facts.is_suspended || facts.is_pinned || facts.is_disturbed {
        WriteAction::Leave
    } else {
        WriteAction::Record
    }
}

/// A write whose first byte is known, and the log's facts about the file before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteExtent {
    /// Offset of the first byte that is written.
    pub start: u64,
    /// Number of bytes that are written.
    pub bytes: u64,
    /// The file's size in bytes.
    pub size: u64,
    /// The write does more than overwrite bytes that are known to be on the disk.
    pub grows: bool,
    /// The story has cut the file since its last real sync.
    pub was_cut: bool,
}

impl WriteExtent {
    /// Reads the facts about a write of `bytes` bytes at `start` of a locked file.
    #[inline]
    pub fn of(guard: &FileGuard<'_>, start: u64, bytes: u64) -> Self {
        Self {
            start,
            bytes,
            size: guard.size(),
            grows: guard.grows(start.saturating_add(bytes)),
            was_cut: guard.was_cut(),
        }
    }

    fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }

    /// Returns whether the write makes the file longer.
    #[inline]
    pub fn is_resized(&self) -> bool {
        self.end() > self.size
    }

    /// Returns whether the write leaves a hole before it.
    #[inline]
    pub fn makes_hole(&self) -> bool {
        self.start > self.size
    }

    /// Returns the change by the write, once made. For `journaled` see [`Change::journaled`].
    #[inline]
    pub fn change(&self, journaled: Option<u64>) -> Change {
        let size = self.size.max(self.end());
        Change { bytes: self.bytes, grew: self.grows, journaled, size }
    }
}

/// Returns whether the log records the write; otherwise the file leaves.
///
/// With `appends` the kernel writes at the file's end. `bytes_max` is the longest file that the
/// process may make. A longer one may kill the process, and then no other process may repeat the
/// write. `kernel_size` asks for the file's size; an overwrite does not ask, but its sync does.
#[inline]
pub fn decide_record(
    write: &WriteExtent,
    appends: bool,
    bytes_max: u64,
    kernel_size: impl FnOnce() -> Option<u64>,
    is_pending: impl FnOnce() -> bool,
) -> bool {
    let is_resized_outside = || {
        if appends {
            return write.start != write.size;
        }
        write.is_resized() && kernel_size() != Some(write.size)
    };
    let is_ambiguous = || write.grows && write.was_cut && is_pending();
    write.end() <= bytes_max && !is_resized_outside() && !is_ambiguous()
}

/// Returns whether the caller watches an overwrite: a change is pending that is newer than the
/// inode's last entry in the journal. If the overwrite sets the file's time of change, the inode is
/// in a transaction that is no older than any change counted before: the next `fsync` commits them
/// all.
#[inline]
pub fn is_watched(is_pending: bool, journaled_changes: u64, changes: u64) -> bool {
    is_pending && journaled_changes != changes
}

/// Returns the offset of the kernel's last write of `bytes` bytes, whose record has the offset
/// `recorded`. Returns `None` if the offset cannot be confirmed.
///
/// Since the write, a process that shares the description may have moved its position, and a
/// process outside the tree may have made the file longer. So position and end count only if they
/// confirm the record. If they do not, the file leaves before another process changes it.
#[inline]
pub fn confirmed_start(
    (place, appends): (Place, bool),
    recorded: u64,
    bytes: u64,
    position: impl FnOnce() -> Option<u64>,
    end: impl FnOnce() -> Option<u64>,
) -> Option<u64> {
    let by_position = match place {
        Place::At(at) if !appends => return Some(at),
        Place::Current => position()?.checked_sub(bytes),
        Place::At(_) | Place::End => None,
    };
    if by_position == Some(recorded) {
        return by_position;
    }
    if place == Place::Current && !appends {
        return None;
    }
    end()?.checked_sub(bytes).filter(|by_end| *by_end == recorded)
}

/// Returns whether a write by a descriptor with `O_SYNC` or `O_DSYNC` goes through another
/// descriptor without the flag, and is then synced like a sync call of the program. Otherwise the
/// kernel syncs the write: the other descriptor would write to another offset, or closing it would
/// release a record lock.
pub fn splits_sync(
    place: Place,
    appends_or_is_direct: bool,
    may_have_record_lock: impl FnOnce() -> bool,
) -> bool {
    matches!(place, Place::At(_)) && !appends_or_is_direct && !may_have_record_lock()
}

/// How a truncation of a locked file is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutAction {
    /// The kernel alone makes it, and then it is pending.
    Plain,
    /// The log records it first.
    Record,
    /// The file leaves, the kernel makes the truncation, and then it is pending.
    Leave,
}

/// Decides a truncation to `size` bytes. Above `bytes_max` the kernel refuses it or kills.
pub fn decide_cut(
    (is_logged, is_covered): (bool, bool),
    size: u64,
    bytes_max: u64,
    is_pending: impl FnOnce() -> bool,
) -> CutAction {
    if !is_logged {
        CutAction::Plain
    } else if size <= bytes_max && is_covered && !is_pending() {
        CutAction::Record
    } else {
        CutAction::Leave
    }
}

/// Returns the change by a truncation to `size` bytes, once the kernel has made it. `changes` is
/// the count of changes in the file system before it.
pub fn change_of_cut(size: u64, changes: u64) -> Change {
    Change { bytes: RECORD_BYTES, grew: true, journaled: Some(changes), size }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const OVERWRITE: WriteExtent =
        WriteExtent { start: 10, bytes: 5, size: 20, grows: false, was_cut: false };

    #[test]
    fn a_write_is_recorded_while_the_log_knows_all_of_the_file() {
        for bits in 0_u8..16 {
            let [is_logged, is_suspended, is_pinned, is_disturbed] =
                [1, 2, 4, 8].map(|bit| bits & bit != 0);
            let facts = WriteFacts { is_logged, is_suspended, is_pinned, is_disturbed };
            let expected = match bits {
                _ if !is_logged => WriteAction::Plain,
                1 => WriteAction::Record,
                _ => WriteAction::Leave,
            };
            assert_eq!(decide_write(&facts), expected, "{facts:?}");
        }
    }

    #[test]
    fn a_write_that_makes_the_file_longer_asks_the_kernel_for_the_size() {
        let never_pending = || unreachable!("nothing was cut");
        let record = |write: &WriteExtent, appends, size: Option<u64>| {
            decide_record(write, appends, 100, || size, never_pending)
        };
        assert!(decide_record(&OVERWRITE, false, 15, || unreachable!(), never_pending));
        assert!(!decide_record(&OVERWRITE, false, 14, || unreachable!(), never_pending));
        let longer = WriteExtent { start: 20, grows: true, ..OVERWRITE };
        assert!(record(&longer, false, Some(20)));
        assert!(!record(&longer, false, Some(21)) && !record(&longer, false, None));
        assert!(record(&longer, true, None), "the start was asked for");
        assert!(!record(&WriteExtent { start: 21, ..longer }, true, Some(20)));
        assert!(!record(&OVERWRITE, true, Some(20)));
        let endless = WriteExtent { start: u64::MAX, ..longer };
        assert!(!record(&endless, false, Some(20)));
    }

    #[test]
    fn growth_behind_a_cut_waits_for_what_is_pending() {
        for bits in 0_u8..8 {
            let [grows, was_cut, is_pending] = [1, 2, 4].map(|bit| bits & bit != 0);
            let write = WriteExtent { grows, was_cut, ..OVERWRITE };
            let is_recorded = decide_record(&write, false, 100, || None, || is_pending);
            assert_eq!(is_recorded, bits != 7, "{write:?}");
        }
    }

    #[test]
    fn a_write_changes_the_size_and_leaves_holes_by_its_place() {
        let of = |start| {
            let write = WriteExtent { start, ..OVERWRITE };
            (write.is_resized(), write.makes_hole(), write.change(None).size)
        };
        assert_eq!(of(15), (false, false, 20));
        assert_eq!(of(16), (true, false, 21));
        assert_eq!(of(20), (true, false, 25));
        assert_eq!(of(21), (true, true, 26));
        let change = WriteExtent { grows: true, ..OVERWRITE }.change(Some(3));
        assert_eq!(change, Change { bytes: 5, grew: true, journaled: Some(3), size: 20 });
    }

    #[test]
    fn an_overwrite_is_watched_until_the_journal_has_the_inode() {
        let found = [(false, 1, 2), (true, 2, 2), (true, 1, 2)]
            .map(|(is_pending, journaled, changes)| is_watched(is_pending, journaled, changes));
        assert_eq!(found, [false, false, true]);
    }

    /// Checks a write of five bytes that was recorded at byte 10.
    #[test]
    fn the_start_of_a_write_is_believed_where_it_confirms_the_record() {
        let start = |place, appends, position: Option<u64>, end: Option<u64>| {
            confirmed_start((place, appends), 10, 5, || position, || end)
        };
        let (right, wrong) = (Some(15), Some(16));
        assert_eq!(start(Place::At(7), false, None, None), Some(7));
        for position in [right, wrong, None] {
            for end in [right, wrong, None] {
                let by = |is_confirmed: bool| is_confirmed.then_some(10);
                let at_end = start(Place::At(7), true, position, end);
                assert_eq!(at_end, by(end == right));
                assert_eq!(start(Place::End, false, position, end), by(end == right));
                assert_eq!(start(Place::Current, false, position, end), by(position == right));
                let appended = position == right || position == wrong && end == right;
                assert_eq!(start(Place::Current, true, position, end), by(appended));
            }
        }
        assert_eq!(start(Place::Current, true, Some(4), right), Some(10), "less than was written");
    }

    #[test]
    fn the_sync_of_a_write_is_split_off_only_where_it_says_its_place() {
        for (place, is_split) in
            [(Place::At(0), true), (Place::Current, false), (Place::End, false)]
        {
            assert_eq!(splits_sync(place, false, || false), is_split);
            assert!(!splits_sync(place, true, || false) && !splits_sync(place, false, || true));
        }
    }

    #[test]
    fn a_cut_is_recorded_of_a_covered_file_while_nothing_is_pending() {
        for bits in 0_u8..16 {
            let [is_logged, is_covered, fits, is_pending] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
            let bytes_max = if fits { 9 } else { 8 };
            let found = decide_cut((is_logged, is_covered), 9, bytes_max, || is_pending);
            let expected = match bits {
                _ if !is_logged => CutAction::Plain,
                7 => CutAction::Record,
                _ => CutAction::Leave,
            };
            assert_eq!(found, expected, "{bits:b}");
        }
        let expected = Change { bytes: 64, grew: true, journaled: Some(3), size: 9 };
        assert_eq!(change_of_cut(9, 3), expected);
    }
}
