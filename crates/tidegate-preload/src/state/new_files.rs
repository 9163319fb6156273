//! Regular files that this process has created, until the first sync of each.
//!
//! Invariants:
//! 1. A note has the numbers of the file's creation, and of changes of its attributes, in the log's
//!    count of changes. A change that is not noted counts as one of another file, so that the sync
//!    is real. So a note may be lost at any time: its slot is taken again, or in use by another
//!    thread or by the thread that a signal handler has interrupted.
//! 2. Until the process has synced any file, a note is found only by the descriptor that created
//!    the file, and ends with it: programs that never sync pay for no `statx`. The count of these
//!    notes is never too low, so that closing a descriptor needs no search while the count is 0.
//!
//! Entry points: [`note`], [`own_change`], [`find`], [`forget`], [`closed`].

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use tidegate::log::{ChangeNumbers, FileSystemRef};

use crate::state::files::Seen;
use crate::state::process;
use crate::sys::raw;
use crate::sys::shared::Shared;

/// The numbers of one change: from before its call, and from after it.
pub(crate) type Numbers = [ChangeNumbers; 2];

/// Number of files that are noted at once.
const NOTES: usize = 64;
/// The longest time between a file's creation and its note.
const CALL_NS_MAX: u64 = 100_000_000;
/// Number of changes that a note has: the file's creation, and changes of its attributes.
const CHANGES: usize = 8;

/// A file that this process has created.
#[derive(Clone, Copy)]
pub(crate) struct NewFile {
    /// The descriptor that created the file; -1 once the file is identified by its numbers.
    fd: c_int,
    device: u64,
    inode: u64,
    /// When the file was created, or noted if it is not identified; in nanoseconds since 1970.
    created_ns: u64,
    changes: [Numbers; CHANGES],
    count: usize,
}

impl NewFile {
    fn changes(&self) -> &[Numbers] {
        self.changes.get(..self.count).unwrap_or_default()
    }

    /// Returns the numbers of the file's own changes in the count of its file system.
    pub(crate) fn numbers(&self, file_system: FileSystemRef) -> impl Iterator<Item = u64> {
        self.changes().iter().flatten().filter_map(move |numbers| numbers.of(file_system))
    }

    /// Returns the count of changes of the file system before the file's creation, or `None` if the
    /// log did not know the file system then. A later change of attributes would not do, since it
    /// may set the values that the file has.
    pub(crate) fn journaled(&self, file_system: FileSystemRef) -> Option<u64> {
        let [before, _] = self.changes().first()?;
        before.of(file_system)
    }

    fn is_by_descriptor(&self) -> bool {
        self.fd >= 0
    }

    fn is(&self, device: u64, inode: u64) -> bool {
        self.fd < 0 && (self.device, self.inode) == (device, inode)
    }

    /// Notes the numbers of the file. Returns whether the file was created just before the note.
    fn identify(&mut self, seen: &Seen) -> bool {
        let is_it = self.created_ns.abs_diff(seen.created_ns) < CALL_NS_MAX;
        self.fd = -1;
        (self.device, self.inode) = (seen.stat.st_dev, seen.stat.st_ino);
        self.created_ns = seen.created_ns;
        is_it
    }
}

static PLACES: [Shared<NewFile>; NOTES] = [const { Shared::new() }; NOTES];
/// Number of notes ever made.
static MADE: AtomicU64 = AtomicU64::new(0);
/// Whether this process has synced a file.
static SYNCS: AtomicBool = AtomicBool::new(false);
/// Number of notes that are found by a descriptor. Counted up before such a note is made, and down
/// after it has gone: in a child that was forked in between, the count is too high, never too low.
static BY_DESCRIPTOR: AtomicUsize = AtomicUsize::new(0);

/// Returns the notes' slots, the newest first: a file is mostly synced before the next is created.
fn places() -> impl Iterator<Item = &'static Shared<NewFile>> {
    let made = MADE.load(Ordering::Relaxed);
    let numbers = (made.saturating_sub(NOTES as u64)..made).rev();
    numbers.filter_map(|number| PLACES.get(usize::try_from(number % NOTES as u64).ok()?))
}

/// Counts a note by a descriptor as gone, if there `is_one`.
fn uncount(is_one: bool) {
    if is_one {
        BY_DESCRIPTOR.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns whether any file was ever noted.
#[inline]
pub(crate) fn has_some() -> bool {
    MADE.load(Ordering::Relaxed) != 0
}

/// Notes that this process syncs files.
#[inline]
pub(crate) fn note_sync() {
    if !SYNCS.load(Ordering::Relaxed) {
        SYNCS.store(true, Ordering::Relaxed);
    }
}

/// Notes a regular file that was created and opened as `fd`, and the numbers of its creation.
/// Returns the file's attributes if the kernel was asked.
pub(crate) fn note(fd: c_int, numbers: Numbers) -> Option<Seen> {
    let mut new = NewFile {
        fd,
        device: 0,
        inode: 0,
        created_ns: raw::wall_clock_ns(),
        changes: [[ChangeNumbers::default(); 2]; CHANGES],
        count: 1,
    };
    new.changes[0] = numbers;
    let seen = if SYNCS.load(Ordering::Relaxed) { Some(Seen::of(fd).ok()?) } else { None };
    if seen.as_ref().is_some_and(|seen| !(seen.is_file() && new.identify(seen))) {
        return seen;
    }
    store(&new);
    seen
}

fn store(new: &NewFile) {
    BY_DESCRIPTOR.fetch_add(usize::from(new.is_by_descriptor()), Ordering::Relaxed);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let place = usize::try_from(number % NOTES as u64).ok().and_then(|at| PLACES.get(at));
    let replaces_one = place.and_then(|place| {
        place.with(|note| note.replace(*new).is_some_and(|before| before.is_by_descriptor()))
    });
    // If the slot is in use, the new note is lost.
    uncount(replaces_one.unwrap_or(new.is_by_descriptor()));
}

/// Runs `use_it` with the note that `is_it` accepts. The file is forgotten if the note is `None`
/// afterwards. Returns `None` if there is no such note.
fn with_note<R>(
    is_it: impl Fn(&NewFile) -> bool,
    use_it: impl FnOnce(&mut Option<NewFile>) -> R,
) -> Option<R> {
    let is_there = |place: &&Shared<NewFile>| {
        place.with(|note| note.as_ref().is_some_and(&is_it)).unwrap_or(false)
    };
    let place = places().find(is_there)?;
    let is_by_descriptor =
        |note: &Option<NewFile>| note.as_ref().is_some_and(NewFile::is_by_descriptor);
    let (result, has_gone) = place.with(|note| {
        let was_by_descriptor = is_by_descriptor(note);
        let result = note.as_ref().is_some_and(&is_it).then(|| use_it(note));
        (result, was_by_descriptor && !is_by_descriptor(note))
    })?;
    uncount(has_gone);
    result
}

/// Adds the `numbers` of a change of attributes to the note of the file with this device and inode
/// number. Returns whether the file is noted.
pub(crate) fn own_change((device, inode): (u64, u64), numbers: Numbers) -> bool {
    with_note(|new| new.is(device, inode), |note| add(note, numbers)).is_some()
}

/// Adds the `numbers` of a change of attributes to the note of the file of a descriptor.
pub(crate) fn own_change_of(fd: c_int, numbers: Numbers) {
    with_note(|new| new.fd == fd, |note| add(note, numbers));
}

fn add(note: &mut Option<NewFile>, numbers: Numbers) {
    let Some(new) = note else { return };
    match new.changes.get_mut(new.count) {
        Some(place) => {
            *place = numbers;
            new.count += 1;
        }
        None => *note = None,
    }
}

/// Returns the note of the open file that was `seen`, if this process has created the file.
pub(crate) fn find(fd: c_int, seen: &Seen) -> Option<NewFile> {
    // A thread with descriptors of its own has other files under these numbers.
    if !has_some() || process::is_apart() {
        return None;
    }
    let (device, inode) = (seen.stat.st_dev, seen.stat.st_ino);
    let is_it = |new: &NewFile| new.fd == fd || new.is(device, inode);
    let found = with_note(is_it, |note| {
        if note.as_mut().is_some_and(|new| new.fd == fd && !new.identify(seen)) {
            *note = None;
        }
        *note
    });
    // Another file may have the inode number of a removed one.
    found?.filter(|new| new.created_ns == seen.created_ns)
}

/// Forgets the file with these numbers: it is no longer new.
pub(crate) fn forget(device: u64, inode: u64) {
    with_note(|new| new.is(device, inode), |note| *note = None);
}

/// Forgets a file that is noted only by this descriptor, which is about to be closed.
#[inline]
pub(crate) fn closed(fd: c_int) {
    if BY_DESCRIPTOR.load(Ordering::Relaxed) != 0 {
        with_note(|new| new.fd == fd, |note| *note = None);
    }
}

/// Forgets the files that are noted only by descriptors from `first` to `last`, which are about to
/// be closed.
pub(crate) fn all_closed(first: u32, last: u32) {
    let is_one = |new: &NewFile| u32::try_from(new.fd).is_ok_and(|fd| (first..=last).contains(&fd));
    while BY_DESCRIPTOR.load(Ordering::Relaxed) != 0
        && with_note(is_one, |note| *note = None).is_some()
    {}
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::testing::World;

    /// The numbers of one change.
    fn change(world: &World) -> Numbers {
        [(); 2].map(|()| world.log.file_systems().note_change_everywhere())
    }

    /// Notes a change of the file's attributes. Whether the file is known by its numbers depends on
    /// whether some test has synced a file.
    fn changed(fd: c_int, of_file: (u64, u64), world: &World) {
        let numbers = change(world);
        if !own_change(of_file, numbers) {
            own_change_of(fd, numbers);
        }
    }

    #[test]
    fn a_file_is_new_until_it_is_forgotten() {
        let world = World::new();
        let file_system = world.log.file_systems().find_or_add(77, true).unwrap();
        let first = world.log.file_systems().changes(file_system);
        let file = File::create_new(world.path("file")).unwrap();
        let (fd, seen) = (file.as_raw_fd(), Seen::of(file.as_raw_fd()).unwrap());
        let of_file = (seen.stat.st_dev, seen.stat.st_ino);
        note(fd, change(&world));
        changed(fd, of_file, &world);
        let new = find(fd, &seen).unwrap();
        assert_eq!(new.journaled(file_system), Some(first));
        assert!(own_change(of_file, change(&world)), "it is known by its numbers now");
        let new = find(fd, &seen).unwrap();
        assert!(new.numbers(file_system).eq(first..first + 6));
        forget(of_file.0, of_file.1);
        assert!(find(fd, &seen).is_none() && !own_change(of_file, change(&world)));
    }

    #[test]
    fn a_file_with_more_changes_than_are_kept_is_not_new() {
        let world = World::new();
        let file = File::create_new(world.path("file")).unwrap();
        let (fd, seen) = (file.as_raw_fd(), Seen::of(file.as_raw_fd()).unwrap());
        note(fd, change(&world));
        for _ in 1..CHANGES {
            changed(fd, (seen.stat.st_dev, seen.stat.st_ino), &world);
        }
        assert!(find(fd, &seen).is_some());
        assert!(own_change((seen.stat.st_dev, seen.stat.st_ino), change(&world)));
        assert!(find(fd, &seen).is_none());
    }

    #[test]
    fn a_file_is_found_among_others_and_not_behind_its_closed_descriptor() {
        let world = World::new();
        let made = |name| {
            let file = File::create_new(world.path(name)).unwrap();
            let seen = Seen::of(file.as_raw_fd()).unwrap();
            note(file.as_raw_fd(), change(&world));
            (file, seen)
        };
        let files: Vec<_> = ["one", "two", "three"].map(made).into();
        for (file, seen) in &files {
            assert!(find(file.as_raw_fd(), seen).is_some());
        }
        let (file, seen) = made("four");
        let fd = file.as_raw_fd();
        // Once some test has synced, the file is known by its numbers, whatever its descriptor.
        let is_by_descriptor = with_note(|new| new.fd == fd, |_| ()).is_some();
        closed(fd);
        assert_eq!(find(fd, &seen).is_none(), is_by_descriptor);
        // Files of other tests may have the same numbers.
        for (_, seen) in files.iter().chain([&(file, seen)]) {
            forget(seen.stat.st_dev, seen.stat.st_ino);
        }
    }

    #[test]
    fn another_file_behind_the_same_descriptor_is_not_new() {
        let world = World::new();
        let file = File::create_new(world.path("file")).unwrap();
        let (fd, mut seen) = (file.as_raw_fd(), Seen::of(file.as_raw_fd()).unwrap());
        note(fd, change(&world));
        seen.created_ns -= 2 * CALL_NS_MAX;
        assert!(find(fd, &seen).is_none());
    }
}
