//! Finds the stories of files that count, from the records alone. Looks at no file.
//!
//! Invariants:
//! 1. A story counts only if a definition in it is covered. A definition that starts a story drops
//!    the records before it, as an end does. A story under a newer id of the same file
//!    supersedes it.
//! 2. Records of one file are appended under its lock, one after the other, each durable before the
//!    next one begins. So a torn record was acknowledged, and is damaged, if a later whole record
//!    of its story follows, or if a later record has a finished position above it. Any other torn
//!    record was cut off by the crash.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::dates::{Dates, StoryDates};
use super::finding::{Finding, Findings};
use super::named::{MadeFile, NameStep, NamedFile, NamedPlan};
use super::saved::Saved;
use crate::log::pool::names::{Make, NameRecord, Timestamp};
use crate::log::{Damage, Definition, FileHandle, FileSystemId, Header, Heartbeat, RecordKind};

/// The largest size of a file, in bytes.
const FILE_BYTES_MAX: u64 = i64::MAX.cast_unsigned();

/// The operation of a record on its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Bytes of the log were written.
    Write {
        /// Offset in the file.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Position of the bytes in the log.
        data: u64,
        /// The write did more than overwrite written and allocated bytes of the durable file.
        grows: bool,
    },
    /// The size became this.
    SetSize(u64),
}

/// An operation with the position of its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Position of the record.
    pub position: u64,
    /// The operation.
    pub operation: Operation,
}

/// The plan of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePlan {
    /// Id of the file in the log.
    pub id: u64,
    /// The file's identity.
    pub identity: u64,
    /// The file's file system.
    pub file_system: FileSystemId,
    /// The file's handle on that file system.
    pub handle: FileHandle,
    /// Device number when the file was defined.
    pub device: u64,
    /// Known paths of the file, the newest last.
    pub paths: Vec<Vec<u8>>,
    /// Operations on the file, in order.
    pub steps: Vec<Step>,
    /// A sync has promised growth by all steps before this position.
    pub marked_until: u64,
    /// The first acknowledged record of the story that is damaged.
    pub damaged: Option<Damage>,
    /// The file's attributes, if the log has a record of the whole file.
    pub made: Option<MadeFile>,
    /// The log had a record of the whole file, which is damaged.
    pub has_lost_make: bool,
    /// The latest modification time, in nanoseconds since 1970, that the file can have without a
    /// change from outside. `None` if the log does not tell.
    pub modified_until_ns: Option<u64>,
    /// The modification time that the last sync has promised, in nanoseconds since 1970; 0:
    /// unknown.
    pub changed_ns: u64,
    /// The file's attributes before an interrupted recovery changed it.
    pub begun: Option<Saved>,
}

impl FilePlan {
    /// Returns whether a record after the one of the whole file changes the file.
    pub(super) fn is_changed_since_made(&self) -> bool {
        let first = self.steps.first().map(|step| step.position);
        self.steps.iter().any(|step| Some(step.position) != first)
    }

    /// Returns the file's path for messages.
    pub fn name(&self) -> String {
        let path = self.paths.last().filter(|path| !path.is_empty());
        path.map_or_else(
            || format!("the file with id {}", self.id),
            |path| String::from_utf8_lossy(path).into_owned(),
        )
    }
}

/// The plan of all files.
#[derive(Debug, Default)]
pub struct Plan {
    pub(super) files: Vec<FilePlan>,
    pub(super) undefined_records: u64,
    /// The device's name, if this is the log before a device.
    pub(super) device: Option<Vec<u8>>,
    pub(super) names: NamedPlan,
    pub(super) missing: Vec<Range<u64>>,
    pub(super) findings: Findings,
    pub(super) dates: Dates,
}

impl Plan {
    /// Returns the positions of acknowledged records that have not even a header left.
    pub fn missing(&self) -> &[Range<u64>] {
        &self.missing
    }

    /// Returns the plan of names.
    pub fn names(&self) -> &NamedPlan {
        &self.names
    }

    /// Returns the device's name, if this is the log before a device.
    pub fn device(&self) -> Option<&[u8]> {
        self.device.as_deref()
    }

    /// Returns the files, in the order of their ids.
    pub fn files(&self) -> &[FilePlan] {
        &self.files
    }

    /// Returns the oddities in the records.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// Returns whether recovery has nothing to do.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
            && self.undefined_records == 0
            && self.device.is_none()
            && self.names.is_empty()
            && self.missing.is_empty()
    }
}

/// The payload of a record, as far as it can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload<'a> {
    /// The payload is whole. The bytes are required only for a [`RecordKind::Define`], a
    /// [`RecordKind::Name`] and recovery's notes, and the first few thousand for a
    /// [`RecordKind::Make`].
    Whole(&'a [u8]),
    /// A crash cut the payload off, or it was damaged later.
    Torn,
    /// The payload's memory failed.
    Unreadable,
}

/// The story of one id so far.
#[derive(Debug, Default)]
struct Story {
    identity: u64,
    defined: Option<(FileSystemId, FileHandle, u64)>,
    paths: Vec<Vec<u8>>,
    is_covered: bool,
    /// The file has a story under a newer id.
    is_superseded: bool,
    steps: Vec<Step>,
    names: Vec<(u64, NameStep)>,
    /// Position of a torn record of the whole file, which covers the story.
    broken_make: Option<u64>,
    marked_until: u64,
    /// Torn records that no later record of the story has followed so far.
    torn: Vec<Damage>,
    damaged: Option<Damage>,
    dates: StoryDates,
    begun: Option<Saved>,
}

impl Story {
    /// Forgets all records so far.
    fn drop_records(&mut self) {
        let Self { identity, defined, is_superseded, .. } = *self;
        let paths = std::mem::take(&mut self.paths);
        *self = Self { identity, defined, paths, is_superseded, ..Self::default() };
    }

    /// Notes that a whole record follows: torn records before it are damaged.
    fn goes_on(&mut self) {
        self.is_covered |= self.broken_make.is_some();
        self.damaged = self.damaged.or(self.torn.first().copied());
        self.torn.clear();
    }

    /// Notes a torn record. It `is_damaged` if it is known to have been acknowledged.
    fn note_broken(&mut self, header: &Header, is_damaged: bool) {
        if header.kind == RecordKind::Make {
            self.broken_make = Some(header.position);
        }
        if is_damaged {
            self.damaged = self.damaged.or(Some(Damage::of(header)));
            self.is_covered |= self.broken_make.is_some();
        } else {
            self.torn.push(Damage::of(header));
        }
    }
}

/// Makes a [`Plan`] from records in the order of their positions.
#[derive(Debug, Default)]
pub struct Planner {
    stories: HashMap<u64, Story>,
    /// The newest id of each identity.
    newest: HashMap<u64, u64>,
    voided: HashSet<u64>,
    device: Option<Vec<u8>>,
    names: NamedPlan,
    findings: Findings,
    finished: u64,
    missing: Vec<Range<u64>>,
    dates: Dates,
}

impl Planner {
    /// Makes a planner without records.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a planner for a log with losses. All records below `finished` were acknowledged, and
    /// those in `missing` have no header left.
    pub fn with_losses(finished: u64, missing: Vec<Range<u64>>) -> Self {
        Self { finished, missing, ..Self::default() }
    }

    /// Adds the last heartbeat of the log's session.
    #[must_use]
    pub fn with_heartbeat(mut self, heartbeat: Option<Heartbeat>) -> Self {
        self.dates = Dates::new(heartbeat);
        self
    }

    /// Adds the next record.
    pub fn add(&mut self, header: &Header, payload: Payload<'_>) {
        let Payload::Whole(payload) = payload else {
            let is_damaged = payload == Payload::Unreadable || header.position < self.finished;
            return self.story(header.file).note_broken(header, is_damaged);
        };
        self.add_whole(header, payload);
        self.dates.add(header);
        if header.file != 0 {
            self.story(header.file).dates.add(header);
        }
    }

    fn add_whole(&mut self, header: &Header, payload: &[u8]) {
        match header.kind {
            RecordKind::Define => self.define(header, payload),
            RecordKind::Write | RecordKind::SetSize => self.step(header),
            RecordKind::Mark => {
                let story = self.story(header.file);
                story.goes_on();
                story.marked_until = story.marked_until.max(header.position);
            }
            RecordKind::End => self.story(header.file).drop_records(),
            RecordKind::Void => {
                self.voided.insert(header.aux);
                self.story(header.file).torn.retain(|torn| torn.position != header.aux);
            }
            RecordKind::Make => self.make(header, payload),
            RecordKind::Name => self.name(header, payload),
            RecordKind::Decided => self.names.add_decided(header.offset, payload),
            RecordKind::Done => self.names.add_done(payload),
            RecordKind::Begun => self.begun(payload),
            RecordKind::Restored => self.restored(payload),
            RecordKind::Gap => {}
            RecordKind::Zero => self.findings.add(Finding::Payload { position: header.position }),
        }
    }

    fn story(&mut self, id: u64) -> &mut Story {
        self.stories.entry(id).or_default()
    }

    /// Takes the attributes that a former recovery noted before it changed files. The first counts.
    fn begun(&mut self, mut notes: &[u8]) {
        while let Some((id, saved, rest)) = Saved::decode(notes) {
            self.story(id).begun.get_or_insert(saved);
            notes = rest;
        }
    }

    /// Drops the changes of files that a former recovery has restored: the files may have been
    /// changed since. Their names may still have to be set.
    fn restored(&mut self, payload: &[u8]) {
        for id in payload.as_chunks().0 {
            let story = self.story(u64::from_le_bytes(*id));
            story.steps.clear();
            story.torn.clear();
            story.damaged = None;
        }
    }

    fn define(&mut self, header: &Header, payload: &[u8]) {
        let (position, id) = (header.position, header.file);
        let Some(definition) = Definition::decode(payload) else {
            return self.findings.add(Finding::Payload { position });
        };
        if definition.handle == FileHandle::NONE {
            self.device = Some(definition.path.to_vec());
        }
        let identity = definition.identity;
        let story = self.story(id);
        if story.defined.is_some() && story.identity != identity {
            return self.findings.add(Finding::Redefined { position, file: id });
        }
        story.identity = identity;
        story.defined = Some((definition.file_system, definition.handle, definition.device));
        if story.paths.last().is_none_or(|last| last != definition.path) {
            story.paths.push(definition.path.to_vec());
        }
        if definition.starts {
            story.drop_records();
        } else {
            story.goes_on();
        }
        if definition.covered {
            story.is_covered = true;
            story.marked_until = story.marked_until.max(header.aux);
        }
        if let Some(older) = self.newest.insert(identity, id).filter(|older| *older != id) {
            self.story(older).is_superseded = true;
        }
    }

    fn step(&mut self, header: &Header) {
        let &Header { position, offset, grows, .. } = header;
        let len = u64::from(header.payload_bytes);
        let data = header.data_position();
        let is_write = header.kind == RecordKind::Write;
        let end = offset.checked_add(if is_write { len } else { 0 });
        if end.is_none_or(|end| end > FILE_BYTES_MAX) {
            return self.findings.add(Finding::Range { position });
        }
        let write = Operation::Write { offset, len, data, grows };
        let operation = if is_write { write } else { Operation::SetSize(offset) };
        let story = self.story(header.file);
        story.goes_on();
        story.steps.push(Step { position, operation });
    }

    /// Takes a record of the whole file, which replaces all earlier changes.
    fn make(&mut self, header: &Header, payload: &[u8]) {
        let position = header.position;
        let Some((make, content_at)) = Make::decode(payload) else {
            return self.findings.add(Finding::Payload { position });
        };
        let (data, len) =
            (header.data_position() + content_at, u64::from(header.payload_bytes) - content_at);
        let write = Operation::Write { offset: 0, len, data, grows: false };
        let story = self.story(header.file);
        story.goes_on();
        story.is_covered = true;
        story.marked_until = story.marked_until.max(position);
        story.broken_make = None;
        story.steps.clear();
        for operation in [Operation::SetSize(len), write] {
            story.steps.push(Step { position, operation });
        }
        story.names.push((position, NameStep::of_make(&make)));
    }

    fn name(&mut self, header: &Header, payload: &[u8]) {
        let position = header.position;
        let Some(record) = NameRecord::decode(payload) else {
            return self.findings.add(Finding::Payload { position });
        };
        let story = self.story(header.file);
        story.goes_on();
        story.names.push((position, NameStep::of_record(&record)));
    }

    /// Returns the plan of all records.
    pub fn finish(self) -> Plan {
        let Self { device, names, missing, findings, dates, .. } = self;
        let mut plan = Plan { device, names, missing, findings, dates, ..Plan::default() };
        let mut named = Vec::new();
        for (id, mut story) in self.stories {
            story.steps.retain(|step| !self.voided.contains(&step.position));
            let Some((file_system, handle, device)) = story.defined else {
                plan.undefined_records += story.steps.len() as u64;
                continue;
            };
            if !story.is_covered || story.is_superseded {
                continue;
            }
            let has_lost_make = story.broken_make.is_some() && story.damaged.is_some();
            let Story {
                identity, paths, steps, names, marked_until, damaged, dates, begun, ..
            } = story;
            let mut made = names.iter().rev().find_map(|(_, step)| step.made().cloned());
            let modified_until_ns = plan.dates.modified_until(&dates, made.as_ref());
            let made_ns = made.as_ref().map_or(0, MadeFile::modified_ns);
            let changed_ns = dates.synced_ns.max(made_ns).min(modified_until_ns.unwrap_or(0));
            if changed_ns > made_ns
                && let Some(made) = &mut made
            {
                made.times.1 = Timestamp::of_ns(changed_ns);
            }
            let file = NamedFile { file_system, device, handle };
            let names = names.into_iter().filter(|(position, _)| !self.voided.contains(position));
            named.extend(names.map(|(position, step)| (position, identity, file.clone(), step)));
            if steps.is_empty() && damaged.is_none() {
                continue;
            }
            plan.files.push(FilePlan {
                id,
                identity,
                file_system,
                handle,
                device,
                paths,
                steps,
                marked_until,
                damaged,
                made,
                has_lost_make,
                modified_until_ns,
                changed_ns,
                begun,
            });
        }
        named.sort_unstable_by_key(|(position, ..)| *position);
        for (_, identity, file, step) in &named {
            plan.names.add(*identity, file, step);
        }
        plan.files.sort_unstable_by_key(|file| file.id);
        plan
    }
}
