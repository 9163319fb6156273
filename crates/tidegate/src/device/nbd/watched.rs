//! The watched sectors of an export. They show that another export answers after a reconnection.
//!
//! The device reads the sectors when it opens the export, and follows the writes to them. Each
//! reconnection reads them again. A sector that has none of its possible values belongs to another
//! image: its server was started with a wrong one, with an older copy, or with an empty one.
//!
//! Invariants:
//! 1. The possible values of a sector are that of the last flush, and all that were written since:
//!    a server that dies may lose each write that is not flushed.
//! 2. A flush removes older values of a sector only if no write to the sector was under way when
//!    the flush was sent.
//! 3. A discard, a failed write, and two writes to a sector at a time leave a sector whose value is
//!    not known. It is not compared, until a later write is flushed.
//! 4. What a reconnection finds in a sector is its newest value, unless a write to it is under way,
//!    which is sent again. A flush covers what the new server has, not a write that was lost. Where
//!    the value may be one that is not known (3), it stays so: the next read may find another.

use std::collections::BTreeMap;
use std::ops::Range;

use super::error::NbdError;
use crate::device::{BLOCK_BYTES_MIN, OwnedOperation};

/// Bytes of a sector: the smallest block, so that a write covers whole sectors.
const SECTOR_BYTES: u64 = BLOCK_BYTES_MIN as u64;
/// Most possible values of a sector. More of them count as any value.
const VALUES_MAX: usize = 64;

/// Bytes of an export, with their offset.
pub type Part = (u64, Vec<u8>);

/// What a device reads after a reconnection.
pub struct Watch {
    /// Returns the ranges of bytes to read of an export, for its size. They begin and end at a
    /// block.
    pub ranges: fn(u64) -> Vec<Range<u64>>,
    /// Describes the content of an export by these bytes, such as by a UUID.
    pub describe: fn(&[Part]) -> String,
}

/// A possible value of a sector.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Value {
    Any,
    Bytes(Box<[u8]>),
}

/// The possible values of a sector.
#[derive(Debug, Default)]
struct Sector {
    /// The last one was written last.
    values: Vec<Value>,
    /// Number of writes under way.
    open: u32,
    /// Number of values that the flush in flight removes.
    replaced: usize,
}

/// The watched sectors by their offsets.
#[derive(Default)]
pub(super) struct Watched {
    sectors: BTreeMap<u64, Sector>,
}

impl Watched {
    /// Makes the watched sectors of an export, which has `areas`: offsets and bytes.
    pub(super) fn new(areas: &[Part]) -> Self {
        let sector =
            |bytes: &[u8]| Sector { values: vec![Value::Bytes(bytes.into())], ..Sector::default() };
        let sectors = sectors_of(areas).map(|(offset, bytes)| (offset, sector(bytes))).collect();
        Self { sectors }
    }

    /// Notes the begin of `operation`.
    pub(super) fn begin(&mut self, operation: &OwnedOperation) {
        for (offset, sector) in self.changed_by(operation) {
            sector.add(value_at(operation, offset));
            if sector.open > 0 {
                sector.add(Value::Any);
            }
            sector.open += 1;
        }
    }

    /// Notes the end of `operation`.
    pub(super) fn end(&mut self, operation: &OwnedOperation, is_ok: bool) {
        for (_, sector) in self.changed_by(operation) {
            sector.open = sector.open.saturating_sub(1);
            if !is_ok {
                sector.add(Value::Any);
            }
        }
    }

    /// Notes that a flush is sent.
    pub(super) fn flush_begins(&mut self) {
        for sector in self.sectors.values_mut() {
            let is_at_rest = sector.open == 0;
            sector.replaced = if is_at_rest { sector.values.len().saturating_sub(1) } else { 0 };
        }
    }

    /// Notes that the flush in flight has succeeded.
    pub(super) fn flush_succeeds(&mut self) {
        for sector in self.sectors.values_mut() {
            sector.values.drain(..sector.replaced.min(sector.values.len()));
            sector.replaced = 0;
        }
    }

    /// Compares the export, which has `areas` after a reconnection, and notes what it has.
    ///
    /// # Errors
    /// Fails as [`NbdError::Unfit`] if it is another one.
    pub(super) fn reconnect(
        &mut self,
        areas: &[Part],
        describe: fn(&[Part]) -> String,
    ) -> Result<(), NbdError> {
        self.compare(areas, describe)?;
        for (offset, bytes) in sectors_of(areas) {
            if let Some(sector) = self.sectors.get_mut(&offset) {
                sector.found(bytes);
            }
        }
        Ok(())
    }

    fn compare(&self, areas: &[Part], describe: fn(&[Part]) -> String) -> Result<(), NbdError> {
        let differs = |(offset, bytes): &(u64, &[u8])| {
            self.sectors.get(offset).is_some_and(|sector| !sector.may_be(bytes))
        };
        let Some((offset, _)) = sectors_of(areas).find(differs) else { return Ok(()) };
        let found = describe(areas);
        Err(NbdError::Unfit(format!(
            "the export is another one after the reconnection: found {found}, and the sector at \
             offset {offset} is not as it was last read or written there; start its server with \
             the image of before, or stop this one and serve the pool again, which compares the \
             backing"
        )))
    }

    /// Returns the sectors that `operation` changes.
    fn changed_by(
        &mut self,
        operation: &OwnedOperation,
    ) -> impl Iterator<Item = (u64, &mut Sector)> + use<'_> {
        let (offset, len) = match operation {
            OwnedOperation::Write { offset, buffer, .. } => (*offset, buffer.data().len() as u64),
            OwnedOperation::WriteZeroes { offset, len, .. }
            | OwnedOperation::Discard { offset, len } => (*offset, *len),
            _ => (0, 0),
        };
        let range = offset..offset.saturating_add(len);
        self.sectors.range_mut(range).map(|(offset, sector)| (*offset, sector))
    }
}

impl Sector {
    fn add(&mut self, value: Value) {
        if self.values.last() == Some(&value) {
            return;
        }
        if self.values.len() >= VALUES_MAX {
            (self.values, self.replaced) = (vec![Value::Any], 0);
        }
        self.values.push(value);
    }

    /// Notes that a reconnection found `bytes`, one of the possible values.
    fn found(&mut self, bytes: &[u8]) {
        let newest = Value::Bytes(bytes.into());
        if self.open > 0 || self.values.last() == Some(&newest) {
            return;
        }
        let is_known = !self.values.contains(&Value::Any);
        self.add(if is_known { newest } else { Value::Any });
    }

    fn may_be(&self, bytes: &[u8]) -> bool {
        self.values.iter().any(|value| match value {
            Value::Any => true,
            Value::Bytes(known) => **known == *bytes,
        })
    }
}

/// Returns the bytes that `operation` leaves in the sector at `offset`.
fn value_at(operation: &OwnedOperation, offset: u64) -> Value {
    match operation {
        OwnedOperation::Write { offset: first, buffer, .. } => {
            let at = usize::try_from(offset - first).unwrap_or(usize::MAX);
            let end = at.saturating_add(BLOCK_BYTES_MIN as usize);
            buffer.data().get(at..end).map_or(Value::Any, |bytes| Value::Bytes(bytes.into()))
        }
        OwnedOperation::WriteZeroes { .. } => {
            Value::Bytes([0; BLOCK_BYTES_MIN as usize].as_slice().into())
        }
        _ => Value::Any,
    }
}

/// Returns the whole sectors of `areas`, with their offsets.
fn sectors_of(areas: &[Part]) -> impl Iterator<Item = (u64, &[u8])> {
    areas.iter().flat_map(|(offset, bytes)| {
        let sectors = bytes.chunks_exact(BLOCK_BYTES_MIN as usize);
        (0..).zip(sectors).map(move |(index, sector)| (offset + index * SECTOR_BYTES, sector))
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::device::{IoBuffer, WriteFlags, ZeroFlags};

    fn sector(byte: u8) -> Vec<u8> {
        vec![byte; BLOCK_BYTES_MIN as usize]
    }

    /// Returns whether the export may be the one with `bytes` in its sectors.
    fn may_be(watched: &Watched, bytes: &[u8]) -> bool {
        let areas = bytes.iter().flat_map(|byte| sector(*byte)).collect();
        watched.compare(&[(0, areas)], |_| "it".into()).is_ok()
    }

    fn write(first: u64, bytes: &[u8]) -> OwnedOperation {
        let mut buffer = IoBuffer::new(bytes.len() * BLOCK_BYTES_MIN as usize);
        let data: Vec<u8> = bytes.iter().flat_map(|byte| sector(*byte)).collect();
        buffer.data_mut().copy_from_slice(&data);
        let (offset, flags) = (first * SECTOR_BYTES, WriteFlags::default());
        OwnedOperation::Write { offset, buffer, flags }
    }

    fn done(watched: &mut Watched, operation: &OwnedOperation) {
        watched.begin(operation);
        watched.end(operation, true);
    }

    fn flush(watched: &mut Watched) {
        watched.flush_begins();
        watched.flush_succeeds();
    }

    #[test]
    fn another_image_is_noticed_and_an_emptied_one() {
        let watched = Watched::new(&[(0, [sector(1), sector(2)].concat())]);
        assert!(may_be(&watched, &[1, 2]));
        assert!(!may_be(&watched, &[1, 3]) && !may_be(&watched, &[0, 0]));
        let areas = [(0, [sector(1), sector(3)].concat())];
        let error = watched.compare(&areas, |_| "ext 77".into()).unwrap_err().to_string();
        for part in ["found ext 77", "offset 512", "start its server"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_server_that_dies_may_lose_what_is_not_flushed_and_nothing_else() {
        let mut watched = Watched::new(&[(0, sector(1))]);
        done(&mut watched, &write(0, &[2]));
        assert!(may_be(&watched, &[1]) && may_be(&watched, &[2]));
        watched.flush_begins();
        done(&mut watched, &write(0, &[3]));
        watched.flush_succeeds();
        let found = [1, 2, 3].map(|byte| may_be(&watched, &[byte]));
        assert_eq!(found, [false, true, true]);
        flush(&mut watched);
        assert!(!may_be(&watched, &[2]) && may_be(&watched, &[3]));
    }

    #[test]
    fn a_write_under_way_is_not_flushed() {
        let mut watched = Watched::new(&[(0, sector(1))]);
        let under_way = write(0, &[2]);
        watched.begin(&under_way);
        flush(&mut watched);
        assert!(may_be(&watched, &[1]) && may_be(&watched, &[2]));
        watched.end(&under_way, true);
        flush(&mut watched);
        assert!(!may_be(&watched, &[1]));
    }

    #[test]
    fn zeroes_are_known_and_what_a_discard_or_a_failure_leaves_is_not() {
        let (offset, len, flags) = (0, SECTOR_BYTES, ZeroFlags::default());
        let mut watched = Watched::new(&[(0, sector(1))]);
        done(&mut watched, &OwnedOperation::WriteZeroes { offset, len, flags });
        flush(&mut watched);
        assert!(may_be(&watched, &[0]) && !may_be(&watched, &[1]));
        done(&mut watched, &OwnedOperation::Discard { offset, len });
        flush(&mut watched);
        assert!(may_be(&watched, &[9]));
        done(&mut watched, &write(0, &[2]));
        flush(&mut watched);
        assert!(!may_be(&watched, &[9]));
        let failed = write(0, &[3]);
        watched.begin(&failed);
        watched.end(&failed, false);
        flush(&mut watched);
        assert!(may_be(&watched, &[9]));
    }

    #[test]
    fn a_flush_covers_what_the_next_server_has_and_not_a_lost_write() {
        let mut watched = Watched::new(&[(0, sector(1))]);
        done(&mut watched, &write(0, &[2]));
        watched.reconnect(&[(0, sector(1))], |_| "it".into()).unwrap();
        flush(&mut watched);
        assert!(may_be(&watched, &[1]) && !may_be(&watched, &[2]));
    }

    #[test]
    fn what_a_discard_left_is_not_known_because_it_was_read_once() {
        let (offset, len) = (0, SECTOR_BYTES);
        let discarded = || {
            let mut watched = Watched::new(&[(0, sector(1))]);
            done(&mut watched, &OwnedOperation::Discard { offset, len });
            watched
        };
        let mut watched = discarded();
        watched.reconnect(&[(0, sector(0))], |_| "it".into()).unwrap();
        flush(&mut watched);
        assert!(may_be(&watched, &[9]));
        for (found, is_compared) in [(0, false), (2, true)] {
            let mut watched = discarded();
            done(&mut watched, &write(0, &[2]));
            watched.reconnect(&[(0, sector(found))], |_| "it".into()).unwrap();
            flush(&mut watched);
            assert_eq!(may_be(&watched, &[9]), !is_compared, "found {found}");
        }
    }

    #[derive(Debug, Clone)]
    enum Act {
        Write { first: u64, bytes: Vec<u8> },
        End { which: usize },
        Flush,
        Die { kept: u64 },
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            4 => (0..3_u64, proptest::collection::vec(any::<u8>(), 1..3))
                .prop_map(|(first, bytes)| Act::Write { first, bytes }),
            4 => (0..8_usize).prop_map(|which| Act::End { which }),
            2 => Just(Act::Flush),
            1 => any::<u64>().prop_map(|kept| Act::Die { kept }),
        ]
    }

    proptest! {
        /// Whatever writes that are not flushed each server keeps, its export is known.
        #[test]
        fn the_own_export_is_never_another_one(acts in proptest::collection::vec(act(), 0..60)) {
            let mut watched = Watched::new(&[(0, vec![0; 4 * BLOCK_BYTES_MIN as usize])]);
            // The durable bytes, and the writes that are not durable: sector, byte, is it open.
            let mut durable = [0_u8; 4];
            let mut open: Vec<(u64, Vec<u8>)> = Vec::new();
            let mut volatile: Vec<(usize, u8)> = Vec::new();
            for act in acts {
                match act {
                    Act::Write { first, bytes } => {
                        watched.begin(&write(first, &bytes));
                        open.push((first, bytes));
                    }
                    Act::End { which } if !open.is_empty() => {
                        let (first, bytes) = open.remove(which % open.len());
                        watched.end(&write(first, &bytes), true);
                        volatile.extend((usize::try_from(first).unwrap()..).zip(bytes));
                    }
                    Act::End { .. } => {}
                    Act::Flush => {
                        flush(&mut watched);
                        volatile.drain(..).for_each(|(at, byte)| durable[at] = byte);
                    }
                    Act::Die { kept } => {
                        let under_way = open.iter().flat_map(|(first, bytes)| {
                            (usize::try_from(*first).unwrap()..).zip(bytes.iter().copied())
                        });
                        let mut found = durable;
                        let all = volatile.iter().copied().chain(under_way);
                        for (index, (at, byte)) in all.enumerate() {
                            if kept >> (index % 64) & 1 == 1 {
                                found[at] = byte;
                            }
                        }
                        let bytes = found.iter().flat_map(|byte| sector(*byte)).collect();
                        let again = watched.reconnect(&[(0, bytes)], |_| "it".into());
                        prop_assert!(again.is_ok(), "{:?}", found);
                        // The open writes are sent to the next server.
                        durable = found;
                        volatile.clear();
                    }
                }
            }
        }
    }
}
