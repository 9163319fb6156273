//! Locks and leases that the process has taken over from the program that it was before `exec`.
//!
//! Entry points: [`each`], which reads them from the kernel's lists.

use std::ffi::c_int;

use crate::state::proc_fd;
use crate::sys::page::Page;
use crate::sys::path::{LINK_BYTES, Opened, proc_information};
use crate::sys::{query, raw};

/// What the process holds on the file of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Held {
    pub(crate) record_lock: bool,
    pub(crate) lease: bool,
}

impl Held {
    const ANY: Self = Self { record_lock: true, lease: true };

    /// Reads the kernel's list of an open descriptor, which has a line `lock:` for each lock.
    fn of_list(list: &[u8]) -> Self {
        let locks = list.split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"lock:"));
        locks.fold(Self::default(), |held, line| {
            let has = |word: &[u8]| line.split(|byte| *byte == b' ').any(|part| part == word);
            Self {
                record_lock: held.record_lock || has(b"POSIX"),
                lease: held.lease || has(b"LEASE"),
            }
        })
    }

    /// Returns [`Held::ANY`] if the list cannot be read, or not in one piece.
    fn of(fd: c_int) -> Self {
        let mut path = [0; LINK_BYTES];
        let mut list = Page::take();
        let read = Opened::open(libc::AT_FDCWD, proc_information(fd, &mut path), libc::O_RDONLY)
            .and_then(|file| query::read(file.number(), list.bytes_mut()));
        match read {
            Ok(len) if len < list.bytes().len() => Self::of_list(&list.bytes()[..len]),
            _ => Self::ANY,
        }
    }
}

/// Calls `visit` for each descriptor above the standard ones on whose file the process holds, or
/// may hold, a record lock or a lease.
pub(crate) fn each(mut visit: impl FnMut(c_int, Held)) {
    proc_fd::each(|fd| {
        if fd <= libc::STDERR_FILENO || raw::fcntl(fd, libc::F_GETFD, 0).is_err() {
            return;
        }
        let held = Held::of(fd);
        if held != Held::default() {
            visit(fd, held);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_of_the_process_are_told_from_those_of_descriptors() {
        let held = |list: &str| {
            let Held { record_lock, lease } = Held::of_list(list.as_bytes());
            (record_lock, lease)
        };
        let begin = "pos:\t0\nflags:\t02100002\nmnt_id:\t41\nino:\t12\n";
        let line = |kind| format!("lock:\t1: {kind} WRITE 99 fe:00:12 0 EOF\n");
        assert_eq!(held(begin), (false, false));
        assert_eq!(held(&(begin.to_owned() + &line("FLOCK  ADVISORY "))), (false, false));
        assert_eq!(held(&(begin.to_owned() + &line("OFDLCK ADVISORY "))), (false, false));
        let both = line("POSIX  ADVISORY ") + &line("LEASE  ACTIVE   ");
        assert_eq!(held(&(begin.to_owned() + &both)), (true, true));
    }

    #[test]
    fn a_descriptor_without_locks_is_passed_over_and_one_with_a_lock_is_not() {
        use std::os::fd::AsRawFd;
        let files = [(); 2].map(|()| tempfile::tempfile().unwrap());
        let [free, locked] = files.each_ref().map(AsRawFd::as_raw_fd);
        rustix::fs::fcntl_lock(&files[1], rustix::fs::FlockOperation::LockExclusive).unwrap();
        let mut found = Vec::new();
        each(|fd, held| found.push((fd, held.record_lock)));
        assert!(found.contains(&(locked, true)), "{found:?}");
        assert!(!found.iter().any(|(fd, _)| *fd == free), "{found:?}");
    }
}
