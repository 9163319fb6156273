//! Files that are made by a record while a stream is open on them: sealed.
//!
//! `fopen`, `fprintf`, `fflush`, `fsync`, `fclose`, `rename` is how C programs replace a file. No
//! hook sees what the stream writes, so its file is pinned; but its `fsync` asks for no more than
//! what the kernel has of the file by then, and one record has all of that.
//!
//! Invariants:
//! 1. A sealed file is pinned, and has a story of one record. What the stream writes behind it was
//!    not synced: after a crash it may be missing.
//! 2. Whatever else is to be done with the file makes it leave first (`Open::lock`, and
//!    [`leave`](super::leave) for names and attributes): no sync of it is answered, and no change
//!    of it is recorded, that may depend on what the stream has written since. A forked child has
//!    the stream too, and so makes the file leave.
//! 3. When the stream is closed, and has written back what it held, the file stays in the log only
//!    if it is the same as in the record: by length and a checksum of 64 bits. Then the file is
//!    covered.
//! 4. A note may be lost at any time: its file leaves when the stream is closed.
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

/// What is known of a file that this process has sealed.
#[derive(Clone, Copy)]
struct Sealed {
    fd: c_int,
    story: u64,
    /// [`FileGuard::unlogged`] since it is sealed.
    unlogged: u64,
    bytes: u64,
    checksum: u64,
}

/// Streams that are open at once on sealed files: mostly one.
const NOTES: usize = 8;
static PLACES: [Shared<Sealed>; NOTES] = [const { Shared::new() }; NOTES];
/// The place of the next note.
static NEXT: AtomicUsize = AtomicUsize::new(0);

fn checksum(content: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    hasher.finish()
}

/// Takes the stream's pin back, for as long as its file is made.
pub(super) fn unpin_to_make(open: &Open, guard: &FileGuard<'_>) {
    if open.known.has(PINNED) {
        guard.stop_keeping();
    }
}

/// Pins the file of a stream again, of which a record has `content`.
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

/// Pins the file of a stream again, which was not made.
pub(super) fn pin_again(open: &Open) {
    if open.known.has(PINNED) {
        let known = open.known.without(PINNED);
        // Where the lock cannot be had, there is no pin to be given back.
        descriptors::set(open.fd, known);
        Open { known, ..*open }.pin();
    }
}

/// The stream of this descriptor is about to be closed, and holds nothing back: a file that is
/// as its record says is covered from now on.
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
    // Not as others lock it, which makes it leave.
    let guard = open.log.lock_within(entry.file, LOCK_TIMEOUT).ok()?;
    let is_as_recorded = || {
        let content = Content::of_file(open, sealed.bytes);
        content.is_some_and(|content| checksum(content.bytes()) == sealed.checksum)
    };
    let is_same_story = guard.story() == sealed.story;
    (may_unseal(guard.owner_died(), is_same_story, is_as_recorded) && guard.unseal(sealed.unlogged))
        .then_some(())
}
