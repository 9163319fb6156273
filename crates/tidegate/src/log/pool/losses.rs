//! Losses of a log: acknowledged records that are damaged, or missing altogether. The finished
//! positions in later records prove that they were acknowledged.

use std::fmt;
use std::ops::Range;

use crate::log::pool::record::{Header, RecordKind};

/// Items kept per kind. A log has more only if most of its records are lost.
const KEPT_MAX: usize = 4096;

/// An acknowledged record that is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Damage {
    /// Position of the record.
    pub position: u64,
    /// Operation of the record.
    pub kind: RecordKind,
    /// First byte of the file or device that the record changes.
    pub offset: u64,
    /// Number of bytes of the file or device that the record changes.
    pub bytes: u64,
}

impl Damage {
    /// Returns the damage of the record with this header.
    pub fn of(header: &Header) -> Self {
        let &Header { position, kind, offset, .. } = header;
        let is_zero = kind == RecordKind::Zero;
        let bytes = if is_zero { header.len } else { u64::from(header.payload_bytes) };
        Self { position, kind, offset, bytes }
    }

    /// Returns whether the operation of `header` came before and changed some of the same bytes.
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

/// A loss in the log of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceLoss {
    /// A record that was acknowledged.
    Record {
        /// The record.
        damage: Damage,
        /// The newest earlier record that changed some of the same bytes: its data comes back.
        /// `None`: the data of the backing comes back.
        older: Option<u64>,
    },
    /// Acknowledged records that have not even a header left.
    Bytes {
        /// Position where they began.
        position: u64,
        /// Bytes of the log that they occupied.
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

/// Records that a scan has found to be lost, or perhaps never finished.
#[derive(Debug, Default)]
pub(in crate::log) struct Losses {
    /// All records below this position were finished.
    finished: u64,
    holes: Vec<Range<u64>>,
    torn: Vec<Header>,
    /// The lowest position of an item that was dropped because [`KEPT_MAX`] items are kept.
    dropped_from: Option<u64>,
}

impl Losses {
    /// Notes a record with a whole header, after the bytes of `hole`, which belong to no record.
    pub(in crate::log) fn found(&mut self, hole: Range<u64>, header: &Header) {
        if !hole.is_empty() {
            self.keep(hole.start, |losses| losses.holes.push(hole));
        }
        self.finished = self.finished.max(header.finished);
        if header.kind == RecordKind::Gap {
            self.excuse(header.aux);
        }
    }

    /// Notes that the payload of the record is torn.
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

    /// Forgets all losses from `from` on: none of the missing records was acknowledged.
    fn excuse(&mut self, from: u64) {
        self.holes.retain_mut(|hole| {
            hole.end = hole.end.min(from);
            !hole.is_empty()
        });
        self.torn.retain(|header| header.position < from);
        self.dropped_from = self.dropped_from.filter(|position| *position < from);
    }

    /// Returns the position below which all records were finished; 0 if no record has one.
    pub(in crate::log) fn finished(&self) -> u64 {
        self.finished
    }

    /// Iterates over the positions of acknowledged records that have no header left.
    pub(in crate::log) fn missing(&self) -> impl Iterator<Item = Range<u64>> {
        let holes = self.holes.iter().filter(|hole| hole.start < self.finished);
        holes.map(|hole| hole.start..hole.end.min(self.finished))
    }

    /// Iterates over the acknowledged records whose payload is damaged.
    pub(in crate::log) fn damaged(&self) -> impl Iterator<Item = &Header> {
        self.torn.iter().filter(|header| header.position < self.finished)
    }

    /// Iterates over the torn records that may or may not have been acknowledged.
    pub(in crate::log) fn doubtful(&self) -> impl Iterator<Item = &Header> {
        self.torn.iter().filter(|header| header.position >= self.finished)
    }

    /// Returns the first position where an acknowledged record may be lost. `end` ends the last
    /// one.
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

    /// Returns start and end of each missing range.
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
