//! The log's names for recovery: converts the records of covered stories to the names and files
//! that [`NameStories`] decides on.

use std::collections::{BTreeMap, BTreeSet};

use super::decide::{NameFact, NameStories};
use crate::log::pool::names::{Make, NameAt, NameChange, NameRecord, Timestamp};
use crate::log::{FileHandle, FileSystemId, identity};

/// The upper half of the offset of a note of decisions is the number of its batch: a recovery notes
/// the groups that it decides on as one batch. Batch 0 has all groups: a former release wrote it.
pub(super) const BATCH_SHIFT: u32 = 32;

/// A name in a directory of some file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The UUID of the file system.
    pub file_system: FileSystemId,
    /// Device number of the file system when the record was written.
    pub device: u64,
    /// Handle of the directory.
    pub parent: FileHandle,
    /// The name in the directory.
    pub name: Vec<u8>,
}

/// A file whose names are in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFile {
    /// The UUID of the file system.
    pub file_system: FileSystemId,
    /// Device number of the file system when the file was defined.
    pub device: u64,
    /// The file's handle on that file system.
    pub handle: FileHandle,
}

/// Attributes of a file that the log can create again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MadeFile {
    /// Permission bits, with set-user-ID and the like.
    pub mode: u32,
    /// User.
    pub owner: u32,
    /// Group.
    pub group: u32,
    /// Last access and last modification.
    pub times: (Timestamp, Timestamp),
    /// Extended attributes: see [`Extended`](crate::log::Extended).
    pub extended: Vec<u8>,
    /// The ctime of its directory when the file was recorded.
    pub parent_changed: Timestamp,
}

impl MadeFile {
    /// Returns the last modification in nanoseconds since 1970; 0 for earlier times.
    pub(super) fn modified_ns(&self) -> u64 {
        let Timestamp { s, ns } = self.times.1;
        u64::try_from(s).unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(ns.into())
    }
}

/// A record of names, with its own copies of handles and names.
#[derive(Debug, Clone)]
pub(super) enum NameStep {
    Made(Box<((FileHandle, Vec<u8>), MadeFile)>),
    Changed(Box<OwnedChange>),
}

/// A [`NameChange`] with its own copies of names.
#[derive(Debug, Clone)]
pub(super) struct OwnedChange {
    from: Option<(FileHandle, Vec<u8>)>,
    to: Option<(FileHandle, Vec<u8>)>,
    replaced: Option<FileHandle>,
    links: u32,
}

fn owned(at: &NameAt<'_>) -> (FileHandle, Vec<u8>) {
    (at.parent, at.name.to_vec())
}

impl NameStep {
    pub(super) fn of_make(make: &Make<'_>) -> Self {
        let attributes = make.attributes;
        let made = MadeFile {
            mode: attributes.mode,
            owner: attributes.owner,
            group: attributes.group,
            times: (attributes.accessed, attributes.modified),
            extended: attributes.extended.to_vec(),
            parent_changed: make.parent_changed,
        };
        Self::Made(Box::new((owned(&make.at), made)))
    }

    /// Returns the file's attributes, if the record has the whole file.
    pub(super) fn made(&self) -> Option<&MadeFile> {
        match self {
            Self::Made(made) => Some(&made.1),
            Self::Changed(_) => None,
        }
    }

    pub(super) fn of_record(record: &NameRecord<'_>) -> Self {
        let (from, to, replaced) = match &record.change {
            NameChange::Link { to } => (None, Some(owned(to)), None),
            NameChange::Unlink { from } => (Some(owned(from)), None, None),
            NameChange::Rename { from, to, replaced } => {
                (Some(owned(from)), Some(owned(to)), *replaced)
            }
        };
        Self::Changed(Box::new(OwnedChange { from, to, replaced, links: record.links }))
    }
}

/// The names in the log, numbered in the order of their first records. Files have identities.
#[derive(Debug, Default)]
pub struct NamedPlan {
    /// The names.
    pub places: Vec<Place>,
    /// The files.
    pub files: BTreeMap<u64, NamedFile>,
    /// The files that the log can create again.
    pub made: BTreeMap<u64, MadeFile>,
    /// The changes of names.
    pub stories: NameStories<usize, u64>,
    /// The decisions of former recoveries, by batch: see [`BATCH_SHIFT`].
    pub(super) decided: BTreeMap<u64, Vec<u8>>,
    /// The groups whose decisions a former recovery has carried out.
    pub(super) done: BTreeSet<usize>,
    /// A former recovery has carried out all decisions.
    pub(super) is_done: bool,
    numbers: BTreeMap<(FileSystemId, i32, Vec<u8>, Vec<u8>), usize>,
}

impl NamedPlan {
    /// Returns whether the log has no names.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Adds a record about the file with this identity, in the order of the log.
    pub(super) fn add(&mut self, identity: u64, file: &NamedFile, step: &NameStep) {
        self.files.entry(identity).or_insert_with(|| file.clone());
        let (fact, links) = match step {
            NameStep::Made(made) => {
                self.made.insert(identity, made.1.clone());
                (NameFact::Made(self.number(file, &made.0)), 1)
            }
            NameStep::Changed(change) => (self.fact(file, change), u64::from(change.links)),
        };
        self.stories.add(&identity, fact, links);
    }

    fn fact(&mut self, file: &NamedFile, change: &OwnedChange) -> NameFact<usize, u64> {
        let mut number = |at: &Option<_>| at.as_ref().map(|at| self.number(file, at));
        match (number(&change.from), number(&change.to)) {
            (Some(from), Some(to)) => {
                let of =
                    |handle: FileHandle| identity(&file.file_system, handle.kind(), handle.bytes());
                NameFact::Renamed { from, to, replaced: change.replaced.map(of) }
            }
            (Some(from), None) => NameFact::Unlinked(from),
            (None, to) => NameFact::Linked(to.unwrap_or_default()),
        }
    }

    fn number(&mut self, file: &NamedFile, (parent, name): &(FileHandle, Vec<u8>)) -> usize {
        let key = (file.file_system, parent.kind(), parent.bytes().to_vec(), name.clone());
        *self.numbers.entry(key).or_insert_with(|| {
            self.places.push(Place {
                file_system: file.file_system,
                device: file.device,
                parent: *parent,
                name: name.clone(),
            });
            self.places.len() - 1
        })
    }

    /// Adds a part of a former recovery's decisions, which starts at the byte in the lower half of
    /// `offset`.
    pub(super) fn add_decided(&mut self, offset: u64, part: &[u8]) {
        let (batch, offset) = (offset >> BATCH_SHIFT, offset & u64::from(u32::MAX));
        let decided = self.decided.entry(batch).or_default();
        if offset == 0 {
            decided.clear();
        }
        // Otherwise a part is missing, so no recovery has acted upon the decisions.
        if offset == decided.len() as u64 {
            decided.extend_from_slice(part);
        }
    }

    /// Adds the groups of a note that their decisions are carried out. A note without groups is
    /// about all groups.
    pub(super) fn add_done(&mut self, groups: &[u8]) {
        self.is_done |= groups.is_empty();
        let groups = groups.as_chunks().0.iter().map(|group| u32::from_le_bytes(*group) as usize);
        self.done.extend(groups);
    }
}
