//! The attributes that recovery changes in a file and restores. The log has them before.
//!
//! A write sets times and clears capabilities and set-user-ID. A file without write permission is
//! made writable first. After an interruption the next recovery restores the attributes from the
//! note, not from the changed file.

use crate::log::pool::names::Timestamp;

/// Bytes of a file's note before its capability.
const FIXED_BYTES: usize = 42;

/// The attributes of a file that recovery may change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Saved {
    /// Permission bits, with set-user-ID and the like.
    pub mode: u32,
    /// The inode's flags that prevent writes: immutable, append-only.
    pub flags: u32,
    /// Last access.
    pub accessed: Timestamp,
    /// Last modification.
    pub modified: Timestamp,
    /// Value of `security.capability`; empty: the file has none.
    pub capability: Vec<u8>,
}

impl Saved {
    /// Returns whether even the file's owner may not write to it.
    pub(super) fn is_locked(&self) -> bool {
        self.flags != 0 || self.mode & 0o200 == 0
    }

    /// Sets the last modification to the time of a logged change, if the disk has an older state of
    /// the file, last changed at `disk_changed_ns`. A later state has the time that a program gave
    /// it since.
    pub(super) fn modified_at(mut self, logged_ns: u64, disk_changed_ns: i128) -> Self {
        if disk_changed_ns < logged_ns.into() {
            self.modified = self.modified.max(Timestamp::of_ns(logged_ns));
        }
        self
    }

    /// Appends the note of the file with this id.
    pub(super) fn encode(&self, id: u64, note: &mut Vec<u8>) {
        let capability_bytes = u16::try_from(self.capability.len()).unwrap_or(0);
        note.extend(id.to_le_bytes());
        note.extend(self.mode.to_le_bytes());
        note.extend(self.flags.to_le_bytes());
        for time in [self.accessed, self.modified] {
            note.extend(time.s.to_le_bytes());
            note.extend(time.ns.to_le_bytes());
        }
        note.extend(capability_bytes.to_le_bytes());
        note.extend(&self.capability[..usize::from(capability_bytes)]);
    }

    /// Decodes the first note of `notes`. Also returns its file's id and the rest of `notes`.
    pub(super) fn decode(notes: &[u8]) -> Option<(u64, Self, &[u8])> {
        let (fixed, rest) = notes.split_at_checked(FIXED_BYTES)?;
        let u32_at = |at: usize| Some(u32::from_le_bytes(fixed.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(fixed.get(at..at + 8)?.try_into().ok()?));
        let time = |at| Some(Timestamp { s: u64_at(at)?.cast_signed(), ns: u32_at(at + 8)? });
        let capability_bytes = u16::from_le_bytes(fixed.get(40..42)?.try_into().ok()?);
        let (capability, rest) = rest.split_at_checked(capability_bytes.into())?;
        let saved = Self {
            mode: u32_at(8)?,
            flags: u32_at(12)?,
            accessed: time(16)?,
            modified: time(28)?,
            capability: capability.to_vec(),
        };
        Some((u64_at(0)?, saved, rest))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_an_older_state_of_a_file_gets_the_time_of_what_was_logged() {
        let modified = Timestamp { s: 3, ns: 5 };
        let saved = Saved { modified, ..Saved::default() };
        let at = |logged_ns, disk_changed_ns| {
            saved.clone().modified_at(logged_ns, disk_changed_ns).modified
        };
        assert_eq!(at(4_000_000_007, 4_000_000_006), Timestamp { s: 4, ns: 7 });
        assert_eq!(at(4_000_000_007, 4_000_000_007), modified, "a program may have set it since");
        assert_eq!(at(2_000_000_000, 1), modified, "it is later already");
        assert_eq!(at(0, 1), modified, "the log does not say");
    }

    proptest! {
        #[test]
        fn notes_say_what_was_noted_and_parts_of_them_nothing(
            (id, mode, flags) in (any::<u64>(), any::<u32>(), any::<u32>()),
            times in any::<[(i64, u32); 2]>(),
            capability in prop::collection::vec(any::<u8>(), 0..30),
        ) {
            let [accessed, modified] = times.map(|(s, ns)| Timestamp { s, ns });
            let saved = Saved { mode, flags, accessed, modified, capability };
            let mut notes = Vec::new();
            saved.encode(id, &mut notes);
            let len = notes.len();
            notes.push(7);
            prop_assert_eq!(Saved::decode(&notes), Some((id, saved, &[7][..])));
            prop_assert!((0..len).all(|len| Saved::decode(&notes[..len]).is_none()));
        }
    }
}
