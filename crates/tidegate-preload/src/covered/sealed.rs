//! Sealed files: files that have a make record while a stream on the file is still open.
//!
//! C programs replace a file by `fopen`, `fprintf`, `fflush`, `fsync`, `fclose` and `rename`. No
//! hook sees the writes of a stream, so its file is pinned. But the `fsync` promises only the bytes
//! that the kernel has by then, and one record has all of these.
//!
//! Invariants:
//! 1. A sealed file is pinned, and has a story of one record. Bytes that the stream writes after
//!    the record were not synced, and may be missing after a crash.
//! 2. Any other operation makes the file leave first (`Open::lock`, and [`leave`](super::leave) for
//!    names and attributes). So the log answers no sync and records no change that may depend on
//!    later writes of the stream. A forked child has the stream, too, and makes the file leave.
//! 3. When the stream is about to be closed, and has flushed its buffer, the file stays in the log
//!    only if its length and a 64-bit checksum equal the record's. It is covered then.
//! 4. A note may be lost at any time: its file then leaves when the stream is closed.
//!
//! Entry points: [`seal`], [`unseal`].

use std::ffi::c_int;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate::log::FileGuard;
use tidegate::log::cover::may_unseal;

use super::whole::Content;
use super::{LOCK_TIMEOUT, Open};
use crate::state::descriptors::{self, PINNED};
use crate::state::process::Holding;
use crate::sys::shared::Shared;

/// A file that this process has sealed.
#[derive(Clone, Copy)]
struct Sealed {
    fd: c_int,
    story: u64,
    /// [`FileGuard::unlogged`] of the sealed file.
    unlogged: u64,
    bytes: u64,
    checksum: u64,
}

/// Sealed files that are noted at once; mostly there is one.
const NOTES: usize = 8;
static PLACES: [Shared<Sealed>; NOTES] = [const { Shared::new() }; NOTES];
/// The number of the next note.
static NEXT: AtomicUsize = AtomicUsize::new(0);

fn checksum(content: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    hasher.finish()
}

/// Releases the pin of a stream's file until [`seal`] or [`pin_again`], so that a make record can
/// cover the file.
pub(super) fn unpin_to_make(open: &Open, guard: &FileGuard<'_>) {
    if open.known.has(PINNED) {
        guard.stop_keeping();
    }
}

/// Pins the file of a stream again after its make record, which has `content`, and notes it.
pub(super) fn seal(open: &Open, guard: &FileGuard<'_>, content: &[u8]) {
    if !open.known.has(PINNED) {
        return;
    }
    guard.keep_unlogged();
    let sealed = Sealed {
        fd: open.fd,
        story: guard.story(),
        unlogged: guard.unlogged(),
        bytes: content.len() as u64,
        checksum: checksum(content),
    };
    let place = PLACES.get(NEXT.fetch_add(1, Ordering::Relaxed) % NOTES);
    place.and_then(|place| place.with(|note| *note = Some(sealed)));
}

/// Pins the file of a stream again after its make record has failed.
pub(super) fn pin_again(open: &Open) {
    if open.known.has(PINNED) {
        let known = open.known.without(PINNED);
        // Noted without the flag first: if `pin` cannot get the lock, no pin is to be released.
        descriptors::set(open.fd, known);
        Open { known, ..*open }.pin();
    }
}

/// Covers a sealed file whose content equals its record. To be called when the descriptor's stream
/// has flushed its buffer and is about to be closed.
pub(crate) fn unseal(open: &Open) {
    let take = |place: &Shared<Sealed>| {
        place.with(|note| note.take_if(|sealed| sealed.fd == open.fd)).flatten()
    };
    if let Some(sealed) = PLACES.iter().find_map(take)
        && unseal_as(open, &sealed).is_some()
    {
        descriptors::set(open.fd, open.known.without(PINNED));
    }
}

fn unseal_as(open: &Open, sealed: &Sealed) -> Option<()> {
    let entry = open.known.entry()?;
    let _holding = Holding::new()?;
    // Not by `Open::lock`, which would make the file leave.
    let guard = open.log.lock_within(entry.file, LOCK_TIMEOUT).ok()?;
    let is_as_recorded = || {
        let content = Content::of_file(open, sealed.bytes);
        content.is_some_and(|content| checksum(content.bytes()) == sealed.checksum)
    };
    let is_same_story = guard.story() == sealed.story;
    (may_unseal(guard.owner_died(), is_same_story, is_as_recorded) && guard.unseal(sealed.unlogged))
        .then_some(())
}
