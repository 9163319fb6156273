//! Operations on a file through its entry in the log's table: writes, truncations, syncs, and
//! leaving the log before changes that no hook sees.
//!
//! Invariants:
//! 1. Under its entry's lock a file is either logged or plain. A change under the lock is logged
//!    and then made by the kernel, or made by the kernel alone: no thread begins a story meanwhile.
//! 2. Without the lock (a signal handler has interrupted its holder, or the holder is stopped) the
//!    file's story ends before the file is changed.
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

/// Timeout for a file's lock, plain writes and the supervisor; the file then goes without the log.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_millis(100);
/// Timeout of one wait for free space in the log.
const SPACE_TIMEOUT: Duration = Duration::from_secs(1);
/// Number of waits for the free space that ends a story, and for the lock that pins a file.
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
    // Dropped first: `_holding` blocks signals until the lock is released.
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
    /// The log does not take this change.
    Never,
    /// The descriptor no longer refers to the same file.
    Changed,
}

impl From<AppendError> for Refused {
    fn from(error: AppendError) -> Self {
        if error == AppendError::Full { Self::Full } else { Self::Never }
    }
}

impl Open {
    /// Returns the file of `fd`, if it can be covered.
    #[inline]
    pub(crate) fn of(fd: c_int) -> Option<Self> {
        process::log()?;
        Self::known(fd, known(fd))
    }

    /// Returns the file of `fd`, if `known` says that it can be covered.
    #[inline]
    pub(crate) fn known(fd: c_int, known: Known) -> Option<Self> {
        let log = process::log()?;
        (known.kind == Kind::File).then_some(Self { log, fd, known })
    }

    /// Returns the file of `fd`, if it can be covered and `fd` is open for writing.
    #[inline]
    pub(crate) fn writable(fd: c_int) -> Option<Self> {
        Self::of(fd).filter(|open| !open.known.has(descriptors::READ_ONLY))
    }

    /// Returns the file's entry, and creates it if there is none.
    #[inline]
    pub(crate) fn entry(&self) -> Option<Entry> {
        self.known.entry().or_else(|| files::entry(self.log, self.fd, self.known))
    }

    /// Returns the file's entry if the log's table may have one, and `None` otherwise.
    #[inline]
    pub(crate) fn entry_if_any(&self) -> Option<Entry> {
        let may_have = || self.log.may_have(self.known.device, self.known.inode);
        self.known.entry().or_else(|| may_have().then(|| self.entry())?)
    }

    /// Opens the file once more, with an open file description of its own. Returns `None` if the
    /// open fails or would wait for a lease, or if the close could release a record lock.
    fn opened_again(&self, flags: c_int) -> Option<Unlocked> {
        let mut link = [0; LINK_BYTES];
        let link = path::proc_link(self.fd, &mut link);
        let flags = flags | libc::O_NONBLOCK | libc::O_NOCTTY;
        let open = || Opened::open(libc::AT_FDCWD, link, flags);
        record_locks::open(self.known.device, self.known.inode, open)
    }

    /// Locks the file. Repairs it if a former holder died, and makes a sealed file leave the log.
    #[inline]
    pub(crate) fn lock(&self, entry: Entry) -> Result<Locked, LockError> {
        self.lock_within(entry, LOCK_TIMEOUT)
    }

    fn lock_within(&self, entry: Entry, timeout: Duration) -> Result<Locked, LockError> {
        let holding = Holding::new().ok_or(LockError::Busy)?;
        let locked = self.log.lock_within(entry.file, timeout);
        let guard = locked.or_else(|error| self.lock_again(error, timeout))?;
        if guard.owner_died() {
            // If the repair fails, later syncs of the file are real or return an error.
            let _ = self.log.operations().repair(&guard, || durable::fsync(raw::borrowed(self.fd)));
        }
        if guard.is_sealed() {
            // If the disk fails, the file's syncs are real, and its changes are refused.
            let _ = self.leave(&guard);
        }
        let file_system = entry.file_system;
        Ok(Locked { guard, file_system, _holding: holding })
    }

    /// Locks the file by a new entry after [`LockError::Stale`]: nothing depended on the old entry,
    /// so that the table gave it to another file. Returns any other error as it is.
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

/// Returns whether a result shows a failed disk or file system: the page cache may never reach it.
fn is_disk_failure(result: isize) -> bool {
    [libc::EIO, libc::EROFS].map(negated).contains(&result)
}

pub(crate) fn negated(errno: Errno) -> isize {
    isize::try_from(-errno).unwrap_or(-5)
}
