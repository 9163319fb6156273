//! Verifies the records of a log for `tidegate check`.
//!
//! One pass looks at each record. If some are torn, a second pass finds out which of these were
//! acknowledged, and which older records take their place. Memory grows only with the number of
//! files.

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use super::recover::Failure;
use super::{Damage, DeviceLoss, LogError, LogPool, Scanner};
use crate::log::pool::layout::PATH_BYTES_MAX;
use crate::log::pool::names::{HEAD_BYTES_MAX, Make, NameRecord};
use crate::log::pool::record::{Definition, FileHandle, Header, RecordKind};
use crate::size::Size;
use crate::tier::counted;

/// Findings whose text is kept; further ones are only counted.
const KEPT_MAX: usize = 1000;

type Result<T> = std::result::Result<T, LogError>;

/// The result of a check; the keys are a contract with scripts.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    pub(super) records: u64,
    /// Bytes of files or of a device that the records hold.
    pub(super) data_bytes: u64,
    pub(super) files: u64,
    /// Records that are not whole, without evidence that they were acknowledged.
    pub(super) torn_records: u64,
    pub(super) unreadable_bytes: u64,
    /// Number of faults.
    pub(super) faults: u64,
    /// A line each.
    pub(super) findings: Vec<String>,
    /// Superblocks that repair wrote anew.
    pub(super) repaired_superblocks: usize,
    /// Headers of the log that repair wrote anew.
    pub(super) repaired_headers: usize,
    /// Faults of tail, limit and session that repair repaired.
    pub(super) repaired_positions: usize,
    /// Headers of records that repair wrote anew.
    pub(super) repaired_records: usize,
    /// From this position on a missing record would go unnoticed; 0: anywhere in the log. `None` if
    /// every loss would be noticed, or the log was closed.
    pub(super) doubtful_from: Option<u64>,
    /// Advice about the faults; `None` without faults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) advice: Option<&'static str>,
}

impl Report {
    /// Returns the report as lines of text.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = self.findings.clone();
        let restored = [
            ("superblocks", self.repaired_superblocks),
            ("headers of the log", self.repaired_headers),
            ("positions of the log", self.repaired_positions),
            ("headers of records", self.repaired_records),
        ];
        let restored = restored.iter().filter(|(_, number)| *number > 0);
        lines.extend(restored.map(|(what, number)| format!("restored {what}: {number}")));
        lines.push(format!(
            "{} about {} with {} of data; {} never finished, which recovery passes over",
            counted(self.records, "whole record"),
            counted(self.files, "file"),
            counted(self.data_bytes, "byte"),
            self.torn_records
        ));
        lines.extend(self.doubtful_from.map(|position| match position {
            0 => "no record tells which ones before it were acknowledged: one that is gone is not missed".into(),
            position => format!(
                "nothing tells whether records from position {position} on were acknowledged, the last ones: one of \
                 these that is gone is not missed"
            ),
        }));
        lines
    }
}

/// The state of the file that an id names.
#[derive(Debug, Default)]
struct File {
    identity: u64,
    is_covered: bool,
    has_steps: bool,
    data_bytes: u64,
}

/// Looks at records one by one.
struct Look<'a> {
    pool: &'a LogPool,
    repair: bool,
    found: Report,
    files: HashMap<u64, File>,
    newest: HashMap<u64, u64>,
    is_of_device: bool,
}

/// Verifies all records between tail and limit; `repair` writes damaged headers anew.
///
/// # Errors
/// [`LogError::Pmem`].
pub(super) fn check_records(pool: &LogPool, repair: bool) -> Result<Report> {
    let (files, newest) = (HashMap::new(), HashMap::new());
    let found = Report::default();
    let mut look = Look { pool, repair, found, files, newest, is_of_device: false };
    let mut scanner = Scanner::new(pool, pool.tail()?, pool.limit()?).reading_once();
    let mut end = 0;
    for header in scanner.by_ref() {
        look.see(&header)?;
        end = header.position + header.record_bytes();
    }
    look.judge_torn(&scanner)?;
    let finished = scanner.losses.finished();
    look.found.doubtful_from = (end > finished && !pool.is_closed()?).then_some(finished);
    look.found.unreadable_bytes = scanner.unreadable_bytes();
    if scanner.unreadable_bytes() > 0 {
        let lost = Size { bytes: scanner.unreadable_bytes() };
        look.fault(|| format!("{lost} of the log cannot be read"));
    }
    Ok(look.finish())
}

impl Look<'_> {
    fn fault(&mut self, text: impl FnOnce() -> String) {
        self.found.faults += 1;
        if self.found.findings.len() < KEPT_MAX {
            self.found.findings.push(text());
        }
    }

    /// Verifies a whole record, and counts it.
    fn see(&mut self, header: &Header) -> Result<()> {
        self.found.records += 1;
        let position = header.position;
        if self.pool.is_changed(header)? {
            if self.repair {
                self.pool.restore_record(header)?;
                self.found.repaired_records += 1;
            } else {
                self.fault(|| {
                    format!(
                        "one bit of the header of the record at position {position} changed; it is read as it was"
                    )
                });
            }
        }
        if !self.is_understood(header)? {
            self.fault(|| format!("the record at position {position} cannot be understood"));
        }
        self.count(header);
        Ok(())
    }

    /// Returns whether the payload is sound for its kind of record.
    fn is_understood(&mut self, header: &Header) -> Result<bool> {
        match header.kind {
            RecordKind::Define => {
                let payload = self.payload(header)?;
                let Some(definition) = Definition::decode(&payload) else { return Ok(false) };
                Ok(self.define(header, &definition))
            }
            RecordKind::Make => Ok(Make::decode(&self.payload(header)?).is_some()),
            RecordKind::Name => Ok(NameRecord::decode(&self.payload(header)?).is_some()),
            RecordKind::Write | RecordKind::Zero => {
                let end = header.offset.checked_add(Damage::of(header).bytes);
                Ok(end.is_some_and(|end| i64::try_from(end).is_ok()))
            }
            _ => Ok(true),
        }
    }

    /// Returns the first bytes of a payload, enough to decode it.
    fn payload(&self, header: &Header) -> Result<Vec<u8>> {
        const { assert!(PATH_BYTES_MAX < HEAD_BYTES_MAX) };
        let mut payload = vec![0; (header.payload_bytes as usize).min(HEAD_BYTES_MAX)];
        self.pool.read_payload(header, 0, &mut payload)?;
        Ok(payload)
    }

    /// Notes a definition. Returns whether earlier definitions gave the id to the same file.
    fn define(&mut self, header: &Header, definition: &Definition<'_>) -> bool {
        self.is_of_device |= definition.handle == FileHandle::NONE;
        self.newest.insert(definition.identity, header.file);
        let file = self.files.entry(header.file).or_default();
        let is_same = file.identity == 0 || file.identity == definition.identity;
        if definition.starts {
            *file = File::default();
        }
        file.identity = definition.identity;
        file.is_covered |= definition.covered;
        is_same
    }

    fn count(&mut self, header: &Header) {
        let file = self.files.entry(header.file).or_default();
        match header.kind {
            RecordKind::Write | RecordKind::SetSize | RecordKind::Zero => {
                file.has_steps = true;
                file.data_bytes += u64::from(header.payload_bytes);
            }
            RecordKind::Make => {
                file.has_steps = true;
                file.is_covered = true;
                file.data_bytes = header.payload_bytes.into();
            }
            RecordKind::End => *file = File { identity: file.identity, ..File::default() },
            _ => {}
        }
    }

    /// Reports missing records, and torn ones that were acknowledged or may have been.
    fn judge_torn(&mut self, scanner: &Scanner<'_>) -> Result<()> {
        let mut torn: Vec<Torn> = scanner.losses.damaged().map(|it| Torn::new(it, true)).collect();
        torn.extend(scanner.losses.doubtful().map(|it| Torn::new(it, false)));
        if !torn.is_empty() {
            self.look_around(&mut torn)?;
        }
        let is_of_device = self.is_of_device;
        for lost in scanner.losses.missing() {
            let (position, bytes) = (lost.start, lost.end - lost.start);
            self.fault(|| {
                if is_of_device {
                    DeviceLoss::Bytes { position, bytes }.to_string()
                } else {
                    Failure::Missing { position, bytes }.to_string()
                }
            });
        }
        for torn in torn {
            let is_off = !torn.was_acknowledged && self.pool.is_one_bit_off(&torn.header)?;
            if torn.was_acknowledged {
                self.fault(|| torn.describe(is_of_device));
            } else if is_off && !torn.is_over {
                let damage = Damage::of(&torn.header);
                self.fault(|| {
                    format!(
                        "{damage}, differs by one bit from its checksum: it was changed, or never finished, which nothing \
                         tells; without it an older version comes back"
                    )
                });
            } else {
                self.found.torn_records += 1;
            }
        }
        Ok(())
    }

    /// Judges torn records by the whole records of their files.
    fn look_around(&self, torn: &mut [Torn]) -> Result<()> {
        let positions: HashSet<u64> = torn.iter().map(|it| it.header.position).collect();
        let files: HashSet<u64> = torn.iter().map(|it| it.header.file).collect();
        let all = Scanner::of_finished(self.pool, self.pool.tail()?, self.pool.limit()?);
        for header in all.reading_once() {
            if positions.contains(&header.position) || !files.contains(&header.file) {
                continue;
            }
            let path = if header.kind == RecordKind::Define {
                let payload = self.payload(&header)?;
                Definition::decode(&payload).map(|it| (it.starts, it.path.to_vec()))
            } else {
                None
            };
            let of_it = torn.iter_mut().filter(|it| it.header.file == header.file);
            of_it.for_each(|it| it.see(&header, path.as_ref(), self.is_of_device));
        }
        Ok(())
    }

    fn finish(mut self) -> Report {
        let newest = &self.newest;
        let counts = self.files.iter().filter(|(id, file)| {
            let is_newest = newest.get(&file.identity) == Some(id);
            file.has_steps && is_newest && (file.is_covered || self.is_of_device)
        });
        let data_bytes = counts.clone().map(|(_, file)| file.data_bytes).sum();
        self.found.files = if self.is_of_device { 0 } else { counts.count() as u64 };
        self.found.data_bytes = data_bytes;
        self.found
    }
}

/// A record that is not whole.
struct Torn {
    header: Header,
    was_acknowledged: bool,
    /// A later record says that it does not count.
    is_over: bool,
    path: Option<Vec<u8>>,
    older: Option<u64>,
}

impl Torn {
    fn new(header: &Header, was_acknowledged: bool) -> Self {
        Self { header: *header, was_acknowledged, is_over: false, path: None, older: None }
    }

    /// Takes in another record of the file, with `starts` and the path if it is a definition.
    fn see(&mut self, other: &Header, definition: Option<&(bool, Vec<u8>)>, is_of_device: bool) {
        if let Some((_, path)) = definition.filter(|(_, path)| !path.is_empty()) {
            self.path = Some(path.clone());
        }
        if Damage::of(&self.header).comes_after(other) {
            self.older = Some(other.position);
        }
        if other.position < self.header.position {
            return;
        }
        match other.kind {
            RecordKind::End => self.is_over = true,
            RecordKind::Void => self.is_over |= other.aux == self.header.position,
            RecordKind::Define if definition.is_some_and(|(starts, _)| *starts) => {
                self.is_over = true;
            }
            // Records of a file are appended under its lock, each durable before the next.
            _ => self.was_acknowledged |= !is_of_device && !self.is_over,
        }
    }

    /// Describes the loss in the words of recovery.
    fn describe(&self, is_of_device: bool) -> String {
        let damage = Damage::of(&self.header);
        if is_of_device {
            return DeviceLoss::Record { damage, older: self.older }.to_string();
        }
        let path = self.path.as_ref().map_or("a file".into(), |it| String::from_utf8_lossy(it));
        Failure::Damaged { path: path.into_owned(), damage }.to_string()
    }
}
