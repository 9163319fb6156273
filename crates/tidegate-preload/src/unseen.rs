//! Files that this process changes in ways that no hook sees: for how long, and who keeps count.
//!
//! Invariants:
//! 1. Each mark of this process in the log's table is noted either with a descriptor ([`STICKY`]) or in [`KEPT`]; or it is meant to
//!    outlive the process.
//! 2. A forked child has marks of its own for all that it inherits; before `exec`, and when the process ends, all are given
//!    back: by the supervisor, where the process has no time for it.
//!
//! Entry points: [`keep`] for a file, [`about_to_change`] for one change of it, [`all`] for whatever is written; [`inherit`], [`release`], [`take_again`].

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::log::{FileRef, Log};

use crate::descriptors::{self, Known, READ_ONLY, STICKY};
use crate::logged::Open;
use crate::names::{Name, SignalsBlocked, Target};
use crate::open::give_syncing_back;
use crate::subject::Subject;
use crate::{exec, process, raw};

/// Files that are mapped writable: entries of the log's table as words, 0 for none.
static KEPT: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];

/// The open file is changed unseen until this process ends.
pub(crate) fn keep(open: &Open) {
    let word = open.file.to_word();
    if KEPT.iter().any(|kept| kept.load(Ordering::Acquire) == word) {
        return;
    }
    open.keep();
    note(word);
}

/// As [`keep`], for a file of which there is no descriptor.
pub(crate) fn keep_closed(log: &Log, file: FileRef) {
    let Ok(guard) = log.lock(file) else {
        log.mark_unlogged(file);
        return;
    };
    if guard.has_live_changes() {
        raw::sync();
        let _ = guard.begin().and_then(|mut ticket| ticket.retire());
    }
    guard.keep_unlogged();
    drop(guard);
    note(file.to_word());
}

/// Somebody whom no hook sees is about to change the file under this path: what the log has of it is on the disk first. The file is
/// not opened for that: closed again, it would take the program's record locks along.
pub(crate) fn about_to_change(path: &CStr) {
    let Some(log) = process::log() else { return };
    let target = Name { directory: libc::AT_FDCWD, path }.look(0);
    let Ok(target) = target else { return };
    let _signals = SignalsBlocked::new();
    if let Some(subject) = target.known(log) {
        leave(&target, &subject, false);
    }
}

/// As [`about_to_change`], for a file that is changed at some time: it comes back when the log is no longer in use.
pub(crate) fn to_be_changed(directory: c_int, path: &CStr) {
    let Some(log) = process::log() else { return };
    let Ok(target) = (Name { directory, path }).look(0) else { return };
    let _signals = SignalsBlocked::new();
    if let Some(subject) = target.recorded(log) {
        leave(&target, &subject, true);
    }
}

fn leave(target: &Target, subject: &Subject<'_>, sticky: bool) {
    if subject.guard.has_live_changes() {
        subject.settle(target);
    }
    subject.guard.mark_unlogged(sticky);
}

fn note(word: u64) {
    // Where there is no place left, the mark stays for as long as the log is in use.
    for kept in &KEPT {
        if kept.compare_exchange(0, word, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

/// Whatever this process has open, or opens, may be changed unseen.
pub(crate) fn all() {
    if process::log().is_none() || process::writes_unseen() {
        return;
    }
    process::set_writes_unseen();
    exec::each_open(|fd| {
        give_syncing_back(fd);
        if let Some(open) = Open::writable(fd) {
            open.hide();
        }
    });
}

/// In a forked child: marks what the descriptor, inherited from the parent, keeps marked.
pub(crate) fn inherit(log: &'static Log, fd: c_int, known: Known) {
    if let Some(file) = known.file().filter(|_| known.has(STICKY)) {
        Open { log, fd, known: known.without(STICKY), file }.hide();
    }
}

/// In a forked child: marks what is mapped.
pub(crate) fn inherit_kept(log: &Log) {
    for_kept(|file| {
        if let Ok(guard) = log.lock(file) {
            guard.keep_unlogged();
        }
    });
}

/// Gives all marks back: this memory, and what writes from it, ends.
pub(crate) fn release() {
    let Some(log) = process::log() else { return };
    if process::is_apart() {
        return;
    }
    descriptors::each(0, u32::MAX, |fd, known| {
        if let Some(file) = known.file() {
            Open { log, fd, known, file }.show();
        }
    });
    for_kept(|file| {
        if let Ok(guard) = log.lock(file) {
            guard.stop_keeping();
        }
    });
}

/// Takes all marks again: it did not end after all.
pub(crate) fn take_again() {
    let Some(log) = process::log() else { return };
    if process::in_vfork_child() {
        return;
    }
    descriptors::each(0, u32::MAX, |fd, known| inherit(log, fd, known));
    inherit_kept(log);
}

fn for_kept(visit: impl Fn(FileRef)) {
    for kept in &KEPT {
        let word = kept.load(Ordering::Acquire);
        if word != 0 {
            visit(FileRef::from_word(word));
        }
    }
}

/// Whether descriptors that are given out now must be looked at at once.
pub(crate) fn is_to_be_marked(fd: c_int, known: Known) -> bool {
    !known.has(READ_ONLY) && (process::writes_unseen() || crate::stdio::is_standard(fd))
}
