//! Finds the records between two positions of a log.
//!
//! Records are found by position: at each step of 64 bytes the scanner asks whether the word that
//! would be a record's position says this one. Where it does and the header's checksum holds, the
//! record's length is known and its payload can be checked; where not, there is a hole: the rest of
//! a lap, or what a writer reserved and never finished. Which holes are losses the finished
//! positions of later records tell ([`Losses`]).

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
    /// Records end within so many bytes of each lap.
    lap_bytes: u64,
    check_payloads: bool,
    torn: u64,
    unreadable_bytes: u64,
    /// Where the last record ends whose header was found.
    known_end: u64,
    pub(in crate::log) losses: Losses,
    read_once: Option<ReadOnce<'a>>,
    /// What is before this position was read.
    read_until: u64,
}

impl<'a> Scanner<'a> {
    /// The records from `start` to `end`, each one checked whole. At most one lap is looked at.
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

    /// A scanner of records that are known to be whole, because their writers have finished them:
    /// payloads are not read.
    pub fn of_finished(pool: &'a LogPool, start: u64, end: u64) -> Self {
        Self { check_payloads: false, ..Self::new(pool, start, end) }
    }

    /// This scanner, of a ring of which only the first `lap_bytes` have space in the file: a look
    /// behind them could allocate it.
    #[must_use]
    pub(in crate::log) fn in_laps_of(self, lap_bytes: u64) -> Self {
        Self { lap_bytes, ..self }
    }

    /// This scanner, with little memory: for a caller that does not read the records again soon.
    #[must_use]
    pub(in crate::log) fn reading_once(self) -> Self {
        Self { read_once: Some(ReadOnce::new(self.pool.region())), ..self }
    }

    /// Where the scanner is.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Records so far whose header is there and whose payload is not.
    pub fn torn(&self) -> u64 {
        self.torn
    }

    /// The first position of which nobody can know whether a record was acknowledged there.
    pub fn doubtful_from(&self) -> u64 {
        self.losses.doubtful_from(self.known_end)
    }

    /// Bytes so far that could not be read.
    pub fn unreadable_bytes(&self) -> u64 {
        self.unreadable_bytes
    }

    /// Needs no more what the caller has seen.
    fn let_go(&mut self) {
        let Some(read_once) = &mut self.read_once else { return };
        let ring_bytes = self.pool.ring_bytes();
        let in_lap = ring_bytes - self.read_until % ring_bytes;
        let len = (self.position - self.read_until).min(in_lap);
        read_once.has_read(self.pool.region_offset(self.read_until), len);
        self.read_until = self.position;
    }

    /// The whole record at the present position, if there is one; moves on.
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
