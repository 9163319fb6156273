//! Hooks: opening files.
//!
//! Invariants:
//! 1. A file that this process makes is known to be new: it is tried with `O_EXCL` first. Whatever that fails with, the
//!    call is made as the program made it, so that all else is as the kernel has it. One that was found there last time is
//!    opened without being made: it cannot be new.
//! 2. A file with changes in the log is emptied through the log: `O_TRUNC` is taken away, and done after the open.
//! 3. `O_SYNC` and `O_DSYNC` are taken away from files of the log, and from nothing else. Where such a file has to be written past
//!    the log, each write is followed by a sync; where somebody else writes it, the flags are given back.
#![allow(unsafe_code)] // C's calling convention and strings

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::time::Duration;

use crate::alike::alike;
use crate::birth::{self, Given};
use crate::close::{self, appeared, forget};
use crate::descriptors::{self, DATA_SYNC, Known, NEVER, STRIPPED, SYNC};
use crate::files::Seen;
use crate::logged::Open;
use crate::path::{self, LINK_BYTES};
use crate::raw::{self, Errno};
use crate::{absorb, files, found_before, known_folder, names, next, process, readable};

/// How often, and for how long each time, an absorption that begins or ends is waited for.
const LEASE_TRIES: u32 = 50;
const LEASE_PAUSE: Duration = Duration::from_millis(10);

const CREATE_NEW: c_int = libc::O_CREAT | libc::O_EXCL;

/// An open as the program asked for it.
#[derive(Clone, Copy)]
struct Request<'a> {
    directory: c_int,
    path: &'a CStr,
    flags: c_int,
    mode: c_uint,
    /// `O_SYNC` is left to the kernel. To give it back, the file would have to be opened twice, and with the first descriptor that
    /// is closed the process loses its record locks on the file.
    keeps_syncing: bool,
}

impl Request<'_> {
    /// Nothing that the log could have to do with: no file is made or emptied, no write is to be durable by itself.
    fn is_plain(&self) -> bool {
        const OF_INTEREST: c_int = libc::O_CREAT | libc::O_TRUNC | libc::O_SYNC | libc::O_DSYNC;
        self.flags & OF_INTEREST == 0
            || self.flags & libc::O_PATH != 0
            || self.flags & libc::O_TMPFILE == libc::O_TMPFILE
    }

    fn writes(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }

    /// The flags with which a file is opened that is perhaps for the log.
    fn without_syncing(&self) -> c_int {
        // O_SYNC has the bit of O_DSYNC, too.
        if self.strips() { self.flags & !libc::O_SYNC } else { self.flags }
    }

    fn strips(&self) -> bool {
        self.writes() && !self.keeps_syncing
    }

    fn stripped(&self) -> u32 {
        match self.flags & libc::O_SYNC {
            libc::O_SYNC if self.strips() => SYNC,
            libc::O_DSYNC if self.strips() => DATA_SYNC,
            _ => 0,
        }
    }

    /// Opens by the C library: the thread may be cancelled while it waits, for the other end of a pipe, say.
    fn by_library(&self) -> c_int {
        let Some(openat64) = next::openat64.resolved() else {
            return returned(raw::openat(self.directory, self.path, self.flags, self.mode));
        };
        // SAFETY: a terminated path.
        unsafe { openat64(self.directory, self.path.as_ptr(), self.flags, self.mode) }
    }

    /// The same, where the kernel refuses what the program does not want to wait for: a lease that absorbs the file is no
    /// reason.
    fn patiently(&self) -> c_int {
        let mut fd = self.by_library();
        for _ in 0..LEASE_TRIES {
            let refused = fd < 0 && self.flags & libc::O_NONBLOCK != 0;
            if !refused || raw::errno() != libc::EWOULDBLOCK {
                return fd;
            }
            let Some(log) = process::log() else { return fd };
            let found = raw::fstatat(self.directory, self.path, 0);
            match found.ok().filter(|stat| log.may_have(stat.st_dev, stat.st_ino)) {
                Some(stat) if log.absorbed_of(stat.st_dev, stat.st_ino).is_some() => {
                    return self.waiting();
                }
                // The lease is taken before the file is absorbed, and given back after it was.
                Some(_) => log.wait_for_room(log.room(), LEASE_PAUSE),
                None => return raw::failed_int(libc::EWOULDBLOCK),
            }
            fd = self.by_library();
        }
        fd
    }

    /// Opens as a program that waits for leases.
    fn waiting(&self) -> c_int {
        let waiting = Self { flags: self.flags & !libc::O_NONBLOCK, ..*self };
        let fd = waiting.by_library();
        if fd >= 0 {
            let _ = raw::fcntl(fd, libc::F_SETFL, usize::try_from(self.flags).unwrap_or(0));
        }
        fd
    }

    fn run(&self) -> c_int {
        absorb::opening();
        if self.is_plain() || process::log().is_none() {
            let fd = self.patiently();
            if fd >= 0 {
                appeared(fd);
                descriptors::opened(fd);
            }
            return fd;
        }
        if self.flags & libc::O_CREAT != 0 {
            if let Some(fd) = self.found_again() {
                return fd;
            }
            let flags = self.without_syncing() | CREATE_NEW;
            if let Ok((fd, given)) = self.make(flags) {
                made(fd, || Ok(flags), Some(given));
                return self.with_syncing(fd);
            }
        }
        self.existing()
    }

    /// Makes a file that was not there before.
    fn make(&self, flags: c_int) -> Result<(c_int, Given<'_>), Errno> {
        let known = process::log().and_then(|log| known_folder::knows(log, self.path));
        if known.is_some() {
            match raw::open_without_links(self.path, flags, self.mode) {
                Ok(fd) => return Ok((fd, Given { path: self.path, known })),
                Err(libc::EEXIST) => return Err(libc::EEXIST),
                Err(_) => {}
            }
        }
        let fd = raw::openat(self.directory, self.path, flags, self.mode)?;
        Ok((fd, Given { path: self.path, known: None }))
    }

    /// Opens the file that was found there last time, if it still is there: without `O_CREAT`, which does nothing then. None: nothing
    /// is open, and all is to be asked of the kernel as if this had not been tried.
    ///
    /// What `O_CREAT` does to a file that is there: the kernel may refuse one of another user in a directory that is everybody's
    /// (`fs.protected_regular`), and refuses a directory, which whoever writes cannot open anyway.
    fn found_again(&self) -> Option<c_int> {
        let place = found_before::at(self.directory, self.path);
        if !self.writes() || self.flags & libc::O_EXCL != 0 || !place.is_noted() {
            return None;
        }
        let errno = raw::errno();
        let flags = self.flags_of_existing() & !libc::O_CREAT;
        let fd = Self { flags, ..*self }.patiently();
        let found = usize::try_from(fd).is_ok().then(|| Seen::of(fd).ok()).flatten();
        let Some(seen) = found.filter(|seen| is_own(&seen.stat)) else {
            place.forget();
            // Closed, it would take the program's record locks on the file along.
            if fd >= 0 && !close::locks() {
                let _ = raw::close(fd);
            }
            raw::set_errno(errno);
            return None;
        };
        forget(fd);
        descriptors::opened(fd);
        files::note(fd, &seen, || Ok(flags), 0);
        Some(self.emptied(fd))
    }

    /// Opens a file that was there before, most likely.
    fn existing(&self) -> c_int {
        let flags = self.flags_of_existing();
        let fd = Self { flags, ..*self }.patiently();
        if fd < 0 {
            return fd;
        }
        forget(fd);
        descriptors::opened(fd);
        if self.flags & libc::O_CREAT != 0 {
            self.examine(fd, flags);
        }
        self.emptied(fd)
    }

    /// The file is emptied by a write, so that the kernel must not do it at once.
    fn empties(&self) -> bool {
        self.flags & libc::O_TRUNC != 0 && self.writes()
    }

    fn flags_of_existing(&self) -> c_int {
        self.without_syncing() & if self.empties() { !libc::O_TRUNC } else { !0 }
    }

    /// Empties what was opened, if that is wanted.
    fn emptied(&self, fd: c_int) -> c_int {
        if self.flags & libc::O_TRUNC != 0
            && let Err(errno) = if self.empties() { empty(fd) } else { was_emptied(fd) }
        {
            forget(fd);
            let _ = raw::close(fd);
            return raw::failed_int(errno);
        }
        self.with_syncing(fd)
    }

    /// Between the two opens of a file, somebody else may have removed it; or the name is a link that led nowhere. One that is
    /// made where it is missing is written to, most likely, so that it is noted at once.
    fn examine(&self, fd: c_int, flags: c_int) {
        let Ok(seen) = Seen::of(fd) else { return };
        if self.flags & CREATE_NEW == libc::O_CREAT {
            note_if_new(fd, &seen.stat);
        }
        if self.writes() {
            files::note(fd, &seen, || Ok(flags), 0);
            if is_file(&seen.stat) && is_own(&seen.stat) {
                found_before::at(self.directory, self.path).note();
            }
        }
    }

    /// Notes what was taken away, or gives it back where the log does not make up for it.
    fn with_syncing(&self, fd: c_int) -> c_int {
        let stripped = self.stripped();
        if stripped != 0 {
            let known = files::of(fd);
            let makes_up = known.file().is_some() && !process::writes_unseen();
            if makes_up || !opened_again(fd, self.flags) {
                descriptors::set(fd, known.with(stripped));
            }
        }
        fd
    }
}

/// Opens the file of `fd` again, with the flags that the program wants, in place of `fd`.
fn opened_again(fd: c_int, flags: c_int) -> bool {
    if !raw::fstat(fd).is_ok_and(|stat| is_file(&stat) || is_block_device(&stat)) {
        return true;
    }
    let mut link = [0; LINK_BYTES];
    let once = CREATE_NEW | libc::O_TRUNC | libc::O_NOFOLLOW;
    let link = path::proc_link(fd, &mut link);
    let Ok(again) = raw::openat(libc::AT_FDCWD, link, flags & !once, 0) else {
        return false;
    };
    let place = raw::lseek(fd, 0, libc::SEEK_CUR).unwrap_or(0).cast_signed() as i64;
    let _ = raw::lseek(again, place, libc::SEEK_SET);
    let replaced = raw::dup3(again, fd, flags & libc::O_CLOEXEC).is_ok();
    let _ = raw::close(again);
    replaced
}

/// Somebody whom no hook sees is going to write through `fd`: gives it the `O_SYNC` back that was taken away, by a description
/// of its own. Where others may share the one that it has, or a lock hangs on it, it stays without.
pub(crate) fn give_syncing_back(fd: c_int) {
    let known = descriptors::get(fd);
    if !known.has(STRIPPED) || known.has(NEVER) || close::locks() || !descriptors::is_only(fd) {
        return;
    }
    let flags = raw::status_flags(fd).and_then(|status| {
        let cloexec = raw::fcntl(fd, libc::F_GETFD, 0)? & 1 != 0;
        Ok(close::shown_flags(known, status) | if cloexec { libc::O_CLOEXEC } else { 0 })
    });
    if flags.is_ok_and(|flags| opened_again(fd, flags)) {
        // It may be absorbed no more by now.
        let known = descriptors::get(fd);
        descriptors::change(fd, known, known.without(STRIPPED));
    }
}

/// It belongs to the user that the kernel takes the thread for.
fn is_own(stat: &libc::stat) -> bool {
    /// Whoever has no number here.
    const OVERFLOW: libc::uid_t = 65534;
    let is_user = || raw::geteuid().is_ok_and(|user| user == stat.st_uid as usize);
    stat.st_uid != OVERFLOW && !found_before::in_disguise() && is_user()
}

fn is_file(stat: &libc::stat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFREG
}

/// The file of `fd` may have been made just now, past the log.
pub(crate) fn note_new(fd: c_int) {
    if let Ok(stat) = raw::fstat(fd) {
        note_if_new(fd, &stat);
    }
}

fn note_if_new(fd: c_int, stat: &libc::stat) {
    if let Some(log) = process::log()
        && may_be_new(stat)
    {
        names::appeared(log, fd);
    }
}

/// A file that was just made is empty, and all its times are one.
fn may_be_new(stat: &libc::stat) -> bool {
    let modified = (stat.st_mtime, stat.st_mtime_nsec);
    stat.st_size == 0
        && is_file(stat)
        && (stat.st_atime, stat.st_atime_nsec) == modified
        && (stat.st_ctime, stat.st_ctime_nsec) == modified
}

fn is_block_device(stat: &libc::stat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFBLK
}

fn returned(result: Result<c_int, Errno>) -> c_int {
    result.unwrap_or_else(raw::failed_int)
}

/// This process has just made the file of `fd`, which has these status flags, by the path `given`.
fn made(fd: c_int, status: impl FnOnce() -> Result<c_int, Errno>, given: Option<Given<'_>>) {
    forget(fd);
    descriptors::opened(fd);
    let Some(log) = process::log() else { return };
    let seen = Seen::of(fd).ok();
    let known = seen.map_or(Known::IGNORED, |seen| files::note(fd, &seen, status, 0));
    match known.file().zip(seen) {
        Some((file, seen)) => birth::born(&Open { log, fd, known, file }, &seen, given),
        None => names::appeared(log, fd),
    }
}

/// Does what `O_TRUNC` does.
fn empty(fd: c_int) -> Result<(), Errno> {
    if let Some(open) = Open::writable(fd) {
        // SAFETY: no pointers.
        let kernel = || unsafe { raw::call(libc::SYS_ftruncate, raw::words![fd, 0_i64]) };
        return raw::checked(open.empty(kernel)).map(|_| ());
    }
    // It has no effect on pipes and devices.
    if raw::fstat(fd).is_ok_and(|stat| is_file(&stat)) {
        raw::ftruncate(fd, 0).map(|_| ())
    } else {
        Ok(())
    }
}

/// The kernel has emptied the file already: with `O_RDONLY`, which no standard says anything about.
fn was_emptied(fd: c_int) -> Result<(), Errno> {
    Open::of(fd).map_or(Ok(()), |open| raw::checked(open.unseen(|| 0)).map(|_| ()))
}

/// # Safety
/// `path` is what the program gave to `open`.
pub(crate) unsafe fn open_at(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
) -> c_int {
    if let Some(path) = readable::text(path) {
        return Request { directory, path, flags, mode, keeps_syncing: close::locks() }.run();
    }
    // It fails, and the kernel says with which error.
    let arguments = raw::words![directory, path, flags, mode];
    // SAFETY: the program's own arguments.
    raw::returned_int(unsafe { raw::call(libc::SYS_openat, arguments) })
}

/// A function that opens `path`.
macro_rules! opens {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
            // SAFETY: as promised to this function; a mode that is not given is not looked at.
            unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
        }
    )*};
}
opens!(open open64 __open __open64);

/// A function that opens `path` in `directory`.
macro_rules! opens_at {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            directory: c_int,
            path: *const c_char,
            flags: c_int,
            mode: c_uint,
        ) -> c_int {
            // SAFETY: as promised to this function; a mode that is not given is not looked at.
            unsafe { open_at(directory, path, flags, mode) }
        }
    )*};
}
opens_at!(openat openat64);

/// What `open` becomes where the compiler checks that a mode is given: without one, nothing may be made.
macro_rules! opens_without_mode {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(path: *const c_char, flags: c_int) -> c_int {
            match next::__open_2.get().filter(|_| needs_mode(flags)) {
                // SAFETY: the same function, which ends the program.
                Some(__open_2) => unsafe { __open_2(path, flags) },
                // SAFETY: as promised to this function.
                None => unsafe { open_at(libc::AT_FDCWD, path, flags, 0) },
            }
        }
    )*};
}
opens_without_mode!(__open_2 __open64_2);

/// The same in a directory.
macro_rules! opens_at_without_mode {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            directory: c_int,
            path: *const c_char,
            flags: c_int,
        ) -> c_int {
            match next::__openat_2.get().filter(|_| needs_mode(flags)) {
                // SAFETY: the same function, which ends the program.
                Some(__openat_2) => unsafe { __openat_2(directory, path, flags) },
                // SAFETY: as promised to this function.
                None => unsafe { open_at(directory, path, flags, 0) },
            }
        }
    )*};
}
opens_at_without_mode!(__openat_2 __openat64_2);

fn needs_mode(flags: c_int) -> bool {
    flags & libc::O_CREAT != 0 || flags & libc::O_TMPFILE == libc::O_TMPFILE
}

/// `creat`.
macro_rules! creates {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(path: *const c_char, mode: c_uint) -> c_int {
            let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
            // SAFETY: as promised to this function.
            unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
        }
    )*};
}
creates!(creat creat64);

/// The file has no path here: one that is to be emptied is opened without that, and emptied as by `open`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn open_by_handle_at(
    mount: c_int,
    handle: *mut c_void,
    flags: c_int,
) -> c_int {
    let Some(open_by_handle_at) = next::open_by_handle_at.get() else {
        return raw::failed_int(libc::ENOSYS);
    };
    absorb::opening();
    let (path, mode, keeps_syncing) = (c"", 0, true);
    let request = Request { directory: mount, path, flags, mode, keeps_syncing };
    let empties = process::log().is_some() && flags & libc::O_PATH == 0 && request.empties();
    let left = if empties { flags & !libc::O_TRUNC } else { flags };
    // SAFETY: as promised to this function.
    let fd = unsafe { open_by_handle_at(mount, handle, left) };
    if fd < 0 {
        return fd;
    }
    appeared(fd);
    descriptors::opened(fd);
    if empties { request.emptied(fd) } else { fd }
}

/// # Safety
/// As for `mkostemps`.
unsafe fn make_temporary(template: *mut c_char, suffix_bytes: c_int, flags: c_int) -> c_int {
    let Some(mkostemps64) = next::mkostemps64.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: as promised to this function.
    let fd = unsafe { mkostemps64(template, suffix_bytes, flags) };
    if fd >= 0 {
        made(fd, || raw::status_flags(fd), None);
    }
    fd
}

alike! {
    mkstemp(template: *mut c_char) = make_temporary(template, 0, 0);
    mkstemp64(template: *mut c_char) = make_temporary(template, 0, 0);
    mkostemp(template: *mut c_char, flags: c_int) = make_temporary(template, 0, flags);
    mkostemp64(template: *mut c_char, flags: c_int) = make_temporary(template, 0, flags);
    mkstemps(template: *mut c_char, suffix_bytes: c_int) = make_temporary(template, suffix_bytes, 0);
    mkstemps64(template: *mut c_char, suffix_bytes: c_int) = make_temporary(template, suffix_bytes, 0);
    mkostemps(template: *mut c_char, suffix_bytes: c_int, flags: c_int) = make_temporary(template, suffix_bytes, flags);
    mkostemps64(template: *mut c_char, suffix_bytes: c_int, flags: c_int) = make_temporary(template, suffix_bytes, flags);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(flags: c_int) -> Request<'static> {
        let (directory, keeps_syncing) = (libc::AT_FDCWD, false);
        Request { directory, path: c"/x", flags, mode: 0, keeps_syncing }
    }

    #[test]
    fn only_what_makes_empties_or_syncs_is_looked_at() {
        for plain in [
            libc::O_RDONLY,
            libc::O_RDWR | libc::O_APPEND | libc::O_CLOEXEC,
            libc::O_PATH | libc::O_CREAT,
            libc::O_TMPFILE | libc::O_RDWR,
            libc::O_DIRECTORY,
        ] {
            assert!(request(plain).is_plain(), "{plain:#o}");
        }
        for other in [libc::O_CREAT, libc::O_TRUNC, libc::O_DSYNC, libc::O_SYNC] {
            assert!(!request(other | libc::O_RDWR).is_plain(), "{other:#o}");
        }
    }

    #[test]
    fn syncing_is_taken_away_from_writers_only() {
        let case = |flags| (request(flags).without_syncing(), request(flags).stripped());
        assert_eq!(case(libc::O_RDWR | libc::O_SYNC), (libc::O_RDWR, SYNC));
        assert_eq!(case(libc::O_WRONLY | libc::O_DSYNC), (libc::O_WRONLY, DATA_SYNC));
        assert_eq!(case(libc::O_RDONLY | libc::O_SYNC), (libc::O_SYNC, 0));
        let with_locks = Request { keeps_syncing: true, ..request(libc::O_RDWR | libc::O_SYNC) };
        let kept = (with_locks.without_syncing(), with_locks.stripped());
        assert_eq!(kept, (libc::O_RDWR | libc::O_SYNC, 0));
    }
}
