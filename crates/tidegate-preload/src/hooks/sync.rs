//! Hooks: `fsync` and its kin.
//!
//! Invariants:
//! 1. The log answers a sync of a covered file, of a new file that one record covers, and of a
//!    directory whose names are all on the disk or in the log. The kernel makes all other syncs.
//! 2. A sync of a whole file system that succeeds commits all changes that were pending before it
//!    began. `sync` commits no counted change, since it does not return whether it succeeded.
//! 3. Before `sync` and `syncfs`, each file leaves that the kernel may have changed without a
//!    record. Before a sync of a directory, each file leaves whose names a process was changing
//!    when it was killed.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::c_int;

use tidegate_interpose::cancel;

use crate::covered::{self, Open, Sync};
use crate::state::descriptors::Kind;
use crate::state::files::Seen;
use crate::state::{file_systems, process, real};
use crate::sys::next;
use crate::sys::raw::{self, words};

/// Makes the file or directory of `fd` durable; `function` is the C library's for `wanted`.
#[inline]
fn synced(
    fd: c_int,
    wanted: Sync,
    function: &next::Next<unsafe extern "C-unwind" fn(c_int) -> c_int>,
) -> c_int {
    let known = covered::known(fd);
    if let Some(open) = Open::known(fd, known) {
        cancel::point();
        return raw::returned_int(open.sync(wanted));
    }
    if known.kind == Kind::Directory && covered::answers_directory(fd) {
        cancel::point();
        return 0;
    }
    let result = match function.resolved() {
        // SAFETY: the C library's function, which takes no pointers.
        Some(function) => unsafe { function(fd) },
        None => raw::returned_int(covered::sync_by_kernel(fd, wanted)),
    };
    real::note_uncoverable(fd, &known);
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fsync(fd: c_int) -> c_int {
    synced(fd, Sync::All, &next::fsync)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fdatasync(fd: c_int) -> c_int {
    synced(fd, Sync::Data, &next::fdatasync)
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn sync() {
    if let Some(log) = process::log() {
        covered::leave_unrecorded(log);
    }
    raw::sync();
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn syncfs(fd: c_int) -> c_int {
    let log = process::log();
    if let Some(log) = log {
        covered::leave_unrecorded(log);
    }
    let mount = log.and_then(|_| Seen::of(fd).ok()).map(|seen| seen.mount);
    let file_system = mount.and_then(file_systems::known);
    let seen =
        log.zip(file_system).map(|(log, system)| (log, system, log.file_systems().changes(system)));
    // SAFETY: the call takes no pointers.
    let result = raw::returned_int(unsafe { raw::call(libc::SYS_syncfs, words![fd]) });
    if let Some((log, file_system, changes)) = seen.filter(|_| result == 0) {
        log.file_systems().synced_whole(file_system, changes);
    }
    result
}
