//! Why syncs are real: counted by cause, and told to the supervisor where the user may want to
//! know.
//!
//! Invariant: only syncs that are made for real cost anything here. What the log answers never
//! comes here.
//!
//! Entry points: [`count`]; [`note_uncoverable`], [`note_synchronous`] count a sync that has been
//! made; [`note_unseen`], [`tell`].

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use tidegate::log::{Counter, Log, PATH_END_BYTES, RealSync, SyncNames, current_process};

use crate::covered::Open;
use crate::descriptors::{Kind, Known};
use crate::path::{self, PathBuffer};
use crate::process::{Holder, Holding};
use crate::signals::SignalsBlocked;
use crate::{own_stack, process, supervisor};

/// A cause that the supervisor is told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// All files of the process: it has set up asynchronous I/O of the kernel.
    Libaio,
    /// The process has mapped the file, or has others write it.
    Mapping,
    /// The descriptor has `O_DIRECT`.
    DirectIo,
    /// A stream of the C library writes the descriptor's file.
    Stream,
    /// The file system is not covered.
    FileSystem,
    /// The user's globs keep the file out.
    Excluded,
    /// The descriptor has `O_SYNC` or `O_DSYNC`.
    Synchronous,
}

impl Reason {
    const ALL: [Self; 7] = [
        Self::Libaio,
        Self::Mapping,
        Self::DirectIo,
        Self::Stream,
        Self::FileSystem,
        Self::Excluded,
        Self::Synchronous,
    ];

    /// The supervisor's word for it.
    fn word(self) -> &'static str {
        match self {
            Self::Libaio => "libaio",
            Self::Mapping => "mapping",
            Self::DirectIo => "direct_io",
            Self::Stream => "stream",
            Self::FileSystem => "file_system",
            Self::Excluded => "excluded",
            Self::Synchronous => "synchronous",
        }
    }
}

/// A bit for each reason that this program has told.
static TOLD: AtomicU32 = AtomicU32::new(0);
/// Why any file of this process may change unseen: the number of a [`Reason`] plus 1; 0: none is
/// known.
static UNSEEN: AtomicU32 = AtomicU32::new(0);

/// Tells the supervisor, once.
#[cold]
pub(crate) fn tell(reason: Reason) {
    let bit = 1 << reason as u32;
    if TOLD.load(Ordering::Relaxed) & bit != 0 {
        return;
    }
    // A process that has given up the log may be killed for a system call that is not its own.
    let Some(_holding) = Holding::new() else { return };
    // The memory of a child of `vfork` is its parent's, the connection would be its own.
    if !process::in_vfork_child() && TOLD.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        own_stack::run(|| supervisor::tell_plain(reason.word()));
    }
}

/// Notes why any file of this process may change unseen from now on. Told when the process syncs
/// one.
pub(crate) fn note_unseen(reason: Option<Reason>) {
    UNSEEN.store(reason.map_or(0, |reason| reason as u32 + 1), Ordering::Relaxed);
}

/// The [`Reason`] that was noted last, if one was.
pub(crate) fn why_unseen() -> Option<Reason> {
    let number = UNSEEN.load(Ordering::Relaxed).checked_sub(1)?;
    Reason::ALL.into_iter().find(|reason| *reason as u32 == number)
}

/// Counts a real sync, through `fd`, of the file with these numbers.
#[cold]
pub(crate) fn count(log: &Log, fd: c_int, (device, inode): (u64, u64), cause: Counter) {
    log.stats().add(cause, 1);
    // As for `tell`. A handler that jumps out in the middle costs no more than the list.
    let Some(_holder) = Holder::new() else { return };
    if !process::in_vfork_child() {
        let sync = RealSync { cause, process: current_process(), device, inode };
        log.list_real_sync(&sync, || {
            let _signals = SignalsBlocked::new();
            own_stack::run(|| names(fd))
        });
    }
}

/// The program's name, and the path of what is open as `fd`.
fn names(fd: c_int) -> SyncNames {
    let mut path = PathBuffer::new();
    // What has no path is listed without one.
    let _ = path::of_descriptor(fd, &mut path);
    let bytes = path.as_bytes();
    let end = &bytes[bytes.len().saturating_sub(PATH_END_BYTES)..];
    let mut names = SyncNames { program: supervisor::program_name(), ..SyncNames::NONE };
    names.path[..end.len()].copy_from_slice(end);
    names
}

/// Counts a sync that the C library has made of what can never be covered: a directory, or a file
/// of another file system on a disk.
pub(crate) fn note_uncoverable(fd: c_int, known: &Known) {
    let Some(log) = process::log() else { return };
    let numbers = (known.device, known.inode);
    match known.kind {
        Kind::Directory => count(log, fd, numbers, Counter::SyncsOfDirectories),
        Kind::Elsewhere => {
            count(log, fd, numbers, Counter::SyncsUnsupported);
            tell(Reason::FileSystem);
        }
        _ => {}
    }
}

/// Counts a write, with this result, by a descriptor that has the kernel sync it.
#[cold]
pub(crate) fn note_synchronous(open: &Open, result: isize) {
    if result > 0 {
        open.count(Counter::SyncsSynchronous);
        tell(Reason::Synchronous);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_that_is_noted_is_found_by_its_number() {
        for reason in Reason::ALL {
            note_unseen(Some(reason));
            assert_eq!(why_unseen(), Some(reason));
        }
        note_unseen(None);
        assert_eq!(why_unseen(), None);
    }
}
