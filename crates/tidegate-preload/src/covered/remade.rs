//! Changes of attributes of files that have a make record: a second one has the new attributes.
//!
//! Invariants:
//! 1. A change is recorded only while nothing is pending in the file system, under the lock of the
//!    file system's names and the lock of the file, like a change of names. The record comes after
//!    the change, which is counted as pending until then. If the process is killed in between, the
//!    change stays pending and the file leaves, since the log has its former attributes.
//! 2. The next sync of the file would commit the change. So the log answers it only while nothing
//!    is pending, like the sync after a change of names.
//! 3. If the file's names were changed since its make record, or if the file has attributes that a
//!    record cannot hold, the kernel alone makes the change.
//!
//! Entry points: [`Remade::find`], [`Remade::change`].

use std::ffi::{CStr, c_int};

use tidegate::log::cover::{MadeFacts, RecordFacts, may_record_attributes};
use tidegate::log::{FileGuard, FileRef, Log, NamesGuard};

use super::whole::Whole;
use super::{LOCK_TIMEOUT, Open};
use crate::covered::metadata;
use crate::state::descriptors::{Entry, Known};
use crate::state::files::{self, Identified};
use crate::state::parents::Parent;
use crate::state::process::{self, Holding};
use crate::state::record_locks::{self, Unlocked};
use crate::sys::path::{self, Opened, PathBuffer};
use crate::sys::raw;
use crate::sys::signals::SignalsBlocked;

/// A file with a make record, opened once more.
pub(crate) struct Remade {
    open: Open,
    identified: Identified,
    path: PathBuffer,
    /// Keeps the descriptor of `open` open.
    _opened: Unlocked,
}

impl Remade {
    /// Opens the logged `file`, which has these numbers, at a path. Returns `None` if the path
    /// leads to another file, or if the file must not be opened now.
    pub(crate) fn find(
        log: &'static Log,
        file: FileRef,
        (device, inode): (u64, u64),
        (directory, at, flags): (c_int, &CStr, c_int),
    ) -> Option<Self> {
        let _holding = Holding::new()?;
        let is_free = !process::is_apart() && !process::in_vfork_child();
        let flags = flags | libc::O_RDONLY | libc::O_NOATIME | libc::O_NONBLOCK | libc::O_NOCTTY;
        let open = || Opened::open(directory, at, flags);
        let opened = is_free.then(|| record_locks::open(device, inode, open))??;
        let identified = files::identify(log, opened.number())?;
        let file_system = identified.file_system.reference;
        let entry = Entry { file, file_system };
        let known = Known::of_file(device, inode, 0).with_entry(entry);
        let open = Open { log, fd: opened.number(), known };
        let mut path = PathBuffer::new();
        path::of_descriptor(open.fd, &mut path).ok()?;
        let is_it = log.find(&identified.key).ok()? == Some(file);
        is_it.then_some(Self { open, identified, path, _opened: opened })
    }

    /// Makes a change of the file's attributes by `call` and records it, or makes the file leave.
    /// Returns the result of `call`.
    ///
    /// # Errors
    /// `call` itself, if the change cannot be recorded: nothing was done.
    pub(crate) fn change<R, F: FnOnce() -> R>(&self, call: F) -> Result<R, F> {
        let _signals = SignalsBlocked::deferred();
        let (log, file_system) = (self.open.log, self.identified.file_system.reference);
        let Some(_holding) = Holding::new() else { return Err(call) };
        let Some(parent) = Parent::of_path(libc::AT_FDCWD, self.path.as_c_str()) else {
            return Err(call);
        };
        let names = log.file_systems().lock_names_within(file_system, LOCK_TIMEOUT);
        let Ok(names) = names else { return Err(call) };
        let Some(entry) = self.open.known.entry() else { return Err(call) };
        // Not by `Open::lock`, which would make a sealed file leave. `may_be_recorded` refuses it.
        let Ok(guard) = log.lock_within(entry.file, LOCK_TIMEOUT) else { return Err(call) };
        if !self.may_be_recorded(&names, &guard) {
            return Err(call);
        }
        // The ticket's slot is held until the record is appended. If the process is killed before,
        // the file leaves.
        let Ok(ticket) = guard.begin() else { return Err(call) };
        let changes = log.file_systems().changes(file_system);
        let (result, numbers) = metadata::with_numbers(log, call);
        raw::keeping_errno(|| {
            let is_recorded = self.record(&guard, &parent).is_some();
            drop(names);
            if is_recorded {
                guard.note_attributes(changes);
                metadata::take_off_all(log, numbers);
                drop(ticket);
            } else {
                // The ticket would keep the log from being retired while the file leaves.
                drop(ticket);
                log.note_own_change(entry.file);
                // If the disk fails, the next sync returns the error.
                let _ = self.open.leave(&guard);
            }
        });
        Ok(result)
    }

    fn may_be_recorded(&self, names: &NamesGuard<'_>, guard: &FileGuard<'_>) -> bool {
        let is_pending =
            || self.open.log.file_systems().is_pending(self.identified.file_system.reference);
        let facts = RecordFacts::of(names, guard);
        may_record_attributes(&facts, &MadeFacts::of(guard), is_pending)
    }

    fn record(&self, guard: &FileGuard<'_>, parent: &Parent) -> Option<()> {
        let whole = Whole::read(&self.open)?;
        let make = whole.make(parent)?;
        let definition = self.identified.definition(&self.path);
        let made = (&make, whole.bytes(), whole.changed_ns());
        let is_made = guard.make(made, &definition, guard.unlogged(), false, true);
        is_made.ok().filter(|is_made| *is_made)?;
        whole.note_sparse(guard);
        Some(())
    }
}
