//! What is done with a file in the log: writes, syncs, and the way out of the log where changes are not seen.
//!
//! Invariants: without the lock (a signal handler that interrupted its holder, a holder that was stopped) nothing is logged, and
//! the next sync is real.
//!
//! Entry points: [`Open::of`]; [`Open::write`] (`write`, `place`), [`Open::sync`] (`sync`), [`Open::hide`], [`Open::show`],
//! [`Open::unseen`] (`past`), [`Open::define`], [`Open::born`], [`Open::empty`] (`define`).

mod define;
mod past;
mod place;
mod sync;
mod write;

use std::ffi::c_int;
use std::ops::Deref;
use std::time::Duration;

use tidegate::log::{AppendError, FileGuard, FileRef, LockError, Log};

pub(crate) use place::Place;
pub(crate) use sync::Sync;
pub(crate) use write::{Request, WAITS, Written};

use crate::descriptors::{self, Known};
use crate::names::SignalsBlocked;
use crate::raw::Errno;
use crate::{absorb, files, mend, process};

/// How often a lock, or room for what must be said, is waited for, a second each.
const TRIES: u32 = 10;
const PATIENCE: Duration = Duration::from_secs(1);

/// A descriptor of a file that has an entry in the log's table.
#[derive(Clone, Copy)]
pub(crate) struct Open {
    pub(crate) log: &'static Log,
    pub(crate) fd: c_int,
    pub(crate) known: Known,
    pub(crate) file: FileRef,
}

/// A locked file, and no signal handler in between.
struct Locked {
    // Given back first: signals come after it.
    guard: FileGuard<'static>,
    _signals: SignalsBlocked,
}

impl Deref for Locked {
    type Target = FileGuard<'static>;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.guard
    }
}

/// Why a write did not go through the log.
enum Refused {
    /// The file's definition comes first.
    Undefined,
    /// There is none: the name that the descriptor was opened by is gone.
    Undefinable,
    /// The log has no room.
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
    /// The file of `fd`, if it is one that has to do with the log.
    #[inline]
    pub(crate) fn of(fd: c_int) -> Option<Self> {
        let log = process::log()?;
        let known = files::of(fd);
        let file = known.file()?;
        Some(Self { log, fd, known, file })
    }

    /// The same for descriptors that can be written to.
    #[inline]
    pub(crate) fn writable(fd: c_int) -> Option<Self> {
        Self::of(fd).filter(|open| !open.known.has(descriptors::READ_ONLY))
    }

    /// Locks the file, once the kernel has all of it. None: go on without the log.
    ///
    /// # Errors
    /// The kernel cannot take all of it: what is to be done would come before older writes.
    #[inline]
    fn lock(&self) -> Result<Option<Locked>, Errno> {
        let locked = self.lock_as_it_is();
        if locked.as_ref().is_none_or(|locked| locked.guard.absorber() == 0) {
            return Ok(locked);
        }
        drop(locked);
        absorb::settle_patiently(self.log, self.file, self.fd)?;
        self.lock()
    }

    /// The same for what does not depend on what the kernel has.
    #[inline]
    fn lock_as_it_is(&self) -> Option<Locked> {
        let signals = SignalsBlocked::new();
        let guard = self.log.lock(self.file).or_else(|error| self.lock_again(error)).ok()?;
        if guard.owner_died() {
            mend::file(self.log, self.fd, &guard);
        }
        Some(Locked { guard, _signals: signals })
    }

    #[cold]
    fn lock_again(&self, error: LockError) -> Result<FileGuard<'static>, LockError> {
        match error {
            // The entry was given away, since nothing depended on it: the file gets another one.
            LockError::Stale => {
                let open = self.found_again().ok_or(error)?;
                open.log.lock(open.file)
            }
            LockError::Busy => (1..TRIES).find_map(|_| self.log.lock(self.file).ok()).ok_or(error),
            LockError::Reentered => Err(error),
        }
    }

    fn found_again(&self) -> Option<Self> {
        let flags = self.known.flags & descriptors::STRIPPED;
        let known = files::find_out(self.fd, flags);
        Some(Self { known, file: known.file()?, ..*self })
    }
}

pub(crate) fn negated(errno: Errno) -> isize {
    isize::try_from(-errno).unwrap_or(-5)
}
