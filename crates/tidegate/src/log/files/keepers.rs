//! Notes of the files that processes keep unlogged, to release the pins of a killed process.
//!
//! Invariants:
//! 1. A note stands for one pin of a file's entry. A process adds the note after the pin and
//!    removes it before the pin, under the file's lock. A process that is killed in between leaves
//!    a pin that stays; the other order could release a pin twice, the second time another
//!    process's pin.
//! 2. Without space for a note, the pin of a killed process stays for as long as the log is in use.
//! 3. A process writes only its own notes; the supervisor writes the notes of a dead process.

use std::time::Duration;

use super::Log;
use crate::log::control::table::FileRef;
use crate::log::control::{BUCKETS_AT, Control, KEEPERS_AT};
use crate::log::error::LockError;
use crate::sync::{AtomicU64, Ordering};

const NOTE_BYTES: u64 = 16;
const NOTES: u64 = (BUCKETS_AT - KEEPERS_AT) / NOTE_BYTES;
/// Slots that may have a note of one file and process.
const PLACES: u64 = 256;

/// A slot for a note.
#[derive(Clone, Copy)]
struct Note<'a> {
    /// The process; 0: free.
    process: &'a AtomicU64,
    /// The file's entry as a word, 0: not noted yet.
    file: &'a AtomicU64,
}

impl Note<'_> {
    fn is(&self, file: FileRef, process: u64) -> bool {
        self.process.load(Ordering::Acquire) == process
            && self.file.load(Ordering::Acquire) == file.to_word()
    }

    fn free(&self) {
        self.file.store(0, Ordering::Release);
        self.process.store(0, Ordering::Release);
    }
}

fn notes(control: &Control) -> impl Iterator<Item = Note<'_>> {
    (0..NOTES).map(|number| note_at(control, number))
}

fn note_at(control: &Control, number: u64) -> Note<'_> {
    let at = KEEPERS_AT + number % NOTES * NOTE_BYTES;
    Note { process: control.memory().word(at), file: control.memory().word(at + 8) }
}

/// Returns the slots that may have notes of the process about the file.
fn places(control: &Control, file: FileRef, process: u64) -> impl Iterator<Item = Note<'_>> {
    let mixed = (file.to_word() ^ process << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    (0..PLACES).map(move |step| note_at(control, mixed + step))
}

/// Notes that the process keeps the file unlogged.
pub(in crate::log) fn note(control: &Control, file: FileRef, process: u32) {
    let process = u64::from(process);
    let free = places(control, file, process).find(|note| {
        let taken = note.process.compare_exchange(0, process, Ordering::AcqRel, Ordering::Relaxed);
        taken.is_ok()
    });
    if let Some(note) = free {
        note.file.store(file.to_word(), Ordering::Release);
    }
}

/// Removes one note that the process keeps the file unlogged.
pub(in crate::log) fn forget(control: &Control, file: FileRef, process: u32) {
    let process = u64::from(process);
    if let Some(note) = places(control, file, process).find(|note| note.is(file, process)) {
        note.free();
    }
}

/// The files that processes keep unlogged.
#[derive(Clone, Copy)]
pub struct Keepers<'a> {
    pub(super) log: &'a Log,
}

impl<'a> Keepers<'a> {
    /// Releases all pins that `process`, which is dead, has on files. Returns the files that are
    /// left: files that a living process has locked for longer than `timeout`, and
    /// [sealed](crate::log::FileGuard::is_sealed) files.
    /// [`stop_keeping_for`](Self::stop_keeping_for) tries such a file again.
    pub fn stop_keeping_of(self, process: u32, timeout: Duration) -> Vec<FileRef> {
        let process = u64::from(process);
        let of_it = |note: &Note<'_>| note.process.load(Ordering::Acquire) == process;
        let mut left = Vec::new();
        for note in notes(&self.log.ring.control).filter(of_it) {
            match note.file.load(Ordering::Acquire) {
                0 => note.free(),
                word => {
                    let file = FileRef::from_word(word);
                    if !self.give_back(&note, file, process, timeout) {
                        left.push(file);
                    }
                }
            }
        }
        left
    }

    /// Releases one pin that `process`, which is dead, has on `file`. Returns whether it is
    /// released, now or before. A pin of a sealed file stays until the file's story has ended.
    pub fn stop_keeping_for(self, process: u32, file: FileRef, timeout: Duration) -> bool {
        let process = u64::from(process);
        let note =
            places(&self.log.ring.control, file, process).find(|note| note.is(file, process));
        note.is_none_or(|note| self.give_back(&note, file, process, timeout))
    }

    fn give_back(self, note: &Note<'_>, file: FileRef, process: u64, timeout: Duration) -> bool {
        match self.log.lock_within(file, timeout) {
            Ok(guard) if guard.is_sealed() => false,
            Ok(guard) => {
                // Checked again under the lock, since a note is removed only once.
                if note.is(file, process) {
                    note.free();
                    guard.release_pin();
                }
                true
            }
            // The pin is gone with the entry.
            Err(LockError::Stale) => {
                note.free();
                true
            }
            Err(LockError::Busy | LockError::Reentered) => false,
        }
    }

    /// Returns the processes that keep files unlogged, one for each note.
    pub fn processes(self) -> impl Iterator<Item = u32> + 'a {
        notes(&self.log.ring.control).filter_map(|note| {
            let process = u32::try_from(note.process.load(Ordering::Acquire)).ok()?;
            (process != 0).then_some(process)
        })
    }
}
