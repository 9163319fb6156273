//! Finds the records between two positions of a log.
//!
//! The scanner finds records by their position: every 64 bytes it compares the word that would be a
//! record's position with its own. If they match and the header's checksum holds, the record's
//! length is known and its payload can be checked. If not, there is a hole: the rest of a lap, or
//! space that a writer reserved and never finished. The finished positions of later records tell
//! the holes that are losses ([`Losses`]).

use crate::log::pool::LogPool;
use crate::log::pool::layout::RECORD_ALIGN_BYTES;
use crate::log::pool::losses::Losses;
use crate::log::pool::record::{Header, RecordKind};
use crate::pmem::{PmemError, ReadOnce};

/// An iterator over the whole records from one position to another, in order.
pub struct Scanner<'a> {
    pool: &'a LogPool,
    position: u64,
    end: u64,
    /// Records end within this many bytes of each lap.
    lap_bytes: u64,
    check_payloads: bool,
    torn: u64,
    unreadable_bytes: u64,
    /// End of the last record whose header was found.
    known_end: u64,
    pub(in crate::log) losses: Losses,
    read_once: Option<ReadOnce<'a>>,
    /// Everything before this position was read.
    read_until: u64,
}

impl<'a> Scanner<'a> {
    /// Makes a scanner of the records from `start` to `end`, at most a lap. It checks each payload.
    pub fn new(pool: &'a LogPool, start: u64, end: u64) -> Self {
        let end = end.min(start.saturating_add(pool.ring_bytes()));
        let position = start.next_multiple_of(RECORD_ALIGN_BYTES);
        let lap_bytes = pool.ring_bytes();
        Self {
            pool,
            position,
            end,
            lap_bytes,
            check_payloads: true,
            torn: 0,
            unreadable_bytes: 0,
            known_end: position,
            losses: Losses::default(),
            read_once: None,
            read_until: position,
        }
    }

    /// Makes a scanner of records that are known to be whole because their writers have finished
    /// them. It does not read payloads.
    pub fn of_finished(pool: &'a LogPool, start: u64, end: u64) -> Self {
        Self { check_payloads: false, ..Self::new(pool, start, end) }
    }

    /// Restricts the scanner to the first `lap_bytes` of each lap, the only part of the ring that
    /// has space in the file. A read behind that part could allocate space.
    #[must_use]
    pub(in crate::log) fn in_laps_of(self, lap_bytes: u64) -> Self {
        Self { lap_bytes, ..self }
    }

    /// Releases the memory behind the scanner, for a caller that does not read the records again.
    #[must_use]
    pub(in crate::log) fn reading_once(self) -> Self {
        Self { read_once: Some(ReadOnce::new(self.pool.region())), ..self }
    }

    /// Returns the scanner's position.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns the number of records so far that have a header and a torn payload.
    pub fn torn(&self) -> u64 {
        self.torn
    }

    /// Returns the first position where an acknowledged record may have been lost.
    pub fn doubtful_from(&self) -> u64 {
        self.losses.doubtful_from(self.known_end)
    }

    /// Returns the number of bytes so far that could not be read.
    pub fn unreadable_bytes(&self) -> u64 {
        self.unreadable_bytes
    }

    /// Releases the memory of records that the caller has seen.
    fn let_go(&mut self) {
        let Some(read_once) = &mut self.read_once else { return };
        let ring_bytes = self.pool.ring_bytes();
        let in_lap = ring_bytes - self.read_until % ring_bytes;
        let len = (self.position - self.read_until).min(in_lap);
        read_once.has_read(self.pool.region_offset(self.read_until), len);
        self.read_until = self.position;
    }

    /// Moves past the current position. Returns the whole record there, if there is one.
    fn step(&mut self) -> Result<Option<Header>, PmemError> {
        let ring_bytes = self.pool.ring_bytes();
        if self.position % ring_bytes >= self.lap_bytes {
            self.position += ring_bytes - self.position % ring_bytes;
            return Ok(None);
        }
        let Some(header) = self.pool.read_header(self.position)? else {
            self.position += RECORD_ALIGN_BYTES;
            return Ok(None);
        };
        self.losses.found(self.known_end..self.position, &header);
        self.position += header.record_bytes();
        self.known_end = self.position;
        if header.kind == RecordKind::Gap {
            return Ok(None);
        }
        if !self.check_payloads || self.pool.is_whole(&header)? {
            return Ok(Some(header));
        }
        self.torn += 1;
        self.losses.is_torn(&header);
        Ok(None)
    }
}

impl Iterator for Scanner<'_> {
    type Item = Header;

    fn next(&mut self) -> Option<Header> {
        while self.position < self.end {
            self.let_go();
            let before = self.position;
            match self.step() {
                Ok(Some(header)) => return Some(header),
                Ok(None) => {}
                Err(_) => {
                    self.position = self.position.max(before + RECORD_ALIGN_BYTES);
                    self.unreadable_bytes += self.position - before;
                    self.known_end = self.position;
                }
            }
        }
        None
    }
}
