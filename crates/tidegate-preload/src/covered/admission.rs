//! Admission: a plain file becomes covered at a real sync.
//!
//! The order, and why:
//! 1. The story begins under the entry's lock, so that no writer is between its log record and its
//!    system call. From now on writers find the story, and log before they write.
//! 2. The thread waits, up to a timeout, for earlier plain writes ([`plain`](super::plain)), and
//!    until the supervisor holds a descriptor of the file, which reports failed write-backs.
//! 3. The thread notes the log's head and the file's size under the lock. The kernel has made each
//!    logged change below that head, so that the sync makes it durable.
//! 4. The real sync: the disk has the file as it was at step 3, and the log has every later change.
//! 5. The story is covered, unless the file was changed around the log since step 1, or another
//!    thread has begun a story of its own.
//!
//! Recovery ignores a story that was not covered. If a step fails, the file is plain, and the real
//! sync has done all that the program asked for.

use tidegate::log::CoverState;
use tidegate::log::cover::{
    AdmissionFacts, BeginAction, BeginFacts, NotAdmitted, cause_of_admission, decide_admission,
    decide_begin,
};

use super::in_place::is_overwritten_in_place;
use super::story::Story;
use super::{LOCK_TIMEOUT, Open, Sync};
use crate::state::descriptors::{self, DIRECT, Entry, PINNED};
use crate::state::files::{self, Identified, Seen};
use crate::state::process::Holding;
use crate::state::{extents, process};
use crate::sys::own_stack;
use crate::sys::path::{self, PathBuffer};
use crate::sys::signals::SignalsBlocked;

impl Open {
    /// Decides whether this sync admits the file, and counts the sync.
    ///
    /// # Errors
    /// [`NotAdmitted`]: why the file stays plain.
    pub(crate) fn admission(&self) -> Result<(), NotAdmitted> {
        let facts = AdmissionFacts {
            syncs: descriptors::count_sync(self.fd),
            cover_after: process::cover_after(),
            every_write: process::every_write(),
            is_suspended: self.log.processes().is_suspended(),
            writes_unseen: process::writes_unseen(),
            is_direct: self.known.has(DIRECT),
            is_pinned: self.known.has(PINNED),
        };
        decide_admission(&facts, || files::is_wanted(self.fd), || self.is_young())
    }

    /// Returns whether the file was created a moment ago.
    fn is_young(&self) -> bool {
        let age_ns = process::cover_age_ns();
        age_ns != 0 && files::is_younger_than(self.fd, age_ns)
    }

    /// Makes a real sync, and covers the file if it can be covered. Returns the sync's result.
    #[cold]
    pub(crate) fn admit(&self, wanted: Sync) -> isize {
        let pinned = self.known.entry().filter(|entry| self.log.is_pinned(entry.file));
        if pinned.is_some() {
            return self.sync_refused(pinned, wanted);
        }
        // A handler that jumps out would leave a story that is neither covered nor given up.
        let _signals = SignalsBlocked::deferred();
        own_stack::run(|| self.admit_blocked(wanted))
    }

    fn admit_blocked(&self, wanted: Sync) -> isize {
        let identified = Seen::of(self.fd)
            .ok()
            // An unlinked file ends with the last process that has it open.
            .filter(|seen| seen.stat.st_nlink != 0 && is_overwritten_in_place(self.fd, seen))
            .and_then(|_| files::identify(self.log, self.fd))
            .filter(|found| !self.log.file_systems().has_copies(found.file_system.reference));
        let Some(identified) = identified else { return self.sync_refused(None, wanted) };
        let mut path = PathBuffer::new();
        if path::of_descriptor(self.fd, &mut path).is_err() {
            // The path is only a hint.
            path.clear();
        }
        match self.begin(&identified, &path) {
            Some(story) => self.sync_and_cover(&story),
            None => self.sync_refused(self.entry(), wanted),
        }
    }

    /// Begins a story of the file. Returns `None` if the file cannot have one now.
    fn begin<'d>(&self, identified: &Identified, path: &'d PathBuffer) -> Option<Story<'d>> {
        let entry = self.entry()?;
        let guard = self.lock(entry).ok()?;
        match decide_begin(&BeginFacts::of(&guard)) {
            BeginAction::Begin => {}
            BeginAction::LeaveAndBegin if self.leave(&guard) => {}
            BeginAction::LeaveAndBegin | BeginAction::Refuse => return None,
        }
        let (definition, unlogged) = (identified.definition(path), guard.unlogged());
        let size = Seen::of(self.fd).ok()?.size();
        guard.begin_story(&definition, size).ok()?;
        Some(Story::begun(self, entry, &guard, definition, unlogged))
    }

    fn sync_and_cover(&self, story: &Story<'_>) -> isize {
        let state = self.quiet_state(story);
        // Metadata too, even for `fdatasync`: from now on the log answers for the whole file.
        let result = self.sync_real(Sync::All);
        let covered = state.filter(|_| result == 0).and_then(|state| self.cover(story, state));
        if covered.is_none() {
            story.give_up();
        }
        self.count(cause_of_admission(covered.is_some()));
        result
    }

    /// Waits for plain writes in flight, and for the supervisor's descriptor of the file. Returns
    /// the state that the next real sync makes durable, or `None` if the file cannot be covered.
    fn quiet_state(&self, story: &Story<'_>) -> Option<CoverState> {
        let Entry { file, .. } = story.entry;
        self.log.want_kept(file);
        let (device, inode) = (self.known.device, self.known.inode);
        let is_quiet = self.log.lanes().wait_for_plain(device, inode, LOCK_TIMEOUT)
            && self.log.wait_for_kept(file, LOCK_TIMEOUT);
        let guard = story.lock().filter(|_| is_quiet)?;
        // Recovery would take a time in the future for a change by a process outside the tree.
        let seen = Seen::of(self.fd).ok().filter(|seen| !seen.is_of_the_future())?;
        let size = seen.size();
        guard.note_length(size);
        let (unlogged, synced_from) = (story.unlogged, self.log.ring().head());
        // `cover` looks for holes after the sync.
        Some(CoverState { unlogged, synced_from, size, is_dense: false })
    }

    fn cover(&self, story: &Story<'_>, state: CoverState) -> Option<()> {
        let is_dense =
            Holding::new().is_some_and(|_holding| extents::are_dense(self.fd, state.size));
        let guard = story.lock()?;
        let state = CoverState { is_dense, ..state };
        guard.cover(&state, &story.definition).ok()?.then_some(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::unix::fs::FileExt;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;

    use super::*;
    use crate::covered::{Place, Request};
    use crate::testing::World;

    #[test]
    fn a_sync_covers_a_file_that_the_supervisor_holds() {
        let world = World::new();
        let file = world.file("file");
        let open = world.open(&file, 0);
        assert_eq!(open.admit(Sync::Data), 0);
        assert_eq!(world.records_since(0), "define end", "there is no supervisor");
        assert!(!world.is_covered(&open));
        world.keep(&open);
        let from = world.log.ring().head();
        assert_eq!(open.admit(Sync::Data), 0);
        assert_eq!(world.records_since(from), "define define");
        assert!(world.is_covered(&open));
        let guard = open.lock(open.entry().unwrap()).unwrap();
        assert_eq!((guard.size(), guard.durable_size()), (4, 4));
    }

    #[test]
    fn a_file_that_is_pinned_or_unlinked_is_not_covered() {
        let world = World::new();
        let file = world.file("file");
        let open = world.open(&file, 0);
        world.keep(&open);
        open.pin_until_exit().unwrap();
        assert_eq!(open.admit(Sync::All), 0);
        assert!(!world.is_covered(&open));
        let file = world.file("other");
        let open = world.open(&file, 0);
        world.keep(&open);
        std::fs::remove_file(world.path("other")).unwrap();
        assert_eq!(open.admit(Sync::All), 0);
        assert!(!world.is_covered(&open));
        assert_eq!(world.records_since(0), "");
    }

    #[test]
    fn a_plain_write_in_flight_keeps_the_file_plain() {
        let world = World::new();
        let file = world.file("file");
        let open = world.open(&file, 0);
        world.keep(&open);
        let known = open.known.with_entry(open.entry().unwrap());
        let open = Open { known, ..open };
        let (entered, is_entered) = channel();
        let (leave, may_leave) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                open.write_plain(|| {
                    entered.send(()).unwrap();
                    let _ = may_leave.recv();
                    4
                })
                .unwrap();
            });
            is_entered.recv().unwrap();
            assert_eq!(open.admit(Sync::All), 0);
            assert!(!world.is_covered(&open));
            drop(leave);
        });
        assert_eq!(open.admit(Sync::All), 0);
        assert!(world.is_covered(&open));
    }

    #[test]
    fn a_change_around_the_log_during_the_admission_keeps_the_file_plain() {
        let world = World::new();
        let file = world.file("file");
        let open = world.open(&file, 0);
        let entry = open.entry().unwrap();
        let path = PathBuffer::new();
        let identified = files::identify(world.log, open.fd).unwrap();
        world.keep(&open);
        let story = open.begin(&identified, &path).unwrap();
        world.log.mark_unlogged(entry.file);
        assert_eq!(open.sync_and_cover(&story), 0);
        assert!(!world.is_covered(&open));
        assert_eq!(world.records_since(0), "define end");
    }

    #[test]
    fn of_two_admissions_at_once_the_later_one_covers() {
        let world = World::new();
        let file = world.file("file");
        let open = world.open(&file, 0);
        let path = PathBuffer::new();
        let identified = files::identify(world.log, open.fd).unwrap();
        world.keep(&open);
        let first = open.begin(&identified, &path).unwrap();
        let second = open.begin(&identified, &path).unwrap();
        assert_eq!(open.sync_and_cover(&first), 0);
        assert!(!world.is_covered(&open));
        assert_eq!(open.sync_and_cover(&second), 0);
        assert!(world.is_covered(&open));
        assert_eq!(world.records_since(0), "define define define");
    }

    /// Two threads write all the time, while a third one admits the file and makes it leave.
    #[test]
    fn no_plain_write_is_in_flight_while_a_file_is_covered() {
        const ROUNDS: usize = 30;
        let world = World::new();
        let file = world.file("file");
        let open = world.open(&file, 0);
        world.keep(&open);
        let entry = open.entry().unwrap();
        let open = Open { known: open.known.with_entry(entry), ..open };
        let (start, stop) = (Barrier::new(3), AtomicBool::new(false));
        let mut covered = 0;
        std::thread::scope(|scope| {
            for writer in 0..2 {
                let (start, stop, file, log) = (&start, &stop, &file, world.log);
                scope.spawn(move || {
                    start.wait();
                    let write = || file.write_at(b"data", writer * 4).unwrap().cast_signed();
                    while !stop.load(Ordering::Relaxed) {
                        let plain = || {
                            let result = write();
                            assert!(!log.is_covered(entry.file), "the sync may have missed it");
                            result
                        };
                        let parts = [IoSlice::new(b"data")];
                        let request = Request { parts: &parts, place: Place::At(writer * 4) };
                        let result = open.write_plain(plain);
                        assert_eq!(result.unwrap_or_else(|| open.write(&request, write)), 4);
                        std::thread::yield_now();
                    }
                });
            }
            start.wait();
            for _ in 0..ROUNDS {
                assert_eq!(open.admit(Sync::All), 0);
                covered += usize::from(world.is_covered(&open));
                world.log.ring().retire_to(world.log.ring().safe_position()).unwrap();
                open.unseen(|| 0);
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(covered > 0, "this shows nothing unless the file is covered now and then");
    }
}
