//! What is done with a file by its entry in the log's table: writes, truncations, syncs, and the
//! way out of the log where changes are not seen.
//!
//! Invariants:
//! 1. Under an entry's lock a file is either logged or plain. Its changes are logged and made in
//!    the kernel under that lock, or made in the kernel alone: nobody begins its story meanwhile.
//! 2. Without the lock (a signal handler that interrupted its holder, a holder that was stopped)
//!    the file's story ends before it is changed.
//!
//! Entry points: [`Open::of`]; [`Open::write`] (`write`, `place`), [`write_as_opened`]
//! (`synchronous`), [`truncate()`], [`Open::sync`] (`sync`, `admission`, `making`), [`change_name`]
//! (`naming`), [`Remade`] (`remade`), [`chown_to_same`] (`owner`), [`Open::pin`] and
//! [`Open::unseen`] (`leave`), [`unseal`] (`sealed`).

mod admission;
mod descriptor;
pub(crate) mod every_write;
mod in_place;
mod leave;
mod making;
pub(crate) mod metadata;
mod naming;
mod owner;
mod place;
pub(crate) mod plain;
mod remade;
mod sealed;
mod story;
mod sync;
mod synchronous;
mod truncate;
pub(crate) mod unseen;
mod whole;
mod write;

use std::ffi::c_int;
use std::ops::Deref;
use std::time::Duration;

use tidegate::durable;
use tidegate::log::{AppendError, FileGuard, FileSystemRef, LockError, Log};

pub(crate) use descriptor::{find_out, is_to_be_pinned, known, note, note_standard};
pub(crate) use leave::{
    Gone, leave_closed, leave_for_lease, leave_gone, leave_numbers, leave_unrecorded, retire_all,
};
pub(crate) use making::answers_directory;
pub(crate) use naming::{Changed, change_name};
pub(crate) use owner::chown_to_same;
pub(crate) use place::Place;
pub(crate) use remade::Remade;
pub(crate) use sealed::unseal;
pub(crate) use sync::{Sync, sync_by_kernel};
pub(crate) use synchronous::{plain_as_opened, write_as_opened};
pub(crate) use truncate::truncate;
pub(crate) use write::Request;

use crate::state::descriptors::{self, Entry, Kind, Known};
use crate::state::files;
use crate::state::process::{self, Holding};
use crate::state::record_locks::{self, Unlocked};
use crate::sys::path::{self, LINK_BYTES, Opened};
use crate::sys::raw::{self, Errno};

/// How long the lock of an entry, a plain write in flight or the supervisor is waited for, before
/// the file goes on without the log.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_millis(100);
/// How long free space in the log is waited for at once.
const SPACE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often free space is waited for that ends a story or a lock that pins a file.
const TRIES: u32 = 10;

/// A descriptor of a regular file that can be covered.
#[derive(Clone, Copy)]
pub(crate) struct Open {
    pub(crate) log: &'static Log,
    pub(crate) fd: c_int,
    pub(crate) known: Known,
}

/// A locked file.
pub(crate) struct Locked {
    // Given back first: signals come after it.
    guard: FileGuard<'static>,
    pub(crate) file_system: FileSystemRef,
    _holding: Holding,
}

impl Deref for Locked {
    type Target = FileGuard<'static>;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.guard
    }
}

/// Why a change did not go through the log.
enum Refused {
    /// The log has no free space.
    Full,
    /// The log does not take it.
    Never,
    /// The descriptor is not what it was.
    Changed,
}

impl From<AppendError> for Refused {
    fn from(error: AppendError) -> Self {
        if error == AppendError::Full { Self::Full } else { Self::Never }
    }
}

impl Open {
    /// The file of `fd`, if it is one that can be covered.
    #[inline]
    pub(crate) fn of(fd: c_int) -> Option<Self> {
        process::log()?;
        Self::known(fd, known(fd))
    }

    /// As [`of`](Self::of), for a descriptor of which this is known.
    #[inline]
    pub(crate) fn known(fd: c_int, known: Known) -> Option<Self> {
        let log = process::log()?;
        (known.kind == Kind::File).then_some(Self { log, fd, known })
    }

    /// As [`of`](Self::of), for descriptors that can be written to.
    #[inline]
    pub(crate) fn writable(fd: c_int) -> Option<Self> {
        Self::of(fd).filter(|open| !open.known.has(descriptors::READ_ONLY))
    }

    /// The file's entry; one is made for it where there is none.
    #[inline]
    pub(crate) fn entry(&self) -> Option<Entry> {
        self.known.entry().or_else(|| files::entry(self.log, self.fd, self.known))
    }

    /// The file's entry, if there may be one.
    #[inline]
    pub(crate) fn entry_if_any(&self) -> Option<Entry> {
        let may_have = || self.log.may_have(self.known.device, self.known.inode);
        self.known.entry().or_else(|| may_have().then(|| self.entry())?)
    }

    /// The file, opened once more by a description of its own. None: that would take a record lock
    /// of the program away, or wait for a lease, or is refused.
    fn opened_again(&self, flags: c_int) -> Option<Unlocked> {
        let mut link = [0; LINK_BYTES];
        let link = path::proc_link(self.fd, &mut link);
        let flags = flags | libc::O_NONBLOCK | libc::O_NOCTTY;
        let open = || Opened::open(libc::AT_FDCWD, link, flags);
        record_locks::open(self.known.device, self.known.inode, open)
    }

    /// Locks the file. A sealed one has left by then.
    #[inline]
    pub(crate) fn lock(&self, entry: Entry) -> Result<Locked, LockError> {
        self.lock_within(entry, LOCK_TIMEOUT)
    }

    fn lock_within(&self, entry: Entry, timeout: Duration) -> Result<Locked, LockError> {
        let holding = Holding::new().ok_or(LockError::Busy)?;
        let locked = self.log.lock_within(entry.file, timeout);
        let guard = locked.or_else(|error| self.lock_again(error, timeout))?;
        if guard.owner_died() {
            // Where that fails, syncs of the file are real, or say so.
            let _ = self.log.operations().repair(&guard, || durable::fsync(raw::borrowed(self.fd)));
        }
        if guard.is_sealed() {
            // Where the disk fails, its syncs are real, and its changes are refused.
            let _ = self.leave(&guard);
        }
        let file_system = entry.file_system;
        Ok(Locked { guard, file_system, _holding: holding })
    }

    /// The entry was given away, since nothing depended on it: the file gets another one.
    #[cold]
    fn lock_again(
        &self,
        error: LockError,
        timeout: Duration,
    ) -> Result<FileGuard<'static>, LockError> {
        if error != LockError::Stale {
            return Err(error);
        }
        let entry = files::entry(self.log, self.fd, self.known).ok_or(error)?;
        self.log.lock_within(entry.file, timeout)
    }
}

/// A result that tells of a disk or a file system that has failed: what the kernel has may never
/// reach the disk.
fn is_disk_failure(result: isize) -> bool {
    [libc::EIO, libc::EROFS].map(negated).contains(&result)
}

pub(crate) fn negated(errno: Errno) -> isize {
    isize::try_from(-errno).unwrap_or(-5)
}
