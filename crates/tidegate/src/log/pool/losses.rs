//! What a log has lost: records that were acknowledged and are not whole, or not there at all. The
//! finished positions in later records say so.

use std::fmt;
use std::ops::Range;

use crate::log::pool::record::{Header, RecordKind};

/// Items of each kind that are kept; a log has more only where most of it is lost.
const KEPT_MAX: usize = 4096;

/// A record that was acknowledged and is not whole any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Damage {
    /// Of the record.
    pub position: u64,
    /// What it told.
    pub kind: RecordKind,
    /// First byte of the file or device that it is about.
    pub offset: u64,
    /// Bytes of the file or device that it is about.
    pub bytes: u64,
}

impl Damage {
    /// That of the record with this header.
    pub fn of(header: &Header) -> Self {
        let &Header { position, kind, offset, .. } = header;
        let is_zero = kind == RecordKind::Zero;
        let bytes = if is_zero { header.len } else { u64::from(header.payload_bytes) };
        Self { position, kind, offset, bytes }
    }

    /// Whether the operation of `header` came before, and changed some of the same bytes.
    pub(in crate::log) fn comes_after(&self, header: &Header) -> bool {
        let other = Self::of(header);
        matches!(other.kind, RecordKind::Write | RecordKind::Zero)
            && other.position < self.position
            && other.offset < self.offset.saturating_add(self.bytes)
            && self.offset < other.offset.saturating_add(other.bytes)
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the record at position {} of the log, ", self.position)?;
        match self.kind {
            RecordKind::Write | RecordKind::Zero => {
                write!(f, "{} bytes at offset {}", self.bytes, self.offset)
            }
            RecordKind::SetSize => write!(f, "a size of {} bytes", self.offset),
            RecordKind::Define => write!(f, "a definition"),
            RecordKind::Make => write!(f, "the whole file"),
            RecordKind::Name => write!(f, "a change of names"),
            RecordKind::Mark => write!(f, "a sync"),
            kind => write!(f, "a {kind:?}"),
        }
    }
}

/// What the log of a device has lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceLoss {
    /// A record that was acknowledged.
    Record {
        /// The record.
        damage: Damage,
        /// The newest earlier record of some of the same bytes: what comes back. None: what the
        /// backing has.
        older: Option<u64>,
    },
    /// Records that were acknowledged, of which not even a header is left.
    Bytes {
        /// Where they began.
        position: u64,
        /// How many bytes of the log they took.
        bytes: u64,
    },
}

impl fmt::Display for DeviceLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Record { damage, older } => {
                write!(f, "{damage}, was acknowledged and is damaged; without it ")?;
                match older {
                    Some(older) => write!(f, "that of position {older} comes back"),
                    None => write!(f, "what the backing has comes back"),
                }
            }
            Self::Bytes { position, bytes } => write!(
                f,
                "{bytes} bytes of the log from position {position} on were acknowledged and are lost, and of which \
                 blocks they told is not known"
            ),
        }
    }
}

/// What a scan has found so far that may be lost, or may never have been finished.
#[derive(Debug, Default)]
pub(in crate::log) struct Losses {
    /// All records below this position were finished once.
    finished: u64,
    holes: Vec<Range<u64>>,
    torn: Vec<Header>,
    /// The lowest position of what is kept no more.
    dropped_from: Option<u64>,
}

impl Losses {
    /// A record was found whose header is whole, behind the bytes of `hole`, which are none of a
    /// record.
    pub(in crate::log) fn found(&mut self, hole: Range<u64>, header: &Header) {
        if !hole.is_empty() {
            self.keep(hole.start, |losses| losses.holes.push(hole));
        }
        self.finished = self.finished.max(header.finished);
        if header.kind == RecordKind::Gap {
            self.excuse(header.aux);
        }
    }

    /// The payload of that record is not whole.
    pub(in crate::log) fn is_torn(&mut self, header: &Header) {
        self.keep(header.position, |losses| losses.torn.push(*header));
    }

    fn keep(&mut self, position: u64, keep: impl FnOnce(&mut Self)) {
        if self.holes.len().max(self.torn.len()) < KEPT_MAX {
            keep(self);
        } else {
            self.dropped_from.get_or_insert(position);
        }
    }

    /// Nothing was acknowledged of what is missing from `from` on.
    fn excuse(&mut self, from: u64) {
        self.holes.retain_mut(|hole| {
            hole.end = hole.end.min(from);
            !hole.is_empty()
        });
        self.torn.retain(|header| header.position < from);
        self.dropped_from = self.dropped_from.filter(|position| *position < from);
    }

    /// All records below this position were finished once; 0: no record says so.
    pub(in crate::log) fn finished(&self) -> u64 {
        self.finished
    }

    /// Where bytes of acknowledged records are, no header of which is left.
    pub(in crate::log) fn missing(&self) -> impl Iterator<Item = Range<u64>> {
        let holes = self.holes.iter().filter(|hole| hole.start < self.finished);
        holes.map(|hole| hole.start..hole.end.min(self.finished))
    }

    /// Acknowledged records whose payload is not what it was.
    pub(in crate::log) fn damaged(&self) -> impl Iterator<Item = &Header> {
        self.torn.iter().filter(|header| header.position < self.finished)
    }

    /// Records of which nobody can know whether they were acknowledged.
    pub(in crate::log) fn doubtful(&self) -> impl Iterator<Item = &Header> {
        self.torn.iter().filter(|header| header.position >= self.finished)
    }

    /// The first position of which nobody can know whether a record was acknowledged there; `end`
    /// is where the last record ends.
    pub(in crate::log) fn doubtful_from(&self, end: u64) -> u64 {
        let holes = self.holes.iter().map(|hole| hole.start);
        let all = holes.chain(self.torn.iter().map(|header| header.position));
        let doubtful = all.chain(self.dropped_from).filter(|position| *position >= self.finished);
        doubtful.min().unwrap_or(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(position: u64, finished: u64) -> Header {
        Header { position, file: 1, finished, ..Header::of(RecordKind::Write) }
    }

    /// First and last positions of what is missing.
    fn missing(losses: &Losses) -> Vec<(u64, u64)> {
        losses.missing().map(|it| (it.start, it.end)).collect()
    }

    #[test]
    fn a_hole_is_a_loss_only_below_a_finished_position() {
        let mut losses = Losses::default();
        losses.found(640..768, &record(768, 640));
        losses.is_torn(&record(768, 640));
        assert_eq!((losses.missing().count(), losses.damaged().count()), (0, 0));
        assert_eq!((losses.doubtful().count(), losses.doubtful_from(900)), (1, 640));
        losses.found(832..832, &record(832, 704));
        assert_eq!(missing(&losses), [(640, 704)]);
        losses.found(896..896, &record(896, 832));
        assert_eq!(missing(&losses), [(640, 768)]);
        assert_eq!(losses.damaged().map(|it| it.position).collect::<Vec<_>>(), [768]);
        assert_eq!(losses.doubtful_from(960), 960);
    }

    #[test]
    fn a_gap_excuses_what_is_missing_behind_its_start() {
        let mut losses = Losses::default();
        losses.found(64..256, &record(256, 0));
        losses.is_torn(&record(320, 0));
        let gap = Header { kind: RecordKind::Gap, aux: 128, ..record(512, 512) };
        losses.found(384..512, &gap);
        assert_eq!(missing(&losses), [(64, 128)]);
        assert_eq!(losses.damaged().count(), 0);
    }

    #[test]
    fn what_is_not_kept_is_in_doubt_still() {
        let mut losses = Losses::default();
        for n in 1..KEPT_MAX as u64 + 10 {
            losses.found(n * 128..n * 128 + 64, &record(n * 128 + 64, 0));
        }
        assert_eq!(losses.holes.len(), KEPT_MAX);
        assert_eq!(losses.doubtful_from(1 << 40), 128);
    }
}
