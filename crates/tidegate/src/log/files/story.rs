//! The story of a file: its beginning, its promises and its end.
//!
//! A file is *plain* until a sync admits it. Its story begins with a definition; from then on its
//! changes are logged. After the real sync a second definition says that the file is *covered*: all
//! its bytes, its size and its existence under its names are on the disk or in the log. Recovery
//! ignores a story that was never covered.
//!
//! Invariants:
//! 1. A covered file has no change that the log lacks. Before such a change, the file leaves the
//!    log: a real sync, then [`FileGuard::end_story`].
//! 2. Bytes below `durable_size` of a dense file are known to be written and allocated on the disk,
//!    or promised by a mark. A record that changes more than such bytes is marked as growth.
//!    Recovery applies growth only if a mark follows, or as far as the disk already has it.
//! 3. A mark is appended only if a sync that commits the journal would promise no more: nothing was
//!    pending in the file system when that sync began.
//!
//! Entry points, all under the file's lock: [`FileGuard::begin_story`], [`FileGuard::cover`],
//! [`FileGuard::grows`], [`FileGuard::note_change`], [`FileGuard::mark`], [`FileGuard::end_story`];
//! without it [`Log::is_covered`] and [`Log::end_without_lock`].

use super::{FileGuard, Log};
use crate::log::control::table::{self, Entry, FileRef, flag};
use crate::log::error::AppendError;
use crate::log::pool::layout::RECORD_ALIGN_BYTES;
use crate::log::pool::record::Definition;
use crate::log::ring::Ticket;
use crate::sync::Ordering;
use crate::tier::clock::now_ns;

/// The least time between two checks of a file's size: one takes as long as a short sync.
const CHECK_NS: u64 = 250_000;

/// The state of a file around the real sync that admits it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoverState {
    /// [`FileGuard::unlogged`] before the sync.
    pub unlogged: u64,
    /// The log's head before the sync: growth up to there is on the disk.
    pub synced_from: u64,
    /// The file's size in bytes before the sync.
    pub size: u64,
    /// Each byte below `size` is in a written extent.
    pub is_dense: bool,
}

/// The effect of a change on a covered file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Bytes that were logged.
    pub bytes: u64,
    /// It changed more than bytes that are known to be on the disk.
    pub grew: bool,
    /// The file system's count of changes from before the kernel put the inode into a transaction
    /// of its journal, if it did, for a new size or times. An `fsync` commits all these changes.
    pub journaled: Option<u64>,
    /// The file's new size in bytes.
    pub size: u64,
}

fn is_covered(log: &Log, entry: &Entry<'_>) -> bool {
    let flags = entry.flags().load(Ordering::SeqCst);
    flags & (flag::COVERED | flag::FAILED) == flag::COVERED
        && entry.pins().load(Ordering::SeqCst) == 0
        && entry.unlogged().load(Ordering::SeqCst) == entry.synced().load(Ordering::SeqCst)
        && !log.processes().is_suspended()
}

impl Log {
    /// Returns whether all of the file is in the log or on the disk.
    ///
    /// Needs no lock: the caller's sync does not cover a concurrent write.
    #[inline]
    pub fn is_covered(&self, file: FileRef) -> bool {
        let entry = self.entry(file);
        is_covered(self, &entry) && entry.is_of(file)
    }

    /// Returns whether changes of the file must be logged, or the reference is stale, so that the
    /// caller must look the file up again.
    ///
    /// The caller has announced its call in its [lane](super::Lanes): either it finds the story
    /// here, or the thread that begins the story sees the lane.
    #[inline]
    pub fn must_log(&self, file: FileRef) -> bool {
        let entry = self.entry(file);
        entry.has(flag::LOGGED) || !entry.is_of(file)
    }

    /// Returns whether the file has no story, and no failure that a sync must report.
    #[inline]
    pub fn is_plain(&self, file: FileRef) -> bool {
        let entry = self.entry(file);
        !entry.has(flag::LOGGED | flag::FAILED) && entry.is_of(file)
    }

    /// Returns whether the file is pinned to the kernel path.
    #[inline]
    pub fn is_pinned(&self, file: FileRef) -> bool {
        let entry = self.entry(file);
        entry.pins().load(Ordering::SeqCst) > 0 && entry.is_of(file)
    }

    /// Returns whether any story has begun since the log is in use.
    #[inline]
    pub fn has_stories(&self) -> bool {
        self.stories() != 0
    }

    /// Returns how many stories have begun since the log is in use.
    /// [`logged_with`](Self::logged_with) finds each of these. It may find one more that is not
    /// counted yet; that story has made nothing durable.
    #[inline]
    pub fn stories(&self) -> u64 {
        self.ring.control.stories().load(Ordering::SeqCst)
    }

    /// Counts a change of names or attributes of a logged file, before the system call and after
    /// it. The file's next sync is real, to make the change durable.
    pub fn note_own_change(&self, file: FileRef) {
        let entry = self.entry(file);
        if entry.is_of(file) {
            entry.own_changes().fetch_add(1, Ordering::SeqCst);
            entry.set(flag::RENAMED);
        }
    }

    /// Returns a file with these numbers whose changes are logged, if there is one. There may be
    /// two if one was removed and a new file got its number.
    pub fn logged_with(&self, device: u64, inode: u64) -> Option<FileRef> {
        table::find_logged(&self.ring.control, device, inode)
    }

    /// Returns whether a covered file was changed since its last sync.
    #[inline]
    pub fn was_written(&self, file: FileRef) -> bool {
        self.entry(file).has(flag::WRITTEN | flag::GREW)
    }

    /// Returns whether a covered file has grown, or changed its size, since its last mark.
    #[inline]
    pub fn has_grown(&self, file: FileRef) -> bool {
        self.entry(file).has(flag::GREW)
    }

    /// Ends the story of a file without its lock, whose holder is stopped, or is the calling
    /// thread. The file must have been made durable before. It is plain afterwards.
    ///
    /// Why the holder does no harm: recovery drops its records before the end of the story, and a
    /// later record belongs to no story that was covered.
    ///
    /// # Errors
    /// [`AppendError`]: the story goes on.
    pub fn end_without_lock(&self, file: FileRef) -> Result<(), AppendError> {
        self.mark_unlogged(file);
        let entry = self.entry(file);
        if entry.id().load(Ordering::SeqCst) != 0 {
            self.ring.begin_unlocked(file)?.end()?;
        }
        entry.clear(flag::OF_STORY);
        Ok(())
    }

    /// Ends a story whose records are all retired, without the file's lock. Returns `false` if the
    /// log still has a record of the file.
    pub fn end_retired_without_lock(&self, file: FileRef) -> bool {
        let entry = self.entry(file);
        let is_over = entry.last_end().load(Ordering::SeqCst) <= self.ring.tail();
        if is_over {
            entry.clear(flag::OF_STORY);
        }
        is_over
    }

    /// Notes that the log has answered a sync of a covered file.
    #[inline]
    pub fn note_sync_skipped(&self, file: FileRef) {
        let entry = self.entry(file);
        entry.unsynced_bytes().store(0, Ordering::Relaxed);
        entry.retired_end().store(0, Ordering::Relaxed);
    }

    /// Returns the files that are [sealed](FileGuard::is_sealed).
    pub fn sealed_files(&self) -> impl Iterator<Item = FileRef> + '_ {
        let is_sealed =
            |entry: &Entry<'_>| entry.has(flag::LOGGED) && entry.pins().load(Ordering::SeqCst) > 0;
        let files = self.has_stories().then(|| self.entries()).into_iter().flatten();
        files.filter(move |(_, entry)| is_sealed(entry)).map(|(file, _)| file)
    }
}

impl FileGuard<'_> {
    /// Returns whether the story goes on, and the file can have no change around the log since
    /// [`unlogged`](Self::unlogged) was `unlogged`.
    pub(in crate::log) fn is_undisturbed_since(&self, unlogged: u64) -> bool {
        self.is_logged()
            && self.unlogged() == unlogged
            && self.pins() == 0
            && !self.log.processes().is_suspended()
    }

    /// Returns whether all of the file is in the log or on the disk.
    pub fn is_covered(&self) -> bool {
        is_covered(self.log, &self.entry)
    }

    /// Begins the file's story. The file has `size` bytes, apart from plain writes in flight.
    ///
    /// # Errors
    /// [`AppendError`]: no story has begun.
    pub fn begin_story(&self, definition: &Definition<'_>, size: u64) -> Result<(), AppendError> {
        let starts = Definition { starts: true, covered: false, size_bytes: 0, ..*definition };
        self.begin()?.define(&starts)?;
        self.entry.clear(flag::OF_STORY);
        self.entry.marked_at().store(0, Ordering::Relaxed);
        // Unknown yet; a truncation before the file is covered lowers it.
        self.entry.durable_size().store(u64::MAX, Ordering::Relaxed);
        self.entry.unsynced_bytes().store(0, Ordering::Relaxed);
        self.entry.size().store(size, Ordering::Relaxed);
        let story = self.entry.defined_at().load(Ordering::Relaxed);
        self.entry.story().store(story, Ordering::Relaxed);
        self.own_synced(self.own_changes());
        self.entry.set(flag::LOGGED);
        self.log.ring.control.stories().fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Covers the file after a real sync; the caller took `state` around that sync. Returns `false`
    /// if the file was changed around the log meanwhile, and is not covered.
    ///
    /// # Errors
    /// [`AppendError`]: the file is not covered.
    pub fn cover(
        &self,
        state: &CoverState,
        definition: &Definition<'_>,
    ) -> Result<bool, AppendError> {
        let entry = &self.entry;
        if !self.is_undisturbed_since(state.unlogged) {
            return Ok(false);
        }
        let size_bytes = state.size.min(self.durable_size());
        let covers = Definition { starts: false, covered: true, size_bytes, ..*definition };
        self.begin()?.define_marked(&covers, state.synced_from)?;
        entry.marked_at().store(state.synced_from, Ordering::Relaxed);
        entry.durable_size().store(size_bytes, Ordering::Relaxed);
        entry.synced().fetch_max(state.unlogged, Ordering::SeqCst);
        self.entry.set(if state.is_dense { flag::COVERED | flag::DENSE } else { flag::COVERED });
        Ok(true)
    }

    /// Defines the file anew with the slot of `ticket`, which
    /// [needs it](crate::log::Ticket::needs_define). The story goes on.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn define_again(
        &self,
        ticket: &mut Ticket<'_>,
        definition: &Definition<'_>,
    ) -> Result<(), AppendError> {
        let covered = self.entry.has(flag::COVERED);
        let size_bytes = if covered { self.durable_size() } else { 0 };
        let goes_on = Definition { starts: false, covered, size_bytes, ..*definition };
        ticket.define_marked(&goes_on, self.marked_until())
    }

    /// Clears the flag of a rename. Returns whether the file may have a new name since the last
    /// call, so that the story must be [defined again](Self::define_again): recovery without the
    /// right to open files by handle would look for the old name.
    #[inline]
    pub fn take_renamed(&self) -> bool {
        self.entry.has(flag::RENAMED) && {
            self.entry.clear(flag::RENAMED);
            true
        }
    }

    /// Ends the file's story. The file must have been made durable before, unless its story was
    /// never covered. It is plain afterwards.
    ///
    /// # Errors
    /// [`AppendError`]: the story goes on.
    pub fn end_story(&self) -> Result<(), AppendError> {
        if self.is_logged() {
            self.begin()?.end()?;
        }
        self.entry.clear(flag::OF_STORY);
        Ok(())
    }

    /// Ends a story whose records are all retired. Returns `false` if one is not retired.
    pub fn end_retired(&self) -> bool {
        let is_over = !self.is_live();
        if is_over {
            self.entry.clear(flag::OF_STORY);
        }
        is_over
    }

    /// Returns whether a covered file was or may be changed without a record. It must leave before
    /// the log gets another of its records.
    pub fn is_disturbed(&self) -> bool {
        self.entry.has(flag::COVERED)
            && self.unlogged() != self.entry.synced().load(Ordering::SeqCst)
    }

    /// Returns how many bytes, from the file's start, are known to be on the disk or promised.
    pub fn durable_size(&self) -> u64 {
        self.entry.durable_size().load(Ordering::Relaxed)
    }

    /// Returns the end of the file's last mark: growth before this position is promised.
    pub fn marked_until(&self) -> u64 {
        self.entry.marked_at().load(Ordering::Relaxed)
    }

    /// Returns whether a write up to `end` changes more than bytes known to be on the disk.
    #[inline]
    pub fn grows(&self, end: u64) -> bool {
        !self.entry.has(flag::DENSE) || end > self.durable_size()
    }

    /// Notes a change that was logged, after the kernel has made it.
    #[inline]
    pub fn note_change(&self, change: Change) {
        let unsynced_bytes = self.entry.unsynced_bytes();
        let bytes = unsynced_bytes.load(Ordering::Relaxed) + change.bytes;
        unsynced_bytes.store(bytes, Ordering::Relaxed);
        self.entry.size().store(change.size, Ordering::Relaxed);
        if let Some(changes) = change.journaled {
            self.entry.journaled_changes().store(changes, Ordering::Relaxed);
        }
        if change.grew {
            self.entry.set(flag::WRITTEN | flag::GREW);
        } else if !self.entry.has(flag::WRITTEN) {
            self.entry.set(flag::WRITTEN);
        }
    }

    /// Notes that the kernel has made the file `size` bytes long, which was logged. Bytes behind
    /// that count as durable no longer; if the size has grown, they are a hole.
    pub fn note_size(&self, size: u64, grew: bool) {
        if grew {
            self.entry.clear(flag::DENSE);
        } else {
            self.entry.durable_size().fetch_min(size, Ordering::Relaxed);
            self.entry.set(flag::CUT);
        }
    }

    /// Returns whether the story has cut the file since its last real sync. The disk may still have
    /// the former size, so that recovery cannot tell whether the disk has growth from after the
    /// cut. Such a file must not grow while names are pending.
    #[inline]
    pub fn was_cut(&self) -> bool {
        self.entry.has(flag::CUT)
    }

    /// Notes that a real sync that began after the file's last change has succeeded.
    pub fn note_real_sync(&self) {
        self.entry.clear(flag::CUT);
    }

    /// Returns whether the file was changed since its last sync.
    pub fn was_written(&self) -> bool {
        self.entry.has(flag::WRITTEN | flag::GREW)
    }

    /// Returns whether the file has grown, or changed its size, since its last mark.
    pub fn has_grown(&self) -> bool {
        self.entry.has(flag::GREW)
    }

    /// Returns the count of changes of names and attributes, for [`own_synced`](Self::own_synced).
    pub fn own_changes(&self) -> u64 {
        self.entry.own_changes().load(Ordering::SeqCst)
    }

    /// Returns whether names or attributes of the file were changed since its last real sync.
    pub fn has_own_changes(&self) -> bool {
        self.own_changes() != self.entry.own_synced().load(Ordering::SeqCst)
    }

    /// Notes a real sync of the whole file that has succeeded, or is about to be made for its
    /// story, and that begins after [`own_changes`](Self::own_changes) was `seen`.
    pub fn own_synced(&self, seen: u64) {
        self.entry.own_synced().fetch_max(seen, Ordering::SeqCst);
    }

    /// Returns the end of the last record that changes the file's bytes or size.
    pub fn last_change(&self) -> u64 {
        self.entry.changed_end().load(Ordering::Relaxed)
    }

    /// Returns the position of the definition that begins the file's story.
    pub fn story(&self) -> u64 {
        self.entry.story().load(Ordering::Relaxed)
    }

    /// Returns the size in bytes of a file whose story has begun.
    pub fn size(&self) -> u64 {
        self.entry.size().load(Ordering::Relaxed)
    }

    /// Notes the file's size in bytes, while no plain write is in flight.
    pub fn note_length(&self, size: u64) {
        self.entry.size().store(size, Ordering::Relaxed);
    }

    /// Returns the file system's count of changes from before the last [change](Change::journaled)
    /// that is known to be in the journal.
    pub fn journaled_changes(&self) -> u64 {
        self.entry.journaled_changes().load(Ordering::Relaxed)
    }

    /// Notes a change of the file in the journal; `changes` is the file system's count before that.
    pub fn note_journaled(&self, changes: u64) {
        self.entry.journaled_changes().fetch_max(changes, Ordering::SeqCst);
    }

    /// Returns how many bytes of the file were logged since its last sync.
    pub fn unsynced_bytes(&self) -> u64 {
        self.entry.unsynced_bytes().load(Ordering::Relaxed)
    }

    /// Promises the whole present file, of `size` bytes: by a mark, if it has grown. `modified_ns`
    /// is the file's present modification time, 0 if that is not known.
    ///
    /// # Errors
    /// [`AppendError`]: nothing more is promised than before.
    pub fn mark(&self, size: u64, modified_ns: u64) -> Result<(), AppendError> {
        if self.has_grown() {
            let position = self.begin()?.mark(size, modified_ns)?;
            let end = position + RECORD_ALIGN_BYTES;
            self.entry.marked_at().store(end, Ordering::Relaxed);
            self.entry.durable_size().store(size, Ordering::Relaxed);
        }
        self.log.note_sync_skipped(self.file());
        self.entry.clear(flag::GREW | flag::WRITTEN);
        Ok(())
    }

    /// Returns whether no sync has checked the file's size for `CHECK_NS`. Even a sync that has
    /// nothing to do then checks it: another process may have cut the file.
    #[inline]
    pub fn is_unchecked(&self) -> bool {
        now_ns().saturating_sub(self.entry.checked_ns().load(Ordering::Relaxed)) >= CHECK_NS
    }

    /// Notes that a sync has checked the file's size.
    pub fn note_checked(&self) {
        self.entry.checked_ns().store(now_ns(), Ordering::Relaxed);
    }

    /// Returns whether the file was overwritten since its last sync, so that a record must
    /// [confirm](Self::confirm) that the kernel has done so. For growth, the mark does that.
    #[inline]
    pub fn is_unconfirmed(&self) -> bool {
        self.unsynced_bytes() > 0 && !self.has_grown()
    }

    /// Appends that the kernel has done all of the file's changes. Recovery then attributes file
    /// times after `modified_ns` to processes outside; if that is 0, times after this call. The
    /// file must not have [grown](Self::has_grown): a mark would promise the growth.
    ///
    /// # Errors
    /// [`AppendError`]: a change from outside is noticed from the next heartbeat on.
    pub fn confirm(&self, modified_ns: u64) -> Result<(), AppendError> {
        self.begin()?.mark(self.size(), modified_ns).map(drop)
    }

    /// Notes that overwrites of the file may allocate blocks from now on: the file has a hole, for
    /// example since a write began behind its end, or blocks that it shares.
    pub fn note_hole(&self) {
        self.entry.clear(flag::DENSE);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::IoSlice;
    use std::time::Duration;

    use super::*;
    use crate::log::tests::{definition, key, log};
    use crate::log::{Log, RecordKind, Scanner};

    fn file(log: &Log) -> FileRef {
        log.entry_for(&key(1)).unwrap()
    }

    /// Covers the file, whose `size` bytes are all written.
    fn cover(log: &Log, size: u64) -> bool {
        let guard = log.lock(file(log)).unwrap();
        guard.begin_story(&definition(1), 100).unwrap();
        let state = state(log, &guard, size);
        guard.cover(&state, &definition(1)).unwrap()
    }

    fn state(log: &Log, guard: &FileGuard<'_>, size: u64) -> CoverState {
        let (unlogged, synced_from) = (guard.unlogged(), log.ring().head());
        CoverState { unlogged, synced_from, size, is_dense: true }
    }

    fn kinds(log: &Log) -> Vec<RecordKind> {
        let records =
            Scanner::new(log.ring().pool(), log.ring().tail(), log.ring().pool().limit().unwrap());
        records.map(|record| record.kind).collect()
    }

    const GROWTH: Change = Change { bytes: 10, grew: true, journaled: Some(3), size: 110 };

    #[test]
    fn a_file_is_covered_only_while_all_changes_are_logged() {
        let log = log();
        let file = file(&log);
        assert!(!log.is_covered(file), "nobody knows what was written before");
        assert!(cover(&log, 100) && log.is_covered(file));
        let guard = log.lock(file).unwrap();
        guard.mark_unlogged(false);
        assert!(!log.is_covered(file));
        drop(guard);
        assert!(cover(&log, 100) && log.is_covered(file));
        log.processes().suspend();
        assert!(!log.is_covered(file));
        log.processes().resume_logging();
        assert!(log.is_covered(file));
        log.note_failure(file).unwrap();
        assert!(!log.is_covered(file));
        let guard = log.lock(file).unwrap();
        assert!(guard.take_failure() && !guard.take_failure());
        assert!(log.is_covered(file));
        guard.end_story().unwrap();
        assert!(!log.is_covered(file) && !guard.is_logged());
    }

    #[test]
    fn a_change_around_the_log_during_the_sync_leaves_the_file_plain() {
        let log = log();
        let guard = log.lock(file(&log)).unwrap();
        guard.begin_story(&definition(1), 100).unwrap();
        let state = state(&log, &guard, 100);
        guard.mark_unlogged(true);
        assert_eq!(guard.cover(&state, &definition(1)), Ok(false));
        guard.release_pin();
        assert_eq!(guard.cover(&state, &definition(1)), Ok(false));
    }

    #[test]
    fn only_overwrites_of_what_is_on_the_disk_grow_nothing() {
        let log = log();
        assert!(cover(&log, 100));
        let guard = log.lock(file(&log)).unwrap();
        assert!(!guard.grows(100) && guard.grows(101));
        guard.note_change(GROWTH);
        assert!(guard.has_grown() && guard.was_written() && guard.journaled_changes() == 3);
        assert!(guard.grows(101), "not promised yet");
        guard.mark(110, 0).unwrap();
        assert!(!guard.has_grown() && !guard.was_written() && !guard.grows(110));
        guard.note_size(50, false);
        assert!(!guard.grows(50) && guard.grows(51), "cut");
        guard.note_hole();
        assert!(guard.grows(1), "what lies in a hole is not known");
    }

    #[test]
    fn a_mark_is_appended_only_after_growth() {
        let log = log();
        assert!(cover(&log, 100));
        let guard = log.lock(file(&log)).unwrap();
        guard.note_change(Change { grew: false, ..GROWTH });
        assert!(guard.was_written() && !guard.has_grown() && guard.unsynced_bytes() == 10);
        guard.mark(100, 0).unwrap();
        assert_eq!((guard.unsynced_bytes(), guard.was_written()), (0, false));
        assert_eq!(kinds(&log), [RecordKind::Define; 2]);
        guard.note_change(GROWTH);
        guard.mark(110, 0).unwrap();
        assert_eq!(kinds(&log).last(), Some(&RecordKind::Mark));
        assert_eq!(guard.marked_until(), log.ring().head());
    }

    #[test]
    fn a_cut_while_the_file_is_admitted_counts() {
        let log = log();
        let guard = log.lock(file(&log)).unwrap();
        guard.begin_story(&definition(1), 100).unwrap();
        let state = state(&log, &guard, 100);
        guard.begin().unwrap().set_size(30, false).unwrap();
        guard.note_size(30, false);
        assert!(guard.grows(1), "nothing is known of the file yet");
        assert_eq!(guard.cover(&state, &definition(1)), Ok(true));
        assert_eq!(guard.durable_size(), 30);
    }

    #[test]
    fn a_story_can_be_ended_while_its_lock_is_held() {
        let log = log();
        assert!(cover(&log, 100));
        let guard = log.lock(file(&log)).unwrap();
        log.end_without_lock(file(&log)).unwrap();
        assert!(!guard.is_covered() && !guard.is_logged());
        guard.begin().unwrap().write(0, &[IoSlice::new(b"x")], false).unwrap();
        let [defined, ended, written] = [RecordKind::Define, RecordKind::End, RecordKind::Write];
        assert_eq!(kinds(&log), [defined, defined, ended, written]);
    }

    #[test]
    fn the_supervisor_is_asked_once_for_a_descriptor() {
        let log = log();
        let file = file(&log);
        assert!(log.take_wanted_kept().is_empty());
        log.want_kept(file);
        assert_eq!(log.take_wanted_kept(), [file]);
        assert!(log.take_wanted_kept().is_empty());
        assert!(!log.wait_for_kept(file, Duration::from_secs(10)), "nobody supervises");
        log.note_kept(file, true);
        assert!(log.wait_for_kept(file, Duration::ZERO));
        log.note_kept(file, false);
        assert!(!log.is_kept(file));
    }
}
