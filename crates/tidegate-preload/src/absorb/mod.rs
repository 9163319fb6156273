//! Files whose writes the kernel is not told of at once: what this process knows of them.
//!
//! A file that is written often, through one open description that only this process has, is *absorbed*: the supervisor takes
//! a write lease on it, so that whoever else opens it waits; from then on a write ends in the log, which
//! takes a tenth of the time of a system call that writes. What the kernel lacks is found through the overlay of pages
//! ([`Overlay`]); the supervisor brings it to the kernel later, or at once where somebody else wants the file.
//!
//! Invariants: every descriptor of this process that shares the description is noted as absorbed, or is asked about at its next
//! use.
//!
//! Entry points: [`consider`] after a logged write (`start`); [`write()`], [`read`], [`seek`] (`io`); [`settle_patiently`],
//! [`settle_all`] (`settle`).
#![allow(unsafe_code)] // owns overlays by pointer

mod io;
mod settle;
mod start;

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

use tidegate::log::{FileGuard, FileRef, LockError, Log, Overlay};

pub(crate) use io::{read, seek, write};
pub(crate) use settle::{
    closing, opening, settle_all, settle_attributes, settle_named, settle_patiently,
};
pub(crate) use start::{consider, inherited, never, shared, sharing};

use crate::descriptors::{self, ABSORBED, Known};
use crate::process;

/// Files that this process absorbs at once, at most.
const FILES: usize = 64;

/// A file that this process absorbs.
struct Absorbing {
    /// Its entry in the log's table as a word, 0: none.
    file: AtomicU64,
    overlay: AtomicPtr<Overlay>,
    /// The log's head up to which the last look at the file system's space counts.
    space_until: AtomicU64,
}

impl Absorbing {
    const fn none() -> Self {
        Self {
            file: AtomicU64::new(0),
            overlay: AtomicPtr::new(ptr::null_mut()),
            space_until: AtomicU64::new(0),
        }
    }
}

static FILES_ABSORBED: [Absorbing; FILES] = [const { Absorbing::none() }; FILES];

/// How many there are.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// This process absorbs some file.
#[inline]
pub(crate) fn any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

fn find(file: FileRef) -> Option<&'static Absorbing> {
    let word = file.to_word();
    FILES_ABSORBED.iter().find(|it| it.file.load(Ordering::Acquire) == word)
}

/// Locks a file, however long that takes.
///
/// # Errors
/// [`LockError::Reentered`], [`LockError::Stale`].
fn locked(log: &Log, file: FileRef) -> Result<FileGuard<'_>, LockError> {
    loop {
        match log.lock(file) {
            Err(LockError::Busy) => {}
            outcome => return outcome,
        }
    }
}

/// Frees the overlay of a file that is absorbed no more.
fn forget(file: FileRef) {
    let Some(it) = find(file) else { return };
    let word = file.to_word();
    // Who takes the word out frees the overlay: once.
    if it.file.compare_exchange(word, u64::MAX, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        let overlay = it.overlay.swap(ptr::null_mut(), Ordering::AcqRel);
        COUNT.fetch_sub(1, Ordering::Relaxed);
        if !overlay.is_null() {
            // SAFETY: `Box::into_raw` made it, and nobody else has it any more.
            drop(unsafe { Box::from_raw(overlay) });
        }
        it.file.store(0, Ordering::Release);
    }
}

/// Changes what is noted of all descriptors of a file.
fn mark(file: FileRef, change: impl Fn(Known) -> Known) {
    // Who notes a descriptor meanwhile looks at the file's absorber after that: see `noted`.
    fence(Ordering::SeqCst);
    descriptors::each(0, u32::MAX, |fd, known| {
        if known.file() == Some(file) {
            descriptors::change(fd, known, change(known));
        }
    });
}

/// Notes what `fd` is: as it was noted, absorbed if its file is.
pub(crate) fn noted(fd: c_int, known: Known) -> Known {
    descriptors::set(fd, known);
    let Some((log, file)) = process::log().zip(known.file()) else { return known };
    fence(Ordering::SeqCst);
    if known.has(ABSORBED) || log.absorber_of(file) != process::number() {
        return known;
    }
    let absorbed = known.with(ABSORBED);
    descriptors::change(fd, known, absorbed);
    absorbed
}
