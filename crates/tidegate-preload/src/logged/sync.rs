//! Syncs of a file: real ones, and those that the log makes needless.
//!
//! Invariants: a real sync of a file retires what the log has of it, for the reason that `past` gives.

use std::ffi::c_int;

use tidegate::log::Counter;

use super::{Open, negated};
use crate::raw;

/// How much of a file is to be made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sync {
    /// As `fsync`.
    All,
    /// As `fdatasync`.
    Data,
}

impl Sync {
    /// Makes the system call: its result as the kernel gives it.
    pub(crate) fn run(self, fd: c_int) -> isize {
        let result = match self {
            Self::All => raw::fsync(fd),
            Self::Data => raw::fdatasync(fd),
        };
        result.map_or_else(negated, |_| 0)
    }
}

impl Open {
    /// Makes the file durable, by the kernel where the log does not do that already.
    #[inline]
    pub(crate) fn sync(&self, wanted: Sync) -> isize {
        if self.log.is_covered(self.file) {
            self.log.stats().add(Counter::SyncsSkipped, 1);
            return 0;
        }
        self.sync_for_real(wanted)
    }

    #[cold]
    fn sync_for_real(&self, wanted: Sync) -> isize {
        self.log.stats().add(Counter::SyncsReal, 1);
        let Some(guard) = self.lock_as_it_is() else { return wanted.run(self.fd) };
        let failed = guard.take_failure();
        if guard.absorber() != 0 {
            let seen = guard.unlogged();
            drop(guard);
            // The log has its bytes; what else has changed is the kernel's.
            let result = after(failed, Sync::All.run(self.fd));
            return self.synced(result, seen);
        }
        if guard.is_sticky() && !guard.has_live_changes() {
            drop(guard);
            return after(failed, wanted.run(self.fd));
        }
        let seen = guard.unlogged();
        if !guard.has_live_changes() {
            drop(guard);
            // All of it, so that the log may answer the next one.
            let result = after(failed, Sync::All.run(self.fd));
            return self.synced(result, seen);
        }
        // Unlogged changes may lie over older ones in the log, which must then not be put back.
        let synced = Sync::All.run(self.fd);
        if synced < 0 {
            // The program is told now; the kernel may take for clean what the disk did not take.
            guard.note_dropped();
        }
        let result = after(failed, synced);
        if result == 0 && guard.begin().and_then(|mut ticket| ticket.retire()).is_ok() {
            guard.synced(seen);
        }
        result
    }

    fn synced(&self, result: isize, seen: u64) -> isize {
        if result == 0
            && let Some(guard) = self.lock_as_it_is()
        {
            guard.synced(seen);
        }
        result
    }
}

/// The result of a sync; a write-back that failed before is reported where the kernel has nothing to report now.
fn after(failed: bool, result: isize) -> isize {
    if failed && result == 0 { -(libc::EIO as isize) } else { result }
}
