//! Regular files that this process has made, until one of their syncs was answered or made.
//!
//! Invariants:
//! 1. A note says which numbers the creation of the file and the changes of its attributes have in
//!    the log's count of changes. What is not noted counts as another file's change: its sync is
//!    real. So a note may be lost at any time: its place is taken, it is in use by another thread,
//!    or by the one that a signal handler has interrupted.
//! 2. Until the process has synced a file, a note is found by the descriptor only that made the
//!    file, and ends with it: programs that never sync pay for no look at the file. At most so many
//!    such notes are there as are counted, so that a descriptor is closed without a search once
//!    there are none.
//!
//! Entry points: [`note`], [`own_change`], [`find`], [`forget`], [`closed`].

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use tidegate::log::{ChangeNumbers, FileSystemRef};

use crate::state::files::Seen;
use crate::state::process;
use crate::sys::raw;
use crate::sys::shared::Shared;

/// A change has a number from before its call, and one from after it.
pub(crate) type Numbers = [ChangeNumbers; 2];

/// Files that are known at once.
const NOTES: usize = 64;
/// How long the call that makes a file may take.
const CALL_NS_MAX: u64 = 100_000_000;
/// Changes of a file that are known: its creation, and some of its attributes.
const CHANGES: usize = 8;

/// A file that this process has made.
#[derive(Clone, Copy)]
pub(crate) struct NewFile {
    /// The descriptor that made it; -1: it is known by the numbers.
    fd: c_int,
    device: u64,
    inode: u64,
    /// Nanoseconds since 1970; until the file is identified, when it was noted.
    created_ns: u64,
    changes: [Numbers; CHANGES],
    count: usize,
}

impl NewFile {
    fn changes(&self) -> &[Numbers] {
        self.changes.get(..self.count).unwrap_or_default()
    }

    /// The numbers of the file's own changes in the count of its file system.
    pub(crate) fn numbers(&self, file_system: FileSystemRef) -> impl Iterator<Item = u64> {
        self.changes().iter().flatten().filter_map(move |numbers| numbers.of(file_system))
    }

    /// The count of changes of the file system before the file was made; none where the log did not
    /// know the file system then. Not before its last change: a change of attributes may leave them
    /// as they are.
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

    /// Notes which file it is; false: not the one that was made just before it was noted.
    fn identify(&mut self, seen: &Seen) -> bool {
        let is_it = self.created_ns.abs_diff(seen.created_ns) < CALL_NS_MAX;
        self.fd = -1;
        (self.device, self.inode) = (seen.stat.st_dev, seen.stat.st_ino);
        self.created_ns = seen.created_ns;
        is_it
    }
}

static PLACES: [Shared<NewFile>; NOTES] = [const { Shared::new() }; NOTES];
/// Notes that were ever made.
static MADE: AtomicU64 = AtomicU64::new(0);
/// This process has synced a file.
static SYNCS: AtomicBool = AtomicBool::new(false);
/// Notes that are found by a descriptor. Counted before such a note is made and after it has gone:
/// in a child that was forked in between there are too many rather than too few.
static BY_DESCRIPTOR: AtomicUsize = AtomicUsize::new(0);

/// The notes that were ever made, the newest first: a file is mostly synced before the next one is
/// made.
fn places() -> impl Iterator<Item = &'static Shared<NewFile>> {
    let made = MADE.load(Ordering::Relaxed);
    let numbers = (made.saturating_sub(NOTES as u64)..made).rev();
    numbers.filter_map(|number| PLACES.get(usize::try_from(number % NOTES as u64).ok()?))
}

/// Notes by a descriptor have gone.
fn uncount(is_one: bool) {
    if is_one {
        BY_DESCRIPTOR.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Some file is noted.
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

/// Notes that a regular file was made and opened as `fd`; its creation has these numbers. What the
/// kernel says of the file, if it was asked.
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
    // Where the place is in use, the new note is lost.
    uncount(replaces_one.unwrap_or(new.is_by_descriptor()));
}

/// Changes the note of a file, if there is one; `None` afterwards: it is forgotten.
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

/// The attributes of the file with this device and inode number were changed; the change has these
/// `numbers`. Whether the file is noted.
pub(crate) fn own_change((device, inode): (u64, u64), numbers: Numbers) -> bool {
    with_note(|new| new.is(device, inode), |note| add(note, numbers)).is_some()
}

/// As [`own_change`], for the file of a descriptor.
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

/// The note of the open file that was `seen`, if this process has made it.
pub(crate) fn find(fd: c_int, seen: &Seen) -> Option<NewFile> {
    // Descriptors of a thread that has its own mean other files.
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
    // The number of a file that is gone may be another one's by now.
    found?.filter(|new| new.created_ns == seen.created_ns)
}

/// The file with these numbers is no new one any more.
pub(crate) fn forget(device: u64, inode: u64) {
    with_note(|new| new.is(device, inode), |note| *note = None);
}

/// A descriptor is about to be closed: what was noted with it only is found no more.
#[inline]
pub(crate) fn closed(fd: c_int) {
    if BY_DESCRIPTOR.load(Ordering::Relaxed) != 0 {
        with_note(|new| new.fd == fd, |note| *note = None);
    }
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

    /// A change of the file's attributes. Whether it is known by its numbers depends on whether
    /// some test has synced a file.
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
        // Once some test has synced, it is known by its numbers, whatever descriptor it has.
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
