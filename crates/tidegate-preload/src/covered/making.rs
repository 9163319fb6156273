//! New files: their first sync is answered by one record of all of the file, which recovery can
//! make it again from.
//!
//! The rules are B1 and B4 of docs/decisions/run-logs-what-was-synced.md.
//!
//! Invariants:
//! 1. The facts for the decisions of [`cover`] are gathered once the file is locked and read.
//! 2. The story begins before the file is read, as at any admission: writes since then are logged,
//!    and wait for the record.
//! 3. While a stream is open on the file, which no hook sees, nothing but the record is in its
//!    story ([`sealed`](super::sealed)).
//! 4. Where the record cannot answer, the real sync does. It commits what was pending before the
//!    file was made, and mostly all. Where that is known, the record is tried once more behind it:
//!    not to answer, but since the names of a file that the log has cost no sync.
//!
//! Entry points: [`Open::new_file`], [`Open::sync_new`]; [`answers_directory`].

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::log::cover::{
    self, DirectoryFacts, FileFacts, MADE_BYTES_MAX, MakeFacts, cause_of_new,
};
use tidegate::log::{
    Attributes, Counter, Definition, FileGuard, FileSystemRef, Log, Make, NamesGuard,
};

use super::leave::leave_half_named;
use super::sync::commits_all;
use super::{LOCK_TIMEOUT, Locked, Open, Sync};
use crate::state::descriptors::{DIRECT, Entry, PINNED, WRITE_ONLY};
use crate::state::extended::Extended;
use crate::state::files::{self, Identified, Seen};
use crate::state::new_files::{self, NewFile};
use crate::state::parents::{Parent, timestamp};
use crate::state::process::Holding;
use crate::state::{extents, file_systems, process};
use crate::sys::page::{Mapped, PAGE_BYTES, Page};
use crate::sys::path::{self, PathBuffer};
use crate::sys::raw::Errno;
use crate::sys::signals::SignalsBlocked;
use crate::sys::{own_stack, query, raw};

/// How long the supervisor is not asked again for what it did not do in time.
const PAUSE_NS: u64 = 1_000_000_000;

/// What a record is made for.
#[derive(Clone, Copy)]
enum Purpose {
    /// It answers a sync.
    Answer(Sync),
    /// The names of a file that a real sync has made durable.
    Names,
}

/// A story that has begun, of a file that is to be made by a record.
struct Story<'d> {
    entry: Entry,
    definition: Definition<'d>,
    number: u64,
    unlogged: u64,
}

/// Whether the log answers a sync of the directory of `fd`: nothing is pending in its file system,
/// and each file that was made is on the disk or in the log. Before that, or before the real sync,
/// files leave whose names a killed process was changing.
pub(crate) fn answers_directory(fd: c_int) -> bool {
    process::log().is_some_and(|log| log_answers_directory(log, fd))
}

pub(super) fn log_answers_directory(log: &Log, fd: c_int) -> bool {
    if !log.has_stories() || log.is_suspended() {
        return false;
    }
    let Some(_holding) = Holding::new() else { return false };
    let Some(seen) = Seen::of(fd).ok().filter(Seen::is_directory) else { return false };
    leave_half_named(log);
    let Some(file_system) = file_systems::known(seen.mount) else { return false };
    let is_answered = cover::answers_directory(&DirectoryFacts {
        is_held: log.is_held(file_system),
        commits_in_order: log.commits_in_order(file_system),
        is_pending: log.is_pending_for_directories(file_system),
    });
    if is_answered {
        log.stats().add(Counter::SyncsSkipped, 1);
    }
    is_answered
}

impl Open {
    /// Makes the sync of a plain file, if this process has made it and has not synced it since.
    #[cold]
    pub(super) fn sync_if_new(&self, wanted: Sync) -> Option<isize> {
        // A story that has begun is covered or given up.
        let _signals = SignalsBlocked::new();
        own_stack::run(|| self.new_file().map(|new| self.sync_new(&new, wanted)))
    }

    /// What is known of the file, if this process has made it and has not synced it since; and what
    /// the kernel says of it.
    fn new_file(&self) -> Option<(NewFile, Seen)> {
        let seen = Seen::of(self.fd).ok()?;
        new_files::find(self.fd, &seen).map(|new| (new, seen))
    }

    /// Makes the first sync of a file that this process has made.
    fn sync_new(&self, (new, seen): &(NewFile, Seen), wanted: Sync) -> isize {
        new_files::forget(self.known.device, self.known.inode);
        let Some(identified) = self.makeable(seen) else { return self.sync_old(wanted) };
        let file_system = identified.file_system.reference;
        // Once the supervisor holds the file system, nothing is pending that came before.
        let may_be_quiet = self.is_quiet(new, file_system) || !self.log.is_held(file_system);
        if may_be_quiet && self.make(new, &identified, Purpose::Answer(wanted)).is_some() {
            self.log.stats().add(Counter::SyncsMade, 1);
            self.log.stats().add(Counter::SyncsSkipped, 1);
            return 0;
        }
        let commits = commits_all(self.log, file_system, (self.fd, seen.size()));
        // Else only the file's creation is known to be in the transaction.
        let committed = commits.or_else(|| new.journaled(file_system));
        let result = self.sync_unmade(self.is_quiet(new, file_system));
        if result == 0 {
            self.note_committed(new, file_system, committed);
            if self.is_quiet(new, file_system) {
                // The file is on the disk: without the record it may be plain.
                let _ = self.make(new, &identified, Purpose::Names);
            }
        }
        result
    }

    /// Makes the sync that no record answers: always as `fsync`, which commits what was pending.
    fn sync_unmade(&self, is_quiet: bool) -> isize {
        if self.admission().is_ok() {
            return self.admit(Sync::All);
        }
        self.sync_for(cause_of_new(is_quiet), Sync::All)
    }

    /// The file's identity, if it may be made by a record at all.
    fn makeable(&self, seen: &Seen) -> Option<Identified> {
        let facts = MakeFacts {
            size: seen.size(),
            is_direct: self.known.has(DIRECT),
            writes_unseen: process::writes_unseen(),
            in_vfork_child: process::in_vfork_child(),
            is_suspended: self.log.is_suspended(),
        };
        let is_clock_steady = || self.log.note_clock(raw::clock_ahead_ns());
        let may_be = cover::may_make(&facts, is_clock_steady, || files::is_wanted(self.fd));
        let identified = may_be.then(|| files::identify_seen(self.log, self.fd, seen))??;
        let file_system = identified.file_system.reference;
        let may_be = self.log.commits_in_order(file_system) && !self.log.is_refused(file_system);
        may_be.then_some(identified)
    }

    /// Nothing is pending that a sync of the file would commit beside the file itself.
    fn is_quiet(&self, new: &NewFile, file_system: FileSystemRef) -> bool {
        let is_own = |number| new.numbers(file_system).any(|own| own == number);
        !self.log.is_pending_beside(file_system, is_own)
    }

    /// A real sync has committed the file's creation, and what was counted by then as `committed`.
    fn note_committed(&self, new: &NewFile, file_system: FileSystemRef, committed: Option<u64>) {
        if let Some(committed) = committed {
            self.log.committed(file_system, committed);
        }
        new.numbers(file_system).for_each(|number| self.log.take_off(file_system, number));
    }

    /// Covers the file by a record of all of it. None: it is plain as before.
    fn make(&self, new: &NewFile, identified: &Identified, purpose: Purpose) -> Option<()> {
        let mut path = PathBuffer::new();
        path::of_descriptor(self.fd, &mut path).ok()?;
        let parent = Parent::of_path(libc::AT_FDCWD, path.as_c_str())?;
        let story = self.begin_new(identified, &path)?;
        let made = self.make_story(new, &story, &parent, purpose);
        if made.is_none() {
            self.give_up_new(&story);
            self.pin_again();
        }
        made
    }

    fn begin_new<'d>(&self, identified: &Identified, path: &'d PathBuffer) -> Option<Story<'d>> {
        let new_entry = || files::entry_of(self.log, self.fd, self.known, identified);
        let entry = self.known.entry().or_else(new_entry)?;
        let guard = self.lock(entry).ok()?;
        if guard.is_logged() || !cover::may_seal(guard.pins(), self.known.has(PINNED)) {
            return None;
        }
        let definition = identified.definition(path);
        // The record says how long it is.
        guard.begin_story(&definition, 0).ok()?;
        self.unpin_to_make(&guard);
        Some(Story { entry, definition, number: guard.story(), unlogged: guard.unlogged() })
    }

    fn make_story(
        &self,
        new: &NewFile,
        story: &Story<'_>,
        parent: &Parent,
        purpose: Purpose,
    ) -> Option<()> {
        let (device, inode) = (self.known.device, self.known.inode);
        let file_system = story.entry.file_system;
        let is_ready = self.log.wait_for_plain(device, inode, LOCK_TIMEOUT) && self.hold(story);
        let _holding = Holding::new().filter(|_| is_ready)?;
        let names = self.log.lock_names_within(file_system, LOCK_TIMEOUT);
        let names = names.ok().filter(NamesGuard::may_record)?;
        let guard = self.lock(story.entry).ok().filter(|guard| is_of(guard, story))?;
        let seen = Seen::of(self.fd).ok().filter(|seen| seen.size() <= MADE_BYTES_MAX)?;
        let content = self.read(seen.size())?;
        let mut extended = Extended::new();
        extended.read(self.fd)?;
        let make = self.look(&seen, parent, extended.bytes())?;
        let is_pending = || !self.is_quiet(new, file_system);
        if !cover::stands_for_sync(guard.has_own_changes(), is_pending) {
            return None;
        }
        let data_only = matches!(purpose, Purpose::Answer(Sync::Data));
        let made = (&make, content.bytes(), seen.changed_ns());
        // What a stream writes behind the record is in none.
        let is_last = !self.known.has(PINNED);
        let is_made = guard.make(made, &story.definition, story.unlogged, data_only, is_last);
        is_made.ok().filter(|is_made| *is_made)?;
        self.note_sparse(&guard, seen.size());
        if let Some(journaled) = new.journaled(file_system) {
            guard.note_journaled(journaled);
        }
        new.numbers(file_system).for_each(|number| self.log.take_off(file_system, number));
        if matches!(purpose, Purpose::Names) {
            guard.note_retired();
        }
        self.seal(&guard, content.bytes());
        drop(names);
        Some(())
    }

    /// Has the supervisor hold the file system, if it does not yet; whether it does. It is not
    /// asked again at once where it took too long.
    fn hold(&self, story: &Story<'_>) -> bool {
        static NOT_BEFORE_NS: AtomicU64 = AtomicU64::new(0);
        let file_system = story.entry.file_system;
        if self.log.is_held(file_system) {
            return true;
        }
        if raw::now_ns() < NOT_BEFORE_NS.load(Ordering::Relaxed) {
            return false;
        }
        self.log.want_held(file_system, story.entry.file);
        let is_held = self.log.wait_for_held(file_system, LOCK_TIMEOUT);
        if !is_held {
            NOT_BEFORE_NS.store(raw::now_ns() + PAUSE_NS, Ordering::Relaxed);
        }
        is_held
    }

    /// What a record says of the locked file that was `seen`; none where it does not have the one
    /// name that `parent` has of it, or has more than a record says.
    pub(super) fn look<'a>(
        &self,
        seen: &Seen,
        parent: &'a Parent,
        extended: &'a [u8],
    ) -> Option<Make<'a>> {
        let stat = &seen.stat;
        let flags = query::file_flags(self.fd).ok()?;
        let sizes = [flags.project, flags.extent_bytes, flags.cow_extent_bytes];
        let child = parent.child()?;
        let file = FileFacts {
            links: u32::try_from(stat.st_nlink).ok()?,
            keeps_name: (child.st_dev, child.st_ino) == (stat.st_dev, stat.st_ino),
            is_ordinary: cover::fit_record(seen.attributes, flags.flags, sizes)
                && self.is_overwritten_in_place(seen),
        };
        // It was opened behind the creation, and before the record.
        let directory = &parent.seen.stat;
        let attributes = Attributes {
            mode: stat.st_mode & 0o7777,
            owner: stat.st_uid,
            group: stat.st_gid,
            accessed: timestamp(stat.st_atime, stat.st_atime_nsec),
            modified: timestamp(stat.st_mtime, stat.st_mtime_nsec),
            extended,
        };
        let parent_changed = timestamp(directory.st_ctime, directory.st_ctime_nsec);
        cover::has_all(&file).then(|| Make { at: parent.at(), parent_changed, attributes })
    }

    /// Takes note if overwrites of the locked file, which a record has all of, allocate blocks: as
    /// those of holes and of blocks that another file shares do.
    pub(super) fn note_sparse(&self, guard: &FileGuard<'_>, size: u64) {
        if !extents::become_dense(self.fd, size) {
            guard.note_hole();
        }
    }

    /// Reads all of the file, of so many bytes; none where that would take a record lock of the
    /// program away.
    pub(super) fn read(&self, bytes: u64) -> Option<Content> {
        let mut content = Content::of(usize::try_from(bytes).ok()?)?;
        if !self.known.has(WRITE_ONLY) {
            return content.fill(self.fd).ok().map(|()| content);
        }
        let opened = self.opened_again(libc::O_RDONLY | libc::O_NOATIME)?;
        content.fill(opened.number()).ok().map(|()| content)
    }

    /// Ends the story, which was not covered.
    fn give_up_new(&self, story: &Story<'_>) {
        let guard = self.lock(story.entry).ok().filter(|guard| is_of(guard, story));
        if guard.is_some_and(|guard| guard.end_story().is_err()) {
            // Recovery ignores the story; here it goes on until the next sync begins another one.
            self.log.mark_unlogged(story.entry.file);
        }
    }
}

fn is_of(guard: &Locked, story: &Story<'_>) -> bool {
    guard.is_logged() && guard.story() == story.number
}

/// All of a file, in memory that is neither the heap nor the stack.
pub(super) struct Content {
    memory: Memory,
    len_bytes: usize,
}

enum Memory {
    Page(Page),
    Mapped(Mapped),
}

impl Content {
    fn of(len_bytes: usize) -> Option<Self> {
        // One byte more: a file that is longer by now is seen.
        let memory = if len_bytes < PAGE_BYTES {
            Memory::Page(Page::take())
        } else {
            Memory::Mapped(Mapped::new(len_bytes + 1)?)
        };
        Some(Self { memory, len_bytes })
    }

    /// Reads the file of `fd`, which must have this length.
    fn fill(&mut self, fd: c_int) -> Result<(), Errno> {
        let wanted = self.len_bytes + 1;
        let memory = match &mut self.memory {
            Memory::Page(page) => page.bytes_mut(),
            Memory::Mapped(mapped) => mapped.bytes_mut(),
        };
        let space = memory.get_mut(..wanted).ok_or(libc::ENOMEM)?;
        let mut done = 0;
        while let Some(rest) = space.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match query::pread(fd, rest, done as u64) {
                Ok(bytes) => {
                    done += bytes;
                    if bytes == 0 || done == wanted - 1 {
                        break;
                    }
                }
                Err(libc::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        if done == wanted - 1 { Ok(()) } else { Err(libc::ESTALE) }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        let memory = match &self.memory {
            Memory::Page(page) => page.bytes(),
            Memory::Mapped(mapped) => mapped.bytes(),
        };
        memory.get(..self.len_bytes).unwrap_or_default()
    }
}
