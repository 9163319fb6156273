//! From records to what must be: pure, no file is looked at.
//!
//! Invariants:
//! 1. Nothing depends on what a crash left of the files, so that a plan computed again is the same plan.
//! 2. A record is *void* where a later one says that its operation failed: it never counts. It is *settled* where a later
//!    record retires its file: its bytes are on the disk, and what it did to the file's own names is not to be repeated, since they may have
//!    changed since in ways that are not logged. What it did to other files' names counts.
//! 3. A name is *made* by an unsettled record that created, linked or renamed it. Only made names are put where they are
//!    missing; a path at which a file was merely seen is a place to look for it.
//! 4. A path may lose a file only if an unsettled record took it from there. A file that is missed where the log has it
//!    was *displaced* by something outside: whether it lives is unknown, so it is left alone.
//! 5. Memory is proportional to the records.
//!
//! Entry points: [`Planner::add`] for each record in any order, then [`Planner::finish`].

mod build;
mod finding;
mod path;

pub use finding::{Finding, Findings};
pub(super) use path::TEMP_PREFIX;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::extents::{Content, Extent};
use crate::log::layout::RECORD_ALIGN_BYTES;
use crate::log::{Definition, Header, RecordKind, RenamePaths};

/// The largest size that a file can have.
const FILE_BYTES_MAX: u64 = i64::MAX.cast_unsigned();

/// What the log says of all files and paths in it.
#[derive(Debug, Default)]
pub struct Plan {
    pub(super) files: Vec<FilePlan>,
    pub(super) paths: Vec<PathPlan>,
    pub(super) findings: Findings,
    pub(super) undefined_records: u64,
    data_bytes: u64,
    /// Where records may be whose payload says more than what is copied of it in one piece: those that made a file's size what it
    /// is, those of which a part counts, and long ones. Whoever leaves it to the copying to find torn payloads has to look at these before.
    pub(super) unproved: Vec<u64>,
}

impl Plan {
    /// The files.
    pub fn files(&self) -> &[FilePlan] {
        &self.files
    }

    /// The paths; what the rest of the plan calls a path is an index into them.
    pub fn paths(&self) -> &[PathPlan] {
        &self.paths
    }

    /// What was odd.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// Bytes that are to be copied from the log to files.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Nothing is to be done.
    pub fn is_empty(&self) -> bool {
        self.undefined_records == 0
            && self.files.iter().all(|file| file.records == 0)
            && self.paths.iter().all(|path| path.taken.is_empty())
    }
}

/// What becomes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It has names.
    Named,
    /// Records took its last name.
    Dead,
    /// Something outside Tidegate took its last known name.
    Displaced,
}

/// A name of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    /// Index of the path.
    pub path: usize,
    /// A record made it; otherwise the file was seen there.
    pub made: bool,
}

/// What the log says of a file.
#[derive(Debug)]
pub struct FilePlan {
    /// Its id in the log.
    pub id: u64,
    /// What it is found by, the newest first: a file that recovery makes again has another than the first.
    pub identities: Vec<u64>,
    /// All of the file is in the log: it is made again where it is missing.
    pub born: bool,
    /// Permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Indices of the paths that it was known by, in the order in which it got them.
    pub known_paths: Vec<usize>,
    /// Its names in the end.
    pub names: Vec<Name>,
    /// What becomes of it.
    pub fate: Fate,
    /// The smallest size that it was truncated to.
    pub cut: Option<u64>,
    /// Its size in the end, where records tell it.
    pub size: Option<u64>,
    /// Its size is not smaller: where the last write ended, zeroed since or not.
    pub size_min: u64,
    /// The bytes that are known, in order.
    pub extents: Vec<Extent>,
    /// Records that are neither void nor settled.
    pub records: u64,
}

impl FilePlan {
    /// Some of its names were made by records.
    pub fn has_made_names(&self) -> bool {
        self.names.iter().any(|name| name.made)
    }

    /// Its bytes or size are to be set.
    pub fn has_data(&self) -> bool {
        !self.extents.is_empty() || self.size.is_some()
    }
}

/// Who was taken from a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Taken {
    /// The file with this index.
    File(usize),
    /// A file of this identity, which the log has nothing else of.
    Identity(u64),
}

/// What the log says of a path.
#[derive(Debug)]
pub struct PathPlan {
    /// The path: absolute, without empty, `.` and `..` components.
    pub path: Box<[u8]>,
    /// Index of the file that it names in the end.
    pub binding: Option<usize>,
    /// Who may be removed from it.
    pub(super) taken: BTreeSet<Taken>,
}

/// Collects records and computes the plan.
#[derive(Debug, Default)]
pub struct Planner {
    records: Vec<Noted>,
    findings: Findings,
}

/// A record, as far as planning needs it.
#[derive(Debug)]
struct Noted {
    position: u64,
    file: u64,
    operation: Operation,
}

#[derive(Debug)]
enum Operation {
    Write {
        offset: u64,
        bytes: u32,
    },
    Zero {
        offset: u64,
        len: u64,
    },
    SetSize(u64),
    Define(Box<Defined>),
    Link(Box<[u8]>),
    Rename(Box<Renamed>),
    /// The path, and the identity of who had it, for a file that nothing else is known of.
    Unlink(Box<[u8]>, u64),
    Retire,
    Void(u64),
    /// What the page cache had is gone with a power cut: what counts then is what the disk has.
    Nothing,
}

#[derive(Debug)]
struct Defined {
    identity: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    born: bool,
    path: Box<[u8]>,
}

#[derive(Debug)]
struct Renamed {
    from: Box<[u8]>,
    to: Box<[u8]>,
    replaced: u64,
}

impl Planner {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The payload of such a record has to be given to [`add`](Self::add); that of others is data.
    pub fn needs_payload(kind: RecordKind) -> bool {
        use RecordKind::{Define, Link, Rename, Unlink};
        matches!(kind, Define | Link | Rename | Unlink)
    }

    /// Takes a valid record.
    pub fn add(&mut self, header: &Header, payload: &[u8]) {
        let position = header.position;
        let Some(operation) = operation(header, payload) else {
            self.findings.add(Finding::Payload { position });
            return;
        };
        if is_in_range(&operation) {
            self.records.push(Noted { position, file: header.file, operation });
        } else {
            self.findings.add(Finding::Range { position });
        }
    }

    /// The plan of all records.
    pub fn finish(self) -> Plan {
        let Self { mut records, findings } = self;
        records.sort_by_key(|record| record.position);
        build::build(&records, findings)
    }
}

fn operation(header: &Header, payload: &[u8]) -> Option<Operation> {
    Some(match header.kind {
        RecordKind::Write => {
            Operation::Write { offset: header.offset, bytes: header.payload_bytes }
        }
        RecordKind::Zero => Operation::Zero { offset: header.offset, len: header.len },
        RecordKind::SetSize => Operation::SetSize(header.offset),
        RecordKind::Define => Operation::Define(Box::new(defined(payload)?)),
        RecordKind::Link => Operation::Link(path::clean(payload)?),
        RecordKind::Unlink => Operation::Unlink(path::clean(payload)?, header.aux),
        RecordKind::Rename => {
            let paths = RenamePaths::decode(payload)?;
            let (from, to) = (path::clean(paths.from)?, path::clean(paths.to)?);
            Operation::Rename(Box::new(Renamed { from, to, replaced: header.aux }))
        }
        RecordKind::Retire => Operation::Retire,
        RecordKind::Void => Operation::Void(header.aux),
        RecordKind::Settle => Operation::Nothing,
    })
}

fn defined(payload: &[u8]) -> Option<Defined> {
    let Definition { identity, mode, uid, gid, born, path, .. } = Definition::decode(payload)?;
    let mode = mode & 0o7777;
    let path = path::clean(path)?;
    (identity != 0).then_some(Defined { identity, mode, uid, gid, born, path })
}

fn is_in_range(operation: &Operation) -> bool {
    let end = match *operation {
        Operation::Write { offset, bytes } => offset.checked_add(bytes.into()),
        Operation::Zero { offset, len } => offset.checked_add(len),
        Operation::SetSize(size) => Some(size),
        _ => Some(0),
    };
    end.is_some_and(|end| end <= FILE_BYTES_MAX)
}

impl Noted {
    /// Where the data of a write begins in the log.
    fn data_position(&self) -> u64 {
        self.position.saturating_add(RECORD_ALIGN_BYTES)
    }
}
