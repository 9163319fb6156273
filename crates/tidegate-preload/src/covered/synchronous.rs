//! Writes by descriptors with `O_SYNC` or `O_DSYNC`: each is a write and its sync.
//!
//! Invariants:
//! 1. Such a write returns after its sync: by the kernel, or as if the program had called the sync,
//!    even if the file is plain by then.
//! 2. A file is not opened if the process may hold a record lock on it: the close would release the
//!    lock.
//!
//! The kernel syncs each write by such a descriptor, and no call removes the flag. So a write to a
//! file in the log is made by a second descriptor without the flag, which is open only during the
//! system call. A write at the position and an append use the program's own descriptor.

use std::ffi::c_int;

use tidegate::log::Counter;
use tidegate::log::cover::splits_sync;

use super::{Open, Place, Request, Sync};
use crate::state::descriptors::{APPEND, DIRECT, FULLY_SYNCHRONOUS, SYNCHRONOUS};
use crate::state::{real, record_locks};

/// Writes by the file's entry, and syncs the write if the descriptor was opened for that. `kernel`
/// makes the program's system call by the descriptor in its argument. Returns the write's result,
/// or the error of the sync.
#[inline]
pub(crate) fn write_as_opened(
    open: &Open,
    request: &Request<'_>,
    kernel: impl Fn(c_int) -> isize,
) -> isize {
    if open.known.has(SYNCHRONOUS) {
        write_synchronous(open, request, kernel)
    } else {
        open.write(request, || kernel(open.fd))
    }
}

#[cold]
fn write_synchronous(open: &Open, request: &Request<'_>, kernel: impl Fn(c_int) -> isize) -> isize {
    if !can_write_without_sync(open, request.place) {
        let result = open.write(request, || kernel(open.fd));
        real::note_synchronous(open, result);
        return result;
    }
    let result = open.write(request, || match open.opened_again(libc::O_WRONLY) {
        Some(opened) => kernel(opened.number()),
        // The kernel syncs this write.
        None => kernel(open.fd),
    });
    open.synced(result, sync_of_writes(open))
}

fn can_write_without_sync(open: &Open, place: Place) -> bool {
    let (device, inode) = (open.known.device, open.known.inode);
    let may_have_record_lock = || record_locks::may_have(device, inode);
    splits_sync(place, open.known.has(APPEND | DIRECT), may_have_record_lock)
}

fn sync_of_writes(open: &Open) -> Sync {
    if open.known.has(FULLY_SYNCHRONOUS) { Sync::All } else { Sync::Data }
}

/// Returns the `result` of a write to a plain file. If the kernel has synced the write, counts it
/// as a sync, which may cover the file, and returns the error if that fails.
#[inline]
pub(crate) fn plain_as_opened(open: &Open, place: Place, result: isize) -> isize {
    if result > 0 && open.known.has(SYNCHRONOUS) {
        return covered_by_write(open, place, result);
    }
    result
}

#[cold]
fn covered_by_write(open: &Open, place: Place, result: isize) -> isize {
    if !can_write_without_sync(open, place) {
        real::note_synchronous(open, result);
        return result;
    }
    open.count(Counter::SyncsSynchronous);
    if open.admission().is_err() {
        return result;
    }
    let synced = open.admit(sync_of_writes(open));
    if synced < 0 { synced } else { result }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs::File;
    use std::io::IoSlice;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{FileExt, OpenOptionsExt};

    use super::*;
    use crate::sys::query;
    use crate::testing::World;

    const FLAGS: u32 = SYNCHRONOUS;

    /// The records of a write of "data" to byte `at` of a covered file of four bytes, whether the
    /// kernel was given the program's descriptor, and how many syncs were answered.
    fn written(
        flags: u32,
        place: Place,
        prepare: impl FnOnce(&World, &Open),
    ) -> (String, bool, u64) {
        let world = World::new();
        drop(world.file("file"));
        let appends = flags & APPEND != 0;
        let file = File::options()
            .write(true)
            .append(appends)
            .custom_flags(libc::O_DSYNC)
            .open(world.path("file"))
            .unwrap();
        let open = world.covered(&file, flags);
        prepare(&world, &open);
        let from = world.log.ring().head();
        let is_programs = Cell::new(false);
        let kernel = |fd| {
            is_programs.set(fd == file.as_raw_fd());
            let at = if let Place::At(at) = place { at } else { 0 };
            // `fd` is the program's descriptor, with the flag, or one without it.
            assert_eq!(query::status_flags(fd).unwrap() & libc::O_DSYNC != 0, is_programs.get());
            file.write_at(b"data", at).unwrap().cast_signed()
        };
        let parts = [IoSlice::new(b"data")];
        assert_eq!(write_as_opened(&open, &Request { parts: &parts, place }, kernel), 4);
        let answered = world.log.ring().stats().total(Counter::SyncsSkipped);
        (world.records_since(from), is_programs.get(), answered)
    }

    #[test]
    fn a_write_to_a_place_is_logged_and_its_sync_is_answered() {
        let found = written(FLAGS, Place::At(0), |_, _| ());
        assert_eq!(found, ("0 mark:4".into(), false, 1));
        let found = written(FLAGS, Place::At(2), |_, _| ());
        assert_eq!(found, ("2+ mark:6".into(), false, 1), "growth is promised at once");
    }

    #[test]
    fn what_goes_to_the_position_or_is_appended_is_synced_by_the_kernel() {
        let found = written(FLAGS, Place::Current, |_, _| ());
        assert_eq!((found.1, found.2), (true, 0));
        let found = written(FLAGS | APPEND, Place::At(0), |_, _| ());
        assert_eq!((found.1, found.2), (true, 0));
    }

    #[test]
    fn a_file_with_a_record_lock_is_not_opened() {
        let found = written(FLAGS, Place::At(0), |_, open| record_locks::note(open.fd));
        assert_eq!((found.1, found.2), (true, 0));
    }

    /// Another program changed a name: the next sync that would commit must be real.
    #[test]
    fn a_write_that_would_commit_what_is_pending_is_synced_for_real() {
        let pending = |world: &World, open: &Open| {
            world.log.file_systems().note_change(open.entry().unwrap().file_system);
        };
        let (records, is_programs, answered) = written(FLAGS, Place::At(4), pending);
        assert_eq!((&*records, is_programs, answered), ("4+ mark:8", false, 0));
        let (_, _, answered) = written(FLAGS, Place::At(0), pending);
        assert_eq!(answered, 1, "as by fdatasync, which commits nothing for an overwrite");
        let (_, _, answered) = written(FLAGS | FULLY_SYNCHRONOUS, Place::At(0), pending);
        assert_eq!(answered, 0, "as by fsync");
    }

    #[test]
    fn a_write_that_the_kernel_has_synced_covers_its_file() {
        let world = World::new();
        let file = world.file("file");
        let open = world.open(&file, FLAGS);
        world.keep(&open);
        let counted = || world.log.ring().stats().total(Counter::SyncsSynchronous);
        let at = Place::At(0);
        assert_eq!((plain_as_opened(&open, at, -5), counted()), (-5, 0));
        assert_eq!((plain_as_opened(&open, at, 4), counted()), (4, 1));
        assert_eq!((plain_as_opened(&open, Place::Current, 4), counted()), (4, 2));
        assert_eq!((plain_as_opened(&world.open(&file, 0), at, 4), counted()), (4, 2));
    }
}
