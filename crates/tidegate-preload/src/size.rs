//! Sizes and space of files: `truncate`, `fallocate` and their kin.
//!
//! [`Effect`] says what a call changes of a file's content; the rest is a record and the kernel's part under the file's lock.
#![allow(unsafe_code)] // C's functions
#![allow(clippy::missing_safety_doc)] // as in the manual of each

use std::ffi::{CStr, c_char, c_int};

use libc::off_t;
use tidegate::log::{FileKey, FileRef, Log, Ticket};

use crate::files::{self, Seen};
use crate::logged::negated;
use crate::names::{self, Name, SignalsBlocked, Target};
use crate::path::PathBuffer;
use crate::raw::{self, Errno, words};
use crate::subject::{AppendFailure, Place, Positions, Subject};
use crate::{next, process, readable};

/// What a call changes of the content of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// Nothing that can be read back.
    Nothing,
    /// A range within the file becomes zero; then the size changes.
    Content { zero: Option<(u64, u64)>, size: Option<u64> },
    /// What no record describes: bytes move.
    Other,
}

fn of_size(size_bytes: u64, new_bytes: u64) -> Effect {
    let size = (size_bytes != new_bytes).then_some(new_bytes);
    size.map_or(Effect::Nothing, |size| Effect::Content { zero: None, size: Some(size) })
}

/// What `fallocate` does to a file of this size.
fn of_allocation(mode: c_int, offset: off_t, len: off_t, size_bytes: u64) -> Effect {
    const WRITE_ZEROES: c_int = 0x80;
    let (Ok(offset), Ok(len)) = (u64::try_from(offset), u64::try_from(len)) else {
        return Effect::Nothing;
    };
    let end = offset.saturating_add(len);
    let zero = (offset < size_bytes && len > 0).then(|| (offset, end.min(size_bytes) - offset));
    let size = (end > size_bytes && mode & libc::FALLOC_FL_KEEP_SIZE == 0).then_some(end);
    let (zero, size) = match mode & !libc::FALLOC_FL_KEEP_SIZE {
        0 | libc::FALLOC_FL_UNSHARE_RANGE => (None, size),
        libc::FALLOC_FL_PUNCH_HOLE => (zero, None),
        libc::FALLOC_FL_ZERO_RANGE | WRITE_ZEROES => (zero, size),
        _ => return Effect::Other,
    };
    if zero.is_none() && size.is_none() { Effect::Nothing } else { Effect::Content { zero, size } }
}

/// A descriptor of the program, open for writing.
struct Descriptor(c_int);

impl Place for Descriptor {
    fn identify(&self, path: &mut PathBuffer) -> Result<(Seen, FileKey), Errno> {
        let seen = Seen::of(self.0)?;
        files::path_of(self.0, &seen.stat, path)?;
        Ok((seen, files::key_of(self.0, &seen)?))
    }

    fn make_durable(&self) -> bool {
        // All of it: a name that the log has, too, is no longer replayed.
        raw::fsync(self.0).is_ok()
    }
}

/// Changes the file of `fd` as `effect` says of its size; `operation` is the kernel's part.
fn change(fd: c_int, effect: impl Fn(u64) -> Effect, operation: impl FnOnce() -> isize) -> isize {
    let (Some(log), Some(_)) = (process::log(), files::of(fd).file()) else { return operation() };
    let _signals = SignalsBlocked::new();
    let file = || files::of(fd).file();
    // A definition says what the path is: no name changes before it is in the log.
    let names = needs_definition(log, fd, file).then(|| names::lock(log));
    let Some(subject) = Subject::of(log, fd, file) else {
        // Older writes that the kernel cannot take would come after this.
        let is_absorbed = file().is_some_and(|file| log.absorber_of(file) != 0);
        return if is_absorbed { negated(libc::EIO) } else { operation() };
    };
    let result = apply(&subject, &Descriptor(fd), || raw::fstat(fd), effect, operation);
    drop(names);
    result
}

fn needs_definition(log: &Log, fd: c_int, file: impl Fn() -> Option<FileRef>) -> bool {
    let subject = Subject::of(log, fd, file);
    subject.is_none_or(|subject| subject.guard.begin().map_or(true, |ticket| ticket.needs_define()))
}

fn apply(
    subject: &Subject<'_>,
    place: &impl Place,
    stat: impl Fn() -> Result<libc::stat, Errno>,
    effect: impl Fn(u64) -> Effect,
    operation: impl FnOnce() -> isize,
) -> isize {
    let effect =
        stat().map_or(Effect::Other, |stat| effect(u64::try_from(stat.st_size).unwrap_or(0)));
    match effect {
        Effect::Nothing => operation(),
        // The kernel refuses it, or kills for it: then nobody may do it once more.
        Effect::Content { size: Some(size), .. } if size > process::file_bytes_max() => operation(),
        Effect::Content { .. } if !subject.is_logged() => {
            subject.guard.mark_unlogged(false);
            operation()
        }
        Effect::Content { zero, size } => {
            subject.run(place, |ticket| record(ticket, zero, size), operation)
        }
        Effect::Other => {
            subject.settle(place);
            let result = operation();
            // Records to come are about the bytes where they are now.
            if !place.make_durable() {
                subject.guard.note_failure();
            }
            result
        }
    }
}

fn record(
    ticket: &mut Ticket<'_>,
    zero: Option<(u64, u64)>,
    size: Option<u64>,
) -> Result<Positions, AppendFailure> {
    let zero = zero.map_or(Ok(0), |(offset, len)| ticket.zero(offset, len))?;
    match size.map_or(Ok(0), |size| ticket.set_size(size)) {
        Ok(size) => Ok([zero, size]),
        Err(error) => {
            if zero != 0 {
                ticket.void(zero)?;
            }
            Err(error.into())
        }
    }
}

fn truncate_path(path: *const c_char, size: off_t) -> c_int {
    let operation = || {
        // SAFETY: the program's promise to the function that it called.
        unsafe { raw::call(libc::SYS_truncate, words![path, size]) }
    };
    let result = match (process::log(), readable::text(path)) {
        (Some(log), Some(path)) => truncate_name(log, path, size, operation),
        _ => operation(),
    };
    c_int::try_from(raw::returned(result)).unwrap_or(-1)
}

fn truncate_name(log: &Log, path: &CStr, size: off_t, operation: impl FnOnce() -> isize) -> isize {
    names::changing(log, || {
        let name = Name { directory: libc::AT_FDCWD, path };
        let target = match name.look(0) {
            Err(error) if names::is_scarcity(error) => {
                return names::settled(log, &[name], 0, operation);
            }
            target => target.ok().filter(Target::is_file),
        };
        let subject = target.as_ref().and_then(|target| target.entered(log));
        match (target, subject, u64::try_from(size)) {
            (Some(target), Some(subject), Ok(size)) => {
                // Not what was seen of it by then: the kernel may have been brought its end only now.
                apply(&subject, &target, || target.stat_now(), |it| of_size(it, size), operation)
            }
            // Older writes that the kernel cannot take would come after this.
            (Some(target), None, _) if target.is_absorbed(log) => negated(libc::EIO),
            _ => operation(),
        }
    })
}

fn truncate_descriptor(fd: c_int, size: off_t) -> c_int {
    let effect = |before| u64::try_from(size).map_or(Effect::Nothing, |size| of_size(before, size));
    let operation = || raw::ftruncate(fd, size).map_or_else(|errno| -(errno as isize), |_| 0);
    c_int::try_from(raw::returned(change(fd, effect, operation))).unwrap_or(-1)
}

fn allocate(fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int {
    let operation = || {
        // SAFETY: no pointers.
        unsafe { raw::call(libc::SYS_fallocate, words![fd, mode, offset, len]) }
    };
    let effect = |size_bytes| of_allocation(mode, offset, len, size_bytes);
    c_int::try_from(raw::returned(change(fd, effect, operation))).unwrap_or(-1)
}

/// The C library allocates itself where the file system cannot; its result is the error's number.
fn allocate_anyhow(fd: c_int, offset: off_t, len: off_t) -> c_int {
    let operation = || match next::posix_fallocate.get() {
        // SAFETY: the C library's function of this type; no pointers.
        Some(allocate) => -(unsafe { allocate(fd, offset, len) } as isize),
        None => -(libc::ENOSYS as isize),
    };
    let effect = |size_bytes| of_allocation(0, offset, len, size_bytes);
    c_int::try_from(-change(fd, effect, operation)).unwrap_or(libc::EIO)
}

macro_rules! hooks {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> c_int $body
    )*};
}

hooks! {
    truncate(path: *const c_char, size: off_t) {
        truncate_path(path, size)
    }
    truncate64(path: *const c_char, size: off_t) {
        truncate_path(path, size)
    }
    ftruncate(fd: c_int, size: off_t) {
        truncate_descriptor(fd, size)
    }
    ftruncate64(fd: c_int, size: off_t) {
        truncate_descriptor(fd, size)
    }
    fallocate(fd: c_int, mode: c_int, offset: off_t, len: off_t) {
        allocate(fd, mode, offset, len)
    }
    fallocate64(fd: c_int, mode: c_int, offset: off_t, len: off_t) {
        allocate(fd, mode, offset, len)
    }
    posix_fallocate(fd: c_int, offset: off_t, len: off_t) {
        allocate_anyhow(fd, offset, len)
    }
    posix_fallocate64(fd: c_int, offset: off_t, len: off_t) {
        allocate_anyhow(fd, offset, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{World, look};

    const KEEP: c_int = libc::FALLOC_FL_KEEP_SIZE;

    fn content(zero: Option<(u64, u64)>, size: Option<u64>) -> Effect {
        Effect::Content { zero, size }
    }

    #[test]
    fn only_a_new_size_is_recorded() {
        assert_eq!(of_size(5, 5), Effect::Nothing);
        assert_eq!(of_size(5, 0), content(None, Some(0)));
    }

    #[test]
    fn allocation_is_recorded_where_it_can_be_read_back() {
        let punch = libc::FALLOC_FL_PUNCH_HOLE | KEEP;
        let zero = libc::FALLOC_FL_ZERO_RANGE;
        let cases = [
            ((0, 0, 100), Effect::Nothing),
            ((0, 50, 51), content(None, Some(101))),
            ((KEEP, 50, 51), Effect::Nothing),
            ((punch, 10, 20), content(Some((10, 20)), None)),
            ((punch, 90, 20), content(Some((90, 10)), None)),
            ((punch, 100, 20), Effect::Nothing),
            ((zero, 90, 20), content(Some((90, 10)), Some(110))),
            ((zero | KEEP, 90, 20), content(Some((90, 10)), None)),
            ((zero, 200, 20), content(None, Some(220))),
            ((libc::FALLOC_FL_COLLAPSE_RANGE, 0, 50), Effect::Other),
            ((libc::FALLOC_FL_INSERT_RANGE, 0, 50), Effect::Other),
            ((1 << 20, 0, 50), Effect::Other),
            ((0, -1, 50), Effect::Nothing),
            ((0, 0, -50), Effect::Nothing),
            ((zero, off_t::MAX, off_t::MAX), content(None, Some(u64::MAX - 1))),
        ];
        for ((mode, offset, len), effect) in cases {
            assert_eq!(of_allocation(mode, offset, len, 100), effect, "{mode:#x} {offset} {len}");
        }
    }

    fn change_at(world: &World, path: &std::path::Path, effect: Effect, result: isize) -> isize {
        let target = look(path);
        let subject = target.entered(&world.log).unwrap();
        let stat = || Ok(*target.stat());
        apply(&subject, &target, stat, |_| effect, || result)
    }

    #[test]
    fn changes_of_covered_files_are_recorded_and_voided_where_they_fail() {
        let world = World::new();
        let path = world.live_file("a");
        change_at(&world, &path, content(Some((1, 2)), Some(9)), 0);
        change_at(&world, &path, content(None, Some(0)), -1);
        assert_eq!(world.records()[2..], ["zero 1 2", "size 9", "size 0", "void"]);
        assert!(world.subject(&path).guard.is_covered());
    }

    #[test]
    fn changes_of_other_files_are_left_to_the_kernel() {
        let world = World::new();
        let path = world.file("a");
        assert_eq!(change_at(&world, &path, content(None, Some(9)), 0), 0);
        assert!(world.records().is_empty());
        assert!(!world.subject(&path).guard.is_covered());
    }

    #[test]
    fn what_moves_bytes_retires_the_file_first() {
        let world = World::new();
        let path = world.live_file("a");
        change_at(&world, &path, Effect::Other, 0);
        assert_eq!(world.records()[2..], ["retire"]);
        let subject = world.subject(&path);
        assert!(!subject.guard.is_covered() && !subject.guard.is_sticky());
    }
}
